# An index of what replicas tell: in both encodings, without a gap, and forgotten with its replica. Sockets are real.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_network
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import Raw
from structlog.testing import capture_logs
from zmq.asyncio import Context

from gateway.fleet import kv_events
from gateway.fleet.kv_events import KvEvents, apply
from gateway.run.processes import free_port
from gpu_backend.server.client.kv_publisher import KvPublisher
from gpu_backend.step.block_events import AllBlocksCleared, BlockRemoved, BlockStored, Medium
from gpu_backend.step.config import KvEventsConfig
from protocol.serving.announcements import KvEventsAt
from router.cached_prompts import CachedPrompts
from tests.support.waiting import until_found

URL = "http://127.0.0.1:1/v1"


def packed(*events: Any) -> list[Raw]:
    return [Raw(msgspec.msgpack.encode(event)) for event in events]


@pytest.mark.parametrize(
    "told",
    [
        packed(
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "token_ids": [5],
                "medium": "GPU",
                "prompt_marks": [[7, 1], [8, 1]],
            },
            {"type": "BlockStored", "block_hashes": [2], "token_ids": [6], "new": 1},
            {"type": "BlockRemoved", "block_hashes": [2, b"32 bytes"], "medium": "GPU", "group_idx": 0},
        ),
        packed(
            ["BlockStored", [1], None, [5], 1, None, "GPU", None, None, 0, [[7, 1], [8, 1]]],
            ["BlockStored", [b"32 bytes"], None, [6], 1, None],
            ["BlockRemoved", [b"32 bytes", 2], "GPU", 0],
        ),
    ],
    ids=["maps", "arrays"],
)
def test_both_encodings_are_read(told: list[Raw]) -> None:
    """Fields of later releases and hashes of other engines are passed over; ``AllBlocksCleared`` ends all."""
    cached = CachedPrompts()
    for event in told:
        apply(event, cached)
    known = [cached.find((mark,)).length for mark in (7, 8, 9)]
    for cleared in packed({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]):
        apply(cleared, cached)

    assert known == [512, 512, 0] and len(cached) == 0


class Replica:
    """Tells batches, each of one mark that is stored, and tells again what it keeps."""

    def __init__(self, context: Context) -> None:
        self.kept: dict[int, bytes] = {}
        self.answers = "whole"  # silent, short, half
        self._times = count(1.0)
        self._events, self._replays = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._events, self._replays)]
        self.address = KvEventsAt(*(f"tcp://*:{port}" for port in ports))
        self.task = asyncio.create_task(self._tell_again())

    def keep(self, number: int, mark: int) -> None:
        """Tell what no subscriber hears: only who asks."""
        event = {"type": "BlockStored", "medium": "GPU", "prompt_marks": [(mark, mark)]}
        self.kept[number] = msgspec.msgpack.encode((next(self._times), [event], 0))

    async def tell(self, number: int, mark: int) -> None:
        self.keep(number, mark)
        await self.send(number.to_bytes(8, "big"), self.kept[number])

    async def send(self, number: bytes, payload: bytes) -> None:
        await self._events.send_multipart((b"kv@tiny", number, payload))

    async def heard(self) -> None:
        """Wait for a subscriber."""
        await self._events.recv()

    async def _tell_again(self) -> None:
        while True:
            who, _, start = await self._replays.recv_multipart()
            if self.answers == "silent":
                continue
            first = int.from_bytes(start, "big")
            told = [(n, batch) for n, batch in self.kept.items() if n >= first and self.answers != "short"]
            for number, batch in told[:1] if self.answers == "half" else told:
                await self._replays.send_multipart((who, b"", number.to_bytes(8, "big"), batch))
            if self.answers != "half":
                await self._replays.send_multipart((who, b"", b"\xff" * 8, b""))


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    context = Context()
    replica = Replica(context)
    yield replica
    replica.task.cancel()
    context.destroy(linger=0)


@pytest.fixture
async def events() -> AsyncIterator[KvEvents]:
    events = KvEvents()
    yield events
    events.close()


async def known(events: KvEvents, *marks: int) -> None:
    """Wait until exactly these are known."""

    async def is_so() -> bool:
        cached = events.cached[URL]
        return len(cached) == len(marks) and all(cached.find((mark,)).length for mark in marks)

    await until_found(is_so)


async def test_what_was_told_before_and_in_a_gap_is_known(replica: Replica, events: KvEvents) -> None:
    """All that the replica still has is asked for at the start; later what did not come, before what came after it."""
    replica.keep(0, 70)
    replica.keep(1, 71)
    events.note(URL, "first", replica.address)
    await replica.heard()
    await known(events, 70, 71)
    await replica.tell(2, 72)
    replica.keep(3, 73)
    await replica.tell(4, 74)

    await known(events, 70, 71, 72, 73, 74)


