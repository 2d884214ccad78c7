# Which replica of a pool calls get: conversations are shared between its two versions while it is rolled out, and stay
# at theirs; teams have the parts that are reserved for them.

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gateway.calls.call import Call, Placing
from gateway.core.principals import Caller, Team
from gateway.core.settings import ProviderSettings, QueueSettings
from gateway.inference.limiter import TargetLimiter
from gateway.overload.placement import Placement
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.keys import TargetAway
from protocol.chat import ChatRequest, Message
from protocol.errors import Overloaded
from router.cached_prompts import CachedPrompts
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Endpoint, Route, Target, TargetHealth, TeamKeys
from router.replicas import VersionShare
from tests.support.clock import SetClock
from tests.support.house import model

OLD, NEW = [f"http://old-{number}/v1" for number in range(3)], ["http://new-0/v1"]
CROWD = 300


def call_of(clock: SetClock, said: list[Message], team: str = "a") -> Call:
    return Call(
        request_id=clock.new_id(),
        caller=Caller(team=Team(id=team, name="A"), key_id="k"),
        endpoint="chat.completions",
        request=ChatRequest(model="tiny", messages=tuple(said)),
        routing=RoutingOptions(),
        created_at=clock.now(),
        started=clock.monotonic(),
    )


class Pool:
    """Three replicas of one version, and one of another; no call ends, unless it is released."""

    def __init__(self, queue: QueueSettings = QueueSettings(), placement: Placement | None = None) -> None:  # noqa: B008
        self.clock, self.shares = SetClock(), dict[str, VersionShare]()
        endpoints = tuple(Endpoint("here", url) for url in OLD + NEW)
        own = ProviderSettings(
            name="own", format="openai", self_hosted=True, endpoints=endpoints, reserved={"owner": 0.5}
        )
        targets = tuple(Target(model("tiny", "own"), one) for one in endpoints)
        self.route, registry = Route("tiny", targets, "named"), ProviderRegistry({"own": own})
        self.limiter = TargetLimiter(
            *(registry, targets, cast(Any, None), queue, self.clock, Metrics()),
            placement=placement,
            versions=self.shares,
        )

    def asked(self, number: int, turns: int = 1, *, ends: bool = True, team: str = "a") -> str:
        """Return which replica a conversation's next turn goes to; nothing, where it has to wait."""
        said = [Message(role="user", content=f"Tell me of river {number}.")]
        for turn in range(turns - 1):
            said += [Message(role="assistant", content=f"It is long {turn}."), Message(role="user", content="And?")]
        grant = self.limiter.enter(call_of(self.clock, said, team), self.route, {})
        if grant is None:
            return ""
        if ends:
            self.limiter.release(grant.slot)
        return grant.route.targets[0].endpoint.base_url

    def at_new(self, share: float) -> set[int]:
        """Return which conversations the new version answers that has this share."""
        self.shares["own"] = VersionShare(share, frozenset(NEW))
        return {number for number in range(CROWD) if self.asked(number) in NEW}


def test_a_version_has_its_share_of_conversations() -> None:
    """All turns of each go there, or none; a rising share takes none away, and the others stay at their replicas."""
    pool = Pool()
    before = [pool.asked(number) for number in range(CROWD)]
    none, some, more, all_of_them = (pool.at_new(share) for share in (0.0, 0.1, 0.4, 1.0))
    pool.at_new(0.1)
    later = {number for number in range(CROWD) if pool.asked(number, turns=3) in NEW}
    stays = [number for number in range(CROWD) if number not in some and before[number] in OLD]

    assert (none, all_of_them) == (set(), set(range(CROWD)))
    assert some == later and some < more and 15 <= len(some) <= 45 and 90 <= len(more) <= 150
    assert all(pool.asked(number) == before[number] for number in stays)


def test_a_prompt_is_marked_by_its_team_and_salt() -> None:
    """So none is placed by what another team, or another salt, has cached."""
    pool, long = Pool(placement=Placement({OLD[0]: CachedPrompts()})), [Message(role="user", content="Hi. " * 500)]
    salted = [{"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": ["a"]}]  # the last is the engine's to refuse
    calls = [replace(call_of(pool.clock, long), extra=extra) for extra in salted] + [call_of(pool.clock, long, "b")]
    marks = [pool.limiter.header_for(call, pool.route.targets[0]) for call in calls]

    assert len(set(marks)) == 4 and marks[2] == marks[3]


def test_a_version_that_has_no_slot_left_leaves_its_calls_to_the_other() -> None:
    """Rather than have them wait."""
    pool = Pool()
    mine = sorted(pool.at_new(0.2))[:3]
    new = pool.limiter.engines[NEW[0]]
    pool.limiter.resize(new, 2)
    went = [pool.asked(number, ends=False) for number in mine]

    assert went[:2] == NEW * 2 and went[2] in OLD


