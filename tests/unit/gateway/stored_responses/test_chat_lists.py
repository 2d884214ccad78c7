# Lists of stored chats that find little: how many of a team go on for long.

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw, json

from billing.core.errors import RateLimited
from gateway.overload.read_limit import StoredLimit
from gateway.storage.encryption import Sealer
from gateway.stored_responses.chats import MOST_IN_VAIN, MOST_WAITING, ChatStore
from gateway.stored_responses.turns import StoredChat, seal
from protocol.errors import BadRequest


class EndlessChats:
    """A store with ever another chat."""

    sealer = Sealer("a pepper of no use", "stored-response")

    def __init__(self) -> None:
        plain = json.encode(StoredChat(Raw(b"[]"), Raw(b"{}"), {}))
        facts = {"id": "chatcmpl-1", "created_at": None, "bytes": len(plain)}
        self._row = SimpleNamespace(**facts, sealed=seal(self.sealer, "team", "chatcmpl-1", plain))

    async def rows(self, *_: object, **__: object) -> list[Any]:
        await asyncio.sleep(0)
        return [self._row]


async def test_few_lists_of_a_team_wait_for_their_turn() -> None:
    """However many it asks for: each holds pages in memory and looks at a clock. The others are told to wait."""
    now, looks = 0.0, 0
    limit = StoredLimit(lambda: now)
    store = ChatStore(EndlessChats())  # type: ignore[arg-type]

    def note() -> None:
        nonlocal looks
        looks += 1
        limit.take("team")

    def ask() -> asyncio.Task[Any]:
        return asyncio.create_task(
            store.page("team", lambda _: False, note, limit=1, after=None, is_rising=True), name="list"
        )

    lists = [ask() for _ in range(int(limit.at_once))]
    await asyncio.sleep(0.2)
    waiting = [one for one in lists if not one.done()]
    known = looks
    await asyncio.sleep(0.2)

    assert len(waiting) == MOST_WAITING and looks - known <= 12 * MOST_WAITING
    with pytest.raises(RateLimited, match="more than 50 times a second"):
        await next(one for one in lists if one.done())
    now = MOST_WAITING * MOST_IN_VAIN / limit.a_second
    limit.at_once = float(MOST_WAITING * MOST_IN_VAIN)
    for one in waiting:
        with pytest.raises(BadRequest, match="Go on with after=chatcmpl-1"):
            await one
    assert not store._waiting


async def test_a_page_after_one_that_was_slowed_waits_too() -> None:
    """The reads of a long search used up what the team may ask: the page after it is late, and no 429."""
    now = 0.0
    limit = StoredLimit(lambda: now)
    store = ChatStore(EndlessChats())  # type: ignore[arg-type]
    for _ in range(int(limit.at_once)):
        limit.take("team")
    after = store.page("team", lambda _: True, lambda: limit.take("team"), limit=1, after=None, is_rising=True)

    page = asyncio.create_task(after)
    await asyncio.sleep(0.05)
    is_done, now = page.done(), 2 / limit.a_second

    assert not is_done and [*(await page)[0]] == ["chatcmpl-1"]
