# What tells attention where the sequences of a step lie, for a model and its draft model: as kernels read it, or as
# plain torch does.

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.kernels.layout.paged import PagedLayouts, invariant_split
from gpu_backend.models.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Makes it for models on one device that compute in ``dtype``."""

    block_size: int
    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool

    def of(self, model: ModelConfig, num_blocks: int, max_model_len: int) -> Grouping | PagedLayouts:
        """Return it for a model whose cache has blocks up to the null block."""
        if ops.uses_triton(self.device):
            return self.layouts(model, max_model_len)
        return Grouping(
            self.block_size,
            num_blocks,
            max_model_len,
            self.device,
            self.dtype,
            window=max(model.windows),
            batch_invariant=self.batch_invariant,
        )

    def layouts(self, model: ModelConfig, max_model_len: int) -> PagedLayouts:
        """Return the layouts that kernels read; graphs are captured with them on any device."""
        processors = ops.num_processors(self.device)
        split = invariant_split(max_model_len) if self.batch_invariant else 0
        return PagedLayouts(self.block_size, model.num_heads, model.num_kv_heads, self.device, processors, split)
