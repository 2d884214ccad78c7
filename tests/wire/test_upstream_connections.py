# The connections under the upstream client, on both event loops: when one is used again, when never, and what goes over
# it. The server here is asyncio's own, which says byte for byte what a test wants.

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.upstreams import connection, pool
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.pool import Origin, place_of
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamTimeout
from tests.support.raw_upstream import LENGTH
from tests.support.receiver import answer, certificate_for, receiving
from tests.support.waiting import until_found

Play = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both loops: the house runs on uvloop, its tools on asyncio's own."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    opened = UpstreamClient()
    yield opened
    await opened.close()


class Server:
    """Plays an answer to each request, told how many its connection has had; keeps the connections."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self.url = ""
        self.writers: list[asyncio.StreamWriter] = []
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer what comes over one connection until it ends."""
        self.writers.append(writer)
        number = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                await self._play(number, reader, writer)
                await writer.drain()
                number += 1
        except (
            OSError,
            RuntimeError,
            asyncio.IncompleteReadError,
        ):  # the second is uvloop's word for a closed connection
            writer.close()


@asynccontextmanager
async def playing(play: Play) -> AsyncIterator[Server]:
    """Run a server on a free port."""
    server = Server(play)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    yield server
    listening.close()
    for writer in server.writers:
        writer.transport.abort()


async def ask(client: UpstreamClient, url: str, body: bytes = b"{}", patience: float = 5.0) -> bytes:
    request = UpstreamRequest("POST", url, {}, body)
    response = await client.send(request, 5.0, patience)
    try:
        return await response.read()
    finally:
        response.close()


async def greet(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HELLO)


async def test_requests_in_a_row_share_a_connection(client: UpstreamClient) -> None:
    """One after the other they need one; at once each has its own, and all are kept."""
    async with playing(greet) as server:
        for _ in range(3):
            assert await ask(client, server.url) == b"hello"
        assert len(server.writers) == 1
        await asyncio.gather(*(ask(client, server.url) for _ in range(4)))

        assert client.pool.idle == len(server.writers) == 4


async def test_a_connection_closed_while_idle_is_not_used_again(client: UpstreamClient) -> None:
    """Its upstream's own time was over; the next request makes another."""
    async with playing(greet) as server:
        await ask(client, server.url)
        server.writers[0].close()
        await until_found(lambda: _said(client.pool.idle == 0))

        assert await ask(client, server.url) == b"hello"


