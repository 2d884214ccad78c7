# Where the device's time goes in a step of decodes, kernel by kernel: what to look at first where a goal is missed.
#
#   python -m benchmarks.step_profile           needs a CUDA device; writes results/profile-DEVICE-DATE.{json,md}
#   python -m benchmarks.step_profile --tiny    a tiny shape on the CPU, to --out FOLDER
#   python -m benchmarks.step_profile --seconds 60    no batch that would begin later

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.driving import build_loop, drive
from benchmarks.engine import warm
from benchmarks.engine_table import RESULTS, write_whole
from benchmarks.roofline import SHAPES, TINY_SHAPES, Request
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.step.messages import Abort, Generate
from gpu_backend.step.sampling_params import SamplingParams

MODELS = ("Qwen3-0.6B", "Llama-3.1-8B")
BATCHES = (1, 64, 256)
STEPS = 10
LISTED = 14  # kernels of a batch


@dataclass(frozen=True, slots=True)
class Share:
    """What one kernel takes of a step of decodes; times in microseconds."""

    model: str
    batch: int
    kernel: str
    launches: float  # a step
    microseconds: float  # a step
    share: float  # of the step, the gaps between kernels included


def main() -> int:
    """Profile every batch; print and write what came, as it comes. Return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_profile")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU, to see that all of this runs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no batch begins later")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cpu" if arguments.tiny else "cuda")
    name = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name(device)
    shares: list[Share] = []
    failed = False
    for model, config in TINY_SHAPES.items() if arguments.tiny else [(model, SHAPES[model]) for model in MODELS]:
        try:
            for found in _profile_shape(model, config, device, arguments.tiny, deadline):
                shares += found
                print("\n".join(map(_line, found)), flush=True)
                _write(name, shares, arguments.out)
        except Exception:
            failed = True
            traceback.print_exc()
    return int(failed or not shares)


def _profile_shape(
    model: str, config: dict[str, Any], device: torch.device, tiny: bool, deadline: float
) -> Iterator[list[Share]]:
    loop = build_loop(config, device, prefix_caching=False)
    warm(loop)
    for batch in (1, 2) if tiny else BATCHES:
        if time.monotonic() > deadline:
            return
        given, room = (9, 40) if tiny else (512, 120)
        requests = [Request(tuple((131 * i + j) % 500 for j in range(given)), 4) for i in range(batch)]
        drive(loop, requests, 20.0)
        yield _profile_batch(loop, model, requests, room, device)


def _profile_batch(
    loop: EngineLoop, model: str, requests: list[Request], room: int, device: torch.device
) -> list[Share]:
    for number, request in enumerate(requests):
        wish = SamplingParams(room, temperature=0.6, ignore_eos=True, seed=number)
        loop.handle(Generate(str(number), request.prompt, wish))
    while any(sequence.num_generated < 2 for sequence in loop.scheduler.running) or loop.scheduler.num_waiting:
        loop.step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            loop.step()
        if on_gpu:
            torch.cuda.synchronize(device)
    whole = time.perf_counter() - started
    for number in range(len(requests)):
        loop.handle(Abort(str(number)))
    while loop.has_work():
        loop.step()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in profiler.events():
        span = event.time_range.start, event.time_range.end
        if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
            spans[event.name].append(span)
    every = [span for some in spans.values() for span in some]
    if on_gpu and every:  # what the host took to begin and to end is no part of it
        whole = (max(end for _, end in every) - min(start for start, _ in every)) / 1e6
    took = {kernel: sum(end - start for start, end in some) for kernel, some in spans.items()}
    shares = [
        Share(
            model, len(requests), re.sub(r"\s*[<(].*", "", kernel)[:70] or kernel[:70], len(spans[kernel]) / STEPS,
            micros / STEPS, micros / 1e6 / whole,
        )
        for kernel, micros in sorted(took.items(), key=lambda item: -item[1])[:LISTED]
    ]  # fmt: skip
    step = 1e6 * whole / STEPS
    return [Share(model, len(requests), "a step", 1.0, step, 1.0), *shares]


def _line(share: Share) -> str:
    return (
        f"| {share.model} | {share.batch} | {share.kernel} | {share.launches:.1f} | {share.microseconds:,.1f} "
        f"| {share.share:.1%} |"
    )


def _write(name: str, shares: list[Share], folder: Path) -> None:
    now = datetime.now(UTC)
    table = [
        f"# A step of decodes on {name}, {now:%Y-%m-%d}",
        f"\ntorch {torch.__version__}, bf16, contexts of about 520 tokens, {STEPS} steps, overlapping.\n",
        "| shape | batch | kernel | launches a step | µs a step | of the step |",
        "| --- | --: | --- | --: | --: | --: |",
        *map(_line, shares),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"profile-{re.sub('[^a-z0-9]+', '-', name.lower())}-{now:%Y-%m-%d}"
    write_whole(stem.with_suffix(".md"), "\n".join(table) + "\n")
    facts = {"device": name, "date": now.isoformat(timespec="seconds"), "shares": [asdict(share) for share in shares]}
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
