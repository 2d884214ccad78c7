# One thin layer around the whole app: gives every request its id, puts the id on every answer, counts and logs.

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog

from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.errors import Unavailable
from gateway.dialects.table import REALTIME_PATH, errors_at
from gateway.http import azure_paths
from gateway.http.websocket.realtime import RealtimeSockets
from gateway.http.websocket.session import ResponseSockets
from gateway.telemetry.meters import counter_of, histogram_of

log = structlog.get_logger()

App = Callable[..., Awaitable[None]]
CLIENT_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Telemetry:
    """Wraps an ASGI app. The request's id is in ``scope["state"]["request_id"]`` and in x-request-id.

    Once an answer has begun, ``scope["state"]["status"]`` has its status.

    A response whose stream should end with an error when it is aborted puts a function that writes
    that error into ``scope["state"]["write_error"]``.
    """

    def __init__(self, app: App, clock: Clock, drain: Drain) -> None:
        self._app = app
        responses = ResponseSockets(self, drain)
        self._sockets = {REALTIME_PATH: RealtimeSockets(responses).answer}
        self.answer_socket = responses.answer
        self._clock = clock
        self._drain = drain
        self.metrics: Any = None  # set once the app has started, as are
        self.refusals: Any = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            app = self._app
            if scope["type"] == "websocket":
                app = self._sockets.get(scope["path"], self.answer_socket)
            await app(scope, receive, send)
            return
        if scope["path"].startswith(azure_paths.ROOT):
            scope = azure_paths.at_v1(scope)
        if scope["method"] == "HEAD":  # answered as GET is: the server, by a scope of its own, leaves the body out
            scope = {**scope, "method": "GET"}
        started = time.perf_counter()
        request_id = self._clock.new_id()
        client_id = None
        for name, value in scope["headers"]:
            if name == b"x-client-request-id":
                client_id = value if CLIENT_ID.fullmatch(value) is not None else None
                break
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["client_request_id"] = client_id.decode() if client_id else None
        status = 0
        is_whole = False

        async def send_with_id(message: dict[str, Any]) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                state["status"] = status = message["status"]
                ident = state["request_id"].encode()
                headers = [*message.get("headers", ()), (b"x-request-id", ident)]
                if (own_name := errors_at(scope["path"]).id_header) is not None:
                    headers.append((own_name, ident))
                if client_id is not None:
                    headers.append((b"x-client-request-id", client_id))
                if self._drain.has_begun:
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            elif not message.get("more_body"):
                is_whole = True
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the drain is over
            if not status:
                await self._send_closing_error(scope, send_with_id)
            elif "write_error" in state and not is_whole:
                broken = state["write_error"](Unavailable("The gateway is closing and breaks this answer off."))
                await send_with_id({"type": "http.response.body", "body": broken, "more_body": False})
            elif not is_whole:
                raise
        finally:
            self._finish(scope, state, status, time.perf_counter() - started)

    def _finish(self, scope: dict[str, Any], state: dict[str, Any], status: int, seconds: float) -> None:
        handler = scope.get("path_template", "unknown")
        if self.metrics is not None:
            counter_of(self.metrics.requests, handler, str(status)).inc()
            histogram_of(self.metrics.request_seconds, handler).observe(seconds)
        if status == 0 or (status >= 500 and "is_noted" not in state):
            log.warning(
                "request_failed" if status else "client_left",
                request_id=state["request_id"],
                method=scope["method"],
                route=handler,
                status=status,
                ms=round(seconds * 1000, 3),
            )

    async def _send_closing_error(self, scope: dict[str, Any], send: App) -> None:
        error = Unavailable("The gateway is closing and could not wait for this call's end. Try again.")
        if self.refusals is not None:
            self.refusals.note(scope, error)
        headers = [(b"content-type", b"application/json")]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        body = errors_at(scope["path"]).body(error, scope["state"]["request_id"])
        await send({"type": "http.response.body", "body": msgspec.json.encode(body), "more_body": False})
