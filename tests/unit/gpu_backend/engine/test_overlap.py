# Steps that are launched before the last one's tokens are known: the same replies as one step at a time, and nothing
# left behind by tokens that were computed in vain.

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.step.messages import Abort, Embed, FinishReason, Generate
from gpu_backend.step.plan import UNKNOWN, Launched, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import (
    Answer,
    CountingRunner,
    answer_all,
    collect,
    continuation,
    counting_loop,
    finish,
    greedy,
)

STOPS = frozenset(range(2, 256, 9))  # of the tokens that ``CountingRunner`` makes


def overlapping_loop(num_blocks: int, max_model_len: int | None = None, **fields: Any) -> tuple[EngineLoop, Any]:
    """Build a loop that plans a step ahead, over a runner that only counts."""
    return counting_loop(num_blocks, max_model_len, async_scheduling=True, block_size=4, **fields)


def until_stop(reply: list[int]) -> list[int]:
    """Cut a reply behind its first stop token."""
    ends = [index for index, token in enumerate(reply) if token in STOPS]
    return reply[: ends[0] + 1] if ends else reply


def stopping(name: str, prompt: range, max_tokens: int, **fields: Any) -> Generate:
    """Ask for a reply that ends with a stop token."""
    return Generate(name, tuple(prompt), SamplingParams(max_tokens, temperature=0.0, stop_token_ids=STOPS), **fields)


def test_step_is_launched_before_the_last_ones_tokens_are_known() -> None:
    """The second step has a placeholder for the token, and the first one's token comes out behind its launch."""
    loop, runner = overlapping_loop(16)
    loop.handle(greedy("x", range(5), 3))
    answers: dict[tuple[str, int], Answer] = {}

    told = []
    while loop.has_work():
        collect(answers, loop.step())
        loop.scheduler.check()
        told.append(len(answers["x", 0].token_ids) if answers else 0)

    assert [plan.sequences[0].token_ids[-1:] for plan in runner.plans] == [(4,), (UNKNOWN,), (UNKNOWN,)]
    assert [plan.sequences[0].start for plan in runner.plans] == [0, 5, 6]
    assert told == [0, 1, 2, 3]
    assert answers["x", 0].token_ids == continuation(range(5), 3)


def test_a_token_behind_the_end_is_dropped() -> None:
    """A stop token is known a step late: what was computed behind it reaches neither reply, cache nor anyone's bill."""
    loop, runner = overlapping_loop(64, max_num_seqs=4)
    whole = continuation(range(6), 40)
    reply = until_stop(whole)
    assert 2 < len(reply) < 40

    answer = answer_all(loop, [stopping("x", range(6), 40)])["x", 0]
    computed = sum(len(plan.sequences) for plan in runner.plans)
    turn = (*range(6), *reply, *whole[len(reply) : len(reply) + 9])
    following = answer_all(loop, [greedy("y", turn, 3)])["y", 0]

    assert (answer.token_ids, answer.finish_reason) == (reply, FinishReason.STOP)
    assert computed == len(reply) + 1  # the token behind the end was computed
    assert loop.load().counters["generated_tokens"] == len(reply) + 3
    assert answer.events[-1].gpu_seconds == pytest.approx(0.001 * len(reply))
    assert following.events[0].cached_tokens == (6 + len(reply) - 1) // 4 * 4
    assert following.token_ids == continuation(turn, 3)


def test_no_step_is_spent_behind_a_known_end() -> None:
    """That a reply has all its tokens is known before the last of them is."""
    loop, runner = overlapping_loop(64, max_num_seqs=2)

    answer_all(loop, [greedy("a", range(4), 3), greedy("b", range(50, 54), 5)])

    assert [len(plan.sequences) for plan in runner.plans] == [2, 2, 2, 1, 1]


def test_replies_that_share_a_step_with_one_that_has_ended_pay_for_it_alone() -> None:
    """The time of every step belongs to those who got something for it."""
    loop, runner = overlapping_loop(64, max_num_seqs=2)
    stays, leaves = range(50, 54), range(6)
    length = len(until_stop(continuation(leaves, 40)))

    answers = answer_all(loop, [stopping("leaves", leaves, 40), greedy("stays", stays, length + 4)])

    seconds = [answer.events[-1].gpu_seconds for answer in answers.values()]
    assert sum(seconds) == pytest.approx(0.001 * len(runner.plans))
    assert loop.load().gpu_busy_seconds == pytest.approx(0.001 * len(runner.plans))


