# Logits to tokens. The noise that makes sampling random is a pure function of (seed, reply index, position, token),
# so a reply can be made again, or continued elsewhere, whatever else is in the batch.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.engine.plan import SequenceStep, TokenLogprob

GREEDY_BELOW = 1e-5  # a lower temperature than this means the most likely token
CANDIDATES = 256  # top-p looks at this many before it sorts the whole vocabulary
PHILOX_ROUNDS = 7  # the fewest that pass BigCrush (Salmon et al. 2011, table 2)
LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row; ``finite[i]`` is false where row i had no usable numbers, and its token means nothing."""

    token_ids: list[int]
    finite: list[bool]
    logprobs: list[TokenLogprob | None]


def sample(logits: Tensor, steps: Sequence[SequenceStep]) -> Sampled:
    """Choose the next token of each step from its row of ``logits`` (rows, vocab), float32."""
    finite = torch.isfinite(logits.sum(-1))
    chosen = logits.argmax(-1)
    warm = [row for row, step in enumerate(steps) if step.sampling.temperature >= GREEDY_BELOW]
    if warm:
        chosen[warm] = _sample_warm(logits if len(warm) == len(steps) else logits[warm], [steps[row] for row in warm])
    logprobs: list[TokenLogprob | None] = [None] * len(steps)
    if any(step.sampling.logprobs is not None for step in steps):
        _report_logprobs(logits, chosen, steps, logprobs)
    return Sampled(chosen.tolist(), finite.tolist(), logprobs)


def _sample_warm(logits: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
    """Sample by the Gumbel-max trick: the largest of log-probability plus Gumbel noise is a fair draw."""
    temperatures = torch.tensor([[step.sampling.temperature] for step in steps], device=logits.device)
    scaled = logits / temperatures
    _mask_unlikely(scaled, steps)
    return scaled.add_(gumbel_noise(steps, logits.shape[-1], logits.device)).argmax(-1)


def _mask_unlikely(logits: Tensor, steps: Sequence[SequenceStep]) -> None:
    """Put -inf in place of what top-k, then top-p of the rest, then min-p exclude. The likeliest token always stays."""
    for rows, keep in (
        ([i for i, s in enumerate(steps) if 0 < s.sampling.top_k < logits.shape[-1]], _top_k_floor),
        ([i for i, s in enumerate(steps) if s.sampling.top_p < 1], _top_p_floor),
        ([i for i, s in enumerate(steps) if s.sampling.min_p > 0], _min_p_floor),
    ):
        if rows:
            part = logits[rows]
            floor = keep(part, [steps[i] for i in rows])
            logits[rows] = part.masked_fill_(part < floor, -torch.inf)


def _top_k_floor(logits: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
    """Return each row's k-th largest logit, (rows, 1)."""
    ks = torch.tensor([[step.sampling.top_k] for step in steps], device=logits.device)
    return logits.topk(int(ks.max()), dim=-1).values.gather(-1, ks - 1)


def _top_p_floor(logits: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
    """Return the least logit of each row's nucleus, the fewest tokens that reach top-p (Holtzman et al. 2020)."""
    limits = torch.tensor([[step.sampling.top_p] for step in steps], device=logits.device)
    total = logits.logsumexp(-1, keepdim=True)
    for count in (CANDIDATES, logits.shape[-1]):
        largest = logits.topk(min(count, logits.shape[-1]), dim=-1).values
        mass = (largest - total).exp_().cumsum(-1)
        if count >= logits.shape[-1] or bool((mass[:, -1:] >= limits).all()):
            break
    # The token that crosses the limit belongs to the nucleus.
    last = (mass < limits).sum(-1, keepdim=True).clamp_(max=largest.shape[-1] - 1)
    return largest.gather(-1, last)


def _min_p_floor(logits: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
    """Return the logit whose probability is min-p times that of the likeliest (Nguyen et al. 2024)."""
    shares = torch.tensor([[step.sampling.min_p] for step in steps], device=logits.device)
    return logits.amax(-1, keepdim=True) + shares.log()


def _report_logprobs(
    logits: Tensor, chosen: Tensor, steps: Sequence[SequenceStep], logprobs: list[TokenLogprob | None]
) -> None:
    """Fill in what the model itself thought, before temperature and the filters."""
    rows = [row for row, step in enumerate(steps) if step.sampling.logprobs is not None]
    wanted = [steps[row].sampling.logprobs or 0 for row in rows]
    all_logprobs = logits[rows].log_softmax(-1)
    own = all_logprobs.gather(-1, chosen[rows][:, None])[:, 0].tolist()
    top = all_logprobs.topk(min(max(wanted), logits.shape[-1]), dim=-1)
    for row, count, logprob, ids, values in zip(
        rows, wanted, own, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        logprobs[row] = TokenLogprob(logprob, tuple(zip(ids[:count], values[:count], strict=True)))


def gumbel_noise(steps: Sequence[SequenceStep], vocab_size: int, device: torch.device) -> Tensor:
    """Return standard Gumbel noise (steps, vocab) for each step's next position.

    One Philox call gives four tokens their noise: the counter is (token // 4, position, reply index, 0), the key the
    seed.
    """
    columns = [
        [s.start + len(s.token_ids), s.reply_index, s.sampling.seed & LOW_32, s.sampling.seed >> 32 & LOW_32]
        for s in steps
    ]
    position, reply, key_low, key_high = torch.tensor(columns, device=device).t()[:, :, None]
    quads = torch.arange(-(-vocab_size // 4), device=device)[None]
    words = philox((quads, position, reply, torch.zeros_like(reply)), (key_low, key_high), PHILOX_ROUNDS)
    bits = torch.stack(words, dim=-1).view(len(steps), -1)[:, :vocab_size]
    # An exponential draw is finest near zero, where the winners are; the other end is cut off at 2^-24 from one.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of random bits, by Philox-4x32 (Salmon et al. 2011, "Random numbers: as easy as 1, 2, 3").

    All words are int64 tensors that hold 32-bit values, and broadcast against each other.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap around, and so keep all 64 bits.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (second >> 32 & LOW_32) ^ c1 ^ k0, second & LOW_32
        c2, c3 = (first >> 32 & LOW_32) ^ c3 ^ k1, first & LOW_32
        k0, k1 = k0 + 0x9E3779B9 & LOW_32, k1 + 0xBB67AE85 & LOW_32
    return c0, c1, c2, c3
