# How often each address may send wrong keys: some in a row, then a few a second. Keys cannot be found by guessing; the
# bound is for admin keys chosen by hand, and slows a client that keeps sending a wrong key.

from __future__ import annotations

from collections import OrderedDict

from billing.core.errors import RateLimited
from gateway.core.client_addresses import network_of
from gateway.core.clock import Clock

FAILURES_PER_ADDRESS = 20  # in a row from one address …
MOST_FAILURES = 50.0  # that are remembered, so that an address is let in again within seconds
FORGIVEN_PER_SECOND = 5.0  # … and how fast they are forgotten
ADDRESSES = 50_000


class Guessing:
    """Counts the failures of each address; one that has a whole IPv6 network counts as that."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, float]] = OrderedDict()  # failures, as of when

    def refuse_guesser(self, address: str) -> None:
        """Raise RateLimited for an address that has failed too often."""
        if self._failures_of(network_of(address)) >= FAILURES_PER_ADDRESS:
            raise RateLimited(
                "Too many wrong API keys came from this address. Try again in a second.", headers={"retry-after": "1"}
            )

    def count_failure(self, address: str) -> None:
        """Note a failure."""
        network = network_of(address)
        count = min(self._failures_of(network) + 1, MOST_FAILURES)
        self._failures[network] = (count, self._clock.monotonic())
        self._failures.move_to_end(network)
        if len(self._failures) > ADDRESSES:
            self._failures.popitem(last=False)

    def _failures_of(self, network: str) -> float:
        count, since = self._failures.get(network, (0.0, 0.0))
        return max(0.0, count - FORGIVEN_PER_SECOND * (self._clock.monotonic() - since))
