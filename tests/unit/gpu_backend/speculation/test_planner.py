# Speculation in the scheduler and the loop, over a runner that only counts: same tokens, fewer steps, books in order.

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.step.cost import ASSUMED_COSTS
from gpu_backend.step.messages import Abort, Embed, FinishReason, Generate
from gpu_backend.step.plan import StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.composition import APART, ENGINE_FEATURES, EXACT, OFF
from tests.support.engine import (
    Answer,
    CountingRunner,
    answer_all,
    collect,
    continuation,
    counting_loop,
    draft_from,
    expect_short_replies,
    finish,
    greedy,
)

ON: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 4}
DRAFT: dict[str, Any] = {"speculative_method": "draft", "speculative_model": "small", "num_speculative_tokens": 4}


def test_every_field_of_a_request_is_declared() -> None:
    """Who adds a field says what speculation makes of it."""
    of_messages = {"request_id", "prompt_token_ids", "prompt_marks", "cache_salt", "sampling", "first_reply"}
    asked = {field.name for struct in (SamplingParams, Generate) for field in fields(struct) if field.init}

    assert asked - of_messages <= EXACT.keys() | OFF.keys()
    assert not EXACT.keys() & OFF.keys()


def test_the_table_in_the_documentation_is_the_one_in_the_code() -> None:
    """docs/speculation.md lists every feature, and why."""
    text = (Path(__file__).parents[4] / "docs" / "speculation.md").read_text()

    for feature, why in EXACT.items():
        assert f"| {feature} | exact | {why} |\n" in text
    for feature, why in OFF.items():
        assert f"| {feature} | off | {why} |\n" in text
    for pair, why in APART.items():
        assert f"| {', '.join(sorted(pair))} | {why} |\n" in text
    assert all(f"`{feature}`" in text for feature in ENGINE_FEATURES)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=7),
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_blocks=st.integers(15, 40),
    budget=st.integers(8, 40),
    abort_at=st.integers(1, 12),
    seed=st.integers(0, 3),
    method=st.sampled_from(["ngram", "draft"]),
)
def test_replies_are_those_without_drafts(
    lengths: list[tuple[int, int]], share: float, num_blocks: int, budget: int, abort_at: int, seed: int, method: str
) -> None:
    """Random prompts, budgets, preemption and an abort: each reply is what it must be, and every block comes back."""
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 6, "block_size": 4}
    speculation = ON if method == "ngram" else DRAFT
    loop, runner = counting_loop(num_blocks, max_model_len=60, num_host_blocks=seed * 5, **settings, **speculation)
    expect_short_replies(loop)
    prompts = [tuple((seed + 7 * i + j) % 50 for j in range(length)) for i, (length, _) in enumerate(lengths)]
    expected = {
        (str(i), 0): continuation(prompt, count)
        for i, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True))
    }
    runner.draft_is_right = share
    if method == "ngram":
        draft_from(loop, expected, share, seed)
    answers: dict[tuple[str, int], Answer] = {}
    for i, (prompt, (_, count)) in enumerate(zip(prompts, lengths, strict=True)):
        tier = "batch" if i % 3 == 2 else "interactive"
        collect(answers, loop.handle(greedy(str(i), prompt, count, tier=tier, tenant=f"t{i % 2}")))
    for _ in range(abort_at):
        collect(answers, loop.step())
        loop.scheduler.check()
    collect(answers, loop.handle(Abort("0")))
    loop.scheduler.check()
    finish(loop, answers)

    for key, tokens in expected.items():
        got = answers[key]
        assert got.token_ids == tokens[: len(got.token_ids)]
        assert got.finish_reason == FinishReason.LENGTH or key == ("0", 0)
    assert all(plan.num_tokens <= budget for plan in runner.plans)


def test_drafts_are_counted_by_their_place() -> None:
    """The load report has what vLLM's metrics call drafts, draft tokens and accepted tokens."""
    loop, _ = counting_loop(64, block_size=4, **ON)
    expected = continuation(range(5), 21)
    draft_from(loop, {("x", 0): expected}, 1.0)
    answer_all(loop, [greedy("x", range(5), 21)])

    counters = loop.load().counters

    assert (counters["drafts"], counters["draft_tokens"], counters["accepted_tokens"]) == (4, 16, 16)
    assert [counters[f"accepted_tokens_at_{place}"] for place in range(4)] == [4, 4, 4, 4]
    assert counters["generated_tokens"] == 21
    assert "drafts" not in counting_loop(4)[0].load().counters


