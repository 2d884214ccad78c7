# Who runs when, and that nothing is lost: the scheduler and the loop over a runner that only counts.

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.scheduling.forecast import WINDOW
from gpu_backend.step.messages import Abort, Drain, Drained, Embed, FinishReason, Generate, NewTokens
from gpu_backend.step.plan import DeviceLost
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import Answer, answer_all, collect, continuation, counting_loop, finish, greedy


def planned(runner_plan: object) -> list[tuple[int, int]]:
    """Return (tokens, start) of each sequence in a plan."""
    return [(len(step.token_ids), step.start) for step in runner_plan.sequences]  # type: ignore[attr-defined]


def test_running_decodes_come_before_prefill_chunks() -> None:
    """A long prompt is cut to what the budget leaves after one token for each running decode."""
    loop, runner = counting_loop(64, max_num_batched_tokens=20, max_num_seqs=4, block_size=4)
    loop.handle(greedy("a", range(3)))
    loop.handle(greedy("b", range(10, 14)))
    loop.step()
    loop.handle(greedy("long", range(100, 145)))

    loop.step()
    loop.step()
    loop.step()

    assert planned(runner.plans[1]) == [(1, 3), (1, 4), (18, 0)]
    assert planned(runner.plans[2]) == [(1, 4), (1, 5), (18, 18)]
    assert planned(runner.plans[3]) == [(1, 5), (1, 6), (9, 36)]
    assert [step.samples for step in runner.plans[2].sequences] == [True, True, False]


def test_requests_join_and_leave_at_every_step() -> None:
    """A finished sequence's place is taken in the very next step."""
    loop, runner = counting_loop(64, max_num_batched_tokens=16, max_num_seqs=2, block_size=4)
    for name, length in (("a", 1), ("b", 3), ("c", 1)):
        loop.handle(greedy(name, range(4), length))

    finish(loop, {})

    assert [len(plan.sequences) for plan in runner.plans] == [2, 2, 1]


def test_interactive_requests_are_admitted_before_batch_ones() -> None:
    """Within a tier the queue is first in, first out; an interactive request passes every waiting batch request."""
    loop, runner = counting_loop(64, max_num_batched_tokens=16, max_num_seqs=1, block_size=4)
    order = (("b1", "batch"), ("b2", "batch"), ("i1", "interactive"), ("i2", "interactive"))
    for length, (name, tier) in enumerate(order, 4):
        loop.handle(greedy(name, range(20 * length, 21 * length), 1, tier=tier))

    finish(loop, {})

    assert [len(plan.sequences[0].token_ids) for plan in runner.plans] == [6, 7, 4, 5]


def test_latest_admitted_gives_way_and_keeps_its_place() -> None:
    """When blocks run out, the youngest running sequence is computed again later, before those that came after it."""
    loop, _ = counting_loop(6, max_num_batched_tokens=64, max_num_seqs=3, block_size=4)
    for _ in range(WINDOW):
        loop.scheduler.admission.forecast.learn(1)  # what comes is not expected
    finished: list[str] = []
    for name, start in (("old", 0), ("young", 50), ("later", 100)):
        loop.handle(greedy(name, range(start, start + 7), 13))

    answers: dict[tuple[str, int], Answer] = {}
    while loop.has_work():
        events = loop.step()
        collect(answers, events)
        finished += [e.request_id for e in events if isinstance(e, NewTokens) and e.finish_reason]
        loop.scheduler.check()

    assert loop.scheduler.running.num_preempted >= 1
    assert finished == ["old", "young", "later"]
    for name, start in (("old", 0), ("young", 50), ("later", 100)):
        assert answers[name, 0].token_ids == continuation(range(start, start + 7), 13)


def test_prefix_is_computed_once_per_tenant() -> None:
    """A prompt's full blocks are found by the same tenant's next request, and by no other tenant's; one with a salt by
    those of its tenant with the same."""
    loop, runner = counting_loop(64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)
    prompt = range(11)
    answers = answer_all(loop, [greedy("first", prompt, 1, tenant="blue")])
    answers |= answer_all(loop, [greedy("same", prompt, 1, tenant="blue")])
    answers |= answer_all(loop, [greedy("other", prompt, 1, tenant="red")])
    for number, (tenant, salt) in enumerate((("blue", "a"), ("blue", "a"), ("blue", "b"), ("red", "a"))):
        answers |= answer_all(loop, [greedy(f"salted {number}", prompt, 1, tenant=tenant, cache_salt=salt)])

    assert [plan.num_tokens for plan in runner.plans] == [11, 3, 11, 11, 3, 11, 11]
    assert [each.events[0].cached_tokens for each in answers.values()] == [0, 8, 0, 0, 8, 0, 0]


