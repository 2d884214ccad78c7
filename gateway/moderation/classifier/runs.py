# What runs of letters and digits say that are base64, base32, hexadecimal or binary.

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from itertools import chain

LEAST = 15  # characters of a run that is worth decoding
PRINTABLE = 0.9  # share of a decoded text that makes it one

_RUN = re.compile(r"[A-Za-z0-9+/_-]+")
# In every run that is no word; sought from the digit or the capital on.
CODED = re.compile(r"[0-9A-Z](?:(?<=[a-z][A-Z])|(?<=[0-9])[A-Za-z]|(?<=[0-9])[0-9]{3}|(?<=[A-Z])[A-Z]{3})")
_URL_SAFE = str.maketrans("-_", "+/")
_BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
_STRETCH = re.compile(rb"[\t\n\r -~]{12,}")  # by chance in one of some 100,000 random runs


def decoded(text: str) -> Iterator[str]:
    """Yield what the runs in ``text`` say, all in one, if any says something."""
    runs = (run for run in _RUN.findall(text) if len(run) >= LEAST and CODED.search(run))
    if said := "".join(map(_meaning_of, runs)):
        yield said


def is_text(data: bytes) -> bool:
    """Whether bytes are a text of some length."""
    # Look-alikes inside are several bytes each, so what is not ASCII has to be UTF-8, and little of it control.
    if len(data) < LEAST // 2:
        return False
    if not data.translate(None, _TEXT_BYTES):
        return True
    try:
        said = data.decode()
    except UnicodeDecodeError:
        return False
    return sum(map(str.isprintable, said)) >= PRINTABLE * len(said)


def _meaning_of(run: str) -> str:
    """Return the text that a run stands for; of one that is no text as a whole, what is text in it, wherever in its
    groups it was begun."""
    standard = run.translate(_URL_SAFE)
    begun = [_from_hexadecimal(run), _from_base64(standard)]
    for data in chain(begun, (decode(run) for decode in (_from_base32, _from_bits))):
        if is_text(data):
            return data.decode("utf-8", "replace")
    begun.insert(1, _from_hexadecimal(run[1:]))
    begun += [_from_base64(standard[start:]) for start in range(1, 4)]
    return b"\n".join(_STRETCH.findall(b"\xff".join(begun).replace(b"\0", b""))).decode()


def _from_hexadecimal(run: str) -> bytes:
    pairs = run[: len(run) & ~1]
    return b"" if pairs.strip("0123456789abcdefABCDEF") else bytes.fromhex(pairs)


def _from_base64(run: str) -> bytes:
    return binascii.a2b_base64((run[:-1] if len(run) % 4 == 1 else run) + "==")


def _from_base32(run: str) -> bytes:
    if not (run.isupper() or run.islower()) or run.upper().strip(_BASE32):
        return b""
    try:
        return base64.b32decode(run + "=" * (-len(run) % 8), casefold=True)
    except ValueError:
        return b""


def _from_bits(run: str) -> bytes:
    return b"" if run.strip("01") else bytes(int(run[at : at + 8], 2) for at in range(0, len(run) - 7, 8))
