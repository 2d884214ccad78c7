# Owns the device: loads the model, allocates the KV cache, and computes one step plan at a time.

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.execution.block_store import KvBlockStore
from gpu_backend.execution.device_state import DeviceState
from gpu_backend.execution.device_step import DeviceStep
from gpu_backend.execution.draft_model import DraftModel
from gpu_backend.execution.fingerprint import fingerprint_of
from gpu_backend.execution.graph_capture import CudaGraphCapture, EagerRerun, GraphCapture
from gpu_backend.execution.graphs import DecodeGraphs
from gpu_backend.execution.host_cache import HostCache
from gpu_backend.execution.kv_format import KvFormat, Placement
from gpu_backend.execution.loading import load_draft_config, load_draft_model, load_part, load_pictures
from gpu_backend.execution.warm_up import (
    compile_attention_for,
    lengths_to_compile,
    plans_of_no_request,
    seconds_per_copy,
)
from gpu_backend.hardware.capability import check_capability
from gpu_backend.hardware.capacity import affordable_blocks, possible_length, requested_length
from gpu_backend.hardware.device_memory import DeviceMemory
from gpu_backend.hardware.roofline import Roofline, measure_roofline
from gpu_backend.hardware.timer import Timer
from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.paged import PagedLayouts
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.lora.slots import AdapterSlots, with_adapters
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.linear_attention import check_beside_states
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.draft_heads import DraftHead
from gpu_backend.models.layers import Decoder
from gpu_backend.models.quantization import Linear
from gpu_backend.models.shards import config_of_rank, num_bytes, stage_of, tensors_of
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.sampling.verification import rows_of
from gpu_backend.step.adapter import ANY, NONE
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.grammar import begin_masks
from gpu_backend.step.messages import Sleep, WakeUp
from gpu_backend.step.plan import (
    TEXT_WINDOW,
    UNKNOWN,
    Computed,
    DeviceLost,
    Launched,
    SequenceStep,
    StepPlan,
    StepResult,
    StepRunner,
)
from gpu_backend.step.step_tensors import build_tensors

