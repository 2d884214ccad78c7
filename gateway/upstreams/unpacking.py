# Bodies that come compressed though the request did not ask for it. They are unpacked as they are read, a bounded piece
# at a time: a small one may unpack to a huge one.

from __future__ import annotations

import zlib

from gateway.upstreams.wire.errors import UpstreamError

AT_ONCE = 64 * 1024  # bytes unpacked


class Unpacker:
    """Unpacks one body of a content-encoding: gzip, or deflate with a header or without. Raises UpstreamError for
    another, and for what is none."""

    def __init__(self, encoding: str) -> None:
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise _broken()
        self._is_gzip = encoding != "deflate"
        self._packed = b""
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
        self._has_begun = False

    def feed(self, piece: bytes) -> None:
        """Take in what came."""
        self._packed += piece

    def take(self) -> bytes:
        """Return the next bytes; nothing when more must come first."""
        while self._packed:
            if self._stream.eof:  # gzip may go on with another member
                self._stream = zlib.decompressobj(zlib.MAX_WBITS | 32)
            if not self._has_begun and not self._is_gzip and self._packed[0] & 0x0F != 8:  # no header of zlib's
                self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
            self._has_begun = True
            try:
                out = self._stream.decompress(self._packed, AT_ONCE)
            except zlib.error as exc:
                raise _broken() from exc
            self._packed = self._stream.unconsumed_tail or self._stream.unused_data
            if out:
                return out
        return b""

    def end(self) -> None:
        """The body has ended: refuse one that is cut."""
        if self._has_begun and not self._stream.eof:
            raise _broken()


def _broken() -> UpstreamError:
    return UpstreamError("The upstream's answer is compressed in a way that cannot be read.", outcome="reset")
