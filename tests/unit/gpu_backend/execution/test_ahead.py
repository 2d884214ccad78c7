# Steps that are planned before it is known how many drafts of the last one held: the device knows where they begin,
# the host plans for the most and corrects itself a step later. Replies are what they are without drafts.

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import speculating
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution import graphs
from gpu_backend.execution.device_state import DeviceState
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels import reference_decoding
from gpu_backend.models.config.model import load_model_config
from gpu_backend.speculation.economics import first_come
from gpu_backend.speculation.prompt_lookup import PLACES, find_drafts
from gpu_backend.step.cost import StepCost
from gpu_backend.step.messages import Abort, Embed, FinishReason, Generate
from gpu_backend.step.plan import UNKNOWN, SequenceOutput, StepPlan, StepResult
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import (
    CPU,
    Answer,
    CountingRunner,
    answer_all,
    collect,
    continuation,
    counting_loop,
    expect_short_replies,
    finish,
    greedy,
    model_loop,
    scripted_drafts,
)
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("qwen"), TinyModel("Qwen3ForCausalLM", head_dim=24))


STOPS = frozenset(range(2, 256, 9))  # of the tokens that ``CountingRunner`` makes


def ahead_loop(num_blocks: int = 64, right: float = 1.0, **fields: Any) -> tuple[EngineLoop, CountingRunner]:
    """Build a loop whose runner drafts by itself, each draft right with that chance."""
    fields = {"block_size": 4, "num_speculative_tokens": 3, "most_ahead": 8} | fields
    loop, runner = counting_loop(num_blocks, speculative_method="ngram", async_scheduling=True, **fields)
    runner.draft_is_right = right
    return loop, runner


def until_stop(reply: list[int]) -> list[int]:
    """Cut a reply behind its first stop token."""
    ends = [index for index, token in enumerate(reply) if token in STOPS]
    return reply[: ends[0] + 1] if ends else reply


