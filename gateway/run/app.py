# The one place where everything is built, wired and closed.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import structlog
from litestar import Litestar
from litestar.config.app import AppConfig
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.plugins import PluginProtocol
from litestar.plugins.core import MsgspecDIPlugin
from msgspec.structs import asdict

from gateway.accounts.auth import Authenticator
from gateway.calls.early_leaves import EarlyLeaves
from gateway.calls.hooks import HookMaker
from gateway.calls.image_urls import ImageUrls
from gateway.calls.journaling import Keeper
from gateway.core.background import Background, stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.settings import Settings, Tracing
from gateway.core.version import VERSION
from gateway.fleet.engines import EngineWatch
from gateway.fleet.instances import InstanceWatcher
from gateway.http.connections import ConnectionLimit
from gateway.http.cors import cors_of
from gateway.http.direct import Direct
from gateway.http.error_handler import LARGEST_BODY, render_error
from gateway.http.middleware import Telemetry
from gateway.http.routes import HANDLERS
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.limiter import Gate
from gateway.inference.recalibrations import Recalibrations
from gateway.inference.services import Services
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import OutsideChecker
from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.moderator import Moderator
from gateway.moderation.output_watch import output_watch_of
from gateway.moderation.policy_events import PolicyEvents
from gateway.overload.body_memory import BodyRoom
from gateway.run.reload import Reloader
from gateway.shadow.sampler import Sampler
from gateway.storage.books import open_books
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.storage.readiness import Readiness
from gateway.storage.redis_client import open_redis
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import Refusals
from gateway.telemetry.tracing import Tracer
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.retry import RetryBudgets
from router.complexity.classifier import Complexity
from router.prompt_size.text_bounds import shared_by_vocabularies

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
        async with open_services(settings, clock, drain) as services:
            app.state.services = services
            if reloader is not None:
                reloader.state = app.state
            if connections is not None:
                connections.follow(lambda: app.state.services)
            telemetry.metrics, telemetry.refusals = services.metrics, services.refusals
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


@asynccontextmanager
async def open_services(settings: Settings, clock: Clock, drain: Drain) -> AsyncIterator[Services]:
    """Open everything, run the loops that keep it true, and close it all in reverse."""
    for left_out in settings.left_out:
        log.warning("provider_left_out", **asdict(left_out))
    async with AsyncExitStack() as stack:
        database = Database(settings.database_url)
        stack.push_async_callback(database.close)
        redis = open_redis(settings.redis_url, timeout=0.25)
        stack.push_async_callback(redis.aclose)
        client = UpstreamClient()
        stack.push_async_callback(client.close)
        background = Background()
        metrics = Metrics()
        catalog, registry = settings.catalog(), ProviderRegistry(settings.providers)
        breakers, budgets = Breakers(registry, catalog.targets(), clock, background, redis), RetryBudgets()
        gate = Gate(registry, catalog.targets(), breakers, settings.queue, clock, metrics)
        await breakers.sync()  # what is open is known before the first call
        idempotency = IdempotencyStore(
            database,
            clock,
            Sealer(settings.key_pepper, "idempotency", *settings.other_key_peppers),
            retention=settings.retention.idempotency,
        )
        policy_events, abuse = PolicyEvents(database), AbuseWatch(redis, clock, background)
        checker = OutsideChecker(client, metrics)
        moderator = Moderator(settings.safety, Classifier.load(), policy_events, abuse, checker, metrics)
        complexity = Complexity.load()
        shared_by_vocabularies()  # no call waits for the reading
        sampler = Sampler(catalog, database, background, clock, complexity.version)
        recalibrations = Recalibrations(catalog, database)
        refusals = Refusals(metrics, catalog)

        def follow(edition: Services) -> None:
            moderator.follow(edition.settings.safety)
            breakers.follow(edition.providers, edition.catalog.targets())
            budgets.follow(edition.settings.providers)
            gate.follow(edition.providers, edition.catalog.targets(), edition.settings.queue)
            books.follow(edition.settings)
            idempotency.retention = edition.settings.retention.idempotency
            watcher.follow(edition)
            engines.follow(edition)
            sampler.follow(edition.catalog)
            recalibrations.follow(edition.catalog)
            refusals.follow(edition.catalog)

        books = await stack.enter_async_context(open_books(settings, clock, database, redis))
        tracer = _open_tracer(settings.tracing)
        hooks: tuple[HookMaker, ...] = (metrics.watch, partial(output_watch_of, moderator), sampler.watch)
        services = Services(
            settings=settings,
            catalog=catalog,
            clock=clock,
            database=database,
            redis=redis,
            quotas=books.quotas,
            journal=books.journal,
            flusher=books.flusher,
            owner=books.owner,
            client=client,
            providers=registry,
            breakers=breakers,
            budgets=budgets,
            first_tokens=FirstTokens(clock),
            gate=gate,
            complexity=complexity,
            moderator=moderator,
            recalibrations=recalibrations,
            auth=Authenticator(
                database,
                clock,
                settings.key_pepper,
                settings.admin_keys,
                settings.other_key_peppers,
                settings.metrics_keys,
            ),
            idempotency=idempotency,
            keeper=Keeper(),
            early_leaves=EarlyLeaves(clock),
            images=ImageUrls(),
            metrics=metrics,
            refusals=refusals,
            tracer=tracer,
            background=background,
            hooks=hooks if tracer is None else (*hooks, tracer.watch),
            drain=drain,
            follow=follow,
            body_room=BodyRoom(),
            readiness=Readiness(database, redis, books.journal, clock),
            started_at=clock.now(),
        )
        metrics.books.follow(books)
        metrics.targets.follow(breakers, budgets, gate.rooms)
        metrics.config_loaded.set(clock.now())
        watcher, engines = InstanceWatcher(services), EngineWatch(services)
        services.auth.on_tight = lambda scope: books.quotas.leases.recall([scope])
        kept = (books.owner, books.quotas.rates, books.flusher, books.sweeper, books.auditor)
        for one in (
            *kept,
            services.auth,
            idempotency,
            services.keeper,
            breakers,
            policy_events,
            abuse,
            recalibrations,
            metrics,
            refusals,
            watcher,
            engines,
        ):
            task = asyncio.create_task(_keep_going(one.run))
            stack.push_async_callback(stop_all, [task])
        yield services
        await background.drain(drain.settle_within)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for the process that adopts it
            await books.flusher.flush_once()
        with suppress(Exception):
            await policy_events.flush()
        if tracer is not None:
            with suppress(Exception):
                await tracer.close()


def _open_tracer(settings: Tracing | None) -> Tracer | None:
    if settings is None:
        return None
    from gateway.telemetry.trace_export import TraceExport  # the SDK: an extra, and 50 ms to import

    return Tracer(TraceExport(settings.url), settings.share)


async def _keep_going(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop for ever: what it did not expect is logged, and it begins again."""
    while True:
        try:
            await loop()
        except Exception:
            log.exception("loop_failed", loop=loop.__qualname__)
        await asyncio.sleep(1.0)


class _Litestar(Litestar):
    """Without the plugins for pydantic and attrs, which we do not use: pydantic alone takes 0.15 s to import."""

    @staticmethod
    def _get_default_plugins(plugins: list[PluginProtocol]) -> list[PluginProtocol]:
        return [*plugins, MsgspecDIPlugin()]


def _without_chatter(config: AppConfig) -> AppConfig:
    """Leave logging to telemetry/."""
    config.logging_config = None
    return config
