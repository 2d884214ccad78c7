# All that `make gpu` shows, within ten minutes: the checks, the engine shape by shape, the kernels one by one, and the
# peer; each in a process of its own, so that one that dies takes nothing else with it, and all of it in one JSON and
# one Markdown file, written again whenever there is more: whoever stops this early has what came before.
#
#   python -m benchmarks.gpu           needs a CUDA device and torch; writes results/gpu-DEVICE-DATE.{json,md}
#   python -m benchmarks.gpu --tiny    tiny shapes on the CPU, to --out FOLDER
#   python -m benchmarks.gpu --seconds 300    for half of the time: the first parts get what they need

from __future__ import annotations

import argparse
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import groups
from benchmarks.engine_table import RESULTS, write_whole

ALL_SECONDS = 570.0  # and the start of this process, within ten minutes
GRACE = 10.0  # seconds for a part that is out of time to end by itself, and again for one that is interrupted
EVERY = 15.0  # seconds between two writings of what is there
# Seconds that a part may take, by the first word of its name; the last ones share what is left.
CAPS = {"checks": 150.0, "engine": 130.0, "kernels": 90.0, "transformers": 70.0}


@dataclass(frozen=True, slots=True)
class Part:
    """A module to run, and for how long at most."""

    name: str
    module: str
    only: str = ""

    @property
    def longest(self) -> float:
        """Seconds."""
        return CAPS[self.name.split()[0]]


def parts(tiny: bool) -> Iterator[Part]:
    """Yield them in the order of what is most worth knowing where the time is short."""
    yield Part("checks", "tests.gpu")
    rows = [Part(group, "benchmarks.engine", group) for group in groups(tiny)]
    yield from (part for part in rows if not part.name.startswith("transformers"))
    yield Part("kernels", "benchmarks.kernels")
    yield from (part for part in rows if part.name.startswith("transformers"))


def main() -> int:
    """Run the parts one after the other, and write what they found. Return 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that all of this runs")
    parser.add_argument("--seconds", type=float, default=ALL_SECONDS, help="for all parts together")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    deadline = time.monotonic() + arguments.seconds
    device = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name()
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:

        def save() -> Path:
            return _write(device, Path(folder), arguments.tiny, problems, arguments.out)

        for part in parts(arguments.tiny):
            seconds = min(part.longest, deadline - time.monotonic() - 2 * GRACE)
            if problem := run_part(part, Path(folder) / part.name, arguments.tiny, seconds, save):
                problems[part.name] = problem
                print(f"{part.name}: {problem}", flush=True)
            written = save()
    print(f"\nwritten: {written}")
    return int(bool(problems))


def run_part(part: Part, out: Path, tiny: bool, seconds: float, save: Callable[[], object]) -> str:
    """Run a part that writes what it found to ``out``; return what went wrong, if anything did.

    It is told of its time, interrupted some seconds after that, and killed some seconds after that.
    """
    if seconds <= 0:
        return "left out: no time"
    out.mkdir()
    command = [sys.executable, "-m", part.module, "--out", str(out), "--seconds", str(seconds)]
    command += ["--only", part.only] if part.only else []
    command += ["--tiny"] * tiny
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    ends = time.monotonic() + seconds + GRACE
    while (left := ends - time.monotonic()) > 0:
        try:
            status = process.wait(min(EVERY, left))
            return f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            save()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return f"out of time after {seconds:.0f} s"


def _write(device: str, found: Path, tiny: bool, problems: dict[str, str], folder: Path) -> Path:
    now = datetime.now(UTC)
    about = {"device": device, "date": now.isoformat(timespec="seconds"), "python": platform.python_version()}
    about |= {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": _version("triton")}
    facts: dict[str, Any] = {**about, "problems": problems, "parts": {}}
    text = [f"# The engine on {device}, {now:%Y-%m-%d}", ", ".join(f"{name} {value}" for name, value in about.items())]
    text += [f"{part}: {problem}" for part, problem in problems.items()]
    for part in parts(tiny):
        for file in sorted((found / part.name).glob("*.json")):
            facts["parts"][part.name] = json.loads(file.read_text())
        for file in sorted((found / part.name).glob("*.md")):
            text.append(file.read_text().strip().replace("# ", "## ", 1))
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}-{now:%Y-%m-%d}"
    write_whole(stem.with_suffix(".json"), json.dumps(facts, indent=1) + "\n")
    write_whole(stem.with_suffix(".md"), "\n\n".join(text) + "\n")
    return stem.with_suffix(".md")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
