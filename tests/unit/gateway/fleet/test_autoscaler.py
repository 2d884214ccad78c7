# The decision of how many replicas a pool has: its bounds, its patience, and what each signal asks for.

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from gateway.core.settings import Scaling
from gateway.fleet.autoscaler import EVERY, STUCK, Observation, ReplicaLoad, ScaleState, decide, set_by_hand
from gateway.fleet.queue_model import LATEST, QueueModel, most_calls
from gateway.fleet.season import HOUR, WEEK, expected_rate
from gpu_backend.step.cost import StepCost as EngineCost
from gpu_backend.step.cost import StepWork
from protocol.serving.engine_load import StepCost

COST = StepCost(fixed=0.0018, weights=0.0189, token=0.000109, context=3.8e-8)
RULES = Scaling(min=1, max=6, cold_start=60.0, down_after=100.0)


class Pool:
    """A pool whose orchestrator does what it is told, a cold start late."""

    def __init__(self, rules: Scaling, ready: int = 1, cost: StepCost | None = COST) -> None:
        self.rules, self.ready, self.cost = rules, ready, cost
        self.now, self.due = 0.0, 0.0
        self.state: ScaleState | None = None
        self.targets: list[int] = []

    def look(self, rate: float, **more: float) -> ScaleState:
        """Let ten seconds pass at so many calls a second, and decide."""
        self.now += EVERY
        if self.state is not None and self.state.target != self.ready and self.now >= self.due:
            self.ready = self.state.target
        each = rate / max(self.ready, 1)
        told = {"running": int(6 * each), "max_running": 256, "finished": each, "cost": self.cost}
        loads = [ReplicaLoad(**told | {k: v for k, v in more.items() if k in ("waiting", "kv")})] * self.ready
        rest = {k: v for k, v in more.items() if k in ("expected", "refused")}
        before = self.state
        self.state = decide(
            Observation(now=self.now, replicas=loads, prompt=1100.0, reply=200.0, **rest), before, self.rules
        )
        if before is None or self.state.target != before.target:
            self.due = self.now + self.rules.cold_start
        self.targets.append(self.state.target)
        return self.state


@pytest.mark.parametrize("seed", range(4))
def test_targets_keep_bounds_and_wait_for_each_other(seed: int) -> None:
    """Whatever is observed: never outside of min and max, and never another change before the last has come about."""
    dice = random.Random(seed)
    rules = replace(RULES, min=dice.randint(0, 2), max=dice.randint(5, 8))
    state: ScaleState | None = None
    ready, rate, now, changed, changes = dice.randint(0, 4), 3.0, 0.0, -1e9, 0
    for _ in range(150):
        now += EVERY
        rate = dice.choice((rate, rate * 1.4, rate * 1.4, 2.0)) if rate < 50 else 2.0
        each = ReplicaLoad(
            running=dice.randint(0, 9),
            waiting=dice.choice((0, 0, 0, 60)),
            max_running=256,
            kv=dice.choice((0.1, 0.5, 0.5, 0.75)),
            finished=rate / max(ready, 1),
            cost=dice.choice((None, COST, COST, COST)),
        )
        tokens = {"prompt": 1100.0, "reply": 200.0}
        seen = Observation(now=now, replicas=[each] * ready, **tokens, expected=rate / 2, refused=dice.choice((0, 3)))
        before, state = state, decide(seen, state, rules)

        assert rules.min <= state.target <= rules.max
        if before is not None and state.target != before.target:
            assert before.target == ready or now - changed >= STUCK * rules.cold_start
            changed, changes = now, changes + 1
        ready = state.target if dice.random() < 0.2 else ready

    assert changes >= 2


@pytest.mark.parametrize("rate", [0.5, 4.0, 5.0, 6.5, 12.0, 20.0])
def test_a_constant_load_never_flaps(rate: float) -> None:
    """Once the target is found it stays, also where calls scatter as independent ones do."""
    dice, pool = random.Random(3), Pool(RULES)
    for _ in range(60):
        pool.look(rate)
    settled = len(pool.targets)
    for _ in range(400):
        pool.look(rate)
    constant = set(pool.targets[settled:])
    for _ in range(400):
        pool.look(max(0.0, dice.gauss(rate, (rate / EVERY) ** 0.5)))
    moves = sum(one != other for one, other in zip(pool.targets[-400:], pool.targets[-399:], strict=False))

    assert len(constant) == 1
    assert moves <= 2