async def test_who_finds_no_place_at_engines_that_start_hears_that_they_do() -> None:
    """Not that they are busy: fewer calls would be no help."""
    pool = Pool(QueueSettings(per_team=0))
    for url, room in pool.limiter.engines.items():
        pool.limiter.resize(room, 0, is_full=True)
        room.state = "starting" if url in OLD else ""
    call = call_of(pool.clock, [])
    for many, said in ((4, "is busy or starting, and"), (3, "is starting, and")):
        with pytest.raises(Overloaded, match=said):
            await pool.limiter.wait(call, replace(pool.route, targets=pool.route.targets[:many]), {})


async def test_a_call_that_must_begin_soon_waits_for_engines_that_start() -> None:
    """As others do: for how long is not known, and it has its place once one of them takes calls."""
    pool = Pool()
    for room in pool.limiter.engines.values():
        pool.limiter.resize(room, 0, is_full=True)
    call = replace(call_of(pool.clock, []), placing=Placing(starts_within=5.0))
    waiting = asyncio.create_task(pool.limiter.wait(call, pool.route, {}))
    await asyncio.sleep(0)
    waits = not waiting.done()
    pool.limiter.resize(pool.limiter.engines[OLD[0]], 1)

    assert waits and (await waiting).route.targets[0].endpoint.base_url == OLD[0]


def test_a_team_has_its_part_while_others_wait() -> None:
    """Half of what two replicas run at once, beyond their slots, which others hold; no other has."""
    pool = Pool()
    for url, room in pool.limiter.engines.items():
        pool.limiter.resize(room, 2 if url in OLD[:2] else 0, capacity=2)
    others = [pool.asked(number, ends=False) for number in range(5)]
    owners = [pool.asked(number, ends=False, team="owner") for number in range(3)]

    assert sorted(others) == ["", *OLD[:1] * 2, *OLD[1:2] * 2]
    assert sorted(owners) == ["", *OLD[:2]]


def test_a_team_takes_a_free_slot_of_another_replica_before_one_that_was_borrowed() -> None:
    """Beyond the slots of the one where it belongs it would wait inside that."""
    pool = Pool()
    pool.at_new(1.0)
    new = pool.limiter.engines[NEW[0]]
    pool.limiter.resize(new, 2, capacity=2)
    for _ in range(2):
        pool.asked(1, ends=False)
    free = pool.asked(1, team="owner")
    for url in OLD:
        pool.limiter.resize(pool.limiter.engines[url], 0)

    assert len(new.held) == 2 and free in OLD
    assert pool.asked(1, team="owner") == NEW[0]


class Limited:
    """Breakers of a target at which the deployment's key is at its limit, and no team's own is."""

    def why_away(self, target: Target) -> TargetAway | None:
        return TargetAway(9.0, "limited", is_busy=True, is_limit=True) if target.own is None else None


class Beside:
    """A target that rests for the deployment's key, for which a call waits; teams with their own keys are beside it."""

    def __init__(self, concurrency: int | None) -> None:
        self.clock, place = SetClock(), Endpoint("here", "http://there/v1")
        there = ProviderSettings(name="there", format="openai", endpoints=(place,), concurrency=concurrency)
        self.target = Target(model("tiny", "there"), place)
        self.own = Target(self.target.model, place, TeamKeys("owner"))
        registry, breakers = ProviderRegistry({"there": there}), cast(Any, Limited())
        self.limiter = TargetLimiter(registry, (self.target,), breakers, QueueSettings(), self.clock, Metrics())

    def call(self, team: str = "a") -> Call:
        return call_of(self.clock, [Message(role="user", content="Hi.")], team)

    async def wait(self, target: Target, team: str = "a") -> asyncio.Task[Any]:
        """Have a call wait at a target; the deployment's is told to be away."""
        away = {target.key: TargetHealth(is_open=True)} if target.own is None else {}
        waiting = asyncio.create_task(self.limiter.wait(self.call(team), Route("tiny", (target,), "named"), away))
        await asyncio.sleep(0)
        return waiting


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_who_waits_for_the_deployments_key_keeps_no_team_with_its_own_waiting(concurrency: int | None) -> None:
    """Where that rests, others wait for it; calls with a team's own key go to the same target at once."""
    there = Beside(concurrency)
    waiting = await there.wait(there.target)
    call, route = there.call("owner"), Route("tiny", (there.own,), "named")
    grants = [there.limiter.enter(call, route, {}) for _ in range(3)]
    waits, is_full = not waiting.done(), there.limiter.is_full(there.own)
    waiting.cancel()

    assert waits and [grant is not None for grant in grants] == [True, True, concurrency is None]
    assert is_full is (concurrency is not None)


async def test_a_call_with_its_teams_own_key_has_its_turn_while_the_deployments_rests() -> None:
    """It waits for a slot of the target alone; who waits for the deployment's key goes on waiting."""
    there = Beside(1)
    first = there.limiter.enter(there.call("owner"), Route("tiny", (there.own,), "named"), {})
    others = await there.wait(there.target)
    own = [await there.wait(there.own, "owner") for _ in range(2)]
    assert first is not None
    there.limiter.release(first.slot)
    turn = await own[0]
    waits = [others.done(), own[1].done()]
    there.limiter.release(turn.slot)
    await own[1]

    assert waits == [False, False] and turn.route.targets == (there.own,) and not others.done()
    others.cancel()