def test_last_prompt_token_is_always_computed() -> None:
    """A prompt that is wholly cached still has its last block computed, so that there are logits to sample from."""
    loop, runner = counting_loop(64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)

    answers = answer_all(loop, [greedy("first", range(8), 2)]) | answer_all(loop, [greedy("second", range(8), 2)])

    assert planned(runner.plans[2]) == [(4, 4)]
    assert answers["second", 0].token_ids == answers["first", 0].token_ids


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_replies_of_one_request_share_the_prompt(prefix_caching: bool) -> None:
    """With n replies the prompt's full blocks are computed and held once; each reply's rest is its own."""
    loop, runner = counting_loop(
        64, max_num_batched_tokens=8, max_num_seqs=8, block_size=4, prefix_caching=prefix_caching
    )
    loop.handle(greedy("r", range(18), 4, n=3))
    answers: dict[tuple[str, int], Answer] = {}

    for _ in range(4):
        collect(answers, loop.step())
        loop.scheduler.check()
    in_use = loop.blocks.num_in_use
    finish(loop, answers)

    assert [plan.num_tokens for plan in runner.plans[:4]] == [8, 8, 2, 1 + 2 + 2]
    assert in_use == 4 + 3
    assert [answers["r", i].token_ids for i in range(3)] == [continuation(range(18), 4)] * 3


def test_without_prefix_caching_requests_share_nothing() -> None:
    """Two requests of one tenant with the same prompt are computed apart."""
    loop, runner = counting_loop(64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4, prefix_caching=False)

    answer_all(loop, [greedy("a", range(11), 1)])
    answer_all(loop, [greedy("b", range(11), 1)])

    assert [plan.num_tokens for plan in runner.plans] == [11, 11]


def test_abort_frees_the_blocks_before_the_next_step() -> None:
    """An aborted reply says so once, and what it held is available at once."""
    loop, runner = counting_loop(20, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)
    loop.handle(greedy("stays", range(5)))
    loop.handle(greedy("leaves", range(20, 40)))
    loop.step()
    before = loop.blocks.num_in_use

    events = loop.handle(Abort("leaves"))
    loop.scheduler.check()
    loop.step()

    assert before - loop.blocks.num_in_use == 5
    assert [(e.request_id, e.finish_reason) for e in events if isinstance(e, NewTokens)] == [
        ("leaves", FinishReason.ABORT)
    ]
    assert len(runner.plans[1].sequences) == 1


def test_abort_of_the_first_reply_hands_the_prompt_to_the_next() -> None:
    """The other replies do not depend on the one that computes the prompt for them."""
    loop, _ = counting_loop(64, max_num_batched_tokens=8, max_num_seqs=8, block_size=4)
    loop.handle(greedy("r", range(18), 4, n=3))
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.step())

    collect(answers, loop.handle(Abort("r", 0)))
    loop.scheduler.check()
    finish(loop, answers)

    assert answers["r", 0].finish_reason == FinishReason.ABORT
    assert [answers["r", i].token_ids for i in (1, 2)] == [continuation(range(18), 4)] * 2


def test_abort_of_a_stranger_is_ignored() -> None:
    """An abort may cross with the last token: then there is nothing to do."""
    loop, _ = counting_loop(16, block_size=4)

    assert loop.handle(Abort("nobody")) == []


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (greedy("x", ()), "empty"),
        (greedy("x", range(64)), "at most 63"),
        (greedy("x", (1, 256)), "vocabulary"),
        (greedy("x", (1, -1)), "vocabulary"),
        (greedy("x", (1, 2), tier="vip"), "tier"),
        (greedy("x", (1, 2), n=0), "n is 0"),
        (greedy("x", (1, 2), n=2, resume_token_ids=(3,)), "resume"),
        (greedy("x", (1, 2), 2, resume_token_ids=(3, 4)), "max_tokens"),
        (Generate("x", (1,), SamplingParams(4, temperature=-0.5)), "temperature"),
        (Generate("x", (1,), SamplingParams(4, temperature=float("nan"))), "temperature"),
        (Generate("x", (1,), SamplingParams(4, top_p=1.5)), "top_p"),
        (Generate("x", (1,), SamplingParams(4, min_p=-0.1)), "min_p"),
        (Generate("x", (1,), SamplingParams(4, top_k=-1)), "top_k"),
        (Generate("x", (1,), SamplingParams(0)), "max_tokens"),
        (Embed("x", ()), "empty"),
        (Embed("x", tuple(range(65))), "at most 64"),
    ],
)
def test_request_that_can_never_be_served_fails_alone(command: Generate | Embed, word: str) -> None:
    """The refusal says what is wrong and touches no other."""
    loop, _ = counting_loop(16, block_size=4)
    loop.handle(greedy("bystander", range(5), 3))

    answers = answer_all(loop, [command])

    assert word in (answers["x", 0].error or "")
    assert answers["bystander", 0].token_ids == continuation(range(5), 3)


