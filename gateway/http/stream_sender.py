# A stream on its way to its client: its head once, its bytes in order, and a comment whenever nothing was sent for a
# while, so that no proxy on the way takes the connection for idle.

from __future__ import annotations

import asyncio
from typing import Any

COMMENT = b": keep-alive\n\n"  # ignored by event parsers
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Times as patient before the first token: a comment then commits status 200, and a failure can only break the stream
# where a status would have told more.
BEFORE_FIRST = 3


class StreamSender:
    """Sends one stream through ASGI's ``send``. ``silence``: seconds until a comment; 0 for none. ``media_type``: of
    what is no events, and has no comments. Close it."""

    def __init__(self, send: Any, silence: float, media_type: str | None = None) -> None:
        self._headers = EVENT_STREAM if media_type is None else [(b"content-type", media_type.encode())]
        silence = silence if media_type is None else 0
        self.has_begun = False
        self._has_ended = False
        self._send = send
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._sent_at = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None  # set anew when it fires, not with every send
        if silence:
            self._idle_timer = self._loop.call_at(self._sent_at + BEFORE_FIRST * silence, self._on_idle)

    async def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send 200, with ``headers`` beside the stream's own; nothing when a comment had to send it before."""
        if not self.has_begun:
            self.has_begun = True
            headers = [*self._headers, *headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, body: bytes, *, is_last: bool = False) -> None:
        """Send bytes; wait while the client has too much unread."""
        while self._comment is not None:  # another may begin in the moment in which one ends
            await self._comment
        self._has_ended = is_last
        self._sent_at = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def end(self) -> None:
        """End the body, if the last bytes did not."""
        if not self._has_ended:
            await self.send(b"", is_last=True)

    def close(self) -> None:
        """Send nothing more."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._comment is not None and not self.has_begun:  # or the next to send something waits for it
            self._comment.cancel()

    def _on_idle(self) -> None:
        silence = self._silence if self.has_begun else BEFORE_FIRST * self._silence
        now = self._loop.time()
        if self._has_ended:
            return
        if self._sent_at + silence <= now and self._comment is None:
            self._sent_at = now
            self._comment = self._loop.create_task(self._send_comment())
        self._idle_timer = self._loop.call_at(max(now, self._sent_at) + self._silence, self._on_idle)

    async def _send_comment(self) -> None:
        try:
            await self.begin([])
            await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        finally:
            self._comment = None
