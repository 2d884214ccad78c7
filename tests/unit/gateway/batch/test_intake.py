# The input of batches, line by line: what is taken, and what each fault is called.

from __future__ import annotations

import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from gateway.batch import intake as module
from gateway.batch.intake import Intake, read_lines

URL = "/v1/chat/completions"
TINY = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n'
PIECES = [b'","', b'{"model":"m"}', b'"body":', b"\\", b"\\ud800", b"}", b"[", b"1e999", b"NaN", b"\\u0000"]


def line(custom_id: object = "a", **more: Any) -> bytes:
    """Return a line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m"}} | more).encode()


async def lines_of(data: bytes, size: int, intake: Intake) -> list[bytes]:
    """Read ``data`` in chunks of ``size``."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return [each async for each in read_lines(chunks(), intake)]


def test_a_line_is_its_custom_id_and_the_bytes_of_its_body() -> None:
    """The body is kept as it came, to the byte."""
    intake = Intake(URL)
    body = b'{"model" : "m", "messages":[{"role":"user","content":"\\u00e9"}] }'

    item = intake.line(b'{"custom_id":"x","method":"post","url":"%b","body":%b}' % (URL.encode(), body))

    assert item is not None and (item.custom_id, item.body) == ("x", body)
    assert (intake.faults, intake.count, intake.model) == ([], 1, "m")


