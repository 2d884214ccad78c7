# Which models a route leaves out, and by which words.

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from protocol.chat import Function as ToolFunction
from protocol.chat import Tool
from protocol.embeddings import EmbeddingRequest
from router import Capability, RoutingOptions, Tier, choose_route
from router.catalog.catalog import Catalog
from router.catalog.routing_options import ProviderPreference
from router.left_out import left_out_of
from tests.unit.router.examples import CHAT, EVERYTHING, catalog, chat, model

TOOLS = CHAT | {Capability.TOOLS}
PREFERENCE = "provider_preference"
WITH_TOOLS = replace(chat("auto"), tools=(Tool(ToolFunction("look")),))
SMALL, LARGE = model("small", dollars="0.10"), model("large", "us-eu", dollars="5.00", capabilities=TOOLS)
AUTO = catalog(SMALL, LARGE, small=("small",), large=("large",))
EMBEDS = replace(AUTO, models={one.name: replace(one, capabilities=EVERYTHING) for one in (SMALL, LARGE)})
TIMELY = replace(AUTO, models={**AUTO.models, "small": replace(SMALL, tiers=frozenset({Tier.INTERACTIVE}))})
AWAY = replace(AUTO, endpoints={**AUTO.endpoints, "us-eu": ()})
SPARED = catalog(model("m", context=1), SMALL, LARGE, fallbacks={"m": ("small", "large")})
LONG = replace(chat("m"), max_tokens=2)


@pytest.mark.parametrize(
    ("known", "request_", "options", "codes"),
    [
        (AUTO, chat("auto"), {}, {}),
        (AUTO, chat("large"), {}, {}),
        (AUTO, WITH_TOOLS, {}, {"small": ["lacks_tools"]}),
        (AUTO, chat("auto"), {"allow_smaller": False}, {"small": ["smaller"]}),
        (AUTO, chat("auto"), {"allowed_models": frozenset({"large"})}, {}),
        (AUTO, chat("auto"), {"max_cost_nanousd": 10_000_000}, {"large": ["max_cost_usd"]}),
        (TIMELY, WITH_TOOLS, {"tier": Tier.BATCH}, {"small": ["lacks_tools", "tier"]}),
        (EMBEDS, EmbeddingRequest(model="auto", input="x"), {}, {"large": ["other_vectors"]}),
        (AWAY, chat("auto"), {}, {"large": ["no_replica"]}),
        (SPARED, LONG, {}, {"m": ["context_length"]}),
        (AUTO, WITH_TOOLS, {"spares": ("large",)}, {"small": ["lacks_tools"]}),
        (AUTO, chat("auto"), {"providers": ProviderPreference(only=frozenset({"us-eu"}))}, {"small": [PREFERENCE]}),
        (AUTO, chat("auto"), {"providers": ProviderPreference(ignore=frozenset({"us-eu"}))}, {"large": [PREFERENCE]}),
        (AUTO, chat("auto"), {"providers": ProviderPreference(allow_fallbacks=False)}, {"small": [PREFERENCE]}),
    ],
)
def test_a_model_that_is_left_out_is_named_with_why(
    known: Catalog, request_: Any, options: dict[str, Any], codes: dict[str, list[str]]
) -> None:
    """Every model that the caller may use and means is on the route or named; one that it may not use is neither."""
    asked = RoutingOptions(**options)
    route = choose_route(request_, asked, known, {}, lambda _: 0.1)
    found = left_out_of(route, request_, asked, known)

    assert {name: [one.code for one in why] for name, why in found.items()} == codes
