# Where the network cuts an upstream's bytes is nobody's business: not in the reader, whatever ends a line, and not
# through the HTTP client, whatever comes in one TCP segment. Every split in two of what was recorded is in
# test_conformance.py; here the line ends differ, and the bytes go over a real connection.

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import EventStream, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.events import Event
from tests.support.raw_upstream import serving
from tests.wire.test_conformance import FORMATS, events_of, every, formats
from tests.wire.traffic import Streamed, WireFormat

# Streams of text; Bedrock's frames say how long they are, and know no lines.
text_streams = pytest.mark.parametrize(
    ("wire", "streamed"), [one for one in every("streamed") if one.values[0].name != "bedrock"]
)
STRIDE = 7  # bytes in a piece; odd, so that it falls out of step with whatever the streams repeat
LONG_STRIDE = 41  # so that most cuts stand alone within their event
EVERY = 3  # start of a stride in a commit; in a soak each
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def rewritten(stream: bytes, end: bytes) -> bytes:
    """Return the stream with other line ends; no data of ours holds one."""
    return stream.replace(b"\r\n", b"\n").replace(b"\n", end)


def cut_every(stream: bytes, size: int, start: int) -> list[bytes]:
    """Return pieces of ``size`` bytes, the first of ``start``: over all starts, every place is cut once."""
    places = [0, *range(start, len(stream), size), len(stream)]
    return [stream[one:other] for one, other in pairwise(places) if one < other]


@text_streams
@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["CRLF", "CR"])
@pytest.mark.parametrize("every", [EVERY, pytest.param(1, marks=pytest.mark.soak)])
def test_no_place_of_a_cut_matters_with_any_line_end(
    wire: WireFormat, streamed: Streamed, end: bytes, every: int
) -> None:
    """CR LF and CR mean what LF means, cut between the two bytes, inside a character or inside ``data:``: at a third of
    all places in a commit, at each in a soak."""
    stream = rewritten(streamed.stream, end)
    whole = events_of(wire, streamed, [rewritten(streamed.stream, b"\n")])

    for start in range(len(stream) % every, LONG_STRIDE, every):
        assert events_of(wire, streamed, cut_every(stream, LONG_STRIDE, start)) == whole, start


@text_streams
def test_a_byte_order_mark_and_comments_change_nothing(wire: WireFormat, streamed: Streamed) -> None:
    """Proxies put both into streams; neither is a part of an event, wherever it is cut."""
    plain = rewritten(streamed.stream, b"\n")
    stream = b"\xef\xbb\xbf" + plain.replace(b"\ndata:", b"\n: in between\nid: 7\nretry: 10\ndata:")
    whole = events_of(wire, streamed, [plain])

    for start in range(STRIDE):
        assert events_of(wire, streamed, cut_every(stream, STRIDE, start)) == whole, start


@formats
async def test_no_place_of_a_cut_matters_on_the_way_through_the_client(wire: WireFormat) -> None:
    """Each place of every third stream is cut: each piece comes in a chunk of its own, and the next only once it was
    read."""
    for streamed in wire.streamed[::3]:
        for start in range(STRIDE):
            pieces = cut_every(streamed.stream, STRIDE, start)
            whole = events_of(wire, streamed, [streamed.stream])

            assert await read_over_http(wire, streamed, pieces) == whole, (streamed.name, start)


@pytest.mark.parametrize("wire", FORMATS, ids=lambda wire: wire.name)
async def test_no_place_of_a_cut_matters_in_the_http_itself(wire: WireFormat) -> None:
    """The head, the sizes of chunks and their ends may come in pieces, too: of each format's first stream."""
    streamed = wire.streamed[0]
    raw = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut_every(streamed.stream, 50, 50))
    whole = events_of(wire, streamed, [streamed.stream])
    for start in range(STRIDE):

        async def play(writer: asyncio.StreamWriter, start: int = start) -> None:
            for piece in cut_every(raw + b"0\r\n\r\n", STRIDE, start):
                writer.write(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # one turn for the bytes to arrive, one for them to be read

        async with serving(play) as url, asyncio.timeout(20):
            assert await read(url, wire.make().open_events(streamed.request)) == whole, start


async def read_over_http(wire: WireFormat, streamed: Streamed, pieces: list[bytes]) -> tuple[list[Event], str | None]:
    """Return what comes of ``pieces`` when each is sent once the one before it was read."""
    was_read = asyncio.Event()

    async def play(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await was_read.wait()
            was_read.clear()
        writer.write(b"0\r\n\r\n")

    async with serving(play) as url, asyncio.timeout(20):
        return await read(url, wire.make().open_events(streamed.request), was_read.set)


async def read(
    url: str, reader: EventStream, on_piece: Callable[[], None] = lambda: None
) -> tuple[list[Event], str | None]:
    """Return the events of a stream, and the word of the failure that it ends in, as a reply's reader finds them."""
    client = UpstreamClient()
    seen: list[Event] = []
    response = await client.send(UpstreamRequest("POST", url, {"content-type": "application/json"}, b"{}"), 5.0, 5.0)
    try:
        while (piece := await response.next_piece()) is not None:
            on_piece()
            seen += reader.feed(piece)
            if reader.failure is not None:
                raise reader.failure
        seen += reader.finish()
    except UpstreamFailure as exc:
        return seen, exc.outcome
    finally:
        response.close()
        await client.close()
    return seen, None
