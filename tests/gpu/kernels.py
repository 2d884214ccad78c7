# The Triton kernels against definitions in float64 or plain torch, over fresh inputs. On a GPU they are compiled, and
# the definitions of attention, which take a processor minutes, are computed there; on the CPU they are interpreted:
# small shapes, and float16 in the place of bfloat16, which cannot be multiplied there.

from __future__ import annotations

import math
import operator
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.kernels import ops, reference, reference_decoding
from gpu_backend.kernels.layout import paged
from gpu_backend.kernels.layout.decode_rows import FROM_STATE, DecodeRows, StateTensors
from gpu_backend.kernels.layout.quantized_kv import FP8, KvScales, load_kv, scales_from
from gpu_backend.kernels.layout.sampling_tensors import IN_PROMPT, NO_PENALTIES
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.kernels.triton_ops import decoding, fused, logprobs, penalties, quantized_linear, sampling, small_batch
from gpu_backend.kernels.triton_ops.paged_attention import paged_attention
from gpu_backend.models.quantization import quantize
from gpu_backend.sampling.sampler import sample, sampling_tensors_of
from gpu_backend.step.messages import Generate
from gpu_backend.step.sampling_params import SamplingParams
from tests.gpu.check import Check, Setting, relative_error, require
from tests.gpu.generation import ModelUnderTest
from tests.gpu.operations import attend, scattered_tables
from tests.gpu.sampling import WISHES, step_of
from tests.support.engine import answer_all
from tests.support.tiny_model import TinyModel

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = ((4, 4), (6, 1), (8, 2), (10, 2), (32, 8), (40, 8))  # query heads, key heads
FEW_HEADS = ((2, 2), (3, 1), (4, 2))
HEAD_DIMS = (64, 80, 96, 128, 256)
FP8_NORMAL = 2.0**-6  # the smallest normal number of e4m3: below it numbers are an eighth of it apart


def attention_of_decodes(setting: Setting) -> str:
    """One query each, short and long contexts side by side, cut into any number of parts."""
    return worst_of(setting, lambda: _attention_error(setting, queries=(1, 1), window=0))


def attention_of_drafts(setting: Setting) -> str:
    """A few queries each, as when drafts are verified, over windows, in chunks and with soft caps too."""
    return worst_of(
        setting, lambda: _attention_error(setting, queries=(1, 6), window=setting.dice.choice((0, 9, 33, -20)))
    )


def attention_of_chunks(setting: Setting) -> str:
    """Chunks of prompts of any length behind what is in the cache, over windows, in chunks and with soft caps too."""
    on_card = setting.device.type == "cuda"
    most = 700 if on_card else 40 if setting.dtype == torch.bfloat16 else 9
    return worst_of(
        setting, lambda: _attention_error(setting, queries=(1, most), window=setting.dice.choice((0, 0, 50, -50)))
    )


