# One message to a server and what comes back: bounded in bytes and time, and read before any of it is passed on. No
# redirect is followed, and of the answer's headers a client gets none but its session.

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from functools import partial

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field
from msgspec.structs import replace

from gateway.core.settings import McpServer
from gateway.mcp.messages import INITIALIZE, Ident, McpMessage
from gateway.upstreams.client import UpstreamClient, UpstreamResponse, read_error_body
from gateway.upstreams.wire.base import Delivery, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamRefused
from gateway.upstreams.wire.reading import read_retry_after
from protocol.decoding import NOT_JSON
from protocol.serving.off_loop import off_loop
from protocol.sse import EventReader, EventStreamTooLong

SHORTEST_SECRET = 16  # characters of a header's value that no answer may hold

SESSION = re.compile(r"[\x21-\x7e]{1,1024}")

Notify = Callable[[bytes], Awaitable[None]]


class ServerFault(Struct, frozen=True, omit_defaults=True):
    """An error in the server's own words."""

    code: int
    message: str
    data: Raw | UnsetType = UNSET


class Received(Struct, frozen=True):
    """A message of a server: a notification, a request (which is none of its business here), or the answer."""

    jsonrpc: str
    id: Ident | UnsetType | None = UNSET
    method: str | UnsetType = UNSET
    result: dict[str, Raw] | UnsetType = UNSET
    error: ServerFault | UnsetType = UNSET


class Answer(Struct, frozen=True):
    """The answer to one message: its result or the server's error, neither for a notification that was taken."""

    status: int = 202
    result: dict[str, Raw] | None = None
    error: ServerFault | None = None
    session: str | None = None  # the server's id of a session that began
    headers: Mapping[str, str] = {}  # of ours


class Sent(Struct, frozen=True):
    """A message for a server, as it is sent."""

    server: McpServer
    message: McpMessage
    headers: Mapping[str, str]
    body: bytes
    delivery: Delivery = field(default_factory=Delivery)


