# Decodes from CUDA graphs: a whole step is launched at once, its inputs gathered on the device from the device
# state, its tokens put back there. A graph has a fixed number of places, and each place room for as many tokens;
# unused places use the state's spare row and block.
#
# Graphs are captured while steps are measured at the start, and while serving, one at a time and never in a step that
# computes a prompt: a first token does not wait for one.

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.execution.device_state import NO_BLOCK, DeviceState
from gpu_backend.execution.graph_capture import GraphCapture, Replay
from gpu_backend.execution.graph_sizes import GraphSizes, Size, draws_plainly
from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.decode_rows import FROM_STATE, HEADER, DecodeRows
from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.kernels.layout.sampling_tensors import NO_PENALTIES
from gpu_backend.kernels.layout.upload import pinned, upload
from gpu_backend.models.draft_heads import DraftHead
from gpu_backend.models.layers import Decoder
from gpu_backend.sampling.sampler import draw
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.adapter import NONE
from gpu_backend.step.plan import UNKNOWN, SequenceStep, StepPlan
from gpu_backend.step.step_tensors import StepTensors

if TYPE_CHECKING:
    from gpu_backend.execution.ranks import Ranks

assert UNKNOWN == FROM_STATE
propose = ops.propose_drafts

USES_BEFORE = 3  # steps of a size before its graph is captured
MOST_OTHERS = 0.5  # of a step's tokens, which are sampled by themselves; of more, all are
STEPS_BETWEEN = 16  # captures, so that no stream stops for long


@dataclass(frozen=True, slots=True)
class Drawing:
    """What draws the tokens of a step, and where it leaves them: ``DecodeRows.drawn`` of its places.

    What it draws for the ``others``, steps at the places ``where``, counts for nothing: they ask for more than a draw.
    """

    launch: Replay
    drawn: Tensor
    rows: list[int] | None  # those used of its places' contiguous rows; None: all
    others: tuple[SequenceStep, ...]
    where: tuple[int, ...]


