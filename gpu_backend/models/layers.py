# The layers that decoders of the Llama family are made of. Weights are plain tensors; every operation beyond a matrix
# product is a kernel.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.kernels.reference import soft_cap_
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.latent import LatentAttention
from gpu_backend.models.linear import Product
from gpu_backend.models.linear_attention import LinearAttention, RecurrentStates
from gpu_backend.models.rope import RopeTable
from gpu_backend.step.step_tensors import StepTensors, token_by_token


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the paged KV cache, with shared key heads; some models norm queries and keys."""

    qkv: Product
    out: Product
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: Tensor | None  # (heads + kv_heads, head_dim)
    eps: float
    scoring: Scoring
    rope: int = 0  # which of the model's ropes turns queries and keys
    width_norms: tuple[Tensor, ...] = ()  # of all of a token's queries (heads · head_dim,), and of all its keys
    add_ranks: Callable[[Tensor], Tensor] | None = None  # where each rank has a part of the heads
    gates: bool = False  # behind each head's query is what its values are multiplied with, by a sigmoid

    def __call__(
        self,
        qkv: Tensor,
        turns: Sequence[RopeTable],
        kv_cache: Tensor,
        kv_scales: KvScales | None,
        tensors: StepTensors,
    ) -> Tensor:
        gate: Tensor | None = None
        if self.gates:
            both = 2 * self.num_heads * self.head_dim
            query, gate = qkv[:, :both].unflatten(1, (self.num_heads, 2, -1)).unbind(2)
            qkv = torch.cat((query.flatten(1), qkv[:, both:]), 1)
        self.norm_widths_(qkv)
        qkv = qkv.view(len(qkv), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        by = turns[self.rope]
        query = ops.norm_rope_store(
            qkv,
            self.qk_norm,
            by.cos,
            by.sin,
            kv_cache,
            tensors.slots,
            self.num_heads,
            self.eps,
            kv_scales,
            by.turned,
            by.interleaved,
        )
        query = query if by.queries is None else query * by.queries
        attended = ops.paged_attention(query, kv_cache, tensors.groups, self.scoring, kv_scales)
        attended = attended if gate is None else attended * gate.sigmoid()
        return self.out(attended.reshape(len(qkv), -1))

    def norm_widths_(self, qkv: Tensor) -> None:
        """Norm all of a token's queries, and all its keys, in place: each over its whole width, on all ranks."""
        if not self.width_norms:
            return
        parts = qkv.split([*map(len, self.width_norms), self.num_kv_heads * self.head_dim], 1)[:2]
        if self.add_ranks is None:
            for part, weight in zip(parts, self.width_norms, strict=True):
                ops.rms_norm_(part, weight, self.eps)
            return
        squares = [part.float().square().mean(1) for part in parts]
        added = self.add_ranks(torch.stack([*squares, torch.ones_like(squares[0])], 1))
        scales = (added[:, :2] / added[:, 2:] + self.eps).rsqrt()
        for part, weight, scale in zip(parts, self.width_norms, scales.split(1, 1), strict=True):
            part.copy_((part.float() * scale).to(part.dtype) * weight)


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated MLP."""

    gate_up: Product
    down: Product
    activation: str = "silu"  # one of ``config.model.ACTIVATIONS``

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return activation(gate) · up."""
        return ops.gated(gate_up, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down.of_gated(self.gate_up(x), self.activation)

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return what it makes of the norm of ``x + residual``, and that sum."""
        gate_up, residual = self.gate_up.of_norm(x, residual, norm, eps)
        return self.down.of_gated(gate_up, self.activation), residual


class AfterNorm(Protocol):
    """What stands behind a layer's second norm: an MLP, or a mixture of experts."""

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return what it makes of the norm of ``x + residual``, and that sum."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Attention, then a gated MLP, each added to what came in; there are norms before them, after them, or both."""

    attention_norm: Tensor | None
    attention: Attention | LatentAttention | LinearAttention
    mlp_norm: Tensor | None
    mlp: AfterNorm
    eps: float
    attention_out_norm: Tensor | None = None  # of what attention adds
    mlp_out_norm: Tensor | None = None
    add_ranks: Callable[[Tensor], Tensor] | None = None  # where each rank has a part of the heads and of the MLP

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        turns: Sequence[RopeTable],
        kv_cache: Tensor,
        kv_scales: KvScales | None,
        tensors: StepTensors,
    ) -> tuple[Tensor, Tensor]:
        """Return what the layer adds, and what it is to be added to: the sum is one with the next norm.

        ``turns`` are the model's ropes at the tokens' positions.
        """
        qkv, residual = self.attention.qkv.of_norm(x, residual, self.attention_norm, self.eps)
        return self.after_qkv(qkv, residual, turns, kv_cache, kv_scales, tensors)

    def after_qkv(
        self,
        qkv: Tensor,
        residual: Tensor,
        turns: Sequence[RopeTable],
        kv_cache: Tensor,
        kv_scales: KvScales | None,
        tensors: StepTensors,
    ) -> tuple[Tensor, Tensor]:
        """Return the same, of what queries, keys and values are made of, and what they are added to."""
        attended = self.after_attention(self.whole(self.attention(qkv, turns, kv_cache, kv_scales, tensors)))
        added, residual = self.mlp.of_norm(attended, residual, self.mlp_norm, self.eps)
        return self.after_mlp(self.whole(added)), residual

    def after_attention(self, added: Tensor) -> Tensor:
        """Return what the whole of attention adds, as the model norms it."""
        return ops.add_rms_norm(added, None, self.attention_out_norm, self.eps)[0]

    def after_mlp(self, added: Tensor) -> Tensor:
        """Return what the whole MLP adds, as the model norms it."""
        return ops.add_rms_norm(added, None, self.mlp_out_norm, self.eps)[0]

    def whole(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, which may be written over."""
        return part if self.add_ranks is None else self.add_ranks(part)


class RowAdapters(Protocol):
    """What adds adapters to the model's products, as ``lora`` has it: each row of a step has its own, or none."""

    rows: Tensor | None  # (tokens,) int32: slots of the step's rows; None: no row has an adapter
    slot_of: dict[int, int]  # by adapters' numbers


class StateReader(Protocol):
    """What a draft head reads of the model, as ``draft_heads`` has it."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Into which the states go that are read; as many as there are: those that the last norm has; none: its own."""
        ...

    def keep(self, states: list[Tensor], slots: Tensor) -> None:
        """Keep states (tokens, hidden) of tokens at these slots, as many as ``layers``, or those that are normed."""
        ...


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: tokens to hidden states, and hidden states to logits.

    Or a stage of one: where layers come before its own it ``receive``s hidden states into a tensor of their shape, and
    where some come after, it does ``send`` them; embedding and head are empty where another stage has them.
    """

    lag: ClassVar[int] = 0  # places that its tokens stand before their own, as a draft head's do

    config: ModelConfig
    embedding: Tensor  # (vocab, hidden)
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Tensor  # (vocab, hidden); the embedding itself where the two are tied
    ropes: tuple[RopeTable, ...]
    embedding_factor: float = 1.0  # a number of the weights' type
    batch_invariant: bool = False
    receive: Callable[[Tensor], None] | None = None
    send: Callable[[Tensor], None] | None = None
    adapters: RowAdapters | None = None
    reader: StateReader | None = None
    states: RecurrentStates | None = None  # of its layers of linear attention

    def hidden_states(
        self, tensors: StepTensors, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None = None
    ) -> Tensor:
        """Return the hidden states (tokens, hidden) after the last layer, and store the step's keys and values.

        ``kv_cache`` is (layers, blocks, block_size, *config.kv_shape), of layers that have keys and values; one of
        float8 has scales for each. Layers behind the model's are not read here.
        """
        if self.batch_invariant and not ops.uses_triton(kv_cache.device):
            # Libraries add in another order for other shapes, so there is but one shape.
            return torch.cat([self._hidden_states(one, kv_cache, kv_scales) for one in token_by_token(tensors)])
        return self._hidden_states(tensors, kv_cache, kv_scales)

    def _hidden_states(self, tensors: StepTensors, kv_cache: Tensor, kv_scales: Sequence[KvScales] | None) -> Tensor:
        if self.adapters is not None:
            self.adapters.rows = tensors.adapters
        if self.states is not None and tensors.recurrence is None:
            self.states.begin(tensors.steps)
            tensors = replace(tensors, recurrence=self.states.of_steps(tensors.steps))
        if self.receive is None:
            x = self.embed(tensors.token_ids) if tensors.inputs is None else tensors.inputs
        else:
            x = self.embedding.new_empty(len(tensors.token_ids), self.config.hidden_size)
            self.receive(x)
        by = tensors.positions if tensors.turned_by is None else tensors.turned_by
        turns = [rope.at(by) for rope in self.ropes]
        residual: Tensor | None = None
        states: list[Tensor] = []
        read = self.reader.layers if self.reader is not None else ()
        caches = iter(kv_cache[: self.config.num_kv_layers].unbind(0))
        all_scales = iter(kv_scales or (None,) * self.config.num_kv_layers)
        for index, layer in enumerate(self.layers):
            keeps_keys = not isinstance(layer.attention, LinearAttention)
            layer_cache, scales = (next(caches), next(all_scales)) if keeps_keys else (kv_cache, None)
            if index in read:
                states.append(x if residual is None else x + residual)
            x, residual = layer(x, residual, turns, layer_cache, scales, tensors)
            if tensors.added is not None and index < len(tensors.added):
                residual = residual + tensors.added[index]
        if self.send is not None:
            assert residual is not None, "a stage has layers"
            x = x + residual
            self.send(x)
            return x
        hidden, summed = ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)
        if self.reader is not None:
            states += [summed] * (len(self.layers) in read)
            self.reader.keep(states or [hidden], tensors.slots)
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return what goes into the first layer."""
        x = F.embedding(token_ids, self.embedding)
        return x if self.embedding_factor == 1.0 else x * self.embedding_factor

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token after each hidden state."""
        logits = ops.linear(hidden, self.head, None, self.batch_invariant)
        divisor, cap = self.config.factors.logits, self.config.logits_softcap
        return soft_cap_(logits if divisor == 1.0 else logits.div_(divisor), cap)
