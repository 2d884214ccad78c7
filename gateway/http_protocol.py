# How our sockets speak HTTP: as uvicorn does, with five things put right. A head has an end: without one, whoever can
# connect takes memory, and time from everybody, before a key is looked at. Who offers HTTP/2 on the way (Java's own
# client does, with every request) is answered in HTTP/1.1, its body not lost. What cannot be read is told in the
# shape of all our errors. A client of HTTP/1.0, which knows no chunks, gets none. And that a client has left is told at
# once to whoever asked for it, without a task for each call that waits for nothing else (protocol/leaving.py).

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.clock import Clock
from protocol.errors import BadRequest
from protocol.leaving import LEAVING

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

LONGEST_HEAD = 1 << 18  # bytes; a read brings as many, so a head of that may still be whole
HEAD_WITHIN = 60.0  # seconds from a connection's beginning, or a head's first bytes, to its end
OFFER = (b"upgrade", b"http2-settings")  # headers, and what the header "connection" says of them

_clock = Clock()


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    _head = 0  # bytes of a head that has not ended
    _deadline: asyncio.TimerHandle | None = None  # for its end
    _tell: Callable[[], object] | None = None  # what the call that runs does when its client leaves

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come, and says what for within a minute."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_WITHIN, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._has_time()
        super().connection_lost(exc)
        if self.scope is not None:
            del self.scope["extensions"]  # who asks from now on waits for ASGI's word, which is there
        if self._tell is not None:
            self._tell()

    def data_received(self, data: bytes) -> None:
        """Read on: requests, or pieces of them."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._go_on_in_our_own(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP/1.1.")
        else:
            if self._head:
                self._wait_for_head(len(data))

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self.scope["extensions"] = {LEAVING: self._tell_when_left}  # type: ignore[dict-item]
        self._head = 1

    def on_headers_complete(self) -> None:
        """It has ended; the call may begin, unless it will be read again without the offer in it."""
        self._head = 0
        self._has_time()
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            if self.cycle.scope["http_version"] == "1.0":
                self.cycle.send = _until_close(self.cycle)  # type: ignore[assignment,method-assign]

    def on_message_complete(self) -> None:
        """A request has ended."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say that what came cannot be read, and close."""
        self._refuse(400, BadRequest(msg))

    def _tell_when_left(self, tell: Callable[[], object] | None) -> None:
        self._tell = tell
        if tell is not None:
            self.flow.resume_reading()  # a long body may have stopped it, and who does not read sees nobody leave

    def _go_on_in_our_own(self, rest: bytes) -> None:
        """Read a head again as if nothing else had been offered, and ``rest`` after it: the parser would take that for
        another protocol."""
        method = self.parser.get_method()
        if method == b"CONNECT":  # a tunnel, which needs no offer to be another protocol
            self.send_400_response("This is no proxy.")
            return
        lines = [b"%b %b HTTP/1.1" % (method, self.url)]
        lines += [b"%b: %b" % header for header in map(_without_offer, self.headers) if header[0] not in OFFER]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def _wait_for_head(self, size: int) -> None:
        self._head += size
        if self._head > LONGEST_HEAD:
            self._refuse(431, BadRequest(f"The head of the request is longer than {LONGEST_HEAD} bytes."))
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_WITHIN, self.transport.close)

    def _refuse(self, status: int, error: BadRequest) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % (len(body), _clock.new_id().encode()) + body)
        self.transport.close()

    def _has_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _until_close(cycle: RequestResponseCycle) -> Callable[[ASGISendEvent], Coroutine[Any, Any, None]]:
    """Return how to answer who knows no chunks: a body of which no length is said ends with the connection."""
    send_framed, has_length = cycle.send, True

    async def send(message: ASGISendEvent) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_framed(message)

    return send


def _without_offer(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    name, value = header
    if name != b"connection":
        return header
    return name, b", ".join(word for word in map(bytes.strip, value.split(b",")) if word.lower() not in OFFER)
