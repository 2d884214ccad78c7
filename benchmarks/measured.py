# What the gateway's benchmark measures: a kind of request, and what one server took for it in one round.

from __future__ import annotations

from msgspec import Struct


class Case(Struct, frozen=True, kw_only=True):
    """One kind of request."""

    name: str
    model: str  # our name for it
    script: str  # what the scripted upstream does
    streams: bool
    connections: int
    requests: int  # a round


class Measured(Struct, frozen=True, kw_only=True):
    """One server, one case, one round. CPU is milliseconds a request, latencies are milliseconds, memory MiB."""

    case: str
    server: str
    round: int
    requests: int
    cpu_ms: float
    helpers_ms: float  # Postgres and Valkey
    per_second: float
    memory: float
    bytes_per_answer: float
    first: dict[str, float]
    total: dict[str, float]

    def line(self) -> str:
        """Return it as one line for the terminal."""
        return (
            f"{self.case:24} round {self.round} {self.server:14} {self.cpu_ms:7.3f} ms CPU  {self.per_second:8.0f}/s  "
            f"first byte p50 {self.first['p50']:.2f} p99 {self.first['p99']:.2f} ms"
        )
