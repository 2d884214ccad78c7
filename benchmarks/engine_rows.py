# The longer tables of the engine, no HTTP: what another vendor publishes for this device, batches that wait for their
# longest reply against continuous ones, a long prompt among running replies, requests that arrive at a rate, drafts of
# which a chosen share holds, fewer bits, and what the same bits whatever the batch cost. `benchmarks.gpu --rows` runs
# them in processes of their own.
#
#   python -m benchmarks.engine_rows        needs a CUDA device; writes results/engine-rows-DEVICE-DATE.{json,md}
#   python -m benchmarks.engine_rows --tiny             a tiny shape on the CPU, to --out FOLDER
#   python -m benchmarks.engine_rows --only long        groups of rows whose name has the word
#   python -m benchmarks.engine_rows --seconds 60       no row that would begin later

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
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
from gpu_backend.execution.runner import Runner

MODEL = "Llama-3.1-8B"
ALL_SECONDS = 1500.0
GROUP_SECONDS = 300.0  # that a group may take in a process of its own
ROW_SECONDS = 60.0
PUBLISHED_SECONDS = 200.0  # of a row beside a published one
# Input and output tokens, and output tokens/s of TensorRT-LLM 1.0 in fp8 on one H200, as its
# docs/source/performance/perf-overview.md has them.
PUBLISHED = {"Llama-3.1-8B": (
    (128, 128, 27911), (128, 2048, 26221), (128, 4096, 18027), (500, 2000, 20770), (1000, 1000, 17744),
    (1000, 2000, 16828), (2048, 128, 3538), (2048, 2048, 12194), (5000, 500, 3902), (20000, 2000, 1804),
), "Llama-3.3-70B": ((128, 2048, 4336), (1000, 1000, 2909), (2048, 2048, 2003), (20000, 2000, 283))}  # fmt: skip
TINY_LENGTHS = ((9, 4, 0), (24, 3, 0))
LARGE_STEP = 16_384  # tokens of prompts that are computed before a row counts
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {}, "fp8": {"quantization": "fp8"}, "KV cache of fp8": {"kv_cache_dtype": "fp8"}, "fp8 and KV cache": FP8,
    "int8 weights": {"quantization": "int8"}, "w8a8": {"quantization": "w8a8"},
    "int4 weights": {"quantization": "int4"},
}  # fmt: skip
ALL_SHAPES = SHAPES | LARGE | TINY_SHAPES
RATES = (4.0, 8.0, 16.0, 32.0)  # requests a second


