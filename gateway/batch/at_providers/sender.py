# Puts lines of batches into batches of their providers: what a line may cost is reserved first, in Postgres, so that it
# stays held whatever becomes of this worker.

from __future__ import annotations

import asyncio
from typing import Literal

from msgspec.structs import replace

from billing.core.errors import refusal_error
from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.lease_store import RESERVATIONS
from billing.quotas.reservations import ReservationEnded, Reservations
from gateway.batch.at_providers.lines import ForbiddenLine, PreparedLine, ProviderLines
from gateway.batch.at_providers.store import Sent, add_provider_batch, find_gathering, place_key, put_line
from gateway.batch.claims import ClaimedItem
from gateway.batch.finishing import ItemResult, failed_result
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.storage.database import Database
from gateway.upstreams.provider_batches import digest_of
from gateway.upstreams.wire.batches import LONGEST_LINE
from protocol.errors import Overloaded

FALL_BACK = 6 * 3600.0  # seconds before its batch expires, from which on a line is an ordinary call
LEAST_TIME = 2 * 3600.0  # seconds beyond that, which a provider must have
TRIES = 3  # to find a batch with room

Sending = Literal["sent"]


class LineSender:
    """Puts claimed lines into batches that gather for their providers."""

    def __init__(self, database: Database, reservations: Reservations, clock: Clock, owner: str) -> None:
        self._database = database
        self._reservations = reservations
        self._clock = clock
        self._owner = owner
        self._looking = asyncio.Lock()

    def may_send(self, claim: ClaimedItem) -> bool:
        """Whether there is time for a provider's batch: lines of high priority, and the deployment's own, have none."""
        has_time = claim.expires_at - self._clock.now() >= FALL_BACK + LEAST_TIME
        return has_time and claim.priority != "high" and not (claim.is_internal or claim.is_live_only)

    async def send(self, lines: ProviderLines, call: Call, claim: ClaimedItem) -> ItemResult | Sending | None:
        """Put a line where its provider will have it; return how it ended where it may not be asked, and ``None`` where
        it is to be an ordinary call. Raises RateLimited where its budget has no room now."""
        prepared = await lines.prepare(call)
        if isinstance(prepared, ForbiddenLine):
            return replace(failed_result(claim, call.request_id, prepared.violation), record=prepared.record)
        if prepared is None:
            return None
        line = lines.batches.line(prepared.target, prepared.built, call.request_id)
        if len(line) > LONGEST_LINE:
            return None
        try:
            return await self._put(lines, call, claim, prepared, line)
        except POSTGRES_AWAY as exc:
            raise Overloaded("The line cannot be reserved now.") from exc

    async def _put(
        self, lines: ProviderLines, call: Call, claim: ClaimedItem, prepared: PreparedLine, line: bytes
    ) -> Sending | None:
        target, route = prepared.target, prepared.route
        wire = lines.batches.wire_of(target)
        sent = Sent(
            reason=route.reason,
            complexity=route.complexity,
            dropped=prepared.built.dropped,
            tokens=prepared.hold.tokens,
            nanousd=prepared.hold.cost_nanousd,
        )
        place = claim.batch_id, place_key(target)
        for _ in range(TRIES):
            found = await self._gathering(lines, place, prepared, len(line))
            try:
                refused = await self._reservations.hold(RESERVATIONS + found, prepared.hold)
            except ReservationEnded:  # or not begun by who made it
                await self._reservations.begin(RESERVATIONS + found)
                continue
            if refused is not None:
                if refused.is_settled or refused.alone_exceeds:
                    return None  # as an ordinary call it may be made to fit, or is told what would
                raise refusal_error(refused)
            async with self._database.begin() as connection:
                is_put = await put_line(
                    connection,
                    found,
                    self._owner,
                    claim,
                    request_id=call.request_id,
                    line=line,
                    sent=sent,
                    most_lines=wire.most_lines,
                    most_bytes=wire.most_bytes,
                )
                if is_put:
                    return "sent"
        raise Overloaded("No batch of the provider took the line.")

    async def _gathering(self, lines: ProviderLines, place: tuple[str, str], prepared: PreparedLine, size: int) -> str:
        """Return a batch that gathers lines for a place and has room for one more, a new one where there is none. It is
        looked up for each: what is held of one that is closed already stays held until that has ended."""
        target = prepared.target
        wire = lines.batches.wire_of(target)
        room = wire.most_bytes - size
        async with self._looking, self._database.begin() as connection:
            found = await find_gathering(connection, *place, most_lines=wire.most_lines, most_bytes=room)
            if found is not None:
                return found
            digest = digest_of(lines.batches.next_key(target))
            found = await add_provider_batch(connection, place[0], target, digest)
        await self._reservations.begin(RESERVATIONS + found)
        return found
