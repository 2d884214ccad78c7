# What a use case needs, as one frozen struct: built once in app.py, passed on, closed in reverse.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from redis.asyncio import Redis

from billing.flusher import Flusher
from billing.journal import Journal
from billing.owner import Owner
from billing.quotas import Quotas
from gateway.answering.early_leaves import EarlyLeaves
from gateway.answering.hooks import HookMaker
from gateway.answering.image_urls import ImageUrls
from gateway.answering.keeper import Keeper
from gateway.auth import Authenticator
from gateway.background import Background
from gateway.body_room import BodyRoom
from gateway.clock import Clock
from gateway.database import Database
from gateway.draining import Drain
from gateway.held_back.recalibrations import Recalibrations
from gateway.idempotency_store import IdempotencyStore
from gateway.overload.gate import Gate
from gateway.providers.client import UpstreamClient
from gateway.providers.registry import ProviderRegistry
from gateway.readiness import Readiness
from gateway.resilience.breakers import Breakers
from gateway.resilience.first_tokens import FirstTokens
from gateway.resilience.retry import RetryBudgets
from gateway.safety.guard import Guard
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import Refusals
from gateway.telemetry.tracing import Tracer
from router.catalog import Catalog
from router.complexity import Complexity
from router.targets import TargetHealth


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
    guard: Guard
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

    def outlook(self, health: Mapping[str, TargetHealth]) -> Mapping[str, TargetHealth]:
        """Return what the router goes by: ``health``, and how soon the others have lately answered."""
        return self.first_tokens.beside(health)
