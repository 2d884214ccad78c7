# Refusals, as clients read them.

from __future__ import annotations

import pytest

from billing.core.errors import ExceedsLimit, QuotaExhausted, RateLimited, refusal_error
from billing.core.holds import LimitName, Limits, RefusedHold, Scope


def refused(**fields: object) -> RefusedHold:
    """Return a refusal by a daily limit of one dollar."""
    usual: dict[str, object] = {
        "scope": Scope("team", "team_a", Limits()),
        "limit": LimitName.USD_PER_DAY,
        "cap": 1_000_000_000,
        "used": 400_000_000,
        "held": 500_000_000,
        "wanted": 200_000_000,
        "retry_after": 1.0,
        "is_settled": False,
        "alone_exceeds": False,
    }
    return RefusedHold(**(usual | fields))  # type: ignore[arg-type]


def test_room_held_by_running_calls_is_worth_a_retry() -> None:
    """429 rate_limit_exceeded with retry-after: 1."""
    error = refusal_error(refused())

    assert isinstance(error, RateLimited)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.headers == {"retry-after": "1"}
    assert "$1.00 per day (UTC) of team team_a" in error.message and "$0.50 held" in error.message
    assert error.limit == "team.usd_per_day"


def test_a_limit_of_a_key_is_told_as_such() -> None:
    """Its id is no secret, but the caller knows it by its text."""
    error = refusal_error(refused(scope=Scope("key", "key_1", Limits())))

    assert "$1.00 per day (UTC) of this key" in error.message
    assert error.limit == "key.usd_per_day"


def test_a_limit_that_cannot_be_checked_is_no_refusal_for_good() -> None:
    """503, and worth a retry: nothing was run."""
    error = refusal_error(refused(is_unknown=True))

    assert (error.status, error.code) == (503, "overloaded")
    assert error.headers == {"retry-after": "1"}


def test_a_used_up_quota_is_not() -> None:
    """429 insufficient_quota with x-should-retry: false, and no retry-after."""
    error = refusal_error(refused(used=900_000_000, is_settled=True, retry_after=None))

    assert isinstance(error, QuotaExhausted)
    assert (error.status, error.type, error.code, error.headers) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
        {"x-should-retry": "false"},
    )


def test_a_request_too_large_for_the_limit_names_max_tokens() -> None:
    """Waiting cannot help, asking for less can."""
    error = refusal_error(refused(wanted=2_000_000_000, alone_exceeds=True, retry_after=None), fits=120)

    assert isinstance(error, ExceedsLimit)
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.param == "max_tokens" and "max_tokens" in error.message
    assert error.headers == {"x-should-retry": "false"}


def test_a_budget_whose_rest_fits_no_prompt_is_spent_whatever_is_asked_for() -> None:
    """A client that looks for a spent budget finds it with and without max_tokens, and reads when it opens again."""
    error = refusal_error(refused(wanted=2_000_000_000, alone_exceeds=True, retry_after=None), fits=-3)

    assert (error.code, error.param) == ("insufficient_quota", None)
    assert "opens again at 00:00 UTC" in error.message and "smaller than this request" not in error.message


@pytest.mark.parametrize("limit", [name for name in LimitName if name is not LimitName.SCOPES_PER_DAY])
def test_a_limit_of_nothing_is_no_matter_of_max_tokens(limit: LimitName) -> None:
    """However little is asked for, nothing fits: that is a quota without room, and no advice to ask for less."""
    error = refusal_error(refused(limit=limit, cap=0, used=0, held=0, wanted=1, alone_exceeds=True, retry_after=None))

    assert (error.code, error.param, error.headers) == ("insufficient_quota", None, {"x-should-retry": "false"})
    assert "lets nothing through" in error.message and "max_tokens" not in error.message


@pytest.mark.parametrize("limit", [LimitName.REQUESTS_PER_MINUTE, LimitName.CONCURRENT_REQUESTS])
def test_a_full_minute_or_a_full_house_is_never_a_used_up_quota(limit: LimitName) -> None:
    """Both flow back by themselves, so waiting helps, whatever the flags say."""
    error = refusal_error(refused(limit=limit, cap=1, used=1, held=0, wanted=1, is_settled=True, retry_after=12.0))

    assert (error.code, error.headers) == ("rate_limit_exceeded", {"retry-after": "12"})


@pytest.mark.parametrize(("wait", "header"), [(0.2, "1"), (1.0, "1"), (41.2, "42")])
def test_retry_after_is_whole_seconds_and_long_enough(wait: float, header: str) -> None:
    """The bucket's own time, rounded up."""
    error = refusal_error(
        refused(limit=LimitName.TOKENS_PER_MINUTE, cap=1000, used=900, held=0, wanted=200, retry_after=wait)
    )

    assert error.headers == {"retry-after": header}
    assert "1,000 tokens per minute" in error.message
