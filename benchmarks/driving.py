# Drives an engine loop, no HTTP in between, and notes when each token came.

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.roofline import Request
from gpu_backend.engine.loop import EngineLoop
from gpu_backend.execution.runner import Runner
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import engine_config
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import Abort, Event, FinishReason, Generate, NewTokens
from gpu_backend.step.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of a workload. All times are seconds since its beginning."""

    arrivals: tuple[float, ...]  # of each request
    tokens: list[list[float]] = field(default_factory=list)  # when each token of each reply came
    seconds: float = 0.0
    busy: float = 0.0  # share of the time in which the device computed
    kernels: int = 0  # that were compiled or loaded meanwhile

    @property
    def figures(self) -> dict[str, float]:
        """What every row tells: how busy the device was, and whether kernels were compiled within its time."""
        compiled = {"kernels_compiled_meanwhile": float(self.kernels)} if self.kernels else {}
        return {"gpu_busy": self.busy} | compiled

    @property
    def made(self) -> list[int]:
        """Tokens of each reply."""
        return [len(times) for times in self.tokens]

    @property
    def first_all(self) -> float:
        """When every reply had its first token; the whole time if one has none."""
        return max((times[0] if times else self.seconds) for times in self.tokens)

    @property
    def waits(self) -> list[float]:
        """Seconds from each arrival to its first token."""
        return [times[0] - arrival for times, arrival in zip(self.tokens, self.arrivals, strict=True) if times]

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring tokens of all replies."""
        return [b - a for times in self.tokens for a, b in pairwise(times)]


def build_loop(config: dict[str, Any], device: torch.device, **settings: Any) -> EngineLoop:
    """Build an engine with random weights of that shape; ``settings`` go to ``EngineConfig``."""
    defaults = {"max_model_len": 2048, "max_num_batched_tokens": 8192, "load_format": "dummy", "cuda_graphs": True}
    defaults |= {"max_waiting": 1 << 20}  # all requests of a workload come at once
    if device.type == "cpu":
        defaults |= {"max_model_len": 256, "max_num_seqs": 8}
    settings = defaults | settings
    gc.collect()
    gc.freeze()  # modules stay, as in a server's process: looking at them again takes milliseconds of some step
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = load_model_config(Path(folder))
        engine = engine_config(folder, device=device.type, **settings)
        runner = Runner(engine, model)
        runner.warm_up()
        return EngineLoop(engine, runner, runner.num_blocks, Limits(runner.max_model_len, model.vocab_size))


def drive(
    loop: EngineLoop, requests: Sequence[Request], budget: float, arrivals: Sequence[float] = (), at_once: int = 0
) -> Run:
    """Ask for all replies and return what came within ``budget`` seconds; what is left is aborted.

    A request is handed over at its time in ``arrivals``; without, all at the beginning, or, with ``at_once``, so many
    together when those before have all ended: batches as they were before they could be continuous.
    """
    run = Run(tuple(arrivals) or (0.0,) * len(requests), [[] for _ in requests])
    busy, next_up, open_replies = loop.load().gpu_busy_seconds, 0, 0
    kernels = len(compiled_kernels())
    started = time.perf_counter()

    def is_due(now: float) -> bool:
        if next_up == len(requests):
            return False
        return not open_replies or next_up % at_once > 0 if at_once else run.arrivals[next_up] <= now

    try:
        while (now := time.perf_counter() - started) < budget:
            while is_due(now):
                refused = loop.handle(_command(next_up, requests[next_up], loop))
                assert not refused, f"a request was refused: {refused}"
                next_up, open_replies = next_up + 1, open_replies + 1
            if not loop.has_work():
                if next_up == len(requests):
                    break
                time.sleep(max(0.0, min(0.001, run.arrivals[next_up] - now)))
                continue
            events = loop.step()
            now = time.perf_counter() - started
            open_replies -= sum(_note(event, run, now) for event in events)
        seconds = time.perf_counter() - started
        busy = loop.load().gpu_busy_seconds - busy
    finally:  # whatever happened, the loop is empty for the next run
        for number in range(next_up):
            loop.handle(Abort(str(number)))
        while loop.has_work():
            loop.step()
    return Run(run.arrivals, run.tokens, seconds, busy / seconds, len(compiled_kernels()) - kernels)


@cache
def compiled_kernels() -> list[str]:
    """Return a list that grows by the name of each kernel which Triton compiles, or loads, from the first call on."""
    names: list[str] = []
    if torch.cuda.is_available():
        from triton import knobs

        def note(*, repr: str, **_: Any) -> None:
            names.append(repr)

        knobs.runtime.jit_post_compile_hook = note
    return names


def _command(number: int, request: Request, loop: EngineLoop) -> Generate:
    vocab = loop._limits.vocab_size
    sampling = SamplingParams(request.output, temperature=0.6, ignore_eos=True, seed=number)
    return Generate(str(number), tuple(token % vocab for token in request.prompt), sampling)


def _note(event: Event, run: Run, now: float) -> bool:
    """Note an event's tokens; return whether it ends a reply."""
    if not isinstance(event, NewTokens):
        return False
    if event.finish_reason is FinishReason.ERROR:
        raise RuntimeError(f"a request failed: {event.error}")
    run.tokens[int(event.request_id)] += [now] * len(event.token_ids)
    return event.finish_reason is not None


def release(device: torch.device) -> None:
    """Give the device's memory back after a loop is deleted."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` of all are at most; 0 if there are none."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0
