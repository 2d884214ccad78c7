# Every operation of `kernels/reference.py` on the device against its definition in float64 on the CPU, written here a
# second time, over fresh awkward shapes. Inputs are rounded to the precision first: both start from equal numbers.

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_backend.kernels import reference, reference_attention
from gpu_backend.kernels.layout.grouping import Grouping, by_shape
from gpu_backend.kernels.layout.scoring import Scoring
from tests.gpu.check import Check, Setting, relative_error, require

# ‖out − definition‖ / ‖definition‖: one bfloat16 rounding is 2^-9 at most, and an operation makes a few.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = 12  # a check
ROWS = (1, 2, 3, 17, 100)
HEADS = ((1, 1), (4, 4), (6, 1), (8, 2), (32, 8), (40, 8))  # query heads, key heads
HEAD_DIMS = (8, 16, 24, 64, 80, 128)
BLOCK_SIZES = (1, 4, 16, 32)


def rms_norm(setting: Setting) -> str:
    """Rows of any width, and heads of any number."""

    def error() -> float:
        width = setting.dice.choice((1, 3, 24, 129, 1000, 2560))
        x, weight = (
            setting.randn(setting.dice.choice(ROWS), setting.dice.choice((1, 3, 8)), width),
            setting.randn(width),
        )
        wide = x.cpu().double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.cpu().double()
        return relative_error(reference.rms_norm(x, weight, 1e-5), expected)

    return _worst(setting, error)


def silu_and_mul(setting: Setting) -> str:
    """Gate and up of any width; the input stays as it was."""

    def error() -> float:
        gate_up = setting.randn(setting.dice.choice(ROWS), 2 * setting.dice.choice((1, 3, 96, 129, 3072)))
        before = gate_up.clone()
        gate, up = gate_up.cpu().double().chunk(2, -1)
        worst = relative_error(reference.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)
        require(torch.equal(before, gate_up), "the input was written over")
        return worst

    return _worst(setting, error)


