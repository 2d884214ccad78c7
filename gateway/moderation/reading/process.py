# The encoder's process: texts in by its standard input, their vectors out by its standard output, a frame each, until
# the gateway that started it closes the pipe or dies.
#   frame: its length in 4 bytes, then msgpack: a list of texts; or the bytes of their vectors, one after the other.

from __future__ import annotations

import signal
import sys

import msgspec

from gateway.moderation.reading.encoder import load_encoder

HEADER = 4  # bytes


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: the gateway says when to end
    encode = load_encoder()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    decoder = msgspec.msgpack.Decoder(list[str])
    while len(header := source.read(HEADER)) == HEADER:
        vectors = encode(decoder.decode(source.read(int.from_bytes(header)))).tobytes()
        sink.write(len(vectors).to_bytes(HEADER) + vectors)
        sink.flush()


if __name__ == "__main__":
    main()
