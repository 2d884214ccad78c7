# Mixtures of experts: in the place of one MLP many small ones, of which a router chooses a few for each token (Shazeer
# et al. 2017; Mixtral, Jiang et al. 2024). Across tensor-parallel ranks each expert is cut as an MLP is, by its inner
# width, or each rank has some of the experts: then it leaves other ranks' out, and the sum over ranks has all.

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.mxfp4 import BLOCK, pair_halves
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.experts import ExpertsConfig
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.layers import Mlp
from gpu_backend.models.linear import load_linear
from gpu_backend.models.quantization import Linear
from gpu_backend.models.weights import Rows, WeightSource


@dataclass(frozen=True, slots=True)
class Experts:
    """A router and the experts that it chooses among, all of a layer's stacked, or a rank's."""

    router: Tensor  # (experts, hidden); float32 where shares are sigmoids, or attention is over latent vectors
    gate_up: Tensor  # (experts, 2 · inner, hidden)
    down: Tensor  # (experts, hidden, inner)
    # Of both: float32 (experts, outputs), or (experts, outputs, groups) of inputs, where they are of float8 or whole
    # numbers, uint8 (experts, outputs, blocks) where they are mxfp4.
    scales: tuple[Tensor, Tensor] | None
    per_token: int
    is_normalised: bool
    batch_invariant: bool
    first: int | None = None  # the first of a rank's experts, by the router's numbers; None: all are there
    bias: Tensor | None = None  # (experts,) float32: shares are sigmoids, chosen by their sum with it
    factor: float = 1.0  # of all shares
    groups: tuple[int, int] = (1, 1)  # that experts lie in, and of how many of them a token's are chosen
    shared: Mlp | None = None  # the expert that every token goes through
    shared_gate: Tensor | None = None  # (1, hidden): by how much; None: whole
    router_bias: Tensor | None = None  # (experts,): of its logits
    biases: tuple[Tensor, Tensor] | None = None  # (experts, outputs) of both
    zeros: tuple[Tensor, Tensor] | None = None  # (experts, outputs, groups): what whole numbers count from
    scales_inputs: bool = False  # shares are sigmoids, of what goes into an expert
    clamp: tuple[float, float] | None = None  # what ``reference_experts.clamped_swiglu`` takes; None: SiLU

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return what it makes of the norm of ``x + residual``, and that sum."""
        normed, summed = ops.add_rms_norm(x, residual, norm, eps)
        logits = ops.linear(normed.to(self.router.dtype), self.router, self.router_bias, self.batch_invariant)
        shares, chosen = ops.choose_experts(
            logits, self.per_token, self.is_normalised, self.bias, self.factor, *self.groups
        )
        taken = normed
        if self.scales_inputs:  # each of a token's experts has an input of its own, and what comes out is added
            taken = (normed * logits.t().gather(0, chosen.long()).sigmoid()[..., None]).flatten(0, 1)
            shares, chosen = torch.ones_like(shares).view(1, -1), chosen.view(1, -1)
        mixed = ops.mix_experts(
            taken,
            self.gate_up,
            self.down,
            shares,
            chosen,
            self.scales,
            self.biases,
            self.clamp,
            batch_invariant=self.batch_invariant,
            zeros=self.zeros,
            first=self.first,
        )
        if self.scales_inputs:
            mixed = mixed.view(self.per_token, *normed.shape).sum(0)
        if self.shared is None:
            return mixed, summed
        added = self.shared(normed)
        if self.shared_gate is None:
            return mixed + added, summed
        gate = ops.linear(normed, self.shared_gate, None, self.batch_invariant).sigmoid()
        return mixed.addcmul(gate, added), summed


def load_experts(config: ModelConfig, weights: WeightSource, prefix: str) -> Experts:
    """Load one layer's; ``prefix`` names it in the checkpoint. Raises ``UnsupportedModel``."""
    shape, hidden = config.experts, config.hidden_size
    assert shape is not None
    if shape.clamp is not None:
        return _load_clamped(config, shape, weights, prefix)
    _check_format(weights)
    held = weights.own_experts(shape.number)
    stacks: list[tuple[Tensor, Tensor | None]] = []
    zeros: list[list[Tensor | None]] = [[], []]
    for place, number in enumerate(held):
        pair = _load_pair(weights, f"{prefix}.experts.{number}", hidden, shape.intermediate_size)
        stacks = stacks or [_stack_of(product, len(held)) for product in pair]
        for stack, from_, product in zip(stacks, zeros, pair, strict=True):
            _put(stack, place, product)
            from_.append(product.zeros)
    (gate_up, of_inner), (down, of_out) = stacks
    router, gate = weights.get(f"{prefix}.gate.weight", shape.number, hidden), f"{prefix}.shared_expert_gate.weight"
    shared = f"{prefix}.shared_expert"
    return Experts(
        router=router.float() if shape.is_sigmoid or config.latent is not None else router,  # as DeepSeek's code
        gate_up=gate_up,
        down=down,
        scales=None if of_inner is None or of_out is None else (of_inner, of_out),
        zeros=_zeros(zeros, (of_inner, of_out), gate_up.dtype),
        per_token=shape.per_token,
        is_normalised=shape.is_normalised,
        batch_invariant=weights.linear.batch_invariant,
        bias=weights.get_scales(f"{prefix}.gate.e_score_correction_bias", shape.number) if shape.is_sigmoid else None,
        first=_first(held, shape),
        factor=shape.factor,
        scales_inputs=shape.scales_inputs,
        groups=(shape.groups, shape.most_groups),
        shared=Mlp(*_load_pair(weights, shared, hidden, shape.shared_size)) if shape.shared_size else None,
        shared_gate=weights.get(gate, 1, hidden) if shape.gates_shared else None,
    )