def attention_of_pictures(setting: Setting) -> str:
    """Chunks in which some neighbours look at each other, over windows too."""
    most = 300 if setting.device.type == "cuda" else 40
    return worst_of(
        setting,
        lambda: _attention_error(
            setting, queries=(most // 2, most), window=setting.dice.choice((0, 0, 50)), looks_ahead=True
        ),
    )


def attention_over_float8(setting: Setting) -> str:
    """Keys and values of float8 with a scale for each head, against the numbers that were stored."""
    return worst_of(setting, lambda: _attention_error(setting, queries=(1, 3), window=0, float8=True))


def attention_stays_the_same(setting: Setting) -> str:
    """In layouts that do not follow the batch, a query's numbers are the same to the bit alone and in company, as a
    decode and as part of a chunk, wherever the chunk begins."""
    dtype, dice = dtype_of(setting), setting.dice
    heads, kv_heads, dim, size, chunk = 2, 1, 64, 16, 40
    window = dice.choice((0, 70))
    contexts = [dice.randint(130, 200) for _ in range(2)]
    tables = scattered_tables(contexts, size, dice)
    cache = setting.randn(sum(map(len, tables)), size, 2, kv_heads, dim).to(dtype)
    queries = [setting.randn(context, heads, dim).to(dtype) for context in contexts]
    layouts = paged.PagedLayouts(size, heads, kv_heads, setting.device, 132, split_tokens=64)

    def attended(pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """Compute pieces (sequence, first position, number) of growing number, side by side."""
        where = [start + i for _, start, count in pieces for i in range(count)]
        some = torch.cat([queries[index][start : start + count] for index, start, count in pieces])
        cut = [tables[index][: -(-(start + count) // size)] for index, start, count in pieces]
        out = torch.full_like(some, torch.nan)
        for part in layouts.groups([n for *_, n in pieces], torch.tensor(where, device=setting.device), cut):
            paged_attention(some[part.rows], cache, part, Scoring(dim**-0.5, window), None, out[part.rows])
        return list(out.split([count for *_, count in pieces]))

    begin = contexts[1] - chunk
    with rows_one_by_one(setting):
        other, whole = attended([(0, contexts[0] - 1, 1), (1, begin, chunk)])
        require(torch.equal(attended([(0, contexts[0] - 1, 1)])[0], other), "a decode differs in company")
        for first, count in ((chunk - 1, 1), (chunk - 5, 3), (11, chunk - 11)):
            (alone,) = attended([(1, begin + first, count)])
            require(torch.equal(alone, whole[first : first + count]), f"{count} queries from {first} differ in company")
    return f"a decode, and a chunk of {chunk} at context {contexts[1]} in pieces, equal bit for bit"


def end_of_a_large_cache(setting: Setting) -> str:
    """Keys and values that lie behind the first 2³¹ numbers of a cache are stored and found where they belong."""
    dtype, heads, dim, size, tokens = dtype_of(setting), 2, 64, 16, 20
    shape = (size, 2, 1, dim)
    first = 2**31 // math.prod(shape)
    small = torch.zeros((4, *shape), dtype=dtype, device=setting.device)
    large = torch.empty(
        (first + 4, *shape), dtype=dtype, device=setting.device
    )  # the host's has no memory till written
    large[first:] = 0
    qkv = setting.randn(tokens, heads + 2, dim).to(dtype)
    angles = setting.randn(tokens, 1, dim // 2).float()
    table = torch.tensor([[2, 0]], device=setting.device)
    slots = (table[0, :, None] * size + torch.arange(size, device=setting.device)).flatten()[:tokens]
    starts = torch.tensor([0, tokens], device=setting.device).int()
    attended = []
    for cache, begin in ((small, 0), (large, first)):
        query = fused.norm_rope_store(
            qkv, None, angles.cos().to(dtype), angles.sin().to(dtype), cache, slots + begin * size, heads, 1e-6
        )
        where = paged.PagedLayout(slice(0, tokens), (table + begin).int(), starts[1:], starts, tokens, 1)
        attended.append(paged_attention(query, cache, where, Scoring(dim**-0.5)))
    require(bool(attended[0].isfinite().all()), "not all numbers are finite")
    require(torch.equal(*attended), "attention at the end differs from that at the beginning")
    return f"blocks from {first:,} on, equal bit for bit"


@contextmanager
def rows_one_by_one(setting: Setting) -> Iterator[None]:
    """Let the interpreter multiply row by row, as tensor cores do: NumPy's sums depend on where in a tile a row is."""
    if setting.device.type == "cuda":
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def by_rows(_: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = np.ascontiguousarray(b.data, dtype=d.data.dtype)
        product = np.stack([np.matmul(row.astype(d.data.dtype), wide) for row in a.data])
        return TensorHandle(product + d.data, d.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", by_rows):
        yield


def add_rms_norm(setting: Setting) -> str:
    """Rows of any width, with what they are added to and without."""

    def error() -> float:
        dtype = dtype_of(setting)
        width = setting.dice.choice((3, 129, 1000, 4096))
        x, residual = (setting.randn(setting.dice.choice((1, 7)), width).to(dtype) for _ in range(2))
        weight, added = setting.randn(width).to(dtype), setting.dice.random() < 0.7
        residual = residual[: len(x)].expand_as(x).contiguous()
        normed, summed = fused.add_rms_norm(x, residual if added else None, weight, 1e-5)
        wide = (x + residual if added else x).cpu().double()
        require(torch.equal(summed.cpu().double(), wide), "the sum is another than plain torch's")
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.cpu().double()
        return relative_error(normed, expected)

    return worst_of(setting, error)


def norm_in_place(setting: Setting) -> str:
    """A part of each row, and nothing beside it."""

    def error() -> float:
        width, tokens = setting.dice.choice((24, 129, 1000)), setting.dice.choice((1, 5))
        x, weight = setting.randn(tokens, width + 40).to(dtype_of(setting)), setting.randn(width).to(dtype_of(setting))
        wide, before = x[:, 8 : 8 + width].cpu().double(), x.clone()
        fused.rms_norm_(x[:, 8 : 8 + width], weight, 1e-5)
        require(torch.equal(x[:, :8], before[:, :8]), "numbers before were written over")
        require(torch.equal(x[:, 8 + width :], before[:, 8 + width :]), "numbers behind were written over")
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.cpu().double()
        return relative_error(x[:, 8 : 8 + width], expected)

    return worst_of(setting, error)


def gated(setting: Setting) -> str:
    """Gate and up of any width, with SiLU and with GELU."""

    def error() -> float:
        gate_up = setting.randn(setting.dice.choice((1, 5)), 2 * setting.dice.choice((3, 129, 3072))).to(
            dtype_of(setting)
        )
        gate, up = gate_up.cpu().double().chunk(2, -1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
        with_silu = relative_error(fused.silu_and_mul(gate_up), gate / (1 + (-gate).exp()) * up)
        return max(with_silu, relative_error(fused.gelu_and_mul(gate_up), gelu))

    return worst_of(setting, error)


def small_batch_products(setting: Setting) -> str:
    """Products of one to four rows with norm, SiLU or GELU before them, and the sum that goes on, with odd sizes."""
    return worst_of(setting, lambda: _small_batch_error(setting))


def norm_rope_store(setting: Setting) -> str:
    """Queries as plain torch has them; exactly the named slots are written, with its keys and values."""
    return worst_of(setting, lambda: _norm_rope_store_error(setting))


def draws(setting: Setting) -> str:
    """Whatever the filters, the token is the one that the engine's own sampler draws."""
    equal = close = total = 0
    for vocab, wishes in ((setting.dice.choice((50, 1001)), WISHES), (151_936, WISHES)):
        if setting.device.type == "cpu" and vocab > 1001:  # two pieces, one row
            vocab, wishes = 5000, [(0.9, 0.8, 50, 0.01)]
        logits = setting.randn(len(wishes), vocab).float() * setting.dice.choice((0.5, 2.0, 6.0))
        logits[:, setting.dice.randrange(vocab)] = -torch.inf
        steps = [step_of(setting, wish) for wish in wishes]
        expected = sample(logits.clone(), steps).token_ids.tolist()
        poison = torch.where(torch.arange(vocab, device=setting.device) == vocab // 2, torch.nan, logits[:1])
        poison = torch.cat([poison, torch.full_like(poison, torch.nan)])
        asked = sampling_tensors_of(
            [*steps, *(step_of(setting, setting.dice.choice(WISHES)) for _ in poison)], setting.device
        )
        tokens, usable = sampling.draw(torch.cat([logits, poison]), asked)
        require(bool((tokens.ge(0) & tokens.lt(vocab)).all()), "a token is none of the vocabulary")
        for row, (token, right) in enumerate(zip(tokens.tolist()[:-2], expected, strict=True)):
            equal += token == right
            close += token != right and bool((logits[row, token] - logits[row, right]).abs() < 1e-4)
        total += len(steps)
        require(usable.tolist() == [True] * len(steps) + [False] * 2, "other rows are told of than those of no numbers")
    require(equal + close == total, f"{total - equal - close} of {total} tokens differ")
    return f"{equal} of {total} tokens equal, {close} ties"


def rows_of_decodes(setting: Setting) -> str:
    """What a step of decodes computes, and what counts of its draws, as plain torch says it: whole numbers, all equal.

    Places without drafts and with any number, new blocks and none, long tables, places without a sequence at the end.
    """
    dice, shapes = setting.dice, 4 if setting.device.type == "cpu" else 12
    for _ in range(shapes):
        places, width, size = dice.randrange(1, 7), dice.choice((1, 2, 4, 5)), dice.choice((1, 4, 16))
        window = dice.choice((1, 4, 16, 64, 512))
        blocks, known = dice.choice((19, 300)), dice.randrange(1, 6)
        generator = setting.generator()

        def whole(*shape: int, most: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(most, shape, generator=generator)

        table = StateTensors(
            whole(known + 1, most=50), whole(known + 1, most=blocks * size - 2 * width) + width,
            whole(known + 1, blocks, most=10**6).int(), torch.rand(known + 1, 3, generator=generator),
            whole(known + 1, 3, most=2**31), whole(known + 1, window, most=dice.choice((2, 5))).int(),
            whole(known + 1, 5, most=5), 10**6,
        )  # fmt: skip
        inputs = []
        for row in dice.sample(range(known), min(known, places)):
            count, fresh = dice.randint(1, width), dice.random() < 0.5
            start = FROM_STATE if dice.random() < 0.5 else dice.randint(width, blocks * size - width)
            at = (int(table.starts[row]) if start == FROM_STATE else start) // size
            tokens = (dice.choice((FROM_STATE, 1)), *(dice.choice((FROM_STATE, 0, 1)) for _ in range(count - 1)))
            inputs.append(
                [row, start, count, dice.randint(1, count), at if fresh else -1, 77, *(0,) * (width - count), *tokens]
            )
        inputs += [[known, 0, width, 1, -1, 0, *(0,) * width]] * (places - len(inputs))
        drawn, usable = whole(places * width, most=2), whole(places * width, most=2) > 0
        made = []
        for device, by in ((torch.device("cpu"), reference_decoding), (setting.device, decoding)):
            copied: dict[str, Any] = {name: value.clone().to(device) for name, value in tensors_of(table)}
            own = replace(table, **copied)
            rows = DecodeRows.room_for(places + 1, places * width + 3, width, blocks, device).cut(places, width)
            given = torch.tensor(inputs, device=device)
            if window > 1 and width > 1:
                by.propose_drafts(given, own, width)
            by.place_decodes(given, own, rows, size)
            by.accept_draws(given, own, rows, drawn.to(device), usable.to(device))
            for place, length in enumerate(rows.context_lens.tolist()):
                rows.block_tables[place, -(-length // size) :] = 0  # no kernel reads them
            for given_row in inputs:
                if FROM_STATE not in given_row[len(given_row) - given_row[2] + 1 :]:
                    own.drafts[given_row[0]] = 0  # they were not asked for
            found = [*tensors_of(rows), *tensors_of(rows.sampling)]
            found += [(name, value[:-1]) for name, value in tensors_of(own)]  # the spare row may hold anything
            made.append({name: value.cpu() for name, value in found})
        for name, value in made[0].items():
            require(torch.equal(value, made[1][name]), f"{name} of {inputs}: {made[1][name]}, not {value}")
    return f"{shapes} shapes, all numbers equal"


def tensors_of(struct: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a dataclass by their names."""
    found = [(field.name, getattr(struct, field.name)) for field in fields(struct)]
    return [(name, value) for name, value in found if isinstance(value, Tensor)]


def log_probabilities(setting: Setting) -> str:
    """The chosen token's and the likeliest ones', over more than one piece of the vocabulary."""
    worst = 0.0
    for vocab, count in ((300, 20), (5000, 3)):
        logits = setting.randn(2, vocab).float() * 4
        tokens = torch.tensor([setting.dice.randrange(vocab) for _ in range(2)], device=setting.device)
        own, top, ids = logprobs.log_probabilities(logits, tokens, count)
        expected = logits.cpu().double().log_softmax(-1)
        worst = max(worst, relative_error(own, expected.gather(-1, tokens.cpu()[:, None])[:, 0]))
        values, order = expected.topk(count)
        worst = max(worst, relative_error(top, values))
        require(torch.equal(ids.cpu(), order), "other tokens than the likeliest are listed")
    require(worst <= 1e-5, f"relative error {worst:.1e}")
    return f"worst relative error {worst:.1e}"


def penalised_logits(setting: Setting) -> str:
    """Places of any rows of the table, over more than one piece of the vocabulary, and some that are not penalised."""
    worst = 0.0
    for vocab in (300, 5000):
        logits = setting.randn(4, vocab).float() * 4
        counts = torch.randint(0, 3, (6, vocab), dtype=torch.int32, device=setting.device)
        counts += IN_PROMPT * (counts.flip(0) > 1)
        wishes = [(1.3, 0.5, 0.2), NO_PENALTIES, (0.7, -0.5, 0.0), (1.0, 0.0, 1.5)]
        asked = torch.tensor(wishes, device=setting.device)
        rows = torch.tensor([[5, 9], [0, 9], [2, 9], [5, 9]], device=setting.device)[:, 0]
        found = penalties.penalise(logits, rows, counts, asked)
        require(torch.equal(found[1], logits[1]), "a row without penalties was touched")
        worst = max(worst, relative_error(found, reference.penalise(logits, rows, counts, asked)))
    require(worst <= 1e-6, f"relative error {worst:.1e}")
    return f"worst relative error {worst:.1e}"


def products(setting: Setting) -> str:
    """Weights of 4 and 8 bits, and plain ones whose sums don't follow the batch, with awkward sizes and biases."""
    return worst_of(setting, lambda: _product_error(setting), 5)


def rows_of_eight_bits(setting: Setting) -> str:
    """Each row as float8 or int8 with its scale, as plain torch rounds it."""
    errors = []
    for dtype, allowed in ((FP8, 2e-2), (torch.int8, 2e-3)):
        x = _without_ties(setting.randn(5, 300).to(dtype_of(setting)) * 9)
        x[2] = 0
        rounded, scales = quantized_linear.quantize_rows(x, dtype)
        expected, expected_scales = reference.quantize_rows(x, dtype)
        found = _with_carries(setting, rounded, expected) if dtype == FP8 else rounded.float()
        errors.append(relative_error(found * scales, expected.float() * expected_scales))
        require(errors[-1] <= allowed, f"relative error {errors[-1]:.1e} as {dtype}")
    return f"relative errors {errors[0]:.1e} and {errors[1]:.1e}"


def engine(setting: Setting) -> str:
    """An engine whose operations are all kernels replies as a plain pass does, with prompts in chunks."""
    with tempfile.TemporaryDirectory() as folder, by_kernels(setting):
        tested = ModelUnderTest(
            setting, Path(folder), TinyModel("Qwen3ForCausalLM", num_layers=1, seed=setting.dice.getrandbits(31))
        )
        tested.prompts = [tested.prompts[0], tested.prompts[4]]
        tested.judge_all(tested.engine(max_num_batched_tokens=12), 2)
        tested.settle()
    return f"{len(tested.regrets)} tokens, worst {max(tested.regrets):.1e} below the likeliest"


def engine_stays_the_same(setting: Setting) -> str:
    """With ``batch_invariant`` a reply's log-probabilities are the same to the bit, alone and in company."""
    dice = setting.dice
    wish = SamplingParams(2, 1.0, logprobs=2, seed=dice.getrandbits(63))
    lengths = (2, 3, 12)
    commands = [Generate(str(n), tuple(dice.randrange(256) for _ in range(n)), wish) for n in lengths]
    with tempfile.TemporaryDirectory() as folder, by_kernels(setting), rows_one_by_one(setting):
        tested = ModelUnderTest(setting, Path(folder), TinyModel(num_layers=1, seed=dice.getrandbits(31)))
        together = answer_all(tested.engine(batch_invariant=True, max_num_batched_tokens=9), commands)
        alone = answer_all(tested.engine(batch_invariant=True), commands[2:])
    for key, answer in alone.items():
        both = [[event.logprobs for event in some.events] for some in (answer, together[key])]
        require(both[0] == both[1], "a reply differs in company")
    return f"a prompt of {lengths[2]}, whole and in chunks among others: equal bit for bit"


def engine_of_few_bits(setting: Setting) -> str:
    """Kernels score a prompt as plain torch does with the same rounded weights, inputs and cache."""
    dice, allowed = setting.dice, {"int8": 1e-4, "int4": 1e-4, "w8a8": 1e-2}
    if setting.device.type == "cuda":  # the interpreter rounds to float8 wrongly
        allowed |= {"fp8": 1e-2, "cache": 1e-2}
    prompt = tuple(dice.randrange(256) for _ in range(11))
    command = Generate("x", prompt, SamplingParams(1, 0.0, prompt_logprobs=0))
    errors = {}
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel(num_layers=1, intermediate_size=128, seed=dice.getrandbits(31))
        plain = ModelUnderTest(replace(setting, device=torch.device("cpu")), Path(folder), model)
        tested = ModelUnderTest(setting, Path(folder), model)
        for method, most in allowed.items():
            settings = {"kv_cache_dtype": "fp8"} if method == "cache" else {"quantization": method}
            expected = prompt_scores(plain.engine(**settings), command)
            with by_kernels(setting):
                errors[method] = relative_error(prompt_scores(tested.engine(**settings), command), expected)
            require(errors[method] <= most, f"{method}: relative error {errors[method]:.1e}")
    return ", ".join(f"{method} {error:.0e}" for method, error in errors.items())


def prompt_scores(loop: EngineLoop, command: Generate) -> Tensor:
    (answer,) = answer_all(loop, [command]).values()
    return torch.tensor([score.logprob for score in answer.events[0].prompt_scores])


@contextmanager
def by_kernels(setting: Setting) -> Iterator[None]:
    """Let kernels compute on the CPU, too."""
    with patch.object(ops, "uses_triton", lambda device: True) if setting.device.type == "cpu" else nullcontext():
        yield


def _attention_error(
    setting: Setting, queries: tuple[int, int], window: int, float8: bool = False, looks_ahead: bool = False
) -> float:
    dtype, dice, on_card = dtype_of(setting), setting.dice, setting.device.type == "cuda"
    heads, kv_heads = dice.choice(HEADS if on_card else FEW_HEADS)
    dim, size = dice.choice(HEAD_DIMS if on_card else (64,) if queries[1] > 9 else (64, 80)), dice.choice((4, 16, 32))
    lens = [dice.randint(*queries) for _ in range(dice.randint(9, 40) if on_card else 2)]
    pasts = [dice.choice((0, 5, dice.randint(0, 5000 if on_card else 100))) for _ in lens]
    tables = scattered_tables([n + past for n, past in zip(lens, pasts, strict=True)], size, dice)
    cache = setting.randn(sum(map(len, tables)), size, 2, kv_heads, dim).to(dtype)
    scales, stored = None, cache
    if float8:
        scales = scales_from(cache)
        both = torch.stack([scales.key, scales.value])[:, :, None]
        stored = (cache.float() / both).to(FP8)
        cache = load_kv(stored.view(torch.uint8), scales, torch.float32)
    each = [setting.randn(n, heads, dim).to(dtype) for n in lens]
    softcap, sinks = dice.choice((0.0, 0.0, 1.5, 50.0)), None
    if dice.random() < 0.5:
        sinks = setting.randn(heads).float() * 3

    ends = [_ends_of(n, past, looks_ahead, dice) for n, past in zip(lens, pasts, strict=True)]
    expected = []
    for query, table, past, own in zip(each, tables, pasts, ends, strict=True):
        kv = cache[table].flatten(0, 1)[: past + len(query)].double()
        expected.append(attend(query.double(), kv[:, 0], kv[:, 1], past, window, softcap, sinks, own))
    starts, splits = torch.tensor([0, *lens]).cumsum(0), dice.choice((1, 2, 8) if on_card else (1, 2))
    width = max(map(len, tables))
    where = paged.PagedLayout(
        rows=slice(0, sum(lens)),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables]).int().to(setting.device),
        context_lens=torch.tensor([n + past for n, past in zip(lens, pasts, strict=True)]).int().to(setting.device),
        query_starts=starts.int().to(setting.device),
        max_query_len=max(lens) + dice.choice((0, 3)),
        num_splits=splits,
        split_tokens=dice.choice((0, -(-max(map(operator.add, lens, pasts)) // (64 * splits)) * 64)),
        ends=torch.cat(ends).int().to(setting.device) if looks_ahead else None,
    )
    query = torch.cat(each)
    out = torch.full_like(query, torch.nan)
    paged_attention(query, stored, where, Scoring(dim**-0.5, window, softcap, sinks), scales, out)
    return relative_error(out, torch.cat(expected))


def _ends_of(count: int, past: int, looks_ahead: bool, dice: random.Random) -> Tensor:
    """Return before which position keys end for each query: behind its own, or behind all of its picture's."""
    ends = torch.arange(past + 1, past + count + 1)
    if looks_ahead:
        first, last = dice.randint(0, count // 3), dice.randint(2 * count // 3, count - 1)
        ends[first : last + 1] = past + last + 1
    return ends


def _small_batch_error(setting: Setting) -> float:
    dtype, dice = dtype_of(setting), setting.dice
    widths = (5, 24, 136) if setting.device.type == "cuda" else (5, 24)  # interpreted, the widest takes seconds
    rows, inputs, outputs = dice.randint(1, 4), dice.choice((24, 200, 1024, 1500)), dice.choice(widths)
    weight, norm = setting.randn(outputs, inputs).to(dtype), setting.randn(inputs).to(dtype)
    bias = setting.randn(outputs).to(dtype) if dice.random() < 0.5 else None
    x, gate_up = setting.randn(rows, inputs).to(dtype), setting.randn(rows, 2 * inputs).to(dtype)
    residual = setting.randn(rows, inputs).to(dtype) if dice.random() < 0.7 else None
    kept = quantize(weight, None, "int8") if dice.random() < 0.4 else None
    given = (weight, bias) if kept is None else (kept.weight, bias, kept.scales)
    out, summed = small_batch.norm_linear(x, residual, norm, 1e-6, *given)
    activation, plain = dice.choice(("silu", "gelu_pytorch_tanh")), small_batch.linear(x, *given)
    gated = small_batch.gated_linear(gate_up, activation, *given)

    require(torch.equal(summed, x if residual is None else x + residual), "the sum is another one")
    wide, shift = summed.cpu().double(), 0.0 if bias is None else bias.cpu().double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.cpu().double()
    gate, up = gate_up.cpu().double().chunk(2, -1)
    numbers = (weight if kept is None else kept.weight.double() * kept.scales[:, None]).cpu().double()
    inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "silu":
        inner = gate / (1 + (-gate).exp()) * up
    expected = [some @ numbers.T + shift for some in (normed, inner, x.cpu().double())]
    return max(map(relative_error, (out, gated, plain), expected))


def _norm_rope_store_error(setting: Setting) -> float:
    dtype, dice = dtype_of(setting), setting.dice
    (heads, kv_heads), dim, tokens = dice.choice(FEW_HEADS), dice.choice((16, 80, 128)), dice.choice((1, 5))
    blocks, size, float8 = 3, dice.choice((4, 16)), dice.random() < 0.4
    qkv = setting.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    norm = setting.randn(heads + kv_heads, dim).to(dtype) if dice.random() < 0.6 else None
    angles = setting.randn(tokens, 1, dim // 2).float() * 9
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor(dice.sample(range(blocks * size), tokens), device=setting.device)
    scales = None
    expected_cache = setting.randn(blocks, size, 2, kv_heads, dim).to(dtype)
    if float8:
        scales = KvScales(*(setting.randn(kv_heads).float().abs() / 50 + 0.01 for _ in range(2)))
        expected_cache = expected_cache.float().to(FP8)
    cache = expected_cache.clone()
    turned, interleaved = dice.choice((dim, dim, dim // 2, 6)), dice.random() < 0.4
    cos[..., turned // 2 :], sin[..., turned // 2 :] = 1, 0
    rest = (slots, heads, 1e-6, scales, turned, interleaved)
    query = fused.norm_rope_store(qkv, norm, cos, sin, cache, *rest)
    expected = reference.norm_rope_store(qkv, norm, cos, sin, expected_cache, *rest)
    untouched = torch.ones(blocks * size, dtype=torch.bool)
    untouched[slots.cpu()] = False
    both = [some.cpu().float().flatten(0, 1) for some in (cache, expected_cache)]
    require(torch.equal(both[0][untouched], both[1][untouched]), "another slot was written")
    if float8:
        _judge_float8(setting, cache, expected_cache)
        return relative_error(query, expected)
    return max(relative_error(query, expected), relative_error(*both))


def _product_error(setting: Setting) -> float:
    dtype, dice = dtype_of(setting), setting.dice
    large = setting.device.type == "cuda"
    rows = dice.choice((1, 5, 40, 150, 1000) if large else (1, 5, 40))
    inputs, outputs = dice.choice((128, 1024, 4096) if large else (128, 640)), dice.choice((24, 136))
    x, weight = setting.randn(rows, inputs).to(dtype), setting.randn(outputs, inputs).to(dtype)
    bias = setting.randn(outputs).to(dtype) if dice.random() < 0.5 else None
    method = dice.choice(("int8", "w8a8", "int4", "plain", "int8 in groups"))
    x = _without_ties(x)
    if method == "plain":
        with rows_one_by_one(setting):
            out = quantized_linear.linear(x, weight, None, bias, batch_invariant=True)
            alone = quantized_linear.linear(x[-1:], weight, None, bias, batch_invariant=True)
        require(torch.equal(alone[0], out[-1]), "a row's product depends on the rows beside it")
        expected = x.cpu().double() @ weight.cpu().double().T + (0 if bias is None else bias.cpu().double())
        return relative_error(out, expected)
    kept = quantize(weight, bias, method.split()[0])
    zeros = None
    if "groups" in method:
        groups = inputs // dice.choice((32, 128))
        kept = replace(kept, scales=kept.scales[:, None] * (1 + setting.randn(outputs, groups).float().abs()))
        zeros = torch.randint(-128, 129, kept.scales.shape, generator=setting.generator()).short().to(setting.device)
    elif method == "int4" and dice.random() < 0.7:
        zeros = torch.randint(0, 17, kept.scales.shape, generator=setting.generator()).byte().to(setting.device)
    out = quantized_linear.linear(x, kept.weight, kept.scales, bias, dice.random() < 0.3, zeros, kept.rounds_input)
    zeros, wide = None if zeros is None else zeros.cpu(), None if bias is None else bias.cpu().double()
    expected = reference.quantized_linear(
        x.cpu().double(), kept.weight.cpu(), kept.scales.cpu(), wide, zeros, kept.rounds_input
    )
    return relative_error(out, expected)


def _without_ties(x: Tensor) -> Tensor:
    """Return rows in which nothing lies halfway between two steps of int8: that may fall either way."""
    steps = x.float() / reference.quantize_rows(x, torch.int8)[1]
    return x.where((steps.frac().abs() - 0.5).abs() > 1e-4, 0)


def _judge_float8(setting: Setting, out: Tensor, expected: Tensor) -> None:
    """Each number is that of plain torch, or its neighbour where it lies near the middle of the two, which is seldom.

    The interpreter's caches are small, and a neighbour of one large number is more of their norm than many are of a
    large cache's: there numbers are judged one by one. Plain torch rounds to the model's precision before, so what
    cancels in a rotation may differ by more than a step, but not by more than the head's largest number is rounded.
    """
    found, right = _with_carries(setting, out, expected), expected.float().cpu()
    if setting.device.type == "cuda":
        require(relative_error(found, right) <= 2e-2, "the stored float8 differ")
        return
    step = torch.maximum(found.abs(), right.abs()).clamp(min=FP8_NORMAL) / 8
    rounding = 4 * torch.finfo(dtype_of(setting)).eps * right.abs().amax(-1, keepdim=True)
    worst = ((found - right).abs() / (step + rounding)).max().item()
    require(worst <= 1, f"a stored float8 is {worst:.1f} times as far from the right one as its neighbour")
    differing = int((found != right).sum())
    require(differing <= 2 + right.numel() / 50, f"{differing} of {right.numel()} stored float8 differ")


def _with_carries(setting: Setting, out: Tensor, expected: Tensor) -> Tensor:
    """Return float8 numbers as float32, those that the interpreter of Triton 3.7 is known to round wrongly put right.

    A carry into an odd power of two, or into the smallest normal number, is lost: half of it is stored. Smaller numbers
    are cut off where they should be rounded: a step less is stored.
    """
    found, right = out.float().cpu(), expected.float().cpu()
    if setting.device.type == "cuda":
        return found
    carried = 2 * found
    mantissa, exponent = carried.abs().frexp()  # a power of two has the mantissa 0.5, and an exponent of one more
    may_lose = (mantissa == 0.5) & ((exponent % 2 == 0) | (carried.abs() == FP8_NORMAL))
    loses_carry = may_lose & (right / carried >= 7 / 8) & (right / carried <= 1)  # plain torch may not have carried
    is_cut = (right.abs() <= FP8_NORMAL) & (right.abs() - found.abs() == FP8_NORMAL / 8)
    return torch.where(loses_carry, carried, torch.where(is_cut, right, found))


def dtype_of(setting: Setting) -> torch.dtype:
    return torch.float16 if setting.device.type == "cpu" and setting.dtype == torch.bfloat16 else setting.dtype


def worst_of(setting: Setting, error: Callable[[], float], interpreted: int = 1) -> str:
    shapes = 6 if setting.device.type == "cuda" else interpreted  # most of them are compiled anew
    largest = max(error() for _ in range(shapes))
    figures = f"{shapes} shapes, worst relative error {largest:.1e}"
    require(largest <= TOLERANCE[dtype_of(setting)], f"{figures}, above {TOLERANCE[dtype_of(setting)]:.0e}")
    return figures


CHECKS = (
    Check("kernel: attention of decodes", attention_of_decodes),
    Check("kernel: attention of drafts", attention_of_drafts),
    Check("kernel: attention of pictures", attention_of_pictures),
    Check("kernel: attention of chunks", attention_of_chunks, long=(torch.float32,)),
    Check("kernel: attention over float8", attention_over_float8, (torch.bfloat16,)),
    Check("kernel: attention whatever the batch", attention_stays_the_same, (torch.bfloat16,), long=(torch.bfloat16,)),
    Check("kernel: the end of a large cache", end_of_a_large_cache, (torch.bfloat16,)),
    Check("kernel: sum and norm", add_rms_norm),
    Check("kernel: norm in place", norm_in_place),
    Check("kernel: SiLU or GELU and product", gated),
    Check("kernel: products of a small batch", small_batch_products, long=(torch.float32,)),
    Check("kernel: norm, rope and store", norm_rope_store),
    Check("kernel: rows of decodes", rows_of_decodes, (torch.float32,)),
    Check("kernel: draws", draws, (torch.float32,)),
    Check("kernel: penalties", penalised_logits, (torch.float32,)),
    Check("kernel: log-probabilities", log_probabilities, (torch.float32,)),
    Check("kernel: products of few bits", products, long=(torch.float32,)),
    Check("kernel: rows of eight bits", rows_of_eight_bits, (torch.bfloat16,)),
    Check("kernel: an engine of them equals a plain pass", engine, (torch.float32,)),
    Check("kernel: an engine of them with few bits", engine_of_few_bits, (torch.float32,), long=(torch.float32,)),
    Check(
        "kernel: an engine of them whatever the batch", engine_stays_the_same, (torch.float32,), long=(torch.float32,)
    ),
)
