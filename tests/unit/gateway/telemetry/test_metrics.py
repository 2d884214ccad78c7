# Metrics that follow what is counted elsewhere, also when the configuration changes.

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from gateway.core.background import Background
from gateway.core.settings import ProviderSettings
from gateway.storage.database import Database
from gateway.storage.rows_behind import MOST, RowsBehind
from gateway.storage.tables import refused_calls
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from gateway.upstreams.wire.errors import UpstreamError
from router.catalog.targets import Endpoint, Target
from tests.support.clock import SetClock
from tests.support.house import model

HERE = Endpoint("here", "http://here/v1")


def provider(name: str) -> dict[str, ProviderSettings]:
    return {name: ProviderSettings(name=name, format="openai", api_keys=("sk-1",), endpoints=(HERE,))}


@pytest.fixture
def registry() -> ProviderRegistry:
    return ProviderRegistry(provider("one"))


@pytest.fixture
def breakers(registry: ProviderRegistry) -> Breakers:
    targets = [Target(model("small", "one"), HERE)]
    return Breakers(registry, targets, SetClock(), Background(), Redis(port=1))


def shown(metrics: Metrics) -> list[str]:
    return metrics.render().decode().splitlines()


async def test_a_provider_that_is_gone_has_no_key_in_cooldown(breakers: Breakers, registry: ProviderRegistry) -> None:
    """Whoever took a refused key's provider out of the file is not told of that key for ever."""
    metrics = Metrics()
    metrics.targets.follow(breakers, RetryBudgets(), list)
    permit = await breakers.enter(breakers.all()[0].target)
    breakers.failed(permit, UpstreamError("No.", outcome="refused_key"), "team_a", 10)
    before = shown(metrics)
    other = Target(model("small", "two"), HERE)
    breakers.follow(ProviderRegistry(provider("two"), registry), [other])

    assert 'tollgate_keys_set_aside{provider="one",reason="refused_key"} 1.0' in before
    assert 'tollgate_keys_set_aside{provider="one",reason="refused_key"} 0.0' in shown(metrics)


def test_a_provider_that_comes_back_is_counted_on(breakers: Breakers, registry: ProviderRegistry) -> None:
    """Its budget begins anew; its counter goes on, and the scrape does not fail."""
    metrics, budgets, settings = Metrics(), RetryBudgets(), registry.settings("one")
    metrics.targets.follow(breakers, budgets, list)
    for _ in range(3):
        assert budgets.of(settings).take_move(0.0)
    before = shown(metrics)
    budgets.follow({})
    budgets.follow({"one": settings})
    assert budgets.of(settings).take_move(1.0)

    assert 'tollgate_retries_total{provider="one"} 3.0' in before
    assert 'tollgate_retries_total{provider="one"} 4.0' in shown(metrics)


def test_rows_that_were_never_written_are_told() -> None:
    """Of each table, whatever it is for: what found no room while Postgres was away."""
    metrics = Metrics()
    rows = RowsBehind(Database("postgresql://nowhere/x"), refused_calls, "refused_calls")
    metrics.follow_rows(rows)
    for number in range(MOST + 3):
        rows.add({"number": number})

    assert 'tollgate_rows_lost_total{rows="refused_calls"} 3.0' in shown(metrics)
