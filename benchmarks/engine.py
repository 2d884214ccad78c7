# The engine alone, no HTTP: the benchmark that several engines publish, one stream, 64 streams, a sweep of batch sizes,
# and the time from a process's start to its first token, at the shapes of real models with random weights, each beside
# the least time that the device could take, and beside transformers' continuous batching. Bounded in time; a row that
# was cut says so.
#
#   python -m benchmarks.engine           needs a CUDA device and torch; writes results/engine-DEVICE-DATE.{json,md}
#   python -m benchmarks.engine --tiny    a tiny shape on the CPU, in seconds, to --out FOLDER
#   python -m benchmarks.engine --only 8B groups of rows whose name has the word: "engine SHAPE",
#                                         "transformers SHAPE"

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.driving import Run, build_loop, drive, release
from benchmarks.engine_table import RESULTS, Row, write
from benchmarks.roofline import (
    DATASHEETS,
    SHAPES,
    TINY_SHAPES,
    Request,
    least_seconds,
    shared_workload,
    token_flops,
)
from benchmarks.start_up import start_process
from benchmarks.transformers_peer import run_peer
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.hardware import roofline as hardware_roofline
from gpu_backend.hardware.roofline import HardwarePeaks

ALL_SECONDS = 420.0  # of the whole table; what would begin later is left out, and says so
SECONDS = {"one stream": 10.0, "shared": 60.0, "64 streams": 20.0, "sweep": 15.0, "peer": 40.0}  # a row's budget
START_SECONDS = 60.0
WARM_LENGTHS = (3, 40, 300, 1500, 20, 700)  # of prompts
SWEPT = "Llama-3.1-8B"
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows have in common."""

    device: torch.device
    measured: HardwarePeaks
    datasheet: HardwarePeaks | None
    deadline: float  # by ``time.perf_counter``

    def budget(self, wanted: float) -> float:
        """Return the seconds that a row may take."""
        return min(wanted, self.deadline - time.perf_counter())

    def row(
        self,
        model: str,
        config: dict[str, Any],
        workload: str,
        requests: Sequence[Request],
        made: Sequence[int],
        seconds: float,
        engine: str = "Tollgate",
        fp8: bool = False,
        **figures: float,
    ) -> Row:
        """Set what came out beside the roofline of just that."""
        work = [(len(request.prompt), count) for request, count in zip(requests, made, strict=True) if count]
        total = sum(made)

        def share(limits: HardwarePeaks | None) -> float | None:
            return least_seconds(config, work, limits, fp8) / seconds if limits else None

        return Row(
            model=model,
            workload=workload,
            engine=engine,
            output_tokens=total,
            planned_tokens=sum(request.output for request in requests),
            seconds=seconds,
            tokens_per_second=total / seconds,
            share_of_measured=share(self.measured),
            share_of_datasheet=share(self.datasheet),
            figures=figures,
        )


def main() -> int:
    """Measure the peaks, then every row; write and print the table. Return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, to see that all of this runs")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for the whole table")
    parser.add_argument("--only", default="", metavar="WORD", help="groups of rows whose name has the word")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = partial(all_rows, only=arguments.only)
    return run_rows("engine", rows, tiny=arguments.tiny, out=arguments.out, seconds=arguments.seconds)


def run_rows(title: str, rows: Callable[[Bench, bool], Iterator[Row]], *, tiny: bool, out: Path, seconds: float) -> int:
    """Print and write rows as they come: a run that is stopped keeps those before. Return 1 if a row failed."""
    if not tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    deadline = time.perf_counter() + seconds
    device = torch.device("cpu" if tiny else "cuda")
    name = "tiny on the CPU" if tiny else torch.cuda.get_device_name(device)
    bench = Bench(device, measure_peaks(device, small=tiny), DATASHEETS.get(name), deadline)
    done: list[Row] = []
    table = write(title, name, bench.measured, done, out)
    print(table.read_text().strip(), flush=True)
    for row in rows(bench, tiny):
        done.append(row)
        print(row.line(), flush=True)
        write(title, name, bench.measured, done, out)
    return int(any(row.failed for row in done))


