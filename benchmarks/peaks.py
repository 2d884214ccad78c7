# Ten teams whose calls come in peaks, open loop, through two gateways before an upstream that takes its time: how many
# are answered, how long they wait for a first token, and whether the books have each once.
#
#   python -m benchmarks.peaks [--streams 2000] [--quick]
#
# Each team sends streams at fixed moments to both gateways, whatever these do: a tenth of the peak all the time, the
# rest for the middle third. A stream lasts ten seconds, a token every half, so of 2,000 at once 200 begin a second.
# Both gateways share a core; upstream, generators, Postgres and Valkey share another.

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gateway import QUESTION
from benchmarks.gateway_report import RESULTS, cpu_name, output_of
from benchmarks.stack import Server, make_team, rows_written, run_server, start_gateway, start_upstream
from gateway.run.processes import free_port

TEAMS = 10
TOKENS, PACE = 20, 0.5  # of a stream
LASTS = TOKENS * PACE
QUIET, PEAK = 20.0, 20.0  # seconds: the quiet time is before and after the peak alike
MODEL = "bench-paced"
WANTED = 0.999  # of all calls


def main() -> None:
    """Measure, print the table and write it to benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measure ten teams' peaks through two gateways.")
    parser.add_argument("--streams", type=int, default=2000, help="how many run at a time in the peak")
    parser.add_argument("--quick", action="store_true", help="forty streams: does it run at all? Writes nothing")
    said = parser.parse_args()
    streams = 40 if said.quick else said.streams
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.sched_setaffinity(0, {shared})  # what is started from here, the generators above all, stays there
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        upstream = stack.enter_context(start_upstream(shared))
        models = {MODEL: f"gpt-4o:tokens={TOKENS},pace={PACE}"}
        first = stack.enter_context(start_gateway(upstream, models, folder, own, shared))
        gateways = [first, stack.enter_context(_another(first, folder, own))]
        keys = [make_team(first.url, f"team-{number}") for number in range(TEAMS)]
        teams = _measured(gateways, keys, streams)
        time.sleep(3.0)  # rows are in the ledger two seconds after their call at the latest
        booked = [rows_written(msgspec.structs.replace(first, key=key)) for key in keys]
    text = _report(teams, booked, streams)
    print(text)
    if not said.quick:
        (RESULTS / f"peaks-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


@contextmanager
def _another(first: Server, folder: Path, core: int) -> Iterator[Server]:
    """Run one more gateway on the same stores."""
    settings = json.loads((folder / "tollgate.yaml").read_text()) | {"data_dir": str(folder / "another")}
    config, port = folder / "another.yaml", free_port()
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(config), "--port", str(port)]
    with run_server(command, core, port, log=folder / "another.log") as pid:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        yield msgspec.structs.replace(first, name="another gateway", url=url, pids=(pid,), helpers=())


def _measured(gateways: list[Server], keys: list[str], streams: int) -> list[list[dict[str, Any]]]:
    """Return what came of each team's calls: of those all the time, and of those of its peak, at each gateway."""
    rate = streams / LASTS / TEAMS / len(gateways)
    loads = [[_load(gateway, key, 0.1 * rate, 2 * QUIET + PEAK) for gateway in gateways] for key in keys]
    time.sleep(QUIET)
    for own, key in zip(loads, keys, strict=True):
        own += [_load(gateway, key, 0.9 * rate, PEAK) for gateway in gateways]
    return [[_outcome(load) for load in own] for own in loads]


def _load(gateway: Server, key: str, rate: float, seconds: float) -> subprocess.Popen[str]:
    plan = {
        "url": gateway.url,
        "key": key,
        "body": {"model": MODEL, "messages": QUESTION, "max_tokens": 64, "stream": True},
        "connections": round(rate * LASTS * 1.2) + 2,
        "requests": max(1, round(rate * seconds)),
        "rate": rate,
        "first": "token",
        "seconds": seconds + 60.0,
    }
    command = [sys.executable, "-m", "benchmarks.load", msgspec.json.encode(plan).decode()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _outcome(load: subprocess.Popen[str]) -> dict[str, Any]:
    told, complaint = load.communicate(timeout=300)
    if load.returncode:
        raise SystemExit(f"a load generator failed: {complaint}")
    return dict(json.loads(told))


def _report(teams: list[list[dict[str, Any]]], booked: list[int], streams: int) -> str:
    lines, failure = [], None
    asked = failed = 0
    for number, (loads, rows) in enumerate(zip(teams, booked, strict=True)):
        own, lost = sum(each["requests"] for each in loads), sum(each["failures"] for each in loads)
        asked, failed = asked + own, failed + lost
        failure = failure or next((each["failure"] for each in loads if each["failure"]), None)
        slowest = [max(each["first"][name] for each in loads) for name in ("p50", "p90", "p99")]
        lines.append(f"| team-{number} | {own} | {lost} | {rows} | " + " | ".join(f"{ms:.0f}" for ms in slowest) + " |")
    load, milliseconds = [round(load, 2) for load in os.getloadavg()], PACE * 1000
    command = (
        f"`python -m benchmarks.peaks {' '.join(sys.argv[1:])}` at {output_of('git', 'rev-parse', '--short', 'HEAD')}"
    )
    return "\n".join(
        [
            f"# Peaks of {streams:,} streams, ten teams, two gateways, {datetime.now(UTC):%Y-%m-%d}",
            "",
            f"{command}: both gateways on one core of {cpu_name()}; upstream, generators and stores on another; "
            f"load average {load}. Open loop: {streams / LASTS:.0f} streams begin a second for {PEAK:.0f} s, a tenth "
            f"of that for {QUIET:.0f} s before and after; {TOKENS} tokens each, one every {milliseconds:.0f} ms.",
            "",
            f"**{(asked - failed) / asked:.2%}** of {asked:,} calls were answered (at least {WANTED:.1%}); "
            f"{sum(booked):,} rows in the books.",
            *([] if failure is None else ["", f"The first that failed: {failure}"]),
            "",
            f"First tokens, {milliseconds:.0f} ms of them the upstream's, at the slowest of a team's four generators:",
            "",
            "| team | calls | failed | rows | p50 ms | p90 ms | p99 ms |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
