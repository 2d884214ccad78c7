# Compiles every kernel for a GPU that need not be there, and says what each takes of a multiprocessor. A kernel that
# spills registers, or asks for more shared memory than there is, shows here and not on the card.
#
#   python -m benchmarks.compile_ahead               prints the table
#   python -m benchmarks.compile_ahead --out FOLDER  writes it to kernels-sm90-triton-VERSION.md there, too
#   python -m benchmarks.compile_ahead --lengths     how many kernels of attention a start compiles, and what comes anew

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_backend.kernels.layout import decode_rows
from gpu_backend.kernels.layout.paged import MAX_SPLITS, PagedLayout, PagedLayouts
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.kernels.triton_ops import (
    decoding,
    delta,
    experts,
    fused,
    latent_attention,
    logprobs,
    lora,
    paged_attention,
    penalties,
    quantized_linear,
    sampling,
    small_batch,
)

TARGET = GPUTarget("cuda", 90, 32)
MOST_SHARED = 227 * 1024  # bytes that one program may have, compute capability 9.0
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as one model calls it. ``types`` are those of the run-time arguments, by name; others are int32."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled variant takes: registers and spilled bytes of a thread, shared memory of a program."""

    registers: int
    spilled: int
    shared: int
    tensor_cores: str  # the instructions that multiply, if any do


def main() -> int:
    """Compile all, print the table; return 1 if a variant cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_ahead")
    parser.add_argument("--out", type=Path, help="folder for the table, in Markdown")
    parser.add_argument("--only", default="", metavar="WORD", help="variants whose name has the word")
    parser.add_argument("--lengths", action="store_true", help="what batches of other sizes and lengths compile anew")
    arguments = parser.parse_args()
    if arguments.lengths:
        return compile_lengths()
    lines = [
        f"Compiled for compute capability 9.0 by Triton {triton.__version__}, without a GPU: registers and spilled "
        "bytes of a thread, shared memory of a program, and how many programs a multiprocessor holds at once.",
        "",
        "| kernel | warps | registers | spilled bytes | shared KiB | programs at once | tensor cores |",
        "| --- | --: | --: | --: | --: | --: | --- |",
    ]
    failed = False
    print("\n".join(lines))
    for variant in variants():
        if arguments.only in variant.name:
            used = compile_variant(variant)
            failed |= used.shared > MOST_SHARED
            lines.append(_line(variant, used))
            print(lines[-1], flush=True)
    if arguments.out:
        table = arguments.out / f"kernels-sm90-triton-{triton.__version__}.md"
        table.write_text("\n".join(lines) + "\n")
    return int(failed)


def compile_lengths() -> int:
    """Compile attention as a start does, at Llama-3.1-8B's shape; return 1 if any batch would compile more."""
    names: list[str] = []

    def note(*, repr: str, **_: Any) -> None:
        names.append(repr)

    def shaped(sequences: int, blocks: int, queries: int) -> PagedLayout:
        starts = torch.arange(sequences + 1, dtype=torch.int32) * queries
        table = torch.zeros((sequences, blocks), dtype=torch.int32)
        return layouts.place(slice(0, sequences * queries), table, starts[1:], starts, queries)

    triton.runtime.driver.set_active(_NoDevice())
    triton.knobs.runtime.jit_post_compile_hook = note
    layouts = PagedLayouts(16, 32, 8, torch.device("cpu"), 132)
    batches = [
        shaped(*sizes) for sizes in ((3, 7, 1), (250, 64, 1), (1, 4096, 1), (5, 33, 13), (2, 600, 700), (9, 9, 5))
    ]
    cache = torch.zeros((8, 16, 2, 8, 128), dtype=torch.bfloat16)
    counts = []
    for some in (list(layouts.samples()), batches):
        before = len(names)
        for layout in some:
            query = torch.zeros((layout.rows.stop, 32, 128), dtype=torch.bfloat16)
            launch = paged_attention.only_compile
            paged_attention.paged_attention(query, cache, layout, Scoring(1.0), launch=launch)
        counts.append(len(names) - before)
    splits = sorted({layout.num_splits for layout in batches})
    print(f"Triton {triton.__version__}: a start compiles {counts[0]} kernels of attention.")
    parts = ", ".join(map(str, splits))
    print(f"{len(batches)} batches of other sizes, lengths and parts ({parts}) compile {counts[1]} more.")
    return int(counts[1] > 0)


