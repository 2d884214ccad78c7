# How the gateway's sockets speak HTTP: as protocol/serving/http_server.py says, with the gateway's own request ids, a
# WebSocket where there is one, and no more connections of one client than it may have. Each takes a descriptor and
# memory before a key is looked at, so one client could keep all others out.

from __future__ import annotations

import asyncio
from collections import Counter
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import structlog

from gateway.core.client_addresses import Networks, is_among, network_of
from gateway.core.clock import Clock
from gateway.dialects.responses import ENDPOINT
from gateway.dialects.table import REALTIME_PATH
from gateway.http.websocket.protocol import SocketProtocol
from protocol.serving.http_server import HttpProtocol as SharedProtocol

if TYPE_CHECKING:
    from gateway.inference.edition import Editions
    from gateway.telemetry.metrics import Metrics

LOOPBACK: Networks = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
SOCKET_PATHS = (ENDPOINT.path.encode(), REALTIME_PATH.encode())
MOST_FIELDS, LONGEST_FIELD = 100, 8000  # of a head that asks for a WebSocket: the library takes few more
WARN_EVERY = 60.0  # seconds between lines in the log

log = structlog.get_logger()
_clock = Clock()


class HttpProtocol(SharedProtocol):
    """One connection. ``connections`` counts it among those of its client."""

    def __init__(self, *args: Any, connections: ConnectionLimit | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._connections = connections
        self._counted: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or close at once what is one connection too many."""
        super().connection_made(transport)
        if self._connections is not None and self.client is not None:
            self._counted = self._connections.enter(self.client[0])
            if self._counted is None:
                transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Make room for another."""
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        if self._connections is not None and self._counted is not None:
            self._connections.leave(self._counted)

    def take_offer(self, rest: bytes) -> bool:
        """Speak WebSocket from here on where a client asks for that at a path that has one."""
        is_its_turn = (self.cycle is None or self.cycle.response_complete) and not self.pipeline
        if not (is_its_turn and self.parser.get_method() == b"GET" and _asks_for_socket(self.url, self.headers)):
            return False
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.connections.discard(self)
        socket = SocketProtocol(self.config, self.server_state, self.app_state, self._leave)
        socket.connection_made(self.transport)
        self.transport.set_protocol(socket)
        lines = [b"GET %b HTTP/1.1" % self.url, *(b"%b: %b" % header for header in self.headers)]
        socket.data_received(b"\r\n".join([*lines, b"", rest]))
        return True

    def new_request_id(self) -> str:
        """Return a UUIDv7, as every request has one."""
        return _clock.new_id()


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


def _asks_for_socket(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
    fits = len(headers) <= MOST_FIELDS and all(len(name) + len(value) <= LONGEST_FIELD for name, value in headers)
    is_offered = any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers)
    return fits and is_offered and url.partition(b"?")[0] in SOCKET_PATHS
