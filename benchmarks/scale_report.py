# The tables of benchmarks.scale.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from msgspec import Struct


class Load(Struct, frozen=True, kw_only=True):
    """What one command asked of the stores, all owners together. CPU is seconds, waits are milliseconds."""

    name: str
    seconds: float
    transactions: float
    commands: float
    postgres_cpu: float
    valkey_cpu: float
    waits: list[float]
    refused: list[float]
    wrong: int
    unknown: int
    late: list[float]  # seconds
    owners_cpu: float
    unseen: int

    @classmethod
    def of(
        cls, name: str, seconds: float, before: Mapping[str, float], after: Mapping[str, float], told: Sequence[Any]
    ) -> Self:
        """Add up what the processes told."""
        return cls(
            name=name,
            seconds=seconds,
            **{count: after[count] - before[count] for count in before},  # type: ignore[arg-type]
            waits=[wait for one in told for wait in one.waits],
            refused=[wait for one in told for wait in one.refused],
            wrong=sum(one.wrong for one in told),
            unknown=sum(one.unknown for one in told),
            owners_cpu=sum(one.cpu for one in told),
            late=[late for one in told for late in one.late],
            unseen=sum(one.unseen for one in told),
        )

    def line(self, owners: int) -> str:
        """Return it as a line of the table."""
        calls = len(self.waits) + len(self.refused)
        each = f"{self.transactions / calls:.2f}" if calls else "–"
        return (
            f"| {self.name} | {owners} | {calls / self.seconds:,.0f} | {_spread(self.waits)} | "
            f"{self.transactions / self.seconds:,.0f} | {each} | {self.postgres_cpu / self.seconds:.0%} | "
            f"{self.commands / self.seconds:,.0f} | {self.valkey_cpu / self.seconds:.0%} | "
            f"{self.owners_cpu / self.seconds:.0%} |"
        )


class Restart(Struct, frozen=True, kw_only=True):
    """Seconds since everything was started again after it had been killed."""

    stores: float  # until Postgres and Redis took connections
    processes: float  # until Python and Tollgate were imported
    first: float  # until the first owner had let a call in
    last: float  # and the last one


def report(loads: Sequence[Load], restart: Restart, owners: int, crowd: int, teams: int, keys: int) -> str:
    """Return the tables."""
    capped = loads[-1]
    wrong = sum(load.wrong for load in loads[:-1])
    sizes = [owners] * (len(loads) - 1) + [crowd]
    columns = (
        *("what", "owners", "calls/s", "wait p50 / p99 / most ms", "transactions/s", "a call"),
        *("Postgres CPU", "Redis commands/s", "Redis CPU", "owners' CPU"),
    )
    return "\n".join(
        [
            f"{teams:,} teams of {keys} keys, every limit set. A transaction is one statement, nearly always. A call "
            "lasts 50 ms. CPU is of one core; two processes hold all owners: near 100 % each, they are the slow part.",
            "",
            f"| {' | '.join(columns)} |",
            "| --- " * len(columns) + "|",
            *(load.line(size) for load, size in zip(loads, sizes, strict=True)),
            "",
            f"Refused although every limit had room: {wrong}.",
            "",
            f"All {owners} owners and both stores killed and started again: stores after {restart.stores:.1f} s, "
            f"processes after {restart.processes:.1f}, first call let in after {restart.first:.1f}, every owner serves "
            f"after **{restart.last:.1f} s** (at most 5).",
            "",
            f"One team at its cap, over {crowd} owners: {len(capped.waits):,} calls let in, {len(capped.refused):,} "
            f"refused after {_spread(capped.refused)} ms (p50 / p99 / most; at most 250 and an answer of Postgres), of "
            f"these **{capped.wrong}** although its cap had had room for all that waited for 250 ms ({capped.unknown} "
            "refused because Postgres did not answer in time). Rows of the other teams were seen "
            f"{_spread(capped.late, 2)} s after their calls had closed (at most **2**); {capped.unseen} were not seen.",
            "",
        ]
    )


def _spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "–"
    ordered = sorted(values)
    found = (ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], ordered[-1])
    return " / ".join(f"{value:.{digits}f}" for value in found)
