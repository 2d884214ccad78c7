# What a gateway and a worker are made of: every part is opened here once, wired, run and closed in reverse.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import structlog
from msgspec.structs import asdict

from gateway.accounts.auth import Authenticator
from gateway.cache.store import CacheStore
from gateway.calls.early_leaves import EarlyLeaves
from gateway.calls.hooks import HookMaker
from gateway.calls.image_urls import ImageUrls
from gateway.calls.journaling import OpenCalls
from gateway.core.background import Background, stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.parts import Parts
from gateway.core.settings import Settings, Tracing
from gateway.dialects.table import ENDPOINTS, FIELDS
from gateway.fleet.engines import EngineWatch
from gateway.fleet.instances import InstanceWatcher
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.admission import Admission
from gateway.inference.answer import Inference, Replies
from gateway.inference.cached_answers import AnswerCache
from gateway.inference.call_closer import CallCloser
from gateway.inference.counting import PromptCounter
from gateway.inference.dispatcher import Dispatcher
from gateway.inference.edition import Edition, Editions
from gateway.inference.idempotency import AnsweredOnce
from gateway.inference.limiter import TargetLimiter
from gateway.inference.recalibrations import Recalibrations
from gateway.inference.route_chooser import RouteChooser
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import OutsideChecker
from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.moderator import Moderator
from gateway.moderation.output_watch import output_watch_of
from gateway.moderation.policy_events import PolicyEvents
from gateway.overload.body_memory import BodyRoom
from gateway.overload.read_limit import ReadLimit
from gateway.shadow.sampler import Sampler
from gateway.storage.books import open_books
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.storage.readiness import Readiness
from gateway.storage.redis_client import open_redis
from gateway.storage.rows_behind import RowsBehind
from gateway.storage.tables import refused_calls
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

Loop = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def open_process(settings: Settings, clock: Clock, drain: Drain) -> AsyncIterator[Parts]:
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
        catalog, providers = settings.catalog(), ProviderRegistry(settings.providers)
        breakers, budgets = Breakers(providers, catalog.targets(), clock, background, redis), RetryBudgets()
        first_tokens = FirstTokens(clock)
        limiter = TargetLimiter(providers, catalog.targets(), breakers, settings.queue, clock, metrics)
        await breakers.sync()  # what is open is known before the first call
        sealer = Sealer(settings.key_pepper, "idempotency", *settings.other_key_peppers)
        idempotency = IdempotencyStore(database, clock, sealer, retention=settings.retention.idempotency)
        cache_sealer = Sealer(settings.key_pepper, "cache", *settings.other_key_peppers)
        cache_store = CacheStore(redis, clock)
        policy_events, abuse = PolicyEvents(database), AbuseWatch(redis, clock, background)
        checker = OutsideChecker(client, metrics)
        moderator = Moderator(settings.safety, Classifier.load(), policy_events, abuse, checker, metrics)
        complexity = Complexity.load()
        shared_by_vocabularies()  # no call waits for the reading
        sampler = Sampler(catalog, database, background, clock, complexity.version)
        recalibrations = Recalibrations(catalog, database)
        refused = RowsBehind(database, refused_calls, "refused_calls")
        refusals = Refusals(metrics, catalog, {each.path: each.name for each in ENDPOINTS}, FIELDS, refused.add)
        books = await stack.enter_async_context(open_books(settings, clock, database, redis))
        tracer = _open_tracer(settings.tracing)
        hooks: tuple[HookMaker, ...] = (metrics.watch, partial(output_watch_of, moderator), sampler.watch)
        hooks = hooks if tracer is None else (*hooks, tracer.watch)
        open_calls, early_leaves, images = OpenCalls(), EarlyLeaves(clock), ImageUrls()
        admission = Admission(books.quotas, books.journal, open_calls, clock)

        def edition_of(settings: Settings, providers: ProviderRegistry) -> Edition:
            """Build what calls go by that begin under these settings."""
            catalog = settings.catalog()
            chooser = RouteChooser(catalog, providers, complexity, limiter, breakers, first_tokens, images)
            dispatcher = Dispatcher(providers, client, breakers, budgets, limiter, first_tokens, clock)
            closer = CallCloser(admission, providers, moderator, metrics, tracer, clock)
            cache = AnswerCache(settings, cache_store, cache_sealer, background, metrics)
            replies = Replies(dispatcher, closer, hooks, cache, clock, metrics)
            return Edition(
                settings=settings,
                catalog=catalog,
                providers=providers,
                inference=Inference(chooser, limiter, admission, dispatcher, replies, closer, moderator, early_leaves),
                answered_once=AnsweredOnce(settings, idempotency, background, clock, metrics),
                prompt_counter=PromptCounter(catalog, providers, client, breakers, moderator, images),
            )

        editions = Editions(edition_of(settings, providers), edition_of)
        watcher = InstanceWatcher(editions.current, client, database, redis, clock)
        engines = EngineWatch(editions.current, limiter, client, clock)

        def follow(edition: Edition) -> None:
            """Have what all editions share go by another one."""
            targets = edition.catalog.targets()
            moderator.follow(edition.settings.safety)
            breakers.follow(edition.providers, targets)
            budgets.follow(edition.settings.providers)
            limiter.follow(edition.providers, targets, edition.settings.queue)
            books.follow(edition.settings)
            idempotency.follow(edition.settings.retention.idempotency)
            watcher.follow(edition)
            engines.follow(edition)
            sampler.follow(edition.catalog)
            recalibrations.follow(edition.catalog)
            refusals.follow(edition.catalog)

        editions.follow(follow)

        auth = Authenticator(
            database, clock, settings.key_pepper, settings.admin_keys, settings.other_key_peppers, settings.metrics_keys
        )
        auth.on_tight = lambda scope: books.quotas.leases.recall([scope])
        metrics.books.follow(books)
        metrics.targets.follow(breakers, budgets, limiter.slot_pools)
        metrics.config_loaded.set(clock.now())
        kept = (books.owner, books.quotas.rates, books.flusher, books.sweeper, books.auditor)
        seen = (auth, idempotency, open_calls, breakers, policy_events, refused, abuse, recalibrations)
        for part in (*kept, *seen, metrics, refusals, watcher, engines):
            task = asyncio.create_task(_keep_going(part.run))
            stack.push_async_callback(stop_all, [task])
        readiness = Readiness(database, redis, books.journal, clock)
        optional = () if tracer is None else (tracer,)
        yield Parts(
            *(
                editions,
                clock,
                database,
                books,
                client,
                breakers,
                budgets,
                limiter,
                moderator,
                complexity,
                recalibrations,
            ),
            *(
                auth,
                metrics,
                refusals,
                drain,
                BodyRoom(),
                ReadLimit(clock.monotonic),
                readiness,
                idempotency,
                open_calls,
                background,
            ),
            *optional,
        )
        await background.drain(drain.settle_within)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for the process that adopts it
            await books.flusher.flush_once()
        for rows in (policy_events, refused):
            with suppress(Exception):
                await rows.flush()
        if tracer is not None:
            with suppress(Exception):
                await tracer.close()


def _open_tracer(settings: Tracing | None) -> Tracer | None:
    if settings is None:
        return None
    from gateway.telemetry.trace_export import TraceExport  # the SDK: an extra, and 50 ms to import

    return Tracer(TraceExport(settings.url), settings.share)


async def _keep_going(loop: Loop) -> None:
    """Run a loop for ever: what it did not expect is logged, and it begins again."""
    while True:
        try:
            await loop()
        except Exception:
            log.exception("loop_failed", loop=loop.__qualname__)
        await asyncio.sleep(1.0)
