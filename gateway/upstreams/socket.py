# One WebSocket to an upstream, on the `websockets` library's protocol and the event loop's own transport. What it reads
# waits in bounds: an upstream that says more than is taken waits itself. One that falls silent is lost.

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from gateway.upstreams.wire.errors import UpstreamError

LARGEST_MESSAGE = 32 * 1024 * 1024  # bytes
UNREAD = 1024 * 1024  # bytes of messages that may wait; beyond it the upstream waits
PING_EVERY = 20.0  # seconds
SILENT_AFTER = 3  # pings without a byte from the upstream
LINGER = 2.0  # seconds for the upstream to close, once told

quiet = logging.getLogger("tollgate.upstream_socket")  # the library tells of frames, and what they say
quiet.setLevel(logging.CRITICAL)


class SocketClosed(Exception):
    """The upstream has closed the connection, with this code and reason; ``None``: it is lost."""

    def __init__(self, code: int | None, reason: str) -> None:
        super().__init__(code, reason)
        self.code, self.reason = code, reason


class UpstreamSocket(asyncio.Protocol):
    """A WebSocket, from its handshake on. Only text is read. Close it, whatever happens.

    Once ``opened`` returns, ``status`` is 101, or that of the answer that refuses it; ``headers`` and ``body`` are that
    answer's.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """``url`` is that of HTTP; where it leads is its caller's to know."""
        self._loop = asyncio.get_running_loop()
        self._protocol = ClientProtocol(parse_uri("ws" + url[len("http") :]), max_size=LARGEST_MESSAGE, logger=quiet)
        self._headers = headers
        self._transport: asyncio.Transport
        self.status, self.headers, self.body = 0, dict[str, str](), b""
        self._messages: deque[bytes] = deque()
        self._frames: list[bytes] = []  # of the message that comes
        self._unread = 0  # bytes of messages
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_paused = False
        self._pinger: asyncio.TimerHandle | None = None
        self._silent = 0  # pings since the upstream was heard
        self._end: SocketClosed | None = None
        self._lost = asyncio.Event()

    async def opened(self) -> None:
        """Return once the upstream has answered the handshake. Raises UpstreamError where it does not, or badly."""
        while self.status == 0:
            if self._end is not None:
                raise UpstreamError("The upstream closed the connection.", outcome="reset")
            self._news.clear()
            await self._news.wait()
        if self.status == 101 and self._protocol.handshake_exc is not None:
            raise UpstreamError("The upstream did not open a WebSocket.", outcome="nonsense")

    async def receive(self) -> bytes:
        """Return the next message. Raises SocketClosed, once all that came before was returned."""
        while not self._messages:
            if self._end is not None:
                raise self._end
            self._news.clear()
            await self._news.wait()
        message = self._messages.popleft()
        self._unread -= len(message)
        if self._is_paused and self._unread <= UNREAD:
            self._is_paused = False
            self._transport.resume_reading()
        return message

    async def send(self, text: bytes) -> None:
        """Send a message; wait while the upstream has too much unread. Raises SocketClosed."""
        try:
            self._protocol.send_text(text)
        except InvalidState:
            raise self._end or SocketClosed(None, "") from None
        self._flush()
        await self._writable.wait()
        if self._end is not None:
            raise self._end

    def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Say that it ends, if it has not ended. Never raises."""
        if self._end is None:
            self._finish(SocketClosed(code, reason))
            try:
                self._protocol.send_close(code, reason)
                self._flush()
            except InvalidState:
                self.abort()
            else:
                self._loop.call_later(LINGER, self.abort)

    async def said_last(self) -> list[bytes]:
        """Close it, and return what the upstream had said before it heard of that. Waits ``LINGER`` at the most."""
        self.close()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        late = self._loop.call_later(LINGER, self.abort)
        try:
            await self._lost.wait()
        finally:
            late.cancel()
        said, self._messages = [*self._messages], deque()
        return said

    def abort(self) -> None:
        """Close the connection at once."""
        self._finish(SocketClosed(None, ""))
        self._transport.abort()

    # --- For the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the WebSocket."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        request = self._protocol.connect()
        request.headers.update(self._headers)
        self._protocol.send_request(request)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._finish(SocketClosed(None, ""))
        self._lost.set()

    def pause_writing(self) -> None:
        """The upstream takes no more for now."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It takes more."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._silent = 0
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._begin(event)
            elif isinstance(event, Frame):
                self._take(event)
        self._flush()  # answers to pings, and to a close
        if self._protocol.parser_exc is not None:
            self._finish(SocketClosed(None, ""))
        if self._end is not None:
            if self._unread > LARGEST_MESSAGE:  # it goes on although it was told of the end
                self.abort()
        elif self._unread > UNREAD and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> None:
        """Nothing more comes."""
        self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._begin(event)

    def _begin(self, response: Response) -> None:
        self.status, self.body = response.status_code, bytes(response.body or b"")
        self.headers = {name.lower(): value for name, value in response.headers.raw_items()}
        self._pinger = self._loop.call_later(PING_EVERY, self._ping)

    def _take(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.CONT:
                self._frames.append(bytes(frame.data))
                if frame.fin:
                    self._messages.append(b"".join(self._frames))
                    self._unread += len(self._messages[-1])
                    self._frames = []
            case Opcode.BINARY:
                self.close(CloseCode.UNSUPPORTED_DATA, "Messages are text.")
            case Opcode.CLOSE:
                told = self._protocol.close_rcvd
                self._finish(SocketClosed(None, "") if told is None else SocketClosed(told.code, told.reason))

    def _ping(self) -> None:
        if self._end is not None:
            return
        if self._silent >= SILENT_AFTER and not self._is_paused:
            self.abort()
            return
        self._silent += 1
        self._protocol.send_ping(b"")
        self._flush()
        self._pinger = self._loop.call_later(PING_EVERY, self._ping)

    def _finish(self, end: SocketClosed) -> None:
        self._end = self._end or end
        if self._pinger is not None:
            self._pinger.cancel()
        self._writable.set()
        self._news.set()

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():  # it is over
                self._transport.close()
