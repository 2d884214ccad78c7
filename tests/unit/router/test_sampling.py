# What an automatic route would have done with calls that named a large model.

from __future__ import annotations

from msgspec.structs import replace

from gateway.core.clock import Clock
from protocol.chat import ChatRequest, Message
from protocol.embeddings import EmbeddingRequest
from router.catalog.catalog import AutoRoute, Catalog
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Capability, Endpoint, Route
from router.sampling import ONE_IN, is_sampled, judge_named
from tests.support.house import model

SMALL, LARGE = model("small", context=100), model("large")
CATALOG = Catalog(
    {"small": SMALL, "large": LARGE, "other": model("other")},
    {"upstream": (Endpoint("local", "http://upstream/v1"),)},
    {"auto": AutoRoute(small=("small",), large=("large",))},
    {},
    {"alias": "large"},
)
REQUEST = ChatRequest(model="large", messages=(Message(role="user", content="Hi!"),))


def judged(asked: str, request: ChatRequest = REQUEST, catalog: Catalog = CATALOG) -> float | None:
    """Return the complexity that a named call gets from a model that says 0.9 of everything."""
    route = Route(asked, catalog.targets_of(LARGE), "named")
    return judge_named(route, request, RoutingOptions(), catalog, lambda _: 0.9).complexity


def test_a_call_that_named_a_large_model_is_judged() -> None:
    """By its name or an alias of it; what small models would do for other names is nobody's question."""
    assert judged("large") == judged("alias") == 0.9
    assert judged("small") is None
    assert judged("other") is None


def test_what_no_small_model_can_serve_would_not_have_sufficed() -> None:
    """A prompt too long for the small models, or one with images they cannot see, counts as needing the large."""
    long = replace(REQUEST, messages=(Message(role="user", content="word, " * 500),))
    blind = replace(CATALOG, models=CATALOG.models | {"small": replace(SMALL, capabilities=frozenset[Capability]())})

    assert judged("large", long) == 0.0
    assert judged("large", REQUEST, blind) == 0.0


def test_without_a_small_model_nothing_is_judged() -> None:
    """A route of large models alone has nothing cheaper to offer."""
    only_large = replace(CATALOG, auto={"auto": AutoRoute(small=(), large=("large",))})

    assert judged("large", catalog=only_large) is None


def test_embeddings_and_judged_calls_stay_as_they_are() -> None:
    """Vectors have no complexity, and what the router judged is not judged again."""
    route = Route("large", CATALOG.targets_of(LARGE), "named")
    embedding = EmbeddingRequest(model="large", input="hello")
    known = replace(route, complexity=0.1)

    assert judge_named(route, embedding, RoutingOptions(), CATALOG, lambda _: 0.9) is route
    assert judge_named(known, REQUEST, RoutingOptions(), CATALOG, lambda _: 0.9) is known


def test_one_in_32_calls_is_sampled() -> None:
    """The choice follows from the id alone, and falls on one call in 32."""
    clock = Clock()
    head = clock.new_id()[:-2]

    assert sum(is_sampled(f"{head}{end:02x}") for end in range(256)) == 256 // ONE_IN
    assert is_sampled(head + "20") and not is_sampled(head + "21")
