# The way of answers into the store, when their worker ends in the middle of it.

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.batch.claims import ClaimedItem
from gateway.batch.finishing import ItemResult
from gateway.batch.running import finisher as module
from gateway.batch.running.finisher import Finisher
from protocol.errors import ServiceError

ENDED = ItemResult(
    claim=ClaimedItem(
        batch_id="b",
        position=0,
        custom_id="c",
        body=b"{}",
        tries=1,
        losses=0,
        is_first=True,
        concurrency_group="",
        endpoint="/v1/chat/completions",
        key_id="k",
        priority="normal",
        expires_at=0.0,
    ),
    status="completed",
)


class Slow(Finisher):
    """A store that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None), "w", keep=86_400.0)
        self.may_answer = asyncio.Event()

    async def _write(self, ends: list[ItemResult]) -> set[str]:
        await self.may_answer.wait()
        return {each.claim.name for each in ends}


async def test_what_is_being_stored_is_heard_of_though_its_worker_ends() -> None:
    """It may be in the ledger already: the books must not close as if it were not."""
    finisher = Slow()
    storing = asyncio.create_task(finisher.store(ENDED))
    await asyncio.sleep(0.05)
    for _ in range(3):
        storing.cancel()
        await asyncio.sleep(0.01)
    finisher.may_answer.set()

    assert await storing is True


async def test_a_store_that_never_answers_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Postgres is away: the item runs again elsewhere."""
    monkeypatch.setattr(module, "STORE_GRACE", 0.0)
    storing = asyncio.create_task(Slow().store(ENDED))
    await asyncio.sleep(0.05)
    storing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await storing


class Noting(Finisher):
    """A store that notes how many answers come together."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None), "w", keep=86_400.0)
        self.together: list[int] = []

    async def _write(self, ends: list[ItemResult]) -> set[str]:
        self.together.append(len(ends))
        return {each.claim.name for each in ends}


@pytest.mark.parametrize(("size", "groups"), [(3 * 2**20, [3, 3, 1]), (40 * 2**20, [1] * 7), (10, [7])])
async def test_one_transaction_holds_few_megabytes(size: int, groups: list[int]) -> None:
    """However many answers end at once, and at least one."""
    finisher, answer = Noting(), bytes(size)
    ends = [replace(ENDED, claim=replace(ENDED.claim, position=place), response=answer) for place in range(7)]

    assert all(await asyncio.gather(*(finisher.store(each) for each in ends)))
    assert finisher.together == groups


class Choosy(Noting):
    """A store that cannot even be asked to take one of the answers."""

    async def _write(self, ends: list[ItemResult]) -> set[str]:
        if any(each.claim.position == 3 for each in ends):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return await super()._write(ends)


async def test_an_answer_that_cannot_be_written_holds_up_no_other() -> None:
    """Its item hears that it failed; those that were to be stored with it are stored."""
    finisher = Choosy()
    ends = [replace(ENDED, claim=replace(ENDED.claim, position=place)) for place in range(7)]
    async with asyncio.timeout(5):
        stored = await asyncio.gather(*(finisher.store(each) for each in ends), return_exceptions=True)

    assert isinstance(stored[3], ServiceError) and stored[3].headers == {"x-should-retry": "false"}
    assert stored[:3] + stored[4:] == [True] * 6
