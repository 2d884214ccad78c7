# What can go wrong about money and limits, as clients see it.
#
#   ServiceError
#   ├── RateLimited        429  rate_limit_exceeded   wait retry-after, then try again
#   ├── QuotaExhausted     429  insufficient_quota    what is settled leaves no room: do not retry
#   ├── ExceedsLimit       429  rate_limit_exceeded   this request alone is too large: ask for less
#   ├── LimitUnknown       503  overloaded            Postgres is away, and the process has no room of its own left
#   └── JournalFull        503  overloaded            no room to write the call down

from __future__ import annotations

import math

from billing.core.holds import DOLLAR_LIMITS, TOKEN_LIMITS, LimitName, RefusedHold, Scope
from billing.core.money import to_text
from protocol.errors import ServiceError

PER = {
    LimitName.REQUESTS_PER_MINUTE: "per minute",
    LimitName.TOKENS_PER_MINUTE: "per minute",
    LimitName.CONCURRENT_REQUESTS: "at a time",
    LimitName.TOKENS_PER_DAY: "per day (UTC)",
    LimitName.USD_PER_DAY: "per day (UTC)",
    LimitName.USD_PER_MONTH: "per month (UTC)",
}


class RateLimited(ServiceError, status=429, code="rate_limit_exceeded"):
    """A limit has no room now, and will have some after ``retry-after``."""


class QuotaExhausted(ServiceError, status=429, type="insufficient_quota", code="insufficient_quota"):
    """What is settled leaves no room until the limit's period ends or the limit is raised."""


class ExceedsLimit(ServiceError, status=429, code="rate_limit_exceeded"):
    """The request would not fit even into an unused limit; waiting cannot help."""


class LimitUnknown(ServiceError, status=503, code="overloaded"):
    """What a limit has left cannot be told now, so the call may not begin."""


class JournalFull(ServiceError, status=503, code="overloaded"):
    """The call cannot be written down, so it may not begin."""


def refusal_error(refused: RefusedHold, fits: int | None = None) -> ServiceError:
    """Return the error that tells a caller why its hold was refused, and whether to try again.

    ``fits``: the largest ``max_tokens`` for which there is room now, below 0 where the prompt alone is too much;
    ``None`` for a call that has no such limit.
    """
    error = _refusal_error(refused, fits)
    error.limit = f"{refused.scope.kind}.{refused.limit.value}"
    return error


def _refusal_error(refused: RefusedHold, fits: int | None) -> ServiceError:
    scope = refused.scope
    if refused.limit is LimitName.SCOPES_PER_DAY:
        return _too_many(refused)
    whose = _whose(scope)
    limit = f"The limit of {_amount(refused, refused.cap)} {PER[refused.limit]} of {whose}"
    wanted = _amount(refused, refused.wanted)
    do_not_retry = {"x-should-retry": "false"}
    if refused.cap == 0 and refused.alone_exceeds:
        return QuotaExhausted(f"{limit} lets nothing through. An administrator can raise it.", headers=do_not_retry)
    is_budget = refused.limit in (*DOLLAR_LIMITS, LimitName.TOKENS_PER_DAY)
    # A budget that a part is spent of and that no max_tokens fits into is spent, whatever the call asks for.
    is_spent = is_budget and refused.used > 0 and fits is not None and fits < 1
    if refused.alone_exceeds and not is_spent:
        return ExceedsLimit(
            f"{limit} is smaller than this request alone, which may use {wanted}. {_what_fits(fits)}",
            param="input" if fits is None else "max_tokens" if fits > 0 else None,
            headers=do_not_retry,
        )
    if is_budget and (refused.is_settled or refused.alone_exceeds):
        return QuotaExhausted(
            f"{limit} has no room for {wanted}: {_used(refused)}. {_what_fits(fits)} "
            f"The limit opens again {_opens(refused.limit)}; an administrator can raise it.",
            param="max_tokens" if fits is not None and fits > 0 else None,
            headers=do_not_retry,
        )
    wait = max(1, math.ceil(refused.retry_after or 1))
    if refused.is_unknown:
        return LimitUnknown(
            f"{limit} cannot be checked just now: what is used is not known. Try again in {wait} s.",
            headers={"retry-after": str(wait)},
        )
    taken = _used(refused)
    if refused.held:
        taken += f" and {_amount(refused, refused.held)} held by running requests"
    return RateLimited(
        f"{limit} has no room for {wanted} now: {taken}. Try again in {wait} s.",
        headers={"retry-after": str(wait)},
    )


def _whose(scope: Scope) -> str:
    team, _, rest = scope.id.partition("/")
    match scope.kind:
        case "key":
            return "this key"
        case "model":
            return f"team {team} for {scope.model}"
        case "user":
            return f"team {team} for this end user"
        case "tag":
            return f"team {team} for this value of '{rest.rpartition('=')[0]}' in metadata"
        case _:
            return f"team {team}"


def _too_many(refused: RefusedHold) -> ServiceError:
    what = "end users" if refused.scope.kind == "user" else "values in metadata"
    return QuotaExhausted(
        f"Team {refused.scope.id.partition('/')[0]} has limits for each of its {what}, and its calls have named "
        f"{refused.cap:,} today, the most that are counted. Calls of those go on; others again at 00:00 UTC.",
        headers={"x-should-retry": "false"},
    )


def _what_fits(fits: int | None) -> str:
    if fits is None:
        return "Shorten the input."
    if fits < 1:
        return "What is left does not cover the prompt at the most tokens that it can have, whatever max_tokens says."
    return f"With max_tokens of {fits:,} or less there is room now; a shorter prompt leaves more."


def _amount(refused: RefusedHold, value: int) -> str:
    if refused.limit in DOLLAR_LIMITS:
        return f"${to_text(value)}"
    unit = "token" if refused.limit in TOKEN_LIMITS else "request"
    return f"{value:,} {unit}{'' if value == 1 else 's'}"


def _used(refused: RefusedHold) -> str:
    is_one = refused.used == 1 or refused.limit in DOLLAR_LIMITS
    return f"{_amount(refused, refused.used)} {'is' if is_one else 'are'} used"


def _opens(limit: LimitName) -> str:
    return "on the first of the month, 00:00 UTC" if limit is LimitName.USD_PER_MONTH else "at 00:00 UTC"
