# Batches at providers, in Postgres. A row is there before its provider hears of it, and its lines name it: whichever
# worker looks after it, under a lease, knows what may lie there. Its lines run under its name and for ever, until their
# answers are stored (finishing.py) or they are let go.
#
#   gathering -> submitting -> submitted -> ended

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.holds import Hold, HoldRequest, Leg
from billing.ledger.price_editions import edition_of, tell_price
from billing.quotas.lease_store import RESERVATIONS
from gateway.accounts.teams import PROVIDER_KEYS, read_provider_keys
from gateway.batch.claims import CLAIMED, ClaimedItem, claimed_item
from gateway.calls.call import scopes_of
from gateway.core.principals import Caller
from gateway.storage.tables import provider_batches
from router.catalog.targets import Route, Target, TeamKeys

log = structlog.get_logger(__name__)

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Sent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a line when it is put into a provider's batch, and what it holds."""

    reason: str
    complexity: float | None = None
    dropped: tuple[str, ...] = ()
    tokens: int
    nanousd: int

    def route(self, asked: str, target: Target) -> Route:
        """Return the route that the line took."""
        return Route(asked, (target,), self.reason, self.complexity)

    def hold(self, request_id: str, caller: Caller, target: Target, owner: str) -> Hold:
        """Return what the line holds of a reservation."""
        legs = (Leg(target.key, self.tokens, self.nanousd, target.model.name),)
        scopes = scopes_of(caller, legs)
        request = HoldRequest(request_id=request_id, team_id=caller.team.id, scopes=scopes, legs=legs)
        return Hold(request=request, owner=owner)


class ProviderBatch(Struct, frozen=True, kw_only=True):
    """A batch at a provider, and how the batch stands that its lines are of."""

    id: str
    batch_id: str
    provider: str
    target: Target
    key_digest: str
    status: str
    lines: int
    bytes: int
    upstream_id: str | None
    tries: int
    created_at: datetime
    touched_at: datetime
    tried_at: datetime | None
    submitted_at: datetime | None
    cancelled_at: datetime | None
    now: datetime  # by Postgres
    batch_status: str
    left_at: datetime | None  # when its team cancelled it, or all of it was answered
    expires_at: datetime
    endpoint: str
    holder: str  # of its lease: another each time that it is claimed

    @property
    def reservation(self) -> str:
        """What its lines hold, by name."""
        return RESERVATIONS + self.id


class SentLine(Struct, frozen=True):
    """A line that lies with a provider."""

    claim: ClaimedItem
    request_id: str
    sent: Sent


def place_key(target: Target) -> str:
    """Return what lines of one provider's batch have in common."""
    return f"{target.account} {edition_of(target.model.price)}"


async def find_gathering(
    connection: AsyncConnection, batch_id: str, place: str, *, most_lines: int, most_bytes: int
) -> str | None:
    """Return a provider's batch that takes lines of a batch for a place, with room for so many more."""
    values = {"batch_id": batch_id, "place": place, "most_lines": most_lines, "most_bytes": most_bytes}
    return (await connection.execute(FIND, values)).scalar_one_or_none()


async def add_provider_batch(connection: AsyncConnection, batch_id: str, target: Target, key_digest: str) -> str:
    """Begin another, and return its id."""
    ident = f"pb_{secrets.token_hex(12)}"
    row = {
        "id": ident,
        "batch_id": batch_id,
        "provider": target.model.provider,
        "place": place_key(target),
        "target": msgspec.json.decode(msgspec.json.encode(_without_keys(target))),
        "key_digest": key_digest,
        "status": "gathering",
    }
    await connection.execute(insert(provider_batches).values(**row))
    await tell_price(connection, target.model.price)
    return ident


async def put_line(
    connection: AsyncConnection,
    ident: str,
    owner: str,
    claim: ClaimedItem,
    *,
    request_id: str,
    line: bytes,
    sent: Sent,
    most_lines: int,
    most_bytes: int,
) -> bool:
    """Put a claimed item into a provider's batch that gathers; False: it takes no more, or another worker has it."""
    values = {
        "id": ident,
        "owner": owner,
        "batch_id": claim.batch_id,
        "position": claim.position,
        "tries": claim.tries,
        "request_id": request_id,
        "line": line,
        "size": len(line),
        "sent": msgspec.json.encode(sent).decode(),
        "most_lines": most_lines,
        "most_bytes": most_bytes,
    }
    return (await connection.execute(PUT, values)).first() is not None


