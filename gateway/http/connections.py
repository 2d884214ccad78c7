# How many connections one client may have open at this process. Each takes a descriptor and memory before a key is
# looked at, so one client could keep all others out.

from __future__ import annotations

from collections import Counter
from ipaddress import ip_network
from typing import TYPE_CHECKING

import structlog

from gateway.core.client_addresses import Networks, is_among, network_of

if TYPE_CHECKING:
    from gateway.core.clock import Clock
    from gateway.inference.edition import Editions
    from gateway.telemetry.metrics import Metrics

LOOPBACK: Networks = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
WARN_EVERY = 60.0  # seconds between lines in the log

log = structlog.get_logger()


class ConnectionLimit:
    """Counts the open connections of each client. It refuses none before ``begin``.

    ``exempt`` and trusted proxies may have any number: connections of many clients come from there.
    """

    def __init__(self, exempt: Networks = LOOPBACK) -> None:
        self._exempt = exempt
        self._open: Counter[str] = Counter()
        self._parts: tuple[Editions, Metrics, Clock] | None = None
        self._warned_at = float("-inf")

    def begin(self, editions: Editions, metrics: Metrics, clock: Clock) -> None:
        """Go by the settings from now on, whichever edition they are of."""
        self._parts = editions, metrics, clock

    def enter(self, address: str) -> str | None:
        """Count a connection and return what to ``leave`` when it ends; ``None`` if it must not be."""
        client = network_of(address)
        if self._parts is not None and self._is_full(client, address, *self._parts):
            return None
        self._open[client] += 1
        return client

    def leave(self, client: str) -> None:
        """Count one less."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def _is_full(self, client: str, address: str, editions: Editions, metrics: Metrics, clock: Clock) -> bool:
        settings = editions.current.settings
        most = settings.connections_per_address
        if not 0 < most <= self._open[client]:
            return False
        if is_among(address, self._exempt) or is_among(address, settings.trusted_proxies):
            return False
        metrics.connections_refused.inc()
        if (now := clock.monotonic()) - self._warned_at > WARN_EVERY:
            self._warned_at = now
            log.warning(
                "connections_refused",
                client=client,
                open=most,
                hint="connections.per_address; a proxy or balancer belongs into trusted_proxies",
            )
        return True
