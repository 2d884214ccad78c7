# Rows that are written behind the calls: what comes while a statement is under way, and where one fails.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from gateway.storage.rows_behind import WrittenBehind


class Letters(WrittenBehind[str]):
    """At most four wait, and two go with a statement, which takes until it is let go."""

    most, at_once = 4, 2

    def __init__(self) -> None:
        super().__init__(cast(Any, None), "letters")
        self.written: list[str] = []
        self.goes_on = asyncio.Event()

    async def _write(self, some: Sequence[str]) -> None:
        await self.goes_on.wait()
        self.written += some


async def test_what_is_being_written_is_not_counted_as_lost() -> None:
    """It counts in what the process keeps, and what finds no room beside it is lost: each is one or the other."""
    letters = Letters()
    for letter in "abcd":
        letters.add(letter)
    flushing = asyncio.create_task(letters.flush())
    await asyncio.sleep(0)
    for letter in "efgh":
        letters.add(letter)
    letters.goes_on.set()
    await flushing

    assert letters.written == ["a", "b", "g", "h"]
    assert letters.lost == 4 and letters._weight == 0


async def test_a_statement_that_fails_is_tried_again_and_two_flushes_write_once() -> None:
    """In the order in which they came; a process that ends flushes beside the loop that does."""
    letters = Letters()
    for letter in "abc":
        letters.add(letter)
    cut_off = asyncio.create_task(letters.flush())
    await asyncio.sleep(0)
    letters.add("d")
    cut_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut_off
    both = [asyncio.create_task(letters.flush()) for _ in range(2)]
    await asyncio.sleep(0)
    letters.goes_on.set()
    await asyncio.gather(*both)

    assert letters.written == ["a", "b", "c", "d"] and letters.lost == 0
