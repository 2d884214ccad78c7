# How the sockets of gateway, worker and engine speak HTTP: as uvicorn does, with these things put right.
#
# - What a client may take before it is known has bounds: bytes, URL and fields of a head, bytes of a body's
#   framing, requests ahead of their answers, time for a head and for a body, a share of the process's descriptors.
# - A client that offers HTTP/2 (Java's own does, with every request) is answered in HTTP/1.1, its body not lost.
#   A subclass may take the offer of another protocol (`take_offer`).
# - What cannot be read is told in the shape of all other errors.
# - A client of HTTP/1.0, which knows no chunks, gets none.
# - A client that leaves is told at once to the call that asked for it, without a task for each call
#   (protocol/serving/leaving.py).

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from protocol.errors import BadRequest
from protocol.serving.exchange import Exchange
from protocol.serving.leaving import LEAVING
from protocol.serving.listening import has_descriptors_left

LONGEST_HEAD = 1 << 18  # bytes; a read brings as many, so a head of that may still be whole
LONGEST_URL = 8192  # bytes
USUAL_URL = 128  # bytes; as long are kept parsed
MOST_PARAMETERS = 128  # of a query; Litestar keeps the last thousand queries parsed, some 150 bytes a parameter
MOST_HEADERS = 256  # fields; the trailers of a body count, too
MOST_PIPELINED = 64  # requests that wait for the answers of those before them
SPARED = 1.0  # seconds that a connection may be idle where idle ones make room, and between two such occasions
A_TICK = 0.001  # seconds: of less than half of it uvloop makes no timer, but a call at once that knows no due time
STOOD_STILL = 0.1  # seconds: a timer that rings later tells that this process was stopped, or its loop busy
OFFER = (b"upgrade", b"http2-settings")  # headers, and what the header "connection" says of them

ASGI: Any = {"version": "3.0", "spec_version": "2.3"}

