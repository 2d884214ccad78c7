# Long bodies wait for room before they are read, each team within its share.

from __future__ import annotations

import asyncio

import pytest

from billing.core.errors import RateLimited
from gateway.overload.body_memory import BodyRoom
from protocol.errors import Overloaded


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.overload.body_memory.WAIT", 0.05)


async def take(room: BodyRoom, team: str, size: int, done: asyncio.Event) -> None:
    async with room.taken(team, size):
        await done.wait()


async def began(work: asyncio.Task[None]) -> asyncio.Task[None]:
    await asyncio.sleep(0)
    return work


def test_a_team_takes_its_share_and_leaves_the_others_theirs() -> None:
    """What it has more waits, and goes in as soon as something of its own has ended."""

    async def scene() -> None:
        room, done, never = BodyRoom(of_all=100, of_a_team=10), asyncio.Event(), asyncio.Event()
        first = await began(asyncio.create_task(take(room, "a", 6, done)))
        waiting = await began(asyncio.create_task(take(room, "a", 6, never)))
        async with room.taken("b", 10):
            done.set()
            await first
        await asyncio.sleep(0)
        with pytest.raises(RateLimited):  # the one that waited holds it now
            async with room.taken("a", 6):
                pass
        waiting.cancel()
        await asyncio.wait([waiting])
        async with room.taken("a", 10):
            pass

    asyncio.run(scene())


def test_all_teams_together_have_a_bound() -> None:
    """Beyond it no team's share is at fault, and another gateway may have room."""

    async def scene() -> None:
        room = BodyRoom(of_all=15, of_a_team=10)
        async with room.taken("a", 10), room.taken("b", 1):
            with pytest.raises(Overloaded):
                async with room.taken("b", 5):
                    pass
            async with room.taken("b", 4):
                pass

    asyncio.run(scene())


def test_teams_that_hold_all_room_leave_each_other_team_one_body() -> None:
    """It goes in at once, its team's next one waits, and all room is there again in the end."""

    async def scene() -> None:
        room = BodyRoom(of_all=20, of_a_team=10)
        async with room.taken("a", 10), room.taken("b", 10):
            async with room.taken("c", 8):
                with pytest.raises(Overloaded):
                    async with room.taken("c", 1):
                        pass
            async with room.taken("c", 8):
                pass
        async with room.taken("a", 1), room.taken("b", 10), room.taken("a", 9):
            pass

    asyncio.run(scene())
