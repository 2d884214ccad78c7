# The upstream client over real sockets: what it sends, what it reads, and what each failure of the network becomes.

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from gateway.errors import UpstreamError, UpstreamFailure, UpstreamTimeout
from gateway.processes import free_port
from gateway.providers.base import UpstreamRequest
from gateway.providers.client import UpstreamClient, UpstreamResponse
from tests.support.scripted_upstream import ScriptedUpstream

HEADERS = {
    "content-type": "application/json",
    "accept-encoding": "identity",
    "authorization": "Bearer sk-upstream",
}


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as running:
        yield running


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
    await answer.close()

    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
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
    await answer.close()

    assert caught.value.outcome == "reset"


@pytest.mark.parametrize(
    ("script", "kind", "outcome"),
    [("reset-before-headers", UpstreamError, "reset"), ("hang-before-headers", UpstreamTimeout, "timeout")],
)
async def test_an_answer_that_never_begins_has_a_name(
    upstream: ScriptedUpstream, client: UpstreamClient, script: str, kind: type[UpstreamFailure], outcome: str
) -> None:
    """A lost connection and a silent upstream differ: one is retried at once, the other took all our patience."""
    with pytest.raises(kind) as caught:
        await send(client, asking(upstream, script), patience=0.2)

    assert caught.value.outcome == outcome


async def test_a_port_where_nobody_listens_cannot_be_reached(client: UpstreamClient) -> None:
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
    await answer.close()

    assert caught.value.outcome == "too_long"


async def test_closing_early_closes_the_connection(upstream: ScriptedUpstream, client: UpstreamClient) -> None:
    """The upstream stops working for a reply that nobody reads."""
    answer = await send(client, asking(upstream, "tokens=100,pace=0.02", stream=True))
    await answer.next_piece()
    await answer.close()
    deadline = time.monotonic() + 2
    while upstream.requests[-1].closed_at is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)

    assert upstream.requests[-1].closed_at is not None


async def test_a_connection_is_used_again_after_a_whole_answer(
    upstream: ScriptedUpstream, client: UpstreamClient
) -> None:
    """What was read to its end goes back to the pool."""
    for _ in range(3):
        answer = await send(client, asking(upstream, "tokens=2"))
        await answer.read()
        await answer.close()
    pool = client._session.connector
    assert pool is not None

    assert sum(len(idle) for idle in pool._conns.values()) == 1  # type: ignore[attr-defined]