def test_drafts_that_hold_save_steps() -> None:
    """With four right drafts a step, twenty tokens take four steps and the prompt's."""
    loop, runner = counting_loop(64, block_size=4, **ON)
    draft_from(loop, {("x", 0): continuation(range(5), 21)}, 1.0)

    answer = answer_all(loop, [greedy("x", range(5), 21)])["x", 0]

    assert answer.token_ids == continuation(range(5), 21)
    assert [len(event.token_ids) for event in answer.events] == [1, 5, 5, 5, 5]
    assert len(runner.plans) == 5


def test_every_running_reply_gets_its_token_while_another_speculates() -> None:
    """Drafts come on top: every decode is in every step, and prompts keep the budget that they have without."""
    size = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    loop, runner = counting_loop(64, **size, **ON)
    plain, plain_runner = counting_loop(64, **size)
    commands = [greedy("quick", range(5), 21), greedy("slow", range(50, 58), 21), greedy("long", range(40), 3)]
    draft_from(loop, {("quick", 0): continuation(range(5), 21), ("slow", 0): (), ("long", 0): ()}, 1.0)

    answers = answer_all(loop, commands)

    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in answer_all(plain, commands).items()
    }
    assert first_tokens(runner) == first_tokens(plain_runner)
    begin = first_tokens(runner)[2]
    assert all(any(s.sequence_id == 2 for s in plan.sequences) for plan in runner.plans[begin : begin + 21])
    assert any(s.num_draft_tokens for plan in runner.plans for s in plan.sequences)


def first_tokens(runner: CountingRunner) -> dict[int, int]:
    """Return the step in which each sequence got its first token."""
    steps = [(s.sequence_id, i) for i, plan in enumerate(runner.plans) for s in plan.sequences if s.samples]
    return dict(reversed(steps))


def test_drafts_never_reach_beyond_the_last_token() -> None:
    """max_tokens and the context's end: no position is computed that no token can have."""
    loop, runner = counting_loop(8, max_model_len=30, block_size=4, **ON)
    expected = continuation(range(5), 25)
    draft_from(loop, {("short", 0): expected, ("full", 0): expected}, 1.0)

    answers = answer_all(loop, [greedy("short", range(5), 7), greedy("full", range(5), 100)])

    assert answers["short", 0].token_ids == expected[:7]
    assert answers["full", 0].token_ids == expected
    ends = [(s.sequence_id, s.start + len(s.token_ids)) for plan in runner.plans for s in plan.sequences]
    assert max(end for id_, end in ends if id_ == 1) == 5 + 7 - 1
    assert max(end for id_, end in ends if id_ == 2) == 30 - 1


def test_a_reply_that_stops_inside_drafts_ends_there() -> None:
    """A stop token among the drafts is sampled by the place before it; nothing after it is computed or said."""
    expected = continuation(range(5), 20)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=frozenset({expected[7]}))
    loop, runner = counting_loop(32, block_size=4, **ON)
    draft_from(loop, {("x", 0): expected}, 1.0)

    answer = answer_all(loop, [Generate("x", tuple(range(5)), sampling)])["x", 0]

    length = expected.index(expected[7]) + 1
    assert answer.token_ids == expected[:length]
    assert answer.finish_reason == FinishReason.STOP
    assert max(s.start + len(s.token_ids) for plan in runner.plans for s in plan.sequences) == 5 + length - 1


def test_rejected_drafts_are_never_cached() -> None:
    """With one token a block, each draft fills one: what can be found afterwards is the reply, and nothing else."""
    expected = continuation(range(5), 23)
    loop, _ = counting_loop(64, block_size=1, **ON)
    draft_from(loop, {("x", 0): expected}, 0.5)

    answer_all(loop, [greedy("x", range(5), 23)])

    assert loop.scheduler.speculator is not None
    assert 0 < loop.scheduler.speculator.num_held < loop.scheduler.speculator.num_draft_tokens
    assert len(loop.blocks.device.by_key) == 5 + 22
    again = answer_all(loop, [greedy("y", (*range(5), *expected), 1)])["y", 0]
    assert again.events[0].cached_tokens == 5 + 22


