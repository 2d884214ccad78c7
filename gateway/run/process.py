# What a gateway and a worker are made of: every part is opened here once, wired, run and closed in reverse.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from msgspec.structs import asdict

from billing.ledger.tables import usage_series
from billing.upkeep.turns import Turns
from gateway.accounts.auth import Authenticator
from gateway.accounts.client_secrets import ClientSecrets
from gateway.cache.cached_answers import AnswerCache
from gateway.cache.store import CacheStore
from gateway.calls.accumulate import Collector
from gateway.calls.early_leaves import EarlyLeaves
from gateway.calls.hooks import HookMaker
from gateway.calls.image_urls import ImageUrls
from gateway.calls.journaling import OpenCalls
from gateway.calls.remote_prefill import RemotePrefills
from gateway.contents.store import PURPOSE as CONTENTS
from gateway.contents.store import ContentStore
from gateway.core.background import Background, stop_all
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.parts import Parts
from gateway.core.settings import Settings, Tracing
from gateway.dialects.table import ENDPOINTS, FIELDS, REALTIME, REALTIME_PATH
from gateway.fleet.autoscaling import Autoscaler
from gateway.fleet.discovery import Discovery
from gateway.fleet.engines import EngineWatch
from gateway.fleet.instances import InstanceWatcher
from gateway.fleet.kv_events import KvEvents
from gateway.fleet.told_abilities import ToldAbilities
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.admission import Admission
from gateway.inference.answer import Inference, Replies
from gateway.inference.call_closer import CallCloser
from gateway.inference.counting import PromptCounter
from gateway.inference.dispatcher import Dispatcher
from gateway.inference.edition import Edition, Editions
from gateway.inference.hedging import FirstTokenTimes, Hedger
from gateway.inference.idempotency import AnsweredOnce
from gateway.inference.limiter import TargetLimiter
from gateway.inference.recalibrations import Recalibrations
from gateway.inference.route_chooser import RouteChooser
from gateway.mcp.gateway import McpGateway
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import OutsideChecker
from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.moderator import Moderator
from gateway.moderation.output_guard import output_guard_of
from gateway.moderation.output_redaction import output_redaction_of
from gateway.moderation.output_watch import output_watch_of
from gateway.moderation.policy_events import PolicyEvents
from gateway.overload.body_memory import BodyRoom
from gateway.overload.placement import Placement
from gateway.overload.read_limit import CountLimit, ReadLimit, StoredLimit
from gateway.realtime.gateway import Realtime
from gateway.run.identity import open_identity
from gateway.shadow.sampler import Sampler
from gateway.storage.books import open_books
from gateway.storage.database import Database
from gateway.storage.encryption import Sealer
from gateway.storage.readiness import Readiness
from gateway.storage.rows_behind import RowsBehind
from gateway.storage.tables import refused_calls
from gateway.stored_responses.background import BackgroundResponses
from gateway.stored_responses.background_store import BackgroundStore
from gateway.stored_responses.chats import ChatStore
from gateway.stored_responses.compaction import Summaries
from gateway.stored_responses.conversations import ConversationStore
from gateway.stored_responses.memory import ResponseMemory
from gateway.stored_responses.store import ResponseStore
from gateway.telemetry.live_events import LiveEvents
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import Refusals
from gateway.telemetry.tracing import Tracer
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import PURPOSE, ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.canaries import CanaryWatch
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from protocol.serving.redis_client import open_redis
from router.catalog.catalog import Catalog
from router.complexity.classifier import Complexity
from router.prompt_size.text_bounds import shared_by_vocabularies
from router.replicas import VersionShare
from router.team_score import team_score

if TYPE_CHECKING:
    from gateway.telemetry.metrics_export import MetricsExport

log = structlog.get_logger()

Loop = Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def open_process(settings: Settings, clock: Clock, drain: Drain) -> AsyncIterator[Parts]:
    """Open everything, run the loops that keep it true, and close it all in reverse."""
    for left_out in settings.left_out:
        log.warning("provider_left_out", **asdict(left_out))
    async with AsyncExitStack() as stack:
        process = _Process(settings, clock, drain)
        await process.open(stack)
        for loop in process.loops():
            task = asyncio.create_task(_keep_going(loop))
            stack.push_async_callback(stop_all, [task])
        yield process.parts()
        await process.finish()