def test_reply_ends_where_the_context_is_full() -> None:
    """A sequence stops with ``length`` at the model's last position, whatever max_tokens allows."""
    loop, _ = counting_loop(4, block_size=4)

    answers = answer_all(loop, [greedy("x", range(13), 100)])

    assert answers["x", 0].token_ids == continuation(range(13), 3)
    assert answers["x", 0].finish_reason == FinishReason.LENGTH


def test_stop_token_ends_the_reply_and_is_its_last_token() -> None:
    """The stop token is reported, so that the reply can be continued and counted."""
    loop, _ = counting_loop(16, block_size=4)
    expected = continuation(range(5), 4)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=frozenset({expected[-1]}))

    answers = answer_all(loop, [Generate("x", tuple(range(5)), sampling)])

    assert answers["x", 0].token_ids == expected
    assert answers["x", 0].finish_reason == FinishReason.STOP


def test_resumed_reply_goes_on_where_the_other_replica_stopped() -> None:
    """Resumed tokens count to max_tokens, are not reported again, and are followed by what would have followed."""
    loop, _ = counting_loop(16, block_size=4)
    whole = continuation(range(5), 8)

    answers = answer_all(loop, [greedy("x", range(5), 8, resume_token_ids=tuple(whole[:3]))])

    assert answers["x", 0].token_ids == whole[3:]


def test_newcomer_is_not_let_into_the_room_that_running_ones_need_next() -> None:
    """Admission leaves a block for each running sequence, so that it is not thrown out again at once."""
    loop, runner = counting_loop(6, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)
    loop.handle(greedy("a", range(8), 5))
    loop.handle(greedy("b", range(50, 57), 2))
    loop.step()
    loop.handle(greedy("c", range(100, 104), 1))

    finish(loop, {})

    assert loop.scheduler.running.num_preempted == 0
    assert [len(plan.sequences) for plan in runner.plans] == [2, 2, 2, 1, 1]


def test_embedding_finds_nothing_in_the_cache_and_leaves_nothing() -> None:
    """Its hidden states are needed at every token, and its blocks are seldom asked for again."""
    loop, runner = counting_loop(64, max_num_batched_tokens=64, max_num_seqs=4, block_size=4)

    for command in (Embed("e", tuple(range(12))), greedy("g", range(12), 1), Embed("e", tuple(range(12)))):
        answer_all(loop, [command])

    assert [plan.num_tokens for plan in runner.plans] == [12, 12, 12]


def test_draining_engine_finishes_and_takes_nothing_new() -> None:
    """``Drained`` comes once, after the last reply; later requests are refused."""
    loop, _ = counting_loop(16, block_size=4)
    loop.handle(greedy("runs", range(5), 2))
    assert loop.handle(Drain()) == []

    refused = loop.handle(greedy("late", range(5)))
    events = [*loop.step(), *loop.step()]

    assert "draining" in (refused[0].error or "")  # type: ignore[union-attr]
    assert events[-1] == Drained()
    assert loop.handle(Drain()) == []


def test_timings_tell_waiting_from_computing() -> None:
    """A reply's last event has its times, and its share of every step by tokens."""
    loop, _ = counting_loop(64, max_num_batched_tokens=16, max_num_seqs=2, block_size=4)

    answers = answer_all(loop, [greedy("a", range(12), 3), greedy("b", range(50, 54), 3)])

    first, second = (answers[name, 0].events[-1].timings for name in "ab")
    assert first is not None and second is not None
    assert first.gpu_seconds == pytest.approx(0.001 * (12 / 16 + 1 / 2 + 1 / 2))
    assert first.gpu_seconds + second.gpu_seconds == pytest.approx(0.003)
    assert min(first.queue_ms, first.prefill_ms, first.decode_ms) >= 0


