# How the gateway's sockets speak HTTP: as protocol/http_server.py says, with the gateway's own request ids.

from __future__ import annotations

from gateway.clock import Clock
from protocol.http_server import HttpProtocol as SharedProtocol

_clock = Clock()


class HttpProtocol(SharedProtocol):
    """One connection of a gateway."""

    def new_request_id(self) -> str:
        """Return a UUIDv7, as every request has one."""
        return _clock.new_id()
