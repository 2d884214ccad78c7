# One connection to an upstream, on httptools and the event loop's own transport: a request goes out in one write, its
# answer comes in by callbacks, and a caller waits for it on one future. No task, no timer is made for a call.

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import cast

import httptools

from gateway.upstreams.wire.base import Delivery
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamTimeout

UNREAD = 64 * 1024  # bytes of an answer that may wait here for a slow client; at twice that its upstream waits
LONGEST_FRAMING = 64 * 1024  # bytes of an answer in a row that are no body: its head, a chunk's size, trailers
KEPT_IDLE = 60.0  # seconds
STOOD_STILL = 0.1  # seconds: an alarm that rings later tells that this process was stopped, or its loop busy
A_LOOK = 0.25  # seconds that an answer has at least, on a new connection and after such a stop
ONE_WRITE = 64 * 1024  # bytes of a body that is copied behind its head
BODILESS = (204, 304)

LATE = "The upstream did not answer in time."
CLOSED = "The upstream closed the connection."
BROKEN = "The connection to the upstream broke."
SILENT = "The upstream fell silent, or took too long in all."


class Connection(asyncio.Protocol):
    """An open connection. It carries one request at a time; ``release`` or ``abort`` it after each.

    ``status``, ``headers`` (lower case; of several alike the first) and ``next_piece`` tell the answer that has begun.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._pieces: list[bytes] = []  # of the body, unread
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._due = math.inf  # the loop's seconds: when what is waited for is late
        self._alarm: asyncio.TimerHandle | None = None  # one for many waits: it is moved when it rings, not before
        self._rings = math.inf
        self._grace = loop.time() + A_LOOK  # before then nothing is late: it may lie in the socket, unread
        self._asked = math.inf  # the loop's seconds: when it is late by what was asked, such a time left out
        self._forgave_at = -math.inf  # the loop's seconds: what was due before has had such a time already
        self._late = LATE
        self._is_paused = False
        self._takes_no_more = False  # its buffer for writing is full
        self._is_writing = False  # a request has not wholly left
        self._is_idle = True
        self._is_lost = False
        self._delivery: Delivery | None = None
        self._failure: UpstreamFailure | None = None
        self._begin_answer()

    def _begin_answer(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._framing = 0  # bytes since the last of the body
        self._has_begun = False  # the head has come,
        self._is_complete = False  # and the whole answer
        self._is_reusable = False
        self._ends_with_connection = False
        self._pieces.clear()
        self._unread = 0  # bytes in these, and between them

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        return not self._is_lost and not self._transport.is_closing()

    # --- For the client ---

    def now(self) -> float:
        """Return the loop's seconds."""
        return self._loop.time()

    def send(self, head: bytes, body: bytes, delivery: Delivery, rest: tuple[bytes | memoryview, ...] = ()) -> None:
        """Send a request, its body and the ``rest`` of that; ``delivery`` notes when its last byte has been handed to
        the network. Raises UpstreamError when the connection is gone."""
        if not self.is_usable:
            raise UpstreamError(CLOSED, outcome="reset")
        self._is_idle = False
        self._begin_answer()
        self._delivery, self._is_writing = delivery, True
        if len(body) <= ONE_WRITE and not rest:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body, *rest))
        if not self._takes_no_more:
            self._is_written()

    async def answered(self, due: float) -> None:
        """Return once the head of the answer is here. Raises UpstreamFailure, UpstreamTimeout at ``due`` (the loop's
        seconds)."""
        while not self._has_begun:
            await self._news(due, LATE)

    async def next_piece(self, due: float) -> bytes | None:
        """Return the next bytes of the body, or ``None`` at its end. Raises as ``answered`` does, once what came before
        a failure was read."""
        while not self._pieces:
            if self._is_complete:
                return None
            await self._news(due, SILENT)
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._is_paused:
            self._read_on()
        return piece

    def release(self) -> bool:
        """End with the answer: keep the connection for another request if it can take one, else abort it. Return
        whether it is kept."""
        if not self._is_reusable or self._is_writing or not self.is_usable:
            self.abort()
            return False
        if self._is_paused:
            self._read_on()
        self._pieces.clear()
        self._is_idle = True
        self._delivery = None
        self._asked = self._loop.time() + KEPT_IDLE
        self._wait_until(self._asked)
        return True

    def abort(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    # --- For the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection stands."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        self._transport.set_write_buffer_limits(high=ONE_WRITE, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._is_lost = True
        if self._alarm is not None:
            self._alarm.cancel()
        if exc is None and self._ends_with_connection:
            self._is_complete = True
            self._wake()
        elif not self._is_complete:
            self._fail(UpstreamError(CLOSED if exc is None else BROKEN, outcome="reset"))
        self._on_lost(self)

    def pause_writing(self) -> None:
        """The upstream takes no more for now."""
        self._takes_no_more = True

    def resume_writing(self) -> None:
        """All has gone."""
        self._takes_no_more = False
        if self._is_writing:
            self._is_written()

    def data_received(self, data: bytes) -> None:
        """Read on. What comes unasked is no answer, and ends the connection."""
        if self._is_idle or self._failure is not None:
            self.abort()
            return
        unread = len(self._pieces)
        self._framing += len(data)
        try:
            self._parser.feed_data(data)
            if len(self._pieces) > unread:
                self._unread += len(data)
                self._framing = 0
            is_broken = self._framing > LONGEST_FRAMING and not self._is_complete
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            is_broken = True
        if is_broken:
            self._is_reusable = False
            if not self._is_complete:
                self._failure = UpstreamError(BROKEN, outcome="reset")
            self.abort()
        elif self._unread > 2 * UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    # --- For the parser ---

    def on_message_begin(self) -> None:
        """An answer begins: the one that is waited for, unless that is complete."""
        if self._is_complete:
            raise ValueError("more came than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one field; of trailers nothing is kept."""
        if not self._has_begun:
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        """The head has ended."""
        status = self._parser.get_status_code()
        if status < 200:  # a hint; the answer follows
            self.headers.clear()
            return
        self.status, self._has_begun = status, True
        told = self.headers
        self._ends_with_connection = (
            "content-length" not in told
            and not told.get("transfer-encoding", "").lower().endswith("chunked")
            and status not in BODILESS
        )

    def on_message_complete(self) -> None:
        """An answer, or a hint before it, has ended."""
        if self._has_begun:
            self._is_complete = True
            self._is_reusable = self._parser.should_keep_alive()

    # --- Waiting ---

    async def _news(self, due: float, late: str) -> None:
        """Wait until something has come. Raises UpstreamFailure when it will not, or has not by ``due``."""
        if self._failure is not None:
            raise self._failure
        self._late, self._asked = late, due
        self._wait_until(due)
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
            self._due = math.inf

    def _wait_until(self, due: float) -> None:
        self._due = due = due if due > self._grace else self._grace
        if due < self._rings:
            if self._alarm is not None:
                self._alarm.cancel()
            self._rings = max(due, self._loop.time())
            self._alarm = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        now, rang = self._loop.time(), self._rings
        self._alarm, self._rings = None, math.inf
        # The loop sees to alarms before sockets: what came while this process stood still is not late, and an upstream
        # on the same machine stood still with it. Once for each deadline, however many waits it has, or a loop that is
        # always late never gave up.
        if (late := now - rang) > STOOD_STILL and self._asked > self._forgave_at:
            self._forgave_at, self._grace = now, now + max(late, A_LOOK)
            self._due = max(self._due, self._grace)
        if self._due > now:
            if self._due < math.inf:
                self._wait_until(self._due)
        elif self._is_idle:
            self.abort()
        else:
            self._fail(UpstreamTimeout(self._late))

    def _read_on(self) -> None:
        self._is_paused = False
        if self.is_usable:
            self._transport.resume_reading()

    def _fail(self, failure: UpstreamFailure) -> None:
        if self._failure is None:
            self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_written(self) -> None:
        self._is_writing = False
        if self._delivery is not None:
            self._delivery.is_whole = True
