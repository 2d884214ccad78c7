# How many pages a PDF has, told from its bytes without a PDF library: by what a page and the tree of pages are marked
# with, also inside of compressed object streams. Whatever cannot be read is no number, and counts as the most.

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice

MOST_PAGES = 600  # of one request that Anthropic takes (100 where the context is below a million tokens)
MOST_INFLATED = 32 * 1024 * 1024  # bytes of object streams that are looked at
MOST_NAMES = 20_000  # spelt in escapes, or of counts, that are
PAGE = re.compile(rb"/Type\s*/Page(?![A-Za-z])")
COUNT = re.compile(rb"/Count\s+(\d{1,9})(?!\d)")
OBJECTS = re.compile(rb"/Type\s*/ObjStm\b")
STREAM = re.compile(rb"stream\r?\n")
ESCAPED = re.compile(rb"/[A-Za-z]{0,10}#[0-9A-Fa-f]{2}[A-Za-z0-9#]{0,30}")  # a name with a sign by its number
SIGN = re.compile(rb"#([0-9A-Fa-f]{2})")
LOOKED_FOR = {b"/Type", b"/Page", b"/Pages", b"/Count", b"/ObjStm", b"/FlateDecode", b"/Filter", b"/Encrypt"}
HEAD = 512  # bytes before a stream in which it says what it is


def pages_most(data: str) -> int:
    """Return the most pages that a PDF in base64 has, as far as it tells; ``MOST_PAGES`` where it does not."""
    try:
        pdf = base64.b64decode(data)
    except (binascii.Error, ValueError):
        return MOST_PAGES
    objects = None if _hides(pdf) else _objects(pdf)
    if objects is None or any(map(_hides, objects)):
        return MOST_PAGES
    parts = [pdf, *objects]
    marked = sum(1 for _ in islice(_all(PAGE, parts), MOST_PAGES))
    counts = [int(count[1]) for count in islice(_all(COUNT, parts), MOST_NAMES)]
    if len(counts) == MOST_NAMES:
        return MOST_PAGES
    return min(MOST_PAGES, max(marked, *counts, 0)) or MOST_PAGES


def _all(pattern: re.Pattern[bytes], parts: Iterable[bytes]) -> Iterator[re.Match[bytes]]:
    return chain.from_iterable(map(pattern.finditer, parts))


def _hides(part: bytes) -> bool:
    """Whether it is encrypted, or spells the names that are looked for otherwise than usual."""
    if b"/Encrypt" in part:
        return True
    names = [found[0] for found in islice(ESCAPED.finditer(part), MOST_NAMES)]
    spelt = (SIGN.sub(lambda sign: bytes.fromhex(sign[1].decode()), name) for name in names)
    return len(names) == MOST_NAMES or any(name in LOOKED_FOR for name in spelt)


def _objects(pdf: bytes) -> list[bytes] | None:
    """Return the object streams of a PDF, inflated; ``None`` where one of them cannot be."""
    objects, room, end = [], MOST_INFLATED, 0
    for mark in OBJECTS.finditer(pdf):
        if mark.start() < end:  # inside of the one before: no byte is read twice
            return None
        begin = STREAM.search(pdf, mark.end(), mark.end() + HEAD)
        end = pdf.find(b"endstream", begin.end()) if begin is not None else -1
        if begin is None or end < 0:
            return None
        head = pdf[max(0, mark.start() - HEAD) : begin.start()]
        head = head[head.rfind(b" obj") :]
        if b"/FlateDecode" not in head or head.count(b"Decode") > 2:  # with DecodeParms, and no other filter
            return None
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(pdf[begin.end() : end], room)
        except zlib.error:
            return None
        room -= len(data)
        if room <= 0 or not inflater.eof:
            return None
        objects.append(data)
    return objects
