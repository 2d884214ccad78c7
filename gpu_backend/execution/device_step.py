# A step that the device computes. What the host will read of it is copied to pinned memory behind the computation, so
# that the copies of one step are read while the next one runs.

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gpu_backend.execution.graphs import Drawing
from gpu_backend.hardware.capacity import ROWS_TO_SCORE
from gpu_backend.hardware.roofline import Roofline
from gpu_backend.hardware.timer import Timer
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.models.layers import Decoder
from gpu_backend.sampling.sampler import Logprobs, Sampled, report_logprobs, sample
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.sampling.verification import num_gained
from gpu_backend.step.plan import SequenceOutput, SequenceStep, StepPlan, StepResult, TokenLogprob
from gpu_backend.step.step_tensors import StepTensors


@dataclass(eq=False)
class DeviceStep:
    """One launched step: ``hidden`` (tokens, width) are its final hidden states, still being computed.

    ``places`` has a step for each place that is sampled; ``masks`` are those of their grammars, if they could be begun.
    Slots in which its drafts leave what is not a number are added to ``spoilt``, for the next step to clear.
    ``drawing`` is what samples its tokens, where that was prepared, and keeps them in ``last_tokens`` itself; the
    ``places`` are then its others'. ``counts`` are of the tokens that penalised steps follow.
    """

    plan: StepPlan
    tensors: StepTensors
    places: list[SequenceStep]
    masks: Future[Tensor] | None
    model: Decoder
    hidden: Tensor
    spoilt: list[int]
    block_size: int
    last_tokens: Tensor
    counts: TokenCounts
    timer: Timer
    roofline: Roofline | None = None
    drawing: Drawing | None = None
    _drawn: Tensor | None = None
    _finite: Tensor | None = None
    _logprobs: Logprobs | None = None
    _is_sampled: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether some token is for a grammar to say, which may have to hear of the step before."""
        return any(step.constraint for step in self.tensors.samplers)

    @torch.inference_mode()
    def sample(self) -> None:
        """Launch what follows the model: tokens, scores and sums, and their copies to the host. Once is enough."""
        if self._is_sampled:
            return
        self._is_sampled = True
        tensors, hidden = self.tensors, self.hidden
        if self.drawing is not None:
            self.drawing.launch()
            drawn = self.drawing.drawn
            if self.places:
                self._sample_others(self.drawing)
            self._drawn = to_host(drawn) if drawn.is_cuda else drawn.clone()  # the next step writes over it
        else:
            if len(tensors.samplers) < len(hidden):  # else each row has logits, which tell of what is not finite
                self._finite = to_host(torch.isfinite(hidden.float().sum(-1)))
            self._sample_rows()
        self._pooled = {step.sequence_id: to_host(hidden[rows].float().sum(0)) for step, rows in tensors.poolers}
        self._scored = {step.sequence_id: self._score(step, hidden[rows]) for step, rows in tensors.scorers}
        self.timer.stop()

    def _sample_rows(self) -> None:
        tensors = self.tensors
        if tensors.samplers:
            rows = self.hidden
            if tensors.sample_rows is not None:
                rows = rows.index_select(0, tensors.sample_rows)
            sampled = self._sample_places(rows)
            if len(self.places) == len(tensors.samplers):  # which drafts hold is for the host to say
                self.last_tokens.index_copy_(0, tensors.sampled_to, sampled.token_ids)
            self._tokens, self._usable = to_host(sampled.token_ids), to_host(sampled.finite)

    def _sample_others(self, drawing: Drawing) -> None:
        """Sample again for steps that ask for more than a draw: their tokens take the place of those drawn."""
        where = upload(drawing.where, self.hidden.device, torch.long)
        sampled = self._sample_places(self.hidden.index_select(0, where))
        self.last_tokens.index_copy_(0, self.tensors.sampled_to.index_select(0, where), sampled.token_ids)
        drawing.drawn[:, :2].index_copy_(0, where, torch.stack([sampled.token_ids, sampled.finite], 1).int())

    def _sample_places(self, rows: Tensor) -> Sampled:
        sampled = sample(self.model.logits(rows), self.places, self.counts, self.masks)
        self._logprobs = _to_host(sampled.logprobs) if sampled.logprobs else None
        return sampled

    def result(self) -> StepResult:
        """Wait for the copies, and read them."""
        seconds = self.timer.wait()
        plan, tensors = self.plan, self.tensors
        least_seconds = self.roofline.least_seconds(plan.sequences) if self.roofline else 0.0
        if (plain := self._plain_tokens()) is not None:
            return StepResult(plan.step, plain, seconds, least_seconds=least_seconds)
        tokens, logprobs, failed = self._gained()
        failed |= self._not_finite()
        unsure = [step for step in tensors.samplers if step.num_draft_tokens or step.slack] if failed else []
        if retracted := [step for step in unsure if step.sequence_id in failed]:
            self._retract(retracted)
            failed -= {step.sequence_id for step in retracted}
            for step in retracted:
                tokens[step.sequence_id] = logprobs[step.sequence_id] = ()
        outputs = tuple(
            SequenceOutput(
                tokens.get(step.sequence_id, ()),
                logprobs.get(step.sequence_id, ()),
                tuple(self._pooled[step.sequence_id].tolist()) if step.pools else (),
                tuple([score for part in self._scored.get(step.sequence_id, ()) for score in part.read()]),
                step.sequence_id in failed,
            )
            for step in plan.sequences
        )
        return StepResult(plan.step, (), seconds, outputs, least_seconds)

    def _plain_tokens(self) -> tuple[int, ...] | None:
        """Return each sampling sequence's token, where all got one and nothing else, as in most steps."""
        tensors = self.tensors
        if self._logprobs is not None or not tensors.samplers or tensors.poolers or tensors.scorers:
            return None
        sampled, usable = self._read()
        if len(sampled) != len(tensors.samplers) or not all(usable) or self._not_finite():
            return None
        token_of = dict(zip([step.sequence_id for step in tensors.samplers], sampled, strict=True))
        return tuple([token_of[step.sequence_id] for step in self.plan.sequences if step.samples])

    def _gained(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[TokenLogprob | None, ...]], set[int]]:
        """Return tokens and log-probabilities by sequence id, and the ids of those whose logits are not finite."""
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        failed: set[int] = set()
        if not self.tensors.samplers:
            return tokens, logprobs, failed
        sampled, usable = self._read()
        reports = iter(self._logprobs.read() if self._logprobs is not None else ())
        first = 0
        known = iter(self._drawn[:, -2].tolist() if self._drawn is not None else ())
        for step in self.tensors.samplers:
            places = step.num_draft_tokens + 1
            count = next(known) if self._drawn is not None else num_gained(step, sampled[first : first + places])
            tokens[step.sequence_id] = tuple(sampled[first : first + count])
            if self._logprobs is not None:
                asks = step.sampling.logprobs is not None
                own = tuple(islice(reports, places)) if asks else (None,) * count
                logprobs[step.sequence_id] = own[:count]
            if not all(usable[first : first + count]):
                failed.add(step.sequence_id)
            first += places
        return tokens, logprobs, failed

    def _read(self) -> tuple[list[int], list[bool]]:
        """Return the token drawn at each place, and whether its logits were numbers."""
        if self._drawn is None or self.drawing is None:
            return self._tokens.tolist(), self._usable.tolist()
        width = self._drawn.shape[1] // 2 - 1
        tokens, usable = self._drawn[:, :width].flatten().tolist(), self._drawn[:, width : 2 * width].flatten().tolist()
        if (rows := self.drawing.rows) is not None:
            tokens, usable = [tokens[row] for row in rows], [usable[row] for row in rows]
        return tokens, usable

    def _retract(self, steps: list[SequenceStep]) -> None:
        """Note where these steps wrote keys and values: what is not a number would spoil all that comes later."""
        ids = {step.sequence_id for step in steps}
        starts = self._drawn[:, -1].tolist() if self._drawn is not None else [step.start for step in self.tensors.steps]
        for step, start in zip(self.tensors.steps, starts, strict=True):
            if step.sequence_id in ids:
                where = range(start, start + len(step.token_ids))
                size = self.block_size
                self.spoilt += [step.block_table[at // size] * size + at % size for at in where]

    def _score(self, step: SequenceStep, hidden: Tensor) -> list[Logprobs]:
        """Return the log-probability of each target, some rows at a time: all logits of a long prompt have no room."""
        targets = upload(step.targets, hidden.device, torch.long)
        wanted = step.sampling.prompt_logprobs or 0
        parts = zip(hidden.split(ROWS_TO_SCORE), targets.split(ROWS_TO_SCORE), strict=True)
        return [_to_host(report_logprobs(self.model.logits(rows), own, [wanted] * len(own))) for rows, own in parts]

    def _not_finite(self) -> set[int]:
        """Return the sequences with a hidden state which is not a number, before their blocks are shared.

        Even positions before the fault are lost: what is not a number stays so when it is masked.
        """
        if self._finite is None or bool(self._finite.all()):
            return set()
        steps = self.tensors.steps
        parts = self._finite.split([len(step.token_ids) for step in steps])
        return {step.sequence_id for step, rows in zip(steps, parts, strict=True) if not rows.all()}


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which is complete when the device has come so far; on the CPU the same tensor."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _to_host(logprobs: Logprobs) -> Logprobs:
    return Logprobs(to_host(logprobs.own), to_host(logprobs.top), to_host(logprobs.top_ids), logprobs.counts)
