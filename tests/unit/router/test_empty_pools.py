# Models whose provider has no endpoint now: the replicas of its pool are all away.

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol.chat import Function, Tool
from protocol.embeddings import EmbeddingRequest
from router import RoutingOptions, choose_route
from router.catalog.catalog import Canary, Catalog
from router.catalog.errors import LacksCapability, NoReplica
from router.catalog.targets import Capability
from tests.unit.router.examples import EVERYTHING, catalog, chat, model, names

OWN = model("own", "own", dollars="0.10", capabilities=EVERYTHING)
VENDOR = model("vendor", dollars="5.00", capabilities=EVERYTHING)
ALL = catalog(OWN, VENDOR, small=("own",), large=("vendor",), fallbacks={"own": ("vendor",)})


def without(known: Catalog, *away: str) -> Catalog:
    """Return a catalogue whose models of these names have no endpoint."""
    providers = {known.models[name].provider for name in away}
    return replace(known, endpoints={name: () if name in providers else each for name, each in known.endpoints.items()})


def routed(asked: str, known: Catalog, **more: object) -> tuple[list[str], str]:
    """Return where an easy request goes, and why."""
    options = RoutingOptions(**more)  # type: ignore[arg-type]
    route = choose_route(chat(asked), options, known, {}, lambda _: 0.99)
    return names(route.targets), route.reason


def test_what_else_could_answer_does() -> None:
    """Fallbacks, others of an automatic route, the caller's own list, and the name that a canary is tried on."""
    known = without(ALL, "own")
    tried = replace(known, fallbacks={}, canaries={"vendor": Canary(model="own", share=1.0)})

    assert routed("own", known) == (["vendor@one"], "fallback")
    assert routed("auto", known)[0] == ["vendor@one"]
    assert routed("own", replace(known, fallbacks={}), spares=("vendor",)) == (["vendor@one"], "fallback")
    assert routed("vendor", tried) == (["vendor@one"], "named")


def test_the_same_model_elsewhere_answers() -> None:
    """Whether the providers have portions or none."""
    for portions in ((None, None), (3.0, 1.0), (1.0, 0.0)):
        here, there = model("both", provider="pool"), model("both", provider="vendor")
        both = replace(here, portion=portions[0], others=(replace(there, portion=portions[1]),))
        known = Catalog({"both": both}, {"pool": (), "vendor": ALL.endpoints["us-only"]}, {}, {}, {})

        assert routed("both", known)[0] == ["both@one"], portions


@pytest.mark.parametrize("asked", ["own", "auto"])
def test_where_nothing_can_answer_it_is_a_503(asked: str) -> None:
    """Which a client tries again, unlike a model that there is not."""
    known = without(replace(ALL, fallbacks={}), "own", "vendor")

    with pytest.raises(NoReplica, match=f"No replica of '{asked}' is up now") as refusal:
        routed(asked, known)
    assert (refusal.value.status, refusal.value.code) == (503, "overloaded")
    with pytest.raises(NoReplica):
        choose_route(EmbeddingRequest(model=asked, input=("a",)), RoutingOptions(), known, {}, lambda _: 0.99)


def test_what_an_engine_that_was_not_heard_can_do_is_not_known() -> None:
    """So a call that needs it is tried again, or goes to a fallback; what no engine says of itself is a 400 as ever."""
    plain = model("own", "own", dollars="0.10", capabilities=frozenset({Capability.CHAT}), follows_engine=True)
    known = catalog(plain, VENDOR, fallbacks={"own": ("vendor",)})
    options, alone = RoutingOptions(), replace(known, fallbacks={})
    tool = (Tool(Function(name="add")),)
    with_tools = replace(chat("own"), tools=tool)
    route = choose_route(with_tools, options, known, {}, lambda _: 0.99)

    assert (names(route.targets), route.reason) == (["vendor@one"], "fallback")
    with pytest.raises(NoReplica, match="No replica of 'own' was heard yet"):
        choose_route(with_tools, options, alone, {}, lambda _: 0.99)
    with pytest.raises(LacksCapability, match="lacks logprobs"):
        choose_route(replace(chat("own"), logprobs=True), options, alone, {}, lambda _: 0.99)
    heard = replace(alone, models={**alone.models, "own": replace(plain, follows_engine=False)})
    with pytest.raises(LacksCapability, match="lacks tools"):
        choose_route(with_tools, options, heard, {}, lambda _: 0.99)
