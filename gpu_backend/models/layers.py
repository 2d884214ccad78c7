# The parts that decoders of the Llama family are made of. Weights are plain tensors, packed where one product can do
# the work of several; every operation beyond a matrix product is a kernel.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.models.config import ModelConfig, RopeConfig
from gpu_backend.models.packed import is_packed, load_packed
from gpu_backend.models.quantization import QuantizedLinear, quantize
from gpu_backend.models.rounded import load_rounded
from gpu_backend.models.weights import WeightSource
from gpu_backend.step.batch import Batch, token_by_token


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix product, with a bias or without."""

    weight: Tensor  # (out, in)
    bias: Tensor | None = None
    batch_invariant: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias, self.batch_invariant)

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the product with the norm of ``x + residual``, and that sum."""
        if not self.batch_invariant and (
            both := ops.small_batch_norm_linear(x, residual, norm, eps, self.weight, self.bias)
        ):
            return both
        normed, summed = ops.add_rms_norm(x, residual, norm, eps)
        return self(normed), summed

    def of_silu(self, gate_up: Tensor) -> Tensor:
        """Return the product with silu(gate) · up."""
        few = None if self.batch_invariant else ops.small_batch_silu_linear(gate_up, self.weight, self.bias)
        return self(ops.silu_and_mul(gate_up)) if few is None else few


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the paged KV cache, with shared key heads and, for Qwen3, normalised queries and keys."""

    qkv: Linear | QuantizedLinear
    out: Linear | QuantizedLinear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: Tensor | None  # (heads + kv_heads, head_dim)
    eps: float
    window: int = 0  # how many tokens back a query looks, itself included; 0: all

    def __call__(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kv_scales: KvScales | None, batch: Batch
    ) -> Tensor:
        qkv = qkv.view(len(qkv), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query = ops.norm_rope_store(
            qkv, self.qk_norm, cos, sin, kv_cache, batch.slots, self.num_heads, self.eps, kv_scales
        )
        attended = ops.paged_attention(query, kv_cache, batch.groups, self.head_dim**-0.5, self.window, kv_scales)
        return self.out(attended.reshape(len(qkv), -1))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then a gated MLP, each after a norm and added to what came in."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    gate_up: Linear | QuantizedLinear
    down: Linear | QuantizedLinear
    eps: float
    add_ranks: Callable[[Tensor], Tensor] | None = None  # where each rank has a part of the heads and of the MLP

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv_cache: Tensor,
        kv_scales: KvScales | None,
        batch: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds, and what it is to be added to: the sum is one with the next norm."""
        qkv, residual = self.attention.qkv.of_norm(x, residual, self.attention_norm, self.eps)
        attended = self.whole(self.attention(qkv, cos, sin, kv_cache, kv_scales, batch))
        gate_up, residual = self.gate_up.of_norm(attended, residual, self.mlp_norm, self.eps)
        return self.whole(self.down.of_silu(gate_up)), residual

    def whole(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which may be written over."""
        return part if self.add_ranks is None else self.add_ranks(part)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: tokens to hidden states, and hidden states to logits.

    Or a stage of one: where layers come before its own it ``receive``s hidden states into a tensor of their shape, and
    where some come after, it does ``send`` them; embedding and head are empty where another stage has them.
    """

    config: ModelConfig
    embedding: Tensor  # (vocab, hidden)
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Tensor  # (vocab, hidden); the embedding itself where the two are tied
    cos: Tensor  # (positions, 1, head_dim / 2)
    sin: Tensor
    batch_invariant: bool = False
    receive: Callable[[Tensor], None] | None = None
    send: Callable[[Tensor], None] | None = None

    def hidden_states(self, batch: Batch, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None = None) -> Tensor:
        """Return the hidden states (tokens, hidden) after the last layer, and store the step's keys and values.

        ``kv_cache`` is (layers, blocks, block_size, 2, kv_heads, head_dim); one of float8 has scales for each layer.
        """
        if self.batch_invariant and not ops.uses_triton(kv_cache.device):
            # Libraries add in another order for other shapes, so there is but one shape.
            return torch.cat([self._hidden_states(one, kv_cache, kv_scales) for one in token_by_token(batch)])
        return self._hidden_states(batch, kv_cache, kv_scales)

    def _hidden_states(self, batch: Batch, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None) -> Tensor:
        if self.receive is None:
            x = F.embedding(batch.token_ids, self.embedding)
        else:
            x = self.norm.new_empty(len(batch.token_ids), self.config.hidden_size)
            self.receive(x)
        cos, sin = self.cos.index_select(0, batch.positions), self.sin.index_select(0, batch.positions)
        residual: Tensor | None = None
        all_scales = kv_scales or (None,) * len(self.layers)
        for layer, layer_cache, scales in zip(self.layers, kv_cache.unbind(0), all_scales, strict=True):
            x, residual = layer(x, residual, cos, sin, layer_cache, scales, batch)
        if self.send is not None:
            assert residual is not None, "a stage has layers"
            x = x + residual
            self.send(x)
            return x
        return ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token after each hidden state."""
        return ops.linear(hidden, self.head, None, self.batch_invariant)


def load_linear(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: bool
) -> Linear | QuantizedLinear:
    """Load matrices that read the same input, packed into one: their outputs lie beside each other."""
    added = _together(weights, [f"{name}.bias" for name in names], outs) if bias else None
    if weights.packed is not None and is_packed(weights.packed, names[0]):
        load = load_packed if weights.packed.is_of_four_bits else load_rounded
        return load(weights, names, outs, width, added)
    weight = _together(weights, [f"{name}.weight" for name in names], outs, width)
    if weights.linear.quantization is not None and not weights.linear.is_smoothed:
        return quantize(weight, added, weights.linear.quantization, weights.linear.batch_invariant)
    return Linear(weight, added, weights.linear.batch_invariant)


def rounded(layer: DecoderLayer, method: str) -> DecoderLayer:
    """Return a layer of plain weights with them rounded."""

    def product(plain: Linear | QuantizedLinear) -> QuantizedLinear:
        assert isinstance(plain, Linear), "weights are rounded once"
        return quantize(plain.weight, plain.bias, method, plain.batch_invariant)

    attention = replace(layer.attention, qkv=product(layer.attention.qkv), out=product(layer.attention.out))
    return replace(layer, attention=attention, gate_up=product(layer.gate_up), down=product(layer.down))


def _together(weights: WeightSource, names: list[str], outs: tuple[int, ...], *width: int) -> Tensor:
    """Put tensors below each other, with only one of them in memory beside the whole."""
    first = weights.get(names[0], outs[0], *width)
    if len(names) == 1:
        return first
    packed = first.new_empty((sum(outs), *width))
    packed[: outs[0]] = first
    del first
    row = outs[0]
    for name, out in zip(names[1:], outs[1:], strict=True):
        packed[row : row + out] = weights.get(name, out, *width)
        row += out
    return packed


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (positions, 1, head_dim / 2), from float32, rounded to ``like``'s type."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), rope_frequencies(rope, head_dim))[:, None]
    return (angles.cos() * rope.attention_factor).to(like), (angles.sin() * rope.attention_factor).to(like)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return each pair's angle per position (Su et al. 2021), stretched for long contexts where the config says so.

    ``linear`` divides all of them (Chen et al. 2023). ``llama3`` and ``yarn`` divide the slow ones, keep the fast ones,
    and blend in between: by turns in the original context (Llama 3.1; as in transformers'
    ``_compute_llama3_parameters``), or by dimension (Peng et al. 2023, section 3.2; ``_compute_yarn_parameters``).
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.kind == "yarn":
        first, last = _yarn_range(rope, head_dim)
        blend = 1 - (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    else:
        return frequencies
    kept = blend.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Return the dimensions between which yarn goes from keeping frequencies to dividing them."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last if last != first else first + 0.001
