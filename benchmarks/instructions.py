# What a call costs in instructions, which other programs hardly change, nor the processor's clock: the gateway and the
# bare pass-through under callgrind (of valgrind), one call after another. Timings of one machine move by a factor of
# two from hour to hour, instructions by one in a hundred.
#
#   python -m benchmarks.instructions [--calls 100]
#
# It fails above the ceilings (MOST), so that no row of small features takes back what was won; `make soak` runs it.
#
# Counted is what the server's process executes, the kernel left out. Loops beside the calls (flusher, beats, samples)
# are stopped first: under callgrind a call takes some fifty times as long, and they would count fifty times too often.
# For the same reason the gateway's clocks slow down: they show 2 ms for a call, so that no more calls ask Redis for
# their rates than without callgrind; and uvicorn looks around seldom, in both. The figures are those of calls that
# come one by one, and no time is told.

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.gateway import CASES, run_case
from benchmarks.seldom_ticks import tick_seldom
from benchmarks.stack import Server, run_server, start_gateway, start_upstream
from billing.quotas.rates import RateLimits
from gateway.run import process
from gateway.run.processes import free_port

WARM_UP = 200  # calls of each case before anything is counted: connections, caches, templates of streams
CALL = 0.002  # seconds that a call takes, as the clock shows them while calls are counted
MOST = {"plain": 1.3, "stream, unpaced": 1.37}  # times the pass-through that a call may cost; above it this fails
TOOLS = ("valgrind", "callgrind_control")


def main() -> None:
    """Count, and print a table; or run a module with its loops to be stopped, as the benchmark starts the gateway."""
    if sys.argv[1:2] == ["-m"]:
        run_stoppable(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description="Count the instructions of a call.")
    parser.add_argument("--calls", type=int, default=100)
    calls = parser.parse_args().calls
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        print(f"SKIPPED: there is no {' and no '.join(lacking)} on this machine")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        counted = count_all(stack, folder, calls)
    print("| case | server | instructions a call |\n| --- | --- | --- |")
    for (case, server), instructions in counted.items():
        print(f"| {case} | {server} | {instructions:,} |")
    ratios = {case.name: counted[case.name, "gateway"] / counted[case.name, "pass-through"] for case in CASES[:2]}
    for name, ratio in ratios.items():
        print(f"| {name} | **gateway : pass-through** | **{ratio:.2f} ×** |")
    if dear := [name for name, ratio in ratios.items() if ratio > MOST[name]]:
        raise SystemExit(f"a call costs more than its ceiling, {MOST}: {', '.join(dear)}")


def count_all(stack: ExitStack, folder: Path, calls: int) -> dict[tuple[str, str], int]:
    """Return the instructions of a call by case and server."""
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.environ["PYTHONHASHSEED"] = "0"
    models = {case.model: f"gpt-4o:{case.script}" for case in CASES}
    upstream = stack.enter_context(start_upstream(shared, "--fast", *(f"--model={name}" for name in models.values())))
    counting = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--fair-sched=yes", "--log-file=/dev/null"]
    counting += [f"--callgrind-out-file={folder}/counts.%p", sys.executable]
    port, base = free_port(), upstream.url.removesuffix("/chat/completions")
    command = [*counting, "-m", "benchmarks.seldom_ticks", "benchmarks.pass_through", base, str(port)]
    pid = stack.enter_context(run_server(command, own, port))
    passing = Server("pass-through", f"http://127.0.0.1:{port}/v1/chat/completions", "none", (pid,))
    stoppable = [*counting, "-m", "benchmarks.instructions"]
    gateway = stack.enter_context(start_gateway(upstream, models, folder, own, shared, stoppable))
    counted: dict[tuple[str, str], int] = {}
    for server in (passing, gateway):
        for case in CASES[:2]:
            run_case(case, server, 0, WARM_UP)
        if server is gateway:
            os.kill(server.pids[0], signal.SIGUSR1)
        counted |= count(server, folder, calls)
    return counted


def count(server: Server, folder: Path, calls: int) -> dict[tuple[str, str], int]:
    """Return the instructions of a call by case and server."""
    counted = {}
    control("--instr=on", server)
    for case in CASES[:2]:
        alone = msgspec.structs.replace(case, connections=1)
        run_case(alone, server, 0, 5)
        control("--zero", server)
        run_case(alone, server, 0, calls)
        control(f"--dump={case.model}", server)
        counted[case.name, server.name] = instructions_in(folder, server.pids[0]) // calls
    control("--instr=off", server)
    return counted


def control(what: str, server: Server) -> None:
    """Tell callgrind something. Raises CalledProcessError where it does not hear."""
    subprocess.run(["callgrind_control", what, str(server.pids[0])], check=True, capture_output=True, timeout=120)


def instructions_in(folder: Path, pid: int) -> int:
    """Return how many instructions the newest dump of a process has."""
    newest = max(folder.glob(f"counts.{pid}.*"), key=lambda path: path.stat().st_mtime_ns)
    said = re.findall(r"^(?:totals|summary): (\d+)", newest.read_text(), re.MULTILINE)
    return int(said[-1])


def run_stoppable(words: list[str]) -> None:
    """Run ``words`` as ``python -m`` does; on SIGUSR1 the gateway's loops end and its clock slows down."""
    keep_going, loops = process._keep_going, set[asyncio.Task[None]]()
    waits = RateLimits.__init__.__kwdefaults__
    assert waits is not None
    waits["deadline"] = 60.0  # seconds: under callgrind Redis is slow, not away

    async def until_told(loop: process.Loop) -> None:
        loops.add(task := asyncio.ensure_future(keep_going(loop)))
        await asyncio.wait([task])

    process._keep_going = until_told
    tick_seldom()
    signal.signal(signal.SIGUSR1, lambda *_: stop_loops(loops))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def stop_loops(loops: set[asyncio.Task[None]]) -> None:
    """End what runs beside the calls, and have time pass as if callgrind were not there: a call of 2 ms."""
    for task in loops:
        task.cancel()
    time.time = itertools.count(time.time(), CALL / 4).__next__  # so often a call looks at the clocks
    time.monotonic = itertools.count(time.monotonic(), CALL / 16).__next__


if __name__ == "__main__":
    main()
