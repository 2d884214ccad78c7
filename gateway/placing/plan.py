# What a pool's controller does next: a pure function of the replicas as they are, of how many there should be and of
# what it remembers. Replicas of another revision are replaced one after another, with one more than the target at the
# most: a new one takes calls for the canary time before an old one goes. Once there are enough of them for the share of
# conversations that a rollout begins with, it stands there for a while. Where the new revision proves to be no good,
# the one before comes back.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.settings import Rollout
from gateway.fleet.comparing import why_worse
from gateway.fleet.membership import LOST
from gateway.fleet.rollouts import Compared
from protocol.serving.announcements import ACTIVE, DRAINING, FAILED, SLEEPING

STEADY = 10.0  # seconds of calls taken, after which a replica's death is its first
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds between a death and the next start
TRIES = 3  # replicas of a new revision that may die before it is given up
LOST_FOR = 30.0  # seconds without a heartbeat, after which a process that runs is of no use
GRACE = 10.0  # seconds beyond its drain, after which a replica is killed
HEEDS_WITHIN = 60.0  # seconds, after which a replica that was sent to sleep, or woken, did not hear
MOST_SLEEPS = 2  # times that a replica is sent to sleep without being woken; one that takes calls on all the same ends
MOST_LUCK = 1  # failed calls that say nothing of a revision


class SeenReplica(Struct, frozen=True, kw_only=True):
    """A replica that the placer has."""

    name: str
    revision: str
    state: str | None = None  # by its heartbeat; None: it was never heard
    refused: str | None = None  # why no call goes there, whatever its state
    answered: int = 0  # calls since its start
    failed: int = 0


class Observation(Struct, frozen=True, kw_only=True):
    """One pool at one moment."""

    now: float  # monotonic seconds
    target: int
    wanted: str  # the revision that the configuration asks for
    replicas: Sequence[SeenReplica]
    others: int = 0  # replicas that take calls, and that are not the placer's
    compared: Compared | None = None  # how the calls of two revisions went, as gateways saw it
    asleep: int = 0  # replicas beyond the target that sleep rather than end


class Known(Struct, frozen=True, kw_only=True):
    """What is remembered of a replica. Times are monotonic seconds."""

    revision: str
    since: float
    healthy_since: float | None = None
    unhealthy_since: float | None = None  # None: it takes calls
    stopping_since: float | None = None
    asleep_since: float | None = None  # when it was sent to sleep
    sleeps: int = 0  # times that it was, since it was last woken
    woken_at: float | None = None  # None: it has taken calls since


class Trial(Struct, frozen=True, kw_only=True):
    """A rollout: a revision beside the one that is good, on its way in, or back out. Times are monotonic seconds."""

    revision: str
    since: float
    moved_at: float  # when replicas were replaced last, or calls taken
    replicas: tuple[int, int] = (0, 0)  # that take calls: of it, and others
    share: float = 0.0  # of conversations, which it answers
    standing_since: float | None = None  # None: too few of it take calls yet
    has_stood: bool = False


class PoolState(Struct, frozen=True, kw_only=True):
    """What a pool's decisions leave to the next one."""

    good: str | None = None  # the last revision that proved itself
    trial: Trial | None = None
    given_up: Mapping[str, str] = {}  # revisions that were rolled back, and why
    known: Mapping[str, Known] = {}
    deaths: int = 0  # in a row, each soon after a start
    tries: int = 0  # replicas of a revision on trial that have died
    not_before: float = 0.0  # no replica is started


class Start(Struct, frozen=True, tag=True):
    """Start a replica."""

    revision: str


class Stop(Struct, frozen=True, tag=True):
    """Let a replica drain, and end."""

    name: str
    why: str


class Sleep(Struct, frozen=True, tag=True):
    """Let a replica finish what runs, and give its device's memory back."""

    name: str
    why: str


class WakeUp(Struct, frozen=True, tag=True):
    """Let a replica that sleeps take calls again."""

    name: str


class Kill(Struct, frozen=True, tag=True):
    """End a replica that does not end by itself, or is of no use."""

    name: str
    why: str


class RolledBack(Struct, frozen=True, tag=True):
    """A revision was given up; the one before is what runs from now on."""

    revision: str
    why: str


