# Recorded workloads as lists of requests: Azure's CSV files, Mooncake's JSON lines, and ServeGen's clients, from which
# requests are drawn. A file says by its own look which it is.

from __future__ import annotations

import ast
import csv
import gzip
import io
import json
import math
import random
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

MOONCAKE_BLOCK = 512  # tokens that one of its hashes stands for
SERVEGEN_WINDOW = 600.0  # seconds, of rates
SERVEGEN_SPAN = 21_600.0  # seconds, of length distributions


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. Equal ``prefix`` numbers stand for equal stretches of ``MOONCAKE_BLOCK`` tokens."""

    arrival: float  # seconds from the trace's first request
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    tier: str = "interactive"
    weight: float = 1.0
    prefix: tuple[int, ...] = ()
    common: int = 0  # leading tokens that all requests have: a system prompt

    def prompt(self, number: int) -> tuple[int, ...]:
        """Make up the prompt's tokens: those of its prefix, and else such as only request ``number`` has."""
        if self.common:
            return (1,) * self.common + (-number - 1 & 0x7FFFFFFF,) * (self.prompt_tokens - self.common)
        known = tuple(token for block in self.prefix for token in (block + 1,) * MOONCAKE_BLOCK)
        return (known + (-number - 1 & 0x7FFFFFFF,) * (self.prompt_tokens - len(known)))[: self.prompt_tokens]


def read_trace(path: Path, start: float = 0.0, seconds: float = math.inf, seed: int = 0) -> list[TraceRequest]:
    """Read the requests of a stretch of a trace, arrivals counted from its start.

    ``seed`` draws what ServeGen leaves to chance. Raises ``ValueError`` for a file that is no such trace.
    """
    if ".tar" in path.name or path.is_dir():
        found: Iterator[TraceRequest] = iter(_servegen(path, start, seconds, random.Random(seed)))
    elif ".jsonl" in path.name:
        found = _mooncake(path)
    elif path.suffix == ".csv":
        found = _azure(path)
    else:
        raise ValueError(f"{path.name} is no trace; it is Azure's .csv, Mooncake's .jsonl(.gz) or ServeGen's .tar.xz")
    chosen = [request for request in found if start <= request.arrival < start + seconds]
    return [replace(request, arrival=request.arrival - start) for request in sorted(chosen, key=lambda r: r.arrival)]


def _azure(path: Path) -> Iterator[TraceRequest]:
    first: datetime | None = None
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # seven decimals; six are understood
            first = first or at
            tokens, generated = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            yield TraceRequest((at - first).total_seconds(), max(tokens, 1), max(generated, 1))


def _mooncake(path: Path) -> Iterator[TraceRequest]:
    content = path.read_bytes()
    for line in (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines():
        row = json.loads(line)
        length, output = row["input_length"], max(row["output_length"], 1)
        yield TraceRequest(row["timestamp"] / 1000, length, output, prefix=tuple(row["hash_ids"]))


def _servegen(path: Path, start: float, seconds: float, dice: random.Random) -> Iterator[TraceRequest]:
    """Draw arrivals of every client: gamma-distributed pauses with the rate and the scatter of each window."""
    if seconds == math.inf:
        raise ValueError("ServeGen's clients go on for two weeks; say with --seconds how much of it to draw")
    files = dict(_members(path))
    for name, rates in sorted(files.items()):
        if not name.endswith("-trace.csv"):
            continue
        client = name.rsplit("/", 1)[-1].removesuffix("-trace.csv")
        lengths = json.loads(files.get(name.removesuffix("trace.csv") + "dataset.json", "{}"))
        for row in csv.reader(io.StringIO(rates)):
            begin, rate, scatter = float(row[0]), float(row[1]), float(row[2] or 1)
            if rate > 0 and begin < start + seconds and begin + SERVEGEN_WINDOW > start:
                of_span = lengths.get(str(int(begin // SERVEGEN_SPAN * SERVEGEN_SPAN)), {})
                yield from _draw_window(client, begin, rate, scatter, of_span, dice)


def _draw_window(
    client: str, begin: float, rate: float, scatter: float, lengths: dict[str, str], dice: random.Random
) -> Iterator[TraceRequest]:
    inputs, outputs = (_Lengths(lengths.get(kind, "{}")) for kind in ("input_tokens", "output_tokens"))
    if not inputs.values or not outputs.values:
        return
    shape = 1 / max(scatter, 0.1) ** 2
    at = begin + dice.gammavariate(shape, 1 / (rate * shape)) * dice.random()
    while at < begin + SERVEGEN_WINDOW:
        yield TraceRequest(at, inputs.draw(dice), outputs.draw(dice), tenant=client)
        at += dice.gammavariate(shape, 1 / (rate * shape))


class _Lengths:
    """A distribution of lengths, as ServeGen writes it: ``{length: probability}``."""

    def __init__(self, text: str) -> None:
        table: dict[int, float] = ast.literal_eval(text)
        self.values = [max(1, int(length)) for length in table]
        self._sums = list(accumulate(table.values()))

    def draw(self, dice: random.Random) -> int:
        return dice.choices(self.values, cum_weights=self._sums)[0]


def _members(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in path.rglob("chunk-*"):
            yield str(file), file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() and "/chunk-" in member.name else None
            if content is not None:
                yield member.name, content.read().decode()


def share_out(requests: list[TraceRequest], tenants: int, batch_share: float, seed: int = 0) -> list[TraceRequest]:
    """Give requests without a tenant one of ``tenants``, of which the k-th is 1/k as busy, and some the batch tier.

    A conversation is one tenant's: its second block tells it, the first one is the same in all of them.
    """
    dice = random.Random(seed)
    names = [f"tenant-{number}" for number in range(tenants)]
    sums = list(accumulate(1 / (rank + 1) for rank in range(tenants)))
    return [
        replace(
            request,
            tenant=request.tenant or _dice_for(request, dice).choices(names, cum_weights=sums)[0],
            tier="batch" if dice.random() < batch_share else request.tier,
        )
        for request in requests
    ]


def _dice_for(request: TraceRequest, dice: random.Random) -> random.Random:
    return random.Random(request.prefix[1]) if len(request.prefix) > 1 else dice