@pytest.mark.parametrize("answers", ["silent", "short", "half"])
async def test_a_replica_that_does_not_tell_again_is_asked_later(
    answers: str, replica: Replica, events: KvEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is known of what a lost batch may have removed, and what comes is read at once. One that has
    nothing new is asked now and then whether a batch was lost that no later one tells of."""
    monkeypatch.setattr(kv_events, "REPLAY_PATIENCE", 0.1)
    monkeypatch.setattr(kv_events, "ASKS_EVERY", 1.0)
    replica.keep(0, 70)
    events.note(URL, "first", replica.address)
    await replica.heard()
    await known(events, 70)
    replica.answers = answers
    replica.keep(1, 71)
    await replica.tell(2, 72)
    await replica.tell(3, 73)
    await known(events, 72, 73)
    replica.keep(4, 74)
    await replica.tell(5, 75)
    await known(events, 75)
    replica.answers = "whole"
    await known(events, 70, 71, 72, 73, 74, 75)
    replica.keep(6, 76)

    await known(events, 70, 71, 72, 73, 74, 75, 76)


async def test_batches_in_another_order_are_put_in_theirs(replica: Replica, events: KvEvents) -> None:
    """The one that is missing is asked for; as it comes, it is known."""
    events.note(URL, "first", replica.address)
    await replica.heard()
    for number in range(4):
        replica.keep(number, 70 + number)
    for number in (1, 0, 3, 2):
        await replica.send(number.to_bytes(8, "big"), replica.kept[number])

    await known(events, 70, 71, 72, 73)


async def test_what_cannot_be_had_again_ends_what_was_known(replica: Replica, events: KvEvents) -> None:
    """What is still there may have been removed since. Numbers that begin again are a replica's that began again."""
    events.note(URL, "first", replica.address)
    await replica.heard()
    await replica.tell(0, 70)
    await known(events, 70)
    replica.kept.clear()
    await replica.tell(5, 75)
    await known(events, 75)
    replica.kept.clear()
    await replica.tell(0, 80)
    await replica.tell(1, 81)

    await known(events, 80, 81)


async def test_a_replica_is_forgotten_with_its_start(replica: Replica, events: KvEvents) -> None:
    """One that does not answer, that tells no more, or that the configuration lacks; another start is followed anew."""
    replica.keep(0, 70)
    events.note(URL, "first", replica.address)
    await known(events, 70)
    replica.kept.clear()
    replica.keep(0, 80)
    events.note(URL, "first", replica.address)
    same = events.cached[URL]
    events.note(URL, "second", replica.address)
    await known(events, 80)
    events.note(URL, "second", None)
    silent = dict(events.cached)
    events.note(URL, "second", replica.address)
    events.keep({"http://127.0.0.1:2/v1"})

    assert same.find((70,)).length and silent == events.cached == {}


async def test_an_address_that_is_none_is_told_once(events: KvEvents) -> None:
    """And nothing is known of that replica; the others are followed all the same."""
    with capture_logs() as logs:
        for _ in range(2):
            events.note(URL, "first", KvEventsAt("5557"))

    assert events.cached == {} and [line["event"] for line in logs] == ["kv_events_not_followed"]


@pytest.mark.parametrize(
    ("base_url", "endpoint", "networks", "is_followed"),
    [
        ("http://10.0.0.5:8100/v1", "tcp://*:5557", (), True),
        ("http://10.0.0.5:8100/v1", "tcp://10.0.0.5:5557", (), True),
        ("http://gpu-0:8100/v1", "tcp://GPU-0:5557", (), True),
        ("http://localhost:8100/v1", "tcp://127.0.0.1:5557", (), True),
        ("http://[::1]:8100/v1", "tcp://[::]:5557", (), True),
        ("http://10.0.0.5:8100/v1", "tcp://10.0.0.6:5557", ("10.0.0.0/24",), True),
        ("http://10.0.0.5:8100/v1", "tcp://10.0.0.6:5557", (), False),
        ("http://10.0.0.5:8100/v1", "tcp://10.0.1.6:5557", ("10.0.0.0/24",), False),
        ("http://10.0.0.5:8100/v1", "tcp://127.0.0.1:5557", (), False),
        ("http://10.0.0.5:8100/v1", "tcp://metadata:5557", ("10.0.0.0/24",), False),
        ("http://10.0.0.5:8100/v1", "tcp://169.254.169.254:80", ("0.0.0.0/0",), False),
        ("http://10.0.0.5:8100/v1", "tcp://10.0.0.9;10.0.0.5:5557", (), False),
        ("http://127.0.0.1:8100/v1", "ipc:///run/docker.sock", (), False),
    ],
)
async def test_a_replica_tells_events_where_it_is(
    events: KvEvents, base_url: str, endpoint: str, networks: tuple[str, ...], is_followed: bool
) -> None:
    """Or in the networks that the file names: it does not send a gateway to any other address, for its events or for
    those that are told again."""
    ranges = tuple(map(ip_network, networks))
    with capture_logs() as logs:
        events.note(base_url, "first", KvEventsAt(endpoint), ranges)
        first = base_url in events.cached
        events.note(base_url, "second", KvEventsAt("tcp://*:5557", endpoint), ranges)

    assert (first, base_url in events.cached) == (is_followed, is_followed)
    assert [entry["event"] for entry in logs] == ["kv_events_not_followed"] * 2 * (not is_followed)


async def test_what_is_no_batch_ends_neither_the_index_nor_the_next_answer(replica: Replica, events: KvEvents) -> None:
    """Numbers beyond all, arrays without an end, half an answer: what is told afterwards is known; each is logged."""
    replica.keep(0, 70)
    replica.kept[1] = b"no batch"
    replica.keep(2, 72)
    with capture_logs() as logs:

        async def is_logged() -> bool:
            return bool(logs)

        events.note(URL, "first", replica.address)
        await replica.heard()
        await until_found(is_logged)
        del replica.kept[1]
        for number in (b"\xff" * 9, b"\xff" * 10):
            await replica.send(number, replica.kept[0])
        for payload in (b"\x92" * 100_000, b""):
            await replica.send(b"", payload)
        await replica.tell(3, 73)
        await replica.tell(4, 74)
        await known(events, 72, 73, 74)

    assert {line["event"] for line in logs} == {"kv_events_unread"} and len(logs) <= 3


async def test_a_gateway_that_starts_late_hears_of_all_that_is_there(events: KvEvents) -> None:
    """Of an engine that keeps fewer batches than it has sent: what is gone since is not told, nor what was cleared."""
    address = KvEventsAt(*(f"tcp://127.0.0.1:{free_port()}" for _ in range(2)))
    config = KvEventsConfig(True, endpoint=address.endpoint, replay_endpoint=address.replay_endpoint, buffer_steps=2)
    publisher = KvPublisher(config)
    for told in (
        [stored(60, "GPU"), AllBlocksCleared(), stored(70, "GPU"), stored(71, "GPU"), stored(72, "GPU")],
        [BlockRemoved([71, 72], "GPU"), stored(72, "CPU")],
        [stored(73, "GPU")],
        [BlockRemoved([73], "GPU")],
        [stored(74, "GPU")],
    ):
        publisher.publish(told)
    await asyncio.sleep(0.1)
    events.note(URL, "first", address)

    await known(events, 70, 72, 74)


async def test_what_an_engine_had_no_room_to_send_is_told_later(events: KvEvents) -> None:
    """Batches beyond its queue are missed, and so not kept: who asks is told of every mark that is there. Of port 0 it
    says where it listens."""
    there = "tcp://127.0.0.1:0"
    publisher = KvPublisher(KvEventsConfig(True, endpoint=there, replay_endpoint=there, max_queue_size=1))
    sends, may_send = publisher._events.send_multipart, Event()
    publisher._events = SimpleNamespace(send_multipart=lambda parts: (may_send.wait(10), sends(parts)))
    publisher.publish([stored(70, "GPU")])
    await until_found(lambda: nothing_waits(publisher))  # it is being sent; then one waits, and the others have no room
    for mark in (71, 72, 73):
        publisher.publish([stored(mark, "GPU")])
    may_send.set()
    await until_found(lambda: nothing_waits(publisher))
    publisher.publish([stored(74, "GPU")])
    events.note(URL, "first", KvEventsAt(publisher.config.endpoint, publisher.config.replay_endpoint))

    await known(events, 70, 71, 72, 73, 74)


async def nothing_waits(publisher: KvPublisher) -> bool:
    return not publisher._waiting.qsize()


async def test_an_answer_is_told_whole_to_a_gateway_that_is_slow_to_read() -> None:
    """All batches that an engine keeps: it is no sooner sent than asked for, and more than sockets hold."""
    address, batches = f"tcp://127.0.0.1:{free_port()}", 1500
    events = f"tcp://127.0.0.1:{free_port()}"
    publisher = KvPublisher(KvEventsConfig(True, endpoint=events, replay_endpoint=address, buffer_steps=batches))
    for number in range(batches):
        publisher.publish([BlockStored([number], None, [number] * 3000, 16, "GPU", [None])])
    context = Context()
    gateway = context.socket(zmq.DEALER)
    gateway.setsockopt(zmq.RCVHWM, 1)
    gateway.connect(address)
    while publisher._waiting.qsize():
        await asyncio.sleep(0.01)
    await gateway.send_multipart((b"", bytes(8)))
    await asyncio.sleep(0.2)  # so long it reads nothing
    told = [int.from_bytes((await asyncio.wait_for(gateway.recv_multipart(), 10))[1], "big") for _ in range(batches)]
    end = await asyncio.wait_for(gateway.recv_multipart(), 10)
    context.destroy(linger=0)

    assert told == [*range(batches)] and end[1] == b"\xff" * 8


def stored(mark: int, medium: Medium) -> BlockStored:
    return BlockStored([mark], None, [1], 1, medium, [None], prompt_marks=[(mark, mark)])