def test_drafts_take_no_block_that_a_running_reply_may_need() -> None:
    """Without a spare block for each running reply, drafts stay within the blocks that are there."""
    tight, tight_runner = counting_loop(8, block_size=4, max_model_len=24, **ON)
    roomy, roomy_runner = counting_loop(9, block_size=4, max_model_len=24, **ON)
    expected = {("x", 0): continuation(range(9), 8), ("y", 0): continuation(range(30, 39), 8)}
    commands = [greedy("x", range(9), 8), greedy("y", range(30, 39), 8)]
    firsts = []
    for loop, runner in ((tight, tight_runner), (roomy, roomy_runner)):
        draft_from(loop, expected, 1.0)
        expect_short_replies(loop)
        assert {k: a.token_ids for k, a in answer_all(loop, commands).items()} == expected
        firsts.append([s.num_draft_tokens for s in runner.plans[1].sequences])

    assert firsts == [[2, 2], [4, 2]]  # twelve positions are there; a block more is only for who leaves two over


def test_batch_work_drafts_within_its_cap() -> None:
    """Tokens of the batch tier, drafts included, stay below max_batch_tier_tokens."""
    loop, runner = counting_loop(64, block_size=4, max_batch_tier_tokens=6, **ON)
    replies = {(str(i), 0): continuation(range(i, i + 5), 12) for i in range(3)}
    draft_from(loop, replies, 1.0)

    answers = answer_all(loop, [greedy(str(i), range(i, i + 5), 12, tier="batch") for i in range(3)])

    assert {k: a.token_ids for k, a in answers.items()} == replies
    drafting = [plan.num_tokens for plan in runner.plans if any(s.num_draft_tokens for s in plan.sequences)]
    assert max(drafting) == 6


def test_embeddings_get_no_drafts() -> None:
    """There is nothing to draft."""
    loop, runner = counting_loop(64, block_size=4, **ON)

    answer_all(loop, [Embed("e", tuple(range(3)) * 6)])

    assert not any(s.num_draft_tokens for plan in runner.plans for s in plan.sequences)


def seconds_on_a_gpu(plan: StepPlan) -> float:
    """A step waits for the weights up to 16 tokens."""
    return 0.01 * max(1.0, plan.num_tokens / 16)


def seconds_on_a_cpu(plan: StepPlan) -> float:
    """One token is a product with a vector; from the second on a token takes little more (docs/speculation.md)."""
    drafts = plan.num_tokens - len(plan.sequences)
    if len(plan.sequences) == 1:
        return 0.021 + 0.0007 * plan.num_tokens if drafts else 0.014
    return 0.0155 + 0.003 * len(plan.sequences) + 0.0015 * drafts


CLOCKS = {"cpu": seconds_on_a_cpu, "cuda": seconds_on_a_gpu}


def speed(device: str, replies: int, share: float, speculation: dict[str, Any], rounds: int = 6) -> float:
    """Return the tokens a virtual second of one engine that serves that many replies at once, several times."""
    loop, runner = counting_loop(400, block_size=4, is_forced=False, assumed_cost=ASSUMED_COSTS[device], **speculation)
    runner.seconds = CLOCKS[device]
    for number in range(rounds):
        expected = {(f"{number}.{i}", 0): continuation(range(i, i + 5), 40) for i in range(replies)}
        if speculation:
            draft_from(loop, expected, share, seed=number)
        answers = answer_all(loop, [greedy(f"{number}.{i}", range(i, i + 5), 40) for i in range(replies)])
        assert {key: answer.token_ids for key, answer in answers.items()} == expected
    decoding = [plan for plan in runner.plans if not any(step.start == 0 for step in plan.sequences)]
    return rounds * replies * 39 / sum(runner.seconds(plan) for plan in decoding)


@pytest.mark.parametrize(
    ("device", "replies", "share", "least", "most"),
    [
        ("cpu", 1, 0.0, 0.95, 1.0),  # each attempt takes 0.7 of a step
        ("cpu", 1, 0.25, 0.95, 1.0),  # forced, it would be 0.76
        ("cpu", 1, 0.75, 1.4, 1.8),
        ("cpu", 1, 1.0, 2.4, 2.9),
        ("cpu", 8, 0.25, 0.94, 1.0),  # forced 0.6
        ("cpu", 8, 0.75, 1.15, 1.4),
        ("cpu", 8, 1.0, 1.9, 2.3),  # by the assumed costs alone none would be made
        ("cuda", 1, 1.0, 3.9, 5.0),  # five tokens a step, which takes no longer
        ("cuda", 1, 0.0, 0.99, 1.0),  # below the knee wrong drafts take no time
        ("cuda", 12, 0.0, 0.95, 1.0),
        ("cuda", 16, 1.0, 0.95, 1.0),  # where even right ones would not pay
    ],
)
def test_drafts_are_made_where_they_pay(device: str, replies: int, share: float, least: float, most: float) -> None:
    """By a virtual clock that the engine knows nothing of, against the same replies without drafts."""
    assert least <= speed(device, replies, share, ON) / speed(device, replies, share, {}) <= most


