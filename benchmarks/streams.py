# What a thousand streams at once cost one gateway process: how much later each first token comes, and how much memory
# and CPU a stream takes, beside a bare pass-through on the same server and client libraries, in the same run.
#
#   python -m benchmarks.streams [--streams 1000] [--pace 0.2] [--rounds 1] [--quick]
#
# Every stream has a token every 200 ms, as from a model that answers many at once; ten thousand, each of two
# descriptors, have one every 4 s (--pace 4), so that one core can carry them. Streams begin at fixed moments, so many a
# second that the wanted number runs at a time; what begins before that counts for nothing. Cores are shared out as in
# benchmarks.gateway; memory is what the process grew by since it had answered a few streams.

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.gateway import QUESTION
from benchmarks.gateway_report import RESULTS, cpu_name, output_of
from benchmarks.stack import Server, rows_written, start_gateway, start_pass_through, start_upstream


class Size(Struct, frozen=True):
    """How long a stream is, and for how many seconds beginning streams count."""

    model: str
    tokens: int
    pace: float  # seconds a token
    measured: float

    @property
    def lasts(self) -> float:
        """Seconds that a stream takes."""
        return self.pace * self.tokens


WARM = "bench-warm"
MODELS = {WARM: "gpt-4o:tokens=16"}


class Measured(Struct, frozen=True, kw_only=True):
    """One server, one round. Times are milliseconds; CPU and memory are those of the server's own process."""

    server: str
    streams: int  # that were counted
    first: dict[str, float]  # until the first token
    total: dict[str, float]
    cpu_share: float  # of its core, while all streams ran
    cpu_ms: float  # a stream
    memory_kib: float  # a stream

    def line(self) -> str:
        """Return it as one line of the table."""
        return (
            f"| {self.server} | {self.first['p50']:.1f} | {self.first['p90']:.1f} | {self.first['p99']:.1f} | "
            f"{self.total['p50'] / 1000:.2f} | {self.cpu_share:.0%} | {self.cpu_ms:.1f} | {self.memory_kib:.0f} |"
        )


def main() -> None:
    """Measure, print the table and write it to benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measure what many streams at once cost.")
    parser.add_argument("--streams", type=int, default=1000, help="how many run at a time")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds a token")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fifty short streams: does it run at all? Writes nothing")
    said = parser.parse_args()
    lasting = Size("bench-many", max(8, round(10 / said.pace)), said.pace, 10.0)
    streams, size = (50, Size("bench-quick", 5, 0.2, 2.0)) if said.quick else (said.streams, lasting)
    MODELS[size.model] = f"gpt-4o:tokens={size.tokens},pace={size.pace}"
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.sched_setaffinity(0, {shared})  # what is started from here, the generator above all, stays there
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        upstream = stack.enter_context(start_upstream(shared))
        passing = stack.enter_context(start_pass_through(upstream, own))
        gateway = stack.enter_context(start_gateway(upstream, MODELS, folder, own, shared))
        for server in (passing, gateway):
            outcome_of(run_load(server, WARM, min(streams, 200), rate=20.0, seconds=1.0), server)
        measured = [measure(server, streams, size) for _ in range(said.rounds) for server in (passing, gateway)]
        booked = rows_written(gateway)
    text = report(measured, streams, size, booked)
    print(text)
    if not said.quick:
        (RESULTS / f"streams-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


def measure(server: Server, streams: int, size: Size) -> Measured:
    """Let ``streams`` run at a time at one server, and return what they cost."""
    memory, cpu, began = server.memory(), server.cpu(), time.monotonic()
    until = size.lasts + size.measured
    load = run_load(server, size.model, streams, streams / size.lasts, until, warm_up=size.lasts)
    time.sleep(max(0.0, began + size.lasts + 1 - time.monotonic()))  # from here on, all of them run
    before, since = server.cpu(), time.monotonic()
    grown: list[float] = []
    while time.monotonic() < began + until:
        grown.append(server.memory() - memory)
        time.sleep(1.0)
    share = (server.cpu() - before) / (time.monotonic() - since)
    outcome = outcome_of(load, server)
    return Measured(
        server=server.name,
        streams=round(outcome["requests"] * size.measured / until),
        first=outcome["first"],
        total=outcome["total"],
        cpu_share=share,
        cpu_ms=(server.cpu() - cpu) * 1000 / outcome["requests"],
        memory_kib=max(grown) * 1024 / streams,
    )


def run_load(
    server: Server, model: str, streams: int, rate: float, seconds: float, warm_up: float = 0.0
) -> subprocess.Popen[str]:
    """Begin to send ``rate`` streams a second for so many seconds; ``streams`` run at a time."""
    name = model if server.takes_our_names else MODELS[model]
    body = {"model": name, "messages": QUESTION, "max_tokens": 256, "stream": True}
    plan = {
        "url": server.url,
        "key": server.key,
        "body": body,
        "connections": streams + streams // 10,
        "requests": round(rate * seconds),
        "rate": rate,
        "warm_up": warm_up,
        "first": "token",
        "seconds": 120.0,
    }
    command = [sys.executable, "-m", "benchmarks.load", msgspec.json.encode(plan).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome_of(load: subprocess.Popen[str], server: Server) -> dict[str, dict[str, float]]:
    """Wait for a load's end and return what it says; a request that failed ends the benchmark."""
    told, complaint = load.communicate(timeout=180)
    if load.returncode:
        raise SystemExit(f"the load generator failed: {complaint}")
    outcome = json.loads(told)
    if outcome["failures"]:
        failed = f"{outcome['failures']} of {outcome['requests']} streams failed: {outcome['failure']}"
        raise SystemExit(f"{server.name}: {failed}")
    return outcome  # type: ignore[no-any-return]


def report(measured: list[Measured], streams: int, size: Size, booked: int) -> str:
    """Return the table and how it was made."""
    ours, theirs = (
        {
            name: statistics.median(one.first[name] for one in measured if one.server == server)
            for name in ("p50", "p99")
        }
        for server in ("gateway", "pass-through")
    )
    added = {name: ours[name] - theirs[name] for name in ours}
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    command = f"`python -m benchmarks.streams {' '.join(sys.argv[1:])}` at {commit}"
    pace, rate, load = (
        f"{size.pace * 1000:.0f} ms",
        f"{streams / size.lasts:.0f}",
        [round(load, 2) for load in os.getloadavg()],
    )
    return "\n".join(
        [
            f"# {streams:,} streams at once, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{command}, one process each on a core of {cpu_name()}; upstream, generator, Postgres and Valkey share "
            f"another; load average {load}. {size.tokens} tokens a stream, one every {pace}, {rate} streams begin a "
            f"second; {measured[0].streams} were counted a row. The gateway has every limit set and books every call "
            f"({booked} in its books). The first token leaves the upstream {pace} after the request.",
            "",
            "| server | first token p50 ms | p90 | p99 | stream p50 s | of its core | CPU ms a stream | KiB a stream |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *(one.line() for one in measured),
            "",
            f"The gateway adds **{added['p50']:.1f} ms** to the first token at p50 and {added['p99']:.1f} ms at p99.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
