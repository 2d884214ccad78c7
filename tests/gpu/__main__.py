# Every check on the device, one line each: `python -m tests.gpu`. Without a CUDA device it skips and says so.
#
#   python -m tests.gpu --device cpu        the same checks on the CPU
#   python -m tests.gpu --only attention    checks whose name has the word
#   python -m tests.gpu --seed 7            the shapes and numbers of an earlier run
#   python -m tests.gpu --out FOLDER        the lines in checks.md and checks.json, too, as they come
#   python -m tests.gpu --seconds 60        no check that would begin later
#   python -m tests.gpu --processes 1       one after the other, in this process; on a card there are several

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.engine_table import write_whole
from tests.gpu import adjustments, generation, operations, sampling
from tests.gpu.check import Check, Outcome
from tests.gpu.processes import print_share, run_all, run_beside

MOST_PROCESSES = 8
BYTES_EACH = 12 << 30  # of the device's memory


def main() -> int:
    """Run the checks; return 0 if all pass or there is no device for them, else 1."""
    arguments = _arguments()
    if arguments.tiny:
        arguments.device = "cpu"
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    deadline = time.monotonic() + arguments.seconds
    wanted = _wanted(device, arguments)
    if arguments.share:
        print_share(wanted, arguments.share, device, arguments.seed, deadline)
        return 0
    print(f"{_name(device)}, torch {torch.__version__}, Python {platform.python_version()}, --seed {arguments.seed}")
    outcomes = _run(wanted, device, arguments, deadline)
    passed, left_out = (sum(some) for some in ((o.passed for o in outcomes), (o.left_out for o in outcomes)))
    failed = [outcome for outcome in outcomes if not outcome.passed and not outcome.left_out]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{passed} passed, {len(failed)} failed, {left_out} left out for want of time, in {seconds:.1f} s")
    for outcome in failed:
        print(
            f"failed: {outcome.name}; again with: python -m tests.gpu --device {arguments.device} --seed "
            f"{arguments.seed}"
        )
    return 1 if failed or not passed else 0


def _checks(device: torch.device) -> tuple[Check, ...]:
    """Return all checks. On the CPU the kernels are interpreted, which Triton must know before it is imported."""
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    from tests.gpu import delta, experts, kernels, latent, lora

    checks = (
        *operations.CHECKS,
        *sampling.CHECKS,
        *adjustments.CHECKS,
        *kernels.CHECKS,
        *experts.CHECKS,
        *latent.CHECKS,
        *delta.CHECKS,
        *lora.CHECKS,
        *generation.CHECKS,
    )
    if device.type == "cuda":
        return checks
    from tests.gpu import device_path  # where there is no card, as if there were one

    return (*checks, *device_path.CHECKS)


def _wanted(device: torch.device, arguments: argparse.Namespace) -> list[tuple[Check, torch.dtype]]:
    checks = [check for check in _checks(device) if arguments.only in check.name]
    wanted = [(check, dtype) for check in checks for dtype in check.dtypes]
    wanted.sort(key=lambda it: it[1] != torch.bfloat16 and len(it[0].dtypes) > 1)  # what is served comes first
    return [(check, dtype) for check, dtype in wanted if not (arguments.tiny and dtype in check.long)]


def _run(
    wanted: list[tuple[Check, torch.dtype]], device: torch.device, arguments: argparse.Namespace, deadline: float
) -> list[Outcome]:
    outcomes: list[Outcome] = []

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
        if arguments.out is not None:  # as they come: who stops this early has those before
            _write(arguments.out, arguments.seed, outcomes)

    count = min(arguments.processes or _most_processes(device), len(wanted))
    if count > 1:
        command = [sys.executable, "-m", "tests.gpu", "--device", device.type, "--seed", str(arguments.seed)]
        command += ["--only", arguments.only, *["--tiny"] * arguments.tiny]
        run_beside(wanted, count, command, deadline, note)
    else:
        run_all(wanted, device, arguments.seed, deadline, note)
    return outcomes


def _most_processes(device: torch.device) -> int:
    """Return how many a card has memory for, and this machine cores to compile on."""
    if device.type != "cuda":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(MOST_PROCESSES, os.cpu_count() or 1, memory // BYTES_EACH))


def _write(folder: Path, seed: int, outcomes: list[Outcome]) -> None:
    lines = [f"# Checks, --seed {seed}", "", *(f"    {outcome.line()}" for outcome in outcomes)]
    write_whole(folder / "checks.md", "\n".join(lines) + "\n")
    facts = {"seed": seed, "outcomes": [asdict(outcome) for outcome in outcomes]}
    write_whole(folder / "checks.json", json.dumps(facts, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Check the engine on this device.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", metavar="WORD", help="run the checks whose name has the word")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all shapes and numbers; default: fresh")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no check begins later")
    parser.add_argument("--processes", type=int, metavar="COUNT", help="that run checks at once")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # this is one of them
    parser.add_argument("--tiny", action="store_true", help="on the CPU, without what takes long there")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="one that exists, for the outcomes")
    return parser.parse_args()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


if __name__ == "__main__":
    sys.exit(main())
