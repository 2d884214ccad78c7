# Checks in several processes at once: nearly all of their time on a card goes into compiling kernels. A kernel that
# breaks its process or the device for it fails its own check; the next process goes on behind it.

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock

import torch

from tests.gpu.check import Check, Outcome, name_of, outcome_of

Wanted = Sequence[tuple[Check, torch.dtype]]
Note = Callable[[Outcome], None]


def run_all(wanted: Wanted, device: torch.device, seed: int, deadline: float, note: Note) -> None:
    """Run checks one after the other; what would begin after ``deadline``, by ``time.monotonic``, is left out.

    Ends early where a check has left a device on which nothing can be computed any more.
    """
    for check, dtype in wanted:
        if time.monotonic() >= deadline:
            note(Outcome(name_of(check, dtype), False, "no time", 0.0, left_out=True))
            continue
        note(outcome_of(check, dtype, device, seed))
        if not is_usable(device):
            return


def run_beside(wanted: Wanted, count: int, command: Sequence[str], deadline: float, note: Note) -> None:
    """Run them in ``count`` processes of ``command``, which is told its share, and prints what ``print_share`` does."""

    lock = Lock()

    def note_alone(outcome: Outcome) -> None:
        with lock:
            note(outcome)

    def run_share(index: int) -> None:
        mine, done = wanted[index::count], 0
        while done < len(mine):
            left = deadline - time.monotonic()
            options = ["--share", f"{index} {count} {done}", "--seconds", str(left)]
            with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    note_alone(Outcome(**json.loads(line)))
                    done += 1
            if process.returncode and done < len(mine):
                said = f"its process ended with status {process.returncode}"
                note_alone(Outcome(name_of(*mine[done]), False, said, 0.0))
                done += 1

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(run_share, range(count)))


def print_share(wanted: Wanted, share: str, device: torch.device, seed: int, deadline: float) -> None:
    """Be such a process: run the checks of a share ("which of how many, but for the first so many")."""
    index, count, done = map(int, share.split())

    def show(outcome: Outcome) -> None:
        print(json.dumps(asdict(outcome)), flush=True)

    run_all(wanted[index::count][done:], device, seed, deadline, show)


def is_usable(device: torch.device) -> bool:
    """Whether something can be computed on a device: an illegal access makes all that follows in its process fail."""
    try:
        return torch.ones(1, device=device).item() == 1
    except RuntimeError as error:
        print(f"{device} can no longer be used: {error}", file=sys.stderr, flush=True)
        return False


ROOT = Path(__file__).parents[2]
