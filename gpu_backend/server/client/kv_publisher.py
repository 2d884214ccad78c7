# KV events over ZeroMQ, as vLLM publishes them (vllm/distributed/kv_events.py): every batch of them is one message of
# topic, sequence number and MessagePack, and the last batches can be asked for again.

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from gpu_backend.step.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, Medium
from gpu_backend.step.config import KvEventsConfig

RANK = 0  # of a data-parallel replica, which ours is alone
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
LOOK_EVERY = 0.05  # seconds between looks for subscribers that ask again, while nothing happens
MOST_MARKS = 50  # of one event: a gateway reads some events at a time
LINGER = 100  # milliseconds for what is on its way when the engine ends

Batch = tuple[int, bytes]  # its number, and [seconds since 1970, events, rank] in MessagePack


class KvPublisher:
    """Sends what it is given, in a thread of its own: no caller waits for a subscriber.

    Who asks for more than is kept hears first, in place of the batch before those, of every mark that is there.

    Batches are numbered without a gap. Where more wait than ``max_queue_size``, or a subscriber is slower than ``hwm``
    allows, some are missed: the gap tells, and asking again helps.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        """Bind at once. Raises ``ValueError`` where that cannot be, or where pyzmq is not installed."""
        try:
            import zmq
        except ImportError as exc:
            raise ValueError("KV events need pyzmq: pip install 'tollgate[engine]'") from exc
        self._topic = config.topic.encode()
        self._waiting: queue.Queue[Batch] = queue.Queue(config.max_queue_size)
        self._sent: deque[Batch] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._marked = MarkedBlocks()
        self._marking = threading.Lock()
        self._context = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.setsockopt(zmq.SNDHWM, config.hwm)
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.setsockopt(zmq.SNDHWM, config.buffer_steps + 2)  # a whole answer, which is sent at once
        bound: dict[str, Any] = {}
        for name, socket in (("endpoint", self._events), ("replay_endpoint", self._replays)):
            socket.setsockopt(zmq.LINGER, LINGER)
            address = getattr(config, name)
            try:
                if address is not None:
                    socket.bind(address)
                    bound[name] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as exc:
                raise ValueError(f"KV events cannot be published at {address}: {exc}") from exc
        self.config = replace(config, **bound)  # of port 0 any free one was taken
        threading.Thread(target=self._send_all, name="kv-events", daemon=True).start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Hand over what happened in a step."""
        batch = self._next, packed(events)
        with self._marking:
            self._marked.note(events)
        self._next += 1
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(batch)

    def _send_all(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                number, payload = self._waiting.get(timeout=LOOK_EVERY)
                if self._sent and number != self._sent[-1][0] + 1:
                    self._sent.clear()  # one before it had no room: who asks hears of every mark
                self._sent.append((number, payload))
                self._events.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            while self._replays.poll(0):
                self._replay(self._replays.recv_multipart())

    def _replay(self, asked: list[bytes]) -> None:
        """Answer a request for all batches from a number on; one that is none is passed over."""
        who, *_, start = asked
        if len(start) != 8:
            return
        first = int.from_bytes(start, "big")
        answers: list[tuple[Any, ...]] = [(n.to_bytes(8, "big"), batch) for n, batch in self._sent if n >= first]
        if self._sent and first < (oldest := self._sent[0][0]):
            with self._marking:  # of what is there now: those that follow change nothing in it that they do not tell
                answers.insert(0, ((oldest - 1).to_bytes(8, "big"), packed(self._marked.told())))
        for number, payload in (*answers, (END_OF_REPLAY, b"")):
            self._replays.send_multipart((who, b"", number, payload))


class MarkedBlocks:
    """The marks of prompts' beginnings that can be found now, by memory and block."""

    def __init__(self) -> None:
        self._marks: dict[Medium, dict[int, list[int]]] = {"GPU": {}, "CPU": {}}
        self._block_size = 0  # tokens

    def note(self, events: Sequence[BlockEvent]) -> None:
        """Follow what happened in a step."""
        for event in events:
            match event:
                case BlockStored():
                    self._block_size = event.block_size
                    for mark, block in event.prompt_marks:
                        self._marks[event.medium].setdefault(block, []).append(mark)
                case BlockRemoved():
                    for block in event.block_hashes:
                        self._marks[event.medium].pop(block, None)
                case AllBlocksCleared():
                    for own in self._marks.values():
                        own.clear()

    def told(self) -> list[BlockStored]:
        """Return them all, as marks that come later than their blocks."""
        told = []
        for medium, own in self._marks.items():
            marks = [(mark, block) for block in own for mark in own[block]]
            for place in range(0, len(marks), MOST_MARKS):
                some = marks[place : place + MOST_MARKS]
                told.append(BlockStored([], None, [], self._block_size, medium, [], prompt_marks=some))
        return told


def packed(events: Sequence[BlockEvent]) -> bytes:
    """Return a batch as it travels."""
    return msgspec.msgpack.encode((time.time(), [as_told(event) for event in events], RANK))


def as_told(event: BlockEvent) -> dict[str, Any]:
    """Return an event as the map that it travels as."""
    told = {"type": type(event).__name__, **{each.name: getattr(event, each.name) for each in fields(event)}}
    if not told.get("prompt_marks", True):
        del told["prompt_marks"]
    return told
