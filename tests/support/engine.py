# Runs an engine loop inside the test, step by step, and checks its books after every one.

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.graph_sizes import draws_plainly, is_decode
from gpu_backend.execution.runner import Runner
from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.decode_rows import StateTensors
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.kv_transfer.seam import BlockStore, KvTransfer
from gpu_backend.lora.loading import load_adapters
from gpu_backend.models.config.model import load_model_config
from gpu_backend.sampling.verification import num_gained
from gpu_backend.scheduling.forecast import WINDOW
from gpu_backend.scheduling.grammar_queue import GrammarQueue
from gpu_backend.step.config import KvEventsConfig, engine_config
from gpu_backend.step.cost import ASSUMED_COSTS, StepCost
from gpu_backend.step.grammar import Constraint, GrammarCompiler
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Command, Embedding, Event, FinishReason, Generate, NewTokens
from gpu_backend.step.plan import UNKNOWN, AtOnce, SequenceOutput, SequenceStep, StepPlan, StepResult
from gpu_backend.step.sampling_params import Grammar, SamplingParams
from gpu_backend.step.sequence import Sequence

CPU = torch.device("cpu")
DRAFT_SHARE = 0.05  # tiny draft models are as large as their models; drafting must seem to pay all the same
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@dataclass
class Answer:
    """Everything that came back for one reply."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    events: list[NewTokens] = field(default_factory=list)
    vector: tuple[float, ...] = ()


class CountingRunner(AtOnce):
    """Computes nothing: a sequence's next token is a hash of the tokens it sees, gathered through its block table.

    Like a real KV cache it remembers what was written to which slot, so a wrong table or a stolen block shows as a
    wrong token.
    """

    def __init__(self, block_size: int) -> None:
        self.plans: list[StepPlan] = []
        self.seconds: Callable[[StepPlan], float] = lambda plan: 0.001  # what a step takes of the virtual clock
        self._block_size = block_size
        self.slots: dict[int, int] = {}
        self._host_slots: dict[int, int] = {}
        self._sampled: dict[int, int] = {}  # by row
        self._starts: dict[int, int] = {}  # by row, where the next step begins
        self._texts: dict[int, dict[int, int]] = {}  # by row, the tokens that the device was told, by position
        self._draft_slots: dict[int, int] = {}
        self.draft_is_right = 1.0  # the chance that a draft's token is the one that will be sampled
        self._dice = random.Random(0)

    def run(self, plan: StepPlan) -> StepResult:
        """Write the step's tokens to their slots, then read every sampling sequence's context back."""
        self.plans.append(plan)
        for copy in plan.copies:
            origin, goal = (self.slots, self._host_slots) if copy.to_host else (self._host_slots, self.slots)
            for i in range(self._block_size):
                source, target = copy.source * self._block_size + i, copy.target * self._block_size + i
                goal.pop(target, None)
                if source in origin:  # a block that was swapped need not be full
                    goal[target] = origin[source]
        plan = replace(plan, sequences=tuple(self._draft(step) if step.draft_ids else step for step in plan.sequences))
        is_ahead = plan.is_ahead
        if is_ahead:
            assert len(plan.sequences) <= self.most_ahead, "more sequences than the device drafts for"
            assert is_decode(plan) and all(map(draws_plainly, plan.sequences)), "the device alone cannot compute it"
            plan = replace(plan, sequences=tuple(map(self._place, plan.sequences)))
        for step in plan.sequences:
            for position, token in enumerate(step.token_ids, step.start):
                token = self._sampled[step.row] if token == UNKNOWN else token
                self.slots[self._slot(step.block_table, position)] = token
        outputs: list[SequenceOutput] = []
        for step in plan.sequences:
            tokens: tuple[int, ...] = ()
            if step.samples:
                end = step.start + len(step.token_ids)
                context = [self.slots[self._slot(step.block_table, i)] for i in range(end)]
                sampled = [next_token(context[:i]) for i in range(end - step.num_draft_tokens, end + 1)]
                tokens = tuple(sampled[: num_gained(step, sampled)])
                self._sampled[step.row] = tokens[-1]
                self._starts[step.row] = step.start + len(tokens)
                if is_ahead:
                    self._texts[step.row] |= dict(enumerate(tokens, step.start + 1))
            hidden = (float(sum(step.token_ids)), float(len(step.token_ids))) if step.pools else ()
            outputs.append(SequenceOutput(tokens, hidden_sum=hidden))
        return StepResult(plan.step, (), self.seconds(plan), tuple(outputs))

    def _place(self, step: SequenceStep) -> SequenceStep:
        """Say where a step begins, and draft: the runner knows, whatever the host does."""
        start = self._starts[step.row] if step.slack else step.start
        assert step.start - step.slack <= start <= step.start, "a step begins where it was not expected"
        last = self._sampled[step.row] if step.token_ids[0] == UNKNOWN else step.token_ids[0]
        text = self._texts.setdefault(step.row, {})
        text |= dict(enumerate(memoryview(step.text).cast("i"), step.text_start))
        text[start] = last
        seen = [self.slots[self._slot(step.block_table, i)] for i in range(start)]
        if step.num_unsure:
            assert [text.get(i) for i in range(start + 1)] == [*seen, last], "the device has not seen all of the text"
        seen.append(last)
        for _ in range(step.num_unsure):
            seen.append(next_token(seen) if self._dice.random() < self.draft_is_right else 251)
        return replace(step, start=start, token_ids=tuple(seen[start:]))

    def _draft(self, step: SequenceStep) -> SequenceStep:
        """Write what a draft model would, check that it then has seen the whole reply, and draft."""
        end = step.draft_start
        for token in step.draft_ids:
            self._draft_slots[self._slot(step.block_table, end)] = token
            end += 1
        if not step.num_to_draft:
            return step
        seen = [self._draft_slots[self._slot(step.block_table, i)] for i in range(end)]
        known = [self.slots[self._slot(step.block_table, i)] for i in range(step.start)]
        assert seen == [*known, *step.token_ids], "the draft model has not seen all of the reply"
        for count in range(step.num_to_draft):
            if count:
                self._draft_slots[self._slot(step.block_table, end + count - 1)] = seen[-1]
            seen.append(next_token(seen) if self._dice.random() < self.draft_is_right else 251)
        return replace(step, token_ids=step.token_ids + tuple(seen[end:]), num_draft_tokens=step.num_to_draft)

    def _slot(self, block_table: tuple[int, ...], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size


def next_token(context: Iterable[int]) -> int:
    """Return what ``CountingRunner`` makes of a context."""
    return zlib.crc32(repr(list(context)).encode()) % 250


def continuation(prompt: Iterable[int], length: int) -> list[int]:
    """Return the reply that ``CountingRunner`` must give to a prompt."""
    tokens, start = list(prompt), len(list(prompt))
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[start:]


def counting_loop(
    num_blocks: int,
    max_model_len: int | None = None,
    num_host_blocks: int = 0,
    copy_seconds: float | None = None,
    is_forced: bool = True,
    assumed_cost: StepCost = ASSUMED_COSTS["cuda"],
    most_ahead: int = 0,
    runner: CountingRunner | None = None,
    kv_events: KvEventsConfig | None = None,
    transfer: KvTransfer | None = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> tuple[EngineLoop, CountingRunner]:
    """Build a loop over a ``CountingRunner``; ``settings`` go to ``EngineConfig``.

    Unless ``is_forced`` is false, drafts are made whether they pay or not; for up to ``most_ahead`` decodes by the
    runner itself, ahead of results.
    """
    config = replace(engine_config(model="", **settings), kv_events=kv_events or KvEventsConfig())
    runner = runner or CountingRunner(config.cache.block_size)
    runner.most_ahead = most_ahead
    length = max_model_len or num_blocks * config.cache.block_size
    limits = Limits(
        length,
        vocab_size=256,
        num_host_blocks=num_host_blocks,
        draft_share=DRAFT_SHARE,
        copy_seconds=copy_seconds,
        assumed_cost=assumed_cost,
    )
    loop = EngineLoop(config, runner, num_blocks, limits, clock, transfer=transfer)
    if loop.scheduler.speculator is not None:
        loop.scheduler.speculator.economics.is_forced = is_forced
    return loop, runner


class WaitingCompiler(GrammarCompiler):
    """Compiles before it answers."""

    def compile(self, grammar: Grammar) -> Future[Constraint]:
        compiled = super().compile(grammar)
        wait([compiled])
        return compiled


def model_loop(
    folder: Path,
    copy_seconds: float | None = None,
    transfer: Callable[[BlockStore], KvTransfer] | None = None,
    **settings: Any,
) -> EngineLoop:
    """Build a loop over a real model on the CPU; ``settings`` go to ``EngineConfig``.

    Drafts are made whether they pay or not, and grammars are compiled while a request is handed over, so that no test
    depends on what steps and threads take here.
    """
    config = engine_config(model=str(folder), device="cpu", **settings)
    model = load_model_config(folder)
    runner = Runner(config, model)
    limits = Limits(
        runner.max_model_len,
        model.vocab_size,
        model.eos_token_ids,
        runner.num_host_blocks,
        draft_share=DRAFT_SHARE,
        copy_seconds=copy_seconds,
    )
    compiler = WaitingCompiler(folder, model.vocab_size, model.eos_token_ids)
    adapters = load_adapters(config.lora, runner.adapters, model)
    grammars = GrammarQueue(compiler)
    exchange = transfer(runner.block_store(config)) if transfer is not None else None
    loop = EngineLoop(
        config, runner, runner.num_blocks, limits, grammars=grammars, adapters=adapters, transfer=exchange
    )
    if loop.scheduler.speculator is not None:
        loop.scheduler.speculator.economics.is_forced = True
    return loop


def expect_short_replies(loop: EngineLoop) -> None:
    """Make the forecast wrong, so that more is admitted than fits: only then is anybody preempted."""
    for _ in range(WINDOW):
        loop.scheduler.admission.forecast.learn(1)


def draft_from(loop: EngineLoop, replies: Mapping[tuple[str, int], Iterable[int]], share: float, seed: int = 0) -> None:
    """Make a loop's drafts known replies, by (request, reply), each token right with a chance of ``share``."""
    dice = random.Random(seed)
    known = {key: list(tokens) for key, tokens in replies.items()}

    def propose(sequence: Sequence, count: int) -> tuple[int, ...]:
        made = sequence.num_generated
        right = known[sequence.request.request_id, sequence.reply_index][made : made + count]
        return tuple(token if dice.random() < share else (token + 1) % 250 for token in right)

    assert loop.scheduler.speculator is not None
    loop.scheduler.speculator.draft_source = propose


