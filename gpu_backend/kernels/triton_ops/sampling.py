# Logits to tokens in Triton, by the same rule as sampling/sampler.py: the best of logit / temperature + Gumbel noise
# among the tokens that top-k, top-p and min-p leave. All three leave the tokens from some value on, so nothing is
# sorted: bisection finds that value. Nothing waits for the host, and every launch depends on shapes alone.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors

PIECE = 4096  # tokens that one program of a row looks at
GREEDY_BELOW = tl.constexpr(1e-5)  # of sampling/sampler.py
PHILOX_ROUNDS = tl.constexpr(7)  # of sampling/sampler.py
MOST_PASSES = tl.constexpr(80)  # of a bisection over float32: more would mean that a row is not numbers
FAR_BELOW = tl.constexpr(120.0)  # exp of less than this under the maximum is 0 in float32


def draw(logits: Tensor, tensors: SamplingTensors, filters: bool = True) -> tuple[Tensor, Tensor]:
    """Return each row's token (rows,), int64, and whether its logits (rows, vocab), of any floating type, are numbers.

    A logit of -inf is a token that may not come. Where they are not all numbers the token is any of the vocabulary.
    ``filters`` False says that no row asks for top-k, top-p or min-p, and saves looking.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    device = logits.device
    high, low, worth = (torch.empty((rows, pieces), dtype=torch.float32, device=device) for _ in range(3))
    at = torch.empty((rows, pieces), dtype=torch.int32, device=device)
    floors = torch.empty((rows,), dtype=torch.float32, device=device)
    tokens = torch.empty((rows,), dtype=torch.int64, device=device)
    usable = torch.empty((rows,), dtype=torch.bool, device=device)
    size = {"PIECES": pieces, "PIECES_PADDED": triton.next_power_of_2(pieces)}
    survey_kernel[(rows, pieces)](
        logits, tensors.temperature, high, low, worth, logits.stride(0), VOCAB=vocab, PIECE=PIECE, PIECES=pieces,
        num_warps=8,
    )  # fmt: skip
    settle_kernel[(rows,)](
        logits, tensors.temperature, tensors.top_p, tensors.min_p, tensors.top_k, high, low, worth, floors, usable,
        logits.stride(0), VOCAB=vocab, PIECE=PIECE, FILTERS=filters, num_warps=8, **size,
    )  # fmt: skip
    score_kernel[(rows, pieces)](
        logits, tensors.temperature, tensors.seed, tensors.position, tensors.reply, high, floors, worth, at,
        logits.stride(0), VOCAB=vocab, PIECE=PIECE, PIECES=pieces, num_warps=8,
    )  # fmt: skip
    choose_kernel[(rows,)](worth, at, tokens, num_warps=1, **size)
    return tokens, usable


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def survey_kernel(
    logits, temperature, high, low, worth, row_stride, VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr
):
    """One piece of a row: its largest and smallest scaled logit, and a sum that is 0 if all are numbers."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    held = tokens < VOCAB
    x = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=held, other=0.0).to(tl.float32)
    warmth = tl.load(temperature + row)
    scaled = x / tl.where(warmth < GREEDY_BELOW, 1.0, warmth)
    place = row * PIECES + piece
    tl.store(high + place, tl.max(tl.where(held, scaled, float("-inf")), 0))
    tl.store(low + place, tl.min(tl.where(held & (scaled > float("-inf")), scaled, float("inf")), 0))
    tl.store(worth + place, tl.sum(tl.where(x == float("-inf"), 0.0, x - x), 0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_p", "min_p", "top_k"])
def settle_kernel(
    logits, temperature, top_p, min_p, top_k, high, low, worth, floors, usable, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr, FILTERS: tl.constexpr,
):  # fmt: skip
    """One row: the value from which on its filters leave tokens, -inf where there are none."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES_PADDED)
    there = pieces < PIECES
    highs = tl.load(high + row * PIECES + pieces, mask=there, other=float("-inf"))
    sums = tl.load(worth + row * PIECES + pieces, mask=there, other=0.0)
    tl.store(usable + row, tl.sum(sums, 0) == 0.0)
    floor = float("-inf")
    warmth = tl.load(temperature + row)
    if FILTERS and warmth >= GREEDY_BELOW:
        k = tl.load(top_k + row)
        nucleus = tl.load(top_p + row)
        share = tl.load(min_p + row)
        best = tl.max(highs, 0)
        least = tl.min(tl.load(low + row * PIECES + pieces, mask=there, other=float("inf")), 0)
        x = logits + row.to(tl.int64) * row_stride
        piece_highs = high + row * PIECES
        if (k > 0) & (k < VOCAB):
            floor = _lowest_inside(
                x, piece_highs, warmth, best, least - 1.0, floor, k * 1.0, VOCAB, PIECE, PIECES, False
            )
        if nucleus < 1.0:
            total = _weight_above(x, piece_highs, warmth, best, floor, VOCAB, PIECE, PIECES)
            bottom = tl.maximum(best - FAR_BELOW, least - 1.0)
            floor = _lowest_inside(
                x, piece_highs, warmth, best, bottom, floor, nucleus * total, VOCAB, PIECE, PIECES, True
            )
        if share > 0.0:
            floor = tl.maximum(floor, best + tl.log(share))
    tl.store(floors + row, floor)


@triton.jit
def _lowest_inside(
    x, highs, warmth, best, outside, floor, limit,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Return the least value, from ``floor`` on, that less than ``limit`` lies above: tokens counted, or weighed.

    ``inside`` is always such a value and a token's; what lies at ``outside`` or under it is not. Each pass halves what
    is between, and ends at a token: few are needed.
    """
    inside = best
    going = inside > outside
    passes = 0
    while going:
        middle = outside + (inside - outside) * 0.5
        middle = tl.where(middle < inside, middle, outside)
        above = 0.0
        next_up = float("inf")
        next_down = float("-inf")
        for piece in range(PIECES):
            if tl.load(highs + piece) > outside:
                tokens = piece * PIECE + tl.arange(0, PIECE)
                value = tl.load(x + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32) / warmth
                higher = value > middle
                if WEIGHED:
                    above += tl.sum(tl.where(higher & (value >= floor), tl.exp(value - best), 0.0), 0)
                else:
                    above += tl.sum(higher.to(tl.float32), 0)
                next_up = tl.minimum(next_up, tl.min(tl.where(higher, value, float("inf")), 0))
                rest = (value <= middle) & (value > outside)
                next_down = tl.maximum(next_down, tl.max(tl.where(rest, value, float("-inf")), 0))
        if above >= limit:
            outside = middle
            going = next_up < inside
        else:
            inside = tl.where(next_down > outside, next_down, next_up)
            going = next_down > outside
        passes += 1
        going = going & (passes < MOST_PASSES)
    return tl.maximum(inside, floor)


@triton.jit
def _weight_above(x, highs, warmth, best, floor, VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """Return the sum of exp(value - best) from ``floor`` on."""
    total = 0.0
    for piece in range(PIECES):
        if tl.load(highs + piece) >= floor:
            tokens = piece * PIECE + tl.arange(0, PIECE)
            value = tl.load(x + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32) / warmth
            total += tl.sum(tl.where(value >= floor, tl.exp(value - best), 0.0), 0)
    return total


@triton.jit(do_not_specialize_on_alignment=["temperature", "seed", "position", "reply"])
def score_kernel(
    logits, temperature, seed, position, reply, high, floors, worth, at, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One piece of a row: its best score, and whose it is; nothing is computed where no token is left."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    place = row * PIECES + piece
    floor = tl.load(floors + row)
    best, token = float("-inf"), piece * PIECE
    if tl.load(high + place) >= floor:
        tokens = piece * PIECE + tl.arange(0, PIECE)
        warmth = tl.load(temperature + row)
        x = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < VOCAB, other=float("-inf"))
        x = x.to(tl.float32)
        if warmth >= GREEDY_BELOW:
            x = x / warmth
            noise = _gumbel(piece * (PIECE // 4) + tl.arange(0, PIECE // 4), row, seed, position, reply)
            x = tl.where(x >= floor, x + noise, float("-inf"))
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, tokens, VOCAB - 1), 0)
    tl.store(worth + place, best)
    tl.store(at + place, token)


@triton.jit
def _gumbel(quads, row, seed, position, reply):
    """Return the noise of tokens 4 · quad … 4 · quad + 3, as ``noise`` in sampling/sampler.py defines it."""
    counter = tl.zeros_like(quads)
    first, second, third, fourth = tl.philox(
        tl.load(seed + row),
        quads,
        counter + tl.load(position + row),
        counter + tl.load(reply + row),
        counter,
        PHILOX_ROUNDS,
    )
    bits = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08)
    # log1p(-u), exact for small u (Goldberg 1991, theorem 4): the compiler has no log1p that interprets.
    one_less = 1.0 - uniform
    exponential = tl.where(one_less == 1.0, uniform, tl.log(one_less) * uniform / (one_less - 1.0))
    return -tl.log(exponential)


@triton.jit
def choose_kernel(worth, at, tokens, PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr):
    """One row: the first of the pieces with the best score."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES_PADDED)
    there = pieces < PIECES
    scores = tl.load(worth + row * PIECES + pieces, mask=there, other=float("-inf"))
    ids = tl.load(at + row * PIECES + pieces, mask=there, other=2147483647)
    best = tl.max(scores, 0)
    tl.store(tokens + row, tl.min(tl.where(there & (scores == best), ids, 2147483647), 0).to(tl.int64))
