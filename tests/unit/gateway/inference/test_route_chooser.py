# What is known of targets for the calls of a team.

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

from gateway.core.principals import Team
from gateway.core.settings import ProviderSettings
from gateway.inference.route_chooser import RouteChooser
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.cooldown import UNTOLD
from gateway.upstreams.wire.errors import UpstreamFailure
from router.catalog.targets import Endpoint, Target
from tests.support.clock import SetClock
from tests.support.house import model


async def test_a_call_outlives_a_configuration_that_adds_a_provider() -> None:
    """One that began before goes by what it knows, also while a key rests and its team's keys matter."""
    places = {name: Endpoint("here", f"http://{name}/v1") for name in ("known", "added")}
    named = {
        name: ProviderSettings(name=name, format="openai", api_keys=("k",), endpoints=(place,))
        for name, place in places.items()
    }
    targets = [Target(model(f"model-{name}", name), place) for name, place in places.items()]
    before, nothing = ProviderRegistry({"known": named["known"]}), cast(Any, None)
    breakers = Breakers(before, targets[:1], SetClock(), nothing, Mock())
    limiter = Mock(health=dict)
    chooser = RouteChooser(*(nothing, before, nothing, limiter, breakers, nothing, nothing, nothing))
    breakers.follow(ProviderRegistry(named, before=before), targets)
    permit = await breakers.enter(targets[0])
    breakers.failed(permit, UpstreamFailure("limited", outcome="rate_limited", retry_after=UNTOLD), "a", 1)

    health = chooser.health(Team(id="owner", name="O", company_keys="never"))
    assert health[targets[0].key].is_open