def drafts_in(loop: EngineLoop, step: SequenceStep) -> tuple[int, ...]:
    """Return the drafts of a step that its draft model has completed: the device alone may know them."""
    if not step.num_unsure:
        return step.token_ids[step.num_known :]
    assert isinstance(loop.runner, Runner)
    known = loop.runner._device_state.on_device.drafts[step.row, : step.num_draft_tokens]
    return tuple(known.tolist())


def scripted_drafts(
    commands: Iterable[Generate],
    replies: Mapping[tuple[str, int], Iterable[int]],
    share: float,
    device: torch.device = CPU,
) -> Callable[[Tensor, StateTensors, int], None]:
    """Return what makes drafts on the device out of known replies, each token right with a chance of ``share``.

    It stands in for ``graphs.propose``. StateTensors are told apart by their prompts' first tokens.
    """
    dice = random.Random(0)
    script = torch.zeros(256, 512, dtype=torch.long)
    for command in commands:
        text = [*command.prompt_token_ids, *replies[command.request_id, 0]]
        own = [token if dice.random() < share else (token + 1) % 250 for token in text]
        script[text[0], : len(own)] = torch.tensor(own)
    with torch.inference_mode():
        script = upload(script, device, torch.long)

    def propose(inputs: Tensor, state: StateTensors, width: int) -> None:
        ops.propose_drafts(inputs, state, width)
        row, start = inputs[:, 0], inputs[:, 1]
        start = torch.where(start == UNKNOWN, state.starts.index_select(0, row), start)
        where = start[:, None] + 1 + torch.arange(state.drafts.shape[1], device=inputs.device)
        names = state.texts[:, 0].index_select(0, row).long()
        state.drafts.index_copy_(0, row, script[names[:, None], where.clamp(max=511)])

    return propose


