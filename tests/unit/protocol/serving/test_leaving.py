# The end of a call whose client leaves.

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from protocol.serving.leaving import LEAVING, ended_when_client_leaves


def leaves_after(seconds: float) -> Any:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    return receive


def test_a_call_ends_when_its_client_leaves() -> None:
    """What runs for a client is cancelled as soon as the client has gone, and the task itself goes on."""

    async def scene() -> list[str]:
        told = []
        with ended_when_client_leaves({}, leaves_after(0.0)):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                told.append("cancelled")
                raise
        told.append("went on")
        return told

    assert asyncio.run(scene()) == ["cancelled", "went on"]


def test_a_server_that_tells_by_itself_is_not_waited_for() -> None:
    """Where a server calls who asks it to, no task waits, and it is asked no longer when the call has ended."""

    async def scene() -> tuple[bool, bool, object]:
        told: list[Any] = []
        with ended_when_client_leaves({"extensions": {LEAVING: told.append}}, None) as client:
            is_alone = len(asyncio.all_tasks()) == 1
            told[0]()
            await asyncio.sleep(30)
        return is_alone, client.has_left, told[-1]

    assert asyncio.run(scene()) == (True, True, None)


def test_a_cancellation_from_elsewhere_passes_through() -> None:
    """Only the client's leaving is swallowed: a server that shuts down still cancels its requests."""

    async def scene() -> None:
        with ended_when_client_leaves({}, leaves_after(30)):
            await asyncio.sleep(30)

    async def cancelled_from_outside() -> bool:
        task = asyncio.create_task(scene())
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return True
        return False

    assert asyncio.run(cancelled_from_outside())


def test_an_error_inside_is_not_hidden() -> None:
    """The watcher changes nothing about a call that fails by itself."""

    async def scene() -> None:
        with ended_when_client_leaves({}, leaves_after(30)):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(scene())