def apply_rope(setting: Setting) -> str:
    """As a complex product: pair (i, i + turned / 2) of a head, or two neighbours, is one complex number."""

    def error() -> float:
        tokens, dim = setting.dice.choice(ROWS), setting.dice.choice(HEAD_DIMS)
        x, angles = setting.randn(tokens, setting.dice.choice((1, 3, 10)), dim), setting.randn(tokens, 1, dim // 2) * 9
        cos, sin = angles.cos(), angles.sin()
        count, interleaved = setting.dice.choice((None, dim // 4 * 2, 2)), setting.dice.random() < 0.5
        end = dim if count is None else count
        wide, by = x.cpu().double(), torch.complex(cos.cpu().double(), sin.cpu().double())[..., : end // 2]
        places = torch.arange(end).view(-1, 2) if interleaved else torch.arange(end).view(2, -1).t()
        turned = torch.complex(*wide[..., places].unbind(-1)) * by
        wide[..., places] = torch.view_as_real(turned)
        return relative_error(reference.apply_rope(x, cos, sin, count, interleaved), wide)

    return _worst(setting, error)


def store_kv(setting: Setting) -> str:
    """Exactly the slots that are named are written, bit for bit."""
    dice = setting.dice
    for _ in range(SHAPES):
        blocks, size, (_, heads), dim = dice.randint(1, 9), dice.choice(BLOCK_SIZES), dice.choice(HEADS), 8
        cache = setting.randn(blocks, size, 2, heads, dim)
        slots = dice.sample(range(blocks * size), dice.randint(1, blocks * size))
        key, value = setting.randn(len(slots), heads, dim), setting.randn(len(slots), heads, dim)
        expected = cache.cpu()
        for row, slot in enumerate(slots):
            expected[slot // size, slot % size, 0] = key[row].cpu()
            expected[slot // size, slot % size, 1] = value[row].cpu()
        reference.store_kv(key, value, cache, torch.tensor(slots, device=setting.device))
        require(torch.equal(cache.cpu(), expected), f"{blocks} blocks of {size}: the cache differs")
    return f"{SHAPES} shapes, equal bit for bit"


def paged_attention(setting: Setting) -> str:
    """Decodes and chunks side by side, blocks scattered, other sequences' leftovers around them."""
    # One head of eight numbers beside a sink may nearly cancel out, and was rounded as larger ones are.
    return _worst(setting, lambda: _attention_error(setting), times=4)


def _attention_error(setting: Setting) -> float:
    dice = setting.dice
    (num_heads, kv_heads), dim, size = dice.choice(HEADS), dice.choice(HEAD_DIMS), dice.choice(BLOCK_SIZES)
    lens = [(dice.choice((1, 1, dice.randint(2, 40))), dice.choice((0, 5, dice.randint(0, 300)))) for _ in range(9)]
    lens = lens[: dice.randint(1, 9)]
    lens = [lens[i] for i in by_shape([n for n, _ in lens], [n + past for n, past in lens])]
    tables = scattered_tables([n + past for n, past in lens], size, dice)
    num_blocks = sum(map(len, tables))
    cache = setting.randn(num_blocks + 1, size, 2, kv_heads, dim)
    cache[num_blocks] = 0  # the null block
    queries = [setting.randn(n, num_heads, dim) for n, _ in lens]

    expected, softcap = [], dice.choice((0.0, 0.0, 2.5, 50.0))
    sinks = setting.randn(num_heads).float() * 3 if dice.random() < 0.5 else None
    for query, table, (_, past) in zip(queries, tables, lens, strict=True):
        kv = cache[table].flatten(0, 1)[: past + len(query)].cpu().double()
        expected.append(attend(query.cpu().double(), kv[:, 0], kv[:, 1], past, softcap=softcap, sinks=sinks))
    positions = torch.tensor([past + i for n, past in lens for i in range(n)], device=setting.device)
    grouping = Grouping(size, num_blocks, 512, setting.device, setting.dtype)
    groups = grouping.groups([n for n, _ in lens], positions, tables)
    query = torch.cat(queries)
    _poison(query)
    out = reference_attention.paged_attention(query, cache, groups, Scoring(dim**-0.5, 0, softcap, sinks))
    return relative_error(out, torch.cat(expected))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Attention as it is defined: one sequence, its queries at ``past`` and after, in float64.

    ``ends``: before which position the keys end that each sees, if not behind its own.
    """
    shared = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    places = torch.arange(len(keys), device=query.device)
    position = past + torch.arange(len(query), device=query.device)[:, None]
    visible = places <= position if ends is None else places < ends.to(query.device)[:, None]
    if window > 0:
        visible &= places > position - window
    elif window:  # chunks
        visible &= places // -window == position // -window
    shares = scores.masked_fill(~visible, -torch.inf).exp()
    own = 0.0 if sinks is None else sinks.to(shares).exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", shares / (shares.sum(-1, keepdim=True) + own), values)


def scattered_tables(lengths: list[int], block_size: int, dice: random.Random) -> list[list[int]]:
    counts = [-(-length // block_size) for length in lengths]
    pool = list(range(sum(counts)))
    dice.shuffle(pool)
    return [[pool.pop() for _ in range(count)] for count in counts]


def _poison(like: Tensor) -> None:
    """Leave what is not a number in memory that torch will hand out next, so that an unwritten output shows."""
    torch.full_like(like, torch.nan)


def _worst(setting: Setting, error: Callable[[], float], times: int = 1) -> str:
    worst, most = max(error() for _ in range(SHAPES)), times * TOLERANCE[setting.dtype]
    figures = f"{SHAPES} shapes, worst relative error {worst:.1e}"
    require(worst <= most, f"{figures}, above {most:.0e}")
    return figures


CHECKS = (
    Check("rms_norm equals its definition", rms_norm),
    Check("silu_and_mul equals its definition", silu_and_mul),
    Check("apply_rope equals its definition", apply_rope),
    Check("store_kv writes its slots and no others", store_kv),
    Check("paged_attention equals its definition", paged_attention),
)