def main() -> int:
    """Measure what is asked for. Return 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_rows")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, to see that all of this runs")
    parser.add_argument("--only", default="", metavar="WORD", help="groups of rows whose name has the word")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all of them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = partial(all_rows, only=arguments.only)
    return run_rows("engine-rows", rows, tiny=arguments.tiny, out=arguments.out, seconds=arguments.seconds)


def groups(tiny: bool) -> dict[str, Callable[[Bench, bool], Iterator[Row]]]:
    """Return all groups of rows by their names; each fits into ten minutes, with the start of its process."""
    model = "tiny" if tiny else MODEL
    tables: dict[str, tuple[tuple[int, int, int], ...]] = {"tiny": TINY_LENGTHS} if tiny else PUBLISHED
    found: dict[str, Callable[[Bench, bool], Iterator[Row]]] = {
        f"batching {model}": batching,
        f"long prompt {model}": long_prompt,
        f"paced {model}": paced,
        f"speculation {model}": speculation,
        f"precision {model}": precision,
        f"invariant {model}": invariant,
    }
    for shape, lengths in tables.items():
        for given, asked, rate in lengths:
            row = partial(published, model=shape, given=given, asked=asked, rate=rate)
            found[f"published {shape}, {given} in, {asked} out"] = row
    return found


def all_rows(bench: Bench, tiny: bool, only: str = "") -> Iterator[Row]:
    """Yield the rows of every group whose name has the word."""
    for name, rows in groups(tiny).items():
        if only in name:
            yield from guarded(bench, "tiny" if tiny else MODEL, name, rows(bench, tiny))


def published(bench: Bench, tiny: bool, model: str, given: int, asked: int, rate: int) -> Iterator[Row]:
    """Fixed lengths in and out, in fp8."""
    name = f"fp8, {given} in, {asked} out"
    longest = max(given + asked + 1, 64)
    loop = _loop(bench, model, max_model_len=longest, max_num_seqs=4 if tiny else 1024, **{} if tiny else FP8)
    # What half of the time takes at the published rate: more than fit at once, so that the beginning and the end, when
    # the batch is not full, weigh little.
    count = 6 if tiny else max(8, int(0.5 * PUBLISHED_SECONDS * rate / asked))
    requests = _fixed(count, given, asked)
    drive(loop, [replace(request, output=2) for request in requests[: 2 + LARGE_STEP // given]], bench.budget(30.0))
    run = drive(loop, requests, bench.budget(PUBLISHED_SECONDS))
    figures = {"published": float(rate), "of_published": sum(run.made) / run.seconds / rate} if rate else {}
    figures |= run.figures
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
        yield _row(bench, model, f"{name} of {places}", workload, run)


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
        requests, arrivals = paced_workload(rate, 8, (5, 20), (2, 6)) if tiny else paced_workload(rate, int(rate * 20))
        run = drive(loop, requests, bench.budget(ROW_SECONDS), arrivals)
        yield _row(
            bench, model, f"{rate:g} requests/s", requests, run,
            ttft_p50_ms=1e3 * percentile(run.waits, 0.5), ttft_p99_ms=1e3 * percentile(run.waits, 0.99),
            gap_p50_ms=1e3 * percentile(run.gaps, 0.5), gap_p99_ms=1e3 * percentile(run.gaps, 0.99),
        )  # fmt: skip


def paced_workload(
    rate: float, count: int, given: tuple[int, int] = (100, 1024), asked: tuple[int, int] = (50, 400)
) -> tuple[list[Request], list[float]]:
    """Return requests of lengths by chance, and when each arrives, so many a second on average."""
    dice, arrivals, now = random.Random(0), [], 0.0
    for _ in range(count):
        now += dice.expovariate(rate)
        arrivals.append(now)
    lengths = [(dice.randint(*given), dice.randint(*asked)) for _ in range(count)]
    return [Request(tuple(dice.randrange(9973) for _ in range(n)), output) for n, output in lengths], arrivals


def precision(bench: Bench, tiny: bool) -> Iterator[Row]:
    """One reply, and 64, at every precision: bytes, and the time of a step.

    Shares are of a step of decodes, by the bytes that this precision reads. Errors: `benchmarks.precision`.
    """
    model = "tiny" if tiny else MODEL
    sizes, given, asked = ((1, 2), 12, 6) if tiny else ((1, 64), 128, 128)
    wanted = {name: PRECISIONS[name] for name in ("w8a8", "fp8 and KV cache")} if tiny else PRECISIONS
    for name, settings in wanted.items():
        if bench.budget(ROW_SECONDS) <= 0:
            yield Row(model, f"{name}, batch {sizes[0]}", note="left out: no time")
            continue
        yield from guarded(bench, model, name, _precision(bench, model, name, settings, sizes, given, asked))


def _precision(
    bench: Bench, model: str, name: str, settings: dict[str, Any], sizes: Sequence[int], given: int, asked: int
) -> Iterator[Row]:
    loop = _loop(bench, model, max_num_seqs=max(sizes), **settings)
    assert isinstance(loop.runner, Runner)
    ((_, weights, _),) = loop.runner.parts_of_ranks
    kv = loop.runner.kv_cache[:, 0].nbytes / loop.runner.block_size
    for size in sizes:
        requests = _fixed(size, given, asked)
        drive(loop, requests, bench.budget(ROW_SECONDS))
        run = drive(loop, requests, bench.budget(ROW_SECONDS))
        step = (run.seconds - run.first_all) / (asked - 1)
        read = weights + size * kv * (given + asked / 2)
        row = _row(
            bench, model, f"{name}, batch {size}", requests, run,
            weights_gb=weights / 1e9, kv_bytes_per_token=kv, decode_ms_per_step=1e3 * step,
        )  # fmt: skip
        datasheet = None if bench.datasheet is None else read / bench.datasheet.bandwidth / step
        yield replace(row, share_of_measured=read / bench.measured.bandwidth / step, share_of_datasheet=datasheet)


def invariant(bench: Bench, tiny: bool) -> Iterator[Row]:
    """The shared workload with replies that are the same to the bit whatever else is in the batch, and without."""
    model = "tiny" if tiny else MODEL
    workload = [Request(r.prompt[:9], 4) for r in shared_workload()[:6]] if tiny else shared_workload()
    seconds = []
    for name, wanted in (("shared", False), ("shared, same bits whatever the batch", True)):
        loop = _loop(bench, model, batch_invariant=wanted)
        run = drive(loop, workload, bench.budget(ROW_SECONDS))
        seconds.append(run.seconds / max(1, sum(run.made)))
        yield _row(bench, model, name, workload, run, **({"cost": seconds[1] / seconds[0] - 1} if wanted else {}))
        del loop
        release(bench.device)


def speculation(bench: Bench, tiny: bool) -> Iterator[Row]:
    """Decodes with drafts, from none that holds to all, against the same decodes without any."""
    model = "tiny" if tiny else MODEL
    sizes, given, asked = ((2,), 12, 40) if tiny else ((1, 8, 32), 256, 256)
    vocab = ALL_SHAPES[model]["vocab_size"]
    work = {size: _fixed(size, given, asked) for size in sizes}
    with speculating.known_text(vocab, bench.device) as right_of_1000:
        loop = _loop(bench, model, max_num_seqs=max(sizes))
        alone = {size: _decode(bench, model, loop, requests, "no guesses") for size, requests in work.items()}
        yield from alone.values()
        del loop
        release(bench.device)
        loop = _loop(bench, model, max_num_seqs=max(sizes), **speculating.SETTINGS)
        for size, requests in work.items():
            points = []
            for share in speculating.SHARES:
                speculating.draft(loop, share, vocab, right_of_1000)
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
    return _row(bench, model, f"{name}, batch {len(requests)}", requests, run)


def _loop(bench: Bench, model: str, **settings: Any) -> EngineLoop:
    loop = build_loop(ALL_SHAPES[model], bench.device, prefix_caching=False, **settings)
    warm(loop)
    return loop


def _row(bench: Bench, model: str, workload: str, requests: Sequence[Request], run: Run, **figures: float) -> Row:
    own = run.figures | figures
    return bench.row(model, ALL_SHAPES[model], workload, requests, run.made, run.seconds, **own)


def _fixed(count: int, given: int, asked: int, first: int = 0) -> list[Request]:
    """Return requests of one length, no two of which begin alike."""
    return [
        Request(tuple((number * 7919 + i * 104_729) % 9973 for i in range(given)), asked)
        for number in range(first, first + count)
    ]


if __name__ == "__main__":
    sys.exit(main())
