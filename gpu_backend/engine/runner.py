# Owns the device: loads the model, makes room for the KV cache, and computes one step plan at a time.

from __future__ import annotations

import time

import torch
from torch import Tensor

from gpu_backend.config import EngineConfig
from gpu_backend.engine.batch import Batch, build_batch
from gpu_backend.engine.host_cache import HostCache
from gpu_backend.engine.plan import SequenceStep, StepPlan, StepResult, TokenLogprob
from gpu_backend.engine.sampler import report_logprobs, sample
from gpu_backend.engine.sequence import SamplingParams
from gpu_backend.engine.verification import num_gained, rows_of
from gpu_backend.kernels.grouping import Grouping
from gpu_backend.models.config import ModelConfig, UnsupportedModel
from gpu_backend.models.registry import load_model
from gpu_backend.models.weights import Checkpoint, RandomWeights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ROWS_TO_SCORE = 128  # logits of so many positions exist at once where a prompt is scored
GPU_WORKSPACE_BYTES = 1024**3  # activations and logits of a full step


class Runner:
    """The model and its KV cache on one device. Raises ``UnsupportedModel`` if the checkpoint cannot be served."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.device = _choose_device(config.device)
        self.dtype = DTYPES.get(config.dtype, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.block_size = config.block_size
        self.model_config = model_config
        wished = _wished_length(config, self.model_config)
        dummy = config.load_format == "dummy"
        weights = (
            RandomWeights(self.device, self.dtype) if dummy else Checkpoint(config.folder, self.device, self.dtype)
        )
        with torch.inference_mode():
            self._model = load_model(self.model_config, weights, wished)
            self.num_blocks = config.num_kv_blocks or self._affordable_blocks(config, wished)
            # One block more than is handed out: the null block, zeros for ever, pads block tables.
            self.kv_cache = torch.zeros(
                (
                    self.model_config.num_layers,
                    self.num_blocks + 1,
                    self.block_size,
                    2,
                    self.model_config.num_kv_heads,
                    self.model_config.head_dim,
                ),
                dtype=self.dtype,
                device=self.device,
            )
            self.num_host_blocks = config.host_kv_bytes // self._block_bytes
            self._host_cache = HostCache(self.num_host_blocks, self.kv_cache)
            self.max_model_len = _possible_length(config, wished, self.num_blocks * self.block_size)
            self._grouping = Grouping(
                self.block_size,
                self.num_blocks,
                self.max_model_len,
                self.device,
                self.dtype,
                window=max(self.model_config.windows),
            )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step: store its keys and values, and return a token for each sequence that samples."""
        started = time.perf_counter()
        self._host_cache.make(plan.copies)
        batch = build_batch(plan, self._grouping, self.device)
        if batch.fresh_blocks is not None:
            # Masked out or not, a leftover that is not a number would spoil its neighbours' sums.
            self.kv_cache.index_fill_(1, batch.fresh_blocks, 0)
        hidden = self._model.hidden_states(batch, self.kv_cache)
        tokens, logprobs, failed = self._sample(batch, hidden)
        failed |= _not_finite(batch, hidden)
        if retracted := [step for step in batch.samplers if step.num_proposed and step.sequence_id in failed]:
            self._retract(batch, retracted)
            failed -= {step.sequence_id for step in retracted}
            for step in retracted:
                tokens[step.sequence_id] = logprobs[step.sequence_id] = ()
        pooled = {step.sequence_id: hidden[rows].float().sum(0) for step, rows in batch.poolers}
        scored = {step.sequence_id: self._score(step, hidden[rows]) for step, rows in batch.scorers}
        samplers = [step.sequence_id for step in plan.sequences if step.samples]
        guessed = any(step.num_proposed for step in batch.samplers)
        return StepResult(
            step=plan.step,
            token_ids=tuple(token for id_ in samplers for token in tokens[id_]),
            logprobs=tuple(logprob for id_ in samplers for logprob in logprobs[id_]) if any(logprobs.values()) else (),
            counts=tuple(len(tokens[id_]) for id_ in samplers) if guessed else (),
            failed=frozenset(failed),
            pooled=tuple(tuple(pooled[step.sequence_id].tolist()) for step in plan.sequences if step.pools),
            scored=tuple(scored[step.sequence_id] for step in plan.sequences if step.targets),
            seconds=time.perf_counter() - started,
        )

    def warm_up(self) -> None:
        """Compute a prefill and a decode of no request, so that the first one does not wait for libraries to get ready.

        What it leaves in the KV cache belongs to nobody: blocks are only read up to what their sequence has written.
        """
        sampling = SamplingParams(max_tokens=2)
        prompt = (0,) * (self.block_size if self.num_blocks > 1 else self.block_size - 1)
        table = (0, 1)[: self.num_blocks]
        for step, (tokens, start) in enumerate([(prompt, 0), ((0,), len(prompt))]):
            self.run(StepPlan(step, (SequenceStep(0, tokens, start, table, True, sampling, 0),)))

    @property
    def _block_bytes(self) -> int:
        return self.model_config.kv_floats_per_token * self.block_size * self.dtype.itemsize

    def _sample(
        self, batch: Batch, hidden: Tensor
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[TokenLogprob | None, ...]], set[int]]:
        """Return tokens and log-probabilities by sequence id, and the ids of those whose logits are not finite."""
        if not batch.samplers:
            return {}, {}, set()
        rows = hidden if batch.sample_rows is None else hidden.index_select(0, batch.sample_rows)
        sampled = sample(self._model.logits(rows), [row for step in batch.samplers for row in rows_of(step)])
        asked = any(step.sampling.logprobs is not None for step in batch.samplers)
        tokens: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        failed: set[int] = set()
        first = 0
        for step in batch.samplers:
            count = num_gained(step, sampled.token_ids[first : first + step.num_proposed + 1])
            tokens[step.sequence_id] = tuple(sampled.token_ids[first : first + count])
            if asked:
                logprobs[step.sequence_id] = tuple(sampled.logprobs[first : first + count])
            if not all(sampled.finite[first : first + count]):
                failed.add(step.sequence_id)
            first += step.num_proposed + 1
        return tokens, logprobs, failed

    def _retract(self, batch: Batch, steps: list[SequenceStep]) -> None:
        """Put zeros where these steps wrote keys and values: what is not a number would spoil all that comes later."""
        where = batch.slots.split([len(step.token_ids) for step in batch.steps])
        ids = {step.sequence_id for step in steps}
        slots = torch.cat([own for step, own in zip(batch.steps, where, strict=True) if step.sequence_id in ids])
        self.kv_cache.flatten(1, 2).index_fill_(1, slots, 0)

    def _score(self, step: SequenceStep, hidden: Tensor) -> tuple[TokenLogprob, ...]:
        """Return the log-probability of each target, some rows at a time: all logits of a long prompt have no room."""
        scores: list[TokenLogprob] = []
        targets = torch.tensor(step.targets, device=self.device)
        for rows, own in zip(hidden.split(ROWS_TO_SCORE), targets.split(ROWS_TO_SCORE), strict=True):
            counts = [step.sampling.prompt_logprobs or 0] * len(own)
            scores += report_logprobs(self._model.logits(rows).log_softmax(-1), own, counts)
        return tuple(scores)

    def _affordable_blocks(self, config: EngineConfig, max_model_len: int) -> int:
        """Return how many blocks fit the memory; on the CPU no more than all sequences at full length need."""
        block_bytes = self._block_bytes
        if self.device.type == "cpu":
            useful = config.max_num_seqs * -(-max_model_len // self.block_size)
            return max(1, min(useful, config.cpu_kv_bytes // block_bytes))
        free, total = torch.cuda.mem_get_info(self.device)
        room = int(free - (1 - config.gpu_memory_share) * total) - GPU_WORKSPACE_BYTES
        if room < block_bytes:
            raise UnsupportedModel("the device has no memory left for a KV cache; raise gpu_memory_share or free some")
        return room // block_bytes


def _not_finite(batch: Batch, hidden: Tensor) -> set[int]:
    """Return the ids of sequences that have a hidden state which is not a number, before anyone shares their blocks.

    Even positions before the fault are lost: what is not a number stays so when it is masked.
    """
    finite = torch.isfinite(hidden.float().sum(-1))
    if bool(finite.all()):
        return set()
    lens = [len(step.token_ids) for step in batch.steps]
    return {step.sequence_id for step, rows in zip(batch.steps, finite.split(lens), strict=True) if not rows.all()}


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("device is cuda, but torch finds no CUDA device here; use cpu or auto")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _wished_length(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise UnsupportedModel(
            f"max_model_len is {config.max_model_len}, but the model knows only {model.max_position} positions"
        )
    return config.max_model_len or model.max_position


def _possible_length(config: EngineConfig, wished: int, capacity: int) -> int:
    """Return the longest sequence that fits alone, so that nothing admitted can ever be stuck."""
    if config.max_model_len is not None and wished > capacity:
        raise UnsupportedModel(
            f"max_model_len is {wished}, but the KV cache holds {capacity} tokens; lower it or add KV blocks"
        )
    return min(wished, capacity)