async def exchange(client: UpstreamClient, sent: Sent, notify: Notify) -> Answer:
    """Send a message and return its answer; what the server notifies of before goes to ``notify``, as bytes of JSON.

    Raises UpstreamFailure.
    """
    server, times = sent.server, sent.server.timeouts
    due = asyncio.get_running_loop().time() + times.total
    headers = {**sent.headers, **server.headers}
    request = UpstreamRequest("POST", server.url, headers, sent.body, sent.delivery, egress=server.egress)
    with closing(await client.send(request, times.connect, min(times.answer, times.total))) as response:
        response.due = due
        if not 200 <= response.status < 300:
            return await _refusal(sent, response)
        if sent.message.id is UNSET:
            return Answer()
        if response.status != 200:
            raise _nonsense(f"answers a request with {response.status}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            body = await response.read(server.max_answer_bytes)
            answer = await off_loop(len(body), partial(_answer_in, sent, body))
        elif kind == "text/event-stream":
            answer = await _answer_among(sent, response, notify)
        else:
            raise _nonsense(f"answers with neither JSON nor an event stream, but {kind[:100]!r}")
        session = response.headers.get("mcp-session-id") if sent.message.method == INITIALIZE else None
        if session is not None and SESSION.fullmatch(session) is None:
            raise _nonsense("opens a session whose id cannot be sent back")
        return replace(answer, session=session)


async def end_session(client: UpstreamClient, sent: Sent) -> None:
    """Have a server end the session that the headers of ``sent`` name. Raises UpstreamFailure."""
    server, times = sent.server, sent.server.timeouts
    headers = {**sent.headers, **server.headers}
    request = UpstreamRequest("DELETE", server.url, headers, b"", egress=server.egress)
    with closing(await client.send(request, times.connect, min(times.answer, times.total))) as response:
        if response.status in (404, 405):  # it has none such any more, or ends them by itself
            raise UpstreamRefused("The MCP server ends no such session.", status=response.status)
        if not 200 <= response.status < 300:
            await _refusal(sent, response)


async def _answer_among(sent: Sent, response: UpstreamResponse, notify: Notify) -> Answer:
    async for data in _events(sent, response):
        received = await off_loop(len(data), partial(_read, sent, data))
        if received.method is UNSET:
            return _answer_of(sent, received)
        if received.id is UNSET:
            await notify(data)
        elif received.method != "ping":
            raise _nonsense("asks its client something, which is not carried here")
    raise UpstreamError("The MCP server ended its stream without an answer.", outcome="cut")


async def _events(sent: Sent, response: UpstreamResponse) -> AsyncIterator[bytes]:
    """Yield the data of each event, on one line. Raises UpstreamError past the bytes that an answer may have."""
    reader, left = EventReader(sent.server.max_answer_bytes), sent.server.max_answer_bytes
    while (piece := await response.next_piece()) is not None:
        left -= len(piece)
        try:
            events = reader.feed(piece)
        except EventStreamTooLong as exc:
            raise _too_long() from exc
        for event in events:
            if event.data and event.name in (b"", b"message"):  # an event without data begins a stream to resume
                yield event.data.replace(b"\n", b" ")  # between the tokens of JSON: a text holds none
        if left < 0:
            raise _too_long()


def _answer_in(sent: Sent, body: bytes) -> Answer:
    received = _read(sent, body)
    if received.method is not UNSET:
        raise _nonsense("answers with a message that is no answer")
    return _answer_of(sent, received)


def _answer_of(sent: Sent, received: Received) -> Answer:
    if type(received.id) is not type(sent.message.id) or received.id != sent.message.id:
        raise _nonsense("answers another request than was asked")
    if (received.result is UNSET) == (received.error is UNSET):
        raise _nonsense("answers with neither a result nor an error")
    if received.result is not UNSET:
        return Answer(200, received.result)
    assert received.error is not UNSET
    return Answer(200, error=received.error)


def _read(sent: Sent, data: bytes) -> Received:
    for secret in _secrets(sent.server):
        if secret in data:
            raise UpstreamError("The MCP server's answer held the gateway's own credential.", outcome="malformed")
    try:
        received = _decode(data)
    except NOT_JSON as exc:
        raise _nonsense("sends what is no message of JSON-RPC") from exc
    if received.jsonrpc != "2.0":
        raise _nonsense("speaks another version of JSON-RPC")
    return received


async def _refusal(sent: Sent, response: UpstreamResponse) -> Answer:
    """Return the error that a status of 4xx came with, if it is the protocol's; raise for everything else."""
    status = response.status
    if 300 <= status < 400:
        raise UpstreamError(f"The MCP server redirects ({status}), which is not followed.", outcome=f"status_{status}")
    if status in (401, 403):
        raise UpstreamError(f"The MCP server refuses the gateway's own credential ({status}).", outcome="refused_key")
    if status == 429:
        raise UpstreamBusy("The MCP server's rate limit is reached.", retry_after=read_retry_after(response.headers))
    if status >= 500:
        raise UpstreamError(f"The MCP server failed ({status}).", outcome=f"status_{status}")
    try:
        received = _read(sent, await read_error_body(response))
    except UpstreamError:
        received = Received("2.0")
    if received.error is not UNSET:
        return Answer(status, error=received.error)
    raise UpstreamRefused(f"The MCP server takes no such request ({status}).", status=404 if status == 404 else 400)


def _secrets(server: McpServer) -> set[bytes]:
    """Return what no answer may hold: values of headers, behind their scheme."""
    values = (value.rpartition(" ")[2] for value in server.headers.values())
    return {value.encode() for value in values if len(value) >= SHORTEST_SECRET}


def _nonsense(what: str) -> UpstreamError:
    return UpstreamError(f"The MCP server {what}.", outcome="malformed")


def _too_long() -> UpstreamError:
    return UpstreamError("The MCP server's answer is too long.", outcome="too_long")


_decode = msgspec.json.Decoder(Received).decode
