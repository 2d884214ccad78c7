# Work that outlives its request, and tasks that must end.

from __future__ import annotations

import asyncio

from gateway.core.background import Background, stop_all


def test_a_task_that_swallows_its_cancellation_ends_all_the_same() -> None:
    """A library may eat one cancellation; it is asked again until it has ended."""
    eaten = 0

    async def stubborn() -> None:
        nonlocal eaten
        while True:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                eaten += 1
                if eaten > 1:
                    raise

    async def scene() -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await asyncio.wait_for(stop_all([task]), 5)

    asyncio.run(scene())

    assert eaten == 2


def test_what_fails_behind_a_request_disturbs_no_other() -> None:
    """A failure is logged; the rest is finished before the house closes."""
    done: list[str] = []

    async def fail() -> None:
        raise RuntimeError("behind the scenes")

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append("work")

    async def scene() -> None:
        background = Background()
        background.spawn(fail())
        background.spawn(work())
        await background.drain(5)

    asyncio.run(scene())

    assert done == ["work"]
