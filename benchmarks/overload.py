# Does one team's flood hurt another? A real gateway before an upstream of limited capacity, on a real Postgres and a
# real Valkey: team B at its usual load alone, then with team A at its usual load, then with A at twenty times that.
#
#   python -m benchmarks.overload [--seconds 28] [--quick]
#
# Requests leave at random moments (Poisson, open loop) whatever the gateway does. What is compared is B's time to the
# first byte of its stream, which comes with the first token; all phases in one run, since machines differ.

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import aiohttp
import uvloop
from msgspec import Struct

from benchmarks.stack import ADMIN_KEY, Server, make_team, start_gateway, start_upstream

RESULTS = Path(__file__).parent / "results"
MODEL = "bench"
SLOTS = 56
RATE_A, RATE_B = 1.0, 4.0  # calls a second, usually
FLOOD = 20
# Answers: seconds until the first token, tokens, seconds between them. Calls hold a slot for 2.8 s on average.
KINDS = ((0.4, 4, 0.5), (0.6, 4, 0.5), (0.9, 4, 0.6), (1.4, 4, 0.6), (2.2, 4, 0.6))


class Phase(Struct, frozen=True):
    """How often each team calls."""

    name: str
    rate_a: float
    rate_b: float


PHASES = (
    Phase("B alone", 0.0, RATE_B),
    Phase("A and B as usual", RATE_A, RATE_B),
    Phase(f"A at {FLOOD} ×", FLOOD * RATE_A, RATE_B),
)


class Met(Struct):
    """What one team met in one phase: milliseconds of each answer, and how many of each other status."""

    firsts: list[float] = []  # until the first byte
    waits: list[float] = []  # of these, for a turn
    ours: list[float] = []  # and the gateway's own: on a busy machine, waiting for the CPU above all
    refused: dict[int, int] = {}


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; of few values the highest."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def main() -> None:
    """Measure, print the table and write it to benchmarks/results/."""
    parser = argparse.ArgumentParser(description="Measure what one team's flood does to another.")
    parser.add_argument("--seconds", type=float, default=28.0, help="of each phase")
    parser.add_argument("--quick", action="store_true", help="a second each: does it run at all? Writes nothing")
    said = parser.parse_args()
    seconds = 1.0 if said.quick else said.seconds
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.sched_setaffinity(0, {shared})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        upstream = stack.enter_context(start_upstream(shared, "--capacity", str(SLOTS)))
        # Each API key is a script of the upstream's, and keys are used in turn: one target, answers of many lengths.
        more = {
            "concurrency": SLOTS,
            "api_keys": [
                f"sk-{kind}:first_token={first},tokens={n},pace={pace}" for kind, (first, n, pace) in enumerate(KINDS)
            ],
        }
        gateway = stack.enter_context(start_gateway(upstream, {MODEL: "gpt-4o"}, folder, own, shared, more=more))
        keys = {team: make_team(gateway.url, team) for team in ("team-a", "team-b")}
        met = uvloop.run(measure(gateway, keys, seconds))
        refused = upstream_refusals(gateway)
    text = report(met, seconds, refused)
    print(text)
    if not said.quick:
        (RESULTS / f"overload-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


async def measure(gateway: Server, keys: dict[str, str], seconds: float) -> dict[str, dict[str, Met]]:
    """Return what both teams met, by phase."""
    met: dict[str, dict[str, Met]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(call(session, gateway, key, Met()) for key in keys.values() for _ in range(8)))
        for phase in PHASES:
            met[phase.name] = {team: Met() for team in keys}
            rates = dict(zip(keys, (phase.rate_a, phase.rate_b), strict=True))
            async with asyncio.TaskGroup() as group:
                for team, rate in rates.items():
                    if rate:
                        group.create_task(send(session, gateway, keys[team], met[phase.name][team], rate, seconds))
            for team, one in met[phase.name].items():
                print(f"{phase.name:20} {team}: {len(one.firsts)} answered, refused {one.refused}", flush=True)
    return met


async def send(
    session: aiohttp.ClientSession, gateway: Server, key: str, met: Met, rate: float, seconds: float
) -> None:
    """Send a team's calls at random moments, the same in every run, and wait until the last has ended."""
    dice, began, moment = Random(f"{rate} {key[:3]}"), time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while (moment := moment + dice.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            group.create_task(call(session, gateway, key, met))


async def call(session: aiohttp.ClientSession, gateway: Server, key: str, met: Met) -> None:
    """Make one call and note when its first token came."""
    since = time.perf_counter()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 64}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(gateway.url, json=body, headers=headers) as answer:
        if answer.status != 200:
            met.refused[answer.status] = met.refused.get(answer.status, 0) + 1
            return
        await answer.content.readany()
        met.firsts.append((time.perf_counter() - since) * 1000)
        met.waits.append(float(answer.headers.get("x-tollgate-queue-ms", 0)))
        met.ours.append(float(answer.headers["x-tollgate-overhead-ms"]))
        if not (await answer.read()).endswith(b"[DONE]\n\n"):
            raise SystemExit("an answer broke off")


def upstream_refusals(gateway: Server) -> int:
    """Return how often the upstream refused a call because it had no room."""
    request = urllib.request.Request(
        gateway.url.removesuffix("/v1/chat/completions") + "/metrics", headers={"authorization": f"Bearer {ADMIN_KEY}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        found = re.findall(r'^tollgate_attempts_total{outcome="rate_limited".*} (\S+)$', answer.read().decode(), re.M)
    return sum(int(float(number)) for number in found)


def report(met: dict[str, dict[str, Met]], seconds: float, refused: int) -> str:
    """Return the table and how it was made."""
    now = datetime.now(UTC)
    usual = percentile(met[PHASES[0].name]["team-b"].firsts, 0.99)
    lines = [
        f"# Overload, {now:%Y-%m-%d}",
        "",
        f"`{' '.join(['python -m benchmarks.overload', *sys.argv[1:]])}`, on {os.cpu_count()} cores, "
        f"load average {[round(load, 1) for load in os.getloadavg()]}, Python {platform.python_version()}.",
        "",
        f"An upstream with room for {SLOTS} calls and `concurrency: {SLOTS}`; calls take some 2.8 s, first tokens 0.4 "
        f"to 2.2 s. Usually A sends {RATE_A:g} calls a second and B {RATE_B:g}; {seconds:g} s for each phase, requests "
        "at random moments. Waited: for a turn, as `x-tollgate-queue-ms` says.",
        "",
        "| phase | team | answered | 503 | other | first token p50, p95, p99 ms | p99 : B alone | waited p50, p99 ms "
        "| overhead p50, p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for phase, teams in met.items():
        for team, one in teams.items():
            if not one.firsts:
                continue
            other = sum(number for status, number in one.refused.items() if status != 503)
            first = ", ".join(f"{percentile(one.firsts, share):.0f}" for share in (0.5, 0.95, 0.99))
            waited, ours = (
                ", ".join(f"{percentile(values, share):.0f}" for share in (0.5, 0.99))
                for values in (one.waits, one.ours)
            )
            ratio = f"{percentile(one.firsts, 0.99) / usual:.2f}" if team == "team-b" else ""
            lines.append(
                f"| {phase} | {team[-1].upper()} | {len(one.firsts)} | {one.refused.get(503, 0)} | {other} | {first} | "
                f"{ratio} | {waited} | {ours} |"
            )
    lines += ["", f"The upstream refused {refused} calls for want of room.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