class _Process:
    """The parts of one process. They are made in the order in which they need each other."""

    def __init__(self, settings: Settings, clock: Clock, drain: Drain) -> None:
        self.settings, self.clock, self.drain = settings, clock, drain
        self.background, self.metrics, self.body_room = Background(), Metrics(), BodyRoom()
        self.version_shares: dict[str, VersionShare] = {}
        self.open_calls, self.early_leaves, self.images = OpenCalls(), EarlyLeaves(clock), ImageUrls()

    async def open(self, stack: AsyncExitStack) -> None:
        """Open what needs to be closed again, and make the rest."""
        settings, clock, catalog = self.settings, self.clock, self.settings.catalog()
        self.database = Database(settings.database_url, direct_url=settings.database_direct_url)
        stack.push_async_callback(self.database.close)
        self.redis = open_redis(settings.redis_url, timeout=0.25)
        stack.push_async_callback(self.redis.aclose)
        self.client = UpstreamClient()
        stack.push_async_callback(self.client.close)
        self.kv_events = KvEvents()
        stack.callback(self.kv_events.close)
        sealer = Sealer(settings.key_pepper, PURPOSE, *settings.other_key_peppers)
        providers = ProviderRegistry(settings.providers, sealer=sealer)
        self.identity = open_identity(settings, self.database, self.client, clock)
        self._make_resilience(catalog, providers)
        await self.breakers.sync()  # what is open is known before the first call
        self._make_kept_answers()
        self._make_policy()
        stack.push_async_callback(self.moderator.close)
        self.moderator.start()
        self._make_routing(catalog, providers)
        self.books = await stack.enter_async_context(open_books(settings, clock, self.database, self.redis))
        self.admission = Admission(self.books.quotas, self.books.journal, self.open_calls, clock)
        self.mcp = McpGateway(self.admission, self.client, clock, self.metrics)
        self.realtime = Realtime(self.client, self.breakers, self.moderator, clock)
        self._make_watchers(catalog)
        self.discovery = Discovery(self.redis, clock, settings.data_dir / "fleet.json", self.version_shares)
        told = ToldAbilities()
        self.editions = Editions(
            self.edition_of(settings, providers), self.edition_of, lambda said: told.join(self.discovery.join(said))
        )
        self.editions.follow(self.follow)
        self.watcher = InstanceWatcher(
            *(self.editions.current, self.client, self.database, self.redis, clock),
            with_sleepers=self.discovery.with_sleepers,
        )
        self.engines = EngineWatch(
            self.editions.current,
            self.limiter,
            self.breakers,
            self.client,
            clock,
            self.kv_events,
            told,
            self.editions.renew,
        )
        self.discovery.begin(self.editions)
        self.autoscaler = Autoscaler(self.editions.current, self.discovery, self.database, self.redis, clock)
        self.metrics.targets.follow_fleet(
            self.discovery.count_replicas, self.autoscaler.targets, self.discovery.count_rollouts
        )
        if settings.fleet is not None:
            await self.discovery.look_once()  # its replicas are known before the first call,
        await self.engines.look_once()  # and what engines can do

    def edition_of(self, settings: Settings, providers: ProviderRegistry) -> Edition:
        """Build what calls go by that begin under these settings."""
        catalog, clock, metrics, moderator = settings.catalog(), self.clock, self.metrics, self.moderator
        limiter, breakers, first_tokens, images = self.limiter, self.breakers, self.first_tokens, self.images
        chooser = RouteChooser(
            catalog, providers, self.complexity, limiter, breakers, first_tokens, images, self.canaries
        )
        prefills = RemotePrefills(providers, self.client, limiter.prompt_at, clock)
        dispatcher = Dispatcher(providers, self.client, breakers, self.budgets, limiter, prefills, first_tokens, clock)
        closer = CallCloser(self.admission, providers, moderator, metrics, self.contents, self.tracer, clock)
        cache = AnswerCache(settings, self.cache_store, self.cache_sealer, self.background, moderator, metrics)
        replies = Replies(dispatcher, closer, self.hooks, cache, self.contents, clock, metrics)
        hedger = None
        if settings.hedges:
            hedger = Hedger(settings.hedges, dispatcher, self.admission, closer, self.first_token_times, clock, metrics)
        return Edition(
            settings=settings,
            catalog=catalog,
            providers=providers,
            inference=Inference(
                chooser, limiter, self.admission, dispatcher, replies, closer, moderator, self.early_leaves, hedger
            ),
            answered_once=AnsweredOnce(settings, self.idempotency, self.background, clock, metrics),
            prompt_counter=PromptCounter(catalog, providers, self.client, breakers, moderator, images),
        )

    def follow(self, edition: Edition) -> None:
        """Have what all editions share go by another one."""
        targets = edition.catalog.targets()
        self.moderator.follow(edition.settings.safety)
        self.breakers.follow(edition.providers, targets)
        self.budgets.follow(edition.settings.providers)
        self.limiter.follow(edition.providers, targets, edition.settings.queue)
        self.books.follow(edition.settings)
        self.idempotency.follow(edition.settings.retention.idempotency)
        self.memory.follow(edition.settings.retention.responses, edition.settings.responses_stored_bytes)
        self.contents.follow(edition.settings.retention.contents)
        self.watcher.follow(edition)
        self.engines.follow(edition)
        self.autoscaler.follow(edition)
        self.sampler.follow(edition.catalog, edition.providers)
        self.recalibrations.follow(edition.catalog)
        self.canaries.follow(edition.catalog)
        self.mcp.follow(edition.settings.mcp_servers)
        self.refusals.follow(edition.catalog)

    def loops(self) -> list[Loop]:
        """Return what runs as long as the process does."""
        books = self.books
        of_books = (books.owner, books.quotas.rates, books.flusher, books.sweeper, books.auditor)
        of_calls = (
            self.auth,
            self.auth.uses,
            self.idempotency,
            self.open_calls,
            self.breakers,
            self.recalibrations,
            self.canaries,
        )
        of_policy = (self.policy_events, self.refused, self.refused_counts, self.contents, self.abuse)
        watchers = (self.metrics, self.refusals, self.live, self.discovery, self.watcher, self.engines, self.autoscaler)
        exports = () if self.metrics_export is None else (self.metrics_export,)
        return [
            *(part.run for part in (*of_books, *of_calls, *of_policy, *watchers, *exports)),
            *(issuer.run for issuer in self.identity.issuers),
        ]

    def parts(self) -> Parts:
        """Return what routes and commands may ask for: all that this process has, by type."""
        more = (
            ReadLimit(self.clock.monotonic),
            CountLimit(self.clock.monotonic),
            StoredLimit(self.clock.monotonic),
            Readiness(self.database, self.redis, self.books.journal, self.clock),
            self.identity.sign_in,
        )
        return Parts(*(part for part in (*vars(self).values(), *more) if part is not None))

    async def finish(self) -> None:
        """End what still runs behind calls, and let go of what is gathered."""
        await self.background.drain(self.drain.settle_within)
        with suppress(Exception):  # what cannot be flushed now stays in the journal for the process that adopts it
            await self.books.flusher.flush_once()
        self.refusals.turn()
        for rows in (self.policy_events, self.refused, self.refused_counts, self.contents, self.auth.uses):
            with suppress(Exception):
                await rows.flush()
        for export in (self.tracer, self.metrics_export):
            if export is not None:
                with suppress(Exception):
                    await export.close()

    def _make_resilience(self, catalog: Catalog, providers: ProviderRegistry) -> None:
        targets, clock = catalog.targets(), self.clock
        self.breakers, self.budgets = Breakers(providers, targets, clock, self.background, self.redis), RetryBudgets()
        self.first_tokens, self.first_token_times = FirstTokens(clock), FirstTokenTimes()
        self.limiter = TargetLimiter(
            providers,
            targets,
            self.breakers,
            self.settings.queue,
            clock,
            self.metrics,
            Placement(self.kv_events.cached),
            self.version_shares,
        )
        pools, slow = self.limiter.slot_pools, self.limiter.slow_replicas
        self.metrics.targets.follow(self.breakers, self.budgets, pools, self.kv_events.cached, slow)

    def _make_kept_answers(self) -> None:
        settings = self.settings
        sealer = Sealer(settings.key_pepper, "idempotency", *settings.other_key_peppers)
        keep = settings.retention.idempotency
        self.idempotency = IdempotencyStore(self.database, self.clock, sealer, retention=keep)
        self.cache_sealer = Sealer(settings.key_pepper, "cache", *settings.other_key_peppers)
        self.cache_store = CacheStore(self.redis, self.clock)
        content_sealer = Sealer(settings.key_pepper, CONTENTS, *settings.other_key_peppers)
        self.contents = ContentStore(self.database, content_sealer, settings.retention.contents)
        response_sealer = Sealer(settings.key_pepper, "responses", *settings.other_key_peppers)
        responses = ResponseStore(
            self.database, self.clock, response_sealer, self.body_room, settings.retention.responses
        )
        self.conversations = ConversationStore(responses)
        summaries = Summaries(Sealer(settings.key_pepper, "compaction", *settings.other_key_peppers))
        self.memory = ResponseMemory(
            responses, self.conversations, summaries, self.clock, settings.responses_stored_bytes, Collector
        )
        self.chats = ChatStore(responses)
        background_store = BackgroundStore(responses, self.idempotency, self.database)
        self.backgrounds = BackgroundResponses(self.memory, background_store, self.background)
        self.drain.runs_more = lambda: self.backgrounds.is_busy

    def _make_policy(self) -> None:
        self.policy_events = PolicyEvents(self.database)
        self.abuse = AbuseWatch(self.redis, self.clock, self.background)
        checker = OutsideChecker(self.client, self.metrics)
        self.moderator = Moderator(
            self.settings.safety, Classifier.load(), self.policy_events, self.abuse, checker, self.metrics
        )

    def _make_routing(self, catalog: Catalog, providers: ProviderRegistry) -> None:
        self.complexity = Complexity.load()
        shared_by_vocabularies()  # no call waits for the reading
        self.sampler = Sampler(catalog, providers, self.database, self.background, self.clock, self.complexity.version)
        self.recalibrations = Recalibrations(catalog, self.database, partial(team_score, self.complexity))
        turns = Turns(self.database, self.clock)
        self.canaries = CanaryWatch(catalog, self.database, turns, self.clock, self.metrics.count_rollback)

    def _make_watchers(self, catalog: Catalog) -> None:
        """Make what looks at calls, and at who makes them."""
        settings, books = self.settings, self.books
        self.refused = RowsBehind(self.database, refused_calls, "refused_calls")
        endpoints = {each.path: each.name for each in ENDPOINTS} | {
            McpGateway.PATH: McpGateway.ENDPOINT,
            REALTIME_PATH: REALTIME,
        }
        self.refused_counts = RowsBehind(self.database, usage_series, "refused_counts")
        self.refusals = Refusals(
            self.metrics, catalog, endpoints, FIELDS, self.refused.add, count=self.refused_counts.add
        )
        self.live = LiveEvents(books.journal, self.refusals, self.redis, self.clock)
        self.tracer, self.metrics_export = _open_exports(settings.tracing, self.metrics)
        hooks: tuple[HookMaker, ...] = (
            self.metrics.watch,
            partial(output_redaction_of, self.moderator),
            partial(output_watch_of, self.moderator),
            partial(output_guard_of, self.moderator),
            self.sampler.watch,
        )
        self.hooks = hooks if self.tracer is None else (*hooks, self.tracer.watch)
        others, scrapers = settings.other_key_peppers, settings.metrics_keys
        self.client_secrets = ClientSecrets(settings.key_pepper, *others)
        self.auth = Authenticator(
            self.database,
            self.clock,
            settings.key_pepper,
            settings.admin_keys,
            others,
            scrapers,
            tokens=self.identity.tokens,
            open_secret=self.client_secrets.opened,
        )
        self.auth.on_tight = lambda scope: books.quotas.leases.recall([scope])
        self.metrics.books.follow(books)
        self.metrics.follow_rows(self.policy_events, self.refused, self.refused_counts, self.contents)
        self.metrics.config_loaded.set(self.clock.now())


def _open_exports(settings: Tracing | None, metrics: Metrics) -> tuple[Tracer | None, MetricsExport | None]:
    """Open what sends traces and metrics to a collector, as far as that is asked for."""
    if settings is None:
        return None, None
    from gateway.telemetry.trace_export import TraceExport  # the SDK: an extra, and 50 ms to import

    tracer = Tracer(TraceExport(settings.url), settings.share)
    if not settings.metrics:
        return tracer, None
    from gateway.telemetry.metrics_export import MetricsExport

    return tracer, MetricsExport(metrics, settings.url)


async def _keep_going(loop: Loop) -> None:
    """Run a loop for ever: what it did not expect is logged, and it begins again."""
    while True:
        try:
            await loop()
        except Exception:
            log.exception("loop_failed", loop=loop.__qualname__)
        await asyncio.sleep(1.0)
