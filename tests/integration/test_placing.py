# A controller with real processes and a real Redis: replicas come, go, die, are adopted and replaced. The processes
# announce themselves as engines do, and answer nothing.

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
from msgspec.structs import replace
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from gateway.core.background import stop_all
from gateway.core.clock import Clock
from gateway.core.settings import EngineSpec, Fleet, Rollout
from gateway.fleet.comparing import Slice
from gateway.fleet.discovery import announced_in
from gateway.fleet.rollouts import Compared, Rolling, compared_key, read_rollouts
from gateway.placing import records
from gateway.placing.controller import DIES_WITHIN, TELL_AGAIN, Controller, _control
from gateway.placing.engine_orders import EngineOrders
from gateway.placing.local import LocalPlacer
from gateway.placing.placer import Order, load_of, may_be_loaded, order_for, revision_of
from gateway.placing.plan import GRACE, PoolState, Proved
from protocol.serving.announcements import ACTIVE, SLEEPING, Announcement, pool_key, signed
from tests.support.clock import SetClock
from tests.support.placing import LOADER, NEW, OLD, SECRET, SLEEPER, WORDS, Scene, pids, settled
from tests.support.waiting import until_found

NAME = "a.0123456789ab.01234567"  # of a replica
LARGE = EngineSpec(model="large", gpus=0, arguments=(*LOADER.arguments, "--served-model-name=large"))


