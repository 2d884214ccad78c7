# One engine step: the scheduler picks sequences and gives them room, the runner computes, the sequences accept what
# they were given, finished ones leave, and the tokens go out as events.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Protocol

from gpu_backend.config import EngineConfig
from gpu_backend.engine.blocks import BlockManager
from gpu_backend.engine.load import LoadMeter
from gpu_backend.engine.messages import (
    Abort,
    Command,
    Drain,
    Drained,
    Embed,
    Embedding,
    Event,
    Generate,
    LoadReport,
    NewTokens,
    Timings,
)
from gpu_backend.engine.plan import SequenceStep, StepPlan, StepResult, TokenLogprob
from gpu_backend.engine.scheduler import TIERS, Scheduler
from gpu_backend.engine.sequence import FinishReason, SamplingParams, Sequence

FAILURES_IN_A_ROW = 3  # steps that may raise before the device is given up


class StepRunner(Protocol):
    """Computes step plans; the real one is ``runner.Runner``."""

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...


class EngineLoop:
    """Takes commands and makes events, one step at a time. It knows neither pipes nor devices.

    ``vocab_size`` and ``eos_token_ids`` are the model's; no sequence grows beyond ``max_model_len`` tokens, which must
    fit into ``num_blocks``.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert max_model_len <= num_blocks * config.block_size
        self.blocks = BlockManager(num_blocks, config.block_size)
        self.scheduler = Scheduler(config, self.blocks)
        self.runner = runner
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._clock = clock
        self._meter = LoadMeter(clock())
        self._ids = count(1)
        self._draining = False
        self._drained = False
        self._failures = 0

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work()

    def load(self) -> LoadReport:
        """Describe the engine's state."""
        return self._meter.report(self.scheduler, self.blocks, self._clock())

    def handle(self, command: Command) -> list[Event]:
        """Take a command; what can be said about it at once comes back."""
        match command:
            case Generate() | Embed():
                problem = "the engine is draining; send this to another replica" if self._draining else None
                problem = problem or self._problem(command)
                if problem:
                    return _refusal(command, problem)
                self.scheduler.add(self._sequences(command))
                return []
            case Abort(request_id, reply_index):
                leaving = self.scheduler.replies_of(request_id, reply_index)
                return [self._finish(sequence, FinishReason.ABORT) for sequence in leaving] + self._drain_if_empty()
            case Drain():
                self._draining = True
                return self._drain_if_empty()

    def step(self) -> list[Event]:
        """Schedule, run, accept; return what to tell whom. Raises what the runner raised once it fails repeatedly."""
        started = self._clock()
        plan = self.scheduler.schedule()
        try:
            result = self.runner.run(plan)
        except Exception as error:
            return self._survive(plan, error)
        self._failures = 0
        return [*self._accept(plan, result, started), *self._drain_if_empty()]

    def _accept(self, plan: StepPlan, result: StepResult, started: float) -> Iterator[Event]:
        now = self._clock()
        seconds_per_token = result.seconds / plan.num_tokens
        self._meter.count_step(plan.num_tokens, len(result.token_ids), result.seconds)
        tokens = iter(result.token_ids)
        logprobs = iter(result.logprobs or (None,) * len(result.token_ids))
        pooled = iter(result.pooled)
        for step in plan.sequences:
            sequence = self.scheduler.running(step.sequence_id)
            if sequence.admitted is None:
                sequence.admitted = started
            sequence.gpu_seconds += seconds_per_token * len(step.token_ids)
            token, logprob = (next(tokens), next(logprobs)) if step.samples else (None, None)
            hidden_sum = next(pooled) if step.pools else ()
            if step.sequence_id in result.failed:
                self.scheduler.distrust(sequence)
                problem = "the model's numbers for this request are not finite; change the prompt"
                yield self._finish(sequence, FinishReason.ERROR, problem)
                continue
            if step.pools:
                yield from self._accept_hidden(sequence, step, hidden_sum)
            elif token is None:
                self.scheduler.advance(sequence, len(step.token_ids))
            else:
                yield self._accept_token(sequence, step, token, logprob, now)

    def _accept_token(
        self, sequence: Sequence, step: SequenceStep, token: int, logprob: TokenLogprob | None, now: float
    ) -> NewTokens:
        reason = sequence.append(token, self._max_model_len)
        self.scheduler.advance(sequence, len(step.token_ids))
        if sequence.first_token is None:
            sequence.first_token = now
        return NewTokens(
            request_id=sequence.request_id,
            reply_index=sequence.reply_index,
            token_ids=(token,),
            logprobs=(logprob,) if logprob is not None else (),
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            timings=self._leave(sequence) if reason else None,
        )

    def _accept_hidden(self, sequence: Sequence, step: SequenceStep, hidden_sum: tuple[float, ...]) -> Iterator[Event]:
        """Add a chunk's hidden states to an embedding; with the last chunk, pool and normalise them."""
        so_far = sequence.hidden_sum or [0.0] * len(hidden_sum)
        sequence.hidden_sum = [a + b for a, b in zip(so_far, hidden_sum, strict=True)]
        if sequence.remaining > len(step.token_ids):
            self.scheduler.advance(sequence, len(step.token_ids))
            return
        # The mean's divisor cancels out against the norm.
        length = math.hypot(*sequence.hidden_sum) or 1.0
        vector = tuple(value / length for value in sequence.hidden_sum)
        yield Embedding(sequence.request_id, vector, self._leave(sequence))

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> Event:
        """Let a sequence go without another token."""
        if sequence.pools:
            return Embedding(sequence.request_id, (), self._leave(sequence), error or "the request was aborted")
        return NewTokens(
            request_id=sequence.request_id,
            reply_index=sequence.reply_index,
            token_ids=(),
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            timings=self._leave(sequence),
            error=error,
        )

    def _leave(self, sequence: Sequence) -> Timings:
        """Free what a sequence holds, and say where its time went."""
        self.scheduler.remove(sequence)
        self._meter.finished += 1
        end = self._clock()
        admitted = end if sequence.admitted is None else sequence.admitted
        first_token = end if sequence.first_token is None else sequence.first_token
        return Timings(
            queue_ms=(admitted - sequence.arrived) * 1e3,
            prefill_ms=(first_token - admitted) * 1e3,
            decode_ms=(end - first_token) * 1e3,
            gpu_seconds=sequence.gpu_seconds,
        )

    def _survive(self, plan: StepPlan, error: Exception) -> list[Event]:
        """Fail the sequences of a step that raised, and go on; a device that keeps failing is given up."""
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            raise RuntimeError(f"{self._failures} steps in a row failed") from error
        problem = f"the engine could not compute this request ({type(error).__name__}: {error}); try again"
        failed = [self.scheduler.running(step.sequence_id) for step in plan.sequences]
        for sequence in failed:
            self.scheduler.distrust(sequence)
        return [*(self._finish(sequence, FinishReason.ERROR, problem) for sequence in failed), *self._drain_if_empty()]

    def _drain_if_empty(self) -> list[Event]:
        if not self._draining or self._drained or self.scheduler.has_work():
            return []
        self._drained = True
        return [Drained()]

    def _problem(self, command: Generate | Embed) -> str | None:
        """Say why a request can never be served, or None."""
        known = command.prompt_token_ids
        if isinstance(command, Generate):
            known += command.resume_token_ids
            if command.n < 1 or (command.n > 1 and command.resume_token_ids):
                return f"n is {command.n}; it is at least 1, and exactly 1 to resume a reply"
            if len(command.resume_token_ids) >= command.sampling.max_tokens:
                return f"max_tokens is {command.sampling.max_tokens}; it must be more than the resumed tokens"
        room = self._max_model_len if isinstance(command, Embed) else self._max_model_len - 1
        if not command.prompt_token_ids:
            return "the prompt is empty; it needs at least one token"
        if len(known) > room:
            return f"the prompt has {len(known)} tokens; this engine takes at most {room}"
        if not 0 <= min(known) <= max(known) < self._vocab_size:
            return f"the prompt has token ids outside the vocabulary of {self._vocab_size}"
        if command.tier not in TIERS:
            return f"the tier is {command.tier!r}; it is one of {', '.join(TIERS)}"
        if self.scheduler.replies_of(command.request_id):
            return f"request id {command.request_id!r} is already in use"
        return None

    def _sequences(self, command: Generate | Embed) -> list[Sequence]:
        """Make the sequences of a request, one per reply."""
        now = self._clock()
        if isinstance(command, Embed):
            nothing = SamplingParams(max_tokens=0)
            return [self._sequence(command, nothing, now, 0, pools=True)]
        sampling = command.sampling
        if not sampling.ignore_eos:
            sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | self._eos_token_ids)
        replies = [self._sequence(command, sampling, now, index) for index in range(command.n)]
        replies[0].token_ids.extend(command.resume_token_ids)
        return replies

    def _sequence(
        self, command: Generate | Embed, sampling: SamplingParams, now: float, index: int, pools: bool = False
    ) -> Sequence:
        return Sequence(
            sequence_id=next(self._ids),
            request_id=command.request_id,
            prompt_token_ids=command.prompt_token_ids,
            sampling=sampling,
            arrived=now,
            reply_index=index,
            tenant=command.tenant,
            weight=command.weight if isinstance(command, Generate) else 1.0,
            tier=command.tier,
            pools=pools,
        )


def _refusal(command: Generate | Embed, problem: str) -> list[Event]:
    """Answer every reply that was asked for."""
    if isinstance(command, Embed):
        return [Embedding(command.request_id, error=problem)]
    return [
        NewTokens(command.request_id, index, (), finish_reason=FinishReason.ERROR, error=problem)
        for index in range(max(command.n, 1))
    ]
