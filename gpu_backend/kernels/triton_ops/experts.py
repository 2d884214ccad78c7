# A mixture of experts in Triton. Pairs of a token and one of its experts are sorted by expert into blocks of one expert
# each, and one launch multiplies all blocks with their experts' weights (as MegaBlocks, Gale et al. 2022, and vLLM's
# fused_moe do). The number of blocks launched depends on the number of tokens alone, never on where they are routed:
# nothing is waited for, and graphs can replay it. Blocks that this routing does not need return at once.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.triton_ops.quantized_linear import ProductShape, sum_kernel

FEW = ProductShape(16, 64, 128, 4, 4)  # rows of an expert in a decode: bandwidth
SOME = ProductShape(64, 64, 64, 4, 4)  # in between, and for every batch where sums must come out the same
MANY = ProductShape(128, 64, 64, 8, 3)  # a prefill: arithmetic
# Of pairs for each expert on average: up to the first hardly two meet, and each is a block by itself, up to the others
# an expert has few rows, and some.
MOST_PAIRS = (0.25, 16, 64)
PAIRS_AT_ONCE = 2048


def experts_shape(pairs: int, experts: int, batch_invariant: bool = False) -> ProductShape:
    """Choose it by the rows that an expert has on average."""
    if batch_invariant:
        return SOME
    return FEW if pairs <= MOST_PAIRS[1] * experts else SOME if pairs <= MOST_PAIRS[2] * experts else MANY


def stages_of(shape: ProductShape, is_whole: bool) -> int:
    """Return how many tiles are read ahead: of whole weights one less, which fits an L4, and lets an H100 hold three
    programs at once rather than two."""
    return 3 if is_whole and shape is FEW else shape.num_stages


def depth_of(shape: ProductShape, itemsize: int, packed: bool = False, group: int = 0) -> int:
    """Return how many inputs are multiplied at a time: as many bytes of any type; packed, what registers hold, and no
    more than have a scale together, where there is a ``group`` of such."""
    depth = shape.depth * 2 // itemsize
    return min(depth, 64) if packed else min(depth, group or depth)


