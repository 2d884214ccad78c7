# A model cut across ranks. In a stage each has some of the heads and some of the MLP's width (Shoeybi et al. 2019,
# Megatron-LM): products that widen are cut by outputs, those that narrow by inputs, and the sum over ranks of the
# latter is the layer's. A mixture's experts are cut so, or each rank has some of them, whole (GShard, Lepikhin et al.
# 2020); the sum is the same. A pipeline's stages have some of the layers each (Huang et al. 2019, GPipe).

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpu_backend.models.config.architectures import ARCHITECTURES
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.config.packed_format import MXFP4_GROUP
from gpu_backend.models.weights import Rows, WeightSource

OF_LINEAR_ATTENTION = ("in_proj_qkvz", "in_proj_ba", "in_proj_z", "in_proj_b", "in_proj_a")
WIDENING = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", *OF_LINEAR_ATTENTION)
NARROWING = ("o_proj", "down_proj", "out_proj")
OF_ALL_HEADS = ("in_proj_qkv", "conv1d")  # queries, keys and values, each of all heads: cut each by itself
OF_HEADS = ("sinks", "A_log", "dt_bias")
STACKED = {  # of tensors of all of a GPT-OSS' experts: which dimension is their inner one
    "gate_up_proj": 2,
    "gate_up_proj_bias": 1,
    "gate_up_proj_blocks": 1,
    "gate_up_proj_scales": 1,
    "down_proj": 1,
    "down_proj_blocks": 2,
    "down_proj_scales": 2,
}
ADDED_ONCE = ("bias", "down_proj_bias")  # of what narrows
BY_GROUP = ("scales", "qzeros")  # of packed weights: a row for each group of inputs
PACKED = ("qweight", *BY_GROUP)  # these are (inputs, outputs), the other way round than weights
BY_GROUP_BEHIND = ("weight_scale", "weight_zero_point")  # of compressed ones: a column for each
OF_INPUTS = ("g_idx", "weight_g_idx")  # which group each is of


def config_of_rank(model: ModelConfig, ranks: int, by_expert: bool = False) -> ModelConfig:
    """Return the shape of one rank's part of every layer; ``by_expert``: of mixtures it has whole experts.

    Raises ``UnsupportedModel`` where it does not divide.
    """
    if ranks == 1:
        return model
    heads = "num_kv_heads" if model.latent is None else "num_heads"  # every rank has all latent vectors
    sizes = {name: getattr(model, name) for name in (heads, "intermediate_size")}
    experts = model.experts
    if experts is not None:
        inner, shared = experts.intermediate_size, experts.shared_size // ranks
        if by_expert:
            sizes["the number of experts"] = experts.number
        else:
            sizes["the experts' intermediate_size"], inner = inner, inner // ranks
        sizes["the shared expert's"] = experts.shared_size
        held = experts.number // ranks if by_expert else None
        experts = replace(experts, intermediate_size=inner, shared_size=shared, of_rank=held)
    elif by_expert:
        raise UnsupportedModel("enable_expert_parallel is set, but this model has no mixture of experts; leave it out")
    linear = model.linear
    if linear is not None:
        sizes["linear_num_key_heads"] = linear.key_heads
        heads_of_rank = linear.key_heads // ranks, linear.value_heads // ranks
        linear = replace(linear, key_heads=heads_of_rank[0], value_heads=heads_of_rank[1])
    for name, size in sizes.items():
        if size % ranks:
            raise UnsupportedModel(f"{name} is {size}, which {ranks} ranks do not divide")
    part = replace(
        model,
        num_heads=model.num_heads // ranks,
        num_kv_heads=model.num_kv_heads // ranks if model.latent is None else 1,
        intermediate_size=model.intermediate_size // ranks,
        experts=experts,
        linear=linear,
    )
    is_mxfp4 = model.packed is not None and model.packed.method == "mxfp4"
    if is_mxfp4 and experts is not None and experts.intermediate_size % MXFP4_GROUP:
        raise UnsupportedModel(f"{ranks} ranks cut through the experts' blocks of {MXFP4_GROUP} inputs (mxfp4)")
    if model.packed is not None and model.packed.is_of_words:
        group = max(model.packed.group_size, model.packed.per_word)  # inputs of a scale, outputs of a word
        widths = [part.attended_width, part.intermediate_size]
        widths += [experts.intermediate_size, experts.shared_size] if experts is not None else []
        widths += [linear.value_width] if linear is not None else []
        if any(width % group for width in widths) or math.prod(part.kv_shape[1:]) % model.packed.per_word:
            raise UnsupportedModel(f"{ranks} ranks cut through the checkpoint's groups of {group} inputs or outputs")
    return part


