# Checkpoints whose weights are of few bits already. Of four, as AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022)
# have them: numbers packed into int32, a scale and a zero for each group of inputs. They are repacked into the one form
# that our product reads; not a number changes. Of eight: float8 as transformers and llm-compressor write it, and int8
# weights whose inputs are rounded, too (SmoothQuant, Xiao et al. 2023, is in their numbers). Inputs get the scale of
# their own row when they come, whatever fixed one the checkpoint has beside it: that is never coarser.

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.packed_format import PACKED_BITS, PackedFormat
from gpu_backend.models.quantization import FP8, GROUPS, QuantizedLinear, pack_int4, quantize

if TYPE_CHECKING:
    from gpu_backend.models.weights import WeightSource

PER_WORD = 32 // PACKED_BITS
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands at each place of a word


def load_packed(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: Tensor | None
) -> QuantizedLinear:
    """Load matrices that read the same input, their outputs below each other. Raises ``UnsupportedModel``."""
    form = weights.packed
    assert form is not None
    read = _read_awq if form.method == "awq" else _read_gptq
    group = width if form.group_size == -1 else form.group_size
    if width % group or width % GROUPS[-1]:
        raise UnsupportedModel(f"{names[0]} has {width} inputs, which groups of {group} do not divide")
    numbers, zeros, scales, orders = zip(
        *(read(weights, name, out, width, group) for name, out in zip(names, outs, strict=True)), strict=True
    )
    if any(not torch.equal(order, orders[0]) for order in orders):
        raise UnsupportedModel(f"{' and '.join(names)} take their inputs in different orders; they need the same")
    size = next(size for size in GROUPS if group % size == 0)
    in_order = torch.equal(orders[0], torch.arange(width, device=orders[0].device))
    return QuantizedLinear(
        weight=pack_int4(torch.cat(numbers), size),
        scales=torch.cat(scales).float().repeat_interleave(group // size, 1),
        bias=bias,
        zeros=torch.cat(zeros).repeat_interleave(group // size, 1),
        order=None if in_order else orders[0],
        batch_invariant=weights.linear.batch_invariant,
    )


def load_rounded(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: Tensor | None
) -> QuantizedLinear:
    """Load matrices that read the same input, their outputs below each other. Raises ``UnsupportedModel``.

    Where blocks have a scale each, the numbers are rounded a second time, to a scale for each row.
    """
    form = weights.packed
    assert form is not None
    dtype = FP8 if form.method == "fp8" else torch.int8
    numbers = [weights.get_stored(f"{name}.weight", dtype, out, width) for name, out in zip(names, outs, strict=True)]
    if form.block is None:
        scales = [weights.get_scales(f"{name}.{form.scales}", out) for name, out in zip(names, outs, strict=True)]
        together = torch.cat([some.view(torch.uint8) for some in numbers]).view(dtype)  # float8 is not put together
        return QuantizedLinear(
            together,
            torch.cat(scales),
            bias,
            rounds_input=form.method == "w8a8",
            batch_invariant=weights.linear.batch_invariant,
        )
    tall, wide = form.block
    whole = []
    for name, some in zip(names, numbers, strict=True):
        scales_of_blocks = weights.get_scales(f"{name}.{form.scales}", -(-len(some) // tall), -(-width // wide))
        spread = scales_of_blocks.repeat_interleave(tall, 0)[: len(some)].repeat_interleave(wide, 1)[:, :width]
        whole.append(some.float() * spread)
    return quantize(torch.cat(whole), bias, form.method, weights.linear.batch_invariant)


def is_packed(form: PackedFormat | None, name: str) -> bool:
    """Whether the checkpoint has the matrix of that name packed."""
    return form is not None and not any(_names(part, name) for part in form.kept_whole)


def _names(part: str, name: str) -> bool:
    return bool(re.search(part.removeprefix("re:"), name)) if part.startswith("re:") else part in name


Read = tuple[Tensor, Tensor, Tensor, Tensor]  # numbers (out, in), zeros and scales (out, groups), order (in,)


def _read_awq(weights: WeightSource, name: str, out: int, width: int, group: int) -> Read:
    words = weights.get_stored(f"{name}.qweight", torch.int32, width, out // PER_WORD)
    zeros = weights.get_stored(f"{name}.qzeros", torch.int32, width // group, out // PER_WORD)
    scales = weights.get(f"{name}.scales", width // group, out)
    where = torch.tensor(AWQ_ORDER, device=words.device).argsort()  # at which place of a word each output stands
    numbers, from_ = (_unpack(some)[..., where].flatten(1) for some in (words, zeros))
    return numbers.t(), from_.t(), scales.t(), torch.arange(width, device=words.device)


def _read_gptq(weights: WeightSource, name: str, out: int, width: int, group: int) -> Read:
    form = weights.packed
    words = weights.get_stored(f"{name}.qweight", torch.int32, width // PER_WORD, out)
    zeros = _unpack(weights.get_stored(f"{name}.qzeros", torch.int32, width // group, out // PER_WORD)).flatten(1)
    scales = weights.get(f"{name}.scales", width // group, out)
    of_input = weights.get_stored(f"{name}.g_idx", torch.int32, width)
    order = of_input.argsort(stable=True)
    if not torch.equal(of_input[order].long(), torch.arange(width, device=order.device) // group):
        raise UnsupportedModel(f"{name}.g_idx does not put {group} inputs into each group")
    numbers = _unpack(words.t()).flatten(1)
    if form is not None and form.zeros_are_one_less:
        zeros = zeros + 1
    return numbers.index_select(1, order), zeros.t(), scales.t(), order


def _unpack(words: Tensor) -> Tensor:
    """Return the eight numbers of each int32 in a last dimension of their own, the lowest bits first, uint8."""
    shifts = torch.arange(0, 32, PACKED_BITS, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8)
