# Forms with a file, as they arrive: in any pieces, and kept once.

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from gateway.http.routes.uploads import LONGEST_FIELDS, Form, read_form
from protocol.errors import BadRequest, TooLarge

KIND = "multipart/form-data; boundary=b"
HEAD = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n%b\r\n'
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="%b"\r\ncontent-type: audio/wav\r\n\r\n'
END = b"\r\n--b--\r\n"


def read(body: bytes, size: int = 1 << 16, kind: str = KIND) -> Form:
    async def pieces() -> AsyncIterator[bytes]:
        for place in range(0, len(body), size):
            yield body[place : place + size]

    return asyncio.run(read_form(kind, pieces(), {"file": 1}))


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_form_says_the_same_however_it_is_cut(size: int) -> None:
    """Fields, lists, and what is known of the file."""
    body = HEAD % (b"model", b"m") + HEAD % (b"include[]", b"a") + HEAD % (b"include[]", b"b")
    fields = read(body + FILE % b"../a.wav" + b"\r\n--c\x00" + END, size).whole()
    file = fields.pop("file")

    assert fields == {"model": "m", "include": ["a", "b"]}
    assert (file["name"], file["media_type"], file["size"]) == ("a.wav", "audio/wav", 6)
    assert file["sha256"] == hashlib.sha256(b"\r\n--c\x00").hexdigest()


def test_a_file_needs_neither_a_name_nor_a_type() -> None:
    """Both are optional in a form (RFC 7578, 4.2 and 4.4): clients that send none are answered all the same."""
    bare = b'--b\r\ncontent-disposition: form-data; name="file"%b\r\n\r\nsound' + END
    found = [read(bare % said).whole()["file"] for said in (b"", b'; filename="a.wav"')]

    assert [(file["name"], file["media_type"]) for file in found] == [
        ("file", "application/octet-stream"),
        ("a.wav", "application/octet-stream"),
    ]


def test_a_file_is_in_memory_once() -> None:
    """Beside it stand a piece and what a growing array keeps ready."""
    body, size = FILE % b"a.wav" + b"a" * (16 << 20) + END, 16 << 20
    tracemalloc.start()
    try:
        form = read(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [len(file) for file in form.bytes] == [size] and peak < 1.4 * size


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (FILE % b"a" + b"a" + END, BadRequest, "cannot be read"),
        (HEAD % (b"a", b"1") + HEAD % (b"a", b"2") + b"--b--\r\n", BadRequest, "'a' comes once"),
        (HEAD % (b"a", b"1") + HEAD % (b"a[]", b"2") + b"--b--\r\n", BadRequest, "'a' comes once"),
        (HEAD % (b"file", b"1") + HEAD % (b"file[]", b"1") + b"--b--\r\n", BadRequest, "'file' comes once"),
        (HEAD % (b"a", b"\xff") + b"--b--\r\n", BadRequest, "UTF-8"),
        (HEAD % (b"a", b"1" * (LONGEST_FIELDS + 1)) + b"--b--\r\n", TooLarge, "longer than 262144"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, error: type[Exception], words: str) -> None:
    """Cut, told twice, or too long."""
    cut = body[:-6] if words == "cannot be read" else body
    with pytest.raises(error, match=words):
        read(cut)