def test_a_rising_load_is_met_at_once_and_a_falling_one_later() -> None:
    """One change up to what the demand needs; down no sooner than ``down_after``."""
    pool = Pool(RULES)
    for _ in range(30):
        pool.look(2.0)
    up = pool.look(20.0)
    for _ in range(30):
        pool.look(20.0)
    high = pool.state
    assert high is not None
    low = [pool.look(2.0).target for _ in range(40)]

    assert up.target >= 3 and "calls/s" in up.reason
    assert low[:9] == [high.target] * 9 and low[-1] == 1


def test_a_change_that_never_comes_about_holds_up_none_for_ever() -> None:
    """Three cold starts later the next one may follow."""
    pool = Pool(RULES)
    pool.look(2.0)
    pool.rules, pool.due = RULES, 1e9
    first = pool.look(12.0).target
    pool.due = 1e9
    targets = [pool.look(40.0).target for _ in range(30)]

    assert first > 1 and targets[0] == first and targets[-1] > first
    assert len(set(targets[: int(STUCK * RULES.cold_start / EVERY) - 2])) == 1


def test_a_target_set_by_hand_stays() -> None:
    """Within min and max, whatever the demand, until it is taken back: then what the demand was meanwhile counts."""
    pool = Pool(RULES)
    pool.look(2.0)
    pool.state = set_by_hand(pool.state, 5, pool.now)
    held = {pool.look(rate).target for rate in (2.0, 0.0, 90.0, 2.0)}
    pool.rules = replace(RULES, max=3)
    bounded = pool.look(2.0)
    pool.rules = RULES
    again = pool.look(2.0)
    pool.state = set_by_hand(pool.state, None, pool.now)
    for _ in range(30):
        pool.look(0.5)

    assert held == {5} and again.target == 5 and again.reason == "min and max"
    assert bounded.target == 3 > pool.look(0.5).target
    assert set_by_hand(None, 2, 5.0).manual == 2


def test_the_season_is_a_floor() -> None:
    """Replicas are there before the hour in which calls were there last week; the demand may ask for more."""
    pool = Pool(RULES)
    pool.look(1.0)
    state = pool.look(1.0, expected=14.0)

    assert state.target == 3 and state.reason == "season: 14.00 calls/s"


def test_a_cold_pool_goes_to_zero_and_comes_back() -> None:
    """Only with min 0, after no call for ``down_after``, and not where calls are expected within a cold start."""
    cold, soon, warm = Pool(replace(RULES, min=0)), Pool(replace(RULES, min=0)), Pool(RULES)
    for _ in range(60):
        cold.look(0.0, expected=0.001)
        soon.look(0.0, expected=0.05)
        warm.look(0.0)
    woken = cold.look(0.0, refused=1)

    assert (cold.targets[5], cold.targets[-2], soon.targets[-1], warm.targets[-1]) == (1, 0, 1, 1)
    assert (woken.target, woken.reason) == (1, "calls found no replica")


def test_kv_and_queues_count_where_no_step_cost_is_known() -> None:
    """Engines of others tell no step cost: above 70 % of KV or with a queue one more, below 20 % one fewer."""
    pool = Pool(RULES, ready=2, cost=None)
    full = pool.look(1.0, kv=0.75).target
    for _ in range(10):
        pool.look(1.0, kv=0.5)
    kept = pool.look(1.0, kv=0.5).target
    queued = pool.look(1.0, waiting=100, kv=0.5).target
    for _ in range(40):
        pool.look(1.0, kv=0.1)

    assert (full, kept, queued, pool.targets[-1]) == (3, 3, 4, 1)


def test_a_long_queue_asks_for_more() -> None:
    """What waits is worked off within a minute, and the predicted first token tells of it."""
    pool = Pool(RULES)
    pool.look(4.0)
    state = pool.look(4.0, waiting=300)

    assert state.target > 1 and "waiting" in state.reason
    assert state.predicted_ttft is not None and state.predicted_ttft > 30