def _load_clamped(config: ModelConfig, shape: ExpertsConfig, weights: WeightSource, prefix: str) -> Experts:
    """Load a GPT-OSS' experts: all in a tensor, their inputs before their outputs, gate and up taking turns, with
    biases; or in mxfp4, outputs before inputs."""
    held, hidden, inner = weights.own_experts(shape.number), config.hidden_size, shape.intermediate_size
    number, rows = len(held), Rows(held.start, shape.number)
    if weights.linear.quantization is not None:
        raise UnsupportedModel(
            f"a GPT-OSS' experts cannot be rounded to {weights.linear.quantization}; they are served in mxfp4, as "
            "their checkpoint has them, or as float32, float16 or bfloat16: leave quantization out"
        )
    named = {"gate_up": (f"{prefix}.experts.gate_up_proj", 2 * inner, hidden)}
    named["down"] = (f"{prefix}.experts.down_proj", hidden, inner)
    kept, scales, biases = {}, {}, {}
    for which, (name, outputs, inputs) in named.items():
        arrange = _gate_above_up if which == "gate_up" else Tensor.contiguous
        biases[which] = torch.stack([arrange(bias) for bias in weights.get(f"{name}_bias", number, outputs, rows=rows)])
        if weights.packed is None:
            stored = weights.get(name, number, inputs, outputs, rows=rows)
            kept[which] = stored.new_empty(number, outputs, inputs)
            for own, one in zip(kept[which], stored, strict=True):
                own.copy_(arrange(one.t()))
            continue
        if inputs % BLOCK:
            raise UnsupportedModel(f"{name} has {inputs} inputs, which mxfp4's blocks of {BLOCK} do not divide")
        sizes = (number, outputs, inputs // BLOCK)
        blocks = weights.get_stored(f"{name}_blocks", torch.uint8, *sizes, BLOCK // 2, rows=rows)
        exponents = weights.get_stored(f"{name}_scales", torch.uint8, *sizes, rows=rows)
        kept[which] = blocks.new_empty(number, outputs, inputs // 2)
        for own, one in zip(kept[which], blocks, strict=True):
            own.copy_(pair_halves(arrange(one)))
        scales[which] = torch.stack([arrange(some) for some in exponents])
    return Experts(
        router=weights.get(f"{prefix}.gate.weight", shape.number, hidden),
        gate_up=kept["gate_up"],
        down=kept["down"],
        scales=(scales["gate_up"], scales["down"]) if scales else None,
        per_token=shape.per_token,
        is_normalised=shape.is_normalised,
        batch_invariant=weights.linear.batch_invariant,
        first=_first(held, shape),
        router_bias=weights.get(f"{prefix}.gate.bias", shape.number),
        biases=(biases["gate_up"], biases["down"]),
        clamp=shape.clamp,
    )


def _first(held: range, shape: ExpertsConfig) -> int | None:
    return held.start if len(held) < shape.number else None


def _gate_above_up(rows: Tensor) -> Tensor:
    return torch.cat((rows[::2], rows[1::2]))


def _zeros(
    zeros: list[list[Tensor | None]], scales: tuple[Tensor | None, Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Return what all experts' groups count from; None where it is the middle for all."""
    if all(some is None for both in zeros for some in both):
        return None
    kept = []
    for each, of_group in zip(zeros, scales, strict=True):
        assert of_group is not None
        middle, kind = (8, torch.uint8) if dtype == torch.uint8 else (0, torch.int16)
        without = torch.full(of_group.shape[1:], middle, dtype=kind, device=of_group.device)
        kept.append(torch.stack([without if some is None else some for some in each]))
    return kept[0], kept[1]


def _check_format(weights: WeightSource) -> None:
    asked, packed = weights.linear.quantization, weights.packed
    found = asked if asked not in (None, "fp8") else None
    if packed is not None and not packed.is_of_words and packed.method not in ("fp8", "int8"):
        found = packed.method
    if found is not None:
        raise UnsupportedModel(
            f"experts' weights cannot be {found}; supported for a mixture of experts: float8 (--quantization fp8, or a "
            "checkpoint of it), checkpoints of packed weights or int8 weights alone, and float32, float16 or bfloat16"
        )


def _load_pair(weights: WeightSource, prefix: str, hidden: int, inner: int) -> tuple[Linear, Linear]:
    return (
        load_linear(weights, (f"{prefix}.gate_proj", f"{prefix}.up_proj"), (inner, inner), hidden, False),
        load_linear(weights, (f"{prefix}.down_proj",), (hidden,), inner, False),
    )


def _stack_of(product: Linear, number: int) -> tuple[Tensor, Tensor | None]:
    """Return room for as many weights, and for their scales, where they have some."""
    weights = product.weight.new_empty((number, *product.weight.shape))
    return weights, None if product.scales is None else product.scales.new_empty((number, *product.scales.shape))


def _put(stack: tuple[Tensor, Tensor | None], number: int, product: Linear) -> None:
    weights, scales = stack
    if product.order is not None:
        raise UnsupportedModel("experts take their inputs in orders of their own (desc_act), which is not supported")
    if (product.scales is None) != (scales is None) or product.weight.dtype != weights.dtype:
        raise UnsupportedModel(f"expert {number} is of {product.weight.dtype}, the first of {weights.dtype}")
    weights[number] = product.weight
    if scales is not None and product.scales is not None:
        if product.scales.shape != scales.shape[1:]:
            raise UnsupportedModel(f"expert {number} has scales {tuple(product.scales.shape)}, the first others")
        scales[number] = product.scales
