# Chunks that are like one read before in all but their words. Nearly every chunk of a stream is: so its bytes go past
# undecoded, and only the words are taken out.

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event

LESSONS = 16  # chunks that are taken for an example, at the most: some services change something with each
# Characters without meaning, by which OpenAI hides how long a chunk's words are.
PADDING = b',"obfuscation":"'

_read_text = msgspec.json.Decoder(str).decode


class LikeChunks:
    """Reads chunks by an example: what stands before and after its words, which alone differ.

    What is read in this way means what decoding it would give: around the words stand the example's bytes, and the
    words are one text of JSON and no more.
    """

    def __init__(self, decode: Callable[[bytes, list[Event]], None]) -> None:
        self._decode = decode  # adds what a chunk's data means
        self._lessons = 0
        self._before = b""  # the words of a chunk, up to their quote; nothing until there is an example
        self._after = b""  # them, from their quote on
        self._around = 0  # bytes of both
        self._words = slice(0)  # where they stand, in their quotes
        self._is_padded = False
        self._index = 0

    def read(self, data: bytes) -> Delta | None:
        """Return the words of a chunk that is like the example, or ``None``: then it is to be decoded."""
        if not self._around or not data.startswith(self._before):
            return None
        if self._is_padded:
            data = _without_padding(data)
        if not data.endswith(self._after) or len(data) <= self._around:
            return None
        try:
            return Delta(self._index, _read_text(data[self._words]))
        except NOT_JSON:
            return None

    def learn(self, data: bytes, meaning: Event) -> None:
        """Take a chunk that was decoded for an example, if it says words and nothing else."""
        if self._lessons >= LESSONS or type(meaning) is not Delta or not meaning.text:
            return
        self._lessons += 1
        if meaning != Delta(meaning.index, meaning.text):
            return
        plain = _without_padding(data)
        before, quote, after = plain.partition(b'"%b"' % meaning.text.encode())
        before, after = before + b'"', b'"' + after
        # Are those its words, and not something else that is the same? Then others in their place are its meaning.
        trial, found = "-" if meaning.text != "-" else "+", list[Event]()
        with suppress(UpstreamFailure):
            self._decode(before + trial.encode() + after, found)
        if quote and found == [Delta(meaning.index, trial)]:
            self._before, self._after, self._around = before, after, len(before) + len(after)
            self._words = slice(len(before) - 1, 1 - len(after))
            self._is_padded, self._index = plain != data, meaning.index


def _without_padding(data: bytes) -> bytes:
    """Return a chunk without the padding that ends it, if any does."""
    chunk, _, padding = data.rpartition(PADDING)
    return chunk + b"}" if padding == b'"}' or (padding.endswith(b'"}') and padding[:-2].isalnum()) else data
