# Logits to tokens. The noise that makes sampling random is a pure function of (seed, reply index, position, token),
# so a reply can be made again, or continued elsewhere, whatever else is in the batch.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_backend.kernels import ops
from gpu_backend.kernels.layout.sampling_tensors import SamplingTensors
from gpu_backend.kernels.layout.upload import upload
from gpu_backend.sampling.adjustments import adjust
from gpu_backend.sampling.token_counts import TokenCounts
from gpu_backend.step.plan import SequenceStep, TokenLogprob

GREEDY_BELOW = 1e-5  # a lower temperature than this means the most likely token
PART = 64  # of a vocabulary, looked through at once
PHILOX_ROUNDS = 7  # the fewest that pass BigCrush (Salmon et al. 2011, table 2)
LOW_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Logprobs:
    """What is reported about some tokens, still on the device, and how many alternatives each of them asks for."""

    own: Tensor  # (tokens,)
    top: Tensor  # (tokens, most alternatives), the likeliest first
    top_ids: Tensor
    counts: tuple[int, ...]

    def read(self) -> list[TokenLogprob]:
        """Return them as plain numbers, one for each token."""
        rows = zip(self.counts, self.own.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [TokenLogprob(own, tuple(zip(ids[:n], values[:n], strict=True))) for n, own, ids, values in rows]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row; ``finite[i]`` is false where row i had no usable numbers, and its token means nothing."""

    token_ids: Tensor
    finite: Tensor
    logprobs: Logprobs | None  # of the rows that asked for them, in their order


def sample(
    logits: Tensor,
    steps: Sequence[SequenceStep],
    counts: TokenCounts | None = None,
    masks: Future[Tensor] | None = None,
) -> Sampled:
    """Choose the next token of each step from its row of ``logits`` (rows, vocab), which are used up.

    ``counts`` are of the tokens that the steps follow: needed where one is penalised. ``masks`` are those of the
    steps' constraints, where they were begun before.
    """
    logits = logits.float()
    finite = torch.isfinite(logits.sum(-1))
    scored: list[int] = []
    which = unadjusted = None
    if [step for step in steps if step.constraint is not None or not step.sampling.is_plain]:
        scored = [row for row, step in enumerate(steps) if step.sampling.logprobs is not None]
        which = upload(scored, logits.device, torch.long) if scored else None
        unadjusted = None if which is None else logits.index_select(0, which)
        adjust(logits, steps, counts, masks)
    tensors = sampling_tensors_of(steps, logits.device)
    if ops.uses_triton(logits.device):
        chosen, _ = ops.draw(logits, tensors, any(step.sampling.filters for step in steps))
    else:
        chosen = _draw(logits, tensors)
    logprobs = None
    if which is not None and unadjusted is not None:
        wanted = [steps[row].sampling.logprobs or 0 for row in scored]
        logprobs = report_logprobs(unadjusted, chosen.index_select(0, which), wanted)
    return Sampled(chosen, finite, logprobs)


def draw(logits: Tensor, tensors: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Return each row's token (rows,) by its sampling parameters, and whether its ``logits`` (rows, vocab) are finite.

    The same as in ``sample``, but on a GPU nothing here depends on the parameters' values: it can be captured and
    replayed.
    """
    if ops.uses_triton(logits.device):
        return ops.draw(logits, tensors, filters=True)
    logits = logits.float()
    return _draw(logits, tensors), torch.isfinite(logits.sum(-1))


def _draw(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return each row's token (rows,), in plain torch."""
    chosen = _likeliest(logits)
    warm = _where(tensors.temperature >= GREEDY_BELOW)
    if len(warm) == len(logits):
        return _sample_warm(logits, tensors)
    if len(warm):
        chosen.index_copy_(0, warm, _sample_warm(logits.index_select(0, warm), tensors.part(warm)))
    return chosen


def _where(rows: Tensor) -> Tensor:
    return rows.nonzero()[:, 0]


def _likeliest(logits: Tensor) -> Tensor:
    """Return the first of each row's largest (rows,): torch searches slowly, so first for the part that has it."""
    if logits.shape[-1] % PART:
        return logits.argmax(-1)
    parts = logits.view(len(logits), -1, PART)
    best = parts.amax(-1).argmax(-1)
    return best * PART + parts[torch.arange(len(best), device=best.device), best].argmax(-1)


def _sample_warm(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Sample by the Gumbel-max trick: the largest of log-probability plus Gumbel noise is a fair draw.

    Of the tokens, top-k, then top-p of the rest, then min-p may exclude some, but never the likeliest.
    """
    scaled = logits / tensors.temperature[:, None]
    _exclude_by_top_k(scaled, tensors.top_k)
    scores = noise(tensors.position, tensors.reply, tensors.seed, logits.shape[-1]).add_(scaled)
    _exclude_by_min_p(scores, scaled, tensors.min_p)
    return _draw_by_top_p(scores, scaled, tensors.top_p)


def _exclude_by_top_k(logits: Tensor, top_k: Tensor) -> None:
    """Put -inf in place of all but the k largest of each row."""
    rows = _where((top_k > 0) & (top_k < logits.shape[-1]))
    if len(rows):
        ks, part = top_k[rows].long()[:, None], logits[rows]
        floor = part.topk(int(ks.max()), dim=-1).values.gather(-1, ks - 1)
        logits[rows] = part.masked_fill_(part < floor, -torch.inf)


def _exclude_by_min_p(scores: Tensor, logits: Tensor, min_p: Tensor) -> None:
    """Put -inf in place of tokens less likely than min-p times the likeliest (Nguyen et al. 2024)."""
    rows = _where(min_p > 0)
    if len(rows):
        part = logits[rows]
        floor = part.amax(-1, keepdim=True) + min_p[rows, None].log()
        scores[rows] = scores[rows].masked_fill_(part < floor, -torch.inf)


def _draw_by_top_p(scores: Tensor, logits: Tensor, top_p: Tensor) -> Tensor:
    """Return each row's best score within its nucleus, the fewest tokens that reach top-p (Holtzman et al. 2020).

    Nothing is sorted. A token is in the nucleus if those more likely than it have less than top-p together; where the
    best is not, neither is any less likely one, and the best of the others is tried. Each try about halves what is
    left, as in quickselect.
    """
    chosen = scores.argmax(-1)
    rows = _where(top_p < 1)
    if not len(rows):
        return chosen
    limits, scores, probabilities = top_p[rows, None], scores[rows], logits[rows].softmax(-1)
    while True:
        best = scores.argmax(-1, keepdim=True)
        chosen[rows] = best[:, 0]
        own = probabilities.gather(-1, best)
        above = (probabilities * (probabilities > own)).sum(-1, keepdim=True)
        outside = ((above >= limits) & (above > 0))[:, 0]
        if not bool(outside.any()):
            return chosen
        rows, limits, own = rows[outside], limits[outside], own[outside]
        scores, probabilities = scores[outside], probabilities[outside]
        scores.masked_fill_(probabilities <= own, -torch.inf)


def report_logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> Logprobs:
    """Return each row's log-probability of its token, with as many of the likeliest beside it as ``counts`` says.

    ``logits`` (rows, vocab) are what the model itself thought, before bias, penalties, temperature and filters.
    """
    own, top, top_ids = ops.log_probabilities(logits, tokens, max(counts))
    return Logprobs(own, top, top_ids, tuple(counts))


def noise(position: Tensor, reply: Tensor, seed: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise (rows, vocab) for rows of these three, (rows,) each.

    One Philox call gives four tokens their noise: the counter is (token // 4, position, reply index, 0), the key the
    seed.
    """
    position, reply, seed = (some.long()[:, None] for some in (position, reply, seed))
    key_low, key_high = seed & LOW_32, seed >> 32 & LOW_32
    quads = torch.arange(-(-vocab_size // 4), device=seed.device)[None]
    words = philox((quads, position, reply, torch.zeros_like(reply)), (key_low, key_high), PHILOX_ROUNDS)
    bits = torch.stack(words, dim=-1).view(len(seed), -1)[:, :vocab_size]
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


def sampling_tensors_of(steps: Sequence[SequenceStep], device: torch.device) -> SamplingTensors:
    """Return what each step asks, in two copies to the device."""
    asked = [step.sampling for step in steps]
    shares = upload(
        [[s.temperature for s in asked], [s.top_p for s in asked], [s.min_p for s in asked]], device, torch.float32
    )
    seeds = [signed(s.seed) for s in asked]
    positions = [step.start + len(step.token_ids) for step in steps]
    replies, top_ks = [step.reply_index for step in steps], [s.top_k for s in asked]
    numbers = upload([seeds, positions, replies, top_ks], device, torch.long)
    position, reply, top_k = numbers[1:].int()
    return SamplingTensors(shares[0], shares[1], shares[2], top_k, numbers[0], position, reply)


def signed(seed: int) -> int:
    """Return the same 64 bits, with a sign."""
    return (seed + 2**63) % 2**64 - 2**63
