# The WebSocket mode of /v1/responses: what a client asks over one connection is asked of the app as requests of HTTP,
# one after the other, and each stream of events goes out as messages. So a call is authenticated, limited, held,
# judged, booked and ended as any other: there is no second way in.

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

from billing.core.errors import RateLimited
from gateway.core.draining import Drain
from gateway.core.principals import Caller
from gateway.http.websocket.frames import (
    Create,
    EventReader,
    error_message,
    kind_of,
    read_create,
    refusal_message,
    told_headers,
    with_fields,
)
from gateway.http.websocket.protocol import SOCKET, SocketProtocol
from gateway.stored_responses.local_turns import CONNECTION_TURNS, ConnectionTurns, LocalTurns
from protocol.errors import BadRequest, ServiceError
from protocol.serving.leaving import LEAVING
from protocol.serving.off_loop import off_loop

LONGEST = 3600.0  # seconds that a connection may be open
MOST_OF_KEY = 256  # connections of one key, at one process
MOST_STREAMS = 32  # names of streams on one connection
ENDED = (b"response.completed", b"response.incomplete")
FAILED = (b"response.failed", b"error")
OF_CONNECTION = (b"connection", b"upgrade", b"content-length", b"content-type", b"transfer-encoding", b"expect")
NORMAL, RESTART = 1000, 1012  # why a connection is closed


class TooOld(BadRequest):
    """A connection has been open for as long as one may be."""

    code = "websocket_connection_limit_reached"


class ResponseSockets:
    """The WebSockets of one process. ``app`` answers requests of HTTP."""

    def __init__(self, app: Any, drain: Drain) -> None:
        self.app, self.drain = app, drain
        self.turns = LocalTurns()
        self._open: Counter[str] = Counter()  # by key

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection until its end."""
        session = ResponseSession(self, scope, receive, send)
        try:
            await session.run()
        finally:
            session.end()

    def enter(self, key_id: str) -> None:
        """Count a connection of a key. Raises RateLimited for one too many."""
        if self._open[key_id] >= MOST_OF_KEY:
            raise RateLimited(f"This key has {MOST_OF_KEY} WebSockets open here. Close one of them.")
        self._open[key_id] += 1

    def leave(self, key_id: str) -> None:
        """Count one less."""
        self._open[key_id] -= 1
        if not self._open[key_id]:
            del self._open[key_id]


class ResponseSession:
    """One connection: the response that runs, and what the next one may go on from."""

    def __init__(self, sockets: ResponseSockets, scope: Any, receive: Any, send: Any) -> None:
        self.turns = ConnectionTurns(sockets.turns)
        self._sockets = sockets
        self._scope, self._receive, self._send = scope, receive, send
        self._connection: SocketProtocol = scope["extensions"][SOCKET]
        self._key_id: str | None = None
        self._streams: set[str] = set()

    def begin(self, caller: Caller) -> None:
        """Let the connection be one of ``caller``. Raises RateLimited."""
        self._sockets.enter(caller.key_id)
        self._key_id = caller.key_id
        self._connection.begin(caller.team.id)
        self.turns.begin(caller.team.id)

    def end(self) -> None:
        """Forget what was kept for the connection."""
        self.turns.close()
        if self._key_id is not None:
            self._sockets.leave(self._key_id)

    async def run(self) -> None:
        """Open the connection where its client may call, and answer until its end."""
        ends = asyncio.get_running_loop().time() + LONGEST
        await self._receive()
        opening = await self._ask("GET", [b""], ())
        if opening.status != 200:
            start = {"status": opening.status, "headers": opening.headers}
            await self._send({"type": "websocket.http.response.start", **start})
            await self._send({"type": "websocket.http.response.body", "body": opening.body})
            return
        await self._send({"type": "websocket.accept", "headers": opening.ids()})
        try:
            await self._answer_until(ends)
        except asyncio.CancelledError:  # the drain is over
            await self._close(RESTART)

    async def _answer_until(self, ends: float) -> None:
        """Answer one message after the other until the connection's end."""
        while True:
            try:
                async with asyncio.timeout_at(ends):
                    message = await self._receive()
            except TimeoutError:
                message = None
            if message is None or asyncio.get_running_loop().time() >= ends:
                limit = f"{LONGEST / 60:g} minutes"
                words = f"Responses websocket connection limit reached ({limit}). Create a new websocket connection to"
                await self._say(error_message(TooOld(f"{words} continue.")))
                await self._close(NORMAL)
                return
            if message["type"] == "websocket.disconnect":
                return
            await self._answer(message)
            if self._sockets.drain.has_begun:
                await self._close(RESTART)
                return

    async def _answer(self, message: dict[str, Any]) -> None:
        """Answer one message of the client. While the answer comes, nothing of it is kept."""
        try:
            asked, body = await _read(message)
            self._note_stream(asked)
        except ServiceError as exc:
            self._connection.message_is_read()
            await self._say(error_message(exc))
            return
        self.turns.is_warm_up = asked.generate is False
        headers = [] if asked.idempotency_key is None else [(b"idempotency-key", asked.idempotency_key.encode())]
        answer = await self._ask("POST", body, headers, asked)
        if answer.has_failed and asked.previous_response_id is not None:
            self.turns.forget(asked.previous_response_id)
        if answer.status != 200:
            told = with_fields(refusal_message(answer.status, answer.body), headers=told_headers(answer.headers))
            await self._say(with_fields(told, stream_id=asked.stream_id))

    def _note_stream(self, asked: Create) -> None:
        if asked.stream_id is not None:
            self._streams.add(asked.stream_id)
        if len(self._streams) > MOST_STREAMS:
            self._streams.discard(str(asked.stream_id))
            words = f"This connection has used {MOST_STREAMS} names of streams. Use one of them again, or open another."
            raise BadRequest(words, param="stream_id", code="websocket_stream_limit_reached")

    async def _ask(self, method: str, body: list[bytes], headers: Any, asked: Create | None = None) -> _Answer:
        """Ask the app, over HTTP's own form, and pass on the events that it answers with. ``body`` is empty once it has
        been read: then it is the app's alone."""
        given = [(name, value) for name, value in self._scope["headers"] if is_passed_on(name)]
        told = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body[0])), *headers]

        async def receive() -> dict[str, Any]:
            if not body:
                await self._connection.left.wait()
                return {"type": "http.disconnect"}
            if asked is not None:
                self._connection.message_is_read()
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        answer = _Answer(self, asked)
        scope = {name: value for name, value in self._scope.items() if name != "subprotocols"} | {
            "type": "http",
            "method": method,
            "scheme": {"wss": "https"}.get(self._scope["scheme"], "http"),
            "headers": [*given, *told] if asked is not None else [*given],
            "state": {},
            "extensions": {LEAVING: self._scope["extensions"][LEAVING], SOCKET: self, CONNECTION_TURNS: self.turns},
        }
        await self._sockets.app(scope, receive, answer.send)
        if body and asked is not None:  # it was refused unread
            self._connection.message_is_read()
        return answer

    async def _say(self, data: bytes) -> None:
        await self._send({"type": "websocket.send", "text": data.decode()})

    async def _close(self, code: int) -> None:
        await self._send({"type": "websocket.close", "code": code})


