# Linear attention by the gated delta rule (Qwen3-Next): queries, keys and values go through a short convolution, and in
# the place of all keys and values a layer keeps one state of a sequence, which each token changes. A state cannot go
# back: what has to begin anew begins with the first token.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.kernels.layout.recurrence import Recurrence
from gpu_backend.kernels.layout.upload import integers, upload
from gpu_backend.kernels.reference import rms_norm
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.linear_attention import LinearAttentionConfig
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.linear import Product, load_linear
from gpu_backend.models.rope import RopeTable
from gpu_backend.models.weights import WeightSource
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.step_tensors import StepTensors


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Attention through a state."""

    qkv: Product  # hidden states to queries, keys, values, their gates, and how much is taken and kept
    out: Product
    sizes: LinearAttentionConfig
    place: int  # among the layers that keep states
    taps: Tensor  # (channels, taps)
    rates: Tensor  # (value heads,) float32: how quickly is forgotten,
    offsets: Tensor  # (value heads,) float32: counted from
    norm: Tensor  # of a head's values
    eps: float

    def __call__(
        self,
        qkv: Tensor,
        turns: Sequence[RopeTable],
        kv_cache: Tensor | None,
        kv_scales: KvScales | None,
        tensors: StepTensors,
    ) -> Tensor:
        at = tensors.recurrence
        assert at is not None, "a step says where its sequences' states lie"
        mixed, gate, taken, kept = self._split(qkv)
        decay = -self.rates * F.softplus(kept.float() + self.offsets)
        beta = taken.sigmoid().float()
        inputs, sums = at.inputs[self.place], at.sums[self.place]
        singles = len(at.rows)
        parts = []
        if singles:
            seen = self._seen_by_decodes(mixed[:singles], inputs, at.rows)
            parts.append(ops.delta_step(seen, decay[:singles], beta[:singles], sums, at.rows))
        for tokens, row in at.longer:
            seen = self._seen(mixed[tokens], inputs[row])
            parts.append(ops.delta_chunks(seen, decay[tokens], beta[tokens], sums[row]))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        normed = rms_norm(attended, self.norm, self.eps)
        gated = (normed * F.silu(gate.view_as(normed).float())).to(qkv.dtype)
        return self.out(gated.flatten(1))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values beside each other, their gates, what is taken, and what is kept."""
        sizes = self.sizes
        if not sizes.is_grouped:
            mixed, gate, taken, kept = qkv.split(
                (sizes.channels, sizes.value_width, sizes.value_heads, sizes.value_heads), 1
            )
            return mixed, gate, taken, kept
        both = sizes.channels + sizes.value_width
        each = sizes.value_width // sizes.key_heads
        of_heads = qkv[:, :both].unflatten(1, (sizes.key_heads, -1))
        *parts, gate = of_heads.split((sizes.key_dim, sizes.key_dim, each, each), 2)
        taken, kept = qkv[:, both:].unflatten(1, (sizes.key_heads, 2, -1)).unbind(2)
        mixed = torch.cat([part.flatten(1) for part in parts], 1)
        return mixed, gate.flatten(1), taken.flatten(1), kept.flatten(1)

    def _seen_by_decodes(self, mixed: Tensor, inputs: Tensor, rows: Tensor) -> Tensor:
        """Return what the convolution makes of one token of each row, and keep the token for the next."""
        window = torch.cat((inputs.index_select(0, rows), mixed[:, :, None]), 2)
        inputs.index_copy_(0, rows, window[:, :, 1:])
        return F.silu((window.float() * self.taps.float()).sum(2)).to(mixed.dtype)

    def _seen(self, mixed: Tensor, inputs: Tensor) -> Tensor:
        """Return what it makes of one sequence's tokens, and keep the last of them."""
        window = torch.cat((inputs, mixed.t()), 1)
        inputs.copy_(window[:, mixed.shape[0] :])
        return F.silu(F.conv1d(window, self.taps[:, None], groups=len(window))).t().contiguous()


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Products of the same input, their outputs one behind the other: where a checkpoint has some packed."""

    parts: tuple[Product, ...]

    @property
    def weight(self) -> Tensor:
        return self.parts[0].weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        normed, summed = ops.add_rms_norm(x, residual, norm, eps)
        return self(normed), summed

    def of_gated(self, gate_up: Tensor, activation: str) -> Tensor:
        return self(ops.gated(gate_up, activation))


class RecurrentStates:
    """The states of the sequences that run, a row for each, and one more for places without a sequence."""

    def __init__(self, sizes: LinearAttentionConfig, num_rows: int, like: Tensor) -> None:
        layers, rows = sum(sizes.layers), num_rows + 1
        of_rule = layers, rows, sizes.value_heads, sizes.key_dim, sizes.value_dim
        try:
            self.inputs = like.new_zeros(layers, rows, sizes.channels, sizes.taps - 1)
            self.sums = like.new_zeros(of_rule, dtype=torch.float32)
        except torch.OutOfMemoryError:
            needed = rows * sizes.state_bytes(like.itemsize) / 2**30
            raise UnsupportedModel(
                f"the states of {num_rows} sequences take {needed:.1f} GiB, for which there is no room beside the "
                "weights; lower max_num_seqs"
            ) from None
        self._ends = [(-1, 0)] * num_rows  # whose each is, and how many of its tokens are in it

    def begin(self, steps: Sequence[SequenceStep]) -> None:
        """Forget what was in the rows of sequences that begin."""
        if rows := [step.row for step in steps if not step.start]:
            where = upload(rows, self.sums.device, torch.long)
            for states in (self.inputs, self.sums):
                states.index_fill_(1, where, 0)

    def follow(self, steps: Sequence[SequenceStep]) -> None:
        """Take note of steps. Raises ``RuntimeError`` for one that does not go on where its state is."""
        for step in steps:
            if step.start and self._ends[step.row] != (step.sequence_id, step.start):
                raise RuntimeError(f"a state of {self._ends[step.row][1]} tokens is asked to go on from {step.start}")
            self._ends[step.row] = step.sequence_id, step.start + len(step.token_ids)

    def of_steps(self, steps: Sequence[SequenceStep]) -> Recurrence:
        """Return where the states of these lie, those with one token first."""
        rows, longer, end = [step.row for step in steps if len(step.token_ids) == 1], [], 0
        for step in steps:
            begin, end = end, end + len(step.token_ids)
            if end - begin > 1:
                longer.append((slice(begin, end), step.row))
        return self.of_rows(integers(rows, self.sums.device), tuple(longer))

    def of_rows(self, rows: Tensor, longer: tuple[tuple[slice, int], ...] = ()) -> Recurrence:
        """Return where they lie, for decodes whose rows the device knows."""
        return Recurrence(self.inputs, self.sums, rows, longer)


def load_linear_attention(config: ModelConfig, weights: WeightSource, prefix: str, index: int) -> LinearAttention:
    """Load one layer's; ``prefix`` names it in the checkpoint. Raises ``UnsupportedModel``."""
    sizes, hidden = config.linear, config.hidden_size
    assert sizes is not None
    heads, values = sizes.value_heads, sizes.value_width
    parts = {"qkv": sizes.channels, "z": values, "b": heads, "a": heads}
    if sizes.is_grouped:
        parts = {"qkvz": sizes.channels + values, "ba": 2 * heads}
    width_of = {f"{prefix}.in_proj_{part}": width for part, width in parts.items()}
    products = [
        load_linear(weights, names, tuple(map(width_of.__getitem__, names)), hidden, False)
        for names in (tuple(some) for _, some in groupby(width_of, weights.is_packed))
    ]
    return LinearAttention(
        qkv=products[0] if len(products) == 1 else SideBySide(tuple(products)),
        out=load_linear(weights, (f"{prefix}.out_proj",), (hidden,), values, False),
        sizes=sizes,
        place=sum(sizes.layers[:index]),
        taps=weights.get(f"{prefix}.conv1d.weight", sizes.channels, 1, sizes.taps)[:, 0],
        rates=weights.get_scales(f"{prefix}.A_log", heads).exp(),
        offsets=weights.get_scales(f"{prefix}.dt_bias", heads),
        norm=weights.get(f"{prefix}.norm.weight", sizes.value_dim),
        eps=config.rms_norm_eps,
    )
