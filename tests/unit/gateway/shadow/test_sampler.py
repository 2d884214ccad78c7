# What is held back of the calls that pass, and that nobody's call hangs on it.

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from statistics import mean, stdev

import msgspec
import pytest
from msgspec.structs import replace

from billing.core.holds import Hold, HoldRequest
from billing.core.money import to_nano
from billing.core.records import Status, UsageRecord
from gateway.calls.call import Call, record_for
from gateway.calls.hooks import NO_HOOK
from gateway.core.background import Background
from gateway.core.principals import Caller, Team
from gateway.core.settings import ProviderSettings
from gateway.shadow.sampler import Sampler, shadow_call
from gateway.shadow.store import ShadowCall
from gateway.storage.database import Database
from gateway.upstreams.registry import ProviderRegistry
from protocol.chat import ChatRequest, Message
from protocol.events import Delta
from protocol.messages import (
    Block,
    CitationsConfig,
    DocumentBlock,
    MessagesRequest,
    MessageTool,
    PlainSource,
    TextBlock,
    Turn,
)
from router import RoutingOptions
from router.catalog.catalog import AutoRoute, Catalog, ShadowTraffic
from router.catalog.targets import Endpoint, Route, Target, Tier
from router.complexity.classifier import Complexity
from tests.support.clock import SetClock
from tests.support.guarding import NOWHERE
from tests.support.house import model

MODELS = {name: model(name) for name in ("small", "large")}
SMALL, LARGE = (Target(MODELS[name], Endpoint("here", "http://upstream")) for name in ("small", "large"))
AUTO = AutoRoute(small=("small",), large=("large",), shadow=ShadowTraffic(share=0.5, budget_nanousd=10**9))
CATALOG = Catalog(MODELS, {}, {"auto": AUTO}, {}, {"any": "auto"})
SEINE = PlainSource("text/plain", "The Seine.")
ASKED = ChatRequest(model="auto", messages=(Message(role="user", content="Which river?"),))


def native(*blocks: Block) -> MessagesRequest:
    return MessagesRequest(model="auto", max_tokens=9, messages=(Turn("user", blocks),))


class Scene:
    """A sampler whose dice the test throws, and no Postgres."""

    def __init__(self) -> None:
        self.clock, self.background, self.database = SetClock(), Background(), Database(NOWHERE)
        self.dice = 0.0
        named = {"owner": ("own",)}
        there = ProviderSettings(name="there", format="openai", endpoints=(SMALL.endpoint,), team_keys=named)
        self.providers = ProviderRegistry({"there": there})
        self.sampler = Sampler(
            CATALOG, self.providers, self.database, self.background, self.clock, "v", lambda: self.dice
        )

    def call(
        self, request: ChatRequest = ASKED, tier: Tier = Tier.INTERACTIVE, native: MessagesRequest | None = None
    ) -> Call:
        return Call(
            request_id=self.clock.new_id(),
            caller=Caller(team=Team(id="a", name="A"), key_id="k"),
            endpoint="chat.completions",
            request=request,
            native=native,
            routing=RoutingOptions(tier=tier),
            created_at=self.clock.now(),
            started=0.0,
        )


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    await scene.background.drain(5)
    await scene.database.close()


NO_HOLD = Hold(request=HoldRequest(request_id="", team_id="a", scopes=(), legs=()))


def record_of(call: Call) -> UsageRecord:
    route = Route("auto", (SMALL,), "auto_small", 0.9)
    return record_for(call, NO_HOLD, route, SMALL, Status.ANSWERED, input_tokens=5, output_tokens=3, cost_nanousd=11)


async def test_only_a_share_of_what_small_models_answer_is_watched(scene: Scene) -> None:
    """By the dice, under any name of the route, and never an answer that cannot be compared."""
    calls = {
        "auto": scene.call(),
        "alias": scene.call(replace(ASKED, model="any")),
        "named": scene.call(replace(ASKED, model="small")),
        "several": scene.call(replace(ASKED, n=2)),
        "scored": scene.call(replace(ASKED, logprobs=True)),
        "batch": scene.call(tier=Tier.BATCH),
        "message": scene.call(native=native(TextBlock("Which river?"))),
        "document": scene.call(native=native(DocumentBlock(SEINE))),
        "to be cited": scene.call(native=native(DocumentBlock(SEINE, citations=CitationsConfig(enabled=True)))),
        "Claude's own tool": scene.call(native=replace(native(), tools=(MessageTool("bash", type="bash_20250124"),))),
    }
    watched = {name for name, call in calls.items() if scene.sampler.watch(call, SMALL) is not NO_HOOK}
    scene.dice = 0.5

    assert watched == {"auto", "alias", "message", "document"}
    assert scene.sampler.watch(calls["auto"], SMALL) is scene.sampler.watch(calls["auto"], LARGE) is NO_HOOK


