# The adapters that the device holds: each has a slot in the stacks of every product, and each row of a step says which.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.lora.peft import LowRank, Place, shape_of
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.layers import Decoder, DecoderLayer, Mlp
from gpu_backend.models.linear import Product
from gpu_backend.step.adapter import ANY, NONE

NO_SLOT = -1  # of a row without an adapter
QKV, OUT, GATE_UP, DOWN = ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)


class AdapterSlots:
    """Which adapter has which slot, and the slot of each row of the step that the model computes.

    A model whose steps have no adapter in them computes what it does without any: ``rows`` is None then.
    """

    def __init__(self, count: int, max_rank: int) -> None:
        self.count = count
        self.max_rank = max_rank
        self.rows: Tensor | None = None  # (tokens,) int32: ``NO_SLOT`` for those without; None: all are
        self.slot_of = {NONE: NO_SLOT, ANY: 0}  # by adapters' numbers
        self._products: dict[tuple[int, str], tuple[AdaptedLinear, int]] = {}  # with the module's place in each

    def note(self, layer: int, modules: Sequence[str], product: AdaptedLinear) -> None:
        """Say which product computes a layer's modules, and in which order."""
        self._products |= {(layer, module): (product, place) for place, module in enumerate(modules)}

    def take(self, number: int) -> bool:
        """Give an adapter a slot that is free, filled with zeros; False: there is none."""
        free = sorted(set(range(self.count)) - {slot for own, slot in self.slot_of.items() if own != ANY})
        if free:
            self.slot_of[number] = free[0]
        return bool(free)

    @torch.inference_mode()
    def fill(self, number: int, parts: Mapping[Place, LowRank]) -> None:
        """Put an adapter into its slot. What it has nothing for adds nothing."""
        slot = self.slot_of[number]
        for place, (product, at) in self._products.items():
            product.fill(slot, at, parts.get(place))

    def free(self, number: int) -> None:
        """Let an adapter's slot go, which no step that is still to be planned names."""
        del self.slot_of[number]


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A product of one matrix or several packed ones, to whose rows adapters are added."""

    base: Product
    shrink: Tensor  # (slots, modules · max_rank, inputs)
    expand: Tensor  # (slots, outputs, max_rank): each module's rows read its own part of what shrink gives
    widths: tuple[int, ...]  # outputs of each module
    slots: AdapterSlots

    @property
    def weight(self) -> Tensor:
        """The base's."""
        return self.base.weight

    def __call__(self, x: Tensor) -> Tensor:
        return self._added(self.base(x), x)

    def of_norm(self, x: Tensor, residual: Tensor | None, norm: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Return the product with the norm of ``x + residual``, and that sum."""
        if self.slots.rows is None:
            return self.base.of_norm(x, residual, norm, eps)
        normed, summed = ops.add_rms_norm(x, residual, norm, eps)
        return self(normed), summed

    def of_gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return the product with activation(gate) · up."""
        if self.slots.rows is None:
            return self.base.of_gated(gate_up, activation)
        return self(ops.gated(gate_up, activation))

    def fill(self, slot: int, place: int, part: LowRank | None) -> None:
        """Put one module's part into a slot; None: it adds nothing."""
        most, end = self.expand.shape[2], sum(self.widths[: place + 1])
        shrink = self.shrink[slot, place * most : (place + 1) * most].zero_()
        expand = self.expand[slot, end - self.widths[place] : end].zero_()
        if part is not None:
            rank = len(part.shrink)
            shrink[:rank].copy_(part.shrink)
            expand[:, :rank].copy_(part.expand)

    def _added(self, out: Tensor, x: Tensor) -> Tensor:
        rows = self.slots.rows
        return out if rows is None else ops.add_lora_(out, x, self.shrink, self.expand, rows, self.widths)


def with_adapters(model: Decoder, slots: AdapterSlots) -> Decoder:
    """Return the model with room for adapters beside each of its products. Raises ``UnsupportedModel``."""
    if model.config.latent is not None:
        raise UnsupportedModel("LoRA adapters of a model with attention over latent vectors are not supported")
    count, max_rank = slots.count, slots.max_rank

    def product(layer: int, modules: tuple[str, ...], base: Product) -> AdaptedLinear:
        shapes = [shape_of(model.config, module) for module in modules]
        widths, inputs = tuple(outputs for outputs, _ in shapes), shapes[0][1]
        made = AdaptedLinear(
            base,
            model.embedding.new_zeros((count, len(modules) * max_rank, inputs)),
            model.embedding.new_zeros((count, sum(widths), max_rank)),
            widths,
            slots,
        )
        slots.note(layer, modules, made)
        return made

    def adapted(index: int, layer: DecoderLayer) -> DecoderLayer:
        attention, mlp = layer.attention, layer.mlp
        attention = replace(attention, qkv=product(index, QKV, attention.qkv), out=product(index, OUT, attention.out))
        if isinstance(mlp, Mlp):
            gate_up, down = product(index, GATE_UP, mlp.gate_up), product(index, DOWN, mlp.down)
            mlp = replace(mlp, gate_up=gate_up, down=down)
        return replace(layer, attention=attention, mlp=mlp)

    return replace(model, layers=tuple(adapted(i, layer) for i, layer in enumerate(model.layers)), adapters=slots)
