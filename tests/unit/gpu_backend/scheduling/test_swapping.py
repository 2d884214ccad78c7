# Who gives way is copied to host memory or computed again, whichever is predicted to take less; either way its reply
# goes on as if nothing had happened.

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.scheduling.running import LEARNT_EVERY, SwapChoice
from gpu_backend.step.cost import StepCost, StepWork, chunk_work
from gpu_backend.step.messages import Abort
from gpu_backend.step.plan import StepPlan, StepResult
from tests.support.engine import (
    Answer,
    CountingRunner,
    answer_all,
    collect,
    continuation,
    counting_loop,
    expect_short_replies,
    finish,
    greedy,
)

COST = StepCost(fixed=0.0, weights=0.01, token=1e-4, context=1e-6, pair=1e-8)
IDLE = StepWork()


def swapping_loop(
    copy_seconds: float | None, num_host_blocks: int = 40, **fields: Any
) -> tuple[EngineLoop, CountingRunner]:
    fields = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 40, "step_cost": COST} | fields
    loop, runner = counting_loop(16, 60, num_host_blocks, copy_seconds, **fields)
    expect_short_replies(loop)
    return loop, runner


def answer(loop: EngineLoop) -> None:
    """Answer more than fits, and see that all replies are right."""
    prompts = [tuple(range(i, i + 9)) for i in range(5)]
    answers = answer_all(loop, [greedy(str(i), prompt, 24) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert answers[str(i), 0].token_ids == continuation(prompt, 24)
    assert loop.scheduler.running.num_preempted > 0


def test_what_takes_less_is_done() -> None:
    """Long contexts are copied, and short ones computed beside others, where a step waits for weights anyway."""
    choice = SwapChoice(COST, is_measured=True, copy_seconds=1e-4)
    decodes = StepWork(tokens=8, context=800, pairs=800)

    assert choice.pays(decodes, 4000, 250)
    assert not choice.pays(decodes, 64, 4)
    assert not choice.pays(decodes, 4000, 4000)
    assert not SwapChoice(COST, is_measured=True, copy_seconds=None).pays(decodes, 4000, 250)


def test_assumed_cost_gets_its_unit_from_steps() -> None:
    """Nothing is copied before any step was seen; a slow device makes copies pay."""
    choice = SwapChoice(StepCost(1.0, 0.0, 0.2, 0.0, 0.0), is_measured=False, copy_seconds=1e-3)

    assert not choice.pays(IDLE, 100, 7)
    choice.learn(chunk_work(0, 5), 0.002)
    assert choice.pays(IDLE, 100, 7)
    for _ in range(60):
        choice.learn(chunk_work(0, 5), 0.00002)
    assert not choice.pays(IDLE, 100, 7)
    assert choice.wants(2 * LEARNT_EVERY) and not choice.wants(LEARNT_EVERY + 1)


@pytest.mark.parametrize("caching", [True, False])
def test_swapped_replies_go_on_where_they_were(caching: bool) -> None:
    """Copies cost nothing: no preempted one is computed again. They cost much: none is copied."""
    computed = []
    for copy_seconds in (0.0, 10.0):
        loop, runner = swapping_loop(copy_seconds, prefix_caching=caching)
        answer(loop)
        assert (loop.scheduler.running.num_swapped > 0) == (copy_seconds == 0)
        assert loop.load().counters["swaps"] == loop.scheduler.running.num_swapped
        computed.append(sum(plan.num_tokens for plan in runner.plans))

    assert computed[0] == 5 * (9 + 23) <= computed[1]


def test_full_host_memory_means_computing_again() -> None:
    """Who finds no room there is computed again."""
    loop, _ = swapping_loop(0.0, num_host_blocks=3)

    answer(loop)

    assert loop.scheduler.running.num_swapped < loop.scheduler.running.num_preempted


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=2, max_size=7),
    num_host_blocks=st.integers(1, 30),
    abort_at=st.integers(1, 12),
    overlaps=st.booleans(),
    seed=st.integers(0, 3),
)
def test_replies_are_right_and_books_in_order(
    lengths: list[tuple[int, int]], num_host_blocks: int, abort_at: int, overlaps: bool, seed: int
) -> None:
    """Random prompts, tiers and an abort, maybe of one that is swapped: every block comes back, of the host's too."""
    loop, _ = swapping_loop(0.0, num_host_blocks, async_scheduling=overlaps)
    prompts = [tuple((seed + 7 * i + j) % 50 for j in range(length)) for i, (length, _) in enumerate(lengths)]
    answers: dict[tuple[str, int], Answer] = {}
    for i, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True)):
        tier = "batch" if i % 3 == 2 else "interactive"
        collect(answers, loop.handle(greedy(str(i), prompt, count, tier=tier, tenant=str(i % 2))))
    for _ in range(abort_at):
        if loop.has_work():
            collect(answers, loop.step())
            loop.scheduler.check()
    collect(answers, loop.handle(Abort("1")))
    loop.scheduler.check()
    finish(loop, answers)

    for i, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True)):
        right = continuation(prompt, count)
        assert answers[str(i), 0].token_ids == (right if i != 1 else right[: len(answers["1", 0].token_ids)])


class FailingCopies(CountingRunner):
    """Fails in one of the steps that copy blocks, before it does anything."""

    def __init__(self, block_size: int, number: int) -> None:
        super().__init__(block_size)
        self.left = number  # steps that copy, up to the one that fails

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, or fail."""
        self.left -= bool(plan.copies)
        if plan.copies and self.left == 0:
            raise RuntimeError("no copy today")
        return super().run(plan)


def replies_of_failing_copies(number: int, requests: list[tuple[int, int]], **fields: Any) -> tuple[int, int]:
    """Ask for replies to prompts, of these lengths; see that each is right or failed, and return how many are which."""
    loop, _ = swapping_loop(0.0, **fields)
    loop.runner = failing = FailingCopies(4, number)
    prompts = [tuple(range(10 * i, 10 * i + length)) for i, (length, _) in enumerate(requests)]
    commands = [greedy(str(i), prompt, requests[i][1]) for i, prompt in enumerate(prompts)]
    answers = answer_all(loop, commands)

    assert failing.left <= 0
    failed = [answers[str(i), 0].error is not None for i in range(len(requests))]
    for i, (prompt, (_, count)) in enumerate(zip(prompts, requests, strict=True)):
        assert failed[i] or answers[str(i), 0].token_ids == continuation(prompt, count)
    return failed.count(False), failed.count(True)


def test_who_was_swapped_in_a_step_that_failed_is_computed_again() -> None:
    """Nobody reads what was never copied; only those in the failed step hear of it."""
    right, failed = replies_of_failing_copies(1, [(9, 24)] * 5)

    assert right and failed


def test_who_came_back_in_a_step_that_failed_and_had_no_part_in_it_fails_with_it() -> None:
    """Its blocks were to be copied from the host; the step had no more time for a token of its own."""
    tight = StepCost(fixed=0.0, weights=0.001, token=0.001, context=1e-6, pair=1e-8)

    right, failed = replies_of_failing_copies(3, [(6, 20), (29, 10), (8, 9), (3, 20)], step_cost=tight)

    assert right and failed
