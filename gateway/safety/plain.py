# What a text says once its disguise is off: look-alike and invisible characters are undone, and what is written in
# base64, hexadecimal, escapes or l e t t e r  b y  l e t t e r is read as well. All of it in linear time.

from __future__ import annotations

import base64
import re
import unicodedata
from collections.abc import Iterator
from urllib.parse import unquote

DEEPEST = 2  # how often what was decoded is decoded again
LEAST = 16  # characters of an encoding that are worth decoding
FEWEST = 5  # letters, but one, that spell something out
SINGLES = b"\1" * (FEWEST + 1)  # words of one letter in a row
PRINTABLE = 0.9  # share of a decoded text that makes it one

_RUN = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{16,}")
_BROKEN = re.compile(r"(?<=[A-Za-z0-9+/_-]{16})\r?\n(?=[A-Za-z0-9+/_=-])")  # a run that goes on in the next line
_SPELT = re.compile(r"(?<!\S)(?:\S\s{1,3}){5,}\S(?!\S)")
_SPELT_TIGHT = re.compile(r"(?<!\w)(?:\w[-_.*|,/]){5,}\w(?!\w)")
# A text that stands inside another one has its backslashes doubled.
_ESCAPE = re.compile(
    r"\\{1,4}(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2}))|&#x([0-9a-fA-F]{2,6});|&#(\d{2,7});"
)

# Letters of other alphabets that look like Latin ones, after compatibility decomposition has done its part.
_LOOKALIKES = {
    "аɑαᴀ": "a", "ьʙ": "b", "сϲᴄ": "c", "ԁᴅđ": "d", "еєεᴇɛ": "e", "ꜰƒ": "f", "ɡցɢ": "g", "һհʜ": "h", "іιıɩɪӏ": "i",
    "јϳᴊ": "j", "кκᴋ": "k", "ʟł": "l", "мᴍ": "m", "ηոɴ": "n", "оοօσᴏø": "o", "рρᴘ": "p", "ԛզǫ": "q", "гʀ": "r",
    "ѕꜱ": "s", "тτᴛ": "t", "υսᴜ": "u", "νѵᴠ": "v", "ԝωᴡ": "w", "хχ": "x", "уγʏ": "y", "ᴢ": "z",
    "АΑ": "A", "ВΒ": "B", "С": "C", "ЕΕ": "E", "НΗ": "H", "ІΙ": "I", "Ј": "J", "КΚ": "K", "МΜ": "M", "Ν": "N",
    "ОΟ": "O", "РΡ": "P", "Ѕ": "S", "ТΤ": "T", "ХΧ": "X", "УΥ": "Y", "Ζ": "Z",
}  # fmt: skip

# Ranges whose characters are nothing to a reader, or stand for A to Z, a to z or 0 to 9 in order.
_INVISIBLE = (
    *((0xAD, 0xAD), (0x300, 0x36F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
    *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF)),
    *((0xFFA0, 0xFFA0), (0xE0001, 0xE001F), (0xE007F, 0xE007F), (0xE0100, 0xE01EF)),
)
_ALPHABETS = (0x1F150, 0x1F170, 0x1F1E6)
_DIGITS = (0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50, 0xED0, 0xF20)


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {}
    for first, last in _INVISIBLE:
        table.update(dict.fromkeys(range(first, last + 1)))
    for first in _ALPHABETS:
        table.update({first + place: chr(ord("a") + place) for place in range(26)})
    for first in _DIGITS:
        table.update({first + digit: str(digit) for digit in range(10)})
    table.update({0xE0000 + code: chr(code) for code in range(0x20, 0x7F)})  # tags: ASCII that nobody sees
    for letters, latin in _LOOKALIKES.items():
        table.update({ord(letter): latin for letter in letters})
    return table


_TABLE = _table()
_UNSEEN = {code: seen for code, seen in _TABLE.items() if seen is None}


def plain(text: str) -> str:
    """Return ``text`` as its reader sees it: without invisible characters, accents and look-alikes."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKD", text).translate(_TABLE))


def visible(text: str) -> str:
    """Return ``text`` without invisible characters and accents, however many there are."""
    return text if text.isascii() else text.translate(_UNSEEN)


def hidden(text: str, depth: int = DEEPEST) -> list[str]:
    """Return what is written inside a plain ``text`` in other letters: decoded runs, and what is spelt out."""
    lengths = list(map(len, text.split()))
    found: list[str] = []
    if max(lengths, default=0) >= LEAST:
        found = _decoded(text)
        if (unbroken := _BROKEN.sub("", text)) != text:
            found += _decoded(unbroken)
    if "%" in text and (unescaped := unquote(text)) != text:
        found.append(plain(unescaped))
    if ("\\" in text or "&#" in text) and (unescaped := _ESCAPE.sub(_character, text)) != text:
        found.append(plain(_joined(unescaped)))
    spelt: list[str] = []
    if SINGLES in bytes(map((1).__eq__, lengths)):
        spelt += ["".join(match.group().split()) for match in _SPELT.finditer(text)]
    if any(text.count(sign) >= FEWEST for sign in "-_.*|,/"):
        spelt += [match.group()[::2] for match in _SPELT_TIGHT.finditer(text)]
    if spelt:
        found.append(" ".join(spelt))
    if depth > 1:
        found += [inner for one in found for inner in hidden(one, depth - 1)]
    return found


def _decoded(text: str) -> list[str]:
    """Return what the runs of base64 or hexadecimal in ``text`` say."""
    said = "".join(_meaning_of(match.group()) for match in _RUN.finditer(text))
    return [plain(said)] if said else []


def _meaning_of(run: str) -> str:
    """Return the text that a run stands for; of one that is no text as a whole, what is text in it, wherever in its
    groups it was begun."""
    for data in (_from_hexadecimal(run), _from_base64(run)):
        if _is_text(data):
            return data.decode("utf-8", "replace")
    stretches = (match for data in _shifted(run) for match in _STRETCH.findall(data.replace(b"\0", b"")))
    return "\n".join(match.decode() for match in stretches)


def _shifted(run: str) -> Iterator[bytes]:
    yield from (_from_hexadecimal(run[start:]) for start in range(2))
    yield from (_from_base64(run[start:]) for start in range(4))


def _from_hexadecimal(run: str) -> bytes:
    try:
        return bytes.fromhex(run[: len(run) & ~1])
    except ValueError:
        return b""


def _from_base64(run: str) -> bytes:
    kept = run[:-1] if len(run) % 4 == 1 else run
    return base64.b64decode(kept.translate(_URL_SAFE) + "=" * (-len(kept) % 4))


def _character(escape: re.Match[str]) -> str:
    code = int(escape[5]) if escape[5] else int(escape[1] or escape[2] or escape[3] or escape[4], 16)
    return chr(code) if code < 0x110000 else ""


def _joined(text: str) -> str:
    """Return a text whose characters beyond 16 bits may have been escaped in two halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_URL_SAFE = str.maketrans("-_", "+/")
_TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
_STRETCH = re.compile(rb"[\t\n\r -~]{12,}")  # by chance in one of some 100,000 random runs


def _is_text(data: bytes) -> bool:
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
