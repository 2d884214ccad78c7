# Server-sent events come out the same however their bytes were cut, and the work stays linear.

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.sse import EventReader, EventStreamTooLong, ServerEvent, encode_event

LINE_ENDS = [b"\n", b"\r\n", b"\r"]

lines = st.one_of(
    st.sampled_from(
        [b"", b"data", b"data:", b"data: ", b"event: x", b"event:y", b"event", b": ping", b"id: 7", b"odd"]
    ),
    st.binary(max_size=12).map(lambda raw: b"data: " + raw.replace(b"\r", b"").replace(b"\n", b"")),
)
streams = st.lists(st.tuples(lines, st.sampled_from(LINE_ENDS)), max_size=20).map(
    lambda pairs: b"".join(line + end for line, end in pairs)
)


def read(pieces: list[bytes]) -> list[ServerEvent]:
    reader = EventReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def by_the_book(stream: bytes) -> list[ServerEvent]:
    """Read a whole stream line by line, as the standard says it; slow and plain."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, name, data = [], b"", []
    for line in text.split(b"\n")[:-1]:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if line == b"":
            events += [ServerEvent(name, b"\n".join(data))] if data else []
            name, data = b"", []
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events


@given(streams, st.lists(st.integers(0, 400), max_size=12), st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_any_cuts_give_the_events_of_the_standard(stream: bytes, cuts: list[int], mark: bytes) -> None:
    """Where the pieces were cut is never visible in the events."""
    stream = mark + stream
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:end] for start, end in pairwise(places)]

    assert read(pieces) == by_the_book(stream)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_every_single_byte_may_come_alone(end: bytes) -> None:
    """CR, LF and CR LF end a line, even when a CR LF is cut in two."""
    stream = b"\xef\xbb\xbf" + end.join(
        [b": hello", b"event: x", b"data: one", b"data: tw\xc3\xb6", b"", b"data: 3", b"", b""]
    )
    pieces = [stream[place : place + 1] for place in range(len(stream))]

    assert read(pieces) == [ServerEvent(b"x", b"one\ntw\xc3\xb6"), ServerEvent(b"", b"3")]


def test_an_event_leaves_with_the_byte_that_ends_it() -> None:
    """A CR is not held back to see whether a LF follows: the event would come one piece too late."""
    reader = EventReader()

    assert reader.feed(b"data: now\r\r") == [ServerEvent(b"", b"now")]
    assert reader.feed(b"\ndata: then\n") == []
    assert reader.feed(b"\n") == [ServerEvent(b"", b"then")]


def test_a_byte_order_mark_counts_only_at_the_start() -> None:
    """Later on it is a character of the data like any other."""
    mark = b"\xef\xbb\xbf"

    assert read([mark[:1], mark[1:] + b"data: " + mark + b"\n\n"]) == [ServerEvent(b"", mark)]


def test_an_event_beyond_the_limit_is_refused() -> None:
    """What is kept of an unfinished event is bounded: in one line, and over many."""
    for piece in (b"x" * 30, b"data: 1234\n"):
        reader = EventReader(limit=100)
        reader.feed(b"data: ")
        with pytest.raises(EventStreamTooLong):
            for _ in range(12):
                reader.feed(piece)


def test_many_events_may_be_longer_than_the_limit_together() -> None:
    """The limit is of one event, not of the stream."""
    reader = EventReader(limit=100)
    events = [event for _ in range(50) for event in reader.feed(b"data: " + b"x" * 60 + b"\n\ndata: ha")]

    assert len(events) == 50


def test_a_long_event_takes_linear_time() -> None:
    """10 MiB in pieces of 64 KiB, and 400 kB byte by byte, cost a few passes over the bytes and not one per piece."""
    data = b"x" * (10 * 1024 * 1024)
    stream, small = encode_event(data), encode_event(b"y" * 400_000)
    started = time.process_time()
    events = read([stream[place : place + 65536] for place in range(0, len(stream), 65536)])
    single = read([small[place : place + 1] for place in range(len(small))])

    assert events == [ServerEvent(b"", data)] and len(single) == 1
    assert time.process_time() - started < 1.5  # seconds; the square of either is far beyond it


@given(st.binary().map(lambda raw: raw.replace(b"\r", b"").replace(b"\n", b"")), st.sampled_from([b"", b"ping"]))
def test_what_is_encoded_is_read_again(data: bytes, name: bytes) -> None:
    """encode_event and EventReader are each other's inverse."""
    assert read([encode_event(data, name)]) == [ServerEvent(name, data)]
