# How identity providers are asked: over the connections of upstreams, for short documents, within seconds.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing

from gateway.identity.issuer import LONGEST_DOCUMENT, Ask, IssuerAway
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure

CONNECT, PATIENCE = 2.0, 5.0  # seconds


def ask_by(client: UpstreamClient) -> Ask:
    """Return what asks an identity provider by a client. It raises IssuerAway."""

    async def ask(method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(PATIENCE):
                request = UpstreamRequest(method, url, {"accept-encoding": "identity", **headers}, body)
                with closing(await client.send(request, CONNECT, PATIENCE)) as response:
                    return response.status, await response.read(LONGEST_DOCUMENT)
        except (UpstreamFailure, TimeoutError, ValueError) as exc:
            raise IssuerAway("it does not answer") from exc

    return ask
