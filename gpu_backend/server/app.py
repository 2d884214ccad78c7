# The engine's HTTP app: where everything is built, wired and closed.

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response
from litestar.connection import ASGIConnection
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin

from gpu_backend.kv_transfer.tcp import is_loopback
from gpu_backend.server import chat, completions, embeddings, operations, tokenization
from gpu_backend.server.client.announcer import Announcer
from gpu_backend.server.client.errors import EngineFailed, ForeignPage
from gpu_backend.server.front import Front, front_of, request_id_of
from gpu_backend.server.wire import encode
from protocol.errors import InvalidKey, MethodNotAllowed, ServiceError, TooLarge, UnknownUrl

log = logging.getLogger("gpu_backend")

LARGEST_BODY = 32 * 1024 * 1024  # bytes


def create_app(front: Front, announcer: Announcer | None = None) -> Litestar:
    """Return the app. It opens the engine when it starts and closes it when it stops, and announces it in between."""

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        app.state.front, app.state.announcer = front, announcer
        await front.engine.open()
        try:
            if announcer is not None:
                await announcer.open()
            yield
        finally:
            if announcer is not None:
                await announcer.close()
            await front.engine.close()

    return _Litestar(
        route_handlers=[
            handler
            for module in (chat, completions, embeddings, operations, tokenization)
            for handler in module.handlers
        ],
        lifespan=[lifespan],
        guards=[refuse_pages, require_key],
        exception_handlers={Exception: render_error},
        request_max_body_size=LARGEST_BODY,
        openapi_config=None,
        logging_config=None,
    )


class _Litestar(Litestar):
    """Without the plugins for pydantic and attrs, which we do not use: pydantic alone takes 0.2 s to import."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def refuse_pages(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Refuse what a web page of another site has a browser on this machine send.

    A browser names the page's site in Origin, and in Host where that site's name leads to this machine (DNS rebinding).
    A secret keeps such pages out, too; without one the engine listens on loopback alone, under names of its own.
    """
    origin, host = (connection.headers.get(name) for name in ("origin", "host"))
    if origin is not None and not is_loopback(_host_of(origin.rpartition("://")[2])):
        raise ForeignPage("This engine answers no page of another site. Call it from a program, or through a gateway.")
    if host and not front_of(connection).settings.api_key and not is_loopback(_host_of(host)):
        raise ForeignPage(
            f"This engine has no secret and answers to names of this machine alone, such as 127.0.0.1: {host[:100]!r}."
        )


def _host_of(authority: str) -> str:
    """Return the host of ``host:port``, ``[IPv6]:port`` or either without a port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0].lower()


def require_key(connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler) -> None:
    """Let a request pass if it carries the engine's secret, or if there is none. /health is open to all."""
    secret = front_of(connection).settings.api_key
    if not secret or handler.opt.get("is_open"):
        return
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), secret.encode()):
        raise InvalidKey("This engine demands its secret as 'Authorization: Bearer …'.")


def render_error(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """Return the error object for any exception. What is not meant for clients is logged and named by its id."""
    error = _as_service_error(request, exc)
    front_of(request).metrics.count_refusal(error.status)
    headers = {**error.headers, "x-request-id": request_id_of(request)}
    return Response(encode(error.body()), status_code=error.status, media_type="application/json", headers=headers)


def _as_service_error(request: Request[Any, Any, Any], exc: Exception) -> ServiceError:
    match exc:
        case ServiceError():
            return exc
        case HTTPException(status_code=404):
            return UnknownUrl(f"Unknown request URL: {request.method} {request.url.path}.")
        case HTTPException(status_code=405):
            return MethodNotAllowed(
                f"Not allowed to {request.method} on {request.url.path}.", headers=dict(exc.headers or {})
            )
        case HTTPException(status_code=413):
            return TooLarge(f"The body is longer than {LARGEST_BODY // 2**20} MiB, the most that is read.")
        case HTTPException() if exc.status_code < 500:
            return ServiceError(exc.detail, status=exc.status_code, type="invalid_request_error")
    log.error("request %s failed", request_id_of(request), exc_info=exc)
    return EngineFailed(f"The engine made a mistake of its own. Its log knows it as {request_id_of(request)}.")
