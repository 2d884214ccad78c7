# Counts of prompts beside what the engine is for: one at a time, few that wait, none for a client that has left.

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gpu_backend.server.checkpoint.tokens import LONG_TEXT, TextCodec
from gpu_backend.server.requests.counting import MOST_WAITING, Counts
from protocol.errors import Overloaded
from tests.support.fake_engine import FakeEngine
from tests.support.front import CHAT
from tests.support.waiting import until

LONG = LONG_TEXT * "a"


class _Held:
    """Holds the tokenizer up in texts that begin with ``a``, and knows which others it was given."""

    def __init__(self) -> None:
        self.begun, self.goes_on, self.texts = threading.Semaphore(0), threading.Event(), list[str]()

    def hold(self, text: str) -> None:
        self.texts.append(text[:1])
        if text.startswith("a"):
            self.begun.release()
            assert self.goes_on.wait(10)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Held]:
    held, encode = _Held(), TextCodec.encode

    def slowly(codec: TextCodec, text: str, most: int, **more: Any) -> tuple[int, ...]:
        held.hold(text)
        return encode(codec, text, most, **more)

    monkeypatch.setattr(TextCodec, "encode", slowly)
    yield held
    held.goes_on.set()


def test_counts_run_one_by_one_and_few_wait(http: httpx.Client, engine: FakeEngine, held: _Held) -> None:
    """Beyond some bytes that wait a count is a 503 on every route, and replies go on meanwhile; what waits for a client
    that has left is not begun."""
    filling = b'{"prompt": "b"' + b" " * (MOST_WAITING - 100) + b"}"

    def is_refused() -> bool:
        try:
            return http.post("/tokenize", json={"prompt": "c" * LONG_TEXT}, timeout=0.2).status_code == 503
        except httpx.ReadTimeout:
            return False

    def fill() -> httpx.Response | None:
        answer = http.post("/tokenize", content=filling)
        return answer if answer.status_code == 200 else None  # one of the others waits

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(http.post, "/tokenize", json={"prompt": LONG})
        assert held.begun.acquire(timeout=10)
        assert not is_refused()
        second = threads.submit(until, fill)
        until(is_refused)
        for path, body in (
            ("/tokenize", {"messages": [{"role": "user", "content": "d" * 500}]}),
            ("/detokenize", {"tokens": [1] * 500}),
            ("/v1/completions/render", {"model": "tiny", "prompt": "d" * 500}),
            ("/v1/chat/completions/render", CHAT | {"messages": [{"role": "user", "content": "d" * 500}]}),
        ):
            refused = http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded"), path
            assert "take a token for every four bytes" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        held.goes_on.set()

        assert first.result().json()["count"] == LONG_TEXT
        assert second.result().json()["count"] == 1
    assert "c" not in held.texts and "d" not in held.texts


async def test_a_count_that_has_begun_ends_before_another_begins() -> None:
    """Also where its client leaves; what it raises then is told to none, and room is had again."""
    counts, ends, order = Counts(), asyncio.Event(), list[str]()

    async def count(name: str) -> str:
        order.append(name)
        await ends.wait()
        order.append(f"{name} ends")
        if name == "first":
            raise ValueError
        return name

    def take(name: str, size: int = 1) -> asyncio.Task[str]:
        return asyncio.create_task(counts.take(size, lambda: count(name)))

    first, second, third = take("first"), take("second", MOST_WAITING), take("third")
    await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(Overloaded):
        await third
    second.cancel()
    fourth = take("fourth")
    await asyncio.sleep(0.01)
    assert order == ["first"]
    ends.set()

    assert await fourth == "fourth"
    assert order == ["first", "first ends", "fourth", "fourth ends"]
