# Who is let in when, shown in virtual time: no preemption storm, headroom, caps, bounded queues, deadlines, and steps
# that a long prompt does not stretch.

from __future__ import annotations

import random

import pytest

from gpu_backend.scheduling.forecast import WINDOW, LengthForecast, highest_use
from gpu_backend.simulate.hardware import DEVICES, MODELS, step_cost
from gpu_backend.simulate.replica import Replica
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import StepConfig, engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import Generate, Refused
from gpu_backend.step.plan import StepPlan, StepResult
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import counting_loop, finish, greedy
from tools.simulate.pressure import Workload, make_replica, try_out

H200 = step_cost(MODELS["llama-8b"], DEVICES["h200"])
TENTH = StepCost(fixed=0.1, weights=0.0, token=0.0, context=0.0, pair=0.0)


def replica(num_blocks: int, cost: StepCost = H200, **changes: object) -> Replica:
    fields: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "step_cost": cost, **changes}
    return Replica(engine_config(model="", **fields), cost, num_blocks)  # type: ignore[arg-type]


def plans_of(target: Replica) -> list[StepPlan]:
    """Return the list that the replica's plans will be appended to."""
    plans: list[StepPlan] = []
    run = target.runner.run

    def keep(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return run(plan)

    target.runner.run = keep  # type: ignore[method-assign]
    return plans


def test_twice_too_much_work_costs_no_goodput() -> None:
    """With twice the clients that the KV cache has room for, at least 90 % of the goodput comes; few are preempted."""
    workload = Workload(20, 200, mu=4.8, sigma=0.8, num_blocks=400)
    requests, fits = workload.requests(200), workload.clients_that_fit()

    at_one = try_out(make_replica("llama-8b", "h200", 400), requests, fits)
    at_two = try_out(make_replica("llama-8b", "h200", 400), requests, 2 * fits)

    assert 20 <= fits <= 30
    assert at_two.goodput >= 0.9 * at_one.goodput
    assert at_two.report.preemptions <= 0.1 * 200
    assert at_two.paused <= 0.02


def test_forecast_is_that_of_replies_that_got_as_far() -> None:
    """Half of the remembered replies that are longer than this one end before it, for the lot in the middle."""
    forecast = LengthForecast()
    for length in range(WINDOW):
        forecast.learn(length)

    assert forecast.longest == WINDOW - 1
    assert forecast.remaining(0, 0.5) == pytest.approx(500, abs=1)
    assert forecast.remaining(600, 0.5) == pytest.approx(200, abs=1)
    assert forecast.remaining(600, 0.0) == 1
    assert forecast.remaining(2000, 0.5) == 2000


def test_forecast_forgets() -> None:
    """Only the last thousand replies count."""
    forecast = LengthForecast()
    for length in [5000] * WINDOW + [7] * WINDOW:
        forecast.learn(length)

    assert (forecast.longest, forecast.mean) == (7, 7)


def test_highest_use_is_reached_before_a_reply_ends() -> None:
    """All grow until the first one ends and gives its blocks back; shared blocks count once."""
    replies = [(10, 16), (10, 48), (20, 160)]

    # After 16 tokens: 40 + 3·1; after 48: 40 − 10 + 2·3; after 160: 40 − 20 + 10.
    assert highest_use(replies, 40, 16) == 43
    assert highest_use(replies, 30, 16) == 33
    assert highest_use([(1, 16), (1, 1600)], 2, 16) == 101
    assert highest_use([], 0, 16) == 0


def test_batch_work_leaves_headroom() -> None:
    """Batch work is not let into the last tenth of the blocks; interactive work is."""
    target = replica(100, TENTH, block_size=4, interactive_headroom=0.25)
    for number in range(10):
        target.submit(number, TraceRequest(0.0, 60, 4, tier="batch"), 4)
    target.run_until(0.05)
    batch_use = target.loop.blocks.num_in_use

    target.submit(10, TraceRequest(0.0, 60, 4), 4)
    target.run_until(0.15)

    assert 60 <= batch_use <= 75
    assert target.outcomes["10"].first_token is not None
    assert target.loop.scheduler.running.num_preempted == 0


def test_batch_tier_has_a_cap_of_tokens() -> None:
    """No step computes more prompt tokens of batch work than its cap, whatever is left of the budget."""
    target = replica(1000, TENTH, max_batch_tier_tokens=100)
    plans = plans_of(target)
    for number in range(4):
        target.submit(number, TraceRequest(0.0, 300, 2, tier="batch"), 2)
    target.submit(4, TraceRequest(0.0, 700, 2), 2)

    target.run_until(float("inf"))

    assert plans[0].num_tokens == 700 + 100
    assert all(sum(len(s.token_ids) for s in p.sequences if len(s.token_ids) > 1) <= 100 for p in plans[1:])
    assert all(outcome.tokens == 2 for outcome in target.outcomes.values())


def test_cap_of_a_tier_holds_for_its_replies_too_and_keeps_no_other_waiting() -> None:
    """As much batch work runs as has a token each; interactive work is let in past the rest, however long it waits."""
    target = replica(1000, TENTH, max_batch_tier_tokens=5, batch_patience=0.5)
    plans = plans_of(target)
    for number in range(30):
        target.submit(number, TraceRequest(0.0, 4, 20, tier="batch"), 20)
    target.run_until(3.0)
    target.submit(30, TraceRequest(target.runner.now, 20, 2), 2)
    target.run_until(float("inf"))
    batch = [target.outcomes[str(number)] for number in range(30)]

    of_batch = [sum(len(s.token_ids) for s in plan.sequences if s.sequence_id <= 30) for plan in plans]
    assert max(of_batch) == 5
    assert all(outcome.tokens == 20 for outcome in batch)
    assert target.outcomes["30"].first_token == pytest.approx(3.1, abs=0.11)


def test_queue_is_bounded_and_no_tenant_fills_it_alone() -> None:
    """A flood is refused once it has as many waiting as others could still add; others are taken."""
    loop, _ = counting_loop(64, block_size=4, max_num_seqs=1, max_num_batched_tokens=64, max_waiting=10)
    answers = [loop.handle(greedy(f"flood{n}", range(4), 2, tenant="flood")) for n in range(20)]
    calm = [loop.handle(greedy(f"calm{n}", range(4), 2, tenant=f"calm{n}")) for n in range(20)]
    batch = loop.handle(greedy("batch", range(4), 2, tier="batch"))

    refused = [events[0] for events in answers if events]
    assert len(refused) == 15
    assert isinstance(refused[0], Refused) and "no room for more of yours" in refused[0].reason
    assert [bool(events) for events in calm] == [False] * 5 + [True] * 15
    assert batch == []
    finish(loop, {})


def ask(name: str, prompt: int, deadline_ms: int, max_tokens: int = 64) -> Generate:
    return Generate(name, (1,) * prompt, SamplingParams(max_tokens), deadline_ms=deadline_ms)


def test_what_cannot_make_its_deadline_is_refused_at_once_with_the_predicted_time() -> None:
    """The refusal says how long it would take, and by how much that is too late."""
    target = replica(2000)

    assert target.loop.handle(ask("taken", 500, 50)) == []
    (event,) = target.loop.handle(ask("late", 500, 50))

    assert isinstance(event, Refused)
    assert "x-deadline-ms is 50" in event.reason
    predicted = int(event.reason.split("about ")[1].split(" ms")[0])
    assert 200 < predicted < 1000  # 64 steps of 4.6 ms, and the prompt
    assert event.retry_after == pytest.approx(predicted / 1000 - 0.05, abs=0.001)


def test_idle_engine_goes_by_the_prompt_alone() -> None:
    """How long a reply gets is a guess; on a guess alone, an engine that does nothing refuses no request."""
    target = replica(2000)

    (event,) = target.loop.handle(ask("late", 4000, 100))
    assert isinstance(event, Refused)
    assert target.loop.handle(ask("taken", 500, 100)) == []


def test_without_a_known_cost_nothing_is_predicted() -> None:
    """A deadline is then only kept by the front, which ends what takes too long."""
    target = replica(2000)
    target.loop._steps = StepConfig()

    assert target.loop.handle(ask("late", 500, 1)) == []


def test_predictions_come_true_under_load() -> None:
    """Of what is taken with a deadline while twice too much is asked, most is in time; much is refused, not all."""
    dice = random.Random(2)
    target = replica(1000, max_num_seqs=16)
    at = 0.0
    for number in range(400):
        at += dice.expovariate(80.0)
        target.run_until(at)
        request = TraceRequest(at, dice.randint(50, 400), max(8, int(dice.gauss(100, 10))))
        target.submit(number, request, 4096, deadline_ms=1500)
    target.run_until(float("inf"))
    taken = [o for o in target.outcomes.values() if not o.refused]
    in_time = [o for o in taken if o.last_token - o.request.arrival <= 1.5]

    assert 100 < len(taken) < 300
    assert len(in_time) > 0.9 * len(taken)


def test_long_prompt_stretches_no_step() -> None:
    """While 128k tokens prefill, no step takes more than 1.5 times its decodes alone; other prompts are not held up."""
    target = replica(60_000, max_num_batched_tokens=8192)
    for number in range(32):
        target.submit(number, TraceRequest(0.0, 12_000, 6000), 6000)
    while any(outcome.first_token is None for outcome in target.outcomes.values()):
        target.run_until(target.runner.now + 1.0)
    began = target.runner.now
    target.runner.log.stretches = type(target.runner.log.stretches)("d")

    target.submit(900, TraceRequest(target.runner.now, 131_072, 2), 4)
    for number in range(20):
        target.run_until(began + 1.0 + number)
        target.submit(1000 + number, TraceRequest(target.runner.now, 500, 5), 8)
    target.run_until(began + 21.0)
    early = target.outcomes["900"].first_token
    while target.outcomes["900"].first_token is None:
        target.run_until(target.runner.now + 1.0)
    short = [target.outcomes[str(1000 + number)] for number in range(20)]

    assert early is None, "the others came while it was being computed"
    assert all(target.outcomes[str(number)].tokens < 6000 for number in range(32)), "the others ran all the time"
    assert len(target.runner.log.stretches) > 500
    assert max(target.runner.log.stretches) <= 1.5
    assert max((o.first_token or 1e9) - o.request.arrival for o in short) < 1.0


def test_end_of_a_long_prompt_holds_no_other_up() -> None:
    """What takes many steps is long, also where it is no more than a step's tokens; others are let in beside it."""
    cost = StepCost(fixed=0.0, weights=0.01, token=1e-4, context=0.0, pair=0.0)  # 150 tokens fit beside a decode
    target = replica(1000, cost)
    target.submit(0, TraceRequest(0.0, 10, 400), 400)
    target.run_until(0.05)
    target.submit(1, TraceRequest(target.runner.now, 2000, 2), 2)
    target.run_until(target.runner.now + 0.02)

    arrival = target.runner.now
    for number in range(2, 5):
        target.submit(number, TraceRequest(arrival, 40, 2), 2)
    target.run_until(arrival + 0.3)
    firsts = [(target.outcomes[str(number)].first_token or 1e9) - arrival for number in range(1, 5)]

    assert max(firsts[1:]) < 0.05
    assert 0.15 < firsts[0] < 0.25
    assert max(target.runner.log.stretches) <= 1.5


@pytest.mark.parametrize("max_num_batched_tokens", [64, 2048])
def test_prompt_that_takes_many_steps_comes_to_its_end_whatever_else_comes(max_num_batched_tokens: int) -> None:
    """Deep in its context even a block stretches a step; where others leave it less, they do so four times in a row."""
    cost = StepCost(fixed=0.01, weights=0.0, token=1e-5, context=1e-6, pair=0.0)
    target = replica(
        2000, cost, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=32, block_size=16, max_waiting=10**6
    )
    plans = plans_of(target)
    target.submit(0, TraceRequest(0.0, 10, 5000), 5000)
    target.run_until(0.05)
    target.submit(1, TraceRequest(target.runner.now, 8000, 2), 2)
    long, count = target.outcomes["1"], 2
    while long.first_token is None and len(plans) < 4000:
        while target.loop.scheduler.num_waiting < 20:  # there is always a short one that would go first
            target.submit(count, TraceRequest(target.runner.now, 40, 1), 1)
            count += 1
        target.step()

    begin = next(i for i, plan in enumerate(plans) if any(s.sequence_id == 2 for s in plan.sequences))
    chunks = [sum(len(s.token_ids) for s in plan.sequences if s.sequence_id == 2) for plan in plans[begin:]]
    assert long.first_token is not None
    assert all(sum(chunks[i : i + 5]) >= 16 for i in range(len(chunks) - 9))
    assert len(chunks) <= 5 * 8000 / 16
    assert sum(outcome.tokens for outcome in target.outcomes.values()) > len(chunks), "others were served meanwhile"
