# Whose books are looked after when.

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

from gateway.calls.accounting import CallAccounting
from gateway.calls.journaling import OpenCalls
from gateway.core.background import stop_all


class Books:
    """A running call's account that writes down when it was looked after."""

    def __init__(self) -> None:
        self.is_closed = False
        self.noted: list[float] = []
        self.renewed = 0
        self.hold: Any = None

    def note_progress(self) -> None:
        """Remember the moment."""
        self.noted.append(asyncio.get_running_loop().time())

    async def renew(self) -> None:
        """Count it."""
        self.renewed += 1


def test_every_running_call_is_noted_in_turn() -> None:
    """Each about once a second, at moments of its own; a closed one never."""

    async def scene() -> None:
        keeper, books = OpenCalls(), [Books() for _ in range(100)]
        closed = Books()
        closed.is_closed = True
        for one in [*books, closed]:
            keeper.add(cast(CallAccounting, one))
        running = asyncio.create_task(keeper.run())
        while not all(one.noted for one in books):
            await asyncio.sleep(0.05)
        await stop_all([running])

        moments = sorted(one.noted[0] for one in books)
        assert sum(later - earlier > 0.05 for earlier, later in pairwise(moments)) >= 5
        assert sum(one.renewed for one in books) < len(books)  # theirs are five times as rare
        assert not closed.noted and not closed.renewed

    asyncio.run(scene())
