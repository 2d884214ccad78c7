# What makes two calls the same, which keys there are, and how a call is heard by a client that may be slow or gone.

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.calls.call import Call
from gateway.core.principals import Caller, Team
from gateway.dialects.options import read_idempotency_key
from gateway.idempotency.replay_buffer import Message, ReplayBuffer
from gateway.inference.idempotency import digest_of
from protocol.chat import ChatRequest
from protocol.decoding import decode_with_extra
from protocol.errors import BadRequest, ServiceError
from router import RoutingOptions
from router.catalog.targets import Tier
from tests.support.clock import SetClock

BODY: dict[str, Any] = {
    "model": "small",
    "messages": [{"role": "user", "content": "hi"}],
    "temperature": 1,
    "metadata": {"a": "1", "b": "2"},
    "top_k": {"x": 1, "y": 2},
}


def digest(body: bytes, pepper: str = "pepper", **fields: Any) -> bytes:
    request, extra = decode_with_extra(body, ChatRequest)
    clock = SetClock()
    known: dict[str, Any] = {
        "request_id": clock.new_id(),
        "caller": Caller(team=Team(id="a", name="A"), key_id="k"),
        "endpoint": "chat.completions",
        "request": request,
        "routing": RoutingOptions(),
        "extra": extra,
        "created_at": clock.now(),
        "started": clock.monotonic(),
    }
    return digest_of(Call(**(known | fields)), pepper)


def test_the_same_request_written_differently_is_the_same() -> None:
    """Whitespace, the order of keys at any depth, 1 or 1.0, and a null for what was not said change nothing."""
    spaced = b"""{ "top_k": {"y": 2, "x": 1}, "metadata": {"b": "2", "a": "1"}, "temperature": 1.0, "stop": null,
        "messages": [ {"content": "hi", "role": "user"} ], "model": "small" }"""

    assert digest(msgspec.json.encode(BODY)) == digest(spaced)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "large"},
        {"messages": [{"role": "user", "content": "hi "}]},
        {"temperature": 0.9},
        {"stream": True},
        {"top_k": {"x": 1, "y": 3}},
        {"user": "someone"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_body_counts(change: dict[str, Any]) -> None:
    """Whatever may change the answer makes another request, also fields that we do not know."""
    assert digest(msgspec.json.encode(BODY)) != digest(msgspec.json.encode(BODY | change))


@pytest.mark.parametrize(
    "change",
    [
        {"routing": RoutingOptions(tier=Tier.BATCH)},
        {"routing": RoutingOptions(quality=0.5)},
        {"routing": RoutingOptions(max_cost_nanousd=1)},
        {"priority": "high"},
    ],
    ids=["tier", "quality", "most", "priority"],
)
def test_what_headers_say_counts(change: dict[str, Any]) -> None:
    """Tier, quality, highest cost and priority belong to the request, in whichever place they were said."""
    assert digest(msgspec.json.encode(BODY)) != digest(msgspec.json.encode(BODY), **change)


def test_who_asks_and_when_does_not_count() -> None:
    """A retry comes later, under another request id, perhaps by another key of the team."""
    other = {"caller": Caller(team=Team(id="a", name="A"), key_id="k2"), "created_at": 5.0, "client_request_id": "x"}

    assert digest(msgspec.json.encode(BODY)) == digest(msgspec.json.encode(BODY), **other)


def test_a_digest_cannot_be_tried_without_the_pepper() -> None:
    """Short prompts could be guessed from a plain hash."""
    assert digest(msgspec.json.encode(BODY)) != digest(msgspec.json.encode(BODY), pepper="other")


@pytest.mark.parametrize("key", ["a", "8e03978e-40d5-43e8-bc93-6894a57f9324", "two words ~!", "x" * 255])
def test_a_key_is_any_printable_text(key: str) -> None:
    """1 to 255 characters of printable ASCII, taken as they are."""
    assert read_idempotency_key({"idempotency-key": key}) == key
    assert read_idempotency_key({}) is None


@pytest.mark.parametrize("key", ["", "x" * 256, "schlüssel", "tab\there", "\x7f"])
def test_other_keys_are_refused(key: str) -> None:
    """Nothing else, so that a key is the same wherever it is stored."""
    with pytest.raises(BadRequest):
        read_idempotency_key({"idempotency-key": key})


class Client:
    """What a client was sent; it may stop reading."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.heard.append(message)


def part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def write_error(error: ServiceError) -> bytes:
    return f"error: {error.message}".encode()


def test_a_replay_buffer_plays_what_is_said_and_ends() -> None:
    """Messages come in order, those said before the client listened too."""

    async def scene() -> None:
        replay, client = ReplayBuffer(100), Client()
        await replay.send(part(b"a"))
        playing = asyncio.create_task(replay.play(client.send, write_error))
        await asyncio.sleep(0)
        await replay.send(part(b"b"))
        replay.end()
        await playing

        assert [message["body"] for message in client.heard] == [b"a", b"b"]
        assert not replay.is_heard

    asyncio.run(scene())


def test_a_call_waits_for_no_reader_until_too_much_waits() -> None:
    """A client that does not read holds the call up only when more waits for it than the replay has room for."""

    async def scene() -> None:
        replay, client = ReplayBuffer(10), Client()
        client.reads.clear()
        playing = asyncio.create_task(replay.play(client.send, write_error))
        for _ in range(3):
            await asyncio.wait_for(replay.send(part(b"12345")), 5)
            await asyncio.sleep(0)
        stuck = asyncio.create_task(replay.send(part(b"12345")))
        await asyncio.sleep(0.01)
        assert not stuck.done()
        client.reads.set()
        await asyncio.wait_for(stuck, 5)
        replay.end()
        await playing

        assert len(client.heard) == 4

    asyncio.run(scene())


def test_a_client_that_left_holds_up_nothing() -> None:
    """Whoever waited for it goes on, and what is said from then on is dropped."""

    async def scene() -> None:
        replay, client = ReplayBuffer(4), Client()
        client.reads.clear()
        playing = asyncio.create_task(replay.play(client.send, write_error))
        await replay.send(part(b"1234"))
        await asyncio.sleep(0)
        stuck = asyncio.create_task(replay.send(part(b"12345")))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.wait_for(stuck, 5)
        await asyncio.wait_for(replay.send(part(b"1" * 100)), 5)

        assert not replay.is_heard and client.heard == []

    asyncio.run(scene())


def test_a_failure_before_anything_was_sent_keeps_its_status() -> None:
    """It is raised for the one handler of errors."""

    async def scene() -> None:
        replay, client = ReplayBuffer(10), Client()
        replay.end(ServiceError("no", status=502))
        with pytest.raises(ServiceError, match="no"):
            await replay.play(client.send, write_error)

        assert client.heard == []

    asyncio.run(scene())


def test_a_later_failure_is_written_into_the_stream() -> None:
    """The status is gone; the stream says it and ends. What comes after an end changes nothing."""

    async def scene() -> None:
        replay, client = ReplayBuffer(10), Client()
        await replay.send(part(b"a"))
        replay.end(ServiceError("later"))
        replay.end()
        await replay.send(part(b"b"))
        await replay.play(client.send, write_error)

        assert [message["body"] for message in client.heard] == [b"a", b"error: later"]
        assert not client.heard[-1]["more_body"]

    asyncio.run(scene())
