# Each Triton kernel alone, at the shapes of the models that are measured, beside the two peaks that the device shows
# in the same run: bytes moved over the bandwidth of a large copy, operations over the rate of a large matrix product.
#
#   python -m benchmarks.kernels           needs a CUDA device; writes results/kernels-DEVICE-DATE.{json,md}
#   python -m benchmarks.kernels --tiny    tiny shapes, interpreted on the CPU, to see that all of this runs
#   python -m benchmarks.kernels --seconds 60    no case that would begin later; what came before is written anyway

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine import SWEPT, measure_peaks
from benchmarks.engine_table import RESULTS, write_whole
from benchmarks.roofline import DATASHEETS, MIXTURES, SHAPES, TINY_MIXTURES, TINY_SHAPES, HardwarePeaks
from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.models.config.model import ModelConfig, parse_model_config

Both = tuple[HardwarePeaks, HardwarePeaks | None]  # as measured, and as the vendor states them


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape: the least bytes it must move, and the operations it must do."""

    kernel: str
    shape: str
    run: Callable[[], object]
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """What a case took. Shares are of the peak that binds it: the larger of both least times over the time."""

    kernel: str
    shape: str
    microseconds: float
    gigabytes_per_second: float
    teraflops: float
    share_of_measured: float
    share_of_datasheet: float | None = None
    note: str = ""  # why there are no numbers


def main() -> int:
    """Measure the peaks, then every case; print and write the rows as they come. Return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that all of this runs")
    parser.add_argument("--only", default="", metavar="WORD", help="kernels whose name has the word")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    device = torch.device("cpu" if arguments.tiny else "cuda")
    name = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name(device)
    measured = measure_peaks(device, small=arguments.tiny)
    peaks = measured, DATASHEETS.get(name)
    rows = []
    shapes = TINY_SHAPES | TINY_MIXTURES if arguments.tiny else SHAPES | MIXTURES
    for row in _rows(shapes, arguments.only, peaks, device, deadline):
        rows.append(row)
        print(_line(row), flush=True)
        _write(name, measured, rows, arguments.out)
    return int(any(row.note.startswith("failed") for row in rows))


def _rows(
    shapes: dict[str, dict[str, Any]], only: str, peaks: Both, device: torch.device, deadline: float
) -> Iterator[Row]:
    """Measure case by case; one that raises is told of, and is no reason to lose the others."""
    for model, config in sorted(shapes.items(), key=lambda shape: shape[0] != SWEPT):
        dense = (_attention, _between_products, _products, _sampling)
        for kind in (_mixtures,) if "num_experts_per_tok" in config else dense:
            here = f"{model}: {kind.__name__.strip('_').replace('_', ' ')}"
            if time.monotonic() > deadline:
                yield Row("left out: no time", here, 0.0, 0.0, 0.0, 0.0, note="left out: no time")
                continue
            try:
                for case in kind(model, parse_model_config(config), device, device.type == "cpu"):
                    if only in case.kernel and time.monotonic() < deadline:
                        yield _guarded(case, peaks, device)
            except Exception as error:  # in making a case
                traceback.print_exc()
                yield Row("failed", here, 0.0, 0.0, 0.0, 0.0, note=f"failed: {type(error).__name__}: {error}"[:200])


def _guarded(case: Case, peaks: Both, device: torch.device) -> Row:
    try:
        return _measure(case, peaks, device)
    except Exception as error:
        traceback.print_exc()
        return Row(case.kernel, case.shape, 0.0, 0.0, 0.0, 0.0, note=f"failed: {type(error).__name__}: {error}"[:200])


