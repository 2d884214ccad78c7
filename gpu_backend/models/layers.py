# The layers that decoders of the Llama family are made of. Weights are plain tensors; every operation beyond a matrix
# product is a kernel.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.models.config import ModelConfig
from gpu_backend.models.linear import Linear
from gpu_backend.models.quantization import QuantizedLinear
from gpu_backend.step.step_tensors import StepTensors, token_by_token


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
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, kv_scales: KvScales | None, tensors: StepTensors
    ) -> Tensor:
        qkv = qkv.view(len(qkv), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query = ops.norm_rope_store(
            qkv, self.qk_norm, cos, sin, kv_cache, tensors.slots, self.num_heads, self.eps, kv_scales
        )
        attended = ops.paged_attention(query, kv_cache, tensors.groups, self.head_dim**-0.5, self.window, kv_scales)
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
        tensors: StepTensors,
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds, and what it is to be added to: the sum is one with the next norm."""
        qkv, residual = self.attention.qkv.of_norm(x, residual, self.attention_norm, self.eps)
        attended = self.whole(self.attention(qkv, cos, sin, kv_cache, kv_scales, tensors))
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

    def hidden_states(
        self, tensors: StepTensors, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None = None
    ) -> Tensor:
        """Return the hidden states (tokens, hidden) after the last layer, and store the step's keys and values.

        ``kv_cache`` is (layers, blocks, block_size, 2, kv_heads, head_dim); one of float8 has scales for each layer.
        """
        if self.batch_invariant and not ops.uses_triton(kv_cache.device):
            # Libraries add in another order for other shapes, so there is but one shape.
            return torch.cat([self._hidden_states(one, kv_cache, kv_scales) for one in token_by_token(tensors)])
        return self._hidden_states(tensors, kv_cache, kv_scales)

    def _hidden_states(self, tensors: StepTensors, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None) -> Tensor:
        if self.receive is None:
            x = F.embedding(tensors.token_ids, self.embedding)
        else:
            x = self.norm.new_empty(len(tensors.token_ids), self.config.hidden_size)
            self.receive(x)
        cos, sin = self.cos.index_select(0, tensors.positions), self.sin.index_select(0, tensors.positions)
        residual: Tensor | None = None
        all_scales = kv_scales or (None,) * len(self.layers)
        for layer, layer_cache, scales in zip(self.layers, kv_cache.unbind(0), all_scales, strict=True):
            x, residual = layer(x, residual, cos, sin, layer_cache, scales, tensors)
        if self.send is not None:
            assert residual is not None, "a stage has layers"
            x = x + residual
            self.send(x)
            return x
        return ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token after each hidden state."""
        return ops.linear(hidden, self.head, None, self.batch_invariant)