def measure_peaks(device: torch.device, small: bool) -> HardwarePeaks:
    """Return what the device shows at its best: a copy of 4 GiB, bf16 and fp8 products of 8192 × 8192."""
    return hardware_roofline.measure_peaks(device, torch.bfloat16, *((1 << 22, 256) if small else (1 << 32, 8192)))


def guarded(bench: Bench, model: str, workload: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows of an engine, as ``surviving`` does, and give its memory back."""
    yield from surviving(model, workload, rows)
    release(bench.device)


def surviving(model: str, workload: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows; one that raises is told of, and costs no more than those that would have come behind it."""
    try:
        yield from rows
    except Exception as error:
        traceback.print_exc()
        yield Row(model, workload, note=f"failed: {type(error).__name__}: {error}"[:200], failed=True)


def groups(tiny: bool) -> list[str]:
    """Return the names of all groups of rows, in their order."""
    shapes = TINY_SHAPES if tiny else SHAPES
    return [*(f"engine {model}" for model in shapes), *(f"transformers {model}" for model in shapes)]


def all_rows(bench: Bench, tiny: bool, only: str = "") -> Iterator[Row]:
    """Yield own rows shape by shape, the start's with the first, then the peer's: what has the word in its name."""
    workload = [Request(r.prompt[:9], 5) for r in shared_workload()[:8]] if tiny else shared_workload()
    shapes = TINY_SHAPES if tiny else SHAPES
    first = next(iter(shapes))
    for group in (group for group in groups(tiny) if only in group):
        kind, _, model = group.partition(" ")
        if kind == "engine":
            streams, swept = model == first, tiny or model == SWEPT
            own = rows_of_shape(bench, model, shapes[model], workload, tiny, streams=streams, swept=swept)
            yield from guarded(bench, model, "engine", own)
            if model == first:
                yield from in_time(bench, model, "start", lambda: start(bench, first, tiny), START_SECONDS)
        else:
            yield peer(bench, model, shapes[model], workload)
            release(bench.device)


def rows_of_shape(
    bench: Bench,
    model: str,
    config: dict[str, Any],
    workload: Sequence[Request],
    tiny: bool,
    streams: bool,
    swept: bool,
) -> Iterator[Row]:
    """Yield one stream, the shared benchmark, and where wanted for 64 streams and the sweep."""
    started = time.perf_counter()
    loop = build_loop(config, bench.device, prefix_caching=False)
    built = time.perf_counter() - started
    try:
        warm(loop)
    except Exception as error:  # most likely of a capture, and what is left without graphs is worth knowing
        traceback.print_exc()
        yield Row(model, "graphs", note=f"failed: {type(error).__name__}: {error}"[:200], failed=True)
        del loop
        release(bench.device)
        loop = build_loop(config, bench.device, prefix_caching=False, cuda_graphs=False)
        warm(loop)
    kinds = {"one stream": [Request(workload[0].prompt, 32 if tiny else 256)], "shared": workload}
    if streams:
        count, given, asked = (4, 6, 8) if tiny else (64, 128, 512)
        kinds["64 streams"] = [Request(tuple((i * 131 + j) % 9973 for j in range(given)), asked) for i in range(count)]
    for kind, requests in kinds.items():

        def rows(kind: str = kind, requests: Sequence[Request] = requests) -> Iterator[Row]:
            run = drive(loop, requests, bench.budget(SECONDS[kind]))
            yield bench.row(
                model, config, kind, requests, run.made, run.seconds,
                ready_s=built, ms_per_token=1e3 * run.seconds / max(1, max(run.made)), **run.figures,
            )  # fmt: skip

        yield from in_time(bench, model, kind, rows, SECONDS[kind])
    if swept:
        yield from sweep(bench, model, config, loop, SIZES[:3] if tiny else SIZES, 9 if tiny else 512)


def in_time(
    bench: Bench, model: str, workload: str, rows: Callable[[], Iterator[Row]], seconds: float
) -> Iterator[Row]:
    """Yield rows that may fail without those behind them, or say that there is no time for them."""
    if bench.budget(seconds) <= 0:
        yield Row(model, workload, note="left out: no time")
    else:
        yield from surviving(model, workload, rows())


def start(bench: Bench, model: str, tiny: bool) -> Iterator[Row]:
    """Tell how long a new process takes to its first token, with the kernels compiled by the rows before."""
    yield Row(model, "start", figures=start_process(model, "cpu" if tiny else "cuda", bench.budget(START_SECONDS)))


def warm(loop: EngineLoop) -> None:
    """Let the kernels be compiled, and every graph be captured, before it counts; a server does so while it serves."""
    for count in (1, 2, 8) if loop.runner.is_asynchronous else (1,):
        drive(loop, [Request((1, 2, 3 + i), 24) for i in range(count)], 30.0)
    if loop.runner.is_asynchronous:  # long prompts beside decodes, of which some have one query and some a few
        longest = loop._limits.max_model_len - 5
        mixed = [Request(tuple(range(i, i + min(length, longest))), 4) for i, length in enumerate(WARM_LENGTHS)]
        drive(loop, mixed, 30.0, [0.01 * i for i in range(len(mixed))])
    if isinstance(loop.runner, Runner) and loop.runner.graphs is not None:
        # From the largest on: smaller ones find room in what it has taken.
        for places in reversed(loop.runner.graphs.sizes.places):
            loop.runner.graphs.capture(loop.runner.graphs.sizes.at(places))


def sweep(
    bench: Bench, model: str, config: dict[str, Any], loop: EngineLoop, sizes: Sequence[int], prompt: int
) -> Iterator[Row]:
    """Yield a row for each batch size: the rate of its prompts, then of its decodes, and what binds each."""
    output = 128 if bench.device.type == "cuda" else 8
    for size in sizes:
        name = f"decode, batch {size}"

        def rows(size: int = size, name: str = name) -> Iterator[Row]:
            requests = [Request(tuple((i * 131 + j) % 9973 for j in range(prompt)), output) for i in range(size)]
            run = drive(loop, requests, bench.budget(SECONDS["sweep"]))
            figures = phases(bench, config, run, prompt) | run.figures
            yield bench.row(model, config, name, requests, run.made, run.seconds, **figures)

        yield from in_time(bench, model, name, rows, SECONDS["sweep"])


def phases(bench: Bench, config: dict[str, Any], run: Run, prompt: int) -> dict[str, float]:
    """Tell the time of the prompts from that of the decodes, and set each beside the peak it could reach."""
    size, prefill = len(run.tokens), run.first_all
    decoding = max(run.seconds - prefill, 1e-9)
    decoded = sum(run.made) - size
    steps = max(max(run.made) - 1, 1)
    flops = token_flops(config)
    least = least_seconds(config, [(prompt, steps)] * size, HardwarePeaks(bench.measured.bandwidth, float("inf")))
    return {
        "prefill_tflops": flops * prompt * size / prefill / 1e12,
        "prefill_share_of_product": flops * prompt * size / prefill / bench.measured.flops,
        "decode_tokens_per_s": decoded / decoding,
        "decode_ms_per_step": 1e3 * decoding / steps,
        "decode_share_of_bandwidth": least / decoding,
        "decode_share_of_product": flops * decoded / decoding / bench.measured.flops,
    }


def peer(bench: Bench, model: str, config: dict[str, Any], requests: Sequence[Request]) -> Row:
    """Measure transformers, or say why it could not be."""
    engine = "transformers"
    if (budget := bench.budget(SECONDS["peer"])) <= 0:
        return Row(model, "shared", engine, note="left out: no time")
    try:
        made, seconds = run_peer(config, requests, bench.device, budget)
    except Exception as error:  # another project's interface: whatever it raises is no reason to lose our rows
        return Row(model, "shared", engine, note=f"could not be measured: {type(error).__name__}: {error}"[:200])
    return bench.row(model, config, "shared", requests, made, seconds, engine)


if __name__ == "__main__":
    sys.exit(main())