@pytest.mark.parametrize("right", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_next_step_is_launched_before_it_is_known_what_held(right: float) -> None:
    """Whatever share of drafts holds: every step follows the last one's unread drafts until the end is near."""
    loop, runner = ahead_loop(right=right)
    launched: list[int] = []
    read: list[int] = []
    accept = loop._output_processor.accept

    def note(plan: StepPlan, result: StepResult, started: float) -> Any:
        launched.append(len(runner.plans))
        read.append(plan.step)
        return accept(plan, result, started)

    loop._output_processor.accept = note  # type: ignore[method-assign]
    answers = answer_all(loop, [greedy("a", range(5), 40), greedy("b", range(9), 40)])

    assert answers["a", 0].token_ids == continuation(range(5), 40)
    assert answers["b", 0].token_ids == continuation(range(9), 40)
    assert sum(count > step for count, step in zip(launched, read, strict=True)) >= len(read) - 12
    assert sum(step.slack > 0 for plan in runner.plans for step in plan.sequences) > 10
    assert loop.load().counters["accepted_tokens"] >= 40 * right
    if right == 1:
        assert len(runner.plans) < 20
    assert loop.load().counters["generated_tokens"] == 80


def test_reply_that_ended_counts_for_no_loss_of_drafts() -> None:
    """What a step computes for a reply that has ended already tells nothing of what drafts bring."""
    loop, _ = ahead_loop(right=0.0)
    speculator = loop.scheduler.speculator
    assert speculator is not None
    note_step, gains = speculator.economics.note_result, []

    def note(plan: StepPlan, num_gained: int, seconds: float) -> None:
        gains.append(num_gained)
        note_step(plan, num_gained, seconds)

    speculator.economics.note_result = note  # type: ignore[method-assign]
    sampling = SamplingParams(40, temperature=0.0, stop_token_ids=STOPS)
    answers = answer_all(loop, [Generate(str(i), tuple(range(i, i + 6)), sampling) for i in range(3)])

    assert FinishReason.STOP in {answer.finish_reason for answer in answers.values()}
    assert set(gains) == {0}


def test_a_stop_within_what_held_ends_the_reply_there() -> None:
    """Tokens behind it, and the step that follows them already, reach neither reply, cache nor anyone's bill."""
    loop, runner = ahead_loop()
    whole = continuation(range(6), 40)
    reply = until_stop(whole)
    assert 2 < len(reply) < 40
    sampling = SamplingParams(40, temperature=0.0, stop_token_ids=STOPS)

    answer = answer_all(loop, [Generate("x", tuple(range(6)), sampling)])["x", 0]
    turn = (*range(6), *reply, *whole[len(reply) : len(reply) + 9])
    following = answer_all(loop, [greedy("y", turn, 3)])["y", 0]

    assert (answer.token_ids, answer.finish_reason) == (reply, FinishReason.STOP)
    assert following.events[0].cached_tokens <= (6 + len(reply) - 1) // 4 * 4
    assert following.token_ids == continuation(turn, 3)
    assert any(step.slack for plan in runner.plans for step in plan.sequences)


def test_who_asks_for_more_than_the_device_knows_brings_the_host_back() -> None:
    """While a reply with penalties runs, or while a request waits, draft tokens are the host's and wait for results."""
    loop, runner = ahead_loop(max_num_seqs=2)
    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = lambda sequence, count: (7,) * count
    penalised = Generate("p", tuple(range(7)), SamplingParams(6, temperature=0.0, presence_penalty=0.5))

    answers = answer_all(loop, [greedy("a", range(5), 40), penalised, greedy("b", range(9), 20)])

    assert answers["a", 0].token_ids == continuation(range(5), 40)
    assert answers["p", 0].token_ids == continuation(range(7), 6)
    assert answers["b", 0].token_ids == continuation(range(9), 20)
    ahead = [any(step.num_unsure for step in plan.sequences) for plan in runner.plans]
    with_p = [any(step.sampling.presence_penalty for step in plan.sequences) for plan in runner.plans]
    assert any(ahead) and any(with_p) and not any(a and p for a, p in zip(ahead, with_p, strict=True))
    assert any(step.num_draft_tokens and not step.num_unsure for plan in runner.plans for step in plan.sequences)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_a_model_says_the_same_whatever_share_of_drafts_holds(
    qwen: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, drawn and filtered, stopped, crowded and preempted, with no number left in any block by others."""
    plain = SamplingParams(40, temperature=0.9)
    wishes = (plain, replace(plain, temperature=0.0), replace(plain, top_p=0.7, top_k=30),
              replace(plain, stop_token_ids=frozenset(range(30))))  # fmt: skip
    commands = [Generate(str(i), tuple(range(9 * i, 11 * i + 8)), replace(wishes[i % 4], seed=i)) for i in range(8)]
    expected = answer_all(model_loop(qwen, max_num_seqs=4), commands)
    script = scripted_drafts(commands, {key: answer.token_ids for key, answer in expected.items()}, share)
    monkeypatch.setattr(graphs, "propose", script)
    loop = model_loop(
        qwen, max_num_seqs=4, num_kv_blocks=40, block_size=4, max_model_len=80, cuda_graphs=True,
        async_scheduling=True, speculative_method="ngram", num_speculative_tokens=3,
    )  # fmt: skip
    assert isinstance(loop.runner, Runner)
    with torch.inference_mode():
        loop.runner.kv_cache[:, :40] = float("nan")
    expect_short_replies(loop)

    answers = answer_all(loop, commands)

    assert {k: a.token_ids for k, a in answers.items()} == {k: a.token_ids for k, a in expected.items()}
    assert {k: a.finish_reason for k, a in answers.items()} == {k: a.finish_reason for k, a in expected.items()}
    assert loop.scheduler.running.num_preempted > 0
    counters = loop.load().counters
    assert counters["draft_tokens"] > 60
    assert counters["accepted_tokens"] >= 0.7 * share**2 * counters["draft_tokens"]


def test_the_device_drafts_what_the_host_would() -> None:
    """What followed the longest match, the last of equal ones, or a repetition; both look at all places of few."""
    dice, compared = random.Random(3), 0
    for _ in range(200):
        text = [dice.randrange(4) for _ in range(dice.randrange(4, 30))] * dice.choice((1, 1, 2))
        requests = DeviceState(1, 1, 0, CPU, max_drafts=5, text_window=64).on_device
        requests.texts[0, : len(text)] = torch.tensor(text)
        reference_decoding.propose_drafts(torch.tensor([[0, len(text) - 1, 2, 1, -1, 0, text[-1], -1]]), requests, 2)
        expected = find_drafts(bytearray(array("i", text).tobytes()), 5) or (text[-1],) * 5
        places = sum(text[i : i + 3] == text[-3:] for i in range(len(text) - 3))
        if places <= PLACES:
            assert requests.drafts[0].tolist() == list(expected), text
            compared += places > 0
    assert compared > 60


def test_steps_overlap_where_drafts_cannot_pay() -> None:
    """Tokens are waited for when drafts may pay, once in so many steps to try again, and in no other."""
    loop, runner = ahead_loop(most_ahead=0, is_forced=False, step_cost=StepCost(1e-3, 0.0, 1.0, 0.0, 0.0))
    runner.seconds = lambda plan: 1e-3 + plan.num_tokens
    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = lambda sequence, count: (7,) * count

    answers = answer_all(loop, [greedy("a", range(5), 200)])

    assert answers["a", 0].token_ids == continuation(range(5), 200)
    decodes = [plan.sequences[0] for plan in runner.plans[2:]]
    waited = [step.token_ids[0] != UNKNOWN for step in decodes]
    assert 1 <= sum(waited) <= 6 and sum(step.num_draft_tokens > 0 for step in decodes) <= 3


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_acceptance_is_forced_on_the_device_too(qwen: Path, share: float) -> None:
    """The benchmark's drafts hold with the chance that it says, so that its break-even is one."""
    vocab = load_model_config(qwen).vocab_size
    with speculating.known_text(vocab, CPU) as right_of_1000:
        loop = model_loop(qwen, max_num_seqs=2, cuda_graphs=True, async_scheduling=True, **speculating.SETTINGS)
        speculating.draft(loop, share, vocab, right_of_1000)
        answer_all(loop, [greedy(str(i), range(i, 12 + i), 100) for i in range(2)])
    counters = loop.load().counters

    a_step = 1 + counters["accepted_tokens"] / counters["drafts"]
    assert a_step == pytest.approx(sum(share**i for i in range(5)), rel=0.15)


class Poisoned(CountingRunner):
    """Some steps' numbers are none, for one sequence: what follows them on the device is garbage."""

    def __init__(self, block_size: int, share: float) -> None:
        super().__init__(block_size)
        self.share = share
        self.poisoned = 0

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step, and spoil what it found out for some of those that have drafts or follow some."""
        result = super().run(plan)
        outputs = list(result.outputs)
        for place, step in enumerate(plan.sequences):
            if step.samples and (step.num_draft_tokens or step.slack) and self._dice.random() < self.share:
                self._sampled[step.row] = 252
                self._texts.pop(step.row, None)
                outputs[place] = SequenceOutput()
                self.poisoned += 1
        return replace(result, outputs=tuple(outputs))

    def _place(self, step: Any) -> Any:
        if self._texts.get(step.row) is None and step.slack:  # the garbage that follows
            self._texts[step.row] = dict(enumerate(self.slots.get(self._slot(step.block_table, i), 0)
                                                   for i in range(self._starts[step.row])))  # fmt: skip
        return super()._place(step)


def test_numbers_that_are_none_cost_a_reply_two_steps_and_further_drafts() -> None:
    """What the device made of them is dropped, and computed again from what the host knows."""
    runner = Poisoned(4, 0.2)
    loop, _ = ahead_loop(right=0.8, runner=runner)
    commands = [greedy(str(i), range(i, 9 + 2 * i), 30) for i in range(6)]

    answers = answer_all(loop, commands)

    assert runner.poisoned >= 3
    for i in range(6):
        assert answers[str(i), 0].token_ids == continuation(range(i, 9 + 2 * i), 30)


@settings(max_examples=60, deadline=None)
@given(dice=st.randoms(use_true_random=False), right=st.sampled_from([0.0, 0.3, 0.7, 1.0]), drafts=st.integers(1, 5))
def test_replies_are_what_they_are_without(dice: random.Random, right: float, drafts: int) -> None:
    """Crowded, preempted, stopped, aborted, with prompts cached and longer than a step, and embeddings between them."""
    loop, _ = ahead_loop(
        dice.choice((14, 40)), right, num_speculative_tokens=drafts, max_num_seqs=dice.choice((1, 3, 8)),
        max_num_batched_tokens=dice.choice((16, 64)), most_ahead=dice.choice((2, 8)), max_model_len=48,
        num_host_blocks=dice.choice((0, 8)),
    )  # fmt: skip
    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = lambda sequence, count: (7,) * count
    if dice.random() < 0.5:
        expect_short_replies(loop)
    if dice.random() < 0.5:  # some steps want no drafts, and then overlap
        economics: Any = loop.scheduler.speculator.economics
        economics.is_forced = False
        economics._can_afford = lambda frame, number: dice.random() < 0.5
        economics.choose = lambda frame, offers, most, number, is_alone: first_come(offers, most)
    commands: list[Generate | Embed] = []
    for i in range(dice.randrange(1, 9)):
        prompt = (*range(8), *(dice.randrange(4) for _ in range(dice.randrange(1, 12))))[dice.choice((0, 6)) :]
        stops = STOPS if dice.random() < 0.3 else frozenset()
        sampling = SamplingParams(dice.randrange(1, 28), temperature=0.0, stop_token_ids=stops)
        tier = dice.choice(("interactive", "interactive", "batch"))
        command = Generate(str(i), prompt, sampling, n=dice.choice((1, 1, 2)), tier=tier)
        commands.append(command if dice.random() < 0.9 else Embed(str(i), prompt))
    answers: dict[tuple[str, int], Answer] = {}
    aborted = set()
    for command in commands:
        collect(answers, loop.handle(command))
        for _ in range(dice.choice((0, 0, 1, 5))):
            collect(answers, loop.step())
            loop.scheduler.check()
        if dice.random() < 0.1:
            aborted.add(command.request_id)
            collect(answers, loop.handle(Abort(command.request_id)))
    finish(loop, answers)

    for command in commands:
        if isinstance(command, Embed) or command.request_id in aborted:
            continue
        for index in range(command.n):
            reply = continuation(command.prompt_token_ids, command.sampling.max_tokens)
            expected = until_stop(reply) if command.sampling.stop_token_ids else reply
            assert answers[command.request_id, index].token_ids == expected
