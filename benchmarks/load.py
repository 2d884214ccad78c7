# A load generator that costs little: keep-alive connections on raw sockets, each sending the same request again and
# again. It runs as a process of its own, so that its CPU time is never the server's.
#
#   python -m benchmarks.load '{"url": …, "key": …, "body": {…}, "connections": 32, "requests": 2000, …}'
#
# Closed loop: every connection sends when its last answer is whole. With ``rate``, open loop: requests leave at fixed
# moments whatever the server does, and latency counts from those moments.

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import struct
import sys
import time
from collections import deque
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop
from msgspec import Struct

TOKEN = re.compile(rb'"content":"[^"]')  # a chunk that says something; a role alone says nothing

NUMBER = b"[number]"  # in a body: another one in every request, so that no text comes twice


class Plan(Struct, frozen=True, kw_only=True):
    """What to send, how often, and at most for how long."""

    url: str
    key: str
    body: msgspec.Raw
    connections: int
    requests: int
    seconds: float = 60.0
    rate: float | None = None  # requests per second
    warm_up: float = 0.0  # seconds from the start; what is sent in them counts for nothing
    headers: dict[str, str] = {}  # beside those that every request has
    first: Literal["byte", "token"] = "byte"  # what to wait for: of the body, or of a streamed reply's words


class Outcome(Struct, frozen=True, kw_only=True):
    """What came back. Times are milliseconds; ``first`` is until the first byte of the body, or the first token."""

    requests: int
    failures: int
    failure: str | None  # what came in place of the first answer that failed
    wall: float  # seconds
    bytes_per_answer: float
    first: dict[str, float]
    total: dict[str, float]


class Client(asyncio.Protocol):
    """One connection with at most one request on the way."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = httptools.HttpResponseParser(self)
        self._since = 0.0
        self._first = 0.0
        self._error = b""
        self.is_busy = False

    def send(self, since: float) -> None:
        """Send the request; ``since`` is the moment from which its latency counts."""
        self._since, self._first, self._error, self.is_busy = since, 0.0, b"", True
        self._transport.write(self._load.next_request())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self._load.is_free(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._first and (self._load.takes_any_byte or TOKEN.search(body)):
            self._first = time.perf_counter()
        self._load.bytes += len(body)
        if self._parser.get_status_code() != 200:
            self._error += body[:500]

    def on_message_complete(self) -> None:
        self.is_busy = False
        status = self._parser.get_status_code()
        failure = None if status == 200 else f"{status} {self._error.decode(errors='replace')}"
        self._load.note(failure, self._since, self._first)
        if self._parser.should_keep_alive():
            self._parser = httptools.HttpResponseParser(self)
            self._load.is_free(self)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_busy:
            self._load.note(f"the connection broke: {exc!r}", self._since, self._first)
        self._load.open_again()


class Load:
    """The plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        place = urlsplit(plan.url)
        self._host, self._port = place.hostname, place.port
        head = [
            f"POST {place.path} HTTP/1.1",
            f"host: {place.netloc}",
            f"authorization: Bearer {plan.key}",
            "content-type: application/json",
            f"content-length: {len(bytes(plan.body))}",
            *(f"{name}: {value}" for name, value in plan.headers.items()),
        ]
        self._request = "\r\n".join([*head, "", ""]).encode() + bytes(plan.body)
        self._is_varied = NUMBER in self._request
        self._number = 0
        self.takes_any_byte = plan.first == "byte"
        self.bytes = 0
        self._left = plan.requests  # not sent yet
        self._open = plan.requests  # not answered yet
        self._failures = 0
        self._failure: str | None = None
        self._firsts: list[float] = []
        self._totals: list[float] = []
        self._free: deque[Client] = deque()
        self._due: deque[float] = deque()
        self._tasks: set[asyncio.Task[object]] = set()
        self._done = asyncio.Event()

    def next_request(self) -> bytes:
        """Return the bytes of the next request."""
        if not self._is_varied:
            return self._request
        self._number += 1
        return self._request.replace(NUMBER, b"%08d" % self._number)

    async def run(self) -> Outcome:
        """Connect, send everything, and return what came back."""
        self._started = time.perf_counter()
        self._until = self._started + self._plan.seconds
        await asyncio.gather(*(self._connect() for _ in range(self._plan.connections)))
        if self._plan.rate is not None:
            self._send_at_fixed_moments(self._plan.rate)
        async with asyncio.timeout(self._plan.seconds + 30):
            await self._done.wait()
        answered = self._plan.requests - self._open
        return Outcome(
            requests=answered,
            failures=self._failures,
            failure=self._failure,
            wall=time.perf_counter() - self._started,
            bytes_per_answer=self.bytes / max(1, answered),
            first=_spread(self._firsts),
            total=_spread(self._totals),
        )

    def is_free(self, client: Client) -> None:
        """A connection can take a request."""
        if self._plan.rate is not None:
            if self._due:
                client.send(self._due.popleft())
            else:
                self._free.append(client)
        elif self._left > 0 and time.perf_counter() < self._until:
            self._left -= 1
            client.send(time.perf_counter())
        elif self._left > 0:
            self._open -= self._left
            self._left = 0
            self._look()

    def note(self, failure: str | None, since: float, first: float) -> None:
        """An answer is whole, or will never be."""
        now = time.perf_counter()
        self._open -= 1
        if failure is not None:
            self._failures += 1
            self._failure = self._failure or failure
        elif since >= self._started + self._plan.warm_up:
            self._firsts.append(((first or now) - since) * 1000)
            self._totals.append((now - since) * 1000)
        self._look()

    def open_again(self) -> None:
        """A connection is gone; make another while there is work."""
        if self._open > 0:
            task = asyncio.ensure_future(self._connect())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: Client(self), self._host, self._port)

    def _send_at_fixed_moments(self, rate: float) -> None:
        """Send from now on, now that every connection stands: none is late because of another's handshake."""
        loop, every = asyncio.get_running_loop(), 1 / rate
        first = time.perf_counter() + every
        timer, moments = _open_timer(first, every), iter(range(self._plan.requests))

        def tick() -> None:
            for _ in range(int.from_bytes(os.read(timer, 8), sys.byteorder)):
                if (number := next(moments, None)) is None:
                    loop.remove_reader(timer)
                    os.close(timer)
                    return
                self._send_at(first + number * every)

        loop.add_reader(timer, tick)

    def _send_at(self, moment: float) -> None:
        self._left -= 1
        if self._free:
            self._free.popleft().send(moment)
        else:
            self._due.append(moment)

    def _look(self) -> None:
        if self._open <= 0:
            self._done.set()


def _open_timer(first: float, every: float) -> int:
    """Return a file that tells, when it is read, how many moments have come, each within a tenth of a millisecond
    (timerfd_create(2)); uvloop's own timers go by whole ones. Seconds, ``first`` of CLOCK_MONOTONIC."""
    libc = ctypes.CDLL(None)
    timer = int(libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK))
    parts = [round(moment * 1e9) for moment in (every, first)]
    settings = struct.pack("qqqq", *(part for moment in parts for part in divmod(moment, 10**9)))
    libc.timerfd_settime(timer, 1, settings, None)  # 1: the first is a moment, not a pause
    return timer


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


async def _main() -> None:
    plan = msgspec.json.decode(sys.argv[1].encode(), type=Plan)
    print(json.dumps(msgspec.to_builtins(await Load(plan).run())))


if __name__ == "__main__":
    uvloop.run(_main())
