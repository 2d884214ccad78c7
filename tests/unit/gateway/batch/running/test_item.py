# What becomes of an item that cannot be answered now.

from __future__ import annotations

import json
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway.batch.at_providers.lines import ProviderLines
from gateway.batch.claims import ClaimedItem
from gateway.batch.running.item import ItemRunner, RetryLater
from gateway.core.principals import Caller, Team
from gateway.core.settings import ProviderSettings
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.errors import UpstreamTimeout
from router.catalog.targets import Endpoint, Route, Target, TeamKeys
from tests.support.clock import SetClock
from tests.support.house import model

PLACE = Endpoint("here", "http://there/v1")
BODY = {"model": "small", "messages": [{"role": "user", "content": "Hi."}]}


@pytest.mark.parametrize(("is_asked_with_it", "is_named"), [(True, True), (True, False), (False, True), (False, False)])
async def test_what_a_teams_own_key_meets_slows_no_others_items(is_asked_with_it: bool, is_named: bool) -> None:
    """Also one that tollgate.yaml names; but a key of its own elsewhere does not keep a team from slowing down."""
    named = {"owner": ("own",)} if is_named else None
    there = ProviderSettings(name="there", format="openai", endpoints=(PLACE,), team_keys=named)
    stored: dict[str, Any] = {} if is_named else {"there": (("pvk_1", b"sealed"),)}
    own = TeamKeys("owner") if is_asked_with_it else None
    route = Route("small", (Target(model("small", "there"), PLACE, own),), "named")
    clock, inference = SetClock(), Mock(chooser=Mock(route_of=lambda *_: route))
    inference.answer = AsyncMock(side_effect=UpstreamTimeout("Too late."))
    runner = ItemRunner(inference, Mock(), clock, ProviderLines(inference, ProviderRegistry({"there": there}), Mock()))
    claim = ClaimedItem(
        batch_id="batch_1",
        position=0,
        custom_id="a",
        body=json.dumps(BODY).encode(),
        tries=1,
        losses=0,
        is_first=True,
        endpoint="/v1/chat/completions",
        concurrency_group="small",
        key_id="k",
        priority="normal",
        expires_at=clock.now() + 3600,
    )
    ended = await runner.run(Caller(team=Team(id="owner", name="O", provider_keys=stored), key_id="k"), claim, Mock())

    assert isinstance(ended, RetryLater) and ended.is_congestion is not is_asked_with_it
    (call,) = inference.answer.call_args.args
    assert call.size == len(claim.body)  # by which long ones leave the event loop
