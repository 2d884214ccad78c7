# Where a Python program's CPU time goes: its stack at every two milliseconds of CPU, by the kernel's profiling timer.
# Unlike cProfile it slows nothing down and is not confused by greenlets.
#
#   python -m benchmarks.sampling OUT -m gateway.cli serve …      # OUT: collapsed stacks, for any flame graph tool
#   python -m benchmarks.sampling OUT                             # shows them as two lists

from __future__ import annotations

import atexit
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY = 0.002  # seconds of CPU
WRITE_EVERY = 500  # samples: a program may end without a chance to say goodbye
PACKAGES = re.compile(r".*/(?:site-packages|python3\.\d+)/")


def record(out: Path) -> None:
    """Take samples from now to the end of the process."""
    stacks: Counter[str] = Counter()

    def take(number: int, frame: FrameType | None) -> None:
        names: list[str] = []
        while frame is not None:
            code = frame.f_code
            names.append(f"{PACKAGES.sub('', code.co_filename)}:{code.co_qualname}")
            frame = frame.f_back
        stacks[";".join(reversed(names))] += 1
        if stacks.total() % WRITE_EVERY == 0:
            write()

    def write() -> None:
        out.write_text("".join(f"{stack} {count}\n" for stack, count in list(stacks.items())))  # samples come meanwhile

    signal.signal(signal.SIGPROF, take)
    signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
    atexit.register(write)


def show(out: Path, below: str = "") -> None:
    """Print which functions the samples were in, alone and with all that they called; only stacks through ``below``."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in out.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        names = stack.split(";")
        if "serving.py:serve" not in stack or "lifespan" in stack or "_find_and_load" in stack or below not in stack:
            continue
        own[names[-1]] += int(count)
        whole.update(dict.fromkeys(names, int(count)))
    total = sum(own.values())
    for title, counts in (("with all they call", whole), ("alone", own)):
        print(f"{title}: {total} samples")
        for name, count in counts.most_common(60):
            print(f"{count / total:7.1%} {name.replace(str(Path.cwd()) + '/', '')}")


def main() -> None:
    """Run the module under the sampler, or show what an earlier run wrote."""
    out = Path(sys.argv[1])
    if len(sys.argv) == 2:
        show(out)
        return
    assert sys.argv[2] == "-m"
    module = sys.argv[3]
    sys.argv = sys.argv[3:]
    record(out)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