async def _read(message: dict[str, Any]) -> tuple[Create, list[bytes]]:
    """Take what a client asks out of its message, a long one beside the event loop. Raises BadRequest."""
    text: str | None = message.pop("text", None)
    if text is None:
        raise BadRequest("Send messages of text, not of bytes.")
    asked, body = await off_loop(len(text), partial(_create_in, text))
    return asked, [body]


def _create_in(text: str) -> tuple[Create, bytes]:
    return read_create(text.encode())


class _Answer:
    """What the app answers: events go out as they come, all else is gathered."""

    def __init__(self, session: ResponseSession, asked: Create | None) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.has_failed = False
        self._session = session
        self._stream_id = None if asked is None else asked.stream_id
        self._events = EventReader()
        self._untold: dict[str, str] | None = None  # headers, until the first event has told them

    def ids(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that name the request."""
        return [(name, value) for name, value in self.headers if name in (b"x-request-id", b"x-client-request-id")]

    async def send(self, message: dict[str, Any]) -> None:
        """Take what the app sends."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            self.has_failed = self.status != 200
            self._untold = told_headers(self.headers)
        elif self.has_failed and not self._is_stream():
            self.body += message.get("body", b"")
        else:
            for data in self._events.read(message.get("body", b"")):
                await self._pass_on(data)

    async def _pass_on(self, data: bytes) -> None:
        kind = kind_of(data)
        self.has_failed = self.has_failed or kind in FAILED
        if kind in ENDED:
            self._session.turns.keep(self._stream_id, data)
        told, self._untold = self._untold, None
        await self._session._say(with_fields(with_fields(data, headers=told), stream_id=self._stream_id))

    def _is_stream(self) -> bool:
        return self.status == 200


def is_passed_on(name: bytes) -> bool:
    """Whether a header of a handshake is one of the request that it becomes."""
    return name not in OF_CONNECTION and not name.startswith(b"sec-websocket-")
