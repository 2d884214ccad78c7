# What is promised of the gateway's cost, as ratios and differences within one run, beside what was measured: the median
# of the rounds, each compared with its own neighbours, so that a slow moment of the machine hits both sides.

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from benchmarks.measured import Measured

Round = Mapping[str, Measured]  # one round of one case: what was measured of each server


class Goal(Struct, frozen=True):
    """Something that is promised to be at most ``most``. ``of`` finds it in a round (KeyError: a server is missing)."""

    says: str
    case: str
    of: Callable[[Round], float]
    most: float
    unit: str


def _cpu_over(other: str) -> Callable[[Round], float]:
    return lambda servers: servers["gateway"].cpu_ms / servers[other].cpu_ms


def _added(server: str, share: str) -> Callable[[Round], float]:
    return lambda servers: servers[server].total[share] - servers["upstream"].total[share]


def _added_over_smg(servers: Round) -> float:
    return _added("gateway", "p50")(servers) / _added("smg", "p50")(servers)


def _helpers(servers: Round) -> float:
    return servers["gateway"].helpers_ms


PACED = "stream, 20 ms a token"
GOALS = (
    Goal("plain, CPU: gateway : pass-through", "plain", _cpu_over("pass-through"), 1.3, "×"),
    Goal("plain, CPU: gateway : smg", "plain", _cpu_over("smg"), 3.5, "×"),
    Goal("stream of 16 chunks, CPU: gateway : smg", "stream, unpaced", _cpu_over("smg"), 2.5, "×"),
    Goal("stream, 20 ms a token, CPU: gateway : pass-through", PACED, _cpu_over("pass-through"), 2, "×"),
    Goal("a lone caller, added p50: gateway : smg", "a lone caller", _added_over_smg, 1.5, "×"),
    Goal("core half busy, added p50", "plain, core half busy", _added("gateway", "p50"), 0.9, "ms"),
    Goal("core half busy, added p99", "plain, core half busy", _added("gateway", "p99"), 3, "ms"),
    Goal("plain, CPU of Postgres and Valkey a call", "plain", _helpers, 0.05, "ms"),
)


def goal_lines(measured: Sequence[Measured]) -> list[str]:
    """Return the table of goals; one that needs a server or a case that was not measured says so."""
    lines = ["| promised | measured | at most | |", "| --- | --- | --- | --- |"]
    for goal in GOALS:
        if not (values := values_of(goal, measured)):
            lines.append(f"| {goal.says} | – | {goal.most:g} {goal.unit} | not measured |")
            continue
        middle = statistics.median(values)
        spread = f"{min(values):.2f} – {max(values):.2f}"
        met = "met" if middle <= goal.most else "**missed**"
        lines.append(f"| {goal.says} | {middle:.2f} {goal.unit} ({spread}) | {goal.most:g} {goal.unit} | {met} |")
    return [*lines, ""]


def values_of(goal: Goal, measured: Sequence[Measured]) -> list[float]:
    """Return what each round says of a goal."""
    rounds: dict[int, dict[str, Measured]] = {}
    for one in measured:
        if one.case == goal.case:
            rounds.setdefault(one.round, {})[one.server] = one
    values = []
    for servers in rounds.values():
        try:
            values.append(goal.of(servers))
        except KeyError:  # a server that was not there
            continue
    return values
