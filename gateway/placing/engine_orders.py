# What the controller asks of a replica itself, beside its placer: to sleep, to wake up, to take another model. What
# came of it is told by the replica's next heartbeats.

from __future__ import annotations

import asyncio

import structlog

from gateway.core.background import Background
from gateway.core.settings import ProviderSettings
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure

PATIENCE = 60.0  # seconds for an engine to answer; it goes on with what it was asked all the same

log = structlog.get_logger()


class EngineOrders:
    """Made inside a running event loop."""

    def __init__(self) -> None:
        self._client = UpstreamClient()
        self._asked = Background()

    def send(
        self, provider: ProviderSettings, base_url: str, path: str, body: bytes = b"", patience: float = PATIENCE
    ) -> asyncio.Task[bool]:
        """Post to ``path`` of the engine at an announced address; whether it did so. A failure is logged."""
        return self._asked.spawn(self._send(provider, base_url, path, body, patience))

    async def close(self) -> None:
        """Wait for nothing more."""
        await self._asked.drain(0.0)
        await self._client.close()

    async def _send(
        self, provider: ProviderSettings, base_url: str, path: str, body: bytes = b"", patience: float = PATIENCE
    ) -> bool:
        url, status = base_url.removesuffix("/v1") + path, 401
        for key in provider.api_keys or (None,):  # a replica has the one that was first when it was started
            headers = {"authorization": f"Bearer {key}"} if key is not None else {}
            request = UpstreamRequest("POST", url, headers, body, egress=provider.egress)
            try:
                response = await self._client.send(request, provider.timeouts.connect, patience)
            except UpstreamFailure as exc:
                log.warning("replica_not_told", endpoint=base_url, path=path, error=str(exc))
                return False
            status = response.status
            response.close()
            if status != 401:
                break
        if status != 200:
            log.warning("replica_not_told", endpoint=base_url, path=path, status=status)
        return status == 200
