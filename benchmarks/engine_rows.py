# The longer tables of the engine, no HTTP: what another vendor publishes for this device, batches that wait for their
# longest reply against continuous ones, a long prompt among running replies, requests that arrive at a pace, and
# guesses of which a chosen share holds.
#
#   python -m benchmarks.engine_rows        needs a CUDA device; writes results/engine-rows-DEVICE-DATE.{json,md}
#   python -m benchmarks.engine_rows --tiny             a tiny shape on the CPU, to --out FOLDER
#   python -m benchmarks.engine_rows --only long        one table of them

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import speculating
from benchmarks.driving import Run, build_loop, drive, percentile, release
from benchmarks.engine import Bench, guarded, run_rows, warm
from benchmarks.engine_table import RESULTS, Row
from benchmarks.roofline import LARGE, SHAPES, TINY_SHAPES, Request, shared_workload
from gpu_backend.engine.loop import EngineLoop

MODEL = "Llama-3.1-8B"
ALL_SECONDS = 1500.0
ROW_SECONDS = 60.0
# Input and output tokens, and output tokens/s of TensorRT-LLM 1.0 in fp8 on one H200, as its
# docs/source/performance/perf-overview.md has them.
PUBLISHED = {"Llama-3.1-8B": (
    (128, 128, 27911), (128, 2048, 26221), (128, 4096, 18027), (500, 2000, 20770), (1000, 1000, 17744),
    (1000, 2000, 16828), (2048, 128, 3538), (2048, 2048, 12194), (5000, 500, 3902), (20000, 2000, 1804),
), "Llama-3.3-70B": ((128, 2048, 4336), (1000, 1000, 2909), (2048, 2048, 2003), (20000, 2000, 283))}  # fmt: skip
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
ALL_SHAPES = SHAPES | LARGE | TINY_SHAPES
RATES = (4.0, 8.0, 16.0, 32.0)  # requests a second


def main() -> int:
    """Measure what is asked for. Return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, to see that all of this runs")
    parser.add_argument("--only", default="", metavar="WORD", help="tables whose name has the word")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = partial(all_tables, only=arguments.only)
    return run_rows("engine-rows", rows, tiny=arguments.tiny, out=arguments.out, seconds=ALL_SECONDS)


def all_tables(bench: Bench, tiny: bool, only: str = "") -> Iterator[Row]:
    """Yield the rows of every table whose name has the word."""
    for table in (published, batching, long_prompt, paced, speculation):
        if only in table.__name__:
            yield from guarded(bench, "tiny" if tiny else MODEL, table.__name__, table(bench, tiny))


def published(bench: Bench, tiny: bool) -> Iterator[Row]:
    """Fixed lengths in and out, in fp8, as many requests as a row's time allows."""
    tables = {"tiny": ((9, 4, 0), (24, 3, 0))} if tiny else PUBLISHED
    for model, given, asked, rate in ((model, *row) for model, rows in tables.items() for row in rows):
        name = f"fp8, {given} in, {asked} out"
        if bench.budget(ROW_SECONDS) <= 0:
            yield Row(model, name, note="left out: no time")
        else:
            yield from guarded(bench, model, name, _published(bench, tiny, model, name, given, asked, rate))


def _published(bench: Bench, tiny: bool, model: str, name: str, given: int, asked: int, rate: int) -> Iterator[Row]:
    longest = max(given + asked + 1, 64)
    loop = _loop(bench, model, max_model_len=longest, max_num_seqs=4 if tiny else 1024, **{} if tiny else FP8)
    # About what another half of the time would take at the published rate, so that the beginning and the end, when the
    # batch is not full, weigh little.
    count = 6 if tiny else max(64, int(0.5 * ROW_SECONDS * rate / asked))
    requests = _fixed(count, given, asked)
    run = drive(loop, requests, bench.budget(ROW_SECONDS))
    figures = {"published": float(rate), "of_published": sum(run.made) / run.seconds / rate} if rate else {}
    yield bench.row(model, ALL_SHAPES[model], name, requests, run.made, run.seconds, fp8=not tiny, **figures)


def batching(bench: Bench, tiny: bool) -> Iterator[Row]:
    """The shared workload in batches that wait for their longest reply, and the same places filled as they get free."""
    model = "tiny" if tiny else MODEL
    places = 3 if tiny else 64
    workload = (
        [Request(r.prompt[:9], 2 + i % 5) for i, r in enumerate(shared_workload()[:9])] if tiny else shared_workload()
    )
    loop = _loop(bench, model, max_num_seqs=places)
    for name, at_once in (("static batches", places), ("continuous batches", 0)):
        run = drive(loop, workload, bench.budget(ROW_SECONDS), at_once=at_once)
        yield _row(bench, model, f"{name} of {places}", workload, run, gpu_busy=run.busy)