class DecodeGraphs:
    """Computes decodes of up to ``state.spare`` sequences, of up to ``max_drafts`` each, by replaying graphs.

    Of several ``ranks`` the first draws tokens, and all replay a graph or none does: NCCL waits for those that do not.
    Unless it ``verifies`` them, all tokens of a step are known, whatever is drawn behind those before the last.
    """

    def __init__(
        self,
        model: Decoder | DraftHead,
        kv_cache: Tensor,
        kv_scales: Sequence[KvScales] | None,
        state: DeviceState,
        layouts: PagedLayouts,
        graph_capture: GraphCapture,
        max_drafts: int = 0,
        ranks: Ranks | None = None,
        verifies: bool = True,
        counts: TokenCounts | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._kv_scales = kv_scales
        self._block_size = kv_cache.shape[2]
        num_blocks = state.on_device.block_tables.shape[1]
        self.sizes = GraphSizes(state.spare, max_drafts, layouts, num_blocks * self._block_size)
        self._device_state = state
        self._layouts = layouts
        self._graph_capture = graph_capture
        self._ranks = ranks
        self._draws = ranks is None or ranks.rank == 0
        self._verifies = verifies
        self._counts = counts
        self.problem = ""  # why no more are captured
        self._graphs: dict[Size, tuple[Replay, Replay]] = {}  # the model, and the drawing of tokens
        self._penalised: dict[Size, Replay] = {}  # the drawing of tokens that are penalised
        self._wanted: Size | None = None  # that is to be captured for them
        self._uses: Counter[Size] = Counter()
        self._steps_since = STEPS_BETWEEN
        places, device = state.spare, kv_cache.device
        rows, width = self.sizes.most_rows, self.sizes.width
        self._inputs = torch.zeros(places * (HEADER + width), dtype=torch.long, device=device)
        self._room = DecodeRows.room_for(places, rows, width, num_blocks, device)
        self._rows: dict[Size, DecodeRows] = {}
        self._penalties = torch.ones((places, 3), device=device)
        self._slots = torch.zeros(rows if model.adapters is not None else 0, dtype=torch.int32, device=device)
        moves = any(rope is not None and rope.sections for rope in model.config.ropes)
        self._moved = torch.zeros(rows if moves else 0, dtype=torch.long, device=device)
        self._states = model.states if isinstance(model, Decoder) else None
        self._hidden = torch.zeros((rows, model.config.hidden_size), dtype=model.embedding.dtype, device=device)

    def find(self, plan: StepPlan) -> Size | None:
        """Return which graph to replay for a plan, captured now if it is time; None: compute it otherwise."""
        self._steps_since += 1
        size = self.sizes.of(plan)
        if size is None:
            return None
        self._uses[size] += 1
        is_due = self._uses[size] > USES_BEFORE and self._steps_since > STEPS_BETWEEN
        if size not in self._graphs and (is_due or plan.is_rehearsal):
            self._try_capture(size)
        most = 2 * len(plan.sequences)
        kind = size.width, size.adapted
        large = [
            some for some in self._graphs if size.places <= some.places <= most and (some.width, some.adapted) == kind
        ]
        if self._wanted is not None:
            self._try_capture_penalised(self._wanted)
        return min(large, key=lambda some: (some.places, abs(some.splits - size.splits)), default=None)

    def draws_all(self, plan: StepPlan) -> bool:
        """Whether a plan's tokens are all drawn here, so that its drafts need be known to the device alone."""
        return self._ranks is None and self.sizes.of(plan) is not None and all(map(draws_plainly, plan.sequences))

    def keep_drafts(self, place: int, rows: Tensor, tokens: Tensor) -> None:
        """Keep the drafts of sequences with these rows of the device state, ``place`` places behind the first."""
        self._device_state.on_device.drafts[:, place].index_copy_(0, rows, tokens)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a step without sequences in each width, so that no stream waits for its kernels to be compiled."""
        kinds = (False,) if self._model.adapters is None else (False, True)
        for width, adapted in product(sorted({1, self.sizes.width}), kinds):
            size = self.sizes.at(self.sizes.places[0], width)._replace(adapted=adapted)
            self._rows.setdefault(size, self._room.cut(size.places, width))
            self.fill((), size)
            self._compute(size)
            if self._draws:
                self._draw(size)
            if width == 1 and self._draws and self._counts is not None:
                logits, inputs = self._model.logits(self._hidden[: size.places]), self._inputs_of(size)
                none = torch.zeros_like(logits, dtype=torch.int32)  # the table is made when it is needed
                ops.penalise(logits, torch.zeros_like(inputs)[:, 0], none, self._penalties[: size.places])

    def fill(self, steps: Sequence[SequenceStep], size: Size) -> None:
        """Tell the device what the next replay computes."""
        places, width, *_ = size
        rows = [
            (
                step.row,
                FROM_STATE if step.slack else step.start,
                len(step.token_ids),
                1 if self._verifies else len(step.token_ids),
                *new,
                *(0,) * (width - len(step.token_ids)),
                *step.token_ids,
            )
            for step, new in zip(steps, self._device_state.update(steps), strict=True)
        ]
        rows += [(self._device_state.spare, 0, width, 1, *NO_BLOCK, *(0,) * width)] * (places - len(steps))
        self._inputs_of(size).copy_(pinned(rows, self._inputs.device, torch.long), non_blocking=True)
        if size.adapted and self._model.adapters is not None:
            slot_of = self._model.adapters.slot_of
            slots = [slot_of[step.adapter] for step in steps] + [slot_of[NONE]] * (places - len(steps))
            of_rows = [slot for slot in slots for _ in range(width)]
            self._slots[: len(of_rows)].copy_(pinned(of_rows, self._slots.device, torch.int32), non_blocking=True)
        if len(self._moved):
            of_rows = [step.moved for step in steps for _ in range(width)] + [0] * (places - len(steps)) * width
            self._moved[: len(of_rows)].copy_(pinned(of_rows, self._moved.device, torch.long), non_blocking=True)
        if (states := self._states) is not None:
            states.begin(steps)
        if ops.uses_triton(self._kv_cache.device):
            return  # kernels read no further than is written
        fresh = [block for step in steps for block in step.block_table[-(-step.start // self._block_size) :]]
        if fresh:  # masked out or not, a leftover that is not a number would spoil its neighbours' sums
            self._kv_cache.index_fill_(1, upload(fresh, self._kv_cache.device, torch.long), 0)

    def replay(self, plan: StepPlan, size: Size) -> tuple[StepTensors, Tensor, Drawing | None]:
        """Compute what was filled in, from a graph if there is one.

        Returns the step's tensors, its final hidden states, and what draws its tokens: None where most of them, or any
        with drafts, need more than what the graph knows. Tensors and hidden states are written over by the next replay;
        those of a step that is drawn here have unused rows between its own.
        """
        if size in self._graphs:
            forward, drawing = self._graphs[size]
        else:
            self._rows.setdefault(size, self._room.cut(size.places, size.width))
            forward, drawing = partial(self._compute, size), partial(self._draw, size)
        forward()
        steps, width, rows = plan.sequences, size.width, self._rows[size]
        own: Tensor | slice = slice(0, len(steps) * width)
        filled: list[int] | None = None
        if any(len(step.token_ids) < width for step in steps):
            ends = [(place + 1) * width for place in range(len(steps))]
            filled = [
                row for end, step in zip(ends, steps, strict=True) for row in range(end - len(step.token_ids), end)
            ]
        where = tuple(place for place, step in enumerate(steps) if not draws_plainly(step))
        if len(where) > MOST_OTHERS * len(steps) and width == 1 and self._counts is not None and self._draws:
            left = tuple(place for place in where if not draws_plainly(steps[place], but_for_penalties=True))
            if len(left) < len(where):
                where, drawing = left, self._drawing_of_penalised(steps, size)
        is_drawn = not where or (width == 1 and len(where) <= MOST_OTHERS * len(steps))
        if filled is not None and not is_drawn:
            own = upload(filled, self._inputs.device, torch.long)
        tensors = StepTensors(
            steps=steps,
            token_ids=rows.token_ids[own],
            positions=rows.positions[:0],  # the model has seen them
            slots=rows.slots[own],
            sampled_to=self._inputs_of(size)[: len(steps), 0],
            samplers=steps,
        )
        others = tuple(steps[place] for place in where)
        drawn = Drawing(drawing, rows.drawn[: len(steps)], filled, others, where) if is_drawn else None
        return tensors, self._hidden[own], drawn

    def _try_capture(self, size: Size) -> None:
        """Make a graph, if it can be made: no request fails for the want of one."""
        if self.problem:
            return
        self._steps_since = 0
        for attempt in (self._warm_up_size, self._capture_size):
            try:
                attempt(size)
            except Exception as error:  # memory, or a library that does not allow it
                self.problem = f"{type(error).__name__}: {error}"
            if self._ranks is not None and not self._ranks.least(not self.problem):
                self.problem = self.problem or "another rank could not capture one"
            if self.problem:
                self._graphs.pop(size, None)
                print(f"gpu_backend: no more graphs, decodes go on without: {self.problem}", file=sys.stderr)  # noqa: T201
                return

    @torch.inference_mode()
    def _try_capture_penalised(self, size: Size) -> None:
        """Make a graph that draws tokens which are penalised, if it can be made: this rank alone draws."""
        self._wanted = None
        if self.problem:
            return
        self.fill((), size)
        self._tell_penalties((), size)
        try:
            self._graph_capture.warm_up(lambda: self._draw_penalised(size))
            self._penalised[size] = self._graph_capture.capture(lambda: self._draw_penalised(size))
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            print(f"gpu_backend: no more graphs, decodes go on without: {self.problem}", file=sys.stderr)  # noqa: T201

    def forget(self) -> None:
        """Let all graphs go: the memory that they read is to be another. Those that are used are captured again."""
        self._graphs.clear()
        self._penalised.clear()
        self._wanted = None

    def capture(self, size: Size) -> None:
        """Make the graph of that size."""
        self._warm_up_size(size)
        self._capture_size(size)

    @torch.inference_mode()
    def _warm_up_size(self, size: Size) -> None:
        """Compute a step without sequences. Each rank does so for itself: no rank waits for one that fails."""
        self._rows[size] = self._room.cut(size.places, size.width)
        self.fill((), size)
        with self._ranks.apart() if self._ranks is not None else nullcontext():
            self._graph_capture.warm_up(lambda: self._compute(size))
            if self._draws:
                self._graph_capture.warm_up(lambda: self._draw(size))

    @torch.inference_mode()
    def _capture_size(self, size: Size) -> None:
        if self._ranks is not None:
            self._ranks.share(self._rows[size].token_ids)  # a communicator is made by its first use, not in a capture
        forward = self._graph_capture.capture(lambda: self._compute(size))
        self._graphs[size] = (
            forward,
            self._graph_capture.capture(lambda: self._draw(size)) if self._draws else lambda: None,
        )

    def _inputs_of(self, size: Size) -> Tensor:
        places, width, *_ = size
        return self._inputs[: places * (HEADER + width)].view(places, HEADER + width)

    def _compute(self, size: Size) -> None:
        places, width, splits, adapted = size
        rows = self._rows[size]
        if width > 1 and self._device_state.has_texts:
            propose(self._inputs_of(size), self._device_state.on_device, width)
        ops.place_decodes(self._inputs_of(size), self._device_state.on_device, rows, self._block_size)
        if self._model.lag:
            rows.sampling.position.add_(self._model.lag)  # the noise is that of a token's own place
        if self._ranks is not None:
            self._ranks.share(rows.token_ids)
        layout = self._layouts.place(
            rows=slice(0, places * width),
            block_tables=rows.block_tables,
            context_lens=rows.context_lens,
            query_starts=rows.query_starts,
            max_query_len=width,
            num_splits=splits,
        )
        tensors = StepTensors(
            steps=(),
            token_ids=rows.token_ids,
            positions=rows.positions,
            slots=rows.slots,
            sampled_to=rows.positions,
            groups=(layout,),
            turned_by=self._turned_by(rows.positions),
            adapters=self._slots[: places * width] if adapted else None,
            recurrence=self._states.of_rows(self._inputs_of(size)[:, 0]) if self._states is not None else None,
        )
        self._hidden[: places * width].copy_(self._model.hidden_states(tensors, self._kv_cache, self._kv_scales))

    def _turned_by(self, positions: Tensor) -> Tensor | None:
        """Return what ropes turn by, where pictures may have moved positions; unused rows may lie before the first."""
        return (positions - self._moved[: len(positions)]).clamp_(min=0) if len(self._moved) else None

    def _draw(self, size: Size) -> None:
        places, width, *_ = size
        rows = self._rows[size]
        tokens, usable = draw(self._model.logits(self._hidden[: places * width]), rows.sampling)
        ops.accept_draws(self._inputs_of(size), self._device_state.on_device, rows, tokens, usable)

    def _draw_penalised(self, size: Size) -> None:
        """Draw for places of one token each, by what is counted of their replies."""
        places, rows, inputs = size.places, self._rows[size], self._inputs_of(size)
        assert self._counts is not None, "penalties look back at what was counted"
        logits = self._model.logits(self._hidden[:places])
        weighed = ops.penalise(logits, inputs[:, 0], self._counts.table, self._penalties[:places])
        tokens, usable = draw(weighed, rows.sampling)
        ops.accept_draws(inputs, self._device_state.on_device, rows, tokens, usable)

    def _drawing_of_penalised(self, steps: Sequence[SequenceStep], size: Size) -> Replay:
        """Return what draws their tokens, from a graph if there is one; if not, the next step captures it."""
        self._tell_penalties(steps, size)
        if size in self._graphs and size not in self._penalised:
            self._wanted = size
        return self._penalised.get(size) or partial(self._draw_penalised, size)

    def _tell_penalties(self, steps: Sequence[SequenceStep], size: Size) -> None:
        """Tell the device the penalties of each place."""
        asked = [step.sampling.penalties for step in steps] + [NO_PENALTIES] * (size.places - len(steps))
        wishes = pinned(asked, self._penalties.device, torch.float32)
        self._penalties[: size.places].copy_(wishes, non_blocking=True)