class Proved(Struct, frozen=True, tag=True):
    """A revision is what runs from now on, and what a later one is rolled back to."""

    revision: str


Action = Start | Stop | Sleep | WakeUp | Kill | RolledBack | Proved


def decide(seen: Observation, state: PoolState, rules: Rollout) -> tuple[list[Action], PoolState]:
    """Return what to do now, in this order, and what to remember."""
    state = _remembered(seen, state)
    useless = {one.name: why for one in seen.replicas if (why := _why_useless(one, state, seen.now, rules))}
    actions: list[Action] = []
    if (why := _why_rolled_back(seen, state, useless, rules)) is not None:
        actions.append(RolledBack(seen.wanted, why))
        state = replace(state, given_up={**state.given_up, seen.wanted: why}, deaths=0, tries=0, not_before=seen.now)
        failing = [one for one in seen.replicas if one.revision == seen.wanted and _fails_calls(one, rules)]
        useless |= {one.name: why for one in failing if state.known[one.name].stopping_since is None}
    state = replace(state, trial=_trial_now(seen, state, rules))
    for one in seen.replicas:
        if one.name in useless:
            is_dead = one.state in (FAILED, LOST)
            actions.append((Kill if is_dead else Stop)(one.name, useless[one.name]))
            state = after_death(state, seen.now, state.known[one.name]) if why is None else state
    ends, state = _resized(seen, state, set(useless), rules)
    actions += ends
    actions += [Kill(name, "it did not end") for name, one in state.known.items() if _is_overdue(one, seen.now, rules)]
    known = dict(state.known)
    for action in actions:
        match action:
            case Stop(name) | Kill(name) if known[name].stopping_since is None:
                known[name] = replace(known[name], stopping_since=seen.now)
            case Sleep(name):
                known[name] = replace(known[name], asleep_since=seen.now, sleeps=known[name].sleeps + 1)
            case WakeUp(name):
                woken = replace(known[name], asleep_since=None, woken_at=seen.now, unhealthy_since=seen.now)
                known[name] = replace(woken, sleeps=0)
    return actions, replace(state, known=known)


def after_death(state: PoolState, now: float, known: Known | None = None) -> PoolState:
    """Return the state after a replica has died, or could not be started at all: the next one waits the longer, the
    more have died one after the other."""
    was_steady = known is not None and known.healthy_since is not None and now - known.healthy_since >= STEADY
    deaths = 1 if was_steady else state.deaths + 1
    on_trial = state.good is not None and known is not None and known.revision != state.good
    delay = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (deaths - 1))
    return replace(state, deaths=deaths, tries=state.tries + on_trial, not_before=now + delay)


def due_at(trial: Trial, rules: Rollout) -> float:
    """Return until when a replica is replaced, or the standing over, if nothing holds a rollout up."""
    stands = 0.0 if trial.has_stood else rules.stand
    return trial.moved_at + rules.healthy_within + rules.canary + stands + rules.drain + 2 * GRACE


def current_revision(wanted: str, state: PoolState) -> str:
    """Return the revision that replicas should be of: the wanted one, unless it was rolled back."""
    return state.good if state.good is not None and wanted in state.given_up else wanted


def _remembered(seen: Observation, state: PoolState) -> PoolState:
    """Note who is there, since when, and who has died."""
    now, before = seen.now, state.known
    known = {one.name: _noted(one, before.get(one.name), now) for one in seen.replicas}
    for name in before.keys() - known.keys():
        if before[name].stopping_since is None:
            state = after_death(state, now, before[name])
    return replace(state, known=known)


def _noted(one: SeenReplica, before: Known | None, now: float) -> Known:
    known = before or Known(revision=one.revision, since=now, unhealthy_since=now)
    if one.state == SLEEPING and known.woken_at is None:  # by hand, or by a controller before this one, too
        since = now if known.asleep_since is None else known.asleep_since
        return replace(known, asleep_since=since, unhealthy_since=now)
    if one.state == ACTIVE and one.refused is None:
        healthy_since = now if known.healthy_since is None else known.healthy_since
        is_deaf = known.asleep_since is not None and now - known.asleep_since > HEEDS_WITHIN
        asleep_since = None if is_deaf else known.asleep_since
        return replace(
            known, healthy_since=healthy_since, unhealthy_since=None, asleep_since=asleep_since, woken_at=None
        )
    return replace(known, unhealthy_since=now if known.unhealthy_since is None else known.unhealthy_since)