def _attention(model: str, config: ModelConfig, device: torch.device, tiny: bool) -> Iterator[Case]:
    from gpu_backend.kernels import ops
    from gpu_backend.kernels.layout.paged import PagedLayouts, invariant_split
    from gpu_backend.kernels.layout.quantized_kv import scales_from

    heads, kv_heads, dim, dtype = config.num_heads, config.num_kv_heads, config.head_dim, _dtype(tiny)
    processors = 132 if tiny else torch.cuda.get_device_properties(device).multi_processor_count
    layouts = PagedLayouts(16, heads, kv_heads, device, processors)
    same_sums = PagedLayouts(16, heads, kv_heads, device, processors, invariant_split(8192))
    wanted = [(1, 1, 4096), (32, 1, 4096), (256, 1, 1024), (32, 5, 4096), (1, 8192, 8192), (8, 512, 2048)]
    for sequences, queries, context in [(1, 1, 40), (1, 9, 20)] if tiny else wanted:
        blocks = -(-context // 16)
        tables = torch.randperm(sequences * blocks).view(sequences, blocks).tolist()
        cache = _random(device, dtype, sequences * blocks, 16, 2, kv_heads, dim)
        query = _random(device, dtype, sequences * queries, heads, dim)
        positions = torch.arange(context - queries, context, device=device).repeat(sequences)
        where, fixed = (some.groups([queries] * sequences, positions, tables) for some in (layouts, same_sums))
        seen = sequences * (queries * (context - queries) + queries * (queries + 1) // 2)  # queries × keys
        flops, ends = 4.0 * seen * heads * dim, 2.0 * query.nbytes
        read = 2.0 * sequences * context * kv_heads * dim
        kind = "decode" if queries == 1 else "drafts" if queries < 16 else "chunks"
        shape = f"{model}: {sequences} × {queries} at {context:,}"

        def attend(query: Tensor = query, cache: Tensor = cache, where: Any = where, scales: Any = None) -> object:
            if tiny:
                from gpu_backend.kernels.triton_ops.paged_attention import paged_attention

                return [paged_attention(query[part.rows], cache, part, Scoring(dim**-0.5), scales) for part in where]
            return ops.paged_attention(query, cache, where, Scoring(dim**-0.5), scales)

        yield Case(f"attention, {kind}", shape, attend, read * dtype.itemsize + ends, flops)
        yield Case(
            f"attention, {kind}, whatever the batch",
            shape,
            lambda attend=attend, fixed=fixed: attend(where=fixed),
            read * dtype.itemsize + ends,
            flops,
        )
        if not tiny and queries == 1:
            scales = scales_from(cache)
            small = cache.to(torch.float8_e4m3fn).view(torch.uint8)
            yield Case(
                f"attention, {kind}, float8",
                shape,
                lambda attend=attend, small=small, scales=scales: attend(cache=small, scales=scales),
                read + ends,
                flops,
            )


def _between_products(model: str, config: ModelConfig, device: torch.device, tiny: bool) -> Iterator[Case]:
    from gpu_backend.kernels.triton_ops import fused

    heads, kv_heads, dim, dtype = config.num_heads, config.num_kv_heads, config.head_dim, _dtype(tiny)
    for tokens in (3,) if tiny else (1, 256, 8192):
        x, residual = (_random(device, dtype, tokens, config.hidden_size) for _ in range(2))
        weight = _random(device, dtype, config.hidden_size)
        gate_up = _random(device, dtype, tokens, 2 * config.intermediate_size)
        qkv = _random(device, dtype, tokens, heads + 2 * kv_heads, dim)
        norm = _random(device, dtype, heads + kv_heads, dim)
        cos, sin = (_random(device, dtype, tokens, 1, dim // 2) for _ in range(2))
        cache = _random(device, dtype, tokens // 16 + 1, 16, 2, kv_heads, dim)
        slots = torch.randperm(len(cache) * 16, device=device)[:tokens]
        shape = f"{model}: {tokens:,} tokens"
        yield Case(
            "sum and norm",
            shape,
            lambda x=x, residual=residual, weight=weight: fused.add_rms_norm(x, residual, weight, 1e-6),
            4.0 * x.nbytes,
        )
        yield Case("SiLU and product", shape, lambda gate_up=gate_up: fused.silu_and_mul(gate_up), 1.5 * gate_up.nbytes)
        inputs = (qkv, norm, cos, sin, cache, slots, heads)
        yield Case(
            "norm, rope and store", shape, lambda inputs=inputs: fused.norm_rope_store(*inputs, 1e-6), 2.0 * qkv.nbytes
        )


def _products(model: str, config: ModelConfig, device: torch.device, tiny: bool) -> Iterator[Case]:
    from gpu_backend.kernels import ops
    from gpu_backend.kernels.triton_ops import fused, quantized_linear, small_batch
    from gpu_backend.models.quantization import quantize

    outputs, inputs, dtype = 2 * config.intermediate_size, config.hidden_size, _dtype(tiny)
    weight = _random(device, dtype, outputs, inputs) * 0.02
    for rows in (2,) if tiny else (1, 16, 64, 256, 4096):
        x = _random(device, dtype, rows, inputs)
        flops, ends = 2.0 * rows * inputs * outputs, x.nbytes + 2.0 * rows * outputs
        shape = f"{model}: {rows:,} × {inputs:,} × {outputs:,}"
        yield Case("product, torch's own", shape, lambda x=x: x @ weight.t(), weight.nbytes + ends, flops)
        yield Case(
            "product, whatever the batch",
            shape,
            lambda x=x: quantized_linear.linear(x, weight, None, None, True),
            weight.nbytes + ends,
            flops,
        )
        if rows <= ops.SMALL_BATCH_ROWS:
            norm = _random(device, dtype, inputs)
            yield Case(
                "norm and product, small batch",
                shape,
                lambda x=x, norm=norm: small_batch.norm_linear(x, x, norm, 1e-6, weight, None),
                weight.nbytes + ends,
                flops,
            )
            yield Case(
                "norm, then torch's product",
                shape,
                lambda x=x, norm=norm: fused.add_rms_norm(x, x, norm, 1e-6)[0] @ weight.t(),
                weight.nbytes + ends,
                flops,
            )
        for method in ("int8", "w8a8", "int4") if tiny else ("int8", "w8a8", "int4", "fp8"):
            kept = quantize(weight, None, method)
            size = kept.weight.nbytes + kept.scales.nbytes + ends

            def multiply(x: Tensor = x, kept: Any = kept) -> object:
                if tiny:
                    return quantized_linear.linear(x, kept.weight, kept.scales, None, rounds_input=kept.rounds_input)
                return kept(x)

            yield Case(f"product, {method}", shape, multiply, size, flops / 2 if method in ("fp8", "w8a8") else flops)


def _mixtures(model: str, config: ModelConfig, device: torch.device, tiny: bool) -> Iterator[Case]:
    from gpu_backend.kernels import reference_experts
    from gpu_backend.kernels.triton_ops import experts

    shape, hidden, dtype = config.experts, config.hidden_size, _dtype(tiny)
    assert shape is not None
    gate_up = _random(device, dtype, shape.number, 2 * shape.intermediate_size, hidden) * 0.02
    down = _random(device, dtype, shape.number, hidden, shape.intermediate_size) * 0.02
    for tokens in (3,) if tiny else (1, 16, 64, 256, 4096):
        x, logits = _random(device, dtype, tokens, hidden), _random(device, dtype, tokens, shape.number)
        routing = experts.choose_experts(logits, shape.per_token, shape.is_normalised)
        read = (shape.weights_read(hidden, tokens) - shape.number * hidden) * dtype.itemsize + 2.0 * x.nbytes
        flops = 6.0 * tokens * shape.per_token * hidden * shape.intermediate_size
        named = f"{model}: {tokens:,} tokens, {shape.per_token} of {shape.number} experts each"
        for kernel, mix in (("mixture", experts.mix_experts), ("mixture, a loop", reference_experts.mix_experts)):
            mixing = lambda mix=mix, x=x, routing=routing: mix(x, gate_up, down, *routing)  # noqa: E731
            yield Case(kernel, named, mixing, read, flops)
        choose = lambda x=logits: experts.choose_experts(x, shape.per_token, True)  # noqa: E731
        yield Case("choice of experts", named, choose, float(logits.nbytes))


def _sampling(model: str, config: ModelConfig, device: torch.device, tiny: bool) -> Iterator[Case]:
    from gpu_backend.kernels.triton_ops import logprobs, sampling
    from gpu_backend.sampling.sampler import sampling_tensors_of
    from gpu_backend.step.plan import SequenceStep
    from gpu_backend.step.sampling_params import SamplingParams

    filters = {"top_p": 0.9, "top_k": 50, "min_p": 0.02}
    asked: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "temperature": {}, "filters": filters}
    for rows in (1,) if tiny else (1, 32, 256):
        logits = _random(device, torch.float32, rows, config.vocab_size) * 3
        tokens = torch.randint(config.vocab_size, (rows,), device=device)
        shape = f"{model}: {rows} × {config.vocab_size:,}"
        for kind, wish in asked.items():
            params = [SamplingParams(1, seed=seed, **wish) for seed in range(rows)]
            tensors = sampling_tensors_of([SequenceStep(1, (7,), 5, (0,), True, own, 0) for own in params], device)
            yield Case(
                f"draw, {kind}",
                shape,
                lambda logits=logits, tensors=tensors, kind=kind: sampling.draw(logits, tensors, kind == "filters"),
                logits.nbytes,
            )
        yield Case(
            "log-probabilities, 20",
            shape,
            lambda logits=logits, tokens=tokens: logprobs.log_probabilities(logits, tokens, 20),
            logits.nbytes,
        )


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def _dtype(tiny: bool) -> torch.dtype:
    return torch.float16 if tiny else torch.bfloat16  # the interpreter does not multiply bfloat16


def _measure(case: Case, peaks: Both, device: torch.device) -> Row:
    seconds = _seconds(case.run, device)
    measured, datasheet = (
        max(case.bytes / some.bandwidth, case.flops / some.flops) / seconds if some else None for some in peaks
    )
    return Row(
        case.kernel,
        case.shape,
        seconds * 1e6,
        case.bytes / seconds / 1e9,
        case.flops / seconds / 1e12,
        measured or 0.0,
        datasheet,
    )


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a launch from a CUDA graph, the cache emptied before each; interpreted, of one run."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = torch.empty(256 * 2**20, dtype=torch.int8, device=device)  # several times the cache
    times = []
    for _ in range(25):
        other.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[5:])


def _line(row: Row) -> str:
    if row.note:
        return f"| {row.kernel} | {row.shape} | – | – | – | – | {row.note} |"
    of_datasheet = "–" if row.share_of_datasheet is None else f"{row.share_of_datasheet:.1%}"
    return (
        f"| {row.kernel} | {row.shape} | {row.microseconds:,.1f} | {row.gigabytes_per_second:,.0f} "
        f"| {row.teraflops:,.1f} | {row.share_of_measured:.1%} | {of_datasheet} |"
    )


def _write(name: str, measured: HardwarePeaks, rows: list[Row], folder: Path) -> None:
    now = datetime.now(UTC)
    peaks = f"copy {measured.bandwidth / 1e12:.3f} TB/s, bf16 product {measured.flops / 1e12:.1f} TFLOP/s"
    table = [
        f"# Kernels on {name}, {now:%Y-%m-%d}",
        f"\ntorch {torch.__version__}, bf16. Measured peaks: {peaks}.\n",
        "| kernel | shape | µs | GB/s | TFLOP/s | of the measured peak | of the datasheet's |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        *map(_line, rows),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"kernels-{re.sub('[^a-z0-9]+', '-', name.lower())}-{now:%Y-%m-%d}"
    write_whole(stem.with_suffix(".md"), "\n".join(table) + "\n")
    facts = {"device": name, "date": now.isoformat(timespec="seconds"), "measured": asdict(measured)}
    write_whole(
        stem.with_suffix(".json"), json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
