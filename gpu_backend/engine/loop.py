# One engine step: the scheduler picks sequences and gives them room, the runner computes, the sequences accept what
# they were given, finished ones leave, and the tokens go out as events. On a device that works by itself a step is
# launched before the results of the one before are read, so that it never waits for the host.

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice

from gpu_backend.config import EngineConfig
from gpu_backend.engine.arrival import refuse_on_arrival
from gpu_backend.engine.blocks import BlockManager
from gpu_backend.engine.cost import plan_work
from gpu_backend.engine.grammar_queue import GrammarQueue
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
from gpu_backend.engine.plan import Launched, SequenceStep, StepPlan, StepResult, StepRunner, TokenLogprob
from gpu_backend.engine.prefix_hashes import shared_hashes
from gpu_backend.engine.requests import Limits, find_problem, make_sequences, refusal
from gpu_backend.engine.scheduler import Scheduler
from gpu_backend.engine.sequence import FinishReason, Sequence
from gpu_backend.engine.speculation import make_speculator
from gpu_backend.engine.swapping import SwapChoice

PATIENCE = 0.005  # seconds that an idle loop waits for a grammar
FAILURES_IN_A_ROW = 3  # steps that may raise before the device is given up


@dataclass(frozen=True, slots=True)
class _Due:
    """A step whose result is to be read."""

    plan: StepPlan
    step: Launched
    planned: float  # clock readings
    launched: float