def _trial_now(seen: Observation, state: PoolState, rules: Rollout) -> Trial | None:
    """Return what becomes of the rollout: whom it is of, how far it is, which share of conversations it has.

    The share only rises on the way in, and only falls on the way back, so that a conversation moves once.
    """
    current = current_revision(seen.wanted, state)
    if state.good is None or seen.wanted == state.good:
        return None
    trial = state.trial
    if trial is None or trial.revision != seen.wanted:
        trial = Trial(revision=seen.wanted, since=seen.now, moved_at=seen.now)
    known = {one.name: state.known[one.name] for one in seen.replicas}
    taking = [one for one in seen.replicas if known[one.name].unhealthy_since is None]
    taking = [one for one in taking if known[one.name].stopping_since is None and known[one.name].asleep_since is None]
    new = sum(one.revision == seen.wanted for one in taking)
    counts = new, len(taking) - new + seen.others
    if counts != trial.replicas:
        trial = replace(trial, replicas=counts, moved_at=seen.now)
    part = new / sum(counts) if new else 0.0
    if current == state.good:
        return replace(trial, share=min(part, trial.share))
    if new < _enough(seen, rules):
        trial = replace(trial, standing_since=None)
    elif trial.standing_since is None:
        trial = replace(trial, standing_since=seen.now)
    if trial.standing_since is not None and not trial.has_stood and seen.now - trial.standing_since >= rules.stand:
        trial = replace(trial, has_stood=True, moved_at=seen.now)
    return replace(trial, share=max(trial.share, part if trial.has_stood else min(rules.share, part)))


def _enough(seen: Observation, rules: Rollout) -> int:
    """Return how many replicas bear the share that a rollout stands at, of the target and the one besides."""
    return max(1, min(seen.target, math.ceil(rules.share * (seen.target + 1) - 1e-9)))


def _why_useless(one: SeenReplica, state: PoolState, now: float, rules: Rollout) -> str | None:
    """Return why a replica that was not told to end should."""
    known = state.known[one.name]
    if known.stopping_since is not None or known.unhealthy_since is None:
        return None
    passed = now - known.unhealthy_since
    if one.state == FAILED:
        return "it says that it failed"
    if known.woken_at is not None and passed > HEEDS_WITHIN:
        return f"it was woken, and takes no calls after {HEEDS_WITHIN:.0f} s"
    if one.state == DRAINING:
        return "it drains, and takes no calls any more"
    if one.state == LOST and known.healthy_since is not None and passed > LOST_FOR:
        return f"no heartbeat for {LOST_FOR:.0f} s"
    if passed > rules.healthy_within:
        why = one.refused or f"its state is {one.state or 'not told'}"
        return f"it takes no calls after {rules.healthy_within:g} s: {why}"
    return None


def _why_rolled_back(seen: Observation, state: PoolState, useless: Mapping[str, str], rules: Rollout) -> str | None:
    """Return why the wanted revision, on trial now, is no good."""
    if state.good in (None, seen.wanted) or seen.wanted in state.given_up:
        return None
    if state.tries >= TRIES:
        return f"{state.tries} of its replicas died"
    for one in seen.replicas:
        if one.revision != seen.wanted or state.known[one.name].stopping_since is not None:
            continue
        if one.name in useless:
            return useless[one.name]
        if _fails_calls(one, rules):
            return f"it failed {one.failed} of {one.answered + one.failed} calls"
    if seen.compared is None or seen.compared.revision != seen.wanted:
        return None
    return why_worse(seen.compared.slices, rules.max_slowdown, rules.max_error_rate)


def _fails_calls(one: SeenReplica, rules: Rollout) -> bool:
    return one.failed > max(MOST_LUCK, rules.max_error_rate * (one.answered + one.failed))


def _is_overdue(one: Known, now: float, rules: Rollout) -> bool:
    return one.stopping_since is not None and now - one.stopping_since > rules.drain + GRACE


