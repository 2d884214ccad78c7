# The draft model: a second, smaller one that drafts what the model will say, or a head of the model's own. It draws
# with the same filters, penalties, masks and noise, so that the two agree as often as they can. Its keys and values lie
# in a cache of its own, in the same blocks.
#
# A head reads a token and what the model made of the one before: its tokens stand a place before their own. Of drafts
# the model has made nothing yet; a head reads there what it made itself, and computes those places again afterwards.
#
# Each draft is computed from the one before on the device, from graphs where there are any. Where graphs verify them,
# too, the host never reads them; elsewhere it does when all are made. Only where a draft depends on what the host knows
# (grammars, penalties) it looks at each.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.execution.device_state import DeviceState
from gpu_backend.execution.device_step import to_host
from gpu_backend.execution.graph_sizes import draws_plainly
from gpu_backend.execution.graphs import DecodeGraphs
from gpu_backend.execution.kv_format import KvFormat
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.draft_heads import DraftHead
from gpu_backend.models.layers import Decoder
from gpu_backend.sampling.sampler import sample
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.adapter import NONE
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.plan import UNKNOWN, SequenceStep, StepPlan
from gpu_backend.step.step_tensors import build_tensors

Drafts = dict[int, tuple[int, ...]]  # by sequence id
MakeGraphs = Callable[[Decoder | DraftHead, Tensor, DeviceState, int], DecodeGraphs]


