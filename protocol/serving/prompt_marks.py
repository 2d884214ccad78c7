# Marks of a prompt's beginnings: what a gateway and our engine call them by, so that the gateway learns from the
# engine's KV events which of them are cached, and needs neither its tokenizer nor its chat template. A gateway sends
# them along with the prompt, and the engine ties each to the block of the KV cache that it ends in.

from __future__ import annotations

from base64 import b64decode, b64encode
from hashlib import blake2b
from itertools import pairwise
from struct import Struct, error
from typing import NamedTuple

PROMPT_MARKS = "x-prompt-marks"  # the header: bytes of the prompt, a colon, and the marks in base64
FIRST = 512  # bytes: a beginning shorter than that is not worth a way
GROWTH = 16  # the next beginning is longer by so many bytes, or by that part of itself
MOST = 96


def _lengths() -> tuple[int, ...]:
    lengths = [FIRST]
    while len(lengths) < MOST:
        lengths.append(lengths[-1] + max(FIRST, lengths[-1] // GROWTH))
    return tuple(lengths)


LENGTHS = _lengths()  # bytes of the beginnings that have marks, whatever the prompt: some 1.2 MB at the most
_STEPS = tuple(pairwise((0, *LENGTHS)))
_WIRE = tuple(Struct(f">{count}Q") for count in range(MOST + 1))


class MarkedPrompt(NamedTuple):
    """A prompt by its bytes and the marks of its beginnings, shortest first."""

    size: int
    marks: tuple[int, ...]

    def header(self) -> str:
        """Return what the engine is told."""
        return f"{self.size}:{b64encode(_WIRE[len(self.marks)].pack(*self.marks)).decode()}"


def marks_of(prompt: bytes, owner: str) -> tuple[int, ...]:
    """Return the marks of a prompt's beginnings, shortest first; those of two owners have none in common.

    Each is a hash of its owner and of all bytes up to its end, in 64 bits.
    """
    salt = blake2b(owner.encode("utf-8", "replace"), digest_size=32).digest()
    hashed = blake2b(digest_size=8, key=salt, person=b"prompt marks")
    marks, view, size = [], memoryview(prompt), len(prompt)
    for start, end in _STEPS:
        if end > size:
            break
        hashed.update(view[start:end])
        marks.append(int.from_bytes(hashed.copy().digest(), "big"))
    return tuple(marks)


def tokens_of_marks(header: str, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the marks that a header names, and about how many tokens of the prompt's ``num_tokens`` each begins with.

    A header that is none says nothing: it is a hint, and no part of the request.
    """
    said, _, packed = header.partition(":")
    try:
        size, raw = int(said), b64decode(packed, validate=True)
        marks = _WIRE[len(raw) // 8].unpack(raw)
    except (ValueError, IndexError, error):
        return ()
    if not LENGTHS[: len(marks)] or size < LENGTHS[len(marks) - 1]:
        return ()
    return tuple((mark, length * num_tokens // size) for mark, length in zip(marks, LENGTHS, strict=False))