class _NoDevice:
    """What Triton asks of a driver to compile for a device that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


def compile_variant(variant: Variant) -> Resources:
    """Compile it, and read what the assembler says of it."""
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types.get(name, "i32") for name in names}
    # What a launch tells the compiler: allocations begin at multiples of 16 bytes, and strides are such.
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in variant.kernel.params if _is_aligned(p, signature[p.name])}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(variant.kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(source, target=TARGET, options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _assemble(ptx)
    kinds = {"wgmma": "wgmma.mma_async", "mma": "mma.sync"}
    used = [kind for kind, instruction in kinds.items() if instruction in ptx]
    return Resources(registers, spilled, compiled.metadata.shared, " ".join(used))


def variants() -> Iterator[Variant]:
    """Every kernel as the models call it that the benchmarks run: Qwen3-0.6B, Llama-3.1-8B, Qwen3-14B; and odd ones."""
    yield from _attention()
    yield from _latent_attention()
    yield from _delta_rule()
    yield from _fused()
    yield from _decoding()
    yield from _sampling()
    yield from _products()
    yield from _experts()
    yield from _adapters()


def _attention() -> Iterator[Variant]:
    pointers = dict.fromkeys(("block_tables", "context_lens", "query_starts", "ends"), "*i32")
    pointers |= dict.fromkeys(("weight", "key_scales", "value_scales", "sinks"), "*fp32") | {
        "scale": "fp32",
        "cap": "fp32",
    }
    cases = [  # name, heads, key heads, head_dim, queries, splits, type of the cache, window
        ("decode, 0.6B", 16, 8, 128, 1, 1, "bf16", 0),
        ("decode, 0.6B, split", 16, 8, 128, 1, 16, "bf16", 0),
        ("decode, 8B", 32, 8, 128, 1, 1, "bf16", 0),
        ("decode, 8B, split", 32, 8, 128, 1, 16, "bf16", 0),
        ("decode, 8B, float8", 32, 8, 128, 1, 16, "fp8e4nv", 0),
        ("decode, 8B, window", 32, 8, 128, 1, 16, "bf16", 4096),
        ("decode, 14B", 40, 8, 128, 1, 8, "bf16", 0),
        ("decode, one key head", 8, 1, 64, 1, 16, "bf16", 0),
        ("decode, head_dim 80", 32, 32, 80, 1, 8, "bf16", 0),
        ("decode, head_dim 96", 32, 32, 96, 1, 8, "bf16", 0),
        ("decode, head_dim 256", 8, 4, 256, 1, 16, "bf16", 0),
        ("5 drafts, 8B", 32, 8, 128, 6, 8, "bf16", 0),
        ("chunk, 0.6B", 16, 8, 128, 512, 1, "bf16", 0),
        ("chunk, 8B", 32, 8, 128, 512, 1, "bf16", 0),
        ("chunk, 8B, float8", 32, 8, 128, 512, 1, "fp8e4nv", 0),
        ("chunk, 8B, window", 32, 8, 128, 512, 1, "bf16", 4096),
        ("chunk, head_dim 64", 8, 1, 64, 512, 1, "bf16", 0),
        ("chunk, head_dim 256", 8, 4, 256, 512, 1, "bf16", 0),
        ("decode, head_dim 256, soft cap", 8, 4, 256, 1, 16, "bf16", 0),
        ("chunk, head_dim 256, soft cap", 8, 4, 256, 512, 1, "bf16", 4096),
        ("chunk, Gemma 3 27B, pictures", 32, 16, 128, 512, 1, "bf16", 0),
        ("chunk, Gemma 3 27B, pictures and window", 32, 16, 128, 512, 1, "bf16", 1024),
        ("chunk, Gemma 3 4B, pictures, split", 8, 4, 256, 512, 2, "bf16", 0),
        ("same sums, 8B", 32, 8, 128, 1, 8, "bf16", 0),
        ("same sums, 8B, float8", 32, 8, 128, 1, 8, "fp8e4nv", 0),
        ("same sums, head_dim 256", 8, 4, 256, 1, 8, "bf16", 0),
        ("same sums, 8B, float32", 32, 8, 128, 1, 8, "fp32", 0),
        ("same sums, head_dim 256, float32", 8, 4, 256, 1, 8, "fp32", 0),
        ("decode, GPT-OSS, sinks", 64, 8, 64, 1, 1, "bf16", 128),
        ("decode, GPT-OSS, sinks, split", 64, 8, 64, 1, 16, "bf16", 0),
        ("chunk, GPT-OSS, sinks", 64, 8, 64, 512, 1, "bf16", 0),
        ("chunk, GPT-OSS, sinks and window", 64, 8, 64, 512, 1, "bf16", 128),
        ("decode, Llama 4, chunks", 40, 8, 128, 1, 1, "bf16", -8192),
        ("chunk, Llama 4, chunks, split", 40, 8, 128, 512, 16, "bf16", -8192),
        ("decode, 8B, float32", 32, 8, 128, 1, 16, "fp32", 0),
        ("decode, head_dim 256, float32", 8, 4, 256, 1, 16, "fp32", 0),
        ("chunk, 8B, float32", 32, 8, 128, 512, 1, "fp32", 0),
        ("chunk, head_dim 256, float32", 8, 4, 256, 512, 1, "fp32", 0),
    ]
    for name, heads, kv_heads, dim, queries, splits, cache, window in cases:
        query, fixed = "fp32" if cache == "fp32" else "bf16", "same sums" in name
        wide, narrow = cache == "fp32", cache == "fp8e4nv"
        shape = paged_attention.tile_shape(queries * heads // kv_heads, dim, wide, narrow, fixed)
        common = {
            "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim),
            "ROWS": shape.rows, "TILE": shape.tile, "WINDOWED": 2 if window < 0 else int(window > 0), "FIXED": fixed,
            "SINKS": "sinks" in name, "AHEAD": "pictures" in name,
        }  # fmt: skip
        types = pointers | {"query": f"*{query}", "kv_cache": f"*{cache}", "part": "*fp32" if splits > 1 else "*bf16"}
        own = {
            "BLOCK_SIZE": 16,
            "SPLIT": splits > 1,
            "SCALED": cache == "fp8e4nv",
            "CAPPED": "soft cap" in name,
            "PRECISION": "tf32x3" if query == "fp32" else "tf32",
        }
        kernel = paged_attention.attend_kernel
        yield Variant(f"attention: {name}", kernel, types, common | own, shape.num_warps, shape.num_stages)
        if name.endswith(("8B, split", "sinks, split", "pictures, split")):
            types, most = pointers | {"part": "*fp32", "out": "*bf16"}, {"MOST_SPLITS": MAX_SPLITS}
            more = [word for word in ("sinks", "pictures") if word in name]
            what = ", ".join(("attention: putting parts together", *more))
            yield Variant(what, paged_attention.combine_kernel, types, common | most, 4)


def _latent_attention() -> Iterator[Variant]:
    """As of DeepSeek-V3 and Kimi K2: all heads on one card, and a part of them on each of eight."""
    pointers = dict.fromkeys(("block_tables", "context_lens", "query_starts"), "*i32")
    pointers |= {"weight": "*fp32", "scale": "fp32"}
    for name, heads, queries, splits, what in (
        ("decode, 128 heads, split", 128, 1, 16, "bf16"), ("decode, 16 heads", 16, 1, 1, "bf16"),
        ("decode, 8 heads, split", 8, 1, 16, "bf16"), ("4 drafts, 16 heads, split", 16, 5, 16, "bf16"),
        ("chunk, 128 heads", 128, 512, 1, "bf16"), ("decode, 16 heads, float32", 16, 1, 1, "fp32"),
    ):  # fmt: skip
        wide = what == "fp32"
        shape = latent_attention.tile_shape(queries * heads, wide)
        constants = {
            "HEADS": heads, "RANK": 512, "RANK_PADDED": 512, "TURNED": 64, "TURNED_PADDED": 64, "BLOCK_SIZE": 16,
            "ROWS": shape.rows, "TILE": shape.tile, "SPLIT": splits > 1, "FIXED": False,
            "PRECISION": "tf32x3" if wide else "tf32",
        }  # fmt: skip
        types = pointers | dict.fromkeys(("query", "turned", "kv_cache"), f"*{what}")
        types |= {"part": "*fp32" if splits > 1 else f"*{what}"}
        kernel = latent_attention.attend_latent_kernel
        yield Variant(f"latent attention: {name}", kernel, types, constants, shape.num_warps, shape.num_stages)
    types = dict.fromkeys(("query", "latent", "norm", "cos", "sin", "turned", "kv_cache"), "*bf16")
    types |= {"slots": "*i64", "eps": "fp32"}
    constants = {
        "HEADS": 128, "OWN": 128, "RANK": 512, "RANK_PADDED": 512, "HALF": 32, "HALF_PADDED": 32, "INTERLEAVED": True,
        "BLOCK_SIZE": 16, "AT_ONCE": latent_attention.HEADS_AT_ONCE,
    }  # fmt: skip
    yield Variant(
        "latent attention: norm, rope and store", latent_attention.norm_rope_store_latent_kernel, types, constants, 4
    )


def _delta_rule() -> Iterator[Variant]:
    """As of Qwen3-Next-80B-A3B, and of Qwen3.5's dense models, in which three heads of values share one of keys."""
    types = {"decay": "*fp32", "beta": "*fp32", "sums": "*fp32", "rows": "*i64", "eps": "fp32", "scale": "fp32"}
    for heads, shared_by, kind in ((32, 2, "bf16"), (48, 3, "bf16"), (32, 2, "fp32")):
        constants = {
            "HEADS": heads, "SHARED_BY": shared_by, "WIDTH": heads // shared_by * 128, "KEY_DIM": 128,
            "KEY_PADDED": 128, "VALUE_DIM": 128, "VALUES": delta.VALUES_AT_ONCE,
        }  # fmt: skip
        own = types | dict.fromkeys(("mixed", "out"), f"*{kind}")
        yield Variant(f"delta rule: decode, {heads} heads, {kind}", delta.delta_step_kernel, own, constants, 4)


