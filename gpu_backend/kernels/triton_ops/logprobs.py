# Log-probabilities in Triton: of the token that was chosen, and of the few likeliest. Logits are read once; only the
# few that are reported are ever turned into log-probabilities.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 4096  # tokens that one program of a row looks at
LISTED = (1, 5, 20)  # tokens that are listed: each other number would be compiled anew, while all sequences wait
NO_TOKEN = tl.constexpr(2147483647)


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return that of each row's token (rows,), and of the ``count`` likeliest, with their ids, (rows, count) each.

    ``logits`` are (rows, vocab) of any floating type, ``tokens`` (rows,). Of equals the one with the smaller id
    comes first.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    pieces = triton.cdiv(vocab, PIECE)
    listed = min(vocab, next((most for most in LISTED if most >= count), count))  # few kernels for whatever is asked
    device = logits.device
    values = torch.empty((rows, pieces, listed), dtype=torch.float32, device=device)
    ids = torch.empty((rows, pieces, listed), dtype=torch.int32, device=device)
    sums = torch.empty((rows, pieces), dtype=torch.float32, device=device)
    own = torch.empty((rows,), dtype=torch.float32, device=device)
    top = torch.empty((rows, listed), dtype=torch.float32, device=device)
    top_ids = torch.empty((rows, listed), dtype=torch.int64, device=device)
    shortlist_kernel[(rows, pieces)](
        logits, values, ids, sums, logits.stride(0), VOCAB=vocab, PIECE=PIECE, PIECES=pieces, LISTED=listed,
        num_warps=8,
    )  # fmt: skip
    report_kernel[(rows,)](
        logits, tokens, values, ids, sums, own, top, top_ids, logits.stride(0), COUNT=listed,
        PIECES=pieces, PIECES_PADDED=triton.next_power_of_2(pieces), LISTED=listed,
        ALL_PADDED=triton.next_power_of_2(pieces * listed), num_warps=4,
    )  # fmt: skip
    return own, top[:, :count], top_ids[:, :count]


@triton.jit
def shortlist_kernel(
    logits, values, ids, sums, row_stride,
    VOCAB: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One piece of a row: its largest logits in falling order, and the sum of exp(logit - largest)."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    tokens = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < VOCAB, other=float("-inf"))
    x = x.to(tl.float32)
    place = row * PIECES + piece
    best = tl.max(x, 0)
    tl.store(sums + place, tl.sum(tl.exp(x - tl.where(best == float("-inf"), 0.0, best)), 0))
    for rank in range(LISTED):
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, tokens, NO_TOKEN), 0)
        tl.store(values + place * LISTED + rank, best)
        tl.store(ids + place * LISTED + rank, token)
        x = tl.where(tokens == token, float("-inf"), x)


@triton.jit
def report_kernel(
    logits, tokens, values, ids, sums, own, top, top_ids, row_stride, COUNT: tl.constexpr,
    PIECES: tl.constexpr, PIECES_PADDED: tl.constexpr, LISTED: tl.constexpr, ALL_PADDED: tl.constexpr,
):  # fmt: skip
    """One row: the best of its pieces' lists, less the logarithm of the sum over all of it."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PIECES_PADDED)
    there = pieces < PIECES
    bests = tl.load(values + (row * PIECES + pieces) * LISTED, mask=there, other=float("-inf"))
    best = tl.max(bests, 0)
    parts = tl.load(sums + row * PIECES + pieces, mask=there, other=0.0)
    shrunk = tl.where(bests == float("-inf"), 0.0, tl.exp(bests - best))
    normaliser = best + tl.log(tl.sum(parts * shrunk, 0))
    chosen = tl.load(logits + row.to(tl.int64) * row_stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(own + row, chosen - normaliser)
    listed = tl.arange(0, ALL_PADDED)
    there = listed < PIECES * LISTED
    x = tl.load(values + row * PIECES * LISTED + listed, mask=there, other=float("-inf"))
    id_ = tl.load(ids + row * PIECES * LISTED + listed, mask=there, other=NO_TOKEN)
    for rank in range(COUNT):
        best = tl.max(x, 0)
        token = tl.min(tl.where(x == best, id_, NO_TOKEN), 0)
        tl.store(top + row * COUNT + rank, best - normaliser)
        tl.store(top_ids + row * COUNT + rank, token.to(tl.int64))
        x = tl.where(id_ == token, float("-inf"), x)
