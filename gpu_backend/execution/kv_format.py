# What a KV cache is made of, and what tells attention where sequences lie in it; for a model, and for its draft model
# in the same blocks. The scales of a float8 cache follow from some tokens that go through the model.

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.paged import PagedLayouts, invariant_split
from gpu_backend.kernels.layout.quantized_kv import KvScales, scales_from
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.draft_heads import FeatureStore
from gpu_backend.models.layers import Decoder
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import build_tensors

TOKENS_TO_MEASURE = 256  # that the scales of a float8 KV cache follow from


@dataclass(frozen=True, slots=True)
class Placement:
    """Makes what tells attention where sequences lie, as kernels read it or as plain torch does.

    It does so for models on one device that compute in ``dtype``.
    """

    block_size: int
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool

    def of(self, model: ModelConfig, num_blocks: int, max_model_len: int) -> Grouping | PagedLayouts:
        """Return what a model's steps are laid out by; its cache has ``num_blocks`` before the null block."""
        if ops.uses_triton(self.device):
            return self.layouts(model, max_model_len)
        return Grouping(
            self.block_size,
            num_blocks,
            max_model_len,
            self.device,
            self.dtype,
            window=model.window,
            batch_invariant=self.batch_invariant,
        )

    def layouts(self, model: ModelConfig, max_model_len: int) -> PagedLayouts:
        """Return the layouts that kernels read; graphs are captured with them on any device."""
        processors = ops.num_processors(self.device)
        split = invariant_split(max_model_len) if self.batch_invariant else 0
        return PagedLayouts(self.block_size, model.num_heads, model.num_kv_heads, self.device, processors, split)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How the keys and values of a model that computes in ``dtype`` are kept: as that, or with ``scales`` in float8.

    Behind the model's layers there is room for the ``features`` that a draft head reads.
    """

    model: ModelConfig
    block_size: int
    dtype: torch.dtype
    device: torch.device
    features: FeatureStore | None = None
    scales: tuple[KvScales, ...] | None = None  # of each layer

    @property
    def number(self) -> torch.dtype:
        """What a number is kept as; the bytes of float8 are plain bytes to everything but attention."""
        return self.dtype if self.scales is None else torch.uint8

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers of it."""
        return self._layers * math.prod(self.model.kv_shape) * self.block_size * self.number.itemsize

    def empty(self, num_blocks: int) -> Tensor:
        """Return a cache of zeros."""
        model = self.model
        shape = (self._layers, num_blocks, self.block_size, *model.kv_shape)
        return torch.zeros(shape, dtype=self.number, device=self.device)

    def in_float8(self, model: Decoder, placement: Placement, longest: int) -> KvFormat:
        """Return it with each layer's scales by the keys and values of tokens from all over the vocabulary. Raises
        ``UnsupportedModel``."""
        if self.model.latent is not None:
            raise UnsupportedModel("kv_cache_dtype is fp8; latent vectors are kept as they are: leave it out")
        count = min(longest, TOKENS_TO_MEASURE)
        blocks = -(-count // self.block_size)
        cache = self.empty(blocks + 1)
        tokens = tuple(i * self.model.vocab_size // count for i in range(count))
        step = SequenceStep(0, tokens, 0, tuple(range(blocks)), False, SamplingParams(1), 0)
        where = placement.of(self.model, blocks, count)
        model.hidden_states(build_tensors(StepPlan(0, (step,)), where, self.device), cache)
        return replace(self, scales=tuple(scales_from(layer) for layer in cache[: self.model.num_kv_layers].unbind(0)))

    @property
    def _layers(self) -> int:
        beside = self.features.layers_beside(math.prod(self.model.kv_shape), self.number) if self.features else 0
        return self.model.num_kv_layers + beside
