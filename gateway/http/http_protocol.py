# How the gateway's sockets speak HTTP: as protocol/serving/http_server.py says, with the gateway's own request ids, and
# no more connections of one client than it may have.

from __future__ import annotations

import asyncio
from typing import Any

from gateway.core.clock import Clock
from gateway.http.connections import ConnectionLimit
from protocol.serving.http_server import HttpProtocol as SharedProtocol

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
        if self._connections is not None and self._counted is not None:
            self._connections.leave(self._counted)
        super().connection_lost(exc)

    def new_request_id(self) -> str:
        """Return a UUIDv7, as every request has one."""
        return _clock.new_id()