@pytest.mark.parametrize(
    ("said", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_line", None),
        (b'{"custom_id":"a"}', "invalid_line", None),
        (line(7), "invalid_line", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("a\x00"), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "mismatched_url", "url"),
        (line(body=[]), "invalid_body", "body"),
        (line(body={}), "invalid_body", "body"),
        (line(body={"model": 3}), "invalid_body", "body"),
        (line(body=","), "invalid_body", "body"),
        (line().replace(b'{"', b'{"\xff":1,"', 1), "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (line().replace(b"{", b'{"url":"/v1/embeddings",', 1), "duplicate_key", "url"),
        (line().replace(b"{", b'{"body":{"model":"m"},', 1), "duplicate_key", "body"),
        (line().replace(b"{", b'{"\\u0062ody":{"model":"dear"},', 1), "duplicate_key", "body"),
        (line(other={"a": 1}).replace(b'{"a": 1}', b'{"a": 1, "a": 2}'), "duplicate_key", "a"),
    ],
)
def test_a_fault_is_told_with_its_line(said: bytes, code: str, param: str | None) -> None:
    """The line counts from 1, empty ones included, as an editor shows it."""
    intake = Intake(URL)

    taken = [intake.line(each) for each in (line("first"), b"", said, line("last"))]

    assert [each is None for each in taken] == [False, True, True, False]
    assert [(fault.line, fault.code, fault.param) for fault in intake.faults] == [(3, code, param)]


@given(st.integers(0, len(line()) - 1), st.integers(0, 12), st.binary(max_size=3) | st.sampled_from(PIECES))
def test_every_line_is_a_request_or_a_fault(place: int, gone: int, new: bytes) -> None:
    """Whatever somebody sends, nothing else comes of it: a worker that stumbled would do so again and again."""
    said = line()
    intake = Intake(URL)

    item = intake.line(said[:place] + new + said[place + gone :])
    assert (item is not None) + len(intake.faults) == 1


def test_a_custom_id_is_used_once() -> None:
    """The second one is at fault."""
    intake = Intake(URL)
    for each in ("a", "b", "a"):
        intake.line(line(each))

    assert [(fault.line, fault.code) for fault in intake.faults] == [(3, "duplicate_custom_id")]


def test_requests_may_be_bare_or_named() -> None:
    """A bare body is named by its place; one with a custom_id keeps it."""
    intake = Intake(URL)
    said = [{"model": "m"}, {"custom_id": "x", "body": {"model": "n"}}, {"body": {"model": "m"}}]

    items = [intake.request(Raw(json.dumps(each).encode())) for each in said]

    assert [item and item.custom_id for item in items] == ["1", "x", "3"]
    assert intake.model is None  # they name several


def test_a_request_says_each_of_its_fields_once() -> None:
    """Two readers would understand it differently."""
    intake = Intake(URL)

    intake.request(Raw(b'{"custom_id":"a","body":{"model":"m"}}'))
    intake.request(Raw(b'{"custom_id":"b","body":{"model":"m"},"body":{"model":"m"}}'))
    intake.request(Raw(b'{"custom_id":"c","custom_id":"d","body":{"model":"m"}}'))

    assert [(fault.line, fault.code, fault.param) for fault in intake.faults] == [
        (2, "duplicate_key", "body"),
        (3, "duplicate_key", "custom_id"),
    ]


def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads can stop as soon as there are too many."""
    monkeypatch.setattr(module, "MOST_REQUESTS", 3)
    intake = Intake(URL)
    for number in range(4):
        assert not intake.is_full
        intake.line(line(f"{number}"))
    intake.end()

    assert intake.is_full
    assert [fault.code for fault in intake.faults] == ["too_many_requests"]


def test_an_empty_input_is_refused() -> None:
    """There must be something to do."""
    intake = Intake(URL)
    intake.line(b"  ")
    intake.end()

    assert [(fault.code, fault.line) for fault in intake.faults] == [("empty_batch", None)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_lines_are_the_same_however_they_are_cut(size: int) -> None:
    """Chunks end anywhere; a last line may lack its end."""
    assert await lines_of(b"a\n\nbcd\r\ne\n\nlast", size, Intake(URL)) == [b"a", b"", b"bcd\r", b"e", b"", b"last"]


@pytest.mark.parametrize("size", [1, 5, 64])
async def test_a_line_that_is_too_long_is_passed_over(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """It is told, its bytes are not kept, and the lines after it keep their numbers."""
    monkeypatch.setattr(module, "LONGEST_LINE", 8)
    intake = Intake(URL)

    lines = await lines_of(b"short\n" + b"x" * 200 + b"\nafter", size, intake)

    assert lines[-1] == b"after" and all(len(each) <= 8 + size for each in lines)
    assert [(fault.line, fault.code) for fault in intake.faults] == [(1, "line_too_long")]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    """Some editors write one."""
    intake = Intake(URL)

    assert intake.line(b"\xef\xbb\xbf" + line()) is not None
    assert intake.line(b"\xef\xbb\xbf" + line("b")) is None


def test_empty_lines_are_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of nothing but line ends is given up."""
    monkeypatch.setattr(module, "MOST_LINES", 3)
    intake = Intake(URL)
    for _ in range(4):
        assert not intake.is_full
        intake.line(b"")
    intake.end()

    assert intake.is_full and [fault.code for fault in intake.faults] == ["too_many_requests"]


async def test_a_line_of_200_megabytes_needs_no_more_room_than_the_longest_that_is_read() -> None:
    """It is one fault; what comes behind it is read."""
    intake, piece, taken = Intake(URL), b"x" * 2**19, []

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"custom_id":"'
        for _ in range(400):
            yield piece
        yield b"\n" + line("after")

    tracemalloc.start()
    async for each in read_lines(chunks(), intake):
        taken.append(intake.line(each))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert [item and item.custom_id for item in taken] == ["after"]
    assert [(fault.line, fault.code) for fault in intake.faults] == [(1, "line_too_long")]
    assert peak < 100e6


@pytest.mark.parametrize(
    ("made", "code"), [(b"1\n", "invalid_line"), (b"\n", "too_many_requests"), (None, "too_many_requests")]
)
async def test_a_million_tiny_lines_are_not_read_to_their_end(made: bytes | None, code: str) -> None:
    """Faults, empty lines or requests: whichever there are too many of first."""
    intake, read = Intake(URL), 0

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, 1_000_000, 1000):
            numbers = range(start, start + 1000)
            yield b"".join(made or TINY % number for number in numbers)

    async for each in read_lines(chunks(), intake):
        intake.line(each)
        read += 1
        if intake.is_full:
            break
    intake.end()

    assert read <= 200_001 and code in {fault.code for fault in intake.faults}
