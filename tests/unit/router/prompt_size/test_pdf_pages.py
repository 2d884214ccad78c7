"""Pages of a PDF, told from its bytes: what cannot be read counts as the most that a request may have."""

from __future__ import annotations

import base64
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.chat import ImageUrl, PdfFile
from router.prompt_size.pdf_pages import MOST_PAGES, pages_most
from router.prompt_size.pictures import PAGE_TEXT_TOKENS, picture_of, picture_tokens_most

PLAIN = b"<< /Type /Page /Parent 2 0 R >>"


def pdf(*objects: bytes, pages: int | None = None) -> str:
    """Return a file with a tree of ``pages``, which says so where it is not ``None``."""
    tree = b"<< /Type /Pages /Kids [3 0 R]" + (b"" if pages is None else b" /Count %d" % pages) + b" >>"
    numbered = (b"%d 0 obj\n%b\nendobj\n" % (place, one) for place, one in enumerate((tree, *objects), 2))
    return base64.b64encode(b"%PDF-1.7\n" + b"".join(numbered) + b"%%EOF").decode()


def packed(*objects: bytes, filter: bytes = b"/FlateDecode") -> bytes:
    data = zlib.compress(b"\n".join(objects))
    head = b"<< /Type /ObjStm /N %d /First 9 /Filter %b /Length %d >>" % (len(objects), filter, len(data))
    return head + b"\nstream\n" + data + b"\nendstream"


@pytest.mark.parametrize(
    ("data", "pages"),
    [
        (pdf(PLAIN, pages=1), 1),
        (pdf(PLAIN, PLAIN, b"<</Type/Page>>"), 3),
        (pdf(PLAIN, pages=40), 40),  # one object may stand for many pages
        (pdf(packed(PLAIN, PLAIN, b"<< /Type /Pages /Count 2 >>")), 2),
        (pdf(packed(PLAIN), packed(PLAIN, PLAIN)), 3),
        (pdf(b"<< /BaseFont /Times#20New /Type /Font >>", PLAIN), 1),
        (pdf(pages=100_000), MOST_PAGES),
        (pdf(), MOST_PAGES),
        (pdf(PLAIN, b"<< /Encrypt 5 0 R >>", pages=1), MOST_PAGES),
        (pdf(PLAIN, b"<< /Type /P#61ge >>", pages=1), MOST_PAGES),
        (pdf(packed(PLAIN, filter=b"/LZWDecode"), PLAIN), MOST_PAGES),
        (pdf(packed(PLAIN, filter=b"[/ASCII85Decode /FlateDecode /RunLengthDecode]"), PLAIN), MOST_PAGES),
        (pdf(packed(PLAIN)[:-30] + b"endstream", PLAIN), MOST_PAGES),
        (pdf(b"<< /Type /ObjStm >>", PLAIN), MOST_PAGES),
        ("no base64!", MOST_PAGES),
        ("", MOST_PAGES),
    ],
)
def test_pages_are_counted_where_they_can_be(data: str, pages: int) -> None:
    """Each page as an object, or the number that the tree says, whichever is more."""
    assert pages_most(data) == pages


@given(st.binary(max_size=500))
def test_any_bytes_have_pages(data: bytes) -> None:
    """Nothing that a caller sends is an error here, or free."""
    assert 1 <= pages_most(base64.b64encode(b"%PDF" + data).decode()) <= MOST_PAGES


def test_a_stream_that_swells_is_not_read_to_its_end() -> None:
    """A few kilobytes can hold gigabytes; thousands of streams are looked through once."""
    began = time.process_time()
    bomb = b"<< /Type /ObjStm /Filter /FlateDecode >>\nstream\n" + zlib.compress(bytes(64 << 20)) + b"\nendstream"

    assert pages_most(pdf(bomb, PLAIN)) == MOST_PAGES
    assert pages_most(pdf(*[packed(PLAIN)] * 5_000)) == MOST_PAGES
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "piece",
    [
        b"/a#41",
        b"/Count 1 ",
        b"/Type /Page ",
        b"/Type " + b" " * 90,
        b" obj << /Type /ObjStm /Filter /FlateDecode >> stream\n" + zlib.compress(b""),
    ],
)
def test_no_file_takes_long(piece: bytes) -> None:
    """Whatever it repeats: each byte is looked at a few times, and others have their turn."""
    data = base64.b64encode(b"%PDF" + piece * (8_000_000 // len(piece)) + b" endstream").decode()
    began = time.process_time()

    assert pages_most(data) == MOST_PAGES
    assert time.process_time() - began < 2


def test_a_page_counts_as_its_picture_and_its_text() -> None:
    """By the formula of the model; a PDF that lies elsewhere may have any number of pages."""
    here, there = PdfFile("data:application/pdf;base64," + pdf(PLAIN, pages=3)), PdfFile("https://a.example/b.pdf")
    page = PAGE_TEXT_TOKENS + picture_tokens_most("claude-opus-5", picture_of(ImageUrl("https://a.example/b.png")))

    assert picture_tokens_most("claude-opus-5", picture_of(here)) == 3 * page
    assert picture_tokens_most("gpt-4o", picture_of(here)) == 3 * (PAGE_TEXT_TOKENS + 85 + 8 * 170)
    assert picture_tokens_most("gemini-3-flash", picture_of(here)) == 3 * (PAGE_TEXT_TOKENS + 2_240)
    assert picture_of(there).pages == MOST_PAGES