def test_the_model_has_the_engines_costs() -> None:
    """A prompt alone, and a reply beside others, take what the engine's own formula says."""
    engine = EngineCost(COST.fixed, COST.weights, COST.token, COST.context, COST.pair)
    model = QueueModel(COST)
    first = model.first_token_of_next(2000.0, 100.0)
    model.run_until(100.0)
    beside = QueueModel(COST)
    beside.begin(10, 1000.0, 200.0)
    before = beside.context
    beside.run_until(0.02)

    assert first == pytest.approx(engine.seconds(StepWork(2000, 0, 0, 1)), rel=0.01)
    assert beside.context - before == pytest.approx(10 * 0.02 / engine.seconds(StepWork(10, int(before))), rel=0.02)
    assert (model.running, model.waiting, model.context) == (0, 0, 0)


@pytest.mark.parametrize(
    ("cost", "load"),
    [
        (StepCost(0.0, 0.0, 0.0, 0.0), {}),  # which an operator may have told the engine
        (StepCost(60.0, 60.0, 60.0, 0.0), {}),
        (StepCost(0.01, 0.0, 1e-300, 0.0, 1.0), {}),
        (COST, {"running": 2**53, "waiting": 2**53, "finished": 1e15}),
    ],
)
def test_whatever_a_replica_reports_there_is_a_decision(cost: StepCost, load: dict[str, float]) -> None:
    """At once, and within min and max; nothing is predicted to be later than an hour."""
    each = ReplicaLoad(**{"running": 3, "waiting": 2, "max_running": 256, "finished": 1.0, "cost": cost} | load)
    state = decide(Observation(now=0.0, replicas=[each] * 2, prompt=20_000.0), None, RULES)

    assert RULES.min <= state.target <= RULES.max
    assert state.predicted_ttft is not None and 0 <= state.predicted_ttft <= LATEST


def test_a_cost_that_no_step_has_is_no_report() -> None:
    """Time goes by no number below 0."""
    with pytest.raises(msgspec.ValidationError, match=r"`\$\.token`"):
        msgspec.convert({"fixed": 0.1, "weights": 0.1, "token": -1e-6, "context": 0.0}, StepCost)


def test_no_number_of_replicas_keeps_a_promise_that_one_call_breaks() -> None:
    """Prompts that take longer than ``ttft`` by themselves: the pool is as large as it may be, once calls come."""
    assert most_calls(COST, 256, 40_000.0, 200.0, 1.0, 1) == 0


def test_a_decision_by_a_clock_that_was_wrong_is_gone_beyond() -> None:
    """A day ahead: rates move on, targets rise and fall, and what is remembered does not grow."""
    pool = Pool(RULES)
    pool.now = 86_400.0
    pool.look(20.0)
    pool.now = pool.due = 0.0
    high = max(pool.look(20.0).target for _ in range(10))
    for _ in range(40):
        pool.look(1.0)

    assert pool.state is not None and len(pool.state.needs) <= RULES.down_after / EVERY + 1
    assert high > 1 and pool.state.target == 1 and pool.state.rate < 2


def test_more_replicas_bear_more() -> None:
    """As many as one each, and a little more for sharing what comes at once."""
    bears = [most_calls(COST, 256, 1100.0, 200.0, 1.0, count) for count in (0, 1, 2, 4, 8, 16)]

    assert bears[0] == 0 and all(2 * one <= other * 1.05 for one, other in pairwise(bears[1:]))


def test_expected_calls_follow_day_and_week() -> None:
    """The same hour a week ago, as far as today is like it; before a week is known, the days before."""
    monday = {hour: 3600 if 9 <= hour % 24 < 17 else 36 for hour in range(3 * WEEK)}
    doubled = monday | {hour: 2 * monday[hour] for hour in range(3 * WEEK - 30, 3 * WEEK)}
    noon = (3 * WEEK - 12) * HOUR + HOUR / 2
    after = noon + 12 * HOUR

    assert expected_rate(monday, noon, noon) == pytest.approx(1.0)
    assert expected_rate({}, noon, noon) == 0
    assert expected_rate(doubled, after - HOUR, after - HOUR) == pytest.approx(
        2 * expected_rate(monday, after, after), rel=0.1
    )
    assert expected_rate(monday, noon - 6 * HOUR, noon - 6 * HOUR) < expected_rate(monday, noon - 6 * HOUR, noon)
    days = {hour: calls for hour, calls in monday.items() if hour >= 3 * WEEK - 60}
    assert expected_rate(days, noon, noon) == pytest.approx(1.0)
