# Attention over latent vectors (MLA; DeepSeek-V2, Liu et al. 2024). A token keeps one vector for all heads, and one key
# that turns. What a head makes of the vector is never written out: the matrix that would make its keys is applied to
# its query, and the one that would make its values to what it has attended to. So a token's vector is read once for all
# heads; each rank has all vectors, and its own heads' matrices.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.latent import LatentConfig
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.linear import Product, load_linear, load_whole
from gpu_backend.models.rope import RopeTable
from gpu_backend.models.weights import WeightSource
from gpu_backend.step.step_tensors import StepTensors

EPS = 1e-6  # of the norms of vectors, whatever the layers' is


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Causal attention over the paged cache of latent vectors."""

    qkv: Product  # hidden states to what queries are made of, the vector, and the key that turns
    out: Product
    sizes: LatentConfig
    num_heads: int
    query: tuple[Tensor, Product] | None  # the norm of what queries are made of, and what makes them; None: it is them
    norm: Tensor  # of the vector
    to_vector: Tensor  # (heads, rank, own_dim): of a query's own numbers
    to_value: Tensor  # (heads, value_dim, rank): of what is attended to
    scoring: Scoring
    rope: int = 0  # which of the model's ropes turns
    batch_invariant: bool = False

    def __call__(
        self,
        qkv: Tensor,
        turns: Sequence[RopeTable],
        kv_cache: Tensor,
        kv_scales: KvScales | None,
        tensors: StepTensors,
    ) -> Tensor:
        assert kv_scales is None, "latent vectors are kept as they are"
        tokens, by, width = len(qkv), turns[self.rope], qkv.shape[1] - self.sizes.key_dim
        query, latent = qkv[:, :width], qkv[:, width:]
        if self.query is not None:
            norm, make = self.query
            ops.rms_norm_(query, norm, EPS)
            query = make(query)
        query = query.view(tokens, self.num_heads, self.sizes.query_dim)
        turned = ops.norm_rope_store_latent(
            query, latent, self.norm, by.cos, by.sin, kv_cache, tensors.slots, EPS, by.interleaved
        )
        own = self._by_heads(query[:, :, : self.sizes.own_dim], self.to_vector)
        attended = ops.latent_attention(own, turned, kv_cache, tensors.groups, self.scoring)
        return self.out(self._by_heads(attended, self.to_value).reshape(tokens, -1))

    def _by_heads(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return (tokens, heads, out) of (tokens, heads, in) and each head's matrix (heads, out, in)."""
        if self.batch_invariant and ops.uses_triton(x.device):
            each = [ops.linear(x[:, head], own, None, True) for head, own in enumerate(matrices)]
            return torch.stack(each, 1)
        return torch.bmm(x.transpose(0, 1), matrices.mT).transpose(0, 1)


def load_latent_attention(
    config: ModelConfig, weights: WeightSource, prefix: str, window: int, rope: int
) -> LatentAttention:
    """Load one layer's; ``prefix`` names it in the checkpoint. Raises ``UnsupportedModel``."""
    sizes, heads, hidden = config.latent, config.num_heads, config.hidden_size
    assert sizes is not None and config.factors.attention is not None
    if weights.linear.is_smoothed:
        raise UnsupportedModel(
            f"a model with attention over latent vectors cannot be {weights.linear.quantization}; supported: float8 "
            "(--quantization fp8), and what its checkpoint is packed in"
        )
    width = sizes.query_rank or heads * sizes.query_dim
    names = (f"{prefix}.q{'_a' * (sizes.query_rank > 0)}_proj", f"{prefix}.kv_a_proj_with_mqa")
    query = None
    if sizes.query_rank:
        made = load_linear(weights, (f"{prefix}.q_b_proj",), (heads * sizes.query_dim,), sizes.query_rank, False)
        query = weights.get(f"{prefix}.q_a_layernorm.weight", sizes.query_rank), made
    norm = weights.get(f"{prefix}.kv_a_layernorm.weight", sizes.rank)
    of_heads = load_whole(weights, f"{prefix}.kv_b_proj", heads * (sizes.own_dim + sizes.value_dim), sizes.rank)
    of_keys, of_values = of_heads.to(norm).view(heads, -1, sizes.rank).split((sizes.own_dim, sizes.value_dim), 1)
    return LatentAttention(
        qkv=load_linear(weights, names, (width, sizes.key_dim), hidden, False),
        out=load_linear(weights, (f"{prefix}.o_proj",), (hidden,), config.attended_width, False),
        sizes=sizes,
        num_heads=heads,
        query=query,
        norm=norm,
        to_vector=of_keys.mT.contiguous(),
        to_value=of_values.contiguous(),
        scoring=Scoring(config.factors.attention, window),
        rope=rope,
        batch_invariant=weights.linear.batch_invariant,
    )
