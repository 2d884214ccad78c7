# How many replicas a pool should have, and why: one decision from what was observed and what was decided before. Pure.
# The demand is what engines report and what the season lets expect; how many replicas bear it is found by playing their
# queues with the step costs that they measured (queue_model.py). Of several signals the one that asks for most counts.

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.settings import Scaling
from gateway.fleet.queue_model import QueueModel, most_calls
from protocol.serving.engine_load import StepCost

EVERY = 10.0  # seconds between decisions
REMEMBERS = 60.0  # seconds: over so long the rate of calls is smoothed
SURE = 2.0  # standard deviations that a rate must lie above what is known, to count at once
CATCH_UP = 60.0  # seconds within which a queue that is too long is to be worked off
KV_HIGH, KV_LOW = 0.7, 0.2  # shares of the KV cache in use: above, a replica is added; below, one may go
SLACK = 1.1  # by which fewer replicas must bear more than is demanded, before any goes
STUCK = 3.0  # cold starts after which a change that has not come about no longer holds up others
SKEW = 30.0  # seconds by which clocks of gateways may differ; a decision further ahead was by a clock that was wrong
MOST_FORESEEN = 1000  # replies that run in a replica, and that wait there: what a prediction looks at
USUAL_PROMPT, USUAL_REPLY = 1000.0, 250.0  # tokens of a call where none was counted
BY_HAND = "set by hand"


class ReplicaLoad(Struct, frozen=True, kw_only=True):
    """One replica that takes calls, as it reported; nothing but zeros where it was not yet looked at."""

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv: float = 0.0  # share of the KV cache in use
    finished: float = 0.0  # calls a second
    cost: StepCost | None = None


class Observation(Struct, frozen=True, kw_only=True):
    """One pool at one moment."""

    now: float  # unix seconds
    replicas: Sequence[ReplicaLoad]  # those that take calls
    prompt: float = USUAL_PROMPT  # mean tokens of a call that no cache had
    reply: float = USUAL_REPLY
    expected: float = 0.0  # calls a second, until a replica that is started now would be ready
    refused: int = 0  # calls of the last minutes that found no replica


class ScaleState(Struct, frozen=True, kw_only=True):
    """What a pool's decisions leave to the next one."""

    target: int
    reason: str
    decided_at: float  # unix seconds, as all times
    changed_at: float
    before: int = 0  # replicas before the last change
    rate: float = 0.0  # calls a second, smoothed
    inside: int = 0  # calls in the replicas
    busy_at: float = 0.0  # when a call was last there
    needs: tuple[tuple[float, int], ...] = ()  # of the last ``down_after`` seconds: when how many were needed
    predicted_ttft: float | None = None  # seconds, of a call that comes now; None: no engine reports a step cost
    manual: int | None = None  # the target that an admin has set; None: it follows the demand


def decide(seen: Observation, state: ScaleState | None, rules: Scaling) -> ScaleState:
    """Return how many replicas the pool should have from now on, with the reason, and what the next decision needs.

    The target lies within ``min`` and ``max``. It changes only once the change before has come about, or is taken to
    be stuck; it falls only to what was enough for all of ``down_after``. One that an admin has set stays.
    """
    have, now = len(seen.replicas), seen.now
    if state is None:
        first = min(max(have, rules.min), rules.max)
        busy_at = now if have else 0.0  # a pool that is found empty may stay so
        state = ScaleState(target=first, reason="as found", decided_at=now, changed_at=now, busy_at=busy_at)
    if state.decided_at - now > SKEW:
        state = _by_clock_of(now, state)
    now = max(now, state.decided_at)  # clocks of gateways differ a little
    state = _with_rate(seen, state, now)
    ttft = _predicted_ttft(seen)
    needed, why = _needed(seen, state, rules, ttft, 1.0)
    spare, _ = _needed(seen, state, rules, ttft, SLACK)
    needs = (*(each for each in state.needs if now - each[0] < rules.down_after), (now, spare))
    state = replace(state, decided_at=now, needs=needs, predicted_ttft=ttft)
    asked = state.target if state.manual is None else state.manual
    target = min(max(asked, rules.min), rules.max)  # as the rules are now
    if target != state.target:
        return _changed(state, target, now, "min and max")
    if state.manual is not None:
        return replace(state, reason=BY_HAND)
    if state.target != have and now - state.changed_at < STUCK * rules.cold_start:
        return replace(state, reason=f"change from {state.before} to {target} in flight")
    if needed > target:
        return _changed(state, needed, now, why)
    known = now - needs[0][0] >= rules.down_after - 2 * EVERY
    lowest = max(each for _, each in needs)
    if lowest < target and known and now - state.changed_at >= rules.down_after:
        return _changed(state, lowest, now, f"{lowest} were enough for {rules.down_after:.0f} s")
    return replace(state, reason=why if needed == target else "enough, not for long enough to go down")


