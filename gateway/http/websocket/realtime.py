# Conversations by voice over WebSockets. The handshake is asked of the app as a request of HTTP, so that its caller is
# authenticated, limited and refused as any other; what it opens is then carried message by message.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.core.principals import Caller
from gateway.http.websocket.protocol import SOCKET, SocketProtocol
from gateway.http.websocket.session import ResponseSockets, is_passed_on
from gateway.realtime.relay import Relay
from protocol.errors import BadRequest
from protocol.serving.leaving import LEAVING

SUBPROTOCOL, KEY_PREFIX = "realtime", "openai-insecure-api-key."  # a page of a browser can send no header but these


class RealtimeSockets:
    """The conversations of one process. ``sockets`` counts their connections with all others of a key."""

    def __init__(self, sockets: ResponseSockets) -> None:
        self._sockets = sockets

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection until its end."""
        session = RealtimeSession(self._sockets, scope, receive, send)
        try:
            await session.run()
        finally:
            session.end()


class RealtimeSession:
    """One connection of a client, and the conversation over it."""

    def __init__(self, sockets: ResponseSockets, scope: Any, receive: Any, send: Any) -> None:
        self.relay: Relay | None = None  # once the route has opened it
        self._sockets = sockets
        self._scope, self._receive, self._send = scope, receive, send
        self._connection: SocketProtocol = scope["extensions"][SOCKET]
        self._key_id: str | None = None
        self.first: bytes | None = None  # a message that the client is taken to have sent
        self._is_carrying = False  # a message, which takes its room until the next is asked for

    def begin(self, caller: Caller) -> None:
        """Let the connection be one of ``caller``. Raises RateLimited."""
        self._sockets.enter(caller.key_id)
        self._key_id = caller.key_id
        self._connection.begin(caller.team.id)

    def end(self) -> None:
        """Let go of all that it has."""
        if self.relay is not None:
            self.relay.close()
        if self._key_id is not None:
            self._sockets.leave(self._key_id)

    async def run(self) -> None:
        """Open the conversation where its client may have one, and carry it to its end."""
        await self._receive()
        status, headers, body = await self._ask()
        if status != 200 or self.relay is None:
            await self._send({"type": "websocket.http.response.start", "status": status, "headers": headers})
            await self._send({"type": "websocket.http.response.body", "body": body})
            return
        told = [(name, value) for name, value in headers if name in (b"x-request-id", b"x-client-request-id")]
        chosen = SUBPROTOCOL if SUBPROTOCOL in self._scope["subprotocols"] else None
        await self._send({"type": "websocket.accept", "headers": told, "subprotocol": chosen})
        self._connection.end = self.relay.drain
        if self._sockets.drain.has_begun:
            self.relay.drain()
        await self.relay.run(self)

    async def receive(self) -> bytes | None:
        """Return the client's next message, ``None`` once it has left. Raises BadRequest for what is no text."""
        if self._is_carrying:
            self._connection.message_is_read()
            self._is_carrying = False
        if self.first is not None:
            said, self.first = self.first, None
            return said
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            return None
        self._is_carrying = True
        text: str | None = message.get("text")
        if text is None:
            raise BadRequest("Send messages of text, not of bytes: sound goes in base64.")
        return text.encode()

    async def say(self, data: bytes) -> None:
        """Send a message; wait while the client has too much unread. One that has left is sent nothing."""
        if self._is_open():
            await self._send({"type": "websocket.send", "text": data.decode()})

    async def close(self, code: int, reason: str) -> None:
        """Close the connection."""
        if self._is_open():
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    def _is_open(self) -> bool:
        return not (self._connection.close_sent or self._connection.left.is_set())

    async def _ask(self) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Ask the app for the conversation; return how it answers, as HTTP."""
        status, headers, body = 500, list[tuple[bytes, bytes]](), b""

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status, headers, body
            if message["type"] == "http.response.start":
                status, headers = message["status"], list(message["headers"])
            else:
                body += message.get("body", b"")

        scope = {name: value for name, value in self._scope.items() if name != "subprotocols"} | {
            "type": "http",
            "method": "GET",
            "scheme": {"wss": "https"}.get(self._scope["scheme"], "http"),
            "headers": [*self._headers()],
            "state": {},
            "extensions": {LEAVING: self._scope["extensions"][LEAVING], SOCKET: self},
        }
        await self._sockets.app(scope, receive, send)
        return status, headers, body

    def _headers(self) -> Iterable[tuple[bytes, bytes]]:
        """Yield the headers of the handshake, the key of a page among them."""
        given = [(name, value) for name, value in self._scope["headers"] if is_passed_on(name)]
        yield from given
        if all(name not in (b"authorization", b"x-api-key") for name, _ in given):
            for offered in self._scope["subprotocols"]:
                if offered.startswith(KEY_PREFIX):
                    yield b"authorization", b"Bearer " + offered.removeprefix(KEY_PREFIX).encode("latin-1")
                    return