async def test_no_team_with_keys_of_its_own_pays_for_shadow_traffic(scene: Scene) -> None:
    """Also one whose key tollgate.yaml names, where the deployment's answered: the other kind may be asked with it."""
    call = scene.call()
    teams = Team(id="owner", name="O"), Team(id="b", name="B", provider_keys={"there": (("pvk_1", b"sealed"),)})
    asked = [replace(call, caller=replace(call.caller, team=team)) for team in teams]

    assert [scene.sampler.watch(one, SMALL) for one in asked] == [NO_HOOK] * 2


async def test_what_large_models_answer_is_watched_where_a_route_explores(scene: Scene) -> None:
    """And taken where the score sent it there, not where the large one stood in for a small one or was named."""
    exploring = replace(AUTO, shadow=replace(AUTO.shadow, explore=True))
    scene.sampler.follow(replace(CATALOG, auto={"auto": exploring}), scene.providers)
    taken = []
    for reason in ("auto_large", "auto_small", "named"):
        call = scene.call()
        hook = scene.sampler.watch(call, LARGE)
        assert hook is not NO_HOOK and scene.sampler.watch(call, SMALL) is not NO_HOOK
        hook.delta(Delta(text="The Seine."))
        hook.close(
            record_for(call, NO_HOLD, Route("auto", (LARGE,), reason, 0.3), LARGE, Status.ANSWERED, cost_nanousd=50)
        )
        taken.append(len(scene.background._tasks))

    assert taken == [1, 1, 1]


@pytest.mark.parametrize(
    ("reason", "target", "asked", "quality"), [("auto_small", SMALL, "large", 1), ("auto_large", LARGE, "small", 0)]
)
async def test_the_other_kind_is_asked_with_the_rights_of_the_team(
    scene: Scene, reason: str, target: Target, asked: str, quality: int
) -> None:
    """Through the route itself, for no more than that kind can cost; not at all where the team may not use it."""
    call = scene.call()
    record = record_for(call, NO_HOLD, Route("auto", (target,), reason, 0.3), target, Status.ANSWERED, cost_nanousd=50)

    def noted(allowed: frozenset[str] | None, name: str = "auto") -> ShadowCall | None:
        asker = replace(call, routing=RoutingOptions(allowed_models=allowed), request=replace(ASKED, model=name))
        return shadow_call(asker, "auto", CATALOG, record, "The Seine.", "v")

    found = noted(None)

    assert found is not None and found == noted(frozenset({"small", "large"}))
    body = msgspec.json.decode(found.body)
    assert (body["model"], body["quality"], to_nano(body["max_cost_usd"])) == ("auto", quality, found.reserved_nanousd)
    assert (found.small_model, found.large_model) == (("small", None) if quality else (None, "large"))
    assert (found.small_nanousd, found.large_nanousd) == ((50, 0) if quality else (0, 50))
    assert noted(frozenset({target.model.name})) is None
    assert noted(frozenset({"auto"})) == found
    assert (by_alias := noted(frozenset({"any"}), "any")) is not None and msgspec.json.decode(by_alias.body)[
        "model"
    ] == "any"
    assert (found.is_explored, found.scored_by) == (asked == "small", "v")


async def test_no_call_waits_for_shadow_traffic_or_fails_with_it(scene: Scene) -> None:
    """With Postgres away, and the models of its route gone meanwhile: pieces pass as they are, the end is no later,
    and a sample is lost."""
    call, piece = scene.call(), Delta(text="The Seine.")
    hook = scene.sampler.watch(call, SMALL)
    assert list(hook.delta(piece)) == [piece]
    scene.sampler.follow(Catalog({}, {}, {}, {}, {}), scene.providers)
    hook.close(record_of(call))

    assert len(scene.background._tasks) == 1  # begun, and nobody has waited for it
    [task] = scene.background._tasks
    await scene.background.drain(5)
    assert task.done() and not task.cancelled() and task.exception() is None


async def test_what_is_compared_is_drawn_without_regard_to_the_score(scene: Scene) -> None:
    """Scores are among the calls that are taken as they are among all, so that what is measured holds for all."""
    dice, complexity = random.Random(4), Complexity.load()
    words = [
        "which",
        "prove",
        "12",
        "x",
        "=",
        "capital",
        "of",
        "the",
        "sum",
        "not",
        "except",
        "7/8",
        "law",
        "why\n",
        "def",
    ]
    scores, taken = [], []
    for _ in range(2_000):
        text = " ".join(dice.choices(words, k=dice.randint(3, 40)))
        request = ChatRequest(model="auto", messages=(Message(role="user", content=text),))
        scene.dice = dice.random()
        score = complexity(request)
        scores.append(score)
        if scene.sampler.watch(scene.call(request), SMALL) is not NO_HOOK:
            taken.append(score)

    assert abs(len(taken) - 1_000) < 4 * math.sqrt(2_000 * 0.5 * 0.5)
    assert stdev(scores) > 0.05
    assert abs(mean(taken) - mean(scores)) < 4 * stdev(scores) / math.sqrt(len(taken))
    assert abs(stdev(taken) / stdev(scores) - 1) < 0.15
