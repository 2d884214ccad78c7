# WebSockets to upstreams: what comes in pieces is whole again, what is too much waits, and an upstream that ends,
# refuses or falls silent is told of.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from gateway.upstreams import socket as sockets
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.socket import SocketClosed, UpstreamSocket
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError

PATIENCE = 30.0  # seconds


async def opened(port: int) -> UpstreamSocket:
    """Return a WebSocket to a port of this machine."""
    request = UpstreamRequest("GET", f"http://127.0.0.1:{port}/v1/realtime?model=a", {"authorization": "Bearer k"}, b"")
    return await UpstreamClient().open_socket(request, PATIENCE, PATIENCE)


@asynccontextmanager
async def talking(talk: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[UpstreamSocket]:
    """Open a WebSocket to an upstream that talks so."""
    async with serve(talk, "127.0.0.1", 0, max_size=None, compression=None) as server:
        socket = await opened(server.sockets[0].getsockname()[1])
        try:
            yield socket
        finally:
            socket.abort()


async def test_messages_come_whole_and_before_the_end() -> None:
    """Those in fragments, too; then it is told why the upstream closed the connection."""
    heard = []

    async def talk(peer: ServerConnection) -> None:
        assert peer.request is not None
        heard.extend([peer.request.path, peer.request.headers["authorization"], await peer.recv()])
        await peer.send(["in ", "three ", "pieces"])
        await peer.send("whole")
        await peer.close(1001, "going")

    async with talking(talk) as socket:
        await socket.send(b"hello")
        messages = [await socket.receive(), await socket.receive()]
        with pytest.raises(SocketClosed) as closed:
            await socket.receive()
        with pytest.raises(SocketClosed):
            await socket.send(b"too late")

    assert heard == ["/v1/realtime?model=a", "Bearer k", "hello"]
    assert messages == [b"in three pieces", b"whole"]
    assert (closed.value.code, closed.value.reason) == (1001, "going")


async def test_an_upstream_waits_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more waits here than may, and nothing of it is lost."""
    monkeypatch.setattr(sockets, "UNREAD", 1000)
    pauses = []

    async def talk(peer: ServerConnection) -> None:
        for number in range(300):
            await peer.send(f"{number} " + "x" * 1000)
        await peer.wait_closed()

    async with talking(talk) as socket:
        seen = []
        for _ in range(300):
            seen.append(int((await socket.receive()).split()[0]))
            pauses.append(socket._is_paused)

    assert seen == [*range(300)]
    assert any(pauses)


async def test_bytes_end_the_connection() -> None:
    """The events of an API are texts."""
    told = asyncio.get_running_loop().create_future()

    async def talk(peer: ServerConnection) -> None:
        await peer.send(b"\x00")
        with pytest.raises(ConnectionClosed) as closed:
            await peer.recv()
        told.set_result(closed.value.rcvd and closed.value.rcvd.code)

    async with talking(talk) as socket:
        with pytest.raises(SocketClosed):
            await socket.receive()

        assert await told == 1003


async def test_a_refusal_is_an_answer_of_http() -> None:
    """With its status, its headers and what it says."""

    def refuse(peer: ServerConnection, request: Request) -> Response:
        return Response(429, "Slow", Headers({"retry-after": "7", "content-length": "4"}), b"slow")

    async def talk(peer: ServerConnection) -> None:
        raise AssertionError("it was refused")

    async with serve(talk, "127.0.0.1", 0, process_request=refuse) as server:
        socket = await opened(server.sockets[0].getsockname()[1])

        assert (socket.status, socket.headers["retry-after"], socket.body) == (429, "7", b"slow")


async def test_what_comes_before_the_upstream_hears_of_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, also what waited until some was taken; and nothing more, whatever it goes on to say."""
    monkeypatch.setattr(sockets, "UNREAD", 1000)
    sent = asyncio.Event()

    async def talk(peer: ServerConnection) -> None:
        for number in range(30):
            await peer.send(f"{number} " + "x" * 1000)
        sent.set()
        await peer.wait_closed()

    async with talking(talk) as socket:
        first = await socket.receive()
        await sent.wait()
        said = [first, *await socket.said_last()]
        with pytest.raises(SocketClosed):
            await socket.receive()

    assert [int(message.split()[0]) for message in said] == [*range(30)]


async def test_an_upstream_that_goes_on_after_the_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is not kept without bounds."""
    monkeypatch.setattr(sockets, "LARGEST_MESSAGE", 100_000)
    monkeypatch.setattr(sockets, "LINGER", PATIENCE)
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        protocol = ServerProtocol()
        protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
        for event in protocol.events_received():
            assert isinstance(event, Request)
            protocol.send_response(protocol.accept(event))
        with pytest.raises(ConnectionError):
            while True:
                protocol.send_text(b"x" * 10_000)
                writer.write(b"".join(protocol.data_to_send()))
                await writer.drain()
                sent += 1

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        socket = await opened(server.sockets[0].getsockname()[1])
        await socket.receive()
        said = await socket.said_last()

    assert 10 < len(said) <= sent


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 101 Yes\r\nupgrade: websocket\r\n\r\n"])
async def test_what_is_no_handshake_is_an_error(answer: bytes) -> None:
    """Nothing, no HTTP, and a handshake that answers another."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        with pytest.raises(UpstreamError):
            await opened(server.sockets[0].getsockname()[1])


async def test_a_silent_upstream_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers no ping, as where its machine has gone."""
    monkeypatch.setattr(sockets, "PING_EVERY", 0.01)
    done = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = ServerProtocol()
        protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
        for event in protocol.events_received():
            assert isinstance(event, Request)
            protocol.send_response(protocol.accept(event))
        writer.write(b"".join(protocol.data_to_send()))
        await done.wait()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        socket = await opened(server.sockets[0].getsockname()[1])
        with pytest.raises(SocketClosed) as closed:
            await socket.receive()
        done.set()

    assert closed.value.code is None
