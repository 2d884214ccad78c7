# What the quota script tells of a scope, and what follows for a caller: headers, or the refusal that lasts longest.

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from billing.holds import Headroom, HoldRequest, LimitName, RefusedHold, Remaining, demands, headroom_of

LIMITS = tuple(LimitName)  # in the order in which the script numbers them, from 1
MINUTES = {LimitName.REQUESTS_PER_MINUTE, LimitName.TOKENS_PER_MINUTE}


class ScopeState(Struct, frozen=True, array_like=True):
    """What is used and held in one scope, as the script counts it."""

    requests_per_minute: int
    tokens_per_minute: int
    live: int
    day_tokens: int
    day_tokens_held: int
    day_nanousd: int
    day_nanousd_held: int
    month_nanousd: int
    month_nanousd_held: int
    minute_tokens_held: int = 0  # of tokens_per_minute: what running calls hold
    knows_day: bool = True  # false when Redis has no counter of that day, such as after a wipe

    def used_and_held(self, limit: LimitName) -> tuple[int, int]:
        """Return what counts against ``limit``: settled, and held by running calls."""
        match limit:
            case LimitName.REQUESTS_PER_MINUTE:
                return self.requests_per_minute, 0
            case LimitName.TOKENS_PER_MINUTE:
                return self.tokens_per_minute - self.minute_tokens_held, self.minute_tokens_held
            case LimitName.CONCURRENT_REQUESTS:
                return 0, self.live
            case LimitName.TOKENS_PER_DAY:
                return self.day_tokens, self.day_tokens_held
            case LimitName.USD_PER_DAY:
                return self.day_nanousd, self.day_nanousd_held
            case LimitName.USD_PER_MONTH:
                return self.month_nanousd, self.month_nanousd_held


def remaining(request: HoldRequest, states: Sequence[ScopeState]) -> tuple[Remaining | None, Remaining | None]:
    """Return the tightest request and token limits per minute, for the x-ratelimit headers."""
    limits = [scope.limits for scope in request.scopes]
    return (
        _tightest(
            (one.requests_per_minute, state.requests_per_minute) for one, state in zip(limits, states, strict=True)
        ),
        _tightest((one.tokens_per_minute, state.tokens_per_minute) for one, state in zip(limits, states, strict=True)),
    )


def headroom(request: HoldRequest, states: Sequence[ScopeState]) -> Headroom:
    """Return what the limits leave that the request counts against."""
    return headroom_of(
        # A correction may leave less than nothing settled: that is no headroom.
        (limit, cap - max(0, used) - held)
        for scope, state in zip(request.scopes, states, strict=True)
        for limit, cap, _ in demands(scope, request)
        for used, held in (state.used_and_held(limit),)
    )


def _tightest(limits: Iterable[tuple[int | None, int]]) -> Remaining | None:
    """Return what is left where least is left, of pairs of cap and what is used."""
    left = [(max(0, cap - used), cap) for cap, used in limits if cap is not None]
    if not left:
        return None
    least, cap = min(left)
    return Remaining(cap, least, 60.0 if least < cap else 0.0)


def refusal(request: HoldRequest, states: Sequence[ScopeState], refusals: Sequence[Sequence[int]]) -> RefusedHold:
    """Return the refusal that a caller should hear of: the one that lasts longest."""
    requests, tokens = remaining(request, states) if states else (None, None)
    left = headroom(request, states) if states else Headroom()
    heard = []
    for scope_number, limit_number, wait_ms in refusals:
        scope, limit = request.scopes[scope_number - 1], LIMITS[limit_number - 1]
        cap, wanted = next((cap, wanted) for name, cap, wanted in demands(scope, request) if name == limit)
        used, held = states[scope_number - 1].used_and_held(limit)
        is_settled = limit not in MINUTES and used + wanted > cap and limit is not LimitName.CONCURRENT_REQUESTS
        alone = wanted > cap
        heard.append(
            RefusedHold(
                scope=scope,
                limit=limit,
                cap=cap,
                used=used,
                held=held,
                wanted=wanted,
                retry_after=None if is_settled or alone else (wait_ms / 1000 if wait_ms >= 0 else 1.0),
                is_settled=is_settled,
                alone_exceeds=alone,
                headroom=left,
                requests=requests,
                tokens=tokens,
            )
        )
    if not heard:  # it came after valid_until, or after its own release: nobody waits for the answer any more
        scope = request.scopes[0]
        return RefusedHold(
            scope=scope, limit=LimitName.CONCURRENT_REQUESTS, cap=0, used=0, held=0, wanted=1, retry_after=1.0,
            is_settled=False, alone_exceeds=False, is_late=True,
        )  # fmt: skip
    return max(heard, key=lambda one: (one.alone_exceeds, one.is_settled, one.retry_after or 0.0))
