# From the start of a process to its first token: importing, weights of random numbers, getting ready, a prompt. What a
# server's process takes beside it (its web framework, a tokenizer, reading real weights) is not in here.
#
#   python -m benchmarks.start_up Qwen3-0.6B cuda      prints the seconds of each part as JSON

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from gpu_backend.engine.torch_import import import_torch

LIMIT = 120.0  # seconds


def main() -> None:
    """Make one token, and say what took how long."""
    begun = time.perf_counter()
    import_torch()
    import torch

    from benchmarks.driving import build_loop, drive
    from benchmarks.roofline import SHAPES, TINY_SHAPES, Request

    imported = time.perf_counter()
    model, device = sys.argv[1:]
    loop = build_loop((SHAPES | TINY_SHAPES)[model], torch.device(device))
    ready = time.perf_counter()
    run = drive(loop, [Request(tuple(range(64)), 1)], LIMIT)
    parts = {"imports_s": imported - begun, "load_and_warm_up_s": ready - imported, "ttft_s": run.waits[0]}
    print(json.dumps(parts))


def start_process(model: str, device: str, limit: float = LIMIT) -> dict[str, float]:
    """Start one on that device, and return its parts and, measured from outside, the seconds to its first token."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.start_up", model, device]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=limit, cwd=Path(__file__).parents[1]
    )
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr[-500:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"first_token_s": time.perf_counter() - begun, **parts}


if __name__ == "__main__":
    main()