async def test_a_connection_is_not_kept_for_ever(client: UpstreamClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody needs any more is closed, though its upstream would keep it."""
    monkeypatch.setattr(connection, "KEPT_IDLE", 0.05)
    async with playing(greet) as server:
        await ask(client, server.url)
        await until_found(lambda: _said(client.pool.idle == 0))
        await ask(client, server.url)

        assert len(server.writers) == 2


@pytest.mark.parametrize("late", [False, True], ids=["with the answer", "later"])
async def test_bytes_that_were_not_asked_for_are_no_answer(client: UpstreamClient, late: bool) -> None:
    """A second answer to one request is never read as that to the next, which may be another team's."""

    async def play(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        if late:
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.write(HELLO.replace(b"hello", b"evil!"))

    async with playing(play) as server:
        assert await ask(client, server.url) == b"hello"
        await until_found(lambda: _said(client.pool.idle == 0))
        assert await ask(client, server.url) == b"hello"


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello", b"HTTP/1.1 200 OK\r\n\r\nhello"],
)
async def test_a_connection_that_is_to_end_is_not_used_again(client: UpstreamClient, answer: bytes) -> None:
    """Whether the upstream says so or its answer is as long as the connection lasts."""

    async def play(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.write_eof()

    async with playing(play) as server:
        assert [await ask(client, server.url) for _ in range(2)] == [b"hello"] * 2
        assert len(server.writers) == 2 and client.pool.idle == 0


async def test_an_answer_before_the_end_of_the_request_is_read(client: UpstreamClient) -> None:
    """An upstream refuses a long body by its head; the refusal counts, and the connection is not used again."""
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 5\r\n\r\nlarge"

    async def answer_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(refusal)
        await reader.read(1)  # and reads no more

    listening = await asyncio.start_server(answer_early, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    request = UpstreamRequest("POST", url, {}, bytes(30_000_000))
    response = await client.send(request, 5.0, 5.0)
    body = await response.read()
    response.close()
    listening.close()

    assert (response.status, body) == (413, b"large")
    assert not request.delivery.is_whole and client.pool.idle == 0


async def test_a_request_is_delivered_once_its_last_byte_has_gone(client: UpstreamClient) -> None:
    """What an upstream has not taken yet is not charged to a client that leaves."""
    whole = [UpstreamRequest("POST", "", {}, body) for body in (b"{}", bytes(30_000_000))]
    hears = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await hears.wait()
        await reader.read(50_000_000)

    listening = await asyncio.start_server(hang, "127.0.0.1", 0, limit=1024)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    for request in whole:
        request = UpstreamRequest("POST", url, {}, request.body, request.delivery)
        with pytest.raises(UpstreamTimeout):
            await client.send(request, 5.0, 0.2)
    hears.set()
    listening.close()

    assert [request.delivery.is_whole for request in whole] == [True, False]


async def test_a_slow_reader_slows_the_upstream(client: UpstreamClient) -> None:
    """What is not read waits at the upstream, not in memory here; all of it comes in the end."""
    size, written = 40_000_000, 0

    async def play(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(100_000))
            await writer.drain()
            written += 100_000

    async with playing(play) as server:
        response = await client.send(UpstreamRequest("POST", server.url, {}, b"{}"), 5.0, 5.0)
        await asyncio.sleep(0.3)
        before, body = written, await response.read()
        response.close()

    assert before < size / 2
    assert len(body) == size


async def test_a_drip_of_anything_but_a_body_is_bounded(client: UpstreamClient) -> None:
    """Hints, fields and trailers without end are an upstream's failure, and cost no memory."""

    async def play(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n")
        while True:
            writer.write(b"x-more: " + b"y" * 1000 + b"\r\n")
            await writer.drain()

    async with playing(play) as server:
        with pytest.raises(UpstreamError) as caught:
            await ask(client, server.url)

    assert caught.value.outcome == "reset"


async def test_what_came_before_a_break_is_read_first(client: UpstreamClient) -> None:
    """A stream that breaks loses none of what its client should have seen."""

    async def play(_: int, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with playing(play) as server:
        response = await client.send(UpstreamRequest("POST", server.url, {}, b"{}"), 5.0, 5.0)
        await asyncio.sleep(0.05)
        assert await response.next_piece() == b"hello"
        with pytest.raises(UpstreamError, match="closed") as caught:
            await response.next_piece()
        response.close()

    assert caught.value.outcome == "reset"


async def test_silence_within_an_answer_has_an_end(client: UpstreamClient) -> None:
    """A piece's patience and the whole answer's are both kept, on a connection whose alarm an earlier call set."""

    async def play(number: int, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO if number == 0 else b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello")

    async with playing(play) as server:
        for limit in ("patience", "due"):
            await ask(client, server.url)
            response = await client.send(UpstreamRequest("POST", server.url, {}, b"{}"), 5.0, 5.0)
            if limit == "due":
                response.due = asyncio.get_running_loop().time() + 0.1
            assert await response.next_piece() == b"hello"
            with pytest.raises(UpstreamTimeout):
                await response.next_piece(0.1 if limit == "patience" else 100.0)
            response.close()

        assert client.pool.idle == 0


async def test_closing_ends_what_is_under_way_at_once(client: UpstreamClient) -> None:
    """A gateway that closes waits for no upstream."""

    async def hang(_: int, reader: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await reader.read()

    async with playing(hang) as server:
        asking = asyncio.create_task(ask(client, server.url))
        await until_found(lambda: _said(server.requests))
        await client.close()
        with pytest.raises(UpstreamError):
            await asking


async def test_tls_is_spoken_with_the_name_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream hears the name, and its certificate must be for it and from an authority that we trust."""
    server, ours = certificate_for("api.example.com", tmp_path)
    _at_home(monkeypatch)
    async with receiving(server) as upstream:
        upstream.acts = [answer(200, body=b"hello")]
        trusting, usual = UpstreamClient(ours), UpstreamClient()
        for client, host in (
            (trusting, "api.example.com"),
            (trusting, "other.example.com"),
            (usual, "api.example.com"),
        ):
            try:
                assert await ask(client, upstream.url(host=host)) == b"hello"
            except UpstreamError as exc:
                assert exc.outcome == "connect" and isinstance(exc.__cause__, ssl.SSLCertVerificationError)
        await trusting.close()
        await usual.close()

    assert [delivery.server_name for delivery in upstream.deliveries] == ["api.example.com"]


async def test_many_calls_at_once_look_a_name_up_once(client: UpstreamClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next ones do not, for a while; a name that is not found is an upstream that cannot be reached."""
    looks = _at_home(monkeypatch)
    async with playing(greet) as server:
        url = server.url.replace("127.0.0.1", "api.example.com")
        await asyncio.gather(*(ask(client, url) for _ in range(5)))
        assert len(looks) == 1
        with pytest.raises(UpstreamError) as caught:
            await ask(client, url.replace("api", "nowhere"))

    assert caught.value.outcome == "connect"


async def test_a_header_cannot_smuggle_a_line(client: UpstreamClient) -> None:
    """A key that somebody pasted with its line's end stops here, and is not told."""
    for value in ("sk-a\r\nx-evil: 1", "sk-a\n", "sk-a\r"):
        with pytest.raises(ValueError, match="several lines"):
            await client.send(UpstreamRequest("POST", "http://127.0.0.1:1/", {"authorization": value}, b""), 1.0, 1.0)


def test_urls_are_read_as_they_are_meant() -> None:
    """Ports, IPv6, names of other scripts, and what a path may not hold raw."""
    assert place_of("https://api.openai.com/v1") == (Origin("api.openai.com", 443, True), "api.openai.com", "/v1")
    assert place_of("http://[::1]:8000") == (Origin("::1", 8000, False), "[::1]:8000", "/")
    assert place_of("http://bücher.example:80/ä b%20c?q=1 2") == (
        Origin("xn--bcher-kva.example", 80, False),
        "xn--bcher-kva.example",
        "/%C3%A4%20b%20c?q=1%202",
    )


async def _said(value: object) -> object:
    return value


def _at_home(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have names of example.com stand for this machine, but for those of nowhere; return which are looked up."""
    looks: list[str] = []
    look_up = pool.Pool._resolve

    async def resolve(self: pool.Pool, origin: Origin) -> Any:
        looks.append(origin.host)
        if origin.host.startswith("nowhere"):
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return await look_up(self, Origin("127.0.0.1", origin.port, origin.is_secure))

    monkeypatch.setattr(pool.Pool, "_resolve", resolve)
    return looks
