# The way to a provider: through a proxy that connects on, and to authorities of one's own.

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.settings import Egress
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError
from tests.support.receiver import answer, certificate_for, receiving
from tests.support.scripted_upstream import ScriptedUpstream


class Proxy:
    """A proxy on a loopback port that connects every caller to one place, or answers as it is told."""

    def __init__(self, port: int, answer: bytes = b"HTTP/1.1 200 Connection established\r\nvia: x\r\n\r\n") -> None:
        self.heads: list[bytes] = []
        self._upstream, self._answer = port, answer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self._answer)
        if self._answer.startswith(b"HTTP/1.1 200"):
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
            await asyncio.gather(_carry(reader, back), _carry(there, writer))
        writer.close()


async def _carry(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await source.read(4096):
            to.write(piece)
        to.close()


def request(egress: Egress) -> UpstreamRequest:
    headers = {"authorization": "Bearer sk-upstream"}
    return UpstreamRequest("GET", "http://provider.example:8080/v1/models", headers, b"", egress=egress)


async def test_a_proxy_connects_to_a_name_that_it_alone_resolves() -> None:
    """CONNECT names the provider, and credentials go to the proxy alone; a connection is used again."""
    with ScriptedUpstream() as upstream:
        proxy, client = Proxy(upstream.port), UpstreamClient()
        async with proxy.running() as place:
            for _ in range(2):
                response = await client.send(request(Egress(f"http://us%40er:pass@{place}")), 5.0, 5.0)
                assert response.status == 200 and b"gpt-4o" in await response.read()
                response.close()
        await client.close()

    [head] = proxy.heads
    assert head.startswith(b"CONNECT provider.example:8080 HTTP/1.1\r\nhost: provider.example:8080\r\n")
    assert b"proxy-authorization: Basic dXNAZXI6cGFzcw==\r\n" in head
    assert not any("proxy-authorization" in seen.headers for seen in upstream.requests)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 2\r\n\r\nno",
        b"HTTP/1.1 502 Bad Gateway\r\n\r\n",
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 300 " + b"x" * 20_000,
    ],
)
async def test_a_proxy_that_does_not_connect_is_an_upstream_that_is_away(answer: bytes) -> None:
    """Another target may be asked; what the proxy said is no caller's business."""
    proxy, client = Proxy(1, answer), UpstreamClient()
    async with proxy.running() as place:
        with pytest.raises(UpstreamError) as raised:
            await client.send(request(Egress(f"http://{place}")), 5.0, 5.0)
    await client.close()

    assert (raised.value.outcome, raised.value.moves_on) == ("connect", True)
    assert "407" not in raised.value.message


async def test_tls_ends_at_the_provider_whose_authority_is_trusted(tmp_path: Path) -> None:
    """Through a proxy, by the authorities of a file: another authority, or the system's, is none there."""
    server, _ = certificate_for("api.example.com", tmp_path)
    certificate_for("other.example.com", tmp_path)
    async with receiving(server) as upstream:
        upstream.acts = [answer(200, body=b"hello")]
        proxy, client = Proxy(upstream.port), UpstreamClient()
        async with proxy.running() as place:
            for name, said in (("api", b"hello"), ("other", None), (None, None)):
                file = tmp_path / f"{name}.example.com.pem" if name else None
                asked = UpstreamRequest(
                    "GET", "https://api.example.com/hook", {}, b"", egress=Egress(f"http://{place}", file)
                )
                try:
                    response = await client.send(asked, 5.0, 5.0)
                    assert await response.read() == said
                    response.close()
                except UpstreamError as exc:
                    assert said is None and isinstance(exc.__cause__, ssl.SSLCertVerificationError)
        await client.close()

    assert [delivery.server_name for delivery in upstream.deliveries] == ["api.example.com"]
