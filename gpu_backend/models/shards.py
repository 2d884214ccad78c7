# A model cut across ranks: each has some of the heads and some of the MLP's width (Shoeybi et al. 2019, Megatron-LM).
# Products that widen are cut by outputs, those that narrow by inputs; the sum over ranks of the latter is the layer's.

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpu_backend.models.config import ModelConfig, UnsupportedModel
from gpu_backend.models.weights import WeightSource

WIDENING = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
NARROWING = ("o_proj", "down_proj")


def config_of_rank(model: ModelConfig, ranks: int) -> ModelConfig:
    """Return the shape of one rank's part. Raises ``UnsupportedModel`` where it does not divide."""
    for name in ("num_kv_heads", "intermediate_size"):
        if getattr(model, name) % ranks:
            raise UnsupportedModel(f"{name} is {getattr(model, name)}, which {ranks} ranks do not divide")
    if model.packed is not None:
        raise UnsupportedModel(f"{model.packed.method} checkpoints are served by one rank only")
    return replace(
        model,
        num_heads=model.num_heads // ranks,
        num_kv_heads=model.num_kv_heads // ranks,
        intermediate_size=model.intermediate_size // ranks,
    )


class ShardedWeights:
    """One rank's part of the tensors of ``source``, asked for by the shapes of ``config_of_rank``."""

    def __init__(self, source: WeightSource, rank: int, ranks: int) -> None:
        self.linear = source.linear
        self.packed = source.packed
        self._source = source
        self._rank = rank
        self._ranks = ranks

    def get(self, name: str, *shape: int) -> Tensor:
        """Return the part, or what all ranks have alike. Raises ``UnsupportedModel``."""
        module, kind = name.split(".")[-2:]
        if module in NARROWING and kind == "bias":  # it is added once
            whole = self._source.get(name, *shape)
            return whole if self._rank == 0 else torch.zeros_like(whole)
        if module not in WIDENING + NARROWING:
            return self._source.get(name, *shape)
        dim = 1 if module in NARROWING else 0
        full = [size * self._ranks if i == dim else size for i, size in enumerate(shape)]
        return self._source.get(name, *full).chunk(self._ranks, dim)[self._rank].clone()

    def get_whole(self, name: str, *shape: int) -> Tensor:
        """Raise ``UnsupportedModel``: packed weights are not cut."""
        raise UnsupportedModel(f"{name} is packed, and packed weights are not cut across ranks")


def num_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a model, or in a part of one; what is there twice counts once."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, tuple):
            for item in value:
                look(item)
        elif is_dataclass(value):
            for field in fields(value):
                look(getattr(value, field.name))

    look(part)
    return sum(found.values())
