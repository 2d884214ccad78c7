# A mixture of experts in plain torch: what runs on the CPU, and what the Triton kernels are judged by. A token and one
# of its experts are a pair; pairs are sorted by expert, so that each expert's weights are read once.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.reference import silu_and_mul


def choose_experts(
    logits: Tensor, count: int, normalised: bool, bias: Tensor | None = None, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return each token's ``count`` likeliest experts: their shares, float32, and their numbers, int32.

    ``logits`` are (tokens, experts), the results (count, tokens), the likeliest first. Shares are of the softmax over
    all experts (Shazeer et al. 2017), or, ``normalised``, over those that were chosen. With a ``bias`` (experts,) they
    are sigmoids, and those count most that have the largest sum with it (DeepSeek-V3, Liu et al. 2024). All shares are
    multiplied by ``factor``.
    """
    wide = logits.float()
    if bias is None:
        chosen, experts = wide.topk(count, dim=-1)
        shares = chosen.softmax(-1) if normalised else (chosen - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = wide.sigmoid()
        experts = (scores + bias).topk(count, dim=-1).indices
        shares = scores.gather(-1, experts)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if normalised else shares
    return (shares * factor).t().contiguous(), experts.t().int().contiguous()


def mix_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shares: Tensor,
    experts: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Return the sum of each token's gated MLPs, each times its share; x (tokens, hidden).

    ``gate_up`` is (experts, 2 · inner, hidden), gate above up; ``down`` (experts, hidden, inner). Both are of x's type,
    or of float8 or int8 with float32 ``scales`` (experts, outputs). ``shares`` and ``experts`` are ``choose_experts``'.
    The CPU is given one token at a time where a row's sum must be the same to the bit (``batch_invariant``).
    """
    of_inner, of_out = scales or (None, None)
    pairs = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    outs = [
        _product(silu_and_mul(_product(rows, gate_up, of_inner, expert)), down, of_out, expert)
        for expert, rows in enumerate(x[pairs % len(x)].split(counts))
        if len(rows)
    ]
    parts = torch.empty(len(pairs), x.shape[1])
    parts[pairs] = torch.cat(outs).float() * shares.flatten()[pairs, None]
    return parts.view(*experts.shape, -1).sum(0).to(x.dtype)


def _product(x: Tensor, weight: Tensor, scales: Tensor | None, expert: int) -> Tensor:
    if scales is None:
        return F.linear(x, weight[expert])
    return (F.linear(x, weight[expert].to(x.dtype)).float() * scales[expert]).to(x.dtype)
