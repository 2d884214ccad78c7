# The short way of the inference calls: from the socket to the route's handler without the framework's steps between.
# Litestar declares these routes, with their guards and schemas, and answers whatever is not plainly such a call: other
# methods and paths, long bodies and chunked ones, calls from web pages. The same guards and handlers run on both ways,
# and errors are rendered by the same function; a test holds the two to the same answers.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from litestar import Litestar, Request
from litestar.datastructures import Headers
from litestar.exceptions import LitestarException
from litestar.handlers import HTTPRouteHandler

from gateway.http.error_handler import render_error
from protocol.errors import BadRequest
from protocol.serving.off_loop import HEAVY

HOST = re.compile(r"[A-Za-z0-9.:\[\]_-]+")


class DirectRequest(Request[Any, Any, Any]):
    """A request whose head was read when it came; its body is short."""

    def __init__(self, scope: Any, receive: Any, send: Any, head: Mapping[str, str]) -> None:
        self.scope, self.receive, self.send = scope, receive, send  # Litestar's own makes thirty caches besides
        self._head, self._content_length = head, int(head["content-length"])

    @property
    def headers(self) -> Headers:
        """The headers, by their names in lower case; of several alike the first."""
        return self._head  # type: ignore[return-value]

    async def body(self) -> bytes:
        """Return the whole body. Raises BadRequest when its client leaves before its end."""
        message: Any = await self.receive()
        body: bytes = message.get("body", b"")
        while message.get("more_body"):
            message = await self.receive()
            body += message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise BadRequest("The client left before the end of its body.")  # no client reads it
        return body


class Direct:
    """Wraps the app: plain calls to handlers that say ``is_direct`` in their options are answered here."""

    def __init__(self, app: Litestar) -> None:
        self._app = app
        self._takes_pages = app.cors_config is not None
        self._handlers = {
            path: (handler, handler.resolve_guards())
            for route in app.routes
            for handler in getattr(route, "route_handlers", ())
            if isinstance(handler, HTTPRouteHandler) and handler.opt.get("is_direct")
            for path in handler.paths
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._handlers.get(scope["path"])
            if found is not None and (head := self._head_of(scope)) is not None:
                await self._answer(*found, scope, receive, send, head)
                return
        await self._app(scope, receive, send)

    def _head_of(self, scope: Any) -> Mapping[str, str] | None:
        """Return the headers of a plain call, ``None`` for what Litestar is to answer."""
        head = {str(name, "latin-1"): str(value, "latin-1") for name, value in reversed(scope["headers"])}
        length = head.get("content-length", "")
        if not (length.isdecimal() and len(length) < 10 and int(length) <= HEAVY):
            return None
        if ("origin" in head and self._takes_pages) or HOST.fullmatch(head.get("host", "-")) is None:
            return None
        return head

    async def _answer(
        self, handler: HTTPRouteHandler, guards: Any, scope: Any, receive: Any, send: Any, head: Mapping[str, str]
    ) -> None:
        scope["app"] = scope["litestar_app"] = self._app
        scope["route_handler"], scope["path_params"], scope["path_template"] = handler, {}, scope["path"]
        try:
            request = DirectRequest(scope, receive, send, head)
            for guard in guards:
                await guard(request, handler)
            response = await handler.fn(request)
            await response(scope, receive, send)
        except Exception as exc:
            if scope["state"].get("status"):
                raise LitestarException("Exception caught after response started") from exc
            asked: Request[Any, Any, Any] = Request(scope, receive, send)
            await render_error(asked, exc).to_asgi_response(app=None, request=asked)(scope, receive, send)
