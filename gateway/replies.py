# The response that answers an inference call: it runs the whole call, so that it can end it when the client leaves,
# and it always closes its reply.

from __future__ import annotations

from typing import Any, Protocol

import structlog

from gateway.answering.answer import answer
from gateway.answering.call import Call
from gateway.answering.reply import Reply
from gateway.providers.base import WholeReply
from gateway.rate_limits import rate_limit_headers
from gateway.services import Services
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.leaving import ended_when_client_leaves
from protocol.usage import Usage

log = structlog.get_logger()

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class Dialect(Protocol):
    """How one API writes replies. One object per call; it may keep what the stream needs to remember."""

    def whole(self, reply: Reply, whole: WholeReply, usage: Usage) -> bytes:
        """Return the body of a plain answer."""

    def pieces(self, reply: Reply, events: list[Event]) -> bytes:
        """Return the bytes of a stream that stand for events which came together."""

    def error(self, error: ServiceError) -> bytes:
        """Return the bytes that tell a client in mid-stream that its reply broke."""


class ReplyResponse:
    """Answers ``call`` in ``dialect``: an ASGI app that a route handler returns."""

    def __init__(self, services: Services, call: Call, dialect: Dialect) -> None:
        self._services = services
        self._call = call
        self._dialect = dialect

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the call until its last byte is sent, or until its client leaves."""
        self._services.metrics.in_flight.inc()
        try:
            async with ended_when_client_leaves(receive):
                reply = await answer(self._services, self._call)
                try:
                    if self._call.streams:
                        await self._stream(reply, send)
                    else:
                        await self._send_whole(reply, send)
                finally:
                    reply.close()
        finally:
            self._services.metrics.in_flight.dec()

    async def _send_whole(self, reply: Reply, send: Any) -> None:
        whole, usage = await reply.collect()
        body = self._dialect.whole(reply, whole, usage)
        headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), *reply_headers(reply)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, reply: Reply, send: Any) -> None:
        headers = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *reply_headers(reply)]})
        try:
            async for events in reply.pieces():
                if body := self._dialect.pieces(reply, events):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except ServiceError as exc:
            # Too late for another status: the stream itself says it, and ends without [DONE].
            await send({"type": "http.response.body", "body": self._dialect.error(exc), "more_body": True})
        except Exception:
            log.exception("reply_failed", request_id=self._call.request_id)
            broken = ServiceError("The answer broke off inside the gateway.")
            await send({"type": "http.response.body", "body": self._dialect.error(broken), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def reply_headers(reply: Reply) -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer to an inference call carries."""
    ours = max(0.0, reply.first_token_seconds - reply.log.waited) * 1000
    headers = [
        (b"x-model-used", reply.target.model.name.encode()),
        (b"x-route-reason", reply.route.reason.encode()),
        (b"x-tollgate-overhead-ms", b"%.3f" % ours),
    ]
    limits = rate_limit_headers(reply.account.hold)
    return headers + [(name.encode(), value.encode()) for name, value in limits.items()]