class Present(Struct, frozen=True, kw_only=True):
    """The replicas of a pool that are not on their way out."""

    current: str  # the revision that they should be of
    on_trial: bool  # it has not proved itself yet, and another has
    old: Sequence[SeenReplica]  # of another revision, awake
    new: Sequence[SeenReplica]  # of this one, awake
    unproved: Sequence[SeenReplica]  # the new ones that have not taken calls for the canary time
    ready: Sequence[SeenReplica]  # asleep, to be woken when more are needed
    needless: Sequence[SeenReplica]  # asleep, and no use
    is_held: bool  # the rollout stands at its share of conversations

    @property
    def is_replacing(self) -> bool:
        """Whether old ones stay until a new one has proved itself, or a rollout has stood."""
        return bool(self.old and (self.unproved or self.is_held))


def _present(seen: Observation, state: PoolState, useless: set[str], rules: Rollout) -> Present:
    current = current_revision(seen.wanted, state)
    on_trial = state.good not in (None, current)
    live = [one for one in seen.replicas if state.known[one.name].stopping_since is None and one.name not in useless]
    asleep = [one for one in live if state.known[one.name].asleep_since is not None]
    awake = [one for one in live if one not in asleep]
    ready = [one for one in asleep if one.revision == current][: 0 if on_trial else seen.asleep]
    new = [one for one in awake if one.revision == current]
    trial = state.trial
    return Present(
        current=current,
        on_trial=on_trial,
        old=[one for one in awake if one.revision != current],
        new=new,
        unproved=[one for one in new if not _is_proved(state.known[one.name], seen.now, rules.canary * on_trial)],
        ready=ready,
        needless=[one for one in asleep if one not in ready],
        is_held=on_trial and trial is not None and not trial.has_stood and len(new) >= _enough(seen, rules),
    )


def _resized(seen: Observation, state: PoolState, useless: set[str], rules: Rollout) -> tuple[list[Action], PoolState]:
    """Return what brings the pool closer to its target and its revision."""
    pool = _present(seen, state, useless, rules)
    actions: list[Action] = [Stop(one.name, "it sleeps, and is not needed") for one in pool.needless]
    if pool.new and not pool.old and not pool.unproved and state.good != pool.current:
        return [*actions, Proved(pool.current)], replace(state, good=pool.current, tries=0)
    missing = seen.target - len(pool.old) - len(pool.new) - seen.others
    if missing < 0:
        return actions + _shrunk(pool, -missing, seen, state), state
    woken = pool.ready[:missing]
    actions += [WakeUp(one.name) for one in woken]
    if seen.now >= state.not_before:
        is_ending = any(one.stopping_since is not None for one in state.known.values())
        if missing:
            revision = state.good if pool.on_trial and pool.is_replacing and state.good is not None else pool.current
            actions += [Start(revision) for _ in range(missing - len(woken))]
        elif pool.old and not pool.is_replacing and not is_ending and seen.target:
            actions.append(Start(pool.current))
    return actions, state


def _shrunk(pool: Present, surplus: int, seen: Observation, state: PoolState) -> list[Action]:
    """Return who goes, to sleep where the pool keeps some asleep, or for good."""
    spare = surplus - pool.is_replacing  # the one on trial is there besides
    # Those that take no calls first, then old ones, then those with the least in their caches.
    order = sorted(
        [*pool.old, *pool.new],
        key=lambda one: (*_rank(one, state, pool.current), -state.known[one.name].since),
    )
    leaving = [one for one in order if not (pool.old and one in pool.unproved)][:spare]
    beds = 0 if pool.on_trial or pool.old else seen.asleep - len(pool.ready)
    able = [one for one in leaving if one not in pool.unproved and state.known[one.name].sleeps < MOST_SLEEPS]
    sleepers = able[: max(0, beds)]
    why = "replaced" if pool.old else f"{seen.target} should be there"
    return [(Sleep if one in sleepers else Stop)(one.name, why) for one in leaving]


def _is_proved(known: Known, now: float, canary: float) -> bool:
    return known.unhealthy_since is None and known.healthy_since is not None and now - known.healthy_since >= canary


def _rank(one: SeenReplica, state: PoolState, current: str) -> tuple[bool, bool]:
    return state.known[one.name].unhealthy_since is None, one.revision == current
