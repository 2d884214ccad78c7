# The engine alone, no HTTP: the benchmark that several engines publish, and one stream, at three models' shapes with
# random weights, each beside the least time that the device could take. Bounded in time; a row that was cut says so.
#
#   python -m benchmarks.engine           needs a CUDA device and torch; writes results/engine-DEVICE-DATE.{json,md}
#   python -m benchmarks.engine --tiny    a tiny shape on the CPU, in seconds, to --out FOLDER

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.roofline import DATASHEETS, SHAPES, TINY_SHAPES, Ceilings, Request, least_seconds, shared_workload
from gpu_backend.config import EngineConfig
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.engine.messages import Generate, NewTokens
from gpu_backend.engine.requests import Limits
from gpu_backend.engine.runner import Runner
from gpu_backend.engine.sequence import FinishReason, SamplingParams
from gpu_backend.models.config import load_model_config

RESULTS = Path(__file__).parent / "results"
SECONDS = {"shared": 100.0, "one stream": 15.0}  # a row's budget


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one shape. Shares are of the roofline of exactly the tokens that were made."""

    model: str
    workload: str
    output_tokens: int
    planned_tokens: int
    seconds: float
    tokens_per_second: float
    share_of_measured: float
    share_of_datasheet: float | None
    cut: bool


def main() -> None:
    """Measure the ceilings, then every row; write and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, to see that all of this runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return
    device = torch.device("cpu" if arguments.tiny else "cuda")
    name = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name(device)
    measured = measure_ceilings(device, small=arguments.tiny)
    workload = [Request(r.prompt[:9], 5) for r in shared_workload()[:8]] if arguments.tiny else shared_workload()
    rows: list[Row] = []
    for model, config in (TINY_SHAPES if arguments.tiny else SHAPES).items():
        loop = build_loop(config, device)
        run(loop, [Request((1, 2, 3), 4)], 60.0)  # warm-up
        for kind, requests in (("one stream", [Request(workload[0].prompt, 256)]), ("shared", workload)):
            rows.append(measure(model, config, loop, kind, requests, measured, DATASHEETS.get(name)))
            print(line(rows[-1]), flush=True)
        del loop
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    write(name, measured, rows, arguments.out)


def build_loop(config: dict[str, Any], device: torch.device) -> EngineLoop:
    """Build an engine with random weights of that shape."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = load_model_config(Path(folder))
        settings = EngineConfig(
            folder, device.type, max_model_len=2048, max_num_batched_tokens=8192, load_format="dummy"
        )
        runner = Runner(settings, model)
        return EngineLoop(settings, runner, runner.num_blocks, Limits(runner.max_model_len, model.vocab_size))


def measure(
    model: str,
    config: dict[str, Any],
    loop: EngineLoop,
    kind: str,
    requests: Sequence[Request],
    measured: Ceilings,
    datasheet: Ceilings | None,
) -> Row:
    """Run one workload within its budget, and set it beside the roofline of what came out."""
    vocab = config["vocab_size"]
    requests = [Request(tuple(token % vocab for token in r.prompt), r.output) for r in requests]
    made, seconds = run(loop, requests, SECONDS[kind])
    work = [(len(request.prompt), count) for request, count in zip(requests, made, strict=True) if count]
    planned, total = sum(request.output for request in requests), sum(made)
    return Row(
        model=model,
        workload=kind,
        output_tokens=total,
        planned_tokens=planned,
        seconds=seconds,
        tokens_per_second=total / seconds,
        share_of_measured=least_seconds(config, work, measured) / seconds,
        share_of_datasheet=least_seconds(config, work, datasheet) / seconds if datasheet else None,
        cut=total < planned,
    )


def run(loop: EngineLoop, requests: Sequence[Request], budget: float) -> tuple[list[int], float]:
    """Return how many tokens each reply got within ``budget`` seconds, and the seconds; what is left is dropped."""
    made = [0] * len(requests)
    started = time.perf_counter()
    for i, request in enumerate(requests):
        sampling = SamplingParams(request.output, temperature=0.6, ignore_eos=True, seed=i)
        loop.handle(Generate(str(i), request.prompt, sampling))
    while loop.has_work() and time.perf_counter() - started < budget:
        for event in loop.step():
            assert isinstance(event, NewTokens) and event.finish_reason is not FinishReason.ERROR, event
            made[int(event.request_id)] += len(event.token_ids)
    seconds = time.perf_counter() - started
    for i in range(len(requests)):
        for sequence in loop.scheduler.replies_of(str(i)):
            loop.scheduler.remove(sequence)
    return made, seconds


def measure_ceilings(device: torch.device, small: bool) -> Ceilings:
    """Return the bandwidth of a large copy, read and written bytes together, and the rate of a large bf16 product."""
    source = torch.randn((1 << 20) if small else (1 << 30), device=device)
    target = torch.empty_like(source)
    copy = _median_seconds(lambda: target.copy_(source), device)
    size = 256 if small else 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = _median_seconds(lambda: left @ right, device)
    return Ceilings(2 * source.nbytes / copy, 2 * size**3 / product)


def _median_seconds(act: Callable[[], object], device: torch.device) -> float:
    def once() -> float:
        started = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    return statistics.median([once() for _ in range(25)][5:])


def line(row: Row) -> str:
    """Return a row of the table."""
    sheet = "–" if row.share_of_datasheet is None else f"{row.share_of_datasheet:.1%}"
    cut = f"cut after {row.seconds:.0f} s: {row.output_tokens:,} of {row.planned_tokens:,}" if row.cut else "whole"
    return (
        f"| {row.model} | {row.workload} | {row.tokens_per_second:,.1f} | {row.share_of_measured:.1%} | {sheet} "
        f"| {row.seconds:.2f} | {cut} |"
    )


def write(name: str, measured: Ceilings, rows: Sequence[Row], folder: Path) -> None:
    """Write engine-DEVICE-DATE.json and .md."""
    now = datetime.now(UTC)
    about = f"torch {torch.__version__}, Python {platform.python_version()}, random weights, bf16 on CUDA"
    ceilings = f"copy {measured.bandwidth / 1e12:.3f} TB/s, bf16 product {measured.flops / 1e12:.1f} TFLOP/s"
    table = [
        f"# Engine on {name}, {now:%Y-%m-%d}",
        f"\n{about}. Measured ceilings: {ceilings}.\n",
        "| shape | workload | output tokens/s | of measured roofline | of datasheet | s | run |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *map(line, rows),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"engine-{re.sub('[^a-z0-9]+', '-', name.lower())}-{now:%Y-%m-%d}"
    stem.with_suffix(".md").write_text("\n".join(table) + "\n")
    facts = {"device": name, "date": now.isoformat(timespec="seconds"), "about": about, "measured": asdict(measured)}
    stem.with_suffix(".json").write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    main()
