# All that `make gpu` shows, within ten minutes: the checks, the engine shape by shape beside its peer, where a step's
# time goes, the kernels one by one; and what `make gpu-rows` shows, the longer tables. Each part is a process of its
# own, so that one that dies takes nothing else with it, and all of it is in one JSON and one Markdown file, written
# again whenever there is more: a run that is stopped early keeps what came before, and what ended badly is told of with
# the last thing it said.
#
#   python -m benchmarks.gpu           needs a CUDA device and torch; writes results/gpu-DEVICE-DATE.{json,md}
#   python -m benchmarks.gpu --tiny    tiny shapes on the CPU, to --out FOLDER
#   python -m benchmarks.gpu --seconds 300    for half of the time: the first parts get what they need
#   python -m benchmarks.gpu --rows    the longer tables, to results/gpu-rows-DEVICE-DATE.{json,md}, an hour at most
#   python -m benchmarks.gpu --rows --only 70B    parts whose name has the word, to gpu-rows-70b-DEVICE-DATE

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine, engine_rows
from benchmarks.engine_table import RESULTS, write_whole

ALL_SECONDS = 560.0  # and the start of this process, within ten minutes
ROWS_SECONDS = 3600.0
GRACE = 10.0  # seconds for a part that is out of time to end by itself, again when interrupted, and when killed
EVERY = 15.0  # seconds between two writings of what is there
SAID = "errors.txt"  # in a part's folder
# Seconds that a part may take, by the first word of its name. Together they are more than there are: each needs about
# half of it where nothing goes wrong, and the last ones get what is left.
CAPS = {"checks": 120.0, "engine": 110.0, "predicted": 15.0, "profile": 45.0, "kernels": 90.0, "transformers": 70.0}


@dataclass(frozen=True, slots=True)
class Part:
    """A module to run, and for how long at most."""

    name: str
    module: str
    only: str = ""

    @property
    def longest(self) -> float:
        """Seconds."""
        return CAPS.get(self.name.split()[0], engine_rows.GROUP_SECONDS)


def parts(tiny: bool) -> Iterator[Part]:
    """Yield them in the order of what is most worth knowing where the time is short.

    That the numbers are right, our rows at the shape of every goal, the peer at that shape, then what explains them.
    """
    yield Part("checks", "tests.gpu")
    groups = [Part(group, "benchmarks.engine", group) for group in engine.groups(tiny)]
    ours, peers = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    first, *others = sorted(peers, key=lambda part: engine.SWEPT not in part.name)
    yield from (*ours, first)
    yield Part("predicted", "benchmarks.predicted")  # some seconds of the CPU, to stand beside what was measured
    yield Part("profile", "benchmarks.step_profile")
    yield Part("kernels", "benchmarks.kernels")
    yield from others


def longer_tables(tiny: bool) -> Iterator[Part]:
    """Yield them; any of them fits into ten minutes."""
    yield from (Part(group, "benchmarks.engine_rows", group) for group in engine_rows.groups(tiny))


def main() -> int:
    """Run the parts one after the other, and write what they found. Return 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that all of this runs")
    parser.add_argument("--rows", action="store_true", help="the longer tables instead")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="parts whose name has the word, in a file of that name"
    )
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    chosen = [
        part for part in (longer_tables if arguments.rows else parts)(arguments.tiny) if arguments.only in part.name
    ]
    if not chosen:
        parser.error(f"no part has {arguments.only!r} in its name")
    title = " ".join(["gpu", *["rows"] * arguments.rows, *[arguments.only] * bool(arguments.only)])
    if not arguments.tiny and not torch.cuda.is_available():
        print("SKIPPED: no CUDA device")
        return 0
    seconds = arguments.seconds or (ROWS_SECONDS if arguments.rows else ALL_SECONDS)
    deadline = time.monotonic() + seconds
    device = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name()
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:

        def save() -> Path:
            return _write(title, device, Path(folder), chosen, problems, arguments.out)

        for part in chosen:
            seconds = min(part.longest, deadline - time.monotonic() - 2 * GRACE)
            if problem := run_part(part, Path(folder) / part.name, arguments.tiny, seconds, save):
                problems[part.name] = problem
                print(f"{part.name}: {problem}", flush=True)
            written = save()
    print(f"\nwritten: {written}")
    return int(bool(problems))


def run_part(part: Part, out: Path, tiny: bool, seconds: float, save: Callable[[], object]) -> str:
    """Run a part that writes what it found to ``out``; return what went wrong, if anything did.

    It is told of its time, interrupted some seconds after that, and killed some seconds after that, with whatever it
    has started.
    """
    if seconds <= 0:
        return "left out: no time"
    out.mkdir()
    command = [sys.executable, "-m", part.module, "--out", str(out), "--seconds", str(seconds)]
    command += ["--only", part.only] if part.only else []
    command += ["--tiny"] * tiny
    with (out / SAID).open("w") as file:
        process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stderr=file, start_new_session=True)
    try:
        problem = _wait(process, seconds, save)
    finally:
        _end_all(process)
    said = (out / SAID).read_text(errors="replace").strip()
    print(said[-4000:], file=sys.stderr, flush=True)
    errors = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", said, re.MULTILINE) or said.splitlines()
    return f"{problem}; the last it said: {errors[-1][:300]}" if problem and errors else problem


def _wait(process: subprocess.Popen[bytes], seconds: float, save: Callable[[], object]) -> str:
    ends = time.monotonic() + seconds + GRACE
    while (left := ends - time.monotonic()) > 0:
        try:
            status = process.wait(min(EVERY, left))
            return f"ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            save()
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    return f"out of time after {seconds:.0f} s"


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and its own processes, which would keep the device's memory; what cannot be killed is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)


def _write(
    title: str, device: str, found: Path, chosen: Sequence[Part], problems: dict[str, str], folder: Path
) -> Path:
    now = datetime.now(UTC)
    about = {"device": device, "date": now.isoformat(timespec="seconds"), "python": platform.python_version()}
    about |= {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": _version("triton")}
    facts: dict[str, Any] = {**about, "problems": problems, "parts": {}}
    text = [
        f"# The engine on {device}, {title}, {now:%Y-%m-%d}",
        ", ".join(f"{name} {value}" for name, value in about.items()),
    ]
    text += [f"**PROBLEM** in {part}: {problem}" for part, problem in problems.items()]
    for part in chosen:
        for file in sorted((found / part.name).glob("*.json")):
            facts["parts"][part.name] = json.loads(file.read_text())
        tables = [file.read_text() for file in sorted((found / part.name).glob("*.md"))]
        if part.name in problems and not tables:
            tables = [f"# {part.name}\n\nNothing was measured: {problems[part.name]}"]
        text += [table.strip().replace("# ", "## ", 1) for table in tables]
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{re.sub('[^a-z0-9]+', '-', f'{title} {device}'.lower())}-{now:%Y-%m-%d}"
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