def _fused() -> Iterator[Variant]:
    rows = dict.fromkeys(("x", "residual", "weight", "normed", "summed"), "*bf16") | {"eps": "fp32"}
    for width in (1024, 4096, 5120):
        block = triton.next_power_of_2(width)
        constants = {"WIDTH": width, "BLOCK": block, "ADDS": True}
        yield Variant(f"sum and norm of {width}", fused.add_rms_norm_kernel, rows, constants, min(16, block // 512))
    both = {"gate_up": "*bf16", "out": "*bf16"}
    yield Variant("SiLU and product", fused.gated_kernel, both, {"WIDTH": 14336, "BLOCK": 1024, "GELU": False}, 4)
    types = dict.fromkeys(("qkv", "qk_norm", "cos", "sin", "query", "kv_cache"), "*bf16")
    types |= {"slots": "*i64", "key_scales": "*fp32", "value_scales": "*fp32", "eps": "fp32"}
    constants = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_PADDED": 64, "BLOCK_SIZE": 16, "AT_ONCE": 8}
    constants |= {"PAIRS": 64, "INTERLEAVED": False}
    for name, normed, scaled in (("norm, rope and store", True, False), ("rope and store float8", False, True)):
        cache = {"kv_cache": "*fp8e4nv"} if scaled else {}
        flags = {"NORMED": normed, "SCALED": scaled}
        yield Variant(name, fused.norm_rope_store_kernel, types | cache, constants | flags, 2)


def _decoding() -> Iterator[Variant]:
    longs = (
        "inputs",
        "last_tokens",
        "starts",
        "drafts",
        "numbers",
        "token_ids",
        "positions",
        "slots",
        "seed",
        "tokens",
    )
    types = dict.fromkeys(longs, "*i64") | dict.fromkeys(("shares", "temperature", "top_p", "min_p"), "*fp32")
    types |= dict.fromkeys(
        ("block_tables", "tables", "context_lens", "texts", "top_k", "position", "reply", "drawn"), "*i32"
    ) | {"usable": "*i1"}  # fmt: skip
    for name, width in (("decodes", 1), ("decodes of 4 guesses", 5)):
        size = {"WIDTH": width, "WIDTH_PADDED": triton.next_power_of_2(width)}
        placing = size | {"BLOCK_SIZE": 16, "MOST": 4, "BLOCKS_AT_ONCE": decoding.BLOCKS_AT_ONCE}
        yield Variant(f"rows of {name}", decoding.place_kernel, types, placing, 4)
        yield Variant(f"what counts of {name}", decoding.accept_kernel, types, size | {"WINDOW": 4096}, 1)
    size |= {"MOST": 4, "MOST_PADDED": 4, "WINDOW": 4096, "AT_ONCE": decoding.PLACES_AT_ONCE}
    lengths = {"SHORTEST": decode_rows.SHORTEST, "LONGEST": decode_rows.LONGEST}
    yield Variant("guesses from 4,096 tokens", decoding.propose_drafts_kernel, types, size | lengths, 4)


def _sampling() -> Iterator[Variant]:
    vocab, piece = 151_936, sampling.PIECE
    pieces = triton.cdiv(vocab, piece)
    types = dict.fromkeys(("logits", "temperature", "top_p", "min_p", "high", "low", "worth", "floors"), "*fp32")
    types |= dict.fromkeys(("values", "sums", "own", "top"), "*fp32")
    types |= dict.fromkeys(("top_k", "position", "reply", "at", "ids"), "*i32")
    types |= {"seed": "*i64", "tokens": "*i64", "top_ids": "*i64", "usable": "*i1"}
    size = {"VOCAB": vocab, "PIECE": piece, "PIECES": pieces}
    padded = {"PIECES_PADDED": triton.next_power_of_2(pieces)}
    yield Variant("draw: survey", sampling.survey_kernel, types, size, 8)
    yield Variant("draw: settle filters", sampling.settle_kernel, types, size | padded | {"FILTERS": True}, 8)
    yield Variant("draw: score", sampling.score_kernel, types, size, 8)
    yield Variant("draw: choose", sampling.choose_kernel, types, {"PIECES": pieces} | padded, 1)
    told = types | {"rows": "*i64", "counts": "*i32", "penalties": "*fp32", "out": "*fp32"}
    yield Variant("penalties", penalties.penalise_kernel, told, {"VOCAB": vocab, "PIECE": penalties.PIECE}, 8)
    yield Variant("log-probabilities: 20 of a piece", logprobs.shortlist_kernel, types, size | {"LISTED": 20}, 8)
    listed = {"COUNT": 20, "PIECES": pieces, "LISTED": 20, "ALL_PADDED": triton.next_power_of_2(20 * pieces)}
    yield Variant("log-probabilities: 20 of all", logprobs.report_kernel, types, listed | padded, 4)


def _products() -> Iterator[Variant]:
    kinds = (("int8", "i8", 0), ("w8a8", "i8", 0), ("int4", "u8", 128), ("int4 from zeros", "u8", 128),
             ("int8 in groups, from zeros", "i8", 128), ("float8 in blocks", "fp8e4nv", 128))  # fmt: skip
    for kind, weight, group in (*kinds, ("same sums", "bf16", 0)):
        rows = (512,) if kind == "same sums" else (8, 64, 512)
        for count in rows:
            shape = quantized_linear.product_shape(count, batch_invariant=kind == "same sums")
            constants = {
                "ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": group or shape.depth,
                "SPLIT": count == 8, "GROUP": group, "SCALED": kind != "same sums", "BIASED": False,
                "PRECISION": "tf32", "SHIFTED": "from zeros" in kind, "ROUNDED": kind == "w8a8",
                "PACKED": weight == "u8",
            }  # fmt: skip
            types = {"x": "*i8" if kind == "w8a8" else "*bf16", "weight": f"*{weight}", "bias": "*bf16"}
            types |= {"scales": "*fp32", "row_scales": "*fp32", "zeros": "*i16" if weight == "i8" else "*u8"}
            types |= {"part": "*fp32" if count == 8 else "*bf16"}
            name = f"product, {kind}, tiles of {shape.rows} rows"
            yield Variant(name, quantized_linear.product_kernel, types, constants, shape.num_warps, shape.num_stages)
    types = dict.fromkeys(("x", "residual", "norm", "weight", "bias", "out", "summed"), "*bf16") | {"eps": "fp32"}
    warps = small_batch.WARPS
    for count, name, inputs, weight in (
        (1, "after a norm", 4096, "bf16"), (2, "after a norm", 4096, "bf16"), (4, "after a norm", 4096, "bf16"),
        (1, "after SiLU", 14336, "bf16"), (4, "after SiLU", 14336, "bf16"), (1, "after a norm", 4096, "fp8e4nv"),
        (1, "after SiLU", 14336, "fp8e4nv"), (4, "after a norm", 4096, "fp8e4nv"), (1, "after a norm", 4096, "i8"),
    ):  # fmt: skip
        normed = name == "after a norm"
        constants = {
            "INPUTS": inputs, "ROWS": count, "COLUMNS": small_batch.COLUMNS, "DEPTH": 32 * warps * 8, "EACH": 8,
            "NORMED": normed, "ADDS": normed, "GATED": not normed, "GELU": False, "SCALED": weight != "bf16",
            "BIASED": False,
        }  # fmt: skip
        own = types | {"weight": f"*{weight}", "scales": "*fp32"}
        kind = "" if weight == "bf16" else ", float8" if weight == "fp8e4nv" else ", int8"
        yield Variant(f"product {name}{kind}, {count} rows", small_batch.small_batch_kernel, own, constants, warps)
    types = {"x": "*bf16", "weight": "*fp8e4nv", "bias": "*bf16", "part": "*bf16", "scales": "*fp32"}
    shape = quantized_linear.product_shape(1, batch_invariant=True)
    constants = {
        "ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": shape.depth, "SPLIT": False, "GROUP": 0, "SCALED": True,
        "BIASED": False, "PRECISION": "tf32", "SHIFTED": False, "ROUNDED": False, "PACKED": False,
    }  # fmt: skip
    types |= {"row_scales": "*fp32", "zeros": "*u8"}
    name, kernel = "product, same sums, float8 weights", quantized_linear.product_kernel
    yield Variant(name, kernel, types, constants, shape.num_warps, shape.num_stages)
    types = {"part": "*fp32", "bias": "*bf16", "out": "*bf16"}
    yield Variant("product: sum of splits", quantized_linear.sum_kernel, types, {"BIASED": False, "BLOCK": 1024}, 4)
    types = {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32"}
    constants = {"WIDTH": 4096, "BLOCK": 4096, "MOST": 448.0, "WHOLE": False}
    yield Variant("rows to float8", quantized_linear.quantize_rows_kernel, types, constants, 8)


def _experts() -> Iterator[Variant]:
    """A mixture as of Mixtral-8x7B, of 8 experts, and of Qwen3-30B-A3B, of 128."""
    whole = dict.fromkeys(("chosen", "experts", "counts", "order", "owners"), "*i32") | {"scales": "*fp32"}
    whole |= {"shares": "*fp32"}
    for number, count in ((8, 2), (128, 8)):
        named = f"{number} experts"
        constants = {"EXPERTS": number, "EXPERTS_PADDED": number}
        chosen = {"COUNT": count, "COUNT_PADDED": count, "NORMALISED": True, "BIASED": False, "EXPERTS": number}
        chosen |= {"GROUPS": 1, "GROUPS_PADDED": 1, "MOST_GROUPS": 1, "SIZE_PADDED": number}
        types = whole | {"logits": "*bf16", "bias": "*fp32", "factor": "fp32"}
        yield Variant(f"choice of {count} of {named}", experts.choose_experts_kernel, types, chosen, 1)
        at_once = {"AT_ONCE": experts.PAIRS_AT_ONCE}
        yield Variant(
            f"pairs of {named}, placed", experts.place_pairs_kernel, whole, constants | at_once | {"ROWS": 16}, 4
        )
    chosen |= {"BIASED": True}
    types |= {"logits": "*fp32"}
    yield Variant(f"choice of {count} by sigmoids", experts.choose_experts_kernel, types, chosen, 1)
    for what, each, groups, most, by in (("DeepSeek-V3's", 256, 8, 4, True), ("DeepSeek-V2's", 160, 8, 3, False)):
        grouped = {"EXPERTS": each, "GROUPS": groups, "GROUPS_PADDED": groups, "MOST_GROUPS": most, "BIASED": by}
        grouped |= {"SIZE_PADDED": 32, "NORMALISED": by}
        yield Variant(f"choice of {count} in {what} groups", experts.choose_experts_kernel, types, chosen | grouped, 1)
    yield Variant("pairs of an expert, counted", experts.count_pairs_kernel, whole, at_once, 4)
    whole |= {"alpha": "fp32", "limit": "fp32"}
    for pairs, weight, what in (
        (1, "bf16", "bf16"), (8, "bf16", "bf16"), (64, "bf16", "bf16"), (65, "bf16", "bf16"),
        (8, "fp8e4nv", "bf16"), (65, "fp8e4nv", "bf16"), (8, "fp32", "fp32"), (65, "fp32", "fp32"),
        (1, "mxfp4", "bf16"), (8, "mxfp4", "bf16"), (64, "mxfp4", "bf16"), (65, "mxfp4", "bf16"), (8, "mxfp4", "fp32"),
        (8, "fp8e4nv in blocks", "bf16"), (65, "fp8e4nv in blocks", "bf16"), (1, "int4", "bf16"), (8, "int4", "bf16"),
        (65, "int4", "bf16"), (8, "int4 from zeros", "bf16"),
    ):  # fmt: skip
        shape = experts.experts_shape(pairs * number, number)
        halved = weight.startswith("int4")
        group = 128 if "blocks" in weight or halved else 0
        depth = experts.depth_of(shape, 4 if what == "fp32" else 2, weight == "mxfp4", group)
        for name, gated in (("gate and up", True), ("down", False)):
            constants = {
                "EXPERTS": number, "ROWS": shape.rows, "COLUMNS": shape.columns,
                "DEPTH": group if halved else depth,
                "GROUP": group, "HALVED": halved, "SHIFTED": "zeros" in weight, "SORTED": pairs > 1, "GATED": gated,
                "SCALED": weight == "fp8e4nv", "PACKED": weight == "mxfp4", "BIASED": weight == "mxfp4",
                "CLAMPED": weight == "mxfp4" and gated, "PRECISION": "tf32x3" if what == "fp32" else "tf32",
            }  # fmt: skip
            types = whole | {"x": f"*{what}", "out": f"*{what}", "bias": f"*{what}"}
            types |= {"weight": f"*{'u8' if halved or weight == 'mxfp4' else weight.split()[0]}", "zeros": "*u8"}
            types |= {"scales": "*u8"} if weight == "mxfp4" else {}
            kind = f"{'sorted' if pairs > 1 else 'single'} tiles of {shape.rows} rows, {weight}"
            kernel = experts.grouped_product_kernel
            stages = experts.stages_of(shape, is_whole=weight in ("bf16", "fp32"))
            yield Variant(f"experts' {name}, {kind}", kernel, types, constants, shape.num_warps, stages)


def _adapters() -> Iterator[Variant]:
    """Adapters of rank 16 and 64 beside three packed products of 4,096 inputs, and one of 14,336."""
    for modules, rank, what in ((3, 16, "bf16"), (3, 64, "bf16"), (1, 16, "bf16"), (3, 16, "fp32")):
        types = dict.fromkeys(("x", "out", "shrink", "expand"), f"*{what}") | {"part": "*fp32", "slots": "*i32"}
        common = {"ROWS": lora.ROWS, "PRECISION": "tf32x3" if what == "fp32" else "tf32"}
        name = f"adapters of rank {rank}, {modules} modules, {what}"
        bytes_each = 4 if what == "fp32" else 2
        columns = lora.columns_of(modules * rank, bytes_each)
        shrinking = {"COLUMNS": columns, "DEPTH": lora.DEPTH * 2 // bytes_each}
        shrinking |= {"SPLIT": lora.split_of(4096 if modules == 3 else 14336)}
        yield Variant(f"{name}: shrink", lora.shrink_kernel, types, common | shrinking, 4)
        expanding = {"COLUMNS": lora.COLUMNS, "RANK": lora.rank_of(rank)}
        yield Variant(f"{name}: expand", lora.expand_kernel, types, common | expanding, 4)


def _is_aligned(parameter: Any, kind: str) -> bool:
    if kind.startswith("*"):
        return not parameter.do_not_specialize_on_alignment
    regular = parameter.name.endswith(("stride", "offset")) or parameter.name in ("inputs", "outputs")
    return kind == "i32" and regular and not parameter.do_not_specialize


def _assemble(ptx: str) -> tuple[int, int]:
    """Return registers and spilled bytes of a thread, by the assembler that comes with Triton."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [str(assembler), "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.findall(r"(\d+) bytes spill", told)
    return int(registers[1]) if registers else 0, sum(map(int, spilled))


def _line(variant: Variant, used: Resources) -> str:
    by_registers = REGISTERS // (max(1, used.registers) * 32 * variant.num_warps)
    at_once = min(by_registers, MOST_SHARED // max(1, used.shared + 1024), 64 // variant.num_warps, 32)
    return (
        f"| {variant.name} | {variant.num_warps} | {used.registers} | {used.spilled} | {used.shared / 1024:.1f} "
        f"| {at_once} | {used.tensor_cores or '–'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