class EngineLoop:
    """Takes commands and makes events, one step at a time. It knows neither pipes nor devices.

    ``vocab_size`` and ``eos_token_ids`` are the model's; no sequence grows beyond ``max_model_len`` tokens, which must
    fit into ``num_blocks``.

    The time of a step belongs to the sequences that it computed for, in proportion to their tokens in it: a step is one
    pass over all of them, and nothing measures apart what a prompt's token and a decode took of it. So prompt tokens
    pay like decodes, tokens found in the prefix cache pay nothing, and what a preempted sequence computes again it pays
    again. The shares of all sequences, whatever became of them, add up to the busy seconds of the load report, times
    the devices that compute each step together.

    Where steps overlap, a stop token is known when the next step is launched already: what that computes for a reply
    that has ended is dropped, and its time belongs to the others in the step; without others the device was idle.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        num_blocks: int,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarQueue | None = None,
    ) -> None:
        assert limits.max_model_len <= num_blocks * config.block_size
        longest = -(-limits.max_model_len // config.block_size)
        self.blocks = BlockManager(
            num_blocks,
            config.block_size,
            # Whatever is protected, the longest sequence alone must find room.
            num_protected=min(int(config.protected_cache_share * num_blocks), num_blocks - longest),
            shared=shared_hashes(config.shared_prefixes if config.prefix_caching else (), config.block_size),
            clock=clock,
            num_host_blocks=limits.num_host_blocks,
        )
        swapping = SwapChoice(
            config.step_cost or limits.assumed_cost, config.step_cost is not None, limits.copy_seconds
        )
        self.scheduler = Scheduler(config, self.blocks, clock, make_speculator(config, limits), swapping)
        self._swapping = swapping
        self.runner = runner
        self._config = config
        self._limits = limits
        self._clock = clock
        self._meter = LoadMeter(clock())
        self._ids = count(1)
        self._grammars = GrammarQueue(None) if grammars is None else grammars
        self._draining = False
        self._drained = False
        self._failures = 0
        self._overlaps = runner.is_asynchronous if config.async_scheduling is None else config.async_scheduling
        if self.scheduler.speculator is not None and self._overlaps:
            self.scheduler.speculator.most_ahead = runner.most_ahead
        self._due: _Due | None = None

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work() or self._due is not None or bool(self._grammars)

    def load(self) -> LoadReport:
        """Describe the engine's state."""
        return self._meter.report(self.scheduler, self.blocks, self._clock())

    def handle(self, command: Command) -> list[Event]:
        """Take a command; what can be said about it at once comes back."""
        match command:
            case Generate() | Embed():
                return self._take(command)
            case Abort(request_id, reply_index):
                leaving = self.scheduler.replies_of(request_id, reply_index)
                waiting = self._grammars.abort(request_id, reply_index)
                aborted = [self._finish(sequence, FinishReason.ABORT) for sequence in leaving]
                return [*aborted, *waiting, *self._drain_if_empty()]
            case Drain():
                self._draining = True
                return self._drain_if_empty()

    def step(self) -> list[Event]:
        """Schedule, run, accept; return what to tell whom. Raises what the runner raised once it fails repeatedly."""
        started = self._clock()
        answers = self._take_compiled()
        return [*answers, *self._compute(started), *self._drain_if_empty()]

    def _compute(self, started: float) -> list[Event]:
        events: list[Event] = []
        plan = self.scheduler.schedule(may_preempt=self._due is None)
        if plan is None:
            events += self._settle()
            plan = self.scheduler.schedule()
            assert plan is not None, "somebody gives way when nothing is due"
        launched = self._clock()
        failure: Exception | None = None
        step: Launched | None = None
        try:
            step = self.runner.launch(plan) if plan.sequences or plan.copies else None
        except Exception as error:
            failure = error
        # While the device computes, the tokens of the step before reach whoever waits for them, and their grammars.
        events += self._settle()
        if step is not None:
            self._due = _Due(plan, step, started, launched)
            try:
                step.sample()
            except Exception as error:
                failure = error
        if failure is not None:
            self._due = None
            return [*events, *self._survive(plan, failure, launched)]
        return events if self._overlaps and plan.may_be_followed else [*events, *self._settle()]

    def _settle(self) -> list[Event]:
        """Read the result that is due, if one is."""
        due, self._due = self._due, None
        if due is None:
            return []
        try:
            result = due.step.result()
        except Exception as error:
            return self._survive(due.plan, error, due.launched)
        self._failures = 0
        return self._accept(due.plan, result, due.planned)

    def _take(self, command: Generate | Embed) -> list[Event]:
        if self._draining:
            return refusal(command, "the engine is draining; send this to another replica")
        if self.scheduler.replies_of(command.request_id) or command.request_id in self._grammars:
            return refusal(command, f"request id {command.request_id!r} is already in use")
        if problem := find_problem(command, self._limits):
            return refusal(command, problem)
        if refused := refuse_on_arrival(command, self.scheduler, self._config):
            return [refused]
        replies = make_sequences(command, self._limits, self._ids, self._clock())
        for reply in replies:
            reply.arrived_step = self._meter.steps
        if isinstance(command, Generate) and command.sampling.grammar is not None:
            self._grammars.add(command, replies)
            return []
        self.scheduler.add(replies)
        return []

    def _take_compiled(self) -> list[Event]:
        """Queue the requests whose grammars are compiled; without other work, wait a moment for one."""
        answers: list[Event] = []
        for command, replies, problem in self._grammars.compiled(PATIENCE if not self.scheduler.has_work() else 0.0):
            if problem is not None:
                answers += refusal(command, problem, is_bad_grammar=True)
                continue
            self.scheduler.add(replies)
            if command.resume_token_ids and (constraint := replies[0].constraint) and constraint.is_complete:
                answers.append(self._finish(replies[0], FinishReason.STOP))
        return answers

    def _accept(self, plan: StepPlan, result: StepResult, started: float) -> list[Event]:
        events: list[Event] = []
        now = self._clock()
        # None in place of those that have ended since this was planned.
        owners = list(map(self.scheduler.running, [step.sequence_id for step in plan.sequences]))
        gains = result.counts or (1,) * len(result.token_ids)
        sizes = [step.num_tokens for step in plan.sequences]
        num_staying, gained = sum(sizes), sum(gains)
        if not all(owners):
            num_staying = sum(size for size, owner in zip(sizes, owners, strict=True) if owner)
            samplers = [owner for step, owner in zip(plan.sequences, owners, strict=True) if step.samples]
            gained = sum(gain for gain, owner in zip(gains, samplers, strict=True) if owner)
        seconds_per_token = result.seconds / max(1, num_staying)
        if self._swapping.wants(plan.step) and plan.sequences:
            self._swapping.learn(plan_work(plan.sequences), result.seconds)
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.note_step(plan, gained - len(gains), result.seconds)
        least = result.least_seconds if num_staying else 0.0
        self._meter.count_step(sum(sizes), gained, seconds_per_token * num_staying, least)
        gpu_seconds_per_token = seconds_per_token * self._config.num_ranks
        tokens = iter(result.token_ids)
        logprobs = iter(result.logprobs)
        pooled = iter(result.pooled)
        scored = iter(result.scored)
        counts = iter(gains)
        more = result.counts or result.logprobs or result.pooled or result.scored or result.failed
        is_plain = not more and self.scheduler.speculator is None
        for step, sequence, size in zip(plan.sequences, owners, sizes, strict=True):
            if is_plain and sequence is not None and sequence.first_token is not None and sequence.constraint is None:
                # As most are: another token of a reply, and nothing else. What follows comes to the same.
                sequence.gpu_seconds += gpu_seconds_per_token * size
                if step.samples:
                    events.append(self._accept_token(sequence, step, next(tokens)))
                else:  # computed again after it gave way
                    self.scheduler.advance(sequence, step.start + len(step.token_ids))
                continue
            gain = next(counts) if step.samples else 0
            new = (next(tokens),) if gain == 1 else tuple(islice(tokens, gain))
            new_logprobs = tuple(islice(logprobs, gain)) if result.logprobs else ()
            hidden_sum = next(pooled) if step.pools else ()
            scores = next(scored) if step.targets else ()
            if sequence is None:
                continue
            if sequence.admitted is None:
                sequence.admitted = started
            sequence.gpu_seconds += gpu_seconds_per_token * size
            if scores:  # what was scored before a preemption is not reported again
                sequence.prompt_scores += scores[len(sequence.prompt_scores) - step.start :]
            if sequence.is_void:
                sequence.is_void, sequence.num_awaited = False, 0
                sequence.num_computed = len(sequence.token_ids) - 1
                self.scheduler.advance(sequence, sequence.num_computed)
            elif step.sequence_id in result.failed:
                self.scheduler.distrust(sequence)
                problem = "the model's numbers for this request are not finite; change the prompt"
                events.append(self._finish(sequence, FinishReason.ERROR, problem))
            elif step.pools:
                events += self._accept_hidden(sequence, step, hidden_sum)
            elif step.samples:
                events += self._accept_tokens(sequence, step, new, new_logprobs, now)
            else:
                self.scheduler.advance(sequence, step.start + len(step.token_ids))
        return events

    def _accept_token(self, sequence: Sequence, step: SequenceStep, token: int) -> Event:
        sequence.num_awaited -= 1
        reason = sequence.append(token)
        self.scheduler.advance(sequence, step.start + len(step.token_ids))
        return NewTokens(
            sequence.request_id,
            sequence.reply_index,
            (token,),
            (),
            reason,
            sequence.cached_tokens or 0,
            sequence.gpu_seconds,
            self._leave(sequence) if reason else None,
        )

    def _accept_tokens(
        self,
        sequence: Sequence,
        step: SequenceStep,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        now: float,
    ) -> list[Event]:
        events: list[Event] = []
        if (step.num_proposed or step.draft_ids) and self.scheduler.speculator is not None:
            self.scheduler.speculator.learn(sequence, step, len(token_ids), self.blocks)
        sequence.num_awaited -= 1 + step.num_unsure
        has_text = step.num_unsure > 0 and sequence.num_told == len(sequence.token_ids)
        reason: FinishReason | None = None
        problem: str | None = None
        taken = 0
        for token in token_ids:
            constraint = sequence.constraint
            if constraint is not None and (problem := constraint.accept((token,))):
                break
            taken += 1
            reason = sequence.append(token)
            if constraint is not None and constraint.is_complete:
                reason = FinishReason.STOP
            if reason is not None:
                break
        if has_text:  # the device has kept what it accepted
            sequence.num_told = len(sequence.token_ids)
        # The last token is known, but not computed; without any, nothing that the step computed counts.
        end = len(sequence.token_ids) - 1
        if step.num_proposed or step.num_to_draft or step.slack:
            sequence.num_computed = end + sequence.num_awaited
            sequence.is_void = not token_ids and sequence.num_awaited > 0
        self.scheduler.advance(sequence, end)
        if taken:
            events.append(self._new_tokens(sequence, token_ids[:taken], logprobs[:taken], reason, now))
        if problem:
            error = f"after {sequence.num_generated} tokens, {problem}"
            events.append(self._finish(sequence, FinishReason.ERROR, error, is_bad_grammar=True))
        return events

    def _new_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        reason: FinishReason | None,
        now: float,
    ) -> Event:
        is_first = sequence.first_token is None
        if is_first:
            sequence.first_token = now
            sequence.first_token_step = self._meter.steps
        return NewTokens(
            sequence.request_id,
            sequence.reply_index,
            token_ids,
            logprobs if sequence.sampling.logprobs is not None else (),
            reason,
            sequence.cached_tokens or 0,
            sequence.gpu_seconds,
            self._leave(sequence) if reason else None,
            prompt_scores=tuple(sequence.prompt_scores) if is_first else (),
        )

    def _accept_hidden(self, sequence: Sequence, step: SequenceStep, hidden_sum: tuple[float, ...]) -> list[Event]:
        """Add a chunk's hidden states to an embedding; with the last chunk, pool and normalise them."""
        so_far = sequence.hidden_sum or [0.0] * len(hidden_sum)
        sequence.hidden_sum = [a + b for a, b in zip(so_far, hidden_sum, strict=True)]
        end = step.start + len(step.token_ids)
        if end < sequence.num_prompt:
            self.scheduler.advance(sequence, end)
            return []
        # The mean's divisor cancels out against the norm.
        length = math.hypot(*sequence.hidden_sum) or 1.0
        vector = tuple(value / length for value in sequence.hidden_sum)
        return [Embedding(sequence.request_id, vector, self._leave(sequence))]

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, *, is_bad_grammar: bool = False
    ) -> Event:
        """Let a sequence go without another token."""
        if sequence.pools:
            return Embedding(sequence.request_id, (), self._leave(sequence), error or "the request was aborted")
        return NewTokens(
            request_id=sequence.request_id,
            reply_index=sequence.reply_index,
            token_ids=(),
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            gpu_seconds=sequence.gpu_seconds,
            timings=self._leave(sequence),
            error=error,
            is_bad_grammar=is_bad_grammar,
        )

    def _leave(self, sequence: Sequence) -> Timings:
        """Free what a sequence holds, and say where its time went."""
        self.scheduler.remove(sequence)
        self._meter.finished += 1
        end = self._clock()
        admitted = end if sequence.admitted is None else sequence.admitted
        first_token = end if sequence.first_token is None else sequence.first_token
        steps = self._meter.steps if sequence.first_token_step is None else sequence.first_token_step
        return Timings(
            queue_ms=(admitted - sequence.arrived) * 1e3,
            prefill_ms=(first_token - admitted) * 1e3,
            decode_ms=(end - first_token) * 1e3,
            gpu_seconds=sequence.gpu_seconds,
            first_token_steps=steps - sequence.arrived_step,
        )

    def _staying(self, plan: StepPlan) -> list[tuple[SequenceStep, Sequence]]:
        """Return the sequences of a step that have not ended since it was planned."""
        owners = [(step, self.scheduler.running(step.sequence_id)) for step in plan.sequences]
        return [(step, sequence) for step, sequence in owners if sequence is not None]

    def _survive(self, plan: StepPlan, error: Exception, launched: float) -> list[Event]:
        """Fail the sequences of a step that raised, and go on; a device that keeps failing is given up.

        Its sequences used the device, whatever they got for it, so its time is booked.
        """
        seconds = self._clock() - launched
        staying = self._staying(plan)
        num_tokens = sum(step.num_tokens for step, _ in staying)
        self._meter.count_failed_step(seconds if staying else 0.0)
        for step, sequence in staying:
            sequence.gpu_seconds += seconds / num_tokens * step.num_tokens * self._config.num_ranks
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            raise RuntimeError(f"{self._failures} steps in a row failed") from error
        problem = f"the engine could not compute this request ({type(error).__name__}: {error}); try again"
        self.scheduler.distrust_copies(plan.copies)
        for _, sequence in staying:
            self.scheduler.distrust(sequence)
        return [self._finish(sequence, FinishReason.ERROR, problem) for _, sequence in staying]

    def _drain_if_empty(self) -> list[Event]:
        if not self._draining or self._drained or self.has_work():
            return []
        self._drained = True
        return [Drained()]