def choose_experts(
    logits: Tensor,
    count: int,
    normalised: bool,
    bias: Tensor | None = None,
    factor: float = 1.0,
    groups: int = 1,
    most_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return each token's ``count`` likeliest experts: their shares, float32, and their numbers, int32.

    As ``reference_experts`` says; of equal ones the first is chosen.
    """
    tokens, experts = logits.shape
    shares = torch.empty((count, tokens), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((count, tokens), dtype=torch.int32, device=logits.device)
    choose_experts_kernel[(tokens,)](
        logits, shares if bias is None else bias, shares, chosen, tokens, logits.stride(0), factor,
        EXPERTS=experts, GROUPS=groups, GROUPS_PADDED=triton.next_power_of_2(groups), MOST_GROUPS=most_groups,
        SIZE_PADDED=triton.next_power_of_2(experts // groups), COUNT=count,
        COUNT_PADDED=triton.next_power_of_2(count), NORMALISED=normalised, BIASED=bias is not None, num_warps=1,
    )  # fmt: skip
    return shares, chosen


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shares: Tensor,
    experts: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    batch_invariant: bool = False,
    zeros: tuple[Tensor, Tensor] | None = None,
    first: int | None = None,
) -> Tensor:
    """Return the sum of each token's gated MLPs, each times its share; shapes, and ``first``, as ``reference_experts``
    says.

    ``batch_invariant`` makes each row's sum the same to the bit however many rows there are.
    """
    (count, tokens), (all_experts, hidden, _), width = experts.shape, down.shape, gate_up.shape[1] // 2
    shape = experts_shape(count * tokens, all_experts, batch_invariant)
    blocks = sort_pairs(experts, all_experts, shape.rows, first or 0)
    of_inner, of_out = scales or (None, None)
    to_inner, to_out = biases or (None, None)
    from_inner, from_out = zeros or (None, None)
    inner = torch.empty((count * tokens, width), dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, of_inner, from_inner, to_inner, None, clamp, inner, blocks, tokens, shape)
    begin = torch.empty if first is None else torch.zeros  # to which other ranks' experts add nothing
    parts = begin((count, tokens, hidden), dtype=x.dtype, device=x.device)
    _multiply(inner, down, of_out, from_out, to_out, shares, None, parts, blocks, tokens, shape)
    out = torch.empty_like(x)
    sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        parts, out, out, tokens, hidden, count, BIASED=False, BLOCK=1024, num_warps=4
    )
    return out


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Return how many blocks of ``rows`` pairs there can be, wherever they are routed: full but for each last."""
    used = min(pairs, experts)
    return used + (pairs - used) // rows


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs (choice · tokens + token) in blocks of one expert each, as kernels read them."""

    order: Tensor  # (number · rows,) int32: pairs, expert by expert; behind an expert's last a number that is no pair's
    owners: Tensor  # (number,) int32: each block's expert
    counts: Tensor  # (experts + 1,) int32: pairs of each expert, and the blocks that there are of these
    number: int  # of blocks at most
    first: int = 0  # the expert of which owners are counted, where
    is_sorted: bool = True  # False: each pair is a block by itself, and there is but ``owners``


def sort_pairs(experts: Tensor, all_experts: int, rows: int, first: int = 0) -> Blocks:
    """Sort pairs by their experts (count, tokens) into blocks of ``rows``; those of no expert from ``first`` on, of as
    many, are in none."""
    pairs = experts.numel()
    if pairs <= MOST_PAIRS[0] * all_experts:
        return Blocks(experts, experts, experts, pairs, first, is_sorted=False)
    number = most_blocks(pairs, all_experts, rows)
    order, owners, counts = (experts.new_empty(size) for size in (number * rows, number, all_experts + 1))
    blocks = Blocks(order, owners, counts, number)
    count_pairs_kernel[(all_experts,)](experts, blocks.counts, pairs, first, AT_ONCE=PAIRS_AT_ONCE, num_warps=4)
    place_pairs_kernel[(all_experts,)](
        experts, blocks.counts, blocks.order, blocks.owners, pairs, first, EXPERTS=all_experts,
        EXPERTS_PADDED=triton.next_power_of_2(all_experts), ROWS=rows, AT_ONCE=PAIRS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return blocks


def _multiply(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    zeros: Tensor | None,
    bias: Tensor | None,
    shares: Tensor | None,
    clamp: tuple[float, float] | None,
    out: Tensor,
    blocks: Blocks,
    tokens: int,
    shape: ProductShape,
) -> None:
    """Multiply with each pair's expert: tokens' rows into gated inner ones, or, with shares, inner ones into parts."""
    outputs, inputs = out.shape[-1], x.shape[1]
    packed = scales is not None and scales.dtype == torch.uint8
    group = inputs // scales.shape[2] if scales is not None and scales.dim() > 2 and not packed else 0
    halved = group > 0 and weight.dtype == torch.uint8
    alpha, limit = clamp or (0.0, 0.0)
    grouped_product_kernel[(blocks.number, triton.cdiv(outputs, shape.columns))](
        x, weight, weight if scales is None else scales, weight if zeros is None else zeros,
        x if bias is None else bias,
        x if shares is None else shares, out,
        blocks.order, blocks.owners, blocks.counts, blocks.first,
        tokens, shares.numel() if shares is not None else len(out), outputs, inputs, x.stride(0), alpha, limit,
        EXPERTS=weight.shape[0], ROWS=shape.rows, COLUMNS=shape.columns,
        DEPTH=group if halved else depth_of(shape, x.itemsize, packed, group), GROUP=group, HALVED=halved,
        SHIFTED=zeros is not None,
        SORTED=blocks.is_sorted, GATED=shares is None, SCALED=scales is not None and not (packed or group),
        PACKED=packed,
        BIASED=bias is not None, CLAMPED=clamp is not None,
        PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32",
        num_warps=shape.num_warps, num_stages=stages_of(shape, scales is None),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def choose_experts_kernel(
    logits, bias, shares, chosen, tokens, row_stride, factor, EXPERTS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr, MOST_GROUPS: tl.constexpr, SIZE_PADDED: tl.constexpr,
    COUNT: tl.constexpr, COUNT_PADDED: tl.constexpr, NORMALISED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """One token. Experts stand group by group, each in as much room as a power of two."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    spot = tl.arange(0, GROUPS_PADDED * SIZE_PADDED)
    expert = spot // SIZE_PADDED * SIZE + spot % SIZE_PADDED
    real = (spot % SIZE_PADDED < SIZE) & (spot // SIZE_PADDED < GROUPS)
    logit = tl.load(logits + token * row_stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if BIASED:
        score = 1.0 / (1.0 + tl.exp(-logit))
        left = score + tl.load(bias + expert, mask=real, other=float("-inf"))
        whole = 1.0
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        left = logit
        whole = tl.sum(score, 0)
    if GROUPS > 1:
        left = _in_best_groups(left, GROUPS_PADDED, MOST_GROUPS, SIZE_PADDED, BIASED)
    place = tl.arange(0, COUNT_PADDED)
    kept = tl.zeros([COUNT_PADDED], tl.float32)
    numbers = tl.zeros([COUNT_PADDED], tl.int32)
    for i in tl.static_range(COUNT):
        best = tl.argmax(left, 0)
        kept = tl.where(place == i, tl.sum(tl.where(spot == best, score, 0.0), 0), kept)
        number = best // SIZE_PADDED * SIZE + best % SIZE_PADDED
        numbers = tl.where(place == i, tl.minimum(number, EXPERTS - 1), numbers)  # what is no number chooses some, too
        left = tl.where(spot == best, float("-inf"), left)
    if NORMALISED:
        whole = tl.sum(kept, 0) + 1e-20
    tl.store(shares + place * tokens + token, kept / whole * factor, mask=place < COUNT)
    tl.store(chosen + place * tokens + token, numbers, mask=place < COUNT)


@triton.jit
def _in_best_groups(
    left, GROUPS: tl.constexpr, MOST: tl.constexpr, SIZE: tl.constexpr, BY_TWO: tl.constexpr
):  # fmt: skip
    """Return what is left of all groups but the ``MOST`` best: by their best, or by their best two together."""
    grouped = tl.reshape(left, (GROUPS, SIZE))
    worth = tl.max(grouped, 1)
    if BY_TWO:
        is_best = tl.arange(0, SIZE)[None, :] == tl.argmax(grouped, 1)[:, None]
        worth += tl.max(tl.where(is_best, float("-inf"), grouped), 1)
    number = tl.arange(0, GROUPS)
    is_kept = number < 0
    for _ in tl.static_range(MOST):
        is_next = number == tl.argmax(worth, 0)
        is_kept = is_kept | is_next
        worth = tl.where(is_next, float("-inf"), worth)
    return tl.reshape(tl.where(is_kept[:, None], grouped, float("-inf")), (GROUPS * SIZE,))


@triton.jit(do_not_specialize=["pairs", "first"])
def count_pairs_kernel(experts, counts, pairs, first, AT_ONCE: tl.constexpr):
    """One expert, counted from ``first`` on: how many pairs are its own."""
    own = tl.program_id(0)
    found = tl.zeros([AT_ONCE], tl.int32)
    for begin in range(0, pairs, AT_ONCE):
        pair = begin + tl.arange(0, AT_ONCE)
        found += (tl.load(experts + pair, mask=pair < pairs, other=-1) == own + first).to(tl.int32)
    tl.store(counts + own, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "first"])
def place_pairs_kernel(
    experts, counts, order, owners, pairs, first,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One expert: its blocks come after those of the experts before it, its pairs in their order."""
    own = tl.program_id(0)
    every = tl.arange(0, EXPERTS_PADDED)
    blocks = tl.cdiv(tl.load(counts + every, mask=every < EXPERTS, other=0), ROWS)
    begins = tl.sum(tl.where(every < own, blocks, 0), 0)
    end = begins + tl.sum(tl.where(every == own, blocks, 0), 0)
    if own == EXPERTS - 1:
        tl.store(counts + EXPERTS, end)
    for block in range(begins, end):
        tl.store(owners + block, own)
    at = begins * ROWS
    for begin in range(0, pairs, AT_ONCE):
        pair = begin + tl.arange(0, AT_ONCE)
        is_own = tl.load(experts + pair, mask=pair < pairs, other=-1) == own + first
        count = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + at + count - 1, pair, mask=is_own)
        at += tl.sum(is_own.to(tl.int32), 0)
    behind = at + tl.arange(0, ROWS)
    tl.store(order + behind, pairs, mask=behind < end * ROWS)


@triton.jit(do_not_specialize=["first", "tokens", "pairs"])
def grouped_product_kernel(
    x, weight, scales, zeros, bias, shares, out, order, owners, counts, first, tokens, pairs, outputs, inputs,
    row_stride, alpha, limit,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HALVED: tl.constexpr, SHIFTED: tl.constexpr, SORTED: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    PACKED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of pairs times some of its expert's outputs.

    ``GATED``: a pair reads its token's row, and gate and up become one. Else it reads its own, and is worth its share.
    ``PACKED``: weights are as ``layout.mxfp4`` has them, ``HALVED``: int4 in groups; a byte's two inputs are one column
    of a product each. ``SHIFTED``: groups of whole numbers count from ``zeros``.
    """
    block = tl.program_id(0)
    slot = tl.arange(0, ROWS)
    number = pairs
    if SORTED:
        number = tl.load(counts + EXPERTS)
    if block >= number:
        return
    if SORTED:
        pair = tl.load(order + block * ROWS + slot)
    else:
        pair = tl.where(slot == 0, block, pairs)
    expert = tl.load(owners + block).to(tl.int64)
    if not SORTED:
        expert -= first
        if (expert < 0) | (expert >= EXPERTS):
            return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = (pair < pairs)[:, None]
    there = (column < outputs)[:, None]
    row = pair % tokens if GATED else pair
    from_x = x + row.to(tl.int64)[:, None] * row_stride
    HALVES: tl.constexpr = 2 if GATED else 1
    gate = expert * HALVES * outputs + column  # of the expert's outputs; those of up come ``outputs`` later
    second = gate + outputs
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = acc
    for begin in range(0, inputs, DEPTH):
        if PACKED:
            byte = begin // 2 + tl.arange(0, DEPTH // 2)[None, :]
            place = byte // 16 * 32 + byte % 16  # of its low bits' input; that of its high bits is 16 further
            inside = place < inputs
            low = tl.load(from_x + place, mask=here & inside, other=0.0)
            high = tl.load(from_x + place + 16, mask=here & inside, other=0.0)
            acc = _add_packed(acc, low, high, weight, scales, gate, there, begin, inputs, DEPTH, PRECISION)
            if GATED:
                up = _add_packed(up, low, high, weight, scales, second, there, begin, inputs, DEPTH, PRECISION)
        elif HALVED:
            place = begin + tl.arange(0, DEPTH // 2)[None, :]
            low = tl.load(from_x + place, mask=here, other=0.0)
            high = tl.load(from_x + place + DEPTH // 2, mask=here, other=0.0)
            acc = _add_halves(
                acc, low, high, weight, scales, zeros, gate, there, begin, inputs, GROUP, SHIFTED, PRECISION
            )
            if GATED:
                up = _add_halves(
                    up, low, high, weight, scales, zeros, second, there, begin, inputs, GROUP, SHIFTED, PRECISION
                )
        else:
            place = begin + tl.arange(0, DEPTH)[None, :]
            inside = place < inputs
            taken = tl.load(from_x + place, mask=here & inside, other=0.0)
            inside &= there
            acc = _add_tile(
                acc, taken, weight, scales, zeros, gate, inside, place, begin, inputs, GROUP, SHIFTED, PRECISION
            )
            if GATED:
                up = _add_tile(
                    up, taken, weight, scales, zeros, second, inside, place, begin, inputs, GROUP, SHIFTED, PRECISION
                )
    if SCALED:
        acc *= tl.load(scales + gate, mask=column < outputs, other=0.0)[None, :]
    if BIASED:
        acc += tl.load(bias + gate, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if SCALED:
            up *= tl.load(scales + second, mask=column < outputs, other=0.0)[None, :]
        if BIASED:
            up += tl.load(bias + second, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
        if CLAMPED:  # what is no number stays so
            acc = tl.where(acc > limit, limit, acc)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
            acc = acc / (1.0 + tl.exp(-alpha * acc)) * up
        else:
            acc = acc / (1.0 + tl.exp(-acc)) * up
    else:
        acc *= tl.load(shares + pair, mask=pair < pairs, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=here & (column < outputs)[None, :])


@triton.jit
def _add_tile(
    acc, taken, weight, scales, zeros, row, inside, place, begin, inputs, GROUP: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of some inputs with each row, which may have a scale for each ``GROUP`` of them."""
    w = tl.load(weight + row[:, None] * inputs + place, mask=inside, other=0.0).to(taken.dtype)
    if GROUP > 0:
        known = tl.max(inside.to(tl.int32), 1) > 0
        of_group = row * (inputs // GROUP) + begin // GROUP
        scale = tl.load(scales + of_group, mask=known, other=0.0)
        if SHIFTED:  # whole numbers up to 256 are whole in any type
            w -= tl.load(zeros + of_group, mask=known, other=0).to(taken.dtype)[:, None]
        return acc + tl.dot(taken, tl.trans(w), input_precision=PRECISION) * scale[None, :]
    return tl.dot(taken, tl.trans(w), acc, input_precision=PRECISION)


@triton.jit
def _add_halves(
    acc, low, high, weight, scales, zeros, row, is_row, begin, inputs, GROUP: tl.constexpr, SHIFTED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of a group of inputs with each row of int4: its first half lies in the low bits."""
    byte = begin // 2 + tl.arange(0, GROUP // 2)[None, :]
    bits = tl.load(weight + row[:, None] * (inputs // 2) + byte, mask=is_row, other=0)
    of_group = row[:, None] * (inputs // GROUP) + begin // GROUP
    zero = 8
    if SHIFTED:
        zero = tl.load(zeros + of_group, mask=is_row, other=0).to(tl.int8)
    first = ((bits & 15).to(tl.int8) - zero).to(low.dtype)
    second = ((bits >> 4).to(tl.int8) - zero).to(low.dtype)
    summed = tl.dot(low, tl.trans(first), input_precision=PRECISION)
    summed = tl.dot(high, tl.trans(second), summed, input_precision=PRECISION)
    return acc + summed * tl.trans(tl.load(scales + of_group, mask=is_row, other=0.0))


@triton.jit
def _add_packed(
    acc, low, high, weight, scales, row, is_row, begin, inputs, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of inputs with the low and the high bits of some bytes of each row."""
    COLUMNS: tl.constexpr = row.shape[0]
    byte = begin // 2 + tl.arange(0, DEPTH // 2)[None, :]
    block = begin // 32 + tl.arange(0, DEPTH // 32)[None, :]
    inside = is_row & (byte < inputs // 2)
    bits = tl.load(weight + row[:, None] * (inputs // 2) + byte, mask=inside, other=0).to(tl.int32)
    known = is_row & (block < inputs // 32)
    exponent = tl.load(scales + row[:, None] * (inputs // 32) + block, mask=known, other=0).to(tl.int32)
    power = (exponent << 23).to(tl.float32, bitcast=True)  # as its own exponent, of the same bias; the least one is 0
    power = tl.reshape(tl.broadcast_to(power[:, :, None], (COLUMNS, DEPTH // 32, 16)), (COLUMNS, DEPTH // 2))
    acc = tl.dot(low, tl.trans((_e2m1(bits & 15) * power).to(low.dtype)), acc, input_precision=PRECISION)
    return tl.dot(high, tl.trans((_e2m1(bits >> 4) * power).to(high.dtype)), acc, input_precision=PRECISION)


@triton.jit
def _e2m1(bits):
    """Return the value of four bits: as the last of a float's exponent and the first of its fraction, but for 2¹²⁶."""
    return ((bits & 7) << 22 | (bits & 8) << 28).to(tl.float32, bitcast=True) * 8.507059173023462e37
