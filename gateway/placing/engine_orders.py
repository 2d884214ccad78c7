# What the controller asks of a replica itself, beside its placer: to sleep, and to wake up. The answer comes with the
# replica's next heartbeats, so that none is waited for here.

from __future__ import annotations

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

    def send(self, provider: ProviderSettings, base_url: str, path: str) -> None:
        """Post to ``path`` of the engine at an announced address; a failure is logged."""
        self._asked.spawn(self._send(provider, base_url, path))

    async def close(self) -> None:
        """Wait for nothing more."""
        await self._asked.drain(0.0)
        await self._client.close()

    async def _send(self, provider: ProviderSettings, base_url: str, path: str) -> None:
        url, status = base_url.removesuffix("/v1") + path, 401
        for key in provider.api_keys or (None,):  # a replica has the one that was first when it was started
            headers = {"authorization": f"Bearer {key}"} if key is not None else {}
            request = UpstreamRequest("POST", url, headers, b"", egress=provider.egress)
            try:
                response = await self._client.send(request, provider.timeouts.connect, PATIENCE)
            except UpstreamFailure as exc:
                log.warning("replica_not_told", endpoint=base_url, path=path, error=str(exc))
                return
            status = response.status
            response.close()
            if status != 401:
                break
        if status != 200:
            log.warning("replica_not_told", endpoint=base_url, path=path, status=status)
