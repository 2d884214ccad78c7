# The gateway as an ASGI app: its routes, and what it runs from start to stop.

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog
from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.config.cors import CORSConfig
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin

from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.settings import Settings
from gateway.core.version import VERSION
from gateway.http.background_response import BackgroundResponse
from gateway.http.direct import Direct
from gateway.http.error_handler import render_error
from gateway.http.exchange import LARGEST_BODY
from gateway.http.http_protocol import ConnectionLimit
from gateway.http.inference_port import InferencePort
from gateway.http.middleware import Telemetry
from gateway.http.routes import HANDLERS
from gateway.inference.edition import Edition, Editions
from gateway.run.process import open_process
from gateway.run.reload import Reloader
from gateway.stored_responses.background import BackgroundResponses
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import Refusals

# Of the answers' headers, those that clients look at.
SHOWN = [
    *("x-request-id", "request-id", "x-client-request-id", "retry-after", "x-should-retry"),
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
    *("x-cache", "x-model-used", "x-route-reason", "x-route-score", "content-disposition"),
    *(f"x-tollgate-{what}" for what in ("dropped", "max-tokens", "overhead-ms", "queue-ms")),
]

log = structlog.get_logger()


def create_app(
    settings: Settings,
    drain: Drain | None = None,
    reloader: Reloader | None = None,
    connections: ConnectionLimit | None = None,
) -> Telemetry:
    """Return the gateway as an ASGI app. Everything it needs is opened when it starts and closed when it stops."""
    clock, drain = Clock(), drain or Drain()
    telemetry: Telemetry

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with open_process(settings, clock, drain) as parts:
            editions, metrics, refusals = parts.get(Editions), parts.get(Metrics), parts.get(Refusals)
            app.state.parts, app.state.editions = parts, editions

            def follow(edition: Edition) -> None:
                app.state.inference = InferencePort(
                    edition.settings.keep_alive,
                    edition.inference.answer,
                    edition.answered_once.answer,
                    partial(BackgroundResponse, parts.get(BackgroundResponses)),
                    edition.inference.warm_up,
                    metrics.in_flight,
                    refusals.note,
                )

            follow(editions.current)
            editions.follow(follow)
            if reloader is not None:
                reloader.begin(editions, metrics, clock)
            if connections is not None:
                connections.begin(editions, metrics, clock)
            telemetry.metrics, telemetry.refusals = metrics, refusals
            yield

    app = _Litestar(
        route_handlers=HANDLERS,
        lifespan=[lifespan],
        exception_handlers={Exception: render_error},
        request_max_body_size=LARGEST_BODY,
        cors_config=cors_of(settings),
        openapi_config=OpenAPIConfig(
            title="Tollgate",
            version=VERSION,
            path="/openapi",
            render_plugins=[JsonRenderPlugin()],
            use_handler_docstrings=True,
        ),
        on_app_init=[_without_chatter],
    )
    telemetry = Telemetry(Direct(app), clock, drain)
    return telemetry


class _Litestar(Litestar):
    """Without the plugins for pydantic and attrs, which we do not use: pydantic alone takes 0.15 s to import."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def _without_chatter(config: AppConfig) -> AppConfig:
    """Leave logging to telemetry/."""
    config.logging_config = None
    return config


def cors_of(settings: Settings) -> CORSConfig | None:
    """Return what scripts of web pages may do (CORS); ``None``, which costs a call nothing, where none may.

    A page calls with the key that it has; cookies play no part."""
    if not settings.cors_origins:
        return None
    return CORSConfig(allow_origins=list(settings.cors_origins), expose_headers=SHOWN)