def test_drafting_follows_the_device() -> None:
    """Where drafts come to take longer than they are worth, they end; where they are quick again, they return."""
    expected = continuation(range(5), 2000)
    loop, runner = counting_loop(1000, max_model_len=3000, block_size=4, is_forced=False, **ON)
    draft_from(loop, {("x", 0): expected}, 0.9)
    shares = []
    loop.handle(greedy("x", range(5), 2000))
    for with_drafts, steps in ((0.012, 100), (0.06, 300), (0.012, 500)):
        runner.seconds = lambda plan, dear=with_drafts: 0.01 if plan.num_tokens == 1 else dear  # type: ignore[misc]
        for _ in range(steps):
            loop.step()
        shares.append(sum(plan.num_tokens > 1 for plan in runner.plans[-60:]) / 60)

    assert shares[0] > 0.9
    assert shares[1] < 0.1
    assert shares[2] > 0.9


def test_draft_model_catches_up_before_it_drafts() -> None:
    """It computes a prompt in its first step with a reply, in parts where that is much, and then drafts."""
    loop, runner = counting_loop(64, block_size=4, max_num_batched_tokens=12, max_num_seqs=2, **DRAFT)

    answer = answer_all(loop, [greedy("x", range(30), 11)])["x", 0]

    steps = [step for plan in runner.plans for step in plan.sequences]
    assert answer.token_ids == continuation(range(30), 11)
    assert [(s.draft_start, len(s.draft_ids), s.num_to_draft) for s in steps if s.draft_ids] == [
        (0, 11, 0),
        (11, 11, 0),
        (22, 11, 1),
        (33, 2, 4),
    ]


def test_draft_model_computes_what_is_cached_no_second_time() -> None:
    """A prompt whose blocks it has seen is found by both; one that came back from host memory it computes anew."""
    loop, runner = counting_loop(12, block_size=4, num_host_blocks=20, **DRAFT)
    first = answer_all(loop, [greedy("x", range(16), 10)])["x", 0].token_ids
    again, drafted = (*range(16), *first), []
    for prompt in (again, range(50, 90), again):
        runner.plans.clear()
        answer_all(loop, [greedy("y", prompt, 5)])
        drafted.append(next(s.draft_start for plan in runner.plans for s in plan.sequences if s.draft_ids))

    assert drafted == [24, 0, 0]


def test_draft_model_rests_while_its_drafts_do_not_pay() -> None:
    """Wrong drafts end it but for probes; what it missed it computes when it is tried again."""
    loop, runner = counting_loop(60, block_size=4, is_forced=False, **DRAFT)
    runner.draft_is_right = 0.0

    answer = answer_all(loop, [greedy("x", range(5), 150)])["x", 0]

    passes = [step for plan in runner.plans for step in plan.sequences if step.draft_ids]
    assert answer.token_ids == continuation(range(5), 150)
    assert len(passes) < 20
    assert max(len(step.draft_ids) for step in passes) > 30


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_drafts_that_fail_are_given_up_and_tried_again(share: float) -> None:
    """A reply whose drafts fail is asked less and less often; the probes never end."""
    loop, runner = counting_loop(600, block_size=4, is_forced=False, **ON, max_num_batched_tokens=300)
    runner.seconds = seconds_on_a_cpu
    draft_from(loop, {("x", 0): continuation(range(5), 600)}, share)

    answer_all(loop, [greedy("x", range(5), 600)])

    drafting = [i for i, plan in enumerate(runner.plans) for s in plan.sequences if s.num_draft_tokens]
    if share == 0.0:
        gaps = [b - a for a, b in zip(drafting[-4:], drafting[-3:], strict=False)]
        assert len(drafting) < 30
        assert gaps == sorted(gaps)
        assert gaps[-1] >= 64
    else:
        assert len(runner.plans) < 600
