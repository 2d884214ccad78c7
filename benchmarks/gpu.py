# All that `make gpu` shows, within ten minutes: the checks, the kernels one by one, and the engine; each in a process
# of its own, so that one that dies takes nothing else with it, and all of it in one JSON and one Markdown file.
#
#   python -m benchmarks.gpu           needs a CUDA device and torch; writes results/gpu-DEVICE-DATE.{json,md}
#   python -m benchmarks.gpu --tiny    tiny shapes on the CPU, to --out FOLDER

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
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_table import RESULTS

ALL_SECONDS = 585.0
PARTS = {  # modules, and the seconds that each may take
    "checks": ("tests.gpu", 180.0),
    "kernels": ("benchmarks.kernels", 90.0),
    "engine": ("benchmarks.engine", ALL_SECONDS),
}
GRACE = 15.0  # seconds for a part that is out of time to write what it has


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
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, (module, longest) in PARTS.items():
            seconds = min(longest, deadline - time.monotonic() - GRACE)
            if problem := run_part(module, Path(folder) / part, arguments.tiny, seconds):
                problems[part] = problem
                print(f"{part}: {problem}", flush=True)
        device = "tiny on the CPU" if arguments.tiny else torch.cuda.get_device_name()
        _write(device, Path(folder), problems, arguments.out)
    return int(bool(problems))


def run_part(module: str, out: Path, tiny: bool, seconds: float) -> str:
    """Run a module that writes what it found to ``out``; return what went wrong, if anything did."""
    if seconds <= 0:
        return "left out: no time"
    out.mkdir()
    command = [sys.executable, "-m", module, "--out", str(out)]
    if module == "benchmarks.engine":
        command += ["--seconds", str(seconds)]
    command += ["--tiny"] * tiny
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        status = process.wait(seconds + GRACE * (module == "benchmarks.engine"))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"out of time after {seconds:.0f} s"
    return f"ended with status {status}" if status else ""


def _write(device: str, found: Path, problems: dict[str, str], folder: Path) -> None:
    now = datetime.now(UTC)
    about = {"device": device, "date": now.isoformat(timespec="seconds"), "python": platform.python_version()}
    about |= {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": _version("triton")}
    facts: dict[str, Any] = {**about, "problems": problems, "parts": {}}
    text = [f"# The engine on {device}, {now:%Y-%m-%d}", ", ".join(f"{name} {value}" for name, value in about.items())]
    text += [f"{part}: {problem}" for part, problem in problems.items()]
    for part in PARTS:
        for file in sorted(found.glob(f"{part}/*.json")):
            facts["parts"][part] = json.loads(file.read_text())
        for file in sorted(found.glob(f"{part}/*.md")):
            text.append(file.read_text().strip().replace("# ", "## ", 1))
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"gpu-{re.sub('[^a-z0-9]+', '-', device.lower())}-{now:%Y-%m-%d}"
    stem.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    stem.with_suffix(".md").write_text("\n\n".join(text) + "\n")
    print(f"\nwritten: {stem.with_suffix('.md')}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