def test_step_that_raises_fails_its_sequences_and_the_engine_goes_on() -> None:
    """An error on the device costs the requests of that step; one that stays ends the engine."""
    loop, runner = counting_loop(16, block_size=4)
    compute = runner.run

    def fail(plan: object) -> None:
        raise RuntimeError("out of memory")

    runner.run = fail  # type: ignore[method-assign, assignment]
    loop.handle(greedy("unlucky", range(5)))
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.step())
    runner.run = compute  # type: ignore[method-assign]
    answers |= answer_all(loop, [greedy("next", range(5), 3)])

    assert "out of memory" in (answers["unlucky", 0].error or "")
    assert answers["next", 0].token_ids == continuation(range(5), 3)


def test_device_that_keeps_failing_is_given_up() -> None:
    """After three failing steps in a row the error ends the process, so that it can be started anew."""
    loop, runner = counting_loop(16, block_size=4)
    runner.run = lambda plan: 1 // 0  # type: ignore[method-assign, assignment, return-value]

    with pytest.raises(RuntimeError, match="3 steps"):
        for name in "abc":
            loop.handle(greedy(name, range(5)))
            loop.step()


@pytest.mark.parametrize("overlaps", [False, True])
def test_lost_device_is_given_up_at_once(overlaps: bool) -> None:
    """No caller is told that a request failed alone: what starts the engine anew goes on with all of them."""
    loop, runner = counting_loop(16, block_size=4, async_scheduling=overlaps)

    def lose(plan: object) -> None:
        raise DeviceLost("rank 0 failed")

    runner.run = lose  # type: ignore[method-assign, assignment]
    loop.handle(greedy("a", range(5)))

    with pytest.raises(DeviceLost, match="rank 0 failed"):
        loop.step()


requests = st.tuples(
    st.integers(1, 30),  # prompt length
    st.integers(0, 3),  # which of four prompt families
    st.integers(1, 14),  # max_tokens
    st.integers(1, 3),  # n
    st.sampled_from(["interactive", "batch"]),
    st.sampled_from(["", "blue"]),
    st.booleans(),  # an embedding instead
)
moves = st.lists(st.one_of(requests, st.integers(0, 12), st.just("step")), max_size=50)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(12, 30), st.integers(1, 5), st.integers(0, 20))
def test_every_reply_is_right_whatever_the_load(
    script: list[object], num_blocks: int, max_num_seqs: int, spare: int
) -> None:
    """Under any mix of arrivals, aborts and shortage, books balance and each reply is what it would be alone."""
    loop, runner = counting_loop(
        num_blocks, 44, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + spare
    )
    answers: dict[tuple[str, int], Answer] = {}
    asked: dict[tuple[str, int], tuple[range, int]] = {}
    embedded: dict[str, range] = {}
    aborted: set[str] = set()
    for number, move in enumerate(script):
        if isinstance(move, tuple):
            length, family, max_tokens, n, tier, tenant, embeds = move
            prompt = range(family * 50, family * 50 + length)
            name = str(number)
            if embeds:
                embedded[name] = prompt
                loop.handle(Embed(name, tuple(prompt), tenant, tier))
            else:
                asked |= {(name, i): (prompt, max_tokens) for i in range(n)}
                loop.handle(greedy(name, prompt, max_tokens, n=n, tier=tier, tenant=tenant))
        elif isinstance(move, int):
            aborted.add(str(move))
            collect(answers, loop.handle(Abort(str(move))))
        elif loop.has_work():
            collect(answers, loop.step())
        loop.scheduler.check()
    finish(loop, answers)

    assert all(plan.num_tokens <= max_num_seqs + spare and plan.sequences for plan in runner.plans)
    for key, (prompt, max_tokens) in asked.items():
        expected = continuation(prompt, max_tokens)
        if answers[key].finish_reason == FinishReason.ABORT:
            assert key[0] in aborted
            assert answers[key].token_ids == expected[: len(answers[key].token_ids)]
        else:
            assert answers[key].token_ids == expected
    for name, prompt in embedded.items():
        if answers[name, 0].error is None:
            assert answers[name, 0].vector[0] / answers[name, 0].vector[1] == pytest.approx(sum(prompt) / len(prompt))