if TYPE_CHECKING:
    from gpu_backend.execution.ranks import Ranks

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Runner(StepRunner):
    """The model and its KV cache on one device. Raises ``UnsupportedModel`` if the checkpoint cannot be served."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, ranks: Ranks | None = None) -> None:
        """Load it; of several ranks the first starts the others, which come with ``ranks``."""
        cut = config_of_rank(
            model_config, config.device.tensor_parallel_size, by_expert=config.device.enable_expert_parallel
        )
        for stage in range(config.device.pipeline_parallel_size):  # refused here, as what follows, not in all ranks
            stage_of(cut, stage, config.device.pipeline_parallel_size)
        if cut.linear is not None:
            check_beside_states(config)
        self.keeps_states = cut.linear is not None
        place = ranks.rank if ranks else 0
        if config.device.ranks_meet_at is not None:
            place = 0  # each sees its own device, and no others
        self.device = _choose_device(config.device.device, place)
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            check_capability(config, model_config, (card.major, card.minor), load_draft_config(config, model_config))
        if ranks is None and config.device.num_ranks > 1:
            from gpu_backend.execution.ranks import start_ranks

            ranks = start_ranks(config)
        self._ranks = ranks
        self._leads = ranks is None or ranks.rank == 0
        self.is_asynchronous = self.device.type == "cuda"  # it computes while the host goes on
        self.dtype = DTYPES.get(config.device.dtype, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.block_size = config.cache.block_size
        self._most_tokens = config.steps.max_num_batched_tokens
        self._all_layers = cut
        self.model_config = stage_of(cut, ranks.stage, ranks.stages) if ranks else cut
        self._roofline: Roofline | None = None  # measured when warming up
        self._memory: DeviceMemory | None = None  # given back, while the engine sleeps
        self._spoilt: list[int] = []  # slots that drafts filled with what is no number
        requested = requested_length(config, self.model_config)
        with torch.inference_mode():
            self._load(config, model_config, requested)
            self._allocate(config, requested)
            self._make_tables(config)
        first = self.model_config.layers_before
        layers = range(first, first + self.model_config.num_layers)
        # Each rank's layers, bytes of weights, and of the KV cache.
        mine = (layers, num_bytes((self._model, self._pictures and self._pictures.tower)), self.kv_cache.nbytes)
        self.parts_of_ranks: list[tuple[range, int, int]] = ranks.gather(mine) if ranks else [mine]

    def _load(self, config: EngineConfig, whole: ModelConfig, max_model_len: int) -> None:
        """Load this rank's part of the model, the tower, and on the first rank what drafts."""
        self._model = load_part(config, self.model_config, self._ranks, self.device, self.dtype, max_model_len)
        self._pictures = load_pictures(config, self.model_config, self.device, self.dtype)
        out = self._model.layers[0].attention.out
        self._is_quantized = isinstance(out, Linear) and out.scales is not None
        self.adapters = AdapterSlots(config.lora.num_slots, config.lora.max_lora_rank)
        if self.adapters.count:
            self._model = with_adapters(self._model, self.adapters)
        self._draft_model: DraftModel | None = None
        if config.speculation.has_model and self._leads:
            draft_model, reader = load_draft_model(config, whole, self._model, self.device, self.dtype, max_model_len)
            self._model = replace(self._model, reader=reader)
            self._draft_model = DraftModel(config, whole, draft_model, self.device, self.dtype)

    def _allocate(self, config: EngineConfig, max_model_len: int) -> None:
        """Allocate the KV cache, its part in host memory, and the draft model's."""
        ranks, drafts = self._ranks, self._draft_model
        self._batch_invariant = config.device.batch_invariant
        self._placement = Placement(self.block_size, self.device, self.dtype, config.device.batch_invariant)
        features = drafts.features if drafts is not None else None
        self._kv = KvFormat(self.model_config, self.block_size, self.dtype, self.device, features)
        if config.cache.kv_cache_dtype == "fp8":
            self._kv = self._kv.in_float8(self._model, self._placement, max_model_len)
        bytes_of_both = self._kv.block_bytes + (drafts.kv.block_bytes if drafts is not None else 0)
        self.num_blocks = config.cache.num_kv_blocks or affordable_blocks(
            config, self.model_config, self.device, self.dtype.itemsize, bytes_of_both, max_model_len
        )
        self.num_blocks = ranks.least(self.num_blocks) if ranks else self.num_blocks
        # Two blocks more than are handed out: one takes what graphs' unused places compute, and the last, the null
        # block, zeros for ever, pads block tables.
        self.kv_cache = self._kv.empty(self.num_blocks + 2)
        if features is not None:
            features.open(self.kv_cache[self.model_config.num_layers :])
        self.num_host_blocks = config.cache.host_kv_bytes // self._kv.block_bytes
        self.num_host_blocks = ranks.least(self.num_host_blocks) if ranks else self.num_host_blocks
        self._host_cache = HostCache(self.num_host_blocks, self.kv_cache)
        self.max_model_len = possible_length(config, max_model_len, self.num_blocks * self.block_size)

    def _make_tables(self, config: EngineConfig) -> None:
        """Make what a step is laid out by, what the device knows of sequences, and what replays graphs."""
        self._grouping = self._placement.of(self.model_config, self.num_blocks + 1, self.max_model_len)
        self._device_state = DeviceState(
            config.steps.max_num_seqs,
            -(-self.max_model_len // self.block_size),
            self.num_blocks,
            self.device,
            config.speculation.num_speculative_tokens,
            _text_window(config, self.max_model_len),
        )
        self._counts = TokenCounts(config.steps.max_num_seqs, self.model_config.vocab_size, self.device)
        self.graphs = self._make_graphs(config)
        if self.graphs is not None and self._device_state.has_texts:
            self.most_ahead = self.graphs.sizes.most_ahead
        if self._draft_model is not None:
            placement = self._placement.of(self._draft_model.config, self.num_blocks + 1, self.max_model_len)
            graphs = self._draft_graphs if self.graphs is not None else None
            self._draft_model.make_room(
                self.num_blocks, self.max_model_len, placement, graphs, self._counts, self.graphs
            )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step from beginning to end."""
        step = self.launch(plan)
        step.sample()
        return step.result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step: its keys and values get stored, and a token is sampled for each sequence that asks for one."""
        timer = Timer(self.device)
        self._counts.update(plan.sequences, self._device_state.last_tokens)
        if self._draft_model is not None:
            plan = self._draft_model.complete(plan)
        if self._spoilt:
            plan = replace(plan, cleared=tuple(self._spoilt))
            self._spoilt.clear()
        if self._ranks is not None and self._leads:
            self._ranks.tell(plan)
        try:
            step = self._compute(plan, timer)
        except Exception as error:
            if self._ranks is None:
                raise
            problem = f"rank {self._ranks.rank} failed while others wait for its part ({type(error).__name__}: {error})"
            raise DeviceLost(problem) from error
        if isinstance(step, DeviceStep) and not step.is_constrained:
            step.sample()
        return step

    def _compute(self, plan: StepPlan, timer: Timer) -> DeviceStep | Computed:
        """Launch the model; all ranks do the same."""
        if plan.cleared:
            self.kv_cache.flatten(1, 2).index_fill_(1, upload(plan.cleared, self.device, torch.long), 0)
        self._host_cache.make(plan.copies)
        if not plan.sequences:
            return Computed(StepResult(plan.step, (), 0.0))
        if self._model.states is not None and not plan.is_rehearsal:
            self._model.states.follow(plan.sequences)
        drawing, last_tokens = None, self._device_state.last_tokens
        size = self.graphs.find(plan) if self.graphs is not None else None
        if self.graphs is not None and (size is not None or plan.is_ahead):
            size = size or self.graphs.sizes.fitting(plan)
            self.graphs.fill(plan.sequences, size)
            timer.begin(after=plan.copies)
            tensors, hidden, drawing = self.graphs.replay(plan, size)
            others = tensors.samplers if drawing is None else drawing.others
            places, masks = self._begin_sampling(others) if self._leads else ([], None)
        else:
            slot_of = self.adapters.slot_of if self.adapters.count else None
            tensors = build_tensors(plan, self._grouping, self.device, slot_of)
            timer.begin(after=plan.copies)
            if tensors.unknown is not None:
                rows, origins = tensors.unknown
                tensors.token_ids.index_copy_(0, rows, last_tokens.index_select(0, origins))
                if self._ranks is not None:
                    self._ranks.share(tensors.token_ids)  # only the first rank samples
            if tensors.fresh_blocks is not None:
                # Masked out or not, a leftover that is not a number would spoil its neighbours' sums.
                self.kv_cache.index_fill_(1, tensors.fresh_blocks, 0)
            places, masks = self._begin_sampling(tensors.samplers) if self._leads else ([], None)
            if self._pictures is not None:
                tensors = self._pictures.put_into(tensors, self._model)
            hidden = self._model.hidden_states(tensors, self.kv_cache, self._kv.scales)
        if not self._leads:
            return Computed(StepResult(plan.step, (), 0.0))
        return DeviceStep(
            plan,
            tensors,
            places,
            masks,
            self._model,
            hidden,
            self._spoilt,
            self.block_size,
            last_tokens,
            self._counts,
            timer,
            self._roofline,
            drawing,
        )

    def _begin_sampling(self, samplers: Sequence[SequenceStep]) -> tuple[list[SequenceStep], Future[Tensor] | None]:
        """Return a step for each place that is sampled, and their grammars' masks, begun if their tokens are known."""
        places = list(samplers)
        if any(step.num_draft_tokens for step in places):
            places = [place for sampler in samplers for place in rows_of(sampler)]
        constraints = [place.constraint for place in places]
        if not any(constraints):
            return places, None
        if any(place.token_ids[0] == UNKNOWN for place in places if place.constraint is not None):
            return places, None
        return places, begin_masks(constraints, self.model_config.vocab_size)

    @property
    def draft_share(self) -> float:
        """What a step of the draft model takes, of one of the model's; 0 without one."""
        return self._draft_model.share if self._draft_model is not None else 0.0

    def warm_up(self) -> None:
        """Compute a prefill and a decode of no request, so that the first one does not wait for libraries to get ready,
        and measure what the device can do at best.

        What it leaves in the KV cache is no sequence's: blocks are only read up to what their sequence has written.
        """
        lengths: tuple[int, ...] = ()
        if isinstance(self._grouping, PagedLayouts):
            scales = self._kv.scales[0] if self._kv.scales is not None else None
            compile_attention_for(self.model_config, self._grouping, self.kv_cache[0], self.dtype, scales)
            room = min(self.max_model_len, self.num_blocks * self.block_size, self._most_tokens)
            own_products = self._batch_invariant or self._is_quantized
            lengths = tuple(length for length in lengths_to_compile(self.model_config, own_products) if length <= room)
        adapters = (NONE, ANY) if self.adapters.count else (NONE,)
        for adapter in adapters:
            for plan in plans_of_no_request(self.block_size, self.num_blocks, lengths, adapter):
                self.run(plan)
        if self.graphs is not None and self._ranks is None:
            self.graphs.warm_up()
        kv_bytes = self._all_layers.kv_floats_per_token * self._kv.number.itemsize
        self._roofline = measure_roofline(self._all_layers, self._model, kv_bytes, self.device)

    def _make_graphs(self, config: EngineConfig) -> DecodeGraphs | None:
        """Return the graphs of decodes, if there are to be any: none on the CPU, which has nothing to gain by them."""
        is_wanted = self.device.type == "cuda" if config.device.cuda_graphs is None else config.device.cuda_graphs
        by_rows = self._batch_invariant and not ops.uses_triton(self.device)  # plain torch then takes row by row
        if not is_wanted or by_rows:
            return None
        drafts = 0 if config.speculation.speculative_method == "off" else config.speculation.num_speculative_tokens
        layouts = self._placement.layouts(self.model_config, self.max_model_len)
        scales, graph_capture = self._kv.scales, self._graph_capture()
        return DecodeGraphs(
            self._model,
            self.kv_cache,
            scales,
            self._device_state,
            layouts,
            graph_capture,
            drafts,
            self._ranks,
            counts=self._counts,
        )

    def _draft_graphs(
        self, model: Decoder | DraftHead, kv_cache: Tensor, state: DeviceState, max_drafts: int
    ) -> DecodeGraphs:
        layouts = self._placement.layouts(model.config, self.max_model_len)
        return DecodeGraphs(model, kv_cache, None, state, layouts, self._graph_capture(), max_drafts, verifies=False)

    def _graph_capture(self) -> GraphCapture:
        return CudaGraphCapture(self.device) if self.device.type == "cuda" else EagerRerun()

    def follow(self, told: StepPlan | Sleep | WakeUp) -> None:
        """Do what the first rank says."""
        match told:
            case Sleep():
                self.sleep()
            case WakeUp():
                self.wake_up()
            case plan:
                self.launch(plan)

    def sleep(self) -> None:
        """Give the device's memory back: weights go to host memory, where a CPU's are; the KV cache is dropped, and
        graphs, which are captured anew. Raises ``RuntimeError`` where a rank cannot, and gives back nothing then."""
        if self._ranks is not None and self._leads:
            self._ranks.tell(Sleep(0))
        on_gpu = self.device.type == "cuda"
        drafts = self._draft_model
        parts = (self._model, drafts and drafts.model, self._pictures and self._pictures.tower)
        weights = [*tensors_of(parts)] if on_gpu else []
        if self._pictures is not None:
            self._pictures.forget()
        states = self._model.states
        kept = [
            self.kv_cache,
            *([drafts.kv_cache] if drafts else []),
            *([states.inputs, states.sums] if states else []),
        ]
        memory = DeviceMemory(weights, kept)
        for graphs in (self.graphs, drafts.graphs if drafts else None):
            if graphs is not None:
                graphs.forget()
        if self._on_all_ranks(memory.release, undo=memory.restore):
            self._memory = memory

    def wake_up(self) -> None:
        """Take it again. Raises ``RuntimeError`` where another has a rank's meanwhile, and takes nothing then."""
        if self._ranks is not None and self._leads:
            self._ranks.tell(WakeUp(0))
        memory = self._memory
        if memory is not None and self._on_all_ranks(memory.restore, undo=memory.release):
            self._memory = None

    def _on_all_ranks(self, change: Callable[[], object], undo: Callable[[], object]) -> bool:
        """Make a change on all ranks or on none, and return which; where on none, the first rank raises why."""
        problem = None
        try:
            change()
        except Exception as error:
            problem = str(error)
        problems = [problem] if self._ranks is None else self._ranks.gather(problem)
        found = next((each for each in problems if each is not None), None)
        if found is None:
            return True
        undo()
        if self._leads:
            raise RuntimeError(found)
        return False

    def close(self) -> None:
        """Let the other ranks go, if there are any."""
        if self._ranks is not None:
            self._ranks.tell(None)
            self._ranks.leave()

    def block_store(self, config: EngineConfig) -> KvBlockStore:
        """Return the bytes of the KV blocks, for other engines that have the same model."""
        return KvBlockStore(self.kv_cache, fingerprint_of(config, self.dtype, self._kv.scales, self._model.ropes))

    @torch.inference_mode()
    def measure_copies(self) -> float | None:
        """Return the seconds that a block's way to host memory or back takes; None without any such memory."""
        return seconds_per_copy(self._host_cache, min(self.num_host_blocks, self.num_blocks), self.device)


def _choose_device(name: str, rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("device is cuda, but torch finds no CUDA device here; use cpu or auto")
    if name == "cuda" and rank >= torch.cuda.device_count():
        raise UnsupportedModel(f"rank {rank} has no CUDA device of its own; torch finds {torch.cuda.device_count()}")
    if name == "cuda":
        torch.cuda.set_device(rank)  # where Triton and NCCL launch
    return torch.device(name, rank) if name == "cuda" else torch.device(name)


def _text_window(config: EngineConfig, max_model_len: int) -> int:
    """Return how many tokens of each text the device keeps to draft from; 1: none, the host does it."""
    if config.speculation.speculative_method != "ngram" or config.device.num_ranks > 1:
        return 1
    return 1 << (min(max_model_len, TEXT_WINDOW) - 1).bit_length()
