# What is promised of the gateway's cost is judged by the rounds of one run, each against its own neighbours.

from __future__ import annotations

from benchmarks.gateway_goals import goal_lines
from benchmarks.measured import Measured


def measured(server: str, number: int, *, cpu: float = 1.0, p50: float = 1.0, case: str = "plain") -> Measured:
    """Return one server's round."""
    spread = {"p50": p50, "p99": p50}
    return Measured(
        case=case,
        server=server,
        round=number,
        requests=100,
        cpu_ms=cpu,
        helpers_ms=0.04,
        per_second=100.0,
        memory=50.0,
        bytes_per_answer=100.0,
        first=spread,
        total=spread,
    )


def line_of(rows: list[Measured], beginning: str) -> str:
    """Return the line of the goal whose name begins so."""
    return next(line for line in goal_lines(rows) if line.startswith(f"| {beginning}"))


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    """A moment that slows both sides down threefold changes nothing."""
    slow = [measured("gateway", 0, cpu=3.6), measured("pass-through", 0, cpu=3.0)]
    usual = [measured("gateway", 1, cpu=1.2), measured("pass-through", 1, cpu=1.0)]

    assert "1.20 × (1.20 – 1.20) | 1.3 × | met |" in line_of(slow + usual, "plain, CPU: gateway : pass-through")


def test_a_goal_that_is_passed_is_missed() -> None:
    """Above what is promised, by however little."""
    rows = [measured("gateway", 0, cpu=3.6), measured("smg", 0, cpu=1.0)]

    assert "**missed**" in line_of(rows, "plain, CPU: gateway : smg")


def test_added_latency_is_compared_above_the_upstreams_own() -> None:
    """2 ms over an upstream of 1 ms are 1 added, and twice the 0.5 that the router adds."""
    case = "a lone caller"
    rows = [
        measured("upstream", 0, p50=1.0, case=case),
        measured("gateway", 0, p50=2.0, case=case),
        measured("smg", 0, p50=1.5, case=case),
    ]

    assert "2.00 × (2.00 – 2.00) | 1.5 × | **missed** |" in line_of(rows, "a lone caller, added p50")


def test_a_goal_without_its_peer_is_not_measured() -> None:
    """No verdict where the router is not installed."""
    assert "not measured" in line_of([measured("gateway", 0)], "plain, CPU: gateway : smg")