def set_by_hand(state: ScaleState | None, target: int | None, now: float) -> ScaleState:
    """Return the state with this target from now on, whatever the demand; ``None``: it follows the demand again."""
    if state is None:
        state = ScaleState(target=target or 0, reason=BY_HAND, decided_at=now, changed_at=now, busy_at=now)
    if target is None:
        return replace(state, manual=None, reason="no longer set by hand")
    return replace(_changed(state, target, now, BY_HAND), manual=target)


def _changed(state: ScaleState, target: int, now: float, why: str) -> ScaleState:
    return replace(state, target=target, before=state.target, changed_at=now, reason=why)


def _by_clock_of(now: float, state: ScaleState) -> ScaleState:
    """Return a state whose times lie ahead of ``now`` as if it came about now."""
    return replace(
        state,
        decided_at=now,
        changed_at=min(state.changed_at, now),
        busy_at=min(state.busy_at, now),
        needs=tuple(each for each in state.needs if each[0] <= now),
    )


def _with_rate(seen: Observation, state: ScaleState, now: float) -> ScaleState:
    """Count what came: calls that finished, and by how much more are inside."""
    inside = sum(each.running + each.waiting for each in seen.replicas)
    passed = now - state.decided_at
    if passed <= 0:
        return replace(state, inside=inside)
    came = max(0.0, sum(each.finished for each in seen.replicas) + (inside - state.inside) / passed)
    came += seen.refused / (2 * REMEMBERS)
    part = 1 - math.exp(-passed / REMEMBERS)
    rate = state.rate + part * (came - state.rate)
    rate = max(rate, came - SURE * math.sqrt(came / passed))
    return replace(state, rate=rate, inside=inside, busy_at=now if came or inside else state.busy_at)


def _needed(seen: Observation, state: ScaleState, rules: Scaling, ttft: float | None, slack: float) -> tuple[int, str]:
    """Return how many replicas the signals ask for, within the rules, and which of them asks for most."""
    have, least = len(seen.replicas), rules.min
    waiting = sum(each.waiting for each in seen.replicas)
    asks = [(rules.min, "min")]
    is_cold = (
        seen.now - state.busy_at >= max(rules.down_after, rules.cold_start)
        and seen.expected * rules.cold_start < 1  # a start would take longer than the calls are apart
        and not seen.refused
    )
    if is_cold:
        return rules.min, "no call now, nor soon"
    if not rules.min:
        least = 1
        asks.append((1, "calls found no replica" if seen.refused else "in use, or soon to be"))
    if have:
        kv = sum(each.kv for each in seen.replicas)
        slots = sum(each.running / each.max_running for each in seen.replicas if each.max_running)
        asks.append((_at_least(slack * kv / KV_HIGH), f"KV in use {kv / have:.0%}"))
        asks.append((_at_least(slack * slots / 0.9), f"slots in use {slots / have:.0%}"))
    cost = next((each.cost for each in seen.replicas if each.cost is not None), None)
    if cost is not None:
        late = ttft is not None and ttft > rules.ttft
        calls = (state.rate + (waiting / CATCH_UP if late else 0.0)) * (1 + rules.headroom)
        words = f"{state.rate:.2f} calls/s" + (f", {waiting} waiting" if late else "")
        asks.append((_bearing(seen, rules, cost, slack * calls), words))
        asks.append((_bearing(seen, rules, cost, slack * seen.expected), f"season: {seen.expected:.2f} calls/s"))
    elif have and any(each.waiting > max(2, each.max_running // 8) for each in seen.replicas):
        asks.append((have + 1, f"{waiting} wait, and no engine says what its steps cost"))
    elif (have and sum(each.kv for each in seen.replicas) / have > KV_LOW) or waiting:
        asks.append((have, "KV in use, and no engine says what its steps cost"))
    else:
        asks.append((have - 1, "KV nearly empty"))
    needed, why = max(asks, key=lambda each: each[0])
    return min(max(needed, least), rules.max), why


def _bearing(seen: Observation, rules: Scaling, cost: StepCost, calls: float) -> int:
    """Return how few replicas bear so many calls a second, TTFT p90 kept; at most one more than the rules allow."""
    slots = max((each.max_running for each in seen.replicas), default=0) or 256
    low, high = 0, rules.max + 1
    while low < high:
        middle = (low + high) // 2
        if calls <= most_calls(cost, slots, seen.prompt, seen.reply, rules.ttft, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _predicted_ttft(seen: Observation) -> float | None:
    """Return the seconds until the first token of a call that comes now, at the replica where most waits."""
    found = []
    for each in seen.replicas:
        if each.cost is not None:
            model = QueueModel(each.cost, each.max_running or 256)
            model.begin(min(each.running, MOST_FORESEEN), seen.prompt, seen.reply)
            for _ in range(min(each.waiting, MOST_FORESEEN)):
                model.add(0.0, seen.prompt, seen.reply)
            found.append(model.first_token_of_next(seen.prompt, seen.reply))
    return max(found, default=None)


def _at_least(replicas: float) -> int:
    return math.ceil(replicas - 1e-9)
