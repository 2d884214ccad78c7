# The sampler on the device: the same bits, the same noise and the same tokens as on the CPU, for equal logits.

from __future__ import annotations

import torch
from torch import Tensor

from gpu_backend.sampling import sampler
from gpu_backend.sampling.sampler import PHILOX_ROUNDS, philox, sample, sampling_tensors_of
from gpu_backend.step.plan import SequenceStep
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, require

CPU = torch.device("cpu")
NOISE_TOLERANCE = 2e-6  # the logarithms of two devices differ in their last bits; noise is a few units large
TIE = 1e-4  # scores closer than this may fall either way
# temperature, top-p, top-k, min-p
WISHES = ((0.0, 1.0, 0, 0.0), (0.6, 1.0, 0, 0.0), (1.0, 0.9, 0, 0.0), (0.8, 0.95, 40, 0.0), (1.2, 1.0, 0, 0.05),
          (1.0, 0.5, 7, 0.02), (2.0, 1.0, 1, 0.0))  # fmt: skip


def gumbel_noise(steps: list[SequenceStep], vocab_size: int, device: torch.device) -> Tensor:
    """Return the noise (steps, vocab) of each step's next position."""
    asked = sampling_tensors_of(steps, device)
    return sampler.noise(asked.position, asked.reply, asked.seed, vocab_size)


def random_bits(setting: Setting) -> str:
    """Philox is whole numbers: every bit is the same on every device, wrapped products included."""
    words = [torch.tensor([setting.dice.getrandbits(32) for _ in range(4096)]) for _ in range(6)]
    expected = [_philox_by_definition(*(int(word[i]) for word in words)) for i in range(4096)]
    moved = [word.to(setting.device) for word in words]
    out = philox((moved[0], moved[1], moved[2], moved[3]), (moved[4], moved[5]), PHILOX_ROUNDS)
    require(torch.stack(out, 1).tolist() == [list(row) for row in expected], "the bits differ from Python's own")
    return "4,096 counters, equal bit for bit"


def noise(setting: Setting) -> str:
    """Gumbel noise of any seed, reply and position, compared with the definition in float64 on the CPU."""
    vocab = setting.dice.choice((101, 32_000, 151_936))
    steps = [step_of(setting, WISHES[1]) for _ in range(4)]
    out = gumbel_noise(steps, vocab, setting.device).cpu()
    worst = (out.double() - _noise_by_definition(steps, vocab)).abs().max().item()
    figures = f"vocabulary {vocab:,}, largest difference {worst:.1e}"
    require(worst <= NOISE_TOLERANCE * 10, figures)
    require(
        (out - gumbel_noise(steps, vocab, CPU)).abs().max().item() <= NOISE_TOLERANCE * 10, "the CPU's noise differs"
    )
    return figures


def draws(setting: Setting) -> str:
    """Whatever the filters, the token is the one that sorting, a running sum and a mask choose on the CPU."""
    equal = close = 0
    times = 2 if setting.device.type == "cpu" else 8
    for _ in range(times):
        vocab = setting.dice.choice((50, 1001, 32_000))
        logits = setting.randn(len(WISHES), vocab).float() * setting.dice.choice((0.5, 2.0, 6.0))
        steps = [step_of(setting, wish) for wish in WISHES]
        tokens = sample(logits.clone(), steps).token_ids.tolist()
        random_part = gumbel_noise(steps, vocab, CPU).double()
        for row, (token, step) in enumerate(zip(tokens, steps, strict=True)):
            scores = _scores_by_definition(logits[row].cpu().double(), step.sampling, random_part[row])
            equal += int(token == scores.argmax().item())
            close += int(token != scores.argmax().item() and (scores.max() - scores[token]).item() < TIE)
    total = times * len(WISHES)
    require(equal + close == total, f"{total - equal - close} of {total} tokens differ")
    return f"{equal} of {total} tokens equal, {close} within a tie of {TIE:.0e}"


def step_of(setting: Setting, wish: tuple[float, float, int, float]) -> SequenceStep:
    """Return a step that asks for these; see ``WISHES``."""
    temperature, top_p, top_k, min_p = wish
    sampling = SamplingParams(1, temperature, top_p, top_k, min_p, seed=setting.dice.getrandbits(63))
    return SequenceStep(1, (7,), setting.dice.randrange(9000), (0,), True, sampling, setting.dice.randrange(4))


def _scores_by_definition(logits: Tensor, sampling: SamplingParams, random_part: Tensor) -> Tensor:
    """Return each token's score, -inf for what the filters exclude."""
    if sampling.temperature == 0:
        return logits
    scaled = logits / sampling.temperature
    values, order = scaled.sort(descending=True)
    values, order = values[: sampling.top_k or None], order[: sampling.top_k or None]
    probabilities = values.softmax(-1)
    kept = (probabilities.cumsum(-1) - probabilities < sampling.top_p) & (
        probabilities >= sampling.min_p * probabilities[0]
    )
    kept[0] = True
    scores = torch.full_like(scaled, -torch.inf)
    scores[order[kept]] = (scaled + random_part)[order[kept]]
    return scores


def _noise_by_definition(steps: list[SequenceStep], vocab: int) -> Tensor:
    rows = []
    for step in steps:
        seed, position = step.sampling.seed, step.start + len(step.token_ids)
        counters = [torch.arange(-(-vocab // 4)), *(torch.tensor(v) for v in (position, step.reply_index, 0))]
        key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
        words = philox((counters[0], counters[1], counters[2], counters[3]), key, PHILOX_ROUNDS)
        rows.append(torch.stack(torch.broadcast_tensors(*words), -1).flatten()[:vocab])
    # As float32 holds the bits: the noise is defined on those 24.
    uniform = ((torch.stack(rows).float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    return -(-(-uniform).log1p()).log()


def _philox_by_definition(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Philox-4x32 in Python's own whole numbers (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    for _ in range(PHILOX_ROUNDS):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & low, first >> 32 ^ c3 ^ k1, first & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return c0, c1, c2, c3


CHECKS = (
    Check("random bits equal Philox's definition", random_bits, (torch.float32,)),
    Check("noise equals its definition and the CPU's", noise, (torch.float32,)),
    Check("draws are the best score that the filters leave", draws, (torch.float32,)),
)
