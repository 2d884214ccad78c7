# Attention over latent vectors in Triton against plain torch and its definition in float64: decodes, drafts and chunks,
# contexts in any number of parts, what is stored, and an engine whose prompts kernels score.

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpu_backend.kernels import reference
from gpu_backend.kernels.layout import paged
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.kernels.triton_ops import latent_attention
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, relative_error, require
from tests.gpu.generation import ModelUnderTest
from tests.gpu.kernels import by_kernels, dtype_of, prompt_scores, rows_one_by_one, worst_of
from tests.gpu.operations import scattered_tables
from tests.support.tiny_model import TinyModel

SIZES = ((4, 32, 8), (20, 40, 24), (3, 64, 16))  # heads, and numbers of a vector and of the key that turns
REAL = ((128, 512, 64), (16, 512, 64))


def attention(setting: Setting) -> str:
    """Decodes, drafts and chunks side by side, blocks scattered, in one part and in several."""
    return worst_of(setting, lambda: _attention_error(setting))


def attention_stays_the_same(setting: Setting) -> str:
    """In layouts that do not follow the batch, a query's numbers are the same to the bit alone and in company."""
    dtype, dice, heads, rank, dim, size = dtype_of(setting), setting.dice, 4, 32, 16, 16
    contexts = [dice.randint(130, 200) for _ in range(2)]
    tables = scattered_tables(contexts, size, dice)
    cache = setting.randn(sum(map(len, tables)), size, 1, 1, rank + dim).to(dtype)
    query, turned = (setting.randn(2, heads, some).to(dtype) for some in (rank, dim))
    layouts = paged.PagedLayouts(size, heads, 1, setting.device, 132, split_tokens=64)

    def attended(which: list[int]) -> Tensor:
        where = torch.tensor([contexts[index] - 1 for index in which], device=setting.device)
        (layout,) = layouts.groups([1] * len(which), where, [tables[index] for index in which])
        return latent_attention.latent_attention(query[which], turned[which], cache, layout, Scoring(dim**-0.5))

    with rows_one_by_one(setting):
        together = attended([0, 1])
        for index in (0, 1):
            require(torch.equal(attended([index])[0], together[index]), "a decode differs in company")
    return f"contexts of {contexts}, alone and together, equal bit for bit"


def norm_rope_store_latent(setting: Setting) -> str:
    """The ends of queries as plain torch has them; exactly the named slots are written."""

    def error() -> float:
        dtype, dice = dtype_of(setting), setting.dice
        heads, rank, dim = dice.choice(SIZES)
        tokens, own, size = dice.choice((1, 5, 17)), dice.choice((6, 16)), dice.choice((4, 16))
        rows = setting.randn(tokens, 8 + rank + dim).to(dtype)
        query, norm = setting.randn(tokens, heads, own + dim).to(dtype), setting.randn(rank).to(dtype)
        angles = setting.randn(tokens, 1, dim // 2)
        caches = [setting.randn(9, size, 1, 1, rank + dim).to(dtype)]
        caches.append(caches[0].clone())
        slots = torch.tensor(dice.sample(range(9 * size), tokens), device=setting.device)
        common = norm, angles.cos().to(dtype), angles.sin().to(dtype)
        interleaved = dice.random() < 0.5
        ends = [
            module.norm_rope_store_latent(query, rows[:, 8:], *common, cache, slots, 1e-6, interleaved)
            for module, cache in zip((latent_attention, reference), caches, strict=True)
        ]
        return max(relative_error(ends[0], ends[1]), relative_error(caches[0], caches[1]))

    return worst_of(setting, error)


def engine_of_latent_vectors(setting: Setting) -> str:
    """Kernels score a prompt as plain torch does, in chunks, with experts in groups, and draw the same replies."""
    dice = setting.dice
    command = Generate("x", tuple(dice.randrange(256) for _ in range(11)), SamplingParams(1, 0.0, prompt_logprobs=0))
    extra = {"n_group": 4, "topk_group": 2, "qk_rope_head_dim": 16, "v_head_dim": 16}
    model = TinyModel("DeepseekV3ForCausalLM", num_experts=8, seed=2 * dice.getrandbits(30), extra=extra)
    with tempfile.TemporaryDirectory() as folder:
        plain = ModelUnderTest(replace(setting, device=torch.device("cpu")), Path(folder), model)
        tested = ModelUnderTest(setting, Path(folder), model)
        expected = prompt_scores(plain.engine(), command)
        with by_kernels(setting):
            errors = [
                relative_error(prompt_scores(tested.engine(max_num_batched_tokens=9, **more), command), expected)
                for more in ({}, {"batch_invariant": True})
            ]
    require(max(errors) <= 1e-4, f"relative errors {errors}")
    return f"worst relative error {max(errors):.0e}"


def _attention_error(setting: Setting) -> float:
    dtype, dice, on_card = dtype_of(setting), setting.dice, setting.device.type == "cuda"
    heads, rank, dim = dice.choice(SIZES + REAL if on_card else SIZES)
    size, most = dice.choice((4, 16)), 300 if on_card else 9
    lens = [
        (dice.choice((1, 1, dice.randint(2, most))), dice.choice((0, 5, 90, dice.randint(0, 200)))) for _ in range(4)
    ]
    lens = sorted(lens)
    tables = scattered_tables([n + past for n, past in lens], size, dice)
    cache = setting.randn(sum(map(len, tables)), size, 1, 1, rank + dim).to(dtype)
    tokens = sum(n for n, _ in lens)
    # As a product by heads leaves them: the heads come before the tokens in memory.
    query, turned = (
        setting.randn(heads, tokens, rank).to(dtype).transpose(0, 1),
        setting.randn(tokens, heads, dim).to(dtype),
    )
    positions = torch.tensor([past + i for n, past in lens for i in range(n)], device=setting.device)
    layouts = paged.PagedLayouts(size, heads, 1, setting.device, 132, split_tokens=dice.choice((0, 64)))
    out = torch.full((tokens, heads, rank), torch.nan, dtype=dtype, device=setting.device)
    for layout in layouts.groups([n for n, _ in lens], positions, tables):
        splits = layout.num_splits if layout.split_tokens else dice.choice((1, 2, 8))
        rows = layout.rows
        latent_attention.latent_attention(
            query[rows], turned[rows], cache, replace(layout, num_splits=splits), Scoring(0.2), out[rows]
        )
    expected, row = [], 0
    for (n, past), table in zip(lens, tables, strict=True):
        keys = cache[table].flatten(0, 3)[: past + n].double()
        both = torch.cat((query[row : row + n], turned[row : row + n]), 2).double()
        scores = torch.einsum("qhd,kd->hqk", both, keys) * 0.2
        hidden = torch.arange(past + n, device=keys.device) > past + torch.arange(n, device=keys.device)[:, None]
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqk,kd->qhd", shares, keys[:, :rank]))
        row += n
    return relative_error(out, torch.cat(expected))


CHECKS = (
    Check("kernel: attention over latent vectors", attention, long=(torch.bfloat16,)),
    Check(
        "kernel: latent vectors whatever the batch", attention_stays_the_same, (torch.bfloat16,), long=(torch.bfloat16,)
    ),
    Check("kernel: norm, rope and store of latent vectors", norm_rope_store_latent),
    Check("kernel: an engine of latent vectors", engine_of_latent_vectors, (torch.float32,), long=(torch.float32,)),
)
