# What a use case needs, as one frozen struct: built once in app.py, passed on, closed in reverse.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from billing.journal.journal import Journal
from billing.quotas.quotas import Quotas
from billing.upkeep.flusher import Flusher
from billing.upkeep.owner import Owner
from gateway.accounts.auth import Authenticator
from gateway.calls.early_leaves import EarlyLeaves
from gateway.calls.hooks import HookMaker
from gateway.calls.image_urls import ImageUrls
from gateway.calls.journaling import Keeper
from gateway.core.background import Background
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.core.settings import Settings
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.limiter import Gate
from gateway.inference.recalibrations import Recalibrations
from gateway.moderation.moderator import Moderator
from gateway.overload.body_memory import BodyRoom
from gateway.storage.database import Database
from gateway.storage.readiness import Readiness
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import Refusals
from gateway.telemetry.tracing import Tracer
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.first_tokens import FirstTokens
from gateway.upstreams.resilience.retry import RetryBudgets
from router.catalog.catalog import Catalog
from router.catalog.targets import TargetHealth
from router.complexity.classifier import Complexity


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything that a call needs. All but settings, catalogue and providers is opened at start and shared by all.

    A call keeps the edition that it began with; when the configuration is read again, those that begin get another.
    """

    settings: Settings
    catalog: Catalog
    clock: Clock
    database: Database
    redis: Redis
    quotas: Quotas
    journal: Journal
    flusher: Flusher
    owner: Owner
    client: UpstreamClient
    providers: ProviderRegistry
    breakers: Breakers
    budgets: RetryBudgets
    first_tokens: FirstTokens
    gate: Gate
    complexity: Complexity
    moderator: Moderator
    recalibrations: Recalibrations
    auth: Authenticator
    idempotency: IdempotencyStore
    keeper: Keeper
    early_leaves: EarlyLeaves
    images: ImageUrls
    metrics: Metrics
    refusals: Refusals
    tracer: Tracer | None
    background: Background
    hooks: tuple[HookMaker, ...]
    drain: Drain
    follow: Callable[[Services], None]  # has what is shared go by another edition
    body_room: BodyRoom
    readiness: Readiness
    started_at: float  # unix seconds

    def health(self) -> Mapping[str, TargetHealth]:
        """Return what is known of targets in trouble; a target that is missing is healthy."""
        full, away = self.gate.health(), self.breakers.health()
        return {**full, **away} if full else away

    def health_snapshot(self, health: Mapping[str, TargetHealth]) -> Mapping[str, TargetHealth]:
        """Return what the router goes by: ``health``, and how soon the others have lately answered."""
        return self.first_tokens.beside(health)