def test_step_that_cannot_be_launched_fails_its_own_sequences() -> None:
    """What the step before it made is told first; then the engine goes on."""
    loop, runner = overlapping_loop(64)
    launch = runner.launch

    def fail(plan: StepPlan) -> Launched:
        raise RuntimeError("out of memory")

    loop.handle(greedy("unlucky", range(5), 4))
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.step())
    runner.launch = fail
    collect(answers, loop.step())
    runner.launch = launch
    answers |= answer_all(loop, [greedy("next", range(5), 3)])

    assert answers["unlucky", 0].token_ids == continuation(range(5), 1)
    assert "out of memory" in (answers["unlucky", 0].error or "")
    assert answers["next", 0].token_ids == continuation(range(5), 3)


def test_step_that_breaks_on_the_device_fails_its_own_sequences() -> None:
    """An error that shows when results are read costs those who were in the step, and no one who came behind them."""
    loop, runner = overlapping_loop(64)
    loop.handle(greedy("unlucky", range(5), 4))
    answers: dict[tuple[str, int], Answer] = {}
    launch = runner.launch

    class Broken:
        def sample(self) -> None: ...

        def result(self) -> None:
            raise RuntimeError("illegal memory access")

    def break_later(plan: StepPlan) -> Any:
        CountingRunner.run(runner, plan)
        return Broken()

    runner.launch = break_later
    collect(answers, loop.step())
    runner.launch = launch
    loop.handle(greedy("later", range(60, 66), 3))
    finish(loop, answers)

    assert "illegal memory access" in (answers["unlucky", 0].error or "")
    assert answers["unlucky", 0].token_ids == []
    assert answers["later", 0].token_ids == continuation(range(60, 66), 3)


requests = st.tuples(
    st.integers(1, 30),  # prompt length
    st.integers(0, 3),  # which of four prompt families
    st.integers(1, 14),  # max_tokens
    st.integers(1, 3),  # n
    st.sampled_from(["interactive", "batch"]),
    st.sampled_from(["stops", "goes on", "embeds"]),
)
moves = st.lists(st.one_of(requests, st.integers(0, 12), st.just("step")), max_size=50)


@settings(max_examples=75, deadline=None)
@given(moves, st.integers(12, 30), st.integers(1, 5), st.integers(0, 20), st.sampled_from([0, 24]))
def test_every_reply_is_right_whatever_the_load(
    script: list[object], num_blocks: int, max_num_seqs: int, spare: int, num_host_blocks: int
) -> None:
    """Any mix of arrivals, aborts, stops and shortage: books balance, and each reply is what it would be alone."""
    loop, runner = overlapping_loop(
        num_blocks,
        44,
        num_host_blocks=num_host_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare,
    )
    answers: dict[tuple[str, int], Answer] = {}
    expected: dict[tuple[str, int], list[int]] = {}
    embedded: dict[str, range] = {}
    for number, move in enumerate(script):
        match move:
            case (int(length), int(family), int(max_tokens), int(n), str(tier), str(kind)):
                prompt = range(family * 50, family * 50 + length)
                if kind == "embeds":
                    embedded[str(number)] = prompt
                    loop.handle(Embed(str(number), tuple(prompt), "", tier))
                    continue
                ask = stopping if kind == "stops" else greedy
                whole = continuation(prompt, max_tokens)
                expected |= {(str(number), i): until_stop(whole) if kind == "stops" else whole for i in range(n)}
                loop.handle(ask(str(number), prompt, max_tokens, n=n, tier=tier))
            case int():
                collect(answers, loop.handle(Abort(str(move))))
            case _ if loop.has_work():
                collect(answers, loop.step())
        loop.scheduler.check()
    finish(loop, answers)

    assert all(plan.num_tokens <= max_num_seqs + spare for plan in runner.plans)
    for key, reply in expected.items():
        if answers[key].finish_reason == FinishReason.ABORT:
            assert answers[key].token_ids == reply[: len(answers[key].token_ids)]
        else:
            assert answers[key].token_ids == reply
    for name, prompt in embedded.items():
        if answers[name, 0].error is None:
            assert answers[name, 0].vector[0] / answers[name, 0].vector[1] == pytest.approx(sum(prompt) / len(prompt))
