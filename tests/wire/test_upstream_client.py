# The upstream client over real sockets: what it sends, what it reads, and what each failure of the network becomes.

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.run.processes import free_port
from gateway.upstreams.client import UpstreamClient, UpstreamResponse
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from tests.support.raw_upstream import serving
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

HEADERS = {
    "content-type": "application/json",
    "accept-encoding": "identity",
    "authorization": "Bearer sk-upstream",
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as running:
        yield running


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Both loops: the house runs on uvloop, its tools on asyncio's own."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture
async def client(upstream: ScriptedUpstream) -> AsyncIterator[UpstreamClient]:
    upstream.forget()
    opened = UpstreamClient()
    yield opened
    await opened.close()


def asking(upstream: ScriptedUpstream, script: str, *, stream: bool = False) -> UpstreamRequest:
    body = {"model": f"gpt-4o:{script}", "messages": [{"role": "user", "content": "Hello."}], "stream": stream}
    return UpstreamRequest("POST", upstream.url + "/chat/completions", HEADERS, msgspec.json.encode(body))


async def send(client: UpstreamClient, request: UpstreamRequest, patience: float = 5.0) -> UpstreamResponse:
    return await client.send(request, 5.0, patience)


async def test_only_what_a_format_says_goes_out(upstream: ScriptedUpstream, client: UpstreamClient) -> None:
    """No header is invented but the two that HTTP needs: an upstream learns nothing of client or library."""
    answer = await send(client, asking(upstream, "tokens=2"))
    body = await answer.read()
    answer.close()

    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert len(msgspec.json.decode(body)["choices"]) == 1
    assert set(upstream.requests[-1].headers) == {*HEADERS, "host", "content-length"}


@pytest.mark.parametrize("fault", ["reset", "broken"])
async def test_a_connection_lost_in_mid_stream_is_a_reset(
    upstream: ScriptedUpstream, client: UpstreamClient, fault: str
) -> None:
    """What came before the break is read; the break itself is told from a regular end."""
    answer = await send(client, asking(upstream, f"{fault},after=2", stream=True))
    with pytest.raises(UpstreamError) as caught:
        while await answer.next_piece() is not None:
            pass
    answer.close()

    assert caught.value.outcome == "reset"


@pytest.mark.parametrize(
    ("script", "patience", "kind", "outcome"),
    [("reset-before-headers", 5.0, UpstreamError, "reset"), ("hang-before-headers", 0.2, UpstreamTimeout, "timeout")],
)
async def test_an_answer_that_never_begins_has_a_name(
    upstream: ScriptedUpstream,
    client: UpstreamClient,
    script: str,
    patience: float,
    kind: type[UpstreamFailure],
    outcome: str,
) -> None:
    """A lost connection and a silent upstream differ: one is retried at once, the other took all our patience."""
    with pytest.raises(kind) as caught:
        await send(client, asking(upstream, script), patience)

    assert caught.value.outcome == outcome


def stand_still(after: float) -> None:
    """Have the loop do nothing for 0.4 s: upstreams, in threads of their own, go on."""
    asyncio.get_running_loop().call_later(after, time.sleep, 0.4)


async def test_what_came_while_the_process_stood_still_is_not_late(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """Each deadline ends during a stop: of the connection, of the headers, of a piece, of the whole answer."""
    stand_still(0.0)
    connected = await client.send(asking(upstream, "tokens=2"), 0.2, 0.2)
    await connected.read()
    connected.close()
    stand_still(0.05)
    answer = await send(client, asking(upstream, "tokens=4,first_token=0.1", stream=True), 0.2)
    stand_still(0.05)
    first = await answer.next_piece(0.2)
    answer.due = asyncio.get_running_loop().time() + 0.2
    stand_still(0.05)
    rest = await answer.read()
    answer.close()

    assert ((first or b"") + rest).endswith(b"data: [DONE]\n\n")


async def test_a_process_that_stood_still_does_not_wait_for_ever(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """What has not come soon after the stop is late, in a loop that is always late, too."""

    async def busy() -> None:
        while True:
            time.sleep(0.15)
            await asyncio.sleep(0.01)

    others = asyncio.create_task(busy())
    with pytest.raises(UpstreamTimeout):
        await send(client, asking(upstream, "hang-before-headers"), 0.2)
    others.cancel()


async def test_an_answer_in_drops_ends_in_a_loop_that_is_always_late(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """What is due once is forgiven once, however many waits it has."""

    async def busy() -> None:
        while True:
            time.sleep(0.4)
            await asyncio.sleep(0.01)

    answer = await send(client, asking(upstream, "pings-only", stream=True))
    await answer.next_piece()
    answer.due = asyncio.get_running_loop().time() + 0.1
    others = asyncio.create_task(busy())
    with pytest.raises(UpstreamTimeout):
        for _ in range(15):
            await answer.next_piece()
    others.cancel()
    answer.close()


@pytest.mark.parametrize("size", [1, 100_000, 3_000_000])
async def test_a_body_of_any_size_arrives_whole(upstream: ScriptedUpstream, client: UpstreamClient, size: int) -> None:
    """A body that the connection takes in one go and one that it does not are the same to the upstream."""
    request = asking(upstream, "tokens=2")
    body = {**msgspec.json.decode(request.body), "user": "x" * size}
    for _ in range(2):  # over a new connection, and over the same again
        answer = await send(client, replace(request, body=msgspec.json.encode(body)))
        assert answer.status == 200
        await answer.read()
        answer.close()

    assert [seen.body == body for seen in upstream.requests] == [True, True]


async def test_a_port_without_a_listener_cannot_be_reached(client: UpstreamClient) -> None:
    """A refused connection is no reset: nothing was sent."""
    request = UpstreamRequest("POST", f"http://127.0.0.1:{free_port()}/v1/chat/completions", HEADERS, b"{}")
    with pytest.raises(UpstreamError) as caught:
        await send(client, request)

    assert caught.value.outcome == "connect"


async def test_an_answer_without_end_is_not_read_for_ever(upstream: ScriptedUpstream, client: UpstreamClient) -> None:
    """A body longer than the bound is refused instead of filling the memory."""
    answer = await send(client, asking(upstream, "tokens=50"))
    with pytest.raises(UpstreamError) as caught:
        await answer.read(longest=100)
    answer.close()

    assert caught.value.outcome == "too_long"


async def test_closing_early_closes_the_connection(upstream: ScriptedUpstream, client: UpstreamClient) -> None:
    """The upstream stops working for a reply that nobody reads."""
    answer = await send(client, asking(upstream, "tokens=100,pace=0.02", stream=True))
    await answer.next_piece()
    answer.close()
    closed_at = await asyncio.to_thread(until, lambda: upstream.requests[-1].closed_at)

    assert closed_at
    assert client.pool.idle == 0


async def test_a_connection_is_used_again_after_a_whole_answer(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """What was read to its end goes back to the pool."""
    for _ in range(3):
        answer = await send(client, asking(upstream, "tokens=2"))
        await answer.read()
        answer.close()

    assert client.pool.idle == 1


async def test_a_teams_own_key_travels_on_connections_of_its_team_alone(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """Each has its own, and its own again."""
    for party in ("", "mine", "theirs", "mine", ""):
        answer = await send(client, replace(asking(upstream, "tokens=2"), party=party))
        await answer.read()
        answer.close()

    assert client.pool.idle == 3


GREETING = b'{"choices":[{"message":{"content":"Hi"}}]}'
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def gzipped(body: bytes) -> bytes:
    return OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(gzip.compress(body)) + gzip.compress(body)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + GREETING,
        OK + b"connection: close\r\n\r\n" + GREETING,
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + OK + b"content-length: 42\r\n\r\n" + GREETING,
        OK
        + b"transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n2a;odd=1\r\n"
        + GREETING
        + b"\r\n0\r\nx-sum: 7\r\n\r\n",
        OK
        + b"x-twice: a\r\nx-twice: b\r\nset-cookie: a=b\r\nx-odd: \xc3\xbc\xff\r\ncontent-length: 42\r\n\r\n"
        + GREETING,
        gzipped(GREETING),
    ],
    ids=["HTTP/1.0", "until it closes", "early hints", "chunks with trailers", "odd headers", "compressed unasked"],
)
async def test_http_of_every_age_is_read(client: UpstreamClient, answer: bytes) -> None:
    """What servers and proxies do within the rules, or just beside them, costs nobody an answer."""
    assert len(GREETING) == 42

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with serving(play) as url:
        response = await send(client, UpstreamRequest("POST", url, HEADERS, b"{}"))
        body = await response.read()
        response.close()

    assert (response.status, body) == (200, GREETING)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + GREETING,
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n2a\r\n" + GREETING + b"\r\n",
        OK + b"content-encoding: gzip\r\ncontent-length: 42\r\n\r\n" + GREETING,
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x03\x01",
        OK + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=["short", "bad size", "no last chunk", "not gzip", "no HTTP", "TLS", "endless header"],
)
async def test_http_that_is_broken_is_the_upstreams_failure(client: UpstreamClient, answer: bytes) -> None:
    """Whatever the library thinks of it, callers see a failure of ours, and never half a body."""

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async with serving(play) as url:
        with pytest.raises(UpstreamError) as caught:
            response = await send(client, UpstreamRequest("POST", url, HEADERS, b"{}"))
            try:
                await response.read()
            finally:
                response.close()

    assert caught.value.outcome == "reset"


async def test_a_small_body_that_unpacks_to_a_huge_one_is_refused(client: UpstreamClient) -> None:
    """The bound is on what is kept, not on what came."""

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(gzipped(b"0" * 20_000_000))

    async with serving(play) as url:
        response = await send(client, UpstreamRequest("POST", url, HEADERS, b"{}"))
        with pytest.raises(UpstreamError) as caught:
            await response.read(longest=1_000_000)
        response.close()

    assert caught.value.outcome in ("too_long", "reset")