_take_field, _take_body = HttpToolsProtocol.on_header, HttpToolsProtocol.on_body  # super() costs half as much again


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    head_within = 60.0  # seconds from a connection's beginning, or a head's first bytes, to its end
    body_within = 60.0  # seconds from a head's end to its body's, and one more …
    body_rate = 4096  # … for each so many bytes that have come
    catch_up = 0.25  # seconds for what may come once a process goes on that stood still beyond one of these

    _made_room: ClassVar[float] = float("-inf")  # loop time
    _head = 0  # bytes of a head that has not ended
    _is_in_body = False
    _body = 0  # bytes of a body that has not ended
    _framing = 0  # bytes that were read since the last of them: chunk extensions, trailers
    _body_began = 0.0  # loop time
    _deadline: asyncio.TimerHandle | None = None  # for the end of a head or a body
    _is_forgiven = False  # this one had more time already, because the process stood still
    _idle_from = math.inf  # loop time; infinite while something is asked
    _tell: Callable[[], object] | None = None  # what the call that runs does when its client leaves

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head. Where this process needs its last descriptors itself, idle connections make room;
        where there are none, this one is closed."""
        super().connection_made(transport)
        newest = transport.get_extra_info("socket").fileno()
        if has_descriptors_left(newest) or self._make_room(self.loop.time()):
            self._wait(self.head_within)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call that runs."""
        self._has_time()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        if self.scope is not None:
            del self.scope["extensions"]  # who asks from now on waits for ASGI's word, which is there
        if self._tell is not None:
            self._tell()

    def data_received(self, data: bytes) -> None:
        """Read on: requests, or pieces of them."""
        size = len(data)
        self._framing += size
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            rest = data[offer.args[0] :]
            if not self.take_offer(rest):
                self._go_on_in_our_own(rest)
        except httptools.HttpParserError:
            self.send_400_response("The request is not valid HTTP/1.1.")
        else:
            if self._head:
                self._wait_for_head(size)
            elif self._is_in_body:
                self._wait_for_body()

    def on_message_begin(self) -> None:
        """A head begins. From here on the connection is not idle; bytes between requests did not count."""
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests ahead of their answers")
        self._unset_keepalive_if_required()
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self.scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": "1.1",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,  # type: ignore[typeddict-item]
            "root_path": self.root_path,
            "headers": self.headers,
            "state": self.app_state.copy(),
            "extensions": {LEAVING: self._tell_when_left},  # type: ignore[dict-item]
        }
        self._head = 1

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one field."""
        if len(self.headers) >= MOST_HEADERS:
            self._refuse(431, f"The request has more than {MOST_HEADERS} header fields.")
            raise ValueError("too many header fields")
        _take_field(self, name, value)

    def on_headers_complete(self) -> None:
        """The head has ended; the call may begin, unless it will be read again without the offer in it."""
        if len(self.url) > LONGEST_URL or self.url.count(b"&") >= MOST_PARAMETERS:
            self._refuse(
                414, f"The URL is longer than {LONGEST_URL} bytes, or has more than {MOST_PARAMETERS} parameters."
            )
            raise ValueError("too long a URL")
        self._head = 0
        self._has_time()
        self._unset_keepalive_if_required()  # the answer before may have ended while this head came
        if not self.parser.should_upgrade():
            self._begin_call()
            self._is_in_body, self._body, self._framing = True, 0, 0

    def on_body(self, body: bytes) -> None:
        """A piece of a body is here."""
        self._body += len(body)
        self._framing = 0
        _take_body(self, body)

    def on_message_complete(self) -> None:
        """A request has ended."""
        if not self.parser.should_upgrade():
            self._is_in_body = False
            if self._deadline is not None:
                self._has_time()
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Say that what came cannot be read, and close."""
        self._refuse(400, msg)

    def take_offer(self, rest: bytes) -> bool:
        """Hand the connection to another protocol that its client offers, with the bytes that came behind the head;
        whether that was done."""
        return False

    def new_request_id(self) -> str:
        """Return the id of a request that is refused here."""
        return uuid.uuid4().hex

    def on_response_complete(self) -> None:
        """The answer has been written: the next call begins, or the connection is idle."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_from = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._end_when_idle_for(self.timeout_keep_alive)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for long enough. One timer serves many calls: it is moved when it
        rings, not before."""
        is_late, self.timeout_keep_alive_task = self._is_late(self.timeout_keep_alive_task), None
        left = self._idle_from + self.timeout_keep_alive - self.loop.time()
        if left <= 0 and not is_late:
            self.transport.close()
        elif left <= 0:
            self._end_when_idle_for(self.catch_up)
        elif left < math.inf:
            self._end_when_idle_for(left)

    def _end_when_idle_for(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(max(seconds, A_TICK), self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_from = math.inf

    def _begin_call(self) -> None:
        scope, parser, version = self.scope, self.parser, self.parser.get_http_version()
        path, raw_path, query = (_usual_place_of if len(self.url) <= USUAL_URL else _place_of)(self.url)
        scope["method"], scope["http_version"] = parser.get_method().decode("ascii"), version
        scope["path"], scope["raw_path"] = self.root_path + path, self.root_path.encode("ascii") + raw_path
        scope["query_string"] = query
        before, knows_chunks = self.cycle, version != "1.0"
        self.cycle = Exchange(self, keep_alive=knows_chunks and parser.should_keep_alive(), knows_chunks=knows_chunks)
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _make_room(self, now: float) -> bool:
        """Close idle connections, once a second at most; return whether there were any."""
        if now - HttpProtocol._made_room < SPARED:
            return False
        HttpProtocol._made_room = now
        ours = [each for each in self.connections if isinstance(each, HttpProtocol)]
        idle = [each for each in ours if now - each._idle_since(now) > SPARED]
        for each in idle:
            each.transport.close()
        return bool(idle)

    def _idle_since(self, now: float) -> float:
        """Return since when nothing has been asked here, in loop time; ``now`` while something is."""
        if self._head or self._is_in_body or self.pipeline:
            return now
        if self.cycle is None:
            return now if self._deadline is None else self._deadline.when() - self.head_within
        return min(now, self._idle_from)

    def _tell_when_left(self, tell: Callable[[], object] | None) -> None:
        self._tell = tell
        if tell is not None:
            self.flow.resume_reading()  # a long body may have stopped it, and only reading shows that a client left

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
            self._refuse(431, f"The head of the request is longer than {LONGEST_HEAD} bytes.")
        elif self._deadline is None:
            self._is_forgiven = False
            self._wait(self.head_within)

    def _wait_for_body(self) -> None:
        if self._framing > LONGEST_HEAD:
            self._refuse(431, f"The body has more than {LONGEST_HEAD} bytes of framing between two pieces.")
        elif self._deadline is None and not self.cycle.response_complete:
            self._body_began, self._is_forgiven = self.loop.time(), False
            self._wait(self.body_within)

    def _wait(self, seconds: float) -> None:
        self._deadline = self.loop.call_later(max(seconds, A_TICK), self._run_out)

    def _run_out(self) -> None:
        """Refuse a head or body whose time is over."""
        is_late, self._deadline = self._is_late(self._deadline), None
        if is_late and not self._is_forgiven:
            self._is_forgiven = True
            self._wait(self.catch_up)
        elif self._head:
            self._refuse(408, f"The head of the request did not end within {self.head_within:g} seconds.")
        elif not self._is_in_body:
            self.transport.close()
        elif self.flow.read_paused:  # the client cannot send: the call has not begun, or reads nothing now
            self._body_began = self.loop.time()
            self._wait(self.body_within)
        elif not self.cycle.response_complete:  # else the connection is closed as an idle one is
            waited = self.loop.time() - self._body_began
            left = self.body_within + self._body / self.body_rate - waited
            if left > 0:
                self._wait(left)
            else:
                self._refuse(408, f"The body came too slowly: {self._body} bytes in {waited:.0f} seconds.")

    def _refuse(self, status: int, words: str) -> None:
        """Close the connection; say why where the client takes that as the answer to the message that is being read."""
        if self.transport.is_closing():
            return
        if self._is_in_body:
            is_its_turn = not self.cycle.response_started and not self.pipeline
        else:
            is_its_turn = self.cycle is None or self.cycle.response_complete
        if is_its_turn:
            body = msgspec.json.encode(BadRequest(words).body())
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[status] + head % (len(body), self.new_request_id().encode()) + body)
        self.transport.close()

    def _is_late(self, timer: asyncio.TimerHandle | None) -> bool:
        return timer is not None and self.loop.time() - timer.when() > STOOD_STILL

    def _has_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _place_of(url: bytes) -> tuple[str, bytes, bytes]:
    """Return the path that a URL has, as it is meant and as it came, and its query. Raises ValueError and its kin."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


_usual_place_of = lru_cache(1024)(_place_of)


def _without_offer(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    name, value = header
    if name != b"connection":
        return header
    return name, b", ".join(word for word in map(bytes.strip, value.split(b",")) if word.lower() not in OFFER)
