# Penalties for what was said already, in Triton: one launch looks each token of each row up in the table of counts, so
# that a graph which draws can do so, and nothing is gathered before.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.sampling_tensors import IN_PROMPT

PIECE = 4096  # tokens that one program of a row looks at
PROMPT = tl.constexpr(IN_PROMPT)


def penalise(logits: Tensor, rows: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Return float32 logits less their penalties; ``reference.penalise`` says how."""
    places, vocab = logits.shape
    out = torch.empty((places, vocab), dtype=torch.float32, device=logits.device)
    penalise_kernel[(places, triton.cdiv(vocab, PIECE))](
        logits, rows, counts, penalties, out, logits.stride(0), rows.stride(0), VOCAB=vocab, PIECE=PIECE, num_warps=8
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["rows", "penalties"])
def penalise_kernel(
    logits, rows, counts, penalties, out, logit_stride, row_stride, VOCAB: tl.constexpr, PIECE: tl.constexpr
):
    """One piece of one place's logits."""
    place = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    held = tokens < VOCAB
    row = tl.load(rows + place * row_stride).to(tl.int64)
    x = tl.load(logits + place * logit_stride + tokens, mask=held, other=0.0).to(tl.float32)
    count = tl.load(counts + row * VOCAB + tokens, mask=held, other=0)
    repetition = tl.load(penalties + place * 3)
    in_reply = count & (PROMPT - 1)
    repeated = tl.where(x > 0.0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where(count > 0, repeated, x)
    x -= in_reply.to(tl.float32) * tl.load(penalties + place * 3 + 1)
    x -= tl.where(in_reply > 0, tl.load(penalties + place * 3 + 2), 0.0)
    tl.store(out + place * VOCAB + tokens, x, mask=held)