async def claim_provider_batch(connection: AsyncConnection, owner: str, lease: float) -> ProviderBatch | None:
    """Claim one that is due to be looked at; None: none is. One that a later version wrote, and this one cannot read,
    is passed over for as long as a lease."""
    values = {"owner": f"{owner}#{secrets.token_hex(4)}", "lease": timedelta(seconds=lease)}
    while (row := (await connection.execute(CLAIM_ONE, values)).mappings().one_or_none()) is not None:
        try:
            known = {name: value for name, value in row.items() if name not in ("target", "team_keys")}
            target = _with_keys(msgspec.convert(row["target"], Target), read_provider_keys(row["team_keys"]))
            return ProviderBatch(**known, target=target)
        except msgspec.ValidationError as exc:
            log.warning("provider_batch_unreadable", provider_batch=row["id"], error=str(exc))
    return None


async def renew(connection: AsyncConnection, one: ProviderBatch, lease: float) -> bool:
    """Go on looking after one; False: another worker does."""
    values = {"id": one.id, "owner": one.holder, "lease": timedelta(seconds=lease)}
    return (await connection.execute(RENEW, values)).first() is not None


async def note(
    connection: AsyncConnection, one: ProviderBatch, *, look_in: float | None = None, **changes: Any
) -> bool:
    """Write what has become of one that this worker looks after; ``look_in`` seconds it is looked at again, by any
    worker. False: another one looks after it now."""
    told = {**changes}
    sets = [f"{name} = :{name}" for name in told]
    if look_in is not None:
        sets += ["lease_until = NULL", "next_look_at = clock_timestamp() + CAST(:look_in AS interval)"]
        told["look_in"] = timedelta(seconds=look_in)
    query = text(
        f"UPDATE provider_batches SET {', '.join(sets)} WHERE id = :id AND lease_owner = :owner AND status <> 'ended' "  # noqa: S608
        "RETURNING id"
    )
    return (await connection.execute(query, {**told, "id": one.id, "owner": one.holder})).first() is not None


async def read_lines_of(connection: AsyncConnection, ident: str, after: int, at_most: int) -> list[tuple[int, bytes]]:
    """Return some of the lines as they are to be sent, with their positions, in order."""
    values = {"id": ident, "after": after, "at_most": at_most}
    return [(row.position, bytes(row.provider_line)) for row in await connection.execute(LINES, values)]


async def forget_lines(connection: AsyncConnection, ident: str) -> None:
    """Erase the lines as they were sent."""
    await connection.execute(FORGET, {"id": ident})


async def find_sent(connection: AsyncConnection, ident: str, request_ids: Sequence[str]) -> list[SentLine]:
    """Return those of some lines that are still open. What a provider calls a line may be anything."""
    rows = (await connection.execute(SENT, {"id": ident, "ids": _ids_in(request_ids)})).mappings()
    return [_sent_line(row) for row in rows]


async def has_lines(connection: AsyncConnection, ident: str, names: Sequence[str]) -> bool:
    """Return whether any of these names is that of a line, open or not."""
    return bool((await connection.execute(HAS_LINES, {"id": ident, "ids": _ids_in(names)})).scalar_one())


async def ids_in_order(connection: AsyncConnection, ident: str) -> list[str]:
    """Return the request ids of all lines that were sent, in their order."""
    return [str(each) for each in (await connection.execute(IN_ORDER, {"id": ident})).scalars()]


async def let_go(connection: AsyncConnection, ident: str) -> int:
    """Let go of the lines that are still open: they are asked again, as ordinary calls; those of a cancelled batch are
    not. Returns how many."""
    return (await connection.execute(LET_GO, {"id": ident})).rowcount


async def known_upstream_ids(connection: AsyncConnection, provider: str) -> frozenset[str]:
    """Return what a provider calls its batches that are known here."""
    column = provider_batches.c.upstream_id
    query = select(column).where(provider_batches.c.provider == provider, column.is_not(None))
    return frozenset((await connection.execute(query)).scalars())


def _without_keys(target: Target) -> Target:
    """Return a target as its row has it: whose keys it is asked with, and none of them."""
    return target if target.own is None else replace(target, own=TeamKeys(target.own.team))


def _with_keys(target: Target, known: Mapping[str, tuple[tuple[str, bytes], ...]]) -> Target:
    """Return a target with those keys of its team that there are now."""
    if target.own is None:
        return target
    return replace(target, own=TeamKeys(target.own.team, known.get(target.model.provider, ())))


def _ids_in(names: Sequence[str]) -> list[str]:
    return [each for each in names if ID.fullmatch(each)]


