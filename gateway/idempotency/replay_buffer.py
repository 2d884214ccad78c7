# The replay buffer: what a call says while it runs, for the one client that listens. The call never waits for its
# client, and goes on when the client has left: another request may come back for the answer.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from protocol.errors import ServiceError

Message = dict[str, Any]  # ASGI's
Send = Callable[[Message], Awaitable[None]]


class ReplayBuffer:
    """Written by the task that runs the call, played by the one that serves its client."""

    def __init__(self, room: int) -> None:
        self.is_heard = True  # as long as a client listens
        self._room = room  # bytes that may wait for a slow client; beyond, the call waits for it
        self._waiting: deque[Message] = deque()
        self._size = 0  # bytes that wait
        self._has_begun = False
        self._is_over = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._taken = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Write one message; it is dropped once no client listens."""
        if not self.is_heard or self._is_over:
            return
        self._waiting.append(message)
        self._size += len(message.get("body", b""))
        self._news.set()
        while self._size > self._room and self.is_heard:
            self._taken.clear()
            await self._taken.wait()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing more comes, or that the call failed. Only the first end counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._news.set()

    async def play(self, send: Send, write_error: Callable[[ServiceError], bytes]) -> None:
        """Send everything on to the client, until the end.

        Raises the call's error if nothing was sent before it; later it is written into the stream by ``write_error``.
        """
        try:
            while await self._something_to_say():
                message = self._waiting.popleft()
                self._size -= len(message.get("body", b""))
                self._taken.set()
                self._has_begun = True
                await send(message)
            if self._error is None:
                return
            if not self._has_begun or not isinstance(self._error, ServiceError):
                raise self._error
            await send({"type": "http.response.body", "body": write_error(self._error), "more_body": False})
        finally:
            self.is_heard = False
            self._waiting.clear()
            self._taken.set()

    async def _something_to_say(self) -> bool:
        while not self._waiting:
            if self._is_over:
                return False
            self._news.clear()
            await self._news.wait()
        return True
