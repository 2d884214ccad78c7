# A mixture of experts in plain torch: what runs on the CPU, and what the Triton kernels are judged by. A token and one
# of its experts are a pair; pairs are sorted by expert, so that each expert's weights are read once.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.mxfp4 import unpack_mxfp4
from gpu_backend.kernels.reference import grouped_numbers, silu_and_mul


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

    ``logits`` are (tokens, experts), the results (count, tokens), the likeliest first. Shares are of the softmax over
    all experts (Shazeer et al. 2017), or, ``normalised``, over those that were chosen. With a ``bias`` (experts,) they
    are sigmoids, and those count most that have the largest sum with it (DeepSeek-V3, Liu et al. 2024). All shares are
    multiplied by ``factor``. Of several ``groups`` a token's experts are in the best ``most_groups``: by the best of
    each, or, with a bias, by its best two together.
    """
    wide = logits.float()
    if bias is None:
        chosen, experts = _in_best_groups(wide, groups, most_groups, 1).topk(count, dim=-1)
        shares = chosen.softmax(-1) if normalised else (chosen - wide.logsumexp(-1, keepdim=True)).exp()
    else:
        scores = wide.sigmoid()
        experts = _in_best_groups(scores + bias, groups, most_groups, 2).topk(count, dim=-1).indices
        shares = scores.gather(-1, experts)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) if normalised else shares
    return (shares * factor).t().contiguous(), experts.t().int().contiguous()


def _in_best_groups(scores: Tensor, groups: int, most: int, best: int) -> Tensor:
    """Return scores (tokens, experts) without those of other groups than the ``most`` whose ``best`` sum up highest."""
    if groups == 1:
        return scores
    grouped = scores.view(len(scores), groups, -1)
    worth = grouped.topk(best, dim=-1).values.sum(-1)
    hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(most, dim=-1).indices, value=False)
    return grouped.masked_fill(hidden[..., None], -torch.inf).flatten(1)


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
    """Return the sum of each token's gated MLPs, each times its share; x (tokens, hidden).

    ``gate_up`` is (experts, 2 · inner, hidden), gate above up; ``down`` (experts, hidden, inner). Both are of x's type,
    or of float8 or int8 with float32 ``scales`` (experts, outputs), or (experts, outputs, groups) of inputs, as int4 in
    ``models.quantization.pack_int4``'s form always has, ``zeros`` as in ``reference.quantized_linear``; or packed as
    ``layout.mxfp4`` has them, with its exponents. ``biases`` (experts, outputs) are added to both products;
    ``clamp`` is what ``clamped_swiglu`` takes. ``shares`` and ``experts`` are ``choose_experts``'. The CPU is given one
    token at a time where a row's sum must be the same to the bit (``batch_invariant``). The weights may be of some
    experts alone, from number ``first`` on; then others add nothing.
    """
    of_inner, of_out = scales or (None, None)
    to_inner, to_out = biases or (None, None)
    from_inner, from_out = zeros or (None, None)

    def mlp(rows: Tensor, expert: int) -> Tensor:
        both = _product(rows, gate_up, of_inner, to_inner, from_inner, expert)
        gated = silu_and_mul(both) if clamp is None else clamped_swiglu(both, *clamp)
        return _product(gated, down, of_out, to_out, from_out, expert)

    owners = experts.flatten() - (first or 0)
    if first is not None:
        owners = owners.where((owners >= 0) & (owners < len(gate_up)), len(gate_up))
    pairs = owners.argsort(stable=True)
    *counts, others = torch.bincount(owners, minlength=len(gate_up) + 1).tolist()
    pairs = pairs[: len(pairs) - others]
    outs = [mlp(rows, expert) for expert, rows in enumerate(x[pairs % len(x)].split(counts)) if len(rows)]
    parts = torch.zeros(len(owners), x.shape[1])
    parts[pairs] = torch.cat([x[:0], *outs]).float() * shares.flatten()[pairs, None]
    return parts.view(*experts.shape, -1).sum(0).to(x.dtype)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return gate · sigmoid(alpha · gate) · (up + 1) for rows that hold both; gate is at most ``limit``, and up is
    within it on both sides (GPT-OSS; OpenAI 2025, section 2)."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return gate * (alpha * gate).sigmoid() * (up.clamp(-limit, limit) + 1)


def _product(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, zeros: Tensor | None, expert: int
) -> Tensor:
    added = None if bias is None else bias[expert]
    if scales is None:
        return F.linear(x, weight[expert], added)
    if scales.dtype == torch.uint8:
        return F.linear(x, unpack_mxfp4(weight[expert], scales[expert], x.dtype), added)
    if scales.dim() > 2:
        own = None if zeros is None else zeros[expert]
        product = F.linear(x.float(), grouped_numbers(weight[expert], scales[expert], own)).to(x.dtype)
    else:
        product = (F.linear(x, weight[expert].to(x.dtype)).float() * scales[expert]).to(x.dtype)
    return product if added is None else product + added
