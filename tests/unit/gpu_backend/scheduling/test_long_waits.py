# Nobody waits for the ends of another tenant's long replies: after the patience one of them makes room, and goes on
# later. In virtual time, a tenth of a second a step.

from __future__ import annotations

import pytest

from gpu_backend.simulate.replica import Replica
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from tests.support.engine import Answer, collect, continuation, counting_loop, expect_short_replies, finish, greedy

TENTH = StepCost(fixed=0.1, weights=0.0, token=0.0, context=0.0, pair=0.0)
PATIENCE = 2.0
LONG = 3000  # tokens: five minutes


def replica(num_blocks: int = 2_500, **changes: float) -> Replica:
    fields: dict[str, float] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "block_size": 4, **changes}
    return Replica(engine_config(model="", **fields), TENTH, num_blocks)  # type: ignore[arg-type]


def submit(target: Replica, tenant: str, number: int, length: int = LONG, prompt: int = 8, **fields: object) -> None:
    for _ in range(number):
        request = TraceRequest(target.runner.now, prompt, length, tenant, **fields)  # type: ignore[arg-type]
        target.submit(len(target.outcomes), request, length)


def run(target: Replica, seconds: float) -> list[dict[str, int]]:
    """Step so long, and return how many replies of each tenant ran after each step."""
    until, seen = target.runner.now + seconds, []
    while target.runner.now < until and target.loop.has_work():
        target.step()
        target.loop.scheduler.check()
        tenants = [sequence.tenant for sequence in target.loop.scheduler.running]
        seen.append({tenant: tenants.count(tenant) for tenant in tenants})
    return seen


def waited(target: Replica, number: int) -> float:
    """Return after how many seconds a request had its first token."""
    outcome = target.outcomes[str(number)]
    assert outcome.first_token is not None
    return outcome.first_token - outcome.request.arrival


def test_long_replies_in_every_slot_keep_no_tenant_waiting_beyond_the_patience() -> None:
    """One of them makes room, once; it goes on as soon as the short one has ended."""
    target = replica()
    submit(target, "long", 64)
    run(target, 5.0)
    submit(target, "short", 1, 5)

    seen = run(target, 10.0)

    assert PATIENCE <= waited(target, 64) <= PATIENCE + 0.5
    assert target.outcomes["64"].tokens == 5
    assert target.loop.scheduler.running.num_preempted == target.loop.scheduler.admission.num_preempted_for_starved == 1
    assert seen[-1] == {"long": 4}
    assert sum(outcome.first_token is not None for outcome in target.outcomes.values()) == 5


@pytest.mark.parametrize("prompt", [8, 200])
def test_nor_do_they_where_the_kv_cache_is_full(prompt: int) -> None:
    """As many leave as the prompt needs the blocks of; and those who grow do not throw it out again."""
    target = replica(num_blocks=200, max_num_seqs=32, protected_cache_share=0.0)
    expect_short_replies(target.loop)
    submit(target, "long", 64, 700)
    run(target, 20.0)
    assert target.loop.scheduler.num_waiting and len(target.loop.scheduler.running) < 32
    submit(target, "short", 1, 20, prompt)

    run(target, 10.0)

    assert waited(target, 64) <= PATIENCE + 0.5
    assert target.outcomes["64"].tokens == 20
    assert target.outcomes["64"].longest_gap == pytest.approx(0.1)
    assert target.loop.scheduler.admission.num_preempted_for_starved <= prompt / 8


def test_two_with_long_replies_settle_at_their_shares() -> None:
    """One reply a patience changes hands until both hold what their weights say; then no reply is preempted."""
    target = replica(max_num_seqs=8)
    submit(target, "early", 20)
    run(target, 5.0)
    submit(target, "late", 20, weight=3.0)

    seen = run(target, 20.0)
    settled = target.loop.scheduler.running.num_preempted
    seen += run(target, 20.0)

    held = [at.get("late", 0) for at in seen]
    assert held == sorted(held) and all(after - now <= 1 for now, after in zip(held, held[19:], strict=False))
    assert seen[-1] == {"early": 2, "late": 6}
    assert settled == target.loop.scheduler.running.num_preempted == 6


def test_a_slot_stays_with_the_tenant_that_won_it() -> None:
    """While it holds less and has more to ask, its next request takes the place of its last: no reply is preempted."""
    target = replica(max_num_seqs=8)
    submit(target, "long", 20)
    run(target, 5.0)
    submit(target, "short", 400, 5)

    seen = run(target, 30.0)

    assert seen[-1] == {"long": 4, "short": 4}
    assert target.loop.scheduler.running.num_preempted == 4


def test_more_tenants_than_slots_take_turns() -> None:
    """Where each has one long reply, one leaves in a patience, in the whole engine, and no tenant starves."""
    target = replica(max_num_seqs=2)
    for tenant in "abcdef":
        submit(target, tenant, 1, 600)

    run(target, 60.0)

    assert all(outcome.tokens > 100 for outcome in target.outcomes.values())
    assert 20 <= target.loop.scheduler.running.num_preempted <= 60 / PATIENCE


def test_a_tenant_never_gives_way_to_itself() -> None:
    """Alone, whatever waits and in whichever tier, its replies run to their ends."""
    target = replica(max_num_seqs=2, batch_patience=5.0)
    submit(target, "alone", 6, 100)
    submit(target, "alone", 2, 100, tier="batch")

    run(target, 50.0)

    assert target.loop.scheduler.admission.num_preempted_for_starved == 0


def test_aged_batch_work_does_not_wait_for_long_replies_either() -> None:
    """When its own patience is over, another tenant's long reply makes room for it, whatever its tier."""
    target = replica(max_num_seqs=2, batch_patience=10.0)
    submit(target, "long", 3)
    submit(target, "night", 1, 5, tier="batch")

    run(target, 20.0)

    assert 10.0 <= waited(target, 3) <= 10.5


def test_no_reply_is_preempted_where_the_patience_has_no_end() -> None:
    """Then a reply that runs is let be."""
    target = replica(interactive_patience=float("inf"))
    submit(target, "long", 4)
    run(target, 1.0)
    submit(target, "short", 1, 5)

    run(target, 20.0)

    assert target.outcomes["4"].first_token is None


@pytest.mark.parametrize("copy_seconds", [None, 1e-9])
@pytest.mark.parametrize("overlaps", [False, True])
def test_replies_that_gave_way_end_with_the_same_tokens(copy_seconds: float | None, overlaps: bool) -> None:
    """Whether copied or computed again, and no caller gets a token twice."""
    loop, _ = counting_loop(
        60,
        num_host_blocks=60,
        copy_seconds=copy_seconds,
        block_size=4,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        interactive_patience=1e-6,
        step_cost=StepCost(fixed=0.0, weights=0.0, token=1e-4, context=0.0, pair=0.0),
        async_scheduling=overlaps,
    )
    prompts = {f"{tenant}{n}": tuple(range(10 * n, 10 * n + 9)) for n in range(4) for tenant in "ab"}
    answers: dict[tuple[str, int], Answer] = {}
    for tenant in "ab":
        for name, prompt in prompts.items():
            if name[0] == tenant:
                loop.handle(greedy(name, prompt, 40, tenant=tenant))
        for _ in range(4):
            collect(answers, loop.step())

    finish(loop, answers)

    assert loop.scheduler.admission.num_preempted_for_starved > 0
    assert (loop.scheduler.running.num_swapped > 0) == (copy_seconds is not None)
    for name, prompt in prompts.items():
        assert answers[name, 0].token_ids == continuation(prompt, 40)
