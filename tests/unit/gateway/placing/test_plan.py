# What a controller does next, played against replicas that take time to start and to end.

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.core.settings import Rollout
from gateway.fleet.comparing import Slice
from gateway.fleet.membership import LOST
from gateway.fleet.rollouts import Compared
from gateway.placing.plan import (
    FIRST_DELAY,
    GRACE,
    HEEDS_WITHIN,
    LOST_FOR,
    TRIES,
    Action,
    Kill,
    Observation,
    PoolState,
    Proved,
    RolledBack,
    SeenReplica,
    Sleep,
    Start,
    Stop,
    WakeUp,
    decide,
    due_at,
)
from protocol.serving.announcements import ACTIVE, DRAINING, FAILED, SLEEPING, STARTING

OLD, NEW, NEWER = "old", "new", "newer"
RULES = Rollout(healthy_within=60.0, canary=10.0, stand=0.0, max_error_rate=0.1, drain=20.0)
STARTS_IN, ENDS_IN = 5.0, 3.0


@dataclass
class World:
    """One pool whose replicas are played. ``broken``: revisions that never take calls; ``failing``: that fail them."""

    target: int = 2
    wanted: str = OLD
    others: int = 0
    asleep: int = 0
    broken: dict[str, str] = field(default_factory=dict)  # revision → the state in which it stays, "dies" for none
    failing: set[str] = field(default_factory=set)
    compared: Compared | None = None
    rules: Rollout = RULES
    state: PoolState = field(default_factory=PoolState)
    now: float = 1000.0
    replicas: dict[str, SeenReplica] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    done: list[Action] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of conversations that the new revision answered, by moments
    fewest: int = 1000  # replicas that took calls at any time since ``watch``,
    most: int = 0  # and processes

    def run(self, seconds: float) -> World:
        """Let time pass."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self._live()
            seen = Observation(
                now=self.now,
                target=self.target,
                wanted=self.wanted,
                replicas=tuple(self.replicas.values()),
                others=self.others,
                compared=self.compared,
                asleep=self.asleep,
            )
            actions, self.state = decide(seen, self.state, self.rules)
            self.shares += [] if self.state.trial is None else [self.state.trial.share]
            for action in actions:
                self._do(action)
            self.done += actions
            self.fewest = min(self.fewest, self.active())
            self.most = max(self.most, len(self.replicas))
        return self

    def watch(self) -> World:
        """Forget what was, and count from now on."""
        self.done, self.shares, self.fewest, self.most = [], [], 1000, 0
        return self

    def active(self, revision: str | None = None) -> int:
        """Return how many replicas take calls."""
        return sum(one.state == ACTIVE and revision in (None, one.revision) for one in self.replicas.values())

    def die(self, name: str) -> None:
        """Let a process end by itself."""
        del self.replicas[name]

    def put(self, name: str, state: str) -> None:
        """Let a replica be in a state, and stay there."""
        self.replicas[name] = replace(self.replicas[name], state=state)

    def of(self, kind: type) -> list[Action]:
        """Return what was done of a kind."""
        return [action for action in self.done if isinstance(action, kind)]

    def _live(self) -> None:
        for name, one in list(self.replicas.items()):
            if self.now >= self.ends.get(name, self.now + 1):
                del self.replicas[name]
                continue
            was_broken = self.broken.get(one.revision)
            if self.now - self.began[name] >= STARTS_IN and one.state == STARTING:
                if was_broken == "dies":
                    del self.replicas[name]
                    continue
                one = replace(one, state=was_broken or ACTIVE)
            if one.state == ACTIVE:
                fails = one.revision in self.failing
                one = replace(one, answered=one.answered + (not fails), failed=one.failed + fails)
            self.replicas[name] = one

    def _do(self, action: Action) -> None:
        match action:
            case Start(revision):
                name = f"{revision}-{len(self.began)}"
                self.began[name] = self.now
                self.replicas[name] = SeenReplica(name=name, revision=revision, state=STARTING)
            case Stop(name):
                self.replicas[name] = replace(self.replicas[name], state=DRAINING)
                self.ends.setdefault(name, self.now + ENDS_IN)
            case Sleep(name):
                self.put(name, SLEEPING)
            case WakeUp(name):
                self.put(name, ACTIVE)
            case Kill(name):
                self.ends[name] = self.now


def settled(**more: Any) -> World:
    """Return a pool whose two replicas have proved themselves."""
    world = World(**more).run(60.0)
    assert (world.active(OLD), world.state.good, world.of(Proved)) == (world.target, OLD, [Proved(OLD)])
    return world.watch()


def test_a_pool_comes_to_its_target_and_stays() -> None:
    """Up and down, at once and in order; replicas elsewhere count; those that take no calls yet go first."""
    world = settled()
    world.target = 4
    world.run(20.0)
    grown = world.active()
    world.watch().others = 1
    world.run(20.0)
    world.target = 0
    world.others = 0
    world.watch().run(20.0)
    starts = len(world.began)
    world.target = 2
    world.run(2.0)
    world.target = 1
    world.run(1.0)
    early = [name for name, one in world.replicas.items() if one.state == DRAINING]
    world.run(20.0)

    assert (grown, starts) == (4, 4)
    assert len(early) == 1 and world.active() == len(world.replicas) == 1
    assert not world.of(Kill) and not world.run(600.0).watch().run(60.0).done


def test_replicas_that_are_not_needed_sleep_and_are_woken_first() -> None:
    """As many as the file says; the others end. One that is woken takes calls before another could be started."""
    world = settled(target=4, asleep=2)
    world.target = 1
    world.run(20.0)
    states = sorted(str(one.state) for one in world.replicas.values())
    rested = list(world.watch().run(300.0).done)
    world.target = 4
    world.run(1.0)
    woken, started = world.of(WakeUp), world.of(Start)
    soon = world.active()
    world.run(20.0)

    assert states == [ACTIVE, SLEEPING, SLEEPING] and rested == []
    assert (len(woken), len(started), soon, world.active()) == (2, 1, 3, 4)


def test_replicas_that_sleep_are_of_the_version_that_runs() -> None:
    """They end when another is rolled out, and with what is asked of the file. A controller that begins later knows
    that they sleep; one that is lost asleep is replaced by none."""
    world = settled(target=2, asleep=1)
    world.target = 1
    world.run(20.0)
    world.state = PoolState(good=OLD)
    world.watch().run(60.0)
    known = list(world.done)
    world.wanted = NEW
    world.run(100.0)
    replaced = [one.revision for one in world.replicas.values()]
    world.target = 0
    world.run(20.0)
    world.put(next(iter(world.replicas)), LOST)
    world.run(LOST_FOR + 20.0)

    assert known == [] and replaced == [NEW]
    assert len(world.of(Sleep)) == 1 and len(world.of(Kill)) == 1 and not world.replicas


def test_a_replica_that_does_not_heed_is_not_counted_on() -> None:
    """One that was sent to sleep and takes calls on is one of those that are there; one that does not wake is ended."""
    world = settled(target=2, asleep=1)
    world.target = 1
    world.run(0.5)
    (slept,) = world.of(Sleep)
    assert isinstance(slept, Sleep)
    world.put(slept.name, ACTIVE)
    world.run(HEEDS_WITHIN + 1.0)
    again = len(world.of(Sleep))
    world.watch().target = 2
    world.run(0.5)
    world.put(slept.name, SLEEPING)
    world.run(HEEDS_WITHIN + 20.0)

    assert again == 2
    assert [type(each) for each in world.done] == [WakeUp, Stop, Start] and world.active() == 2


def test_a_replica_that_cannot_sleep_ends() -> None:
    """Its machine lacks the memory for its weights, say: it would take calls that are not there, and be paid for."""
    world = settled(target=2, asleep=1)
    world.target = 1
    for _ in range(2 * int(HEEDS_WITHIN) + 20):
        world.run(1.0)
        for name in [name for name, one in world.replicas.items() if one.state == SLEEPING]:
            world.put(name, ACTIVE)

    assert [type(each) for each in world.done] == [Sleep, Sleep, Stop]
    assert len(world.replicas) == world.active() == 1


def test_a_replica_that_dies_is_started_again() -> None:
    """At once after long life, later each time it dies young."""
    world = settled()
    world.die(next(iter(world.replicas)))
    world.run(FIRST_DELAY + STARTS_IN + 2.0)
    healed = world.active()
    world.broken[OLD] = "dies"
    world.die(next(iter(world.replicas)))
    world.watch().run(300.0)

    assert healed == 2
    assert 4 <= len(world.of(Start)) <= 9
    assert world.fewest == 1


@pytest.mark.parametrize(
    ("state", "within", "why"),
    [
        (LOST, LOST_FOR, "no heartbeat for 30 s"),
        (FAILED, 0.0, "it says that it failed"),
        (DRAINING, 0.0, "it drains, and takes no calls any more"),
        (STARTING, RULES.healthy_within, "it takes no calls after 60 s: its state is starting"),
    ],
)
def test_a_replica_of_no_use_is_replaced(state: str, within: float, why: str) -> None:
    """One that hangs, that failed, that was drained by hand, or that never gets ready again."""
    world = settled()
    name = next(iter(world.replicas))
    world.began[name] = world.now + 10_000  # it stays in its state
    world.put(name, state)
    world.run(within + 1.0)
    ended = [action for action in world.done if isinstance(action, Stop | Kill)]
    world.run(20.0)

    assert ended == [(Kill if state in (LOST, FAILED) else Stop)(name, why)]
    assert (world.active(), len(world.replicas)) == (2, 2)


def test_a_replica_that_does_not_end_is_killed() -> None:
    """After its drain, and a little."""
    world = settled()
    world.target = 1
    world.run(0.5)
    (stop,) = world.of(Stop)
    assert isinstance(stop, Stop)
    world.ends[stop.name] = world.now + 10_000
    world.run(RULES.drain + GRACE + 1.0)

    assert world.of(Kill)[0] == Kill(stop.name, "it did not end")
    assert list(world.replicas) != [stop.name] and len(world.replicas) == 1


@pytest.mark.parametrize("target", [1, 2, 5])
def test_another_revision_replaces_one_after_the_other(target: int) -> None:
    """With one more at the most, never fewer than the target, each old one only after the canary time of a new one."""
    world = settled(target=target)
    world.wanted = NEW
    first = world.run(STARTS_IN + RULES.canary - 1.0).active(OLD)
    world.run(100.0 * target)

    assert first == target
    assert (world.active(NEW), len(world.replicas), world.state.good) == (target, target, NEW)
    assert (world.fewest, world.most) == (target, target + 1)
    assert world.of(Proved) == [Proved(NEW)] and not world.of(RolledBack) and not world.of(Kill)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", f"{TRIES} of its replicas died"),
        (FAILED, "it says that it failed"),
        (STARTING, "it takes no calls after 60 s: its state is starting"),
        ("calls", "it failed 2 of 2 calls"),
    ],
)
def test_a_revision_that_is_no_good_is_rolled_back(how: str, words: str) -> None:
    """No old replica has gone meanwhile; it is not tried again, until the configuration is read again."""
    world = settled()
    world.wanted = NEW
    if how == "calls":
        world.failing.add(NEW)
    else:
        world.broken[NEW] = how
    world.run(200.0)
    rolled_back = world.of(RolledBack)
    later = list(world.watch().run(300.0).done)
    world.state = replace(world.state, given_up={}, tries=0)
    world.broken, world.failing = {}, set()
    world.run(200.0)

    assert rolled_back == [RolledBack(NEW, words)]
    assert later == [] and world.fewest == 2
    assert world.active(NEW) == len(world.replicas) == 2


@pytest.mark.parametrize(("target", "share", "bear"), [(2, 0.1, 1), (10, 0.25, 3), (3, 0.5, 2)])
def test_a_rollout_stands_at_its_share(target: int, share: float, bear: int) -> None:
    """With as many replicas as bear it, for its time; then the rest is replaced, and the share rises with them."""
    world = settled(target=target, rules=replace(RULES, share=share, stand=300.0))
    world.wanted = NEW
    while world.active(NEW) < bear:
        world.run(0.5)
    world.watch().run(299.0)
    standing = world.active(NEW), world.active(OLD), set(world.shares)
    world.watch().run(100.0 * target)

    assert standing == (bear, target + 1 - bear, {share})
    assert world.shares == sorted(world.shares) and world.shares[-1] == 1.0
    assert (world.active(NEW), len(world.replicas), world.state.good) == (target, target, NEW)
    assert (world.fewest, world.most) == (target, target + 1) and world.state.trial is None


def test_a_death_while_a_rollout_stands_is_no_step_of_it() -> None:
    """An old replica is followed by an old one; where the new one dies, the time begins with the next."""
    world = settled(target=3, rules=replace(RULES, stand=300.0))
    world.wanted = NEW
    world.run(200.0)
    for name in [name for name, one in world.replicas.items() if one.revision == OLD][:2]:
        world.die(name)
    world.run(50.0)
    after_old = world.active(OLD), world.active(NEW)
    world.die(next(name for name, one in world.replicas.items() if one.revision == NEW))
    world.run(200.0)

    assert after_old == (world.active(OLD), world.active(NEW)) == (2, 1)
    assert world.run(600.0).active(NEW) == 3 and not world.of(RolledBack)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_revision_that_gateways_find_worse_is_rolled_back(replaced: bool) -> None:
    """At once where it stands; where it has replaced others these come back first, and the share falls with it."""
    world = settled(target=4, rules=replace(RULES, stand=20.0))
    world.wanted = NEW
    slices = (Slice(50, 20, 500, 0), Slice(50, 20, 500, 0))
    world.compared = Compared(revision=OLD, since=0.0, slices=slices)
    world.run(70.0 if replaced else 20.0)
    assert (world.active(NEW) > 1) == replaced and not world.of(RolledBack)
    world.compared = replace(world.compared, revision=NEW)
    world.watch().run(2.0)
    early = world.active(), world.of(Stop)
    world.run(200.0)

    why = "it failed 40 of 100 calls, as gateways saw it, beside 0 of 1000 of the version before"
    assert world.of(RolledBack) == [RolledBack(NEW, why)]
    assert early[0] >= 4 and len(early[1]) == 1
    assert (world.active(OLD), len(world.replicas), world.fewest) == (4, 4, 4)
    assert world.shares == sorted(world.shares, reverse=True) and world.shares[-1] == 0.0


def test_a_rollout_in_which_nothing_moves_is_overdue() -> None:
    """After longer than standing and a replacement take; not one that goes on, however slow."""
    world = settled(target=3, rules=replace(RULES, stand=300.0))
    world.wanted = NEW
    overdue = []
    while world.state.good == OLD:
        world.run(5.0)
        if (trial := world.state.trial) is not None:
            overdue.append(world.now > due_at(trial, world.rules))
    world.wanted = NEWER
    world.run(30.0)
    trial = world.state.trial

    assert trial is not None
    assert not any(overdue)
    assert due_at(trial, world.rules) - trial.moved_at == 300.0 + 60.0 + 10.0 + 20.0 + 2 * GRACE


def test_what_was_replaced_comes_back() -> None:
    """A revision that fails calls once it has replaced some of the old ones is replaced in its turn."""
    world = settled(target=4)
    world.wanted = NEW
    world.run(3 * (STARTS_IN + RULES.canary))
    assert world.active(OLD) and world.active(NEW) >= 2
    world.failing.add(NEW)
    world.watch().run(200.0)

    assert len(world.of(RolledBack)) == 1
    assert (world.active(OLD), len(world.replicas)) == (4, 4)
    assert world.state.good == OLD


def test_a_third_revision_takes_over_from_a_rollout_under_way() -> None:
    """Replicas of the two before are both old."""
    world = settled(target=3)
    world.wanted = NEW
    world.run(STARTS_IN + RULES.canary + 5.0)
    world.wanted = NEWER
    world.run(300.0)

    assert (world.active(NEWER), len(world.replicas), world.state.good) == (3, 3, NEWER)
    assert (world.fewest, world.most) == (3, 4)


@pytest.mark.parametrize("target", [0, 1, 4])
def test_the_target_may_change_during_a_rollout(target: int) -> None:
    """Both come about."""
    world = settled()
    world.wanted = NEW
    world.run(STARTS_IN + 1.0)
    world.target = target
    world.run(400.0)

    assert world.active(NEW) == len(world.replicas) == target
    assert world.fewest >= min(2, target)


def test_the_first_revision_is_tried_for_ever() -> None:
    """There is nothing to roll back to."""
    world = World(broken={OLD: "dies"}).run(600.0)
    tries = len(world.began)
    world.broken.clear()
    world.run(200.0)

    assert not world.of(RolledBack) and tries >= 8
    assert (world.active(), world.state.good) == (2, OLD)


def test_a_controller_that_begins_in_the_middle_goes_on() -> None:
    """It knows what proved itself; the replicas that it finds are what they were."""
    world = settled(target=3)
    world.wanted = NEW
    for _ in range(20):
        world.run(17.0)
        world.state = PoolState(good=world.state.good)

    assert (world.active(NEW), len(world.replicas)) == (3, 3)
    assert (world.fewest, world.most) == (3, 4)


def names(found: Iterable[Action]) -> list[str]:
    """Return the replicas that are stopped."""
    return [action.name for action in found if isinstance(action, Stop)]


def test_the_youngest_goes_first() -> None:
    """Its prefix cache has the least."""
    world = settled(target=2)
    world.target = 3
    world.run(60.0)
    youngest = max(world.began, key=lambda name: world.began[name])
    world.target = 2
    world.watch().run(0.5)

    assert names(world.done) == [youngest]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_a_pool_comes_to_rest(seed: int) -> None:
    """Deaths, silence, other targets and revisions, a new controller: once it is quiet, all is as it should be."""
    dice, world = random.Random(seed), settled(target=3)
    for _ in range(40):
        names = list(world.replicas)
        match dice.randrange(7):
            case 0:
                world.target = dice.randrange(6)
            case 1:
                world.wanted = dice.choice((OLD, NEW, NEWER))
                world.state = replace(world.state, given_up={}, tries=0)
            case 2 if names:
                world.die(dice.choice(names))
            case 3 if names:
                world.put(dice.choice(names), dice.choice((LOST, FAILED, DRAINING)))
            case 4:
                world.state = PoolState(good=world.state.good)
            case 5:
                world.broken = dice.choice(({}, {NEWER: "dies"}, {NEWER: FAILED}))
        world.watch().run(dice.choice((1.0, 7.0, 40.0)))
        told = [action.name for action in world.done if isinstance(action, Stop | Kill)]
        assert set(told) <= world.began.keys()
    world.broken = {}
    world.state = replace(world.state, given_up={}, tries=0)
    world.run(500.0).watch().run(100.0)

    assert world.done == []
    assert (world.active(world.wanted), len(world.replicas)) == (world.target, world.target)
    assert not world.target or world.state.good == world.wanted
