# How a connection speaks WebSocket: as uvicorn does on the `websockets` library, with these things put right.
#
# - What a client may take has bounds: bytes of a message, its fragments, bytes of all messages that wait.
# - A client that leaves is told at once to the call that runs for it, as on a connection that speaks HTTP.
# - It knows whether it waits for its client, so that a server which ends can close it without breaking an answer off.

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

from gateway.overload.body_memory import SharedRoom
from protocol.serving.leaving import LEAVING

SOCKET = "tollgate.socket"  # an ASGI extension: this connection; of a request that came over one, its session
LARGEST_MESSAGE = 32 * 1024 * 1024  # bytes, as of a body
MOST_FRAGMENTS = 10_000  # of one message
PING_EVERY = 20.0  # seconds
LINGER = 2.0  # seconds for a client to hear why it is read no more
PONG_WITHIN = 60.0  # seconds; a client that reads nothing for so long has left

quiet = logging.getLogger("tollgate.websocket")  # uvicorn tells of every connection, with its URL
quiet.setLevel(logging.WARNING)


# For the messages of this process, from their first byte until they are decoded: each team has a share, as it has of
# long bodies. A message beyond it ends its connection.
room = SharedRoom()


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection. ``leave`` is called when it ends."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], leave: Callable[[], None]) -> None:
        super().__init__(config, server_state, app_state)
        self.logger = quiet
        self.conn = ServerProtocol(max_size=LARGEST_MESSAGE, logger=quiet)
        self.ping_interval, self.ping_timeout = PING_EVERY, PONG_WITHIN
        self.left = asyncio.Event()
        self._leave = leave
        self._tell: Callable[[], object] | None = None  # what the call that runs does when its client leaves
        self._team_id = ""  # whose messages these are, once that is known
        self._coming = 0  # bytes of the message that comes, with what came between its frames,
        self._waiting: deque[int] = deque()  # and of each that is whole and not read yet
        self._is_idle = False
        self.end: Callable[[], None] | None = None  # ends what runs on it, as soon as that may be, when the server does
        self._is_refused = False  # what still comes is not read

    def begin(self, team_id: str) -> None:
        """Count what comes from now on to a team."""
        held = self._coming + sum(self._waiting)
        room.give_back(self._team_id, held)
        self._team_id = team_id
        room.take(team_id, held)

    def message_is_read(self) -> None:
        """Give the room back that the oldest message took: the next one may wait already."""
        if self._waiting:  # else the connection is lost already
            room.give_back(self._team_id, self._waiting.popleft())

    def end_when_idle(self) -> None:
        """Close the connection if it waits for its client; else the session does, once what runs on it has ended."""
        if self.end is not None:
            self.end()
        elif self._is_idle and self.queue.empty():
            self.shutdown()

    def data_received(self, data: bytes) -> None:
        """Read on: messages, or pieces of them."""
        if self._is_refused:
            return
        self._coming += len(data)
        if room.take(self._team_id, len(data)):
            super().data_received(data)
        else:
            self._refuse(CloseCode.TRY_AGAIN_LATER, "Too many long messages are on their way. Try again.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the call that runs."""
        super().connection_lost(exc)
        room.give_back(self._team_id, self._coming + sum(self._waiting))
        self._coming, self._waiting = 0, deque()
        self._leave()
        self._tell_left()

    async def receive(self) -> Any:
        """Return what comes next. Until then the connection waits for its client."""
        self._is_idle = True
        try:
            return await super().receive()
        finally:
            self._is_idle = False

    async def send(self, message: Any) -> None:
        """Send a message; wait while the client has too much unread. One that has left is sent nothing."""
        try:
            await super().send(message)
        except ClientDisconnected:
            self._tell_left()
        self.handshake_complete |= self.close_sent  # refused by an HTTP answer: uvicorn would log that none came

    def handle_connect(self, event: Request) -> None:
        """Begin, once the client has asked for it as WebSocket has it."""
        super().handle_connect(event)
        if not self.handshake_complete:
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions |= {LEAVING: self._tell_when_left, SOCKET: self}

    def send_receive_event_to_app(self) -> None:
        """Let a whole message wait."""
        self._waiting.append(self._coming)
        self._coming = 0
        super().send_receive_event_to_app()

    def handle_cont(self, event: Frame) -> None:
        """Take one more fragment."""
        if len(self.frames) < MOST_FRAGMENTS:
            super().handle_cont(event)
        else:
            self._refuse(CloseCode.MESSAGE_TOO_BIG, f"A message has at most {MOST_FRAGMENTS} fragments.")

    def handle_close(self, event: Frame) -> None:
        """The client says that it leaves."""
        super().handle_close(event)
        self._tell_left()

    def handle_parser_exception(self) -> None:
        """What came is no message, or too long a one; the client has been told why."""
        told = self.conn.close_sent
        self._end(CloseCode.PROTOCOL_ERROR if told is None else told.code, "")

    def _refuse(self, code: int, words: str) -> None:
        self.conn.fail(code, words)
        self._end(code, words)

    def _end(self, code: int, words: str) -> None:
        """Read nothing more. Closed with unread bytes, the connection would be reset, and its client not know why."""
        self._is_refused = self.close_sent = True
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": words})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(LINGER, self.transport.close)
        self._tell_left()

    def _tell_when_left(self, tell: Callable[[], object] | None) -> None:
        self._tell = tell
        if tell is not None and self.left.is_set():
            self.loop.call_soon(self._tell_left)

    def _tell_left(self) -> None:
        self.left.set()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()
