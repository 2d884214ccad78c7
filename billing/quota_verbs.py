# What is said to quotas.lua: for each verb its arguments, in the order in which the script reads them.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any

import msgspec

from billing.holds import Hold, HoldRequest, Scope, Settlement
from billing.ids import day_of
from billing.records import UsageRecord, bounded_cost, bounded_usage

LEASE = 30.0  # seconds a hold lives without being renewed


class Said(IntEnum):
    """What the script answers beyond its results."""

    UNKNOWN = -2  # the team has no books: Redis was wiped, or the team is new
    STALE = -3  # the team's books are of another epoch than ours


class Words(msgspec.Struct, frozen=True, eq=False):
    """One verb for one team's books, ready to be sent."""

    verb: str
    team_id: str
    request_id: str
    rest: Sequence[Any] = ()


def open_hold(request: HoldRequest, valid_until: float) -> Words:
    """Hold the request's dearest leg; ``valid_until`` by Redis's clock."""
    amounts = (valid_until, LEASE, request.tokens, request.cost_nanousd, *period(request.request_id))
    words = [*amounts, int(request.is_aside), *_limits(request.scopes)]
    return Words("open", request.team_id, request.request_id, words)


def renew_hold(request: HoldRequest, used: Settlement) -> Words:
    """Keep the hold for another lease, or take its room again if that has been freed and is still there."""
    as_opened = (request.tokens, request.cost_nanousd, *period(request.request_id), *_limits(request.scopes))
    return Words("renew", request.team_id, request.request_id, [LEASE, *_amounts(used), *as_opened])


def enter_hold(request: HoldRequest) -> Words:
    """Tell Redis of a hold that was opened without it."""
    as_opened = (request.tokens, request.cost_nanousd, *period(request.request_id), *map(name_of, request.scopes))
    return Words("enter", request.team_id, request.request_id, [LEASE, *as_opened])


def settle_hold(request: HoldRequest, used: Settlement) -> Words:
    """Book what was used in place of the hold."""
    amounts = (*_amounts(used), *period(request.request_id), *map(name_of, request.scopes))
    return Words("settle", request.team_id, request.request_id, amounts)


def release_hold(request: HoldRequest) -> Words:
    """Give the hold back."""
    return Words("release", request.team_id, request.request_id)


def correct_counters(
    correction_id: str, team_id: str, key_id: str | None, day: int, tokens: int, cost_nanousd: int
) -> Words:
    """Add signed amounts to what a day and its month have settled."""
    return Words("correct", team_id, correction_id, (tokens, cost_nanousd, day, month_of(day), *_scopes(key_id)))


def put_back_calls(team_id: str, closed: Iterable[UsageRecord], live: Iterable[Hold]) -> Words:
    """Tell a new epoch of calls that the statements do not know: closed ones, and those that still run."""
    packed_closed = [
        (
            record.request_id,
            record.input_tokens + record.output_tokens,
            record.cost_nanousd,
            *period(record.request_id),
            _scopes(record.key_id),
        )
        for record in closed
    ]
    packed_live = [
        (
            hold.request.request_id,
            hold.request.tokens,
            hold.request.cost_nanousd,
            *period(hold.request.request_id),
            [name_of(scope) for scope in hold.request.scopes],
        )
        for hold in live
    ]
    return Words("put_back", team_id, "", (LEASE, _pack(packed_closed), _pack(packed_live)))


def load_sums(team_id: str, days: Any, months: Any, seconds: Any, valid_until: float) -> Words:
    """End a rebuild for one team: add what the statements say."""
    return Words("load", team_id, "", (_pack((days, months, seconds)), valid_until))


def period(request_id: str) -> tuple[int, int]:
    """Return the day and the month inside a request id."""
    day = day_of(request_id)
    return day, month_of(day)


def month_of(day: int) -> int:
    """Return the month of a day since 1970, counted in months since year 0."""
    if day not in _MONTHS:
        moment = datetime.fromtimestamp(day * 86_400, UTC)
        if len(_MONTHS) > 1000:
            _MONTHS.clear()
        _MONTHS[day] = moment.year * 12 + moment.month
    return _MONTHS[day]


def name_of(scope: Scope) -> str:
    """Return a scope as the script names it."""
    return "team" if scope.kind == "team" else f"{scope.kind}:{scope.id}"


def _scopes(key_id: str | None) -> list[str]:
    return ["team"] if key_id is None else ["team", f"key:{key_id}"]


def _limits(scopes: Iterable[Scope]) -> list[Any]:
    args: list[Any] = []
    for scope in scopes:
        limits = scope.limits
        caps = (
            limits.requests_per_minute,
            limits.tokens_per_minute,
            limits.concurrent_requests,
            limits.tokens_per_day,
            limits.nanousd_per_day,
            limits.nanousd_per_month,
        )
        args += [name_of(scope), *("" if cap is None else cap for cap in caps)]
    return args


def _amounts(used: Settlement) -> tuple[int, int]:
    """Return tokens and nano-dollars as the ledger will have them."""
    return bounded_usage(used.usage).total_tokens, bounded_cost(used.cost_nanousd)


_MONTHS: dict[int, int] = {}
_pack = msgspec.msgpack.Encoder().encode
