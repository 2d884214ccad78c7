# Checkpoints whose weights are of few bits already. In words, as AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) and
# llm-compressor (compressed-tensors, pack-quantized) have them: numbers of four or eight bits packed into int32, a
# scale and maybe a zero for each group of inputs. They are repacked into the one form that our product reads; not a
# number changes. One by one: float8 as transformers and llm-compressor write it, and int8 weights, whose inputs may be
# rounded, too (SmoothQuant, Xiao et al. 2023, is in their numbers). Inputs get the scale of their own row when they
# come, whatever fixed one the checkpoint has beside it: that is never coarser.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.quantization import FP8, GROUPS, Linear, pack_int4

if TYPE_CHECKING:
    from gpu_backend.models.weights import WeightSource

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs stands at each place of a word


def load_packed(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: Tensor | None
) -> Linear:
    """Load matrices that read the same input, their outputs below each other. Raises ``UnsupportedModel``."""
    form = weights.packed
    assert form is not None
    read = {"awq": _read_awq, "gptq": _read_gptq, "compressed": _read_compressed}[form.method]
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
    together, from_, middle = torch.cat(numbers), torch.cat(zeros).short(), 1 << form.bits - 1
    spread_scales = torch.cat(scales).float().repeat_interleave(group // size, 1)
    is_middle = bool((from_ == middle).all())
    if form.bits == 4:
        weight, from_ = pack_int4(together, size), from_.to(torch.uint8)
    else:
        weight, from_ = (together ^ middle).view(torch.int8).contiguous(), from_ - middle
        if group == width and is_middle:
            spread_scales = spread_scales[:, 0].contiguous()
    return Linear(
        weight=weight,
        scales=spread_scales,
        bias=bias,
        zeros=None if is_middle else from_.repeat_interleave(group // size, 1),
        order=None if in_order else orders[0],
        batch_invariant=weights.linear.batch_invariant,
    )


def load_rounded(
    weights: WeightSource, names: tuple[str, ...], outs: tuple[int, ...], width: int, bias: Tensor | None
) -> Linear:
    """Load matrices that read the same input, their outputs below each other. Raises ``UnsupportedModel``."""
    form = weights.packed
    assert form is not None
    dtype = FP8 if form.method == "fp8" else torch.int8
    numbers = [weights.get_stored(f"{name}.weight", dtype, out, width) for name, out in zip(names, outs, strict=True)]
    scales = [
        _scales(weights, form, f"{name}.{form.scales}", out, width) for name, out in zip(names, outs, strict=True)
    ]
    together = torch.cat([some.view(torch.uint8) for some in numbers]).view(dtype)  # float8 is not put together
    return Linear(
        together,
        bias,
        torch.cat(scales),
        rounds_input=form.method == "w8a8",
        batch_invariant=weights.linear.batch_invariant,
    )


def _scales(weights: WeightSource, form: PackedFormat, name: str, out: int, width: int) -> Tensor:
    """Return each output's scale (out,); of blocks, its scale for each group of inputs (out, groups)."""
    if form.block is None:
        return weights.get_scales(name, out)
    tall, wide = form.block
    if width % wide:
        raise UnsupportedModel(f"{name} is of {width} inputs, which blocks of {wide} do not divide")
    return weights.get_scales(name, -(-out // tall), width // wide).repeat_interleave(tall, 0)[:out]


Read = tuple[Tensor, Tensor, Tensor, Tensor]  # numbers (out, in), zeros and scales (out, groups), order (in,)


def _read_awq(weights: WeightSource, name: str, out: int, width: int, group: int) -> Read:
    words = weights.get_stored(f"{name}.qweight", torch.int32, width, out // 8)
    zeros = weights.get_stored(f"{name}.qzeros", torch.int32, width // group, out // 8)
    scales = weights.get(f"{name}.scales", width // group, out)
    where = torch.tensor(AWQ_ORDER, device=words.device).argsort()  # at which place of a word each output stands
    numbers, from_ = (_unpack(some, 4)[..., where].flatten(1) for some in (words, zeros))
    return numbers.t(), from_.t(), scales.t(), torch.arange(width, device=words.device)


def _read_gptq(weights: WeightSource, name: str, out: int, width: int, group: int) -> Read:
    form = weights.packed
    assert form is not None
    words = weights.get_stored(f"{name}.qweight", torch.int32, width // form.per_word, out)
    packed_zeros = weights.get_stored(f"{name}.qzeros", torch.int32, width // group, out // form.per_word)
    zeros = _unpack(packed_zeros, form.bits).flatten(1)
    scales = weights.get(f"{name}.scales", width // group, out)
    order = _order(weights, f"{name}.g_idx", width, group)
    numbers = _unpack(words.t(), form.bits).flatten(1)
    if form.zeros_are_one_less:
        zeros = zeros.short() + 1
    return numbers.index_select(1, order), zeros.t(), scales.t(), order


def _read_compressed(weights: WeightSource, name: str, out: int, width: int, group: int) -> Read:
    """Rows stay rows; what numbers count from is packed by outputs."""
    form = weights.packed
    assert form is not None
    words = weights.get_stored(f"{name}.weight_packed", torch.int32, out, width // form.per_word)
    scales = weights.get(f"{name}.weight_scale", out, width // group)
    zeros = torch.full(scales.shape, 1 << form.bits - 1, dtype=torch.uint8, device=words.device)
    if form.has_zeros:
        packed = weights.get_stored(f"{name}.weight_zero_point", torch.int32, out // form.per_word, width // group)
        zeros = _unpack(packed.t(), form.bits).flatten(1).t()
    order = torch.arange(width, device=words.device)
    if form.has_order:
        order = _order(weights, f"{name}.weight_g_idx", width, group)
    return _unpack(words, form.bits).flatten(1).index_select(1, order), zeros, scales, order


def _order(weights: WeightSource, name: str, width: int, group: int) -> Tensor:
    """Return the inputs, group by group."""
    of_input = weights.get_stored(name, torch.int32, width)
    order = of_input.argsort(stable=True)
    if not torch.equal(of_input[order].long(), torch.arange(width, device=order.device) // group):
        raise UnsupportedModel(f"{name} does not put {group} inputs into each group")
    return order


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of each int32 in a last dimension of their own, the lowest bits first, uint8."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).to(torch.uint8)