def long_prompt(bench: Bench, tiny: bool) -> Iterator[Row]:
    """A long prompt comes while replies run: computed whole, and in chunks beside them."""
    model = "tiny" if tiny else MODEL
    length, replies, chunk = (40, 3, 8) if tiny else (8192, 32, 512)
    for name, tokens in (("whole", length + replies), ("in chunks", chunk + replies)):
        loop = _loop(
            bench, model, max_model_len=length + 600, max_num_batched_tokens=tokens, max_num_seqs=replies + 1
        )  # fmt: skip
        running = _fixed(replies, 6 if tiny else 128, 12 if tiny else 400)
        quiet = drive(loop, running, bench.budget(ROW_SECONDS))
        arrivals = [0.0] * replies + [quiet.seconds / 3]
        requests = [*running, *_fixed(1, length, 4, first=replies)]
        run = drive(loop, requests, bench.budget(ROW_SECONDS), arrivals)
        gaps = Run(run.arrivals[:-1], run.tokens[:-1]).gaps
        yield _row(
            bench, model, f"{length} tokens of prompt {name}, {replies} replies", requests, run,
            ttft_long_ms=1e3 * max(run.waits[-1:], default=0.0), gap_p50_ms=1e3 * percentile(gaps, 0.5),
            gap_p99_ms=1e3 * percentile(gaps, 0.99), gap_max_ms=1e3 * max(gaps, default=0.0),
            gap_max_before_ms=1e3 * max(quiet.gaps, default=0.0),
        )  # fmt: skip
        del loop
        release(bench.device)


def paced(bench: Bench, tiny: bool) -> Iterator[Row]:
    """Requests that arrive by chance at a mean rate: how long the first token and each further one take."""
    model = "tiny" if tiny else MODEL
    loop = _loop(bench, model, max_num_batched_tokens=2048)
    for rate in (200.0,) if tiny else RATES:
        if bench.budget(ROW_SECONDS) <= 0:
            yield Row(model, f"{rate:g} requests/s", note="left out: no time")
            continue
        dice = random.Random(0)
        count = 8 if tiny else int(rate * 20)
        arrivals, now = [], 0.0
        for _ in range(count):
            now += dice.expovariate(rate)
            arrivals.append(now)
        given, asked = ((5, 20), (2, 6)) if tiny else ((100, 1024), (50, 400))
        lengths = [(dice.randint(*given), dice.randint(*asked)) for _ in range(count)]
        requests = [Request(tuple(dice.randrange(9973) for _ in range(n)), output) for n, output in lengths]
        run = drive(loop, requests, bench.budget(ROW_SECONDS), arrivals)
        yield _row(
            bench, model, f"{rate:g} requests/s", requests, run,
            ttft_p50_ms=1e3 * percentile(run.waits, 0.5), ttft_p99_ms=1e3 * percentile(run.waits, 0.99),
            gap_p50_ms=1e3 * percentile(run.gaps, 0.5), gap_p99_ms=1e3 * percentile(run.gaps, 0.99),
            gpu_busy=run.busy,
        )  # fmt: skip


def speculation(bench: Bench, tiny: bool) -> Iterator[Row]:
    """Decodes with guesses, from none that holds to all, against the same decodes without any."""
    model = "tiny" if tiny else MODEL
    sizes, given, asked = ((2,), 12, 40) if tiny else ((1, 8, 32), 256, 256)
    vocab = ALL_SHAPES[model]["vocab_size"]
    work = {size: _fixed(size, given, asked) for size in sizes}
    with speculating.known_text():
        loop = _loop(bench, model, max_num_seqs=max(sizes))
        alone = {size: _decode(bench, model, loop, requests, "no guesses") for size, requests in work.items()}
        yield from alone.values()
        del loop
        release(bench.device)
        loop = _loop(bench, model, max_num_seqs=max(sizes), **speculating.SETTINGS)
        for size, requests in work.items():
            points = []
            for share in speculating.SHARES:
                speculating.guess(loop, share, vocab)
                before = loop.load().counters
                row = _decode(bench, model, loop, requests, f"guesses, {share:.0%} hold")
                after = loop.load().counters
                points.append((share, row.tokens_per_second / alone[size].tokens_per_second))
                held, drafts = (after[name] - before[name] for name in ("accepted_tokens", "drafts"))
                figures = {"times_as_fast": points[-1][1], "tokens_a_step": 1 + held / max(1.0, drafts)}
                if share == speculating.SHARES[-1]:
                    figures["break_even_share"] = speculating.break_even(points)
                yield replace(row, figures=row.figures | figures)


def _decode(bench: Bench, model: str, loop: EngineLoop, requests: Sequence[Request], name: str) -> Row:
    """Measure requests once all graphs are there."""
    drive(loop, requests, bench.budget(ROW_SECONDS))
    run = drive(loop, requests, bench.budget(ROW_SECONDS))
    return _row(bench, model, f"{name}, batch {len(requests)}", requests, run, gpu_busy=run.busy)


def _loop(bench: Bench, model: str, **settings: Any) -> EngineLoop:
    loop = build_loop(ALL_SHAPES[model], bench.device, prefix_caching=False, **settings)
    warm(loop)
    return loop


def _row(bench: Bench, model: str, workload: str, requests: Sequence[Request], run: Run, **figures: float) -> Row:
    return bench.row(model, ALL_SHAPES[model], workload, requests, run.made, run.seconds, **figures)


def _fixed(count: int, given: int, asked: int, first: int = 0) -> list[Request]:
    """Return requests of one length, no two of which begin alike."""
    return [
        Request(tuple((number * 7919 + i * 104_729) % 9973 for i in range(given)), asked)
        for number in range(first, first + count)
    ]


if __name__ == "__main__":
    sys.exit(main())
