# A mixture of experts in Triton against plain torch and its definition in float64, for every kind of routing: even, all
# to one expert, none to some, one pair alone, and more pairs than experts.

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_backend.kernels import reference_experts
from gpu_backend.kernels.layout.mxfp4 import unpack_mxfp4
from gpu_backend.kernels.triton_ops import experts
from gpu_backend.models.quantization import quantize
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, relative_error, require
from tests.gpu.generation import ModelUnderTest
from tests.gpu.kernels import by_kernels, dtype_of, prompt_scores, rows_one_by_one, worst_of
from tests.support.tiny_model import TinyModel

ROUTINGS = ("even", "one", "some", "skewed")


def choices_of_experts(setting: Setting) -> str:
    """The likeliest experts of each token, in their order, also of some groups, and shares as plain torch has them."""
    dice, on_card = setting.dice, setting.device.type == "cuda"

    def error() -> float:
        number, tokens = dice.choice((3, 8, 60, 128)), dice.choice((1, 7, 300) if on_card else (1, 7))
        count, normalised = dice.randint(1, min(9, number)), dice.random() < 0.5
        ranks = torch.stack([torch.randperm(number, generator=setting.generator()) for _ in range(tokens)])
        logits = (ranks / 8).to(dtype_of(setting)).to(setting.device)  # no two alike
        bias, factor = setting.randn(number).float() / 99 if dice.random() < 0.4 else None, dice.choice((1.0, 2.5))
        groups = dice.choice([some for some in (1, 2, 4, 5) if number % some == 0 and number // some > 1])
        size = number // groups
        in_groups = groups, dice.randint(-(-count // size), groups)
        shares, chosen = experts.choose_experts(logits, count, normalised, bias, factor, *in_groups)
        expected, likeliest = reference_experts.choose_experts(logits, count, normalised, bias, factor, *in_groups)
        require(torch.equal(chosen, likeliest), "other experts are chosen")
        return relative_error(shares, expected)

    return worst_of(setting, error, 3)


def mixtures_of_experts(setting: Setting) -> str:
    """Any number of tokens, wherever they are routed, with plain weights and of eight bits, also in groups; of one
    rank, or of two that have some of the experts each."""
    kinds = ROUTINGS if setting.device.type == "cuda" else setting.dice.sample(ROUTINGS, 2)
    return worst_of(setting, lambda: max(_mixture_error(setting, kind) for kind in kinds))


def mixtures_stay_the_same(setting: Setting) -> str:
    """Where sums must not follow the batch, a token's are the same to the bit alone and in company."""
    x, gate_up, down, _ = _inputs(setting, tokens=37, number=5)
    shares, chosen = _routing(setting, "skewed", 37, 5, 3)
    with rows_one_by_one(setting):
        together = experts.mix_experts(x, gate_up, down, shares, chosen, batch_invariant=True)
        for token in (0, 19, 36):
            own = (some[:, token : token + 1].contiguous() for some in (shares, chosen))
            alone = experts.mix_experts(x[token : token + 1], gate_up, down, *own, batch_invariant=True)
            require(torch.equal(alone[0], together[token]), f"token {token} differs in company")
    return "37 tokens, alone and together, equal bit for bit"


def mixtures_of_few_bits(setting: Setting) -> str:
    """Experts of int4 and int8 in groups of inputs, from zeros and from the middle, say what plain torch says."""

    def error() -> float:
        dice, dtype = setting.dice, dtype_of(setting)
        number, tokens, count, hidden, inner = 5, dice.choice((1, 7, 37)), dice.randint(1, 4), 128, 64
        shares, chosen = _routing(setting, dice.choice(ROUTINGS), tokens, number, count)
        bits, group, generator = dice.choice((4, 8)), dice.choice((32, 64)), setting.generator()
        kind = torch.uint8 if bits == 4 else torch.int8
        kept, scales, zeros = [], [], []
        for out, width in ((2 * inner, hidden), (hidden, inner)):
            low = 0 if bits == 4 else -128
            size = width * bits // 8
            kept.append(torch.randint(low, low + 256, (number, out, size), generator=generator).to(kind))
            scales.append(setting.randn(number, out, width // group).float().abs() / 2**bits)
            from_ = torch.randint(
                0 if bits == 4 else -128, 17 if bits == 4 else 129, scales[-1].shape, generator=generator
            )
            zeros.append(from_.to(torch.uint8 if bits == 4 else torch.int16))
        weights = [weight.to(setting.device) for weight in kept]
        from_zeros = (zeros[0].to(setting.device), zeros[1].to(setting.device)) if dice.random() < 0.6 else None
        x = setting.randn(tokens, hidden).to(dtype)
        found, right = (
            module.mix_experts(x, *weights, shares, chosen, (scales[0], scales[1]), zeros=from_zeros)
            for module in (experts, reference_experts)
        )
        return relative_error(found, right)

    return worst_of(setting, error)


def engine_of_experts(setting: Setting) -> str:
    """Kernels score a prompt as plain torch does, with experts whole and of float8, a shared one, and an MLP."""
    dice = setting.dice
    command = Generate("x", tuple(dice.randrange(256) for _ in range(11)), SamplingParams(1, 0.0, prompt_logprobs=0))
    methods = (None, "fp8") if setting.device.type == "cuda" else (None,)  # the interpreter rounds to float8 wrongly
    errors = []
    for method in methods:
        settings = {"quantization": method} if method else {}
        with tempfile.TemporaryDirectory() as folder:
            model = TinyModel(
                "Qwen2MoeForCausalLM", intermediate_size=128, num_experts=12, seed=dice.getrandbits(31),
                extra={"mlp_only_layers": [0]},
            )  # fmt: skip
            plain = ModelUnderTest(replace(setting, device=torch.device("cpu")), Path(folder), model)
            tested = ModelUnderTest(setting, Path(folder), model)
            expected = prompt_scores(plain.engine(**settings), command)
            with by_kernels(setting):
                errors.append(relative_error(prompt_scores(tested.engine(**settings), command), expected))
        require(errors[-1] <= (1e-2 if method else 1e-4), f"{method}: relative error {errors[-1]:.1e}")
    return f"worst relative error {max(errors):.0e}"


def mixtures_of_gpt_oss(setting: Setting) -> str:
    """Clamped gates, biases and weights of mxfp4 say what plain torch says of the same numbers unpacked."""

    def error() -> float:
        dice, dtype = setting.dice, dtype_of(setting)
        number, tokens, count, hidden, inner = 5, dice.choice((1, 7, 37)), dice.randint(1, 4), 96, 64
        shares, chosen = _routing(setting, dice.choice(ROUTINGS), tokens, number, count)
        sizes = (number, 2 * inner, hidden), (number, hidden, inner)
        bits = [(setting.randn(a, b, c // 2) * 97).int().to(torch.uint8) for a, b, c in sizes]
        powers = [(setting.randn(a, b, c // 32) + 124).to(torch.uint8) for a, b, c in sizes]
        whole = [
            unpack_mxfp4(some.flatten(0, 1), by.flatten(0, 1), dtype) for some, by in zip(bits, powers, strict=True)
        ]
        gate_up, down = (some.view(size) for some, size in zip(whole, sizes, strict=True))
        biases = setting.randn(number, 2 * inner).to(dtype), setting.randn(number, hidden).to(dtype)
        x, clamp = setting.randn(tokens, hidden).to(dtype), (1.702, dice.choice((0.5, 7.0)))
        expected = reference_experts.mix_experts(x, gate_up, down, shares, chosen, None, biases, clamp)
        unpacked = experts.mix_experts(x, gate_up, down, shares, chosen, None, biases, clamp)
        packed = experts.mix_experts(x, bits[0], bits[1], shares, chosen, (powers[0], powers[1]), biases, clamp)
        return max(relative_error(unpacked, expected), relative_error(packed, expected))

    return worst_of(setting, error, 3)


def _inputs(setting: Setting, tokens: int, number: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    dtype, dice = dtype_of(setting), setting.dice
    in_groups = tokens != 37 and dice.random() < 0.2
    hidden, inner = (96, 48) if in_groups else (dice.choice((24, 64, 200)), dice.choice((16, 40, 136)))
    x = setting.randn(tokens, hidden).to(dtype)
    gate_up, down = (
        (setting.randn(number, 2 * inner, hidden) / hidden**0.5).to(dtype),
        setting.randn(number, hidden, inner),
    )
    down = (down / inner**0.5).to(dtype)
    if tokens == 37 or (dice.random() < 0.7 and not in_groups):
        return x, gate_up, down, None
    kept = [[quantize(one, None, "int8") for one in stack] for stack in (gate_up, down)]
    (gate_up, of_inner), (down, of_out) = (
        (torch.stack([one.weight for one in some]), torch.stack([one.scales for one in some])) for some in kept
    )
    if in_groups:
        groups = [weight.shape[2] // 16 for weight in (gate_up, down)]
        of_inner, of_out = (
            scale[:, :, None] * (1 + setting.randn(*scale.shape, count).float().abs())
            for scale, count in zip((of_inner, of_out), groups, strict=True)
        )
    return x, gate_up, down, (of_inner, of_out)


def _routing(setting: Setting, kind: str, tokens: int, number: int, count: int) -> tuple[Tensor, Tensor]:
    """Return shares and experts (count, tokens); a token may have one expert several times, which the kernel allows."""
    shares = setting.randn(count, tokens).float().abs() + 0.1
    dice = setting.dice
    allowed = {"one": [dice.randrange(number)], "some": range(0, number, 2), "skewed": [0] * 9 + [*range(number)]}
    drawn = [dice.choice(allowed.get(kind, range(number))) for _ in range(count * tokens)]
    return shares, torch.tensor(drawn, device=setting.device).int().view(count, tokens)


def _mixture_error(setting: Setting, kind: str) -> float:
    dice, on_card = setting.dice, setting.device.type == "cuda"
    number, count = dice.choice((2, 8, 33)), dice.randint(1, 4)
    tokens = dice.choice((1, 5, 37, 700, 2500) if on_card else (1, 5, 18))
    x, gate_up, down, scales = _inputs(setting, tokens, number)
    shares, chosen = _routing(setting, kind, tokens, number, count)
    border = dice.choice((0, number // 2))  # 0: one rank has all
    out = torch.zeros_like(x, dtype=torch.double)
    for own in (slice(0, border), slice(border, number)):
        if own.start < own.stop:
            some = None if scales is None else (scales[0][own], scales[1][own])
            first = own.start if border else None
            out += experts.mix_experts(x, gate_up[own], down[own], shares, chosen, some, first=first)

    wide = [weight.double() for weight in (gate_up, down)]
    if scales is not None:
        wide = [
            weight * scale.view(*scale.shape[:2], -1).repeat_interleave(weight.shape[2] // scale[0, 0].numel(), 2)
            for weight, scale in zip(wide, scales, strict=True)
        ]
    inner = torch.einsum("th,eoh->teo", x.double(), wide[0])
    gate, up = inner.chunk(2, -1)
    each = torch.einsum("tei,ehi->teh", gate / (1 + (-gate).exp()) * up, wide[1])
    worth = torch.zeros(tokens, number, dtype=torch.double, device=x.device)
    worth.scatter_add_(1, chosen.t().long(), shares.t().double())
    return relative_error(out, torch.einsum("te,teh->th", worth, each))


CHECKS = (
    Check("kernel: choices of experts", choices_of_experts, long=(torch.float32,)),
    Check("kernel: mixtures of experts", mixtures_of_experts, long=(torch.bfloat16,)),
    Check("kernel: mixtures of few bits", mixtures_of_few_bits, long=(torch.bfloat16,)),
    Check("kernel: mixtures of GPT-OSS", mixtures_of_gpt_oss, long=(torch.bfloat16,)),
    Check("kernel: mixtures whatever the batch", mixtures_stay_the_same, (torch.bfloat16,), long=(torch.bfloat16,)),
    Check("kernel: an engine of experts", engine_of_experts, (torch.float32,), long=(torch.float32,)),
)
