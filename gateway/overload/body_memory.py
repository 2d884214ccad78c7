# Room for long bodies, from their first byte until they are decoded. A body of 32 MiB may take its client minutes, so a
# few hundred at once, all of one key, would take all memory; and they are decoded one after the other. Each team has a
# share; a body beyond it waits unread, and is refused when nothing has become free. One body of each team goes in even
# where other teams hold all room: what is held stays below that room and the longest body of each team.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from billing.core.errors import RateLimited
from protocol.errors import Overloaded

MIB = 1024 * 1024
OF_ALL = 512 * MIB
OF_A_TEAM = 128 * MIB  # four of the longest
WAIT = 30.0  # seconds: a client with a slow line may send many at once


class SharedRoom:
    """Counts bytes that are held, by team, of which each has a share."""

    def __init__(self, of_all: int = OF_ALL, of_a_team: int = OF_A_TEAM) -> None:
        self._of_all = of_all
        self._of_a_team = of_a_team
        self._held: Counter[str] = Counter()
        self._held_by_all = 0

    def take(self, team_id: str, size: int) -> bool:
        """Hold room for ``size`` more bytes; whether there is any. They are held either way."""
        self._held[team_id] += size
        self._held_by_all += size
        return self._held[team_id] <= self._of_a_team and self._held_by_all <= self._of_all

    def give_back(self, team_id: str, size: int) -> None:
        """Hold so many bytes less."""
        self._held[team_id] -= size
        self._held_by_all -= size
        if not self._held[team_id]:
            del self._held[team_id]


class BodyRoom(SharedRoom):
    """Room for long bodies, which is waited for."""

    def __init__(self, of_all: int = OF_ALL, of_a_team: int = OF_A_TEAM) -> None:
        super().__init__(of_all, of_a_team)
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def taken(self, team_id: str, size: int) -> AsyncIterator[None]:
        """Hold room for ``size`` bytes inside the block. Raises RateLimited or Overloaded if there is none in time."""
        if not self._has_room(team_id, size):
            await self._wait_for_room(team_id, size)
        self.take(team_id, size)
        try:
            yield
        finally:
            self.give_back(team_id, size)
            freed, self._freed = self._freed, asyncio.Event()
            freed.set()

    def _has_room(self, team_id: str, size: int) -> bool:
        is_first = team_id not in self._held
        return is_first or (self._team_has_room(team_id, size) and self._held_by_all + size <= self._of_all)

    def _team_has_room(self, team_id: str, size: int) -> bool:
        return self._held[team_id] + size <= self._of_a_team

    async def _wait_for_room(self, team_id: str, size: int) -> None:
        try:
            async with asyncio.timeout(WAIT):
                while not self._has_room(team_id, size):
                    await self._freed.wait()
        except TimeoutError as exc:
            if self._team_has_room(team_id, size):
                raise Overloaded("Too many long requests are on their way to this gateway. Try again.") from exc
            raise RateLimited(
                f"Long requests of this team are on their way: {self._of_a_team // MIB} MiB at once are read. "
                "Send fewer at a time.",
                headers={"retry-after": "1"},
            ) from exc