def answer_all(loop: EngineLoop, commands: Iterable[Command]) -> dict[tuple[str, int], Answer]:
    """Give the loop all commands at once, step until nothing is left, and return the answers by (request, reply)."""
    answers: dict[tuple[str, int], Answer] = {}
    for command in commands:
        collect(answers, loop.handle(command))
        loop.scheduler.check()
    finish(loop, answers)
    return answers


def finish(loop: EngineLoop, answers: dict[tuple[str, int], Answer], max_steps: int = 10_000) -> None:
    """Step until nothing is left, with a check of the books after each step."""
    for _ in range(max_steps):
        if not loop.has_work():
            assert loop.blocks.num_in_use == 0
            return
        collect(answers, loop.step())
        loop.scheduler.check()
    raise AssertionError(f"the engine is not done after {max_steps} steps")


def collect(answers: dict[tuple[str, int], Answer], events: Iterable[Event]) -> None:
    """File events under the reply they belong to."""
    for event in events:
        if isinstance(event, NewTokens):
            answer = answers.setdefault((event.request_id, event.reply_index), Answer())
            assert answer.finish_reason is None, "an event came after the last one"
            answer.token_ids += event.token_ids
            answer.finish_reason, answer.error = event.finish_reason, event.error
            answer.events.append(event)
        elif isinstance(event, Embedding):
            answers[event.request_id, 0] = Answer(vector=event.vector, error=event.error)


def greedy(request_id: str, prompt: Iterable[int], max_tokens: int = 20, **fields: Any) -> Generate:
    """Ask for the likeliest reply to a prompt."""
    return Generate(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0), **fields)