def _sent_line(row: Mapping[Any, Any]) -> SentLine:
    known = {name: value for name, value in row.items() if name not in ("request_id", "sent")}
    return SentLine(claimed_item(known), str(row["request_id"]), msgspec.convert(row["sent"], Sent))


FIND = text("""
    SELECT id FROM provider_batches
    WHERE batch_id = :batch_id AND place = :place AND status = 'gathering' AND lines < :most_lines
      AND bytes <= :most_bytes
    ORDER BY created_at DESC LIMIT 1
""")
# The row of the provider's batch first: its end takes the same locks in the same order.
PUT = text("""
    WITH place AS (
        UPDATE provider_batches SET lines = lines + 1, bytes = bytes + :size, touched_at = clock_timestamp()
        WHERE id = :id AND status = 'gathering' AND lines < :most_lines AND bytes + :size <= :most_bytes
        RETURNING id
    )
    UPDATE batch_items AS item
    SET provider_batch_id = place.id, provider_line = :line, sent = CAST(:sent AS jsonb),
        request_id = CAST(:request_id AS uuid), lease_owner = place.id, lease_until = 'infinity'
    FROM place
    WHERE item.batch_id = :batch_id AND item.position = :position AND item.tries = :tries
      AND item.lease_owner = :owner AND item.status = 'running'
    RETURNING item.position
""")
CLAIM_ONE = text(f"""
    WITH due AS MATERIALIZED (
        SELECT id FROM provider_batches
        WHERE status <> 'ended' AND next_look_at <= clock_timestamp()
          AND (lease_until IS NULL OR lease_until < clock_timestamp())
        ORDER BY next_look_at LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    UPDATE provider_batches AS one
    SET lease_owner = :owner, lease_until = clock_timestamp() + CAST(:lease AS interval)
    FROM due, batches
    WHERE one.id = due.id AND batches.id = one.batch_id
    RETURNING one.id, one.batch_id, one.provider, one.target, one.key_digest, one.status, one.lines, one.bytes,
              one.upstream_id, one.tries, one.created_at, one.touched_at, one.tried_at, one.submitted_at,
              one.cancelled_at, clock_timestamp() AS now, batches.status AS batch_status, batches.expires_at,
              least(batches.cancelling_at, batches.completed_at) AS left_at, batches.endpoint,
              one.lease_owner AS holder,
              {PROVIDER_KEYS.format(team="batches", id="team_id")} AS team_keys
""")  # noqa: S608  (all of it is ours)
RENEW = text("""
    UPDATE provider_batches SET lease_until = clock_timestamp() + CAST(:lease AS interval)
    WHERE id = :id AND lease_owner = :owner AND status <> 'ended'
    RETURNING id
""")
LINES = text("""
    SELECT position, provider_line FROM batch_items
    WHERE provider_batch_id = :id AND position > :after AND provider_line IS NOT NULL AND lease_owner = :id
    ORDER BY position LIMIT :at_most
""")
FORGET = text("UPDATE batch_items SET provider_line = NULL WHERE provider_batch_id = :id AND provider_line IS NOT NULL")
SENT = text(f"""
    SELECT {CLAIMED}, item.request_id, item.sent
    FROM batch_items AS item JOIN batches ON batches.id = item.batch_id
    WHERE provider_batch_id = :id AND item.request_id = ANY(CAST(CAST(:ids AS text[]) AS uuid[]))
      AND item.status = 'running' AND item.lease_owner = :id
""")  # noqa: S608  (all of it is ours)
HAS_LINES = text("""
    SELECT EXISTS (
        SELECT FROM batch_items
        WHERE provider_batch_id = :id AND request_id = ANY(CAST(CAST(:ids AS text[]) AS uuid[]))
    )
""")
IN_ORDER = text("SELECT request_id FROM batch_items WHERE provider_batch_id = :id ORDER BY position")
LET_GO = text("""
    UPDATE batch_items AS item
    SET status = CASE WHEN batches.status = 'in_progress' THEN 'queued' ELSE 'cancelled' END,
        body = CASE WHEN batches.status = 'in_progress' THEN item.body ELSE '' END,
        finished_at = CASE WHEN batches.status = 'in_progress' THEN NULL ELSE clock_timestamp() END,
        provider_batch_id = NULL, provider_line = NULL, sent = NULL, request_id = NULL, is_live_only = true,
        tries = item.tries - 1, lease_owner = NULL, lease_until = NULL
    FROM batches
    WHERE item.provider_batch_id = :id AND item.lease_owner = :id AND item.status = 'running'
      AND batches.id = item.batch_id
""")
