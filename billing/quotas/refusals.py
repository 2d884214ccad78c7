# Why a call has no room in a budget, as its caller hears it: from what the database told with the answer, and what this
# process knows beside it. Pure.

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from billing.core.holds import HoldRequest, LimitName, RefusedHold, Scope, headroom_of
from billing.quotas.lease_store import MOST_VALUES, NANOUSD, TOKENS, Balance, LeaseRow, Taken
from billing.quotas.rooms import Pair

TIGHT_LATELY = 1.0  # seconds since a balance became tight, in which others give back what they do not use

NO_LEASE = LeaseRow("", "", 0, 0, 0)


def refusal(
    request: HoldRequest, rooms: Iterable[Pair], taken: Taken, *, is_slow: bool
) -> tuple[RefusedHold | None, bool]:
    """Return why a request has no room, the reason that lasts longest; and whether room may come back soon.

    ``None``: none of what was told is in its way. ``is_slow``: what is unused goes back later than others ask again.
    """
    known = {(row.scope, row.unit): row for row in taken.leases or ()}
    found: list[RefusedHold] = []
    left: list[tuple[LimitName, int]] = []
    may_come = True
    for scope, pair, amounts in zip(request.scopes, rooms, request.amounts, strict=True):
        for balance in taken.balances or ():
            if balance.scope != scope.name:
                continue
            room, wanted = pair[balance.unit == NANOUSD], amounts[balance.unit == NANOUSD]
            lease = known.get((room.scope, room.unit), NO_LEASE)
            # What is on its way back counts; below zero where calls cost more than was drawn and no row says so.
            ours = room.free + max(0, room.returned - lease.returned)
            headroom = balance.cap - max(0, balance.drawn + balance.corrected) + ours
            left.append((_limit_of(balance), headroom))
            if wanted <= headroom:
                continue
            used = (balance.spent or 0) + balance.corrected + max(0, room.used - lease.spent)  # by rows, or before one
            is_moving = (balance.tight_for or 0.0) < TIGHT_LATELY or is_slow
            may_come = may_come and is_moving and wanted <= headroom + (balance.unused or 0)
            found.append(_refused(scope, balance, used, ours, wanted))
    if not found:
        return None, True
    last = max(found, key=lambda one: (one.alone_exceeds, one.is_settled))
    return replace(last, headroom=headroom_of(left)), may_come


def _refused(scope: Scope, balance: Balance, used: int, ours: int, wanted: int) -> RefusedHold:
    is_settled, alone = max(0, used) + wanted > balance.cap, wanted > balance.cap
    return RefusedHold(
        scope=scope,
        limit=_limit_of(balance),
        cap=balance.cap,
        used=used,
        held=max(0, balance.drawn + balance.corrected - used - ours),
        wanted=wanted,
        retry_after=None if is_settled or alone else 1.0,
        is_settled=is_settled,
        alone_exceeds=alone,
    )


def too_many(scope: Scope) -> RefusedHold:
    """Return the refusal of a call of an end user or a tag of whom its team has too many."""
    return RefusedHold(
        scope=scope, limit=LimitName.SCOPES_PER_DAY, cap=MOST_VALUES, used=MOST_VALUES, held=0, wanted=1,
        retry_after=None, is_settled=True, alone_exceeds=False,
    )  # fmt: skip


def unknown(request: HoldRequest) -> RefusedHold:
    """Return the refusal of a call whose limits cannot be checked now."""
    scope = next(filter(is_capped, request.scopes), request.scopes[0])
    tokens, nanousd = request.amounts[request.scopes.index(scope)]
    limit, cap = next(
        ((limit, cap) for limit, cap in _caps(scope).items() if cap is not None), (LimitName.USD_PER_DAY, 0)
    )
    wanted = tokens if limit is LimitName.TOKENS_PER_DAY else nanousd
    return RefusedHold(
        scope=scope, limit=limit, cap=cap, used=0, held=0, wanted=wanted, retry_after=1.0,
        is_settled=False, alone_exceeds=False, is_unknown=True,
    )  # fmt: skip


def is_capped(scope: Scope) -> bool:
    """Whether a scope has a budget."""
    return any(cap is not None for cap in _caps(scope).values())


def _limit_of(balance: Balance) -> LimitName:
    if balance.unit == TOKENS:
        return LimitName.TOKENS_PER_DAY
    return LimitName.USD_PER_DAY if len(balance.period) == len("2026-11-22") else LimitName.USD_PER_MONTH


def _caps(scope: Scope) -> dict[LimitName, int | None]:
    limits = scope.limits
    return {
        LimitName.TOKENS_PER_DAY: limits.tokens_per_day,
        LimitName.USD_PER_DAY: limits.nanousd_per_day,
        LimitName.USD_PER_MONTH: limits.nanousd_per_month,
    }
