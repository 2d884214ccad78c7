# The way of answers into the store, when their worker ends in the middle of it.

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gateway.batch import finisher as module
from gateway.batch.claims import Claim, Ended
from gateway.batch.finisher import Finisher

ENDED = Ended(
    claim=Claim(
        batch_id="b",
        position=0,
        custom_id="c",
        body=b"{}",
        tries=1,
        lane="",
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
        super().__init__(cast(Any, None), "w")
        self.may_answer = asyncio.Event()

    async def _say(self, ends: list[Ended]) -> set[str]:
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
    monkeypatch.setattr(module, "LAST_WORD", 0.0)
    storing = asyncio.create_task(Slow().store(ENDED))
    await asyncio.sleep(0.05)
    storing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await storing