@pytest.fixture
def scene(redis: Redis, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A pool without a replica; none is left behind."""
    scene = Scene(redis, redis_url, tmp_path, lambda: LocalPlacer(tmp_path / "fleet", (sys.executable, *WORDS)))
    yield scene
    placer = scene.placer()
    for name in placer.names():
        placer.kill(name)


async def test_replicas_live_and_die(scene: Scene, redis: Redis) -> None:
    """As many as the target says; one that is killed is replaced; a second controller waits, and of both one acts when
    Redis loses the lease; the next adopts them all once they are gone, and ends them all."""
    await scene.aim(2)
    async with scene.controlled() as first:
        before = await settled(first, 2)
        victim = next(iter(before.values()))
        os.kill(victim, signal.SIGKILL)
        after = await settled(first, 2, but=lambda pid: pid == victim)
        async with scene.controlled() as second:
            await asyncio.sleep(0.3)
            waits, gone, counts = not second.acts, set[int](), list[int]()
            for _ in range(2):
                os.kill(victim := next(iter(after.values())), signal.SIGKILL)
                gone.add(victim)
                await redis.delete(records.LEASE)
                after = await settled_of(first, second, gone, counts)
    await redis.delete(records.LEASE)  # as it ends by itself
    async with scene.controlled() as third:
        adopted = await settled(third, 2)
        await scene.aim(1)
        left = await settled(third, 1)
    await third.end(lambda: False)

    assert waits and first.acts != second.acts and max(counts) <= 2 and victim not in after.values()
    assert adopted == after and set(left) < set(adopted)
    assert not scene.placer().names()
    assert await redis.get(records.LEASE) is None or await redis.pttl(records.LEASE) <= 1


async def settled_of(first: Controller, second: Controller, gone: set[int], counts: list[int]) -> dict[str, int]:
    """Wait until two replicas take calls by what either controller hears, none of those that are gone; ``counts``: how
    many were there meanwhile, whether or not they were heard."""

    async def look() -> dict[str, int] | None:
        counts.extend(len(one._placer.names()) for one in (first, second) if one._placer is not None)
        found = [pids(one) for one in (first, second)]
        is_so = found[0] == found[1] and len(found[0]) == 2 and not gone & {*found[0].values()}
        return found[0] if is_so else None

    return await until_found(look)


async def test_a_replica_that_is_not_needed_sleeps_until_it_is_woken(scene: Scene) -> None:
    """The same process, asked at its announced address with the provider's key."""
    scene.asleep = 1
    await scene.aim(1)
    async with scene.controlled(SLEEPER) as controller:
        before = await settled(controller, 1)
        await scene.aim(0)
        asleep = await until_found(lambda: _asleep(controller))
        there = scene.placer().names()
        await scene.aim(1)
        after = await settled(controller, 1)
    await controller.end(lambda: False)

    assert before == after and [asleep] == list(before) == list(there)
    assert not scene.placer().names()


async def test_a_replica_that_sleeps_takes_the_model_of_another_pool(scene: Scene, redis: Redis) -> None:
    """Its process is a replica of that pool then, for the controller that comes next, too; and goes back in the same
    way. Its own pool has another one started, where it needs one."""
    scene.asleep, scene.beside = 1, LARGE
    await scene.aim(1)
    await scene.aim(0, "beside")
    async with scene.controlled(LOADER) as controller:
        (first,) = await settled(controller, 1)
        await scene.aim(0)
        await until_found(lambda: _asleep(controller))
        await scene.aim(1, "beside")
        moved = await until_found(lambda: _pids(controller, "beside"))
        there, deaths = set(scene.placer().names()), [state.deaths for state in controller._states.values()]
    await redis.delete(records.LEASE)  # as it ends by itself
    async with scene.controlled(LOADER) as other:
        adopted = await until_found(lambda: _pids(other, "beside"))
        await scene.aim(1)
        (second,) = await until_found(lambda: _pids(other, "own"))
        both = set(scene.placer().names())
        deaths += [state.deaths for state in other._states.values()]
        await scene.aim(0, "beside")
        await until_found(lambda: _asleep(other, "beside"))
        await scene.aim(2)
        back = await until_found(lambda: _pids(other, "own", 2))
        kept = set(scene.placer().names())
    await other.end(lambda: False)

    assert there == {first} and adopted == moved and both == {first, second} == kept == set(back)
    assert [name.split(".")[:2] for name in moved] == [["beside", revision_of(LARGE)]]
    assert moved.keys() != {first} and back[first] == next(iter(moved.values()))
    assert deaths == [0, 0, 0, 0]
    assert not scene.placer().names()


@pytest.mark.parametrize("model", ["broken", "hung", "wrong"])
async def test_a_model_that_does_not_come_has_a_process_started(model: str, scene: Scene, redis: Redis) -> None:
    """Whether it cannot be loaded, takes too long, or what comes is another one. A replica that could not load it goes
    on as it was, and is not asked again."""
    scene.asleep, scene.beside, scene.healthy_within = 1, replace(LARGE, model=model), 3.0
    await scene.aim(1)
    await scene.aim(0, "beside")
    async with scene.controlled(LOADER) as controller:
        (first,) = await settled(controller, 1)
        await scene.aim(0)
        await until_found(lambda: _asleep(controller))
        await scene.aim(1, "beside")
        found = await until_found(lambda: _pids(controller, "beside"))
        await asyncio.sleep(0.3)  # it would be asked again meanwhile
        kept = ({first} if model == "broken" else set()) | found.keys()

        async def is_settled() -> bool:
            return set(scene.placer().names()) == kept

        await until_found(is_settled)  # what is stopped takes its time
        deaths = controller._states["beside"].deaths
    await controller.end(lambda: False)

    assert model == "wrong" or not deaths, "no replica has died, and no rollout is to fail by it"
    assert first not in found
    assert not scene.placer().names()


async def test_what_a_process_cannot_become_is_not_asked_of_it() -> None:
    """Its flags, variables and devices are those of its start; nor a model that has more than a folder."""
    more: list[dict[str, Any]] = [{"arguments": (*LARGE.arguments, "--stays", "active")}, {"environment": ("PATH",)}]
    engines = [LOADER, LARGE, *(replace(LARGE, **each) for each in [*more, {"gpus": 1}])]
    (_, own), (told, large), *others = (load_of(order_for(NAME, each, Rollout(), {})) for each in engines)

    arguments = [OLD.arguments, LARGE.arguments, (*LARGE.arguments, "--registry=r"), (*LARGE.arguments, "--token", "t")]
    orders = [order_for(NAME, replace(LARGE, arguments=each), Rollout(), {}) for each in arguments]

    assert own == large and not [other for _, other in others if other == own]
    assert [may_be_loaded(order) for order in orders] == [False, True, False, False]
    assert told == {
        "model": "large",
        "served_model_name": "large",
        "fleet_pool": "a",
        "instance_id": NAME,
        "warm_up": list(LARGE.warm_up),
    }


async def _pids(controller: Controller, pool: str, count: int = 1) -> dict[str, int] | None:
    found = pids(controller, pool)
    return found if len(found) == count else None


async def _asleep(controller: Controller, pool: str = "own") -> str | None:
    heard, members = controller._heard(pool), controller._members[pool]
    return next((name for name, one in heard.items() if members.state_of(one) == SLEEPING), None)


async def test_another_version_is_rolled_out_and_back(scene: Scene, redis: Redis) -> None:
    """By the configuration that is read again; what fails its calls goes, what was there before stays. A controller
    that begins later knows what to go back to."""
    await scene.aim(1)
    async with scene.controlled() as controller:
        await settled(controller, 1)
        controller.follow(scene.settings(NEW))
        new = revision_of(NEW)
        await until_found(lambda: _kept(redis, NEW))
        replaced = await settled(controller, 1)
    await redis.delete(records.LEASE)
    bad = msgspec.structs.replace(NEW, arguments=("--fails",))
    async with scene.controlled(bad) as other:
        await until_found(lambda: _given_up(other))
        stayed = await settled(other, 1)
        said = (await read_rollouts(redis, ["own"]))["own"]
        other.follow(scene.settings(NEW))
        await until_found(lambda: _is_forgotten(redis))
    await other.end(lambda: False)

    assert {name.split(".")[1] for name in replaced} == {new}
    assert stayed == replaced
    assert (said.state, said.revision, said.kept) == ("rolled_back", revision_of(bad), new)
    assert said.reason is not None and said.reason.startswith("it failed ")


async def test_what_gateways_compare_rolls_a_version_back(scene: Scene, redis: Redis) -> None:
    """A version that is announced as well as the one before, and answers worse. What was compared of another rollout of
    it counts for nothing; a controller that takes over goes on where the rollout stood."""
    stands = msgspec.structs.replace(scene.settings(NEW), fleet=_standing(scene.settings(NEW).fleet))
    await scene.aim(1)
    async with scene.controlled() as controller:
        await settled(controller, 1)
        before = await until_found(lambda: _proved(redis))
        controller.follow(stands)
        first = await until_found(lambda: _standing_at(redis, 0.25))
        worse = Compared(revision=first.revision, since=first.since, slices=(Slice(50, 50, 50, 0),) * 2)
    await redis.delete(records.LEASE)  # as it ends by itself
    async with scene.controlled(NEW) as other:
        other.follow(stands)
        second = await until_found(lambda: _standing_at(redis, 0.25, but=first.since))
        await redis.set(compared_key("own"), msgspec.json.encode(worse))
        await asyncio.sleep(0.3)
        stale = (await read_rollouts(redis, ["own"]))["own"]
        renewed = msgspec.structs.replace(worse, since=second.since)
        await redis.set(compared_key("own"), msgspec.json.encode(renewed))
        await until_found(lambda: _given_up(other))
        left = await settled(other, 1)
        told = (await read_rollouts(redis, ["own"]))["own"]
    await other.end(lambda: False)

    assert stale == second
    assert (told.state, told.share, told.kept) == ("rolled_back", 0.0, revision_of(OLD))
    assert told.reason == "it failed 100 of 100 calls, as gateways saw it, beside 0 of 100 of the version before"
    assert {name.split(".")[1] for name in left} == {revision_of(OLD)} and before


async def test_a_target_lies_within_what_the_file_says(scene: Scene) -> None:
    """Whatever stands in Redis."""
    controller = Controller(scene.settings(), scene.placer, scene.redis, Clock())
    pool = controller._pools["own"]
    targets = [controller._observation("own", pool, {}, target).target for target in (10_000, -5, None)]

    assert targets == [4, 0, 0]


async def test_a_record_that_the_secret_did_not_sign_is_no_command(redis: Redis) -> None:
    """It names what a machine is to run."""
    await records.keep_proved(redis, "own", OLD, SECRET)
    known = await records.read_proved(redis, ["own", "other"], [SECRET])
    await records.keep_proved(redis, "own", NEW, "a secret of a stranger 0123")

    assert known == {"own": OLD}
    assert await records.read_proved(redis, ["own"], [SECRET]) == {}


class Recorded:
    """A placer that notes what it is told. ``meanwhile`` happens during the first start."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.started: list[str] = []
        self.killed: list[str] = []
        self._meanwhile = meanwhile

    def start(self, order: Order) -> None:
        """Note it."""
        self.started.append(order.name)
        if len(self.started) == 1:
            self._meanwhile()

    def names(self) -> list[str]:
        """Return what was started."""
        return self.started

    def stop(self, name: str) -> None:
        """Do nothing."""

    def kill(self, name: str) -> None:
        """Note it."""
        self.killed.append(name)


async def test_a_controller_whose_turn_ends_while_it_acts_does_no_more(scene: Scene, redis_url: str) -> None:
    """Its start took longer than the lease lasts: another acts, and would not know of replicas started now."""

    def taken_over() -> None:
        with SyncRedis.from_url(redis_url) as sync:
            sync.set(records.LEASE, "another")

    placer = Recorded(taken_over)
    controller = Controller(scene.settings(), lambda: placer, scene.redis, Clock())
    assert await controller._takes_turn()
    await controller._act_in_all({"own": 3})

    assert (len(placer.started), controller.acts) == (1, False)


async def test_a_controller_that_begins_counts_on_no_dead_replica(
    scene: Scene, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was killed shortly before is still announced. On a busy machine, which lets it look once a second, it ends
    no replica that is there in favour of one that is not."""
    clock, placer, ended = SetClock(), Recorded(), list[str]()
    placer.started = [f"own.{revision_of(OLD)}.{number:08}" for number in (1, 2)]
    monkeypatch.setattr(placer, "stop", ended.append)
    told = partial(Announcement, pool="own", model="tiny", state=ACTIVE, sent_at=clock.now())
    number = 0

    async def looks_seldom(*args: Any) -> Any:
        nonlocal number
        number += 1
        clock.move(1.0)
        for at, name in enumerate([*placer.started[:2], "own.0.dead1", "own.0.dead2"]):
            said = told(instance_id=f"{name}-0", base_url=f"http://127.0.0.1:80{at}/v1", number=number if at < 2 else 1)
            await redis.hset(pool_key("own"), said.instance_id, signed(said, SECRET))
        return await announced_in(*args)

    monkeypatch.setattr("gateway.placing.controller.announced_in", looks_seldom)
    await scene.aim(2)
    controller = Controller(scene.settings(), lambda: placer, redis, clock)
    hearing = asyncio.create_task(controller.hear())
    while number < 4:
        await controller.look_once()
        await asyncio.sleep(0.01)
    await stop_all([hearing])

    assert controller._states["own"].known.keys() == {*placer.started} and len(placer.started) == 2
    assert ended == []


async def test_what_drains_is_no_reason_for_more(scene: Scene) -> None:
    """While nothing in Redis says how many there should be, there are as many as there should have been."""
    placer = Recorded()  # whose replicas never end
    controller = Controller(scene.settings(), lambda: placer, scene.redis, Clock())
    assert await controller._takes_turn()
    for targets in ({"own": 3}, {"own": 2}, {}, {}):
        await controller._act_in_all(targets)

    assert len(placer.started) == 3


async def test_replicas_of_a_pool_that_is_gone_drain_as_they_were_told(scene: Scene) -> None:
    """When the file has the pool no more, its running replies have the time that its engines give them."""
    clock, placer = SetClock(), Recorded()
    controller = Controller(scene.settings(), lambda: placer, scene.redis, clock)
    assert await controller._takes_turn()
    await controller._act_in_all({"own": 1})
    controller.follow(msgspec.structs.replace(scene.settings(), fleet=None))
    await controller._act_in_all({})
    clock.move(5.0 + GRACE - 0.1)
    await controller._act_in_all({})
    within = list(placer.killed)
    clock.move(0.2)
    await controller._act_in_all({})

    assert (within, placer.killed) == ([], placer.started)


async def test_a_controller_says_that_replicas_have_the_secret_of_before(scene: Scene) -> None:
    """A replica has the key that was first when it started, which no other process can put in another's place."""
    before = scene.settings()
    own = before.providers["own"]
    beside, instead = (
        msgspec.structs.replace(before, providers={"own": msgspec.structs.replace(own, api_keys=keys)})
        for keys in ((*own.api_keys, "another"), ("another", *own.api_keys))
    )
    controller = Controller(before, Recorded, scene.redis, SetClock())
    with capture_logs() as logged:
        for settings in (before, beside, instead, instead):
            controller.follow(settings)

    assert [(line["event"], line["pool"]) for line in logged] == [("replicas_have_secret_of_before", "own")]


async def test_a_replica_with_another_of_the_keys_is_asked_with_that(scene: Scene) -> None:
    """While the secret of engines changes, some have the one and some the other."""
    own = msgspec.structs.replace(scene.settings().providers["own"], api_keys=("new", "old"))
    orders, answers = EngineOrders(), [SimpleNamespace(status=status, close=lambda: None) for status in (401, 200)]
    orders._client.send = sent = AsyncMock(side_effect=answers)  # type: ignore[method-assign]
    with capture_logs() as logged:
        await orders._send(own, "http://replica/v1", "/sleep")

    assert [call.args[0].headers["authorization"] for call in sent.await_args_list] == ["Bearer new", "Bearer old"]
    assert logged == []


async def test_what_another_controller_starts_is_not_ended(scene: Scene, redis: Redis) -> None:
    """Where Redis lost the lease during a drain, another may act before the end: its replicas are its own."""
    placer = Recorded()
    placer.started = ["own.0"]
    controller = Controller(scene.settings(), lambda: placer, redis, Clock())
    assert await controller._takes_turn()
    await redis.set(records.LEASE, "another")
    async with asyncio.timeout(5):
        await controller.end(lambda: False)

    assert not controller.acts and await redis.get(records.LEASE) == b"another"


async def test_the_end_waits_for_no_process_that_cannot_be_killed(scene: Scene) -> None:
    """A driver may hold one for ever: the controller says so, and leaves."""
    clock, placer = SetClock(), Recorded()  # whose replicas never end
    placer.started = ["own.0"]
    placer.kill = lambda name: (placer.killed.append(name), clock.move(DIES_WITHIN / 2))  # type: ignore[method-assign]
    controller = Controller(scene.settings(), lambda: placer, scene.redis, clock)
    assert await controller._takes_turn()
    async with asyncio.timeout(30):
        await controller.end(lambda: True)

    assert placer.killed and not controller.acts


async def test_gateways_are_told_of_a_rollout_again(scene: Scene, redis: Redis) -> None:
    """A Redis that lost what it had knows within seconds at which share it stands, and since when."""
    clock = SetClock()
    controller = Controller(scene.settings(NEW), Recorded, redis, clock)
    await records.keep_proved(redis, "own", OLD, SECRET)
    assert await controller._takes_turn()
    told = []
    for seconds in (0.0, TELL_AGAIN, 1.0):
        clock.move(seconds)
        await controller._act_in_all({"own": 1})
        told.append(await read_rollouts(redis, ["own"]))
        await redis.flushall()
        await controller._takes_turn()

    assert told[1] == {} and told[0] == told[2]
    assert (told[0]["own"].state, told[0]["own"].revision) == ("standing", revision_of(NEW))


async def test_what_could_not_be_written_down_is_decided_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision that proved itself while Redis was away would else never be known to the next controller."""
    controller = Controller(scene.settings(), Recorded, scene.redis, Clock())
    assert await controller._takes_turn()
    proved, away = [Proved(revision_of(OLD))], AsyncMock(side_effect=RedisConnectionError)
    with monkeypatch.context() as patched, pytest.raises(RedisConnectionError):
        patched.setattr("gateway.placing.controller.keep_proved", away)
        patched.setattr("gateway.placing.controller.decide", lambda *_: (proved, PoolState(good=revision_of(OLD))))
        await controller._act_in_all({"own": 0})

    assert away.await_count == 1 and controller._states["own"].good is None


async def _kept(redis: Redis, engine: EngineSpec) -> bool:
    return (await records.read_proved(redis, ["own"], [SECRET])).get("own") == engine


async def _proved(redis: Redis) -> bool:
    return await _kept(redis, OLD)


def _standing(fleet: Fleet | None) -> Fleet:
    """Return a fleet whose rollouts stand at a quarter until they are told otherwise."""
    assert fleet is not None
    pool = fleet.pools["own"]
    rollout = msgspec.structs.replace(pool.rollout, share=0.25, stand=3600.0)
    return msgspec.structs.replace(fleet, pools={"own": msgspec.structs.replace(pool, rollout=rollout)})


async def _standing_at(redis: Redis, share: float, but: float = 0.0) -> Rolling | None:
    told = (await read_rollouts(redis, ["own"])).get("own")
    return told if told is not None and told.share == share and told.since != but else None


async def _is_forgotten(redis: Redis) -> bool:
    return not await read_rollouts(redis, ["own"])


async def _given_up(controller: Controller) -> bool:
    state = controller._states.get("own")
    return state is not None and bool(state.given_up)


async def test_a_controller_that_fails_leaves_its_replicas(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in reading heartbeats ends the controller with status 1, and no replica."""
    heard = 0

    async def fails(*args: Any) -> Any:
        nonlocal heard
        heard += 1
        if heard > 4:
            raise RuntimeError("a fault that nothing foresaw")
        return await announced_in(*args)

    await scene.aim(1)
    async with scene.controlled() as controller:
        (name,) = await settled(controller, 1)
    await scene.redis.delete(records.LEASE)
    monkeypatch.setattr("gateway.placing.controller.announced_in", fails)
    status = await _control(scene.settings, scene.settings(), scene.placer, Clock())

    assert status == 1 and heard > 4
    assert name in scene.placer().names()
