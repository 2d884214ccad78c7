# What a call adds in the gateway's process while one watches GET /admin/live, in instructions (callgrind, of valgrind):
# that it is noted, told through Redis, read again and encoded for a watcher. Other programs do not change the figures;
# trips to Redis, four a second however many calls there are, are not among them.
#
#   python -m benchmarks.watched [--calls 2000]

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.instructions import control, instructions_in
from benchmarks.ledger import make_calls
from benchmarks.stack import Server
from gateway.core.clock import Clock
from gateway.telemetry.live_events import LiveEvents, decoded, encoded

TOGETHER = 25  # calls that are told in one message: a hundred a second of one process
WATCHERS = (0, 1, 10)


def main() -> None:
    """Count, and print a table; or do so many calls, as the benchmark does under callgrind."""
    parser = argparse.ArgumentParser(description="Count what a call adds for those who watch.")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--do", type=int, metavar="CALLS", help="do so many for each number of watchers that is said")
    options = parser.parse_args()
    if options.do is not None:
        follow(TOGETHER, 1)  # what is made once,
        gc.collect()
        gc.freeze()  # and not looked through again, as in a gateway
        print("ready", flush=True)
        for said in sys.stdin:
            follow(options.do, int(said))
            print("done", flush=True)
        return
    if shutil.which("valgrind") is None:
        print("SKIPPED: there is no valgrind on this machine")
        return
    print("| while it is watched by | instructions a call adds |\n| --- | --- |")
    for watchers, instructions in counted(options.calls).items():
        print(f"| {watchers or 'none here, one at another process'} | {instructions:,} |")


def counted(calls: int) -> dict[int, int]:
    """Return the instructions of a call by how many watch."""
    with tempfile.TemporaryDirectory(prefix="tollgate-bench-") as folder:
        out, found = Path(folder) / "counts", {}
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}.%p"]
        words = [sys.executable, "-m", "benchmarks.watched", "--do", str(calls)]
        command = [*callgrind, "--log-file=/dev/null", *words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            server = Server("watched", "", "", (process.pid,))
            process.stdout.readline()  # it has imported all
            control("--instr=on", server)
            for watchers in WATCHERS:
                control("--zero", server)
                print(watchers, file=process.stdin, flush=True)
                process.stdout.readline()
                control("--dump", server)
                found[watchers] = instructions_in(Path(folder), process.pid) // calls
            process.stdin.close()
        return found


def follow(calls: int, watchers: int) -> None:
    """Note calls and tell them, to so many who watch."""
    unused: Any = SimpleNamespace(on_record=None, on_kept=None)
    live = LiveEvents(unused, unused, unused, Clock())
    watching = [live.watch(None, ("call",)) for _ in range(watchers)]
    live._follow(is_watched=True)
    [record] = make_calls(1)
    for _ in range(calls // TOGETHER):
        for _ in range(TOGETHER):
            unused.on_record(record)
        message = encoded(*live._take_gathered())
        if watching:
            live._tell_watchers(decoded(message))
            for watcher in watching:
                watcher.take()


if __name__ == "__main__":
    main()