def stage_of(model: ModelConfig, stage: int, stages: int) -> ModelConfig:
    """Return the shape of one stage, with its share of the layers. Raises ``UnsupportedModel`` if there are too few."""
    if model.num_layers < stages:
        raise UnsupportedModel(f"{model.num_layers} layers are too few for {stages} pipeline stages")
    first, end = (model.num_layers * border // stages for border in (stage, stage + 1))
    part = replace(
        model,
        num_layers=end - first,
        windows=model.windows[first:end],
        ropes=model.ropes[first:end],
        experts=model.experts and replace(model.experts, layers=model.experts.layers[first:end]),
        linear=model.linear and replace(model.linear, layers=model.linear.layers[first:end]),
        layers_before=first,
        layers_after=model.num_layers - end,
    )
    if not part.num_kv_layers:
        raise UnsupportedModel(
            f"of {stages} pipeline stages stage {stage + 1} has linear attention alone; each needs a layer that has "
            "keys and values: take fewer"
        )
    return part


def shard(source: WeightSource, model: ModelConfig, rank: int, ranks: int, by_expert: bool = False) -> ShardedWeights:
    """Return one rank's part of a model's tensors; a norm of all heads is cut with them."""
    cuts_norms = ARCHITECTURES[model.architecture].qk_norm == "width"
    widening = (*WIDENING, "q_norm", "k_norm") if cuts_norms else WIDENING
    keys, values = (model.linear.key_width, model.linear.value_width) if model.linear is not None else (0, 0)
    return ShardedWeights(source, rank, ranks, widening, by_expert, (keys, keys, values))


class ShardedWeights(WeightSource):
    """One rank's part of the tensors of ``source``, asked for by the shapes of ``config_of_rank``."""

    def __init__(
        self,
        source: WeightSource,
        rank: int,
        ranks: int,
        widening: tuple[str, ...] = WIDENING,
        by_expert: bool = False,
        kinds: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.linear = source.linear
        self.packed = source.packed
        self._source = source
        self._widening = widening
        self._rank = rank
        self._ranks = ranks
        self._by_expert = by_expert
        self._kinds = kinds  # rows of ``OF_ALL_HEADS``: those of queries, of keys, and of values

    def own_experts(self, number: int) -> range:
        """Return the rank's experts: a part of them, or all, where it has a part of each."""
        own = number // self._ranks
        return range(self._rank * own, (self._rank + 1) * own) if self._by_expert else range(number)

    def get(self, name: str, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the part, or what all ranks have alike. Raises ``UnsupportedModel``."""
        module, kind = name.split(".")[-2:]
        if rows is not None and self._by_expert:
            return self._source.get(name, *shape, rows=rows)
        if module in (*NARROWING, "experts") and kind in ADDED_ONCE:
            whole = self._source.get(name, *shape)
            return whole if self._rank == 0 else torch.zeros_like(whole)
        return self._part(self._source.get, self._dim(name), name, shape)

    def get_stored(self, name: str, dtype: torch.dtype, *shape: int, rows: Rows | None = None) -> Tensor:
        """Return the part of a tensor of packed or rounded numbers. Raises ``UnsupportedModel``."""
        dim = self._dim(name)
        if rows is not None and self._by_expert:
            return self._source.get_stored(name, dtype, *shape, rows=rows)
        part = self._part(lambda name, *full: self._source.get_stored(name, dtype, *full), dim, name, shape)
        if dim is None or not name.endswith(OF_INPUTS) or self._has_one_group:
            return part
        assert self.packed is not None
        groups = shape[0] // self.packed.group_size
        first = self._rank * groups  # the part's groups count from here
        if part.min() < first or part.max() >= first + groups:
            raise UnsupportedModel(f"{name} spreads groups over all inputs (desc_act), which ranks cannot divide")
        return part - first

    def is_packed(self, name: str) -> bool:
        """Whether a matrix is there packed, or rounded."""
        return self._source.is_packed(name)

    def get_scales(self, name: str, *shape: int) -> Tensor:
        """Return the part's scales. Raises ``UnsupportedModel``."""
        dim = self._dim(name)
        if dim is not None and dim >= len(shape):  # all ranks have all outputs of a matrix that is cut by inputs
            dim = None
        return self._part(self._source.get_scales, dim, name, shape)

    @property
    def _has_one_group(self) -> bool:
        return self.packed is not None and self.packed.is_of_words and self.packed.group_size == -1

    def _dim(self, name: str) -> int | None:
        """Return along which dimension a tensor is cut; None: every rank has all of it."""
        module, kind = name.split(".")[-2:]
        if self._by_expert and ".experts." in name:
            return None
        if module == "experts":
            return STACKED[kind]
        if module in (*self._widening, *OF_ALL_HEADS) or kind in OF_HEADS:
            return None if kind in OF_INPUTS else 1 if kind in PACKED else 0
        if module in NARROWING:
            if kind in (*BY_GROUP, *BY_GROUP_BEHIND) and self._has_one_group:
                return None
            return 0 if kind in (*PACKED, *OF_INPUTS) else 1
        return None

    def _part(self, get: Callable[..., Tensor], dim: int | None, name: str, shape: tuple[int, ...]) -> Tensor:
        if dim is None:
            return get(name, *shape)
        full = [size * self._ranks if i == dim else size for i, size in enumerate(shape)]
        whole = get(name, *full)
        if name.split(".")[-2] in OF_ALL_HEADS:
            share = whole.shape[dim] / sum(self._kinds)  # below one of what stands for several rows, as scales do
            kinds = whole.split([int(kind * share) for kind in self._kinds], dim)
            parts = [kind.chunk(self._ranks, dim)[self._rank] for kind in kinds]
            return torch.cat(parts, dim)
        return whole.chunk(self._ranks, dim)[self._rank].clone()


def tensors_of(part: Any) -> Iterator[Tensor]:
    """Yield all tensors of a model, or of a part of one; what is there twice comes twice."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


def num_bytes(part: Any) -> int:
    """Return the bytes of all tensors in a model, or in a part of one; what is there twice counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(part)}.values())
