# What rates cost a call that waits for nothing: take and settle inside a slice, and without any limit.
#   python -m benchmarks.rates [--rounds 7] [--calls 20000]
#
# CPU time of one process in microseconds a call; the least and the median of all rounds. No Redis is asked.

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from redis.asyncio import Redis

from billing.core.holds import HoldRequest, Leg, Limits, Scope
from billing.quotas.rates import RateLimits
from gateway.core.clock import Clock

CASES = {
    "no limits": (Limits(), Limits()),
    "team: requests, tokens": (Limits(requests_per_minute=9, tokens_per_minute=9), Limits()),
    "team: all three; key: requests, tokens": (
        Limits(requests_per_minute=9, tokens_per_minute=9, concurrent_requests=9),
        Limits(requests_per_minute=9, tokens_per_minute=9),
    ),
}


async def measure(team: Limits, key: Limits, rounds: int, calls: int) -> list[float]:
    """Return microseconds a call, for each round."""
    clock = Clock()
    rates = RateLimits(Redis(), clock, owner="benchmark")
    scopes, legs = (Scope("team", "t", team), Scope("key", "k", key)), (Leg("a", 100, 5), Leg("b", 120, 5))
    requests = [HoldRequest(request_id=clock.new_id(), team_id="t", scopes=scopes, legs=legs) for _ in range(calls)]
    rates.take(requests[0])
    found = []
    for _ in range(rounds):
        for scope in rates._scopes.values():  # a slice that never ends
            scope.until, scope.requests, scope.tokens, scope.slots = 1e18, 1 << 60, 1 << 60, 1 << 60
        began = time.process_time()
        for request in requests:
            rates.take(request)
            rates.settle(request, 50)
        found.append((time.process_time() - began) / calls * 1e6)
    return found


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    asked = parser.parse_args()
    for name, (team, key) in CASES.items():
        found = asyncio.run(measure(team, key, asked.rounds, asked.calls))
        print(f"{name:40} {min(found):6.2f} {statistics.median(found):6.2f} µs a call")


if __name__ == "__main__":
    main()
