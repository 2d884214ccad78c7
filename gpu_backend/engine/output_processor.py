# What a step's result means for its sequences: they take the tokens that they were given, those that end leave, the
# step's time is shared out, and events go to the callers.

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from gpu_backend.scheduling.load import LoadMeter
from gpu_backend.scheduling.scheduler import Scheduler
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import plan_work
from gpu_backend.step.messages import Embedding, Event, FinishReason, NewTokens, Timings
from gpu_backend.step.plan import SequenceOutput, SequenceStep, StepPlan, StepResult, TokenLogprob
from gpu_backend.step.sequence import Sequence
from gpu_backend.step.transfer import HeldBlocks


class OutputProcessor:
    """The output processor: records results and makes events.

    The time of a step belongs to the sequences that it computed for, in proportion to their tokens in it: a step is one
    pass over all of them, and nothing measures apart what a prompt's token and a decode took of it. So prompt tokens
    pay like decodes, tokens found in the prefix cache pay nothing, and what a preempted sequence computes again it pays
    again. The shares of all sequences, whatever became of them, add up to the busy seconds of the load report, times
    the devices that compute each step together.

    Where steps overlap, a stop token is known when the next step is launched already: what that computes for a reply
    that has ended is dropped, and its time belongs to the others in the step; without others the device was idle.
    """

    def __init__(
        self, config: EngineConfig, scheduler: Scheduler, meter: LoadMeter, clock: Callable[[], float]
    ) -> None:
        self._num_ranks = config.device.num_ranks
        self._scheduler = scheduler
        self._meter = meter
        self._clock = clock
        # What keeps the blocks of a sequence that ends, if another engine is to have them.
        self.hold: Callable[[Sequence], HeldBlocks | None] = lambda sequence: None

    def accept(self, plan: StepPlan, result: StepResult, planned: float) -> list[Event]:
        """Give each sequence of a plan, made at the clock reading ``planned``, what the step brought it."""
        events: list[Event] = []
        now = self._clock()
        # None in place of those that have ended since this was planned.
        owners = list(map(self._scheduler.running.by_id.get, [step.sequence_id for step in plan.sequences]))
        sizes = [step.num_tokens for step in plan.sequences]
        gpu_seconds_per_token = self._book(plan, result, owners, sizes)
        tokens, outputs = iter(result.token_ids), iter(result.outputs)
        is_plain = not result.outputs and self._scheduler.speculator is None
        for step, sequence, size in zip(plan.sequences, owners, sizes, strict=True):
            if sequence is not None:
                times = sequence.times
                times.gpu_seconds += gpu_seconds_per_token * size
                if is_plain and times.first_token is not None and sequence.constraint is None:
                    # As most are: another token of a reply, and nothing else. What follows comes to the same.
                    if step.samples:
                        events.append(self._accept_token(sequence, step, next(tokens)))
                    else:  # computed again after it was preempted
                        self._scheduler.advance(sequence, step.start + len(step.token_ids))
                    continue
                times.admitted = planned if times.admitted is None else times.admitted
            output = next(outputs, None) or SequenceOutput((next(tokens),) if step.samples else ())
            if sequence is not None:
                events += self._accept_output(sequence, step, output, now)
        return events

    def fail(self, plan: StepPlan, error: Exception, seconds: float) -> list[Event]:
        """Let the sequences of a step go that raised after so many seconds.

        They used the device, whatever they got for it, so its time is recorded. If it was to copy blocks, all running
        sequences go: one let in with copied blocks need not have been computed in the same step.
        """
        owners = [(step, self._scheduler.running.by_id.get(step.sequence_id)) for step in plan.sequences]
        staying = [(step, sequence) for step, sequence in owners if sequence is not None]
        num_tokens = sum(step.num_tokens for step, _ in staying)
        self._meter.count_step(0, 0, seconds if staying else 0.0)
        for step, sequence in staying:
            sequence.times.gpu_seconds += seconds / num_tokens * step.num_tokens * self._num_ranks
        problem = f"the engine could not compute this request ({type(error).__name__}: {error}); try again"
        leaving = list(self._scheduler.running) if plan.copies else [sequence for _, sequence in staying]
        self._scheduler.invalidate_copies(plan.copies)
        for sequence in leaving:
            self._scheduler.blocks.forget(sequence.block_table)
        return [self.finish(sequence, FinishReason.ERROR, problem) for sequence in leaving]

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, *, is_bad_grammar: bool = False
    ) -> Event:
        """Let a sequence go without another token."""
        if sequence.pools:
            return Embedding(sequence.request.request_id, (), self._leave(sequence), error or "the request was aborted")
        return NewTokens(
            request_id=sequence.request.request_id,
            reply_index=sequence.reply_index,
            token_ids=(),
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens or 0,
            gpu_seconds=sequence.times.gpu_seconds,
            timings=self._leave(sequence),
            error=error,
            is_bad_grammar=is_bad_grammar,
        )

    def _book(
        self, plan: StepPlan, result: StepResult, owners: SequenceOf[Sequence | None], sizes: SequenceOf[int]
    ) -> float:
        """Record what a step took and gained; return the seconds that each token pays for, all devices together.

        ``sizes`` are the tokens computed for each of the plan's sequences.
        """
        scheduler = self._scheduler
        counts = [1] * len(result.token_ids)
        if result.outputs:
            each = zip(plan.sequences, result.outputs, strict=True)
            counts = [len(output.token_ids) for step, output in each if step.samples]
        computed, gained = sum(sizes), sum(counts)
        num_staying, by_drafts = computed, gained - len(counts)
        if not all(owners):
            num_staying = sum(size for size, owner in zip(sizes, owners, strict=True) if owner)
            samplers = [owner for step, owner in zip(plan.sequences, owners, strict=True) if step.samples]
            of_staying = [count for count, owner in zip(counts, samplers, strict=True) if owner]
            gained, by_drafts = sum(of_staying), sum(of_staying) - len(of_staying)
        if scheduler.running.swapping is not None and scheduler.running.swapping.wants(plan.step) and plan.sequences:
            scheduler.running.swapping.learn(plan_work(plan.sequences), result.seconds)
        if scheduler.speculator is not None:
            scheduler.speculator.economics.note_result(plan, by_drafts, result.seconds)
        seconds_per_token = result.seconds / max(1, num_staying)
        least = result.least_seconds if num_staying else 0.0
        self._meter.count_step(computed, gained, seconds_per_token * num_staying, least)
        return seconds_per_token * self._num_ranks

    def _accept_output(self, sequence: Sequence, step: SequenceStep, output: SequenceOutput, now: float) -> list[Event]:
        if output.scores:  # what was scored before a preemption is not reported again
            sequence.prompt_scores += output.scores[len(sequence.prompt_scores) - step.start :]
        if sequence.is_discarded:
            sequence.is_discarded, sequence.num_awaited = False, 0
            sequence.num_computed = len(sequence.token_ids) - 1
            self._scheduler.advance(sequence, sequence.num_computed)
            return []
        if output.has_failed:
            self._scheduler.blocks.forget(sequence.block_table)
            problem = "the model's numbers for this request are not finite; change the prompt"
            return [self.finish(sequence, FinishReason.ERROR, problem)]
        if step.pools:
            return self._accept_hidden(sequence, step, output.hidden_sum)
        if step.samples:
            return self._accept_tokens(sequence, step, output, now)
        self._scheduler.advance(sequence, step.start + len(step.token_ids))
        return []

    def _accept_token(self, sequence: Sequence, step: SequenceStep, token: int) -> Event:
        sequence.num_awaited -= 1
        reason = sequence.append(token)
        self._scheduler.advance(sequence, step.start + len(step.token_ids))
        held = self.hold(sequence) if reason else None
        return NewTokens(
            sequence.request.request_id,
            sequence.reply_index,
            (token,),
            (),
            reason,
            sequence.cached_tokens or 0,
            sequence.times.gpu_seconds,
            self._leave(sequence) if reason else None,
            held=held,
        )

    def _accept_tokens(self, sequence: Sequence, step: SequenceStep, output: SequenceOutput, now: float) -> list[Event]:
        if (step.num_draft_tokens or step.draft_ids) and self._scheduler.speculator is not None:
            self._scheduler.speculator.learn(sequence, step, len(output.token_ids), self._scheduler.blocks)
        sequence.num_awaited -= 1 + step.num_unsure
        has_text = step.num_unsure > 0 and sequence.num_on_device == len(sequence.token_ids)
        reason: FinishReason | None = None
        problem: str | None = None
        taken = 0
        for token in output.token_ids:
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
            sequence.num_on_device = len(sequence.token_ids)
        # The last token is known, but not computed; without any, nothing that the step computed counts.
        end = len(sequence.token_ids) - 1
        if step.num_draft_tokens or step.num_to_draft or step.slack:
            sequence.num_computed = end + sequence.num_awaited
            sequence.is_discarded = not output.token_ids and sequence.num_awaited > 0
        self._scheduler.advance(sequence, end)
        events: list[Event] = []
        if taken:
            events.append(self._tell(sequence, output.token_ids[:taken], output.logprobs[:taken], reason, now))
        if problem:
            error = f"after {sequence.num_generated} tokens, {problem}"
            events.append(self.finish(sequence, FinishReason.ERROR, error, is_bad_grammar=True))
        return events

    def _tell(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob | None, ...],
        reason: FinishReason | None,
        now: float,
    ) -> Event:
        is_first = sequence.times.first_token is None
        if is_first:
            sequence.times.first_token = now
            sequence.times.first_token_step = self._meter.steps
        held = self.hold(sequence) if reason else None
        return NewTokens(
            sequence.request.request_id,
            sequence.reply_index,
            token_ids,
            logprobs if sequence.sampling.logprobs is not None else (),
            reason,
            sequence.cached_tokens or 0,
            sequence.times.gpu_seconds,
            self._leave(sequence) if reason else None,
            prompt_scores=tuple(sequence.prompt_scores) if is_first else (),
            held=held,
        )

    def _accept_hidden(self, sequence: Sequence, step: SequenceStep, hidden_sum: tuple[float, ...]) -> list[Event]:
        """Add a chunk's hidden states to an embedding; with the last chunk, pool and normalise them."""
        so_far = sequence.hidden_sum or [0.0] * len(hidden_sum)
        sequence.hidden_sum = [a + b for a, b in zip(so_far, hidden_sum, strict=True)]
        end = step.start + len(step.token_ids)
        if end < sequence.num_prompt:
            self._scheduler.advance(sequence, end)
            return []
        # The mean's divisor cancels out against the norm.
        length = math.hypot(*sequence.hidden_sum) or 1.0
        vector = tuple(value / length for value in sequence.hidden_sum)
        return [Embedding(sequence.request.request_id, vector, self._leave(sequence))]

    def _leave(self, sequence: Sequence) -> Timings:
        """Free what a sequence holds, and say where its time went."""
        self._scheduler.remove(sequence)
        self._meter.finished += 1
        return sequence.times.timings(self._clock(), self._meter.steps)
