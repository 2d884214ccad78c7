# Whether another attempt follows, and when.

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.settings import Retries
from gateway.upstreams.resilience.breaker import Verdict
from gateway.upstreams.resilience.retry import (
    BASE,
    CAP,
    Deadline,
    full_jitter,
    next_pause,
    verdict_of,
)
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure, UpstreamRefused, UpstreamTimeout
from gateway.upstreams.wire.unsayable import Unsayable

TWICE = Retries(attempts=2)


def pause_after(failure: UpstreamFailure, tries: int = 1, **known: object) -> float | None:
    facts: dict[str, object] = {"time_left": 100.0, "dice": 0.5, "has_sibling": False}
    return next_pause(failure, tries, TWICE, **(facts | known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (UpstreamError("", outcome="connect"), Verdict.BAD),
        (UpstreamError("", outcome="reset"), Verdict.BAD),
        (UpstreamError("", outcome="status_500"), Verdict.BAD),
        (UpstreamError("", outcome="status_529"), Verdict.BAD),
        (UpstreamError("", outcome="overloaded"), Verdict.BAD),
        (UpstreamError("", outcome="error_frame"), Verdict.BAD),
        (UpstreamError("", outcome="cut"), Verdict.BAD),
        (UpstreamTimeout(""), Verdict.BAD),
        (UpstreamTimeout("", outcome="deadline"), Verdict.NOTHING),
        (UpstreamError("", outcome="refused_key"), Verdict.NOTHING),
        (UpstreamError("", outcome="not_found"), Verdict.NOTHING),
        (UpstreamError("", outcome="status_405"), Verdict.NOTHING),
        (UpstreamError("", outcome="status_302"), Verdict.NOTHING),
        (UpstreamBusy("", retry_after=3), Verdict.NOTHING),
        (UpstreamBusy("", outcome="spend_cap"), Verdict.NOTHING),
        (UpstreamBusy("", outcome="too_large"), Verdict.NOTHING),
        (UpstreamRefused("", status=400), Verdict.GOOD),
        (UpstreamRefused("", status=413), Verdict.GOOD),
        (UpstreamRefused("", outcome="unsayable"), Verdict.NOTHING),
        (Unsayable(""), Verdict.NOTHING),
    ],
    ids=lambda value: getattr(value, "outcome", value),
)
def test_what_a_failure_says_of_its_target(failure: UpstreamFailure, verdict: Verdict) -> None:
    """Faults of the target count; limits, our keys, our deadline and the request's own faults do not."""
    assert verdict_of(failure) is verdict


def test_a_passing_fault_is_tried_again_as_often_as_the_settings_say() -> None:
    """`attempts` counts the tries at one endpoint, the first one too."""
    fault = UpstreamError("", outcome="status_500")

    assert pause_after(fault) is not None
    assert pause_after(fault, tries=2) is None


@pytest.mark.parametrize(
    "failure",
    [
        UpstreamTimeout(""),
        UpstreamBusy("", retry_after=0.1),
        UpstreamError("", outcome="not_found"),
        UpstreamError("", outcome="malformed"),
        UpstreamRefused(""),
    ],
    ids=lambda failure: failure.outcome,
)
def test_what_will_not_pass_is_not_tried_again(failure: UpstreamFailure) -> None:
    """Silence for a whole deadline, limits, nonsense and faults of the request go elsewhere at once, or nowhere."""
    assert pause_after(failure) is None


def test_another_endpoint_is_better_than_waiting() -> None:
    """Where the model has a second region, a fault costs the caller no pause."""
    assert pause_after(UpstreamError("", outcome="status_503"), has_sibling=True) is None


def test_retry_after_is_obeyed() -> None:
    """Never sooner than the upstream asked; not at all when that is more than a caller should wait, or has time for."""
    fault = UpstreamError("", outcome="status_503")
    fault.retry_after = 3.0

    assert pause_after(fault) == 3.0
    assert pause_after(fault, time_left=2.9) is None
    fault.retry_after = 30.0
    assert pause_after(fault) is None


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_is_full(tries: int, dice: float) -> None:
    """Anything from nothing to a bound that doubles and is capped."""
    pause = full_jitter(tries, dice)

    assert 0 <= pause <= min(CAP, BASE * 2 ** (min(tries, 40) - 1))
    assert full_jitter(tries, 0.0) == 0.0


def test_a_deadline_is_shared_by_all_attempts() -> None:
    """A later attempt gets what the earlier ones left."""
    deadline = Deadline(10.0)

    assert [deadline.within(4.0, now) for now in (0.0, 7.0, 11.0)] == [4.0, 3.0, 0.0]
