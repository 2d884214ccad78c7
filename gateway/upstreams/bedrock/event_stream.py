# Amazon's event stream: messages of headers and a payload, each with its lengths and two checksums before and behind.
# https://docs.aws.amazon.com/transcribe/latest/dg/event-stream.html

from __future__ import annotations

import struct
from collections.abc import Iterator
from zlib import crc32

from msgspec import Struct

PRELUDE = struct.Struct(">III")  # length of all, of the headers, and the checksum of both
LEAST = PRELUDE.size + 4
LONGEST = 16 * 1024 * 1024  # bytes of a message
TEXT = 7  # the type of headers that are texts
SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}  # bytes of a header's value, by its type
MEASURED = (6, TEXT)  # types whose values have their length before them


class Broken(ValueError):
    """The bytes are no event stream."""


class StreamMessage(Struct, frozen=True):
    """A message, its headers as far as they are texts."""

    headers: dict[str, str]
    payload: bytes


class EventStreamDecoder:
    """Reads messages from bytes, however they are cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def is_empty(self) -> bool:
        """Whether no message is half read."""
        return not self._bytes

    def feed(self, piece: bytes) -> Iterator[StreamMessage]:
        """Take in bytes and yield the messages that they complete. Raises Broken."""
        self._bytes += piece
        while len(self._bytes) >= PRELUDE.size:
            length, headers, checksum = PRELUDE.unpack_from(self._bytes)
            if crc32(self._bytes[:8]) != checksum or not LEAST + headers <= length <= LONGEST:
                raise Broken("the beginning of a message is none")
            if len(self._bytes) < length:
                return
            message = bytes(self._bytes[:length])
            del self._bytes[:length]
            if crc32(message[:-4]) != int.from_bytes(message[-4:]):
                raise Broken("a message is not as it was sent")
            end = PRELUDE.size + headers
            yield StreamMessage(_headers(message[PRELUDE.size : end]), message[end:-4])


def _headers(data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    place = 0
    try:
        while place < len(data):
            size = data[place]
            name = data[place + 1 : place + 1 + size].decode()
            kind = data[place + 1 + size]
            place += 2 + size
            if kind in MEASURED:
                length = int.from_bytes(data[place : place + 2])
                if kind == TEXT:
                    found[name] = data[place + 2 : place + 2 + length].decode()
                place += 2 + length
            else:
                place += SIZES[kind]
    except (IndexError, KeyError, UnicodeDecodeError) as exc:
        raise Broken("the headers of a message are none") from exc
    return found
