# What goes back to the database: room that is not used, told in few statements. It has left the room before.

from __future__ import annotations

import asyncio
from itertools import islice

import structlog

from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.rooms import Rooms
from billing.quotas.standing import GIVE_UP_AFTER, Standing
from protocol.serving.deadlines import running_timeout

GIVE_BACK_AFTER = 0.02  # seconds after which what a settled call left of a tight balance goes back
MOST_RETURNS = 500  # leases told in one statement

log = structlog.get_logger(__name__)


class Returns:
    """Gives back what is free of tight balances, and tells of all that was given back."""

    def __init__(self, standing: Standing, rooms: Rooms) -> None:
        self.telling: asyncio.Task[None] | None = None
        self._standing = standing
        self._rooms = rooms
        self._next: asyncio.TimerHandle | None = None
        self._returned_at = 0.0  # loop time; what was free of tight balances went back then

    def return_soon(self) -> None:
        """Give back what is free of tight balances, no more often than the pace of many owners."""
        if self._next is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time() + GIVE_BACK_AFTER, self._returned_at + self._standing.pace)
            self._next = loop.call_at(at, self.return_tight)

    def return_tight(self) -> None:
        """Give back what is free of tight balances."""
        self._next, self._returned_at = None, asyncio.get_running_loop().time()
        self._rooms.give_back(self._rooms.tight)
        self.tell_soon()

    def tell_soon(self) -> None:
        """Tell of it beside whatever goes on."""
        if self.telling is None or self.telling.done():
            self.telling = asyncio.create_task(self._tell_if_heard())

    async def tell(self) -> None:
        """Tell the database of everything returned. Raises what it raises."""
        standing, owner = self._standing, self._standing.owner
        while rooms := tuple(islice(self._rooms.untold, MOST_RETURNS)):
            said, sent = [room.as_told() for room in rooms], standing.mark
            async with running_timeout(GIVE_UP_AFTER):
                beat = await standing.store.give_back(owner, said)
            if beat is None or standing.owner != owner:  # it has ended
                return
            standing.heard(sent, beat)
            for room, one in zip(rooms, said, strict=True):
                room.told = max(room.told, one.returned)
                if room.told == room.returned:
                    self._rooms.untold.pop(room, None)

    async def set_again(self) -> None:
        """Tell a database that forgot how all leases stand by this process's figures. Raises what it raises."""
        standing, leased = self._standing, [room for room in self._rooms if room.granted]
        said = [room.as_told() for room in leased]
        beat = await standing.store.set_again(standing.owner, said)
        standing.acknowledged = max(standing.acknowledged, beat or 0)
        for room, one in zip(leased, said, strict=True):
            room.told = one.returned  # more was acknowledged, perhaps, by one that did not know of what was granted
            if room.told < room.returned:
                self._rooms.untold[room] = None

    async def _tell_if_heard(self) -> None:
        try:
            await self.tell()
        except POSTGRES_AWAY as exc:  # it is told with the next turn
            log.info("returns_untold", error=repr(exc))
