# Which calls are asked for: the query of GET /v1/calls and of `tollgate calls`, and the page that it means.

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import InvalidOperation
from uuid import UUID

from msgspec import Struct

from billing.core.ids import date_of, least_id
from billing.core.money import to_nano
from billing.core.records import MOST_NANOUSD, Status
from protocol.errors import invalid_value

USUAL_PAGE, LONGEST_PAGE = 50, 200
USUAL_PERIOD, LONGEST_PERIOD = 31, 400  # days
LONGEST_MS = 100 * 86_400_000
REFUSED = "refused"
STATUSES = (*Status, REFUSED)
NAMES = (
    "key",
    "model",
    "status",
    "route_reason",
    "user",
    "metadata",
    "from",
    "to",
    "min_cost_usd",
    "min_ms",
    "after",
    "limit",
)


class CallFilter(Struct, frozen=True, kw_only=True):
    """The calls of a page: those in [since, until) that fit, the newest first, from below ``after`` on."""

    since: UUID  # the least request id of a moment
    until: UUID
    team_id: str | None = None  # None: of all teams
    key_id: str | None = None
    model: str | None = None  # asked or used
    status: str | None = None
    route_reason: str | None = None
    user: str | None = None
    metadata: tuple[str, str] | None = None
    least_nanousd: int = 0
    least_ms: int = 0  # in all, what it waited for its turn included
    limit: int = USUAL_PAGE

    @property
    def is_plain(self) -> bool:
        """Whether all calls of the period are meant."""
        chosen = (self.key_id, self.model, self.status, self.route_reason, self.user, self.metadata)
        return not any(chosen) and not (self.least_nanousd or self.least_ms)

    @property
    def days(self) -> tuple[date, date]:
        """The first and the last day that calls of the page may have."""
        return date_of(str(self.since)), date_of(str(UUID(int=max(self.until.int - 1, self.since.int))))


def read_filter(said: Mapping[str, str], now: datetime, team_id: str | None) -> CallFilter:
    """Return what a query asks for. Raises BadRequest. Nothing said: the newest calls of the last 31 days."""
    until = read_moment(said["to"], "to", is_end=True) if "to" in said else now + timedelta(minutes=1)
    since = read_moment(said["from"], "from") if "from" in said else until - timedelta(days=USUAL_PERIOD)
    if since >= until:
        raise invalid_value("to", "is not after 'from'")
    if until - since > timedelta(days=LONGEST_PERIOD):
        raise invalid_value("from", f"is at most {LONGEST_PERIOD} days before 'to'")
    status = said.get("status")
    if status is not None and status not in STATUSES:
        raise invalid_value("status", f"is one of {', '.join(STATUSES)}")
    last = least_id(until.timestamp())
    return CallFilter(
        since=least_id(since.timestamp()),
        until=min(last, _cursor(said["after"])) if "after" in said else last,
        team_id=team_id,
        key_id=said.get("key"),
        model=said.get("model"),
        status=status,
        route_reason=said.get("route_reason"),
        user=said.get("user"),
        metadata=_pair(said["metadata"]) if "metadata" in said else None,
        least_nanousd=_nanousd(said["min_cost_usd"]) if "min_cost_usd" in said else 0,
        least_ms=_whole(said["min_ms"], "min_ms", 0, LONGEST_MS) if "min_ms" in said else 0,
        limit=_whole(said["limit"], "limit", 1, LONGEST_PAGE) if "limit" in said else USUAL_PAGE,
    )


def read_moment(said: str, name: str, *, is_end: bool = False) -> datetime:
    """Read a UTC day or a moment; a day that ends a period is a part of it."""
    try:
        found = datetime.fromisoformat(said)
    except ValueError:
        raise invalid_value(name, "is a day (2026-04-05) or a moment (2026-04-05T14:00:00Z)") from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    if not 1970 < found.year < 9999:
        raise invalid_value(name, "is not a day of this age")
    if is_end and len(said) <= len("2026-04-05"):
        found += timedelta(days=1)
    return found


def _cursor(said: str) -> UUID:
    try:
        return UUID(said)
    except ValueError:
        raise invalid_value("after", "is 'next' of the page before") from None


def _pair(said: str) -> tuple[str, str]:
    key, sign, value = said.partition(":")
    if not (key and sign):
        raise invalid_value("metadata", "is KEY:VALUE, as in project:search")
    return key, value


def _whole(said: str, name: str, least: int, most: int) -> int:
    if said.isascii() and said.isdigit() and len(said) < 12 and least <= int(said) <= most:
        return int(said)
    raise invalid_value(name, f"must be a whole number from {least} to {most}")


def _nanousd(said: str) -> int:
    try:
        nano = to_nano(said[:40])
    except (InvalidOperation, ValueError, OverflowError):
        nano = to_nano(-1)
    if not 0 <= nano <= MOST_NANOUSD:
        raise invalid_value("min_cost_usd", "is a number of dollars, from 0 up")
    return nano
