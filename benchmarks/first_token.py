# What a content policy adds to the wait for a first token: two gateways, one without a policy and one that blocks
# prompts and flags answers, in front of the scripted upstream. They take turns every few hundredths of a second
# (A B B A …) and each turn is compared with its neighbour, so that what else the machine does hits both alike.
#
#   python -m benchmarks.first_token [--pairs 600] [--quick]

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from benchmarks.gateway import QUESTION
from benchmarks.gateway_report import RESULTS, cpu_name, output_of
from benchmarks.load import NUMBER, TOKEN
from benchmarks.stack import Server, start_gateway, start_upstream

MODEL, SCRIPT = "bench-first", "tokens=3,pace=0.02"  # a first token comes 20 ms after the request, the end later
CROWDS = (1, 4)  # streams at once: there is always room
WARM = 50  # turns that do not count
RESAMPLES = 2_000
SEED = 7
PATIENCE = 30.0  # seconds for one answer
END = b"0\r\n\r\n"  # of a chunked body


class Client:
    """One connection to one server. No two of the requests say the same."""

    sent = 0

    def __init__(self, server: Server) -> None:
        self._place = urlsplit(server.url)
        body = msgspec.json.encode({"model": MODEL, "messages": QUESTION, "max_tokens": 256, "stream": True})
        head = (
            f"POST {self._place.path} HTTP/1.1\r\nhost: {self._place.netloc}\r\nauthorization: Bearer {server.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._place.hostname, self._place.port)

    async def first_token(self) -> float:
        """Return the milliseconds until a first token; the answer is then read to its end."""
        Client.sent += 1
        request = self._request.replace(NUMBER, b"%08d" % Client.sent)
        read, first, began = b"", 0.0, time.perf_counter()
        self._writer.write(request)
        async with asyncio.timeout(PATIENCE):
            while not read.endswith(END):
                read += await self._reader.read(65536)
                if not first and TOKEN.search(read):
                    first = time.perf_counter()
        if not first:
            raise SystemExit(f"a request failed: {read[:500].decode(errors='replace')}")
        return (first - began) * 1000


def main() -> None:
    """Measure, print and write benchmarks/results/first-token-DATE.md."""
    parser = argparse.ArgumentParser(description="Measure what a content policy adds to the wait for a first token.")
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--quick", action="store_true", help="three pairs: does it run at all? Writes nothing")
    said = parser.parse_args()
    pairs = 3 if said.quick else said.pairs
    cores = sorted(os.sched_getaffinity(0))
    own, shared = cores[0], cores[-1]
    os.sched_setaffinity(0, {shared})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollgate-bench-")))
        upstream = stack.enter_context(start_upstream(shared))
        models = {MODEL: f"gpt-4o:{SCRIPT}"}
        free = stack.enter_context(start_gateway(upstream, models, folder / "free", own, shared))
        checked = stack.enter_context(start_gateway(upstream, models, folder / "checked", own, shared, safety="block"))
        rows = [asyncio.run(measure(free, checked, crowd, pairs)) for crowd in CROWDS]
    text = report(rows, pairs)
    print(text)
    if not said.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"first-token-{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)


async def measure(free: Server, checked: Server, crowd: int, pairs: int) -> str:
    """Return the row of the table for so many streams at once."""
    groups = [[Client(server) for _ in range(crowd)] for server in (free, checked)]
    await asyncio.gather(*(client.connect() for group in groups for client in group))
    told: list[list[float]] = [[], []]  # by server: the medians of its turns
    for number in range(WARM + pairs):
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            waits = await asyncio.gather(*(client.first_token() for client in groups[place]))
            if number >= WARM:
                told[place].append(statistics.median(waits))
    differences = [late - early for early, late in zip(*told, strict=True)]
    low, high = interval(differences)
    without, with_it = (statistics.median(one) for one in told)
    row = (
        f"| {crowd} | {without:.2f} | {with_it:.2f} | {statistics.median(differences):+.2f} [{low:+.2f}, {high:+.2f}] |"
    )
    print(row, flush=True)
    return row


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median of paired differences, by drawing pairs anew."""
    dice = random.Random(SEED)
    medians = sorted(statistics.median(dice.choices(differences, k=len(differences))) for _ in range(RESAMPLES))
    return medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def report(rows: Sequence[str], pairs: int) -> str:
    """Return the table with what it takes to repeat it."""
    now, commit = datetime.now(UTC), output_of("git", "rev-parse", "--short", "HEAD")
    return "\n".join(
        [
            f"# What a content policy adds to a first token, {now:%Y-%m-%d}",
            "",
            f"`python -m benchmarks.first_token --pairs {pairs}` at {commit}, {os.cpu_count()} cores of {cpu_name()}, "
            f"load average {os.getloadavg()[0]:.1f}.",
            "",
            f"Milliseconds until a first token that the upstream gives after 20 ms, medians of {pairs} turns of each "
            "gateway; the difference is the median of neighbouring turns' differences, with its 95 % interval.",
            "",
            "| streams at once | no policy | prompts blocked, answers flagged | difference |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    main()
