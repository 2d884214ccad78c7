# Drawing room from the database. A caller waits for two seconds, the statement goes on for two more, and what it may
# have drawn unheard is looked for until it is known: room comes in only as read back from the lease.

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta

import structlog
from msgspec import Struct

from billing.core.ids import EPOCH
from billing.core.store_errors import POSTGRES_AWAY, is_about_a_value, is_without_schema
from billing.quotas.lease_store import Need, Taken
from billing.quotas.returns import Returns
from billing.quotas.rooms import Rooms
from billing.quotas.standing import GIVE_UP_AFTER, Standing
from protocol.serving.deadlines import running_timeout

ASK_WITHIN = 2.0  # seconds that a caller waits for the database
STOOD_STILL = 8.0  # seconds that an ask never takes while this process runs
DONE_WITHIN = 60.0  # seconds after which a statement that was given up is over, if it was executed at all
LOOK_AGAIN = 1.0  # seconds until the first look at what it has drawn; each further one after twice as long

log = structlog.get_logger(__name__)


class _Look(Struct):
    next: float  # monotonic seconds
    until: float
    pause: float = LOOK_AGAIN


class Draws:
    """Asks for room, and hears late what callers no longer wait for."""

    def __init__(self, standing: Standing, rooms: Rooms, returns: Returns) -> None:
        self.unread: dict[tuple[int, tuple[Need, ...]], _Look] = {}  # asks that were given up
        self.late: set[asyncio.Task[Taken]] = set()  # asks under way whose callers were answered without them
        self._standing = standing
        self._rooms = rooms
        self._returns = returns

    def is_unread(self, scope: str) -> bool:
        """Whether something may have been drawn of a scope that was not told yet."""
        return any(need.scope == scope for _, needs in self.unread for need in needs)

    async def take(self, day: int, asks: Iterable[Sequence[Need]]) -> Taken | None:
        """Ask for callers that wait; ``None`` when the database does not answer them in time.

        ``asks`` are reckoned only if they are made: a call that is not asked for leaves no trace in its rooms.
        """
        standing = self._standing
        if not standing.may_ask or day <= self._rooms.forgotten:
            return Taken(refused="clock")
        if standing.is_away:  # until the next beat is answered: each caller would wait for the deadline
            return None
        asks = list(asks)
        asking, began = asyncio.create_task(self.draw(day, asks)), standing.clock.monotonic()
        try:
            async with running_timeout(ASK_WITHIN):
                taken = await asyncio.shield(asking)
        except POSTGRES_AWAY as exc:
            if is_without_schema(exc):
                raise  # Postgres is there, and no caller's wait helps
            if not asking.done():
                self.late.add(asking)
                asking.add_done_callback(self._hear_late)
            elif (
                standing.clock.monotonic() - began > STOOD_STILL
            ):  # the server ends a statement whose client says no more
                return await self.take(day, asks)
            standing.miss(began, exc)
            return None
        except asyncio.CancelledError:
            asking.cancel()
            raise
        standing.is_away = False
        return taken

    async def draw(self, day: int, asks: Sequence[Sequence[Need]]) -> Taken:
        """Ask once, and take in the answer. Raises what the database raises."""
        standing, owner, text = self._standing, self._standing.owner, (EPOCH + timedelta(days=day)).isoformat()
        sent, share, loop = standing.mark, standing.share / standing.living, asyncio.get_running_loop()
        began = loop.time()
        try:
            async with running_timeout(GIVE_UP_AFTER):
                taken = await standing.store.take(owner, text, asks, share)
        except (*POSTGRES_AWAY, asyncio.CancelledError) as exc:  # a beat's own deadline may end it, too
            if is_about_a_value(exc) or is_without_schema(exc):
                raise  # nothing was drawn, nor ever will be
            holds = {(need.scope, need.unit): need.hold for ask in asks for need in ask}
            needs = tuple(Need(*room, need=0, want=0, hold=hold) for room, hold in holds.items())
            now = standing.clock.monotonic()
            self.unread[day, needs] = _Look(now + LOOK_AGAIN, now + DONE_WITHIN)
            raise
        finally:
            standing.took = loop.time() - began
        if standing.owner != owner:  # it was ended meanwhile, and what it had went back: nothing of it is ours
            return Taken(refused="ended")
        standing.heard(sent, taken.beat)
        if taken.refused is None:
            asked = {(need.scope, need.unit) for ask in asks for need in ask}
            rooms = self._rooms.known(day, {scope for scope, _ in asked})
            self._rooms.take_in(taken, day, [room for room in rooms if (room.scope, room.unit) in asked])
        return taken

    async def read_again(self) -> None:
        """Learn what asks that were not answered have drawn after all, or it stays with us, unused and unknown. Raises
        what the database raises."""
        now = self._standing.clock.monotonic()
        for (day, needs), look in tuple(self.unread.items()):
            if now < look.next:
                continue
            is_over = now > look.until
            await self.draw(day, [needs])
            self._returns.return_tight()
            look.pause *= 2
            look.next = min(now + look.pause, look.until)
            if is_over:
                del self.unread[day, needs]

    def _hear_late(self, asking: asyncio.Task[Taken]) -> None:
        """Give back what an ask brought whose callers have been answered without it, unless others use it."""
        self.late.discard(asking)
        try:
            asking.result()
        except (*POSTGRES_AWAY, asyncio.CancelledError) as exc:
            log.info("ask_given_up", error=repr(exc))
        self._returns.return_tight()