class DraftModel:
    """What drafts for a model that is ``target`` as a whole, on the model's device."""

    def __init__(
        self,
        config: EngineConfig,
        target: ModelConfig,
        model: Decoder | DraftHead,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.config = model.config
        self.features = model.features if isinstance(model, DraftHead) else None
        # That it may lack of a reply whose drafts all held: one is no draft, and a head computes all of them again.
        self._most_lacking = config.speculation.num_speculative_tokens + 1 if self.features is not None else 2
        self._vocab_size = target.vocab_size
        self._block_size = config.cache.block_size
        self._max_num_seqs = config.steps.max_num_seqs
        self._device = device
        self.share = self.config.products_per_token / target.products_per_token
        self.kv = KvFormat(self.config, config.cache.block_size, dtype, device)

    def make_room(
        self,
        num_blocks: int,
        max_model_len: int,
        placement: Grouping | PagedLayouts,
        graphs: MakeGraphs | None,
        counts: TokenCounts,
        verifier: DecodeGraphs | None,
    ) -> None:
        """Allocate the cache, with the two blocks more that the model has, and what its decodes are replayed from.

        ``verifier`` has the model's graphs, if it has any. ``counts`` are of the tokens that penalised steps follow, of
        any plan before it is to be completed.
        """
        self.kv_cache = self.kv.empty(num_blocks + 2)
        self._grouping = placement
        self._counts = counts
        self._verifier = verifier
        longest = -(-max_model_len // self._block_size)
        self._device_state = DeviceState(self._max_num_seqs, longest, num_blocks, self._device)
        most_known = self._most_lacking - 1
        self.graphs = graphs(self.model, self.kv_cache, self._device_state, most_known) if graphs else None

    def complete(self, plan: StepPlan) -> StepPlan:
        """Compute what a plan asks of the draft model, and return the plan with its drafts in it.

        A sequence gets fewer than it asks for where its reply would end with the next.
        """
        steps = [_draft_step(step) for step in plan.sequences if step.draft_ids]
        if not steps:
            return plan
        asking = {step.sequence_id: step for step in plan.sequences}
        if not all(map(draws_plainly, steps)):
            return self._filled(plan, self._draft_one_by_one(steps, asking))
        unread = {step.sequence_id: (UNKNOWN,) * asking[step.sequence_id].num_to_draft for step in steps}
        ahead = self._filled(plan, unread)
        if self._verifier is None or not self._verifier.draws_all(ahead):
            passes = [(samplers, to_host(tokens)) for samplers, tokens in self._passes(steps, asking)]
            return self._filled(plan, self._read(steps, passes))
        for place, (samplers, tokens) in enumerate(self._passes(steps, asking)):
            rows = upload([step.row for step in samplers], self._device, torch.long)
            self._verifier.keep_drafts(place, rows, tokens)
        return ahead

    def _passes(
        self, steps: list[SequenceStep], asking: dict[int, SequenceStep]
    ) -> Iterator[tuple[tuple[SequenceStep, ...], Tensor]]:
        """Launch all passes, each with the last one's tokens from the device state, and yield what each draws."""
        number = 0
        while steps:
            samplers, tokens = self._compute(steps)
            yield samplers, tokens
            number += 1
            going_on = [step for step in samplers if number < asking[step.sequence_id].num_to_draft]
            steps = [self._after(step, UNKNOWN, asking[step.sequence_id].block_table) for step in going_on]

    def _read(self, steps: list[SequenceStep], passes: list[tuple[tuple[SequenceStep, ...], Tensor]]) -> Drafts:
        """Wait for the passes; return the drafts of each step up to where its reply would end."""
        drafts: Drafts = {step.sequence_id: () for step in steps}
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        ended: set[int] = set()
        for samplers, tokens in passes:
            for step, token in zip(samplers, tokens.tolist(), strict=True):
                id_ = step.sequence_id
                if id_ in ended or token in step.sampling.stop_token_ids:
                    ended.add(id_)
                else:
                    drafts[id_] += (token,)
        return drafts

    def _draft_one_by_one(self, steps: list[SequenceStep], asking: dict[int, SequenceStep]) -> Drafts:
        """Read each pass's tokens before the next one, whose masks and penalties they decide."""
        drafts: Drafts = {step.sequence_id: () for step in steps}
        while steps:
            following = []
            samplers, tokens = self._compute(steps)
            for step, token in zip(samplers, tokens.tolist(), strict=True):
                id_ = step.sequence_id
                after = self._follow(step, token, asking[id_].block_table)
                if after is None:
                    continue
                drafts[id_] += (token,)
                if len(drafts[id_]) < asking[id_].num_to_draft:
                    following.append(after)
            steps = following
        return drafts

    def _compute(self, steps: list[SequenceStep]) -> tuple[tuple[SequenceStep, ...], Tensor]:
        """Launch one pass; return the steps that sample, and their tokens, which are in the device state, too."""
        plan = StepPlan(0, tuple(replace(s, block_table=self._covering(s)) for s in steps))
        last_tokens = self._device_state.last_tokens
        if self.graphs is not None and all(map(draws_plainly, steps)):
            # To a graph, known tokens before the last are computed as drafts are.
            marked = [replace(step, num_draft_tokens=len(step.token_ids) - 1) for step in plan.sequences]
            decodes = replace(plan, sequences=tuple(marked))
            lacking = max(len(step.token_ids) for step in marked)
            if lacking <= self._most_lacking and (size := self.graphs.find(decodes)) is not None:
                self.graphs.fill(decodes.sequences, size)
                tensors, hidden, drawing = self.graphs.replay(decodes, size)
                assert drawing is not None, "they draw plainly"
                drawing.launch()
                self._carry(steps, hidden[size.width - 1 :: size.width])
                return plan.sequences, last_tokens.index_select(0, tensors.sampled_to)
        tensors = build_tensors(plan, self._grouping, self._device)
        if tensors.unknown is not None:
            rows, origins = tensors.unknown
            tensors.token_ids.index_copy_(0, rows, last_tokens.index_select(0, origins))
        if tensors.fresh_blocks is not None:
            self.kv_cache.index_fill_(1, tensors.fresh_blocks, 0)
        hidden = self.model.hidden_states(tensors, self.kv_cache)
        if not tensors.samplers:
            return (), last_tokens[:0]
        rows = hidden if tensors.sample_rows is None else hidden.index_select(0, tensors.sample_rows)
        by_id = {step.sequence_id: step for step in steps}
        self._carry([by_id[step.sequence_id] for step in tensors.samplers], rows)
        # Tokenizers are equal, but tables may be padded to different lengths.
        logits = self.model.logits(rows)
        logits = F.pad(logits, (0, self._vocab_size - logits.shape[1]), value=-torch.inf)
        lag = self.model.lag
        samplers = [replace(step, start=step.start + lag) for step in tensors.samplers] if lag else tensors.samplers
        tokens = sample(logits, samplers, self._counts).token_ids
        last_tokens.index_copy_(0, tensors.sampled_to, tokens)
        return tensors.samplers, tokens

    def _carry(self, steps: list[SequenceStep], hidden: Tensor) -> None:
        """Let a head read what it made last of each of these steps (steps, width), where it computes the next token."""
        if self.features is None:
            return
        size = self._block_size
        ends = [(step.block_table, step.start + len(step.token_ids)) for step in steps]
        slots = [table[end // size] * size + end % size for table, end in ends]
        self.features.put(upload(slots, self._device, torch.long), hidden)

    def _follow(self, step: SequenceStep, token: int, block_table: tuple[int, ...]) -> SequenceStep | None:
        """Return the step that computes a draft; None if the reply ends with it, or cannot have it."""
        if token in step.sampling.stop_token_ids:
            return None
        constraint = step.constraint
        if constraint is not None:
            constraint = constraint.copy()
            if constraint.accept((token,)) or constraint.is_complete:
                return None
        drafted = (*step.drafted, token) if step.sampling.penalises_reply else ()
        return replace(self._after(step, token, block_table), drafted=drafted, constraint=constraint)

    def _after(self, step: SequenceStep, token: int, block_table: tuple[int, ...]) -> SequenceStep:
        """Return the step that computes the token after a step's."""
        return replace(step, token_ids=(token,), start=step.start + len(step.token_ids), block_table=block_table)

    def _filled(self, plan: StepPlan, drafts: Drafts) -> StepPlan:
        return replace(plan, sequences=tuple(self._with(step, drafts.get(step.sequence_id)) for step in plan.sequences))

    def _with(self, step: SequenceStep, drafts: tuple[int, ...] | None) -> SequenceStep:
        if drafts is None:
            return step
        step = replace(
            step, token_ids=step.token_ids + drafts, num_draft_tokens=len(drafts), draft_ids=(), num_to_draft=0
        )
        return replace(step, block_table=self._covering(step))

    def _covering(self, step: SequenceStep) -> tuple[int, ...]:
        return step.block_table[: -(-(step.start + len(step.token_ids)) // self._block_size)]


def _draft_step(step: SequenceStep) -> SequenceStep:
    """Return what the draft model computes first of a step."""
    return replace(
        step,
        token_ids=step.draft_ids,
        start=step.draft_start,
        samples=step.num_to_draft > 0,
        sampling=replace(step.sampling, logprobs=None, prompt_logprobs=None),
        targets=(),
        adapter=NONE,  # it drafts for all adapters as for the model alone
        pictures=(),  # it sees none: their tokens look back, and turn by their places, as those of texts do
        moved=0,
    )
