# What a text looks like to its reader: look-alike letters, digits and signs are undone, and what is invisible is left
# out. What is written in another code, or letter by letter, is for hidden.py.

from __future__ import annotations

import re
import unicodedata

# Letters of other alphabets that look like Latin ones, after compatibility decomposition has done its part: Cyrillic,
# Greek, Armenian, phonetic, Cherokee, Lisu, Coptic.
_LOOKALIKES = {
    "аɑαᴀ": "a", "ьʙƀ": "b", "сϲᴄⲥ": "c", "ԁᴅđɗ": "d", "еєεᴇɛ": "e", "ꜰƒ": "f", "ɡցɢ": "g", "һհʜħ": "h",
    "іιıɩɪӏ": "i", "јϳᴊ": "j", "кκᴋⲕ": "k", "ʟłⅼ": "l", "мᴍⲙ": "m", "ηոɴ": "n", "оοօσᴏøⲟ": "o", "рρᴘⲣ": "p",
    "ԛզǫ": "q", "гʀ": "r", "ѕꜱ": "s", "тτᴛŧ": "t", "υսᴜ": "u", "νѵᴠ": "v", "ԝωᴡ": "w", "хχⲭ": "x", "уγʏ": "y",
    "ᴢ": "z",
    "АΑᎪꓮⲀ": "A", "ВΒᏴꓐⲂ": "B", "СᏟꓚⲤ": "C", "ᎠꓓÐĐ": "D", "ЕΕᎬꓰⲈ": "E", "ꓝ": "F", "Ꮐꓖ": "G", "НΗᎻꓧⲎ": "H",
    "ІΙꓲⲒᏆ": "I", "ЈᎫꓙ": "J", "КΚᏦꓗⲔ": "K", "ᏞꓡŁ": "L", "МΜᎷꓟⲘ": "M", "ΝꓠⲚ": "N", "ОΟꓳⲞØ": "O", "РΡᏢꓑⲢ": "P",
    "ᏒꓣᎡ": "R", "ЅᏚꓢ": "S", "ТΤᎢꓔⲦ": "T", "ꓴ": "U", "Ꮩꓦ": "V", "Ꮃꓪ": "W", "ХΧꓫⲬ": "X", "УΥꓬ": "Y", "ΖᏃꓜ": "Z",
    "‐‑‒–—―−⁃˗➖": "-", "⁄∕⧸": "/", "·•‧⋅・": ".", "∶ː꞉։": ":", "‘’‛": "'", "“”‟": '"', "꞊⹀": "=", "\u2800": " ",
    "⓿": "0", "❶⓵➀➊": "1", "❷⓶➁➋": "2", "❸⓷➂➌": "3", "❹⓸➃➍": "4", "❺⓹➄➎": "5", "❻⓺➅➏": "6", "❼⓻➆➐": "7",
    "❽⓼➇➑": "8", "❾⓽➈➒": "9",
}  # fmt: skip

# Ranges whose characters are nothing to a reader, or stand for A to Z or 0 to 9 in order.
_INVISIBLE = (
    *((0x00, 0x08), (0x0E, 0x1F), (0x7F, 0x84), (0x86, 0x9F)),  # control characters that break no line
    *((0xAD, 0xAD), (0x300, 0x36F), (0x483, 0x489), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
    *((0x180B, 0x180F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F)),
    *((0x20D0, 0x20FF), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFE20, 0xFE2F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
    *((0xFFF9, 0xFFFB), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)),
    *((0xE0001, 0xE001F), (0xE007F, 0xE007F), (0xE0100, 0xE01EF)),
)
_ALPHABETS = (0x1F150, 0x1F170, 0x1F1E6)
_DIGITS = (
    *(0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xDE6, 0xE50, 0xED0, 0xF20),
    *(0x1040, 0x1090, 0x17E0, 0x1810, 0x1946, 0x19D0, 0x1A80, 0x1A90, 0x1B50, 0x1BB0, 0x1C40, 0x1C50, 0xA620, 0xA8D0),
    *(0xA900, 0xA9D0, 0xA9F0, 0xAA50, 0xABF0, 0x104A0, 0x11066),
    *(0x10D30, 0x10D40, 0x110F0, 0x11136, 0x111D0, 0x112F0, 0x11450, 0x114D0, 0x11650, 0x116C0, 0x116D0, 0x116DA),
    *(0x11730, 0x118E0, 0x11950, 0x11BF0, 0x11C50, 0x11D50, 0x11DA0, 0x11F50, 0x16A60, 0x16AC0, 0x16B50, 0x16D70),
    *(0x1E140, 0x1E2F0, 0x1E4F0, 0x1E5F1, 0x1E950),
)


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {}
    for first, last in _INVISIBLE:
        table.update(dict.fromkeys(range(first, last + 1)))
    for first in _ALPHABETS:
        table.update({first + place: chr(ord("A") + place) for place in range(26)})
    for first in _DIGITS:
        table.update({first + digit: str(digit) for digit in range(10)})
    table.update({0xE0000 + code: chr(code) for code in range(0x20, 0x7F)})  # tags: invisible ASCII
    for letters, latin in _LOOKALIKES.items():
        table.update({ord(letter): latin for letter in letters})
    return table


_TABLE = _table()
_UNSEEN = re.compile("[" + "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in _INVISIBLE) + "]+")
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
