# What a text looks like to its reader: look-alike letters, digits and signs are undone, and what is invisible is left
# out. What is written in another code, or letter by letter, is for hidden.py.

from __future__ import annotations

import re
import tomllib
import unicodedata
from importlib.resources import files

_SEEN = tomllib.loads((files("gateway") / "moderation" / "classifier" / "plain.toml").read_text("utf-8"))


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {}
    for first, last in _SEEN["invisible"]:
        table.update(dict.fromkeys(range(first, last + 1)))
    for first in _SEEN["alphabets"]:
        table.update({first + place: chr(ord("A") + place) for place in range(26)})
    for first in _SEEN["digits"]:
        table.update({first + digit: str(digit) for digit in range(10)})
    table.update({0xE0000 + code: chr(code) for code in range(0x20, 0x7F)})  # tags: invisible ASCII
    for latin, letters in _SEEN["lookalikes"].items():
        table.update({ord(letter): latin for letter in letters})
    return table


_TABLE = _table()
_UNSEEN = re.compile("[" + "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in _SEEN["invisible"]) + "]+")
_CONTROLS = bytes(code for code, shown in _TABLE.items() if code < 0x80 and shown is None)
# What is not printed ASCII, with the little that stands between: texts are mostly ASCII, of which only this is undone.
# As many at a time as any letter has marks: to put marks in order takes the square of the time.
_STRANGE = re.compile(r"[^\t-\r -~]{1,500}(?:[\t-\r -~]{1,3}[^\t-\r -~]{1,500})*")


def plain(text: str) -> str:
    """Return ``text`` as its reader sees it: without invisible characters, accents and look-alikes."""
    if text.isascii():
        data = text.encode()
        seen = data.translate(None, _CONTROLS)
        return text if len(seen) == len(data) else seen.decode()
    return _STRANGE.sub(_undone, text)


def visible(text: str) -> str:
    """Return ``text`` without invisible characters and accents, however many there are."""
    return plain(text) if text.isascii() else _UNSEEN.sub("", text)


def _undone(strange: re.Match[str]) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKD", strange.group()).translate(_TABLE))
