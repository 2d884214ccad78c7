# Text as the bytes that the model reads, so that a script or a keyboard changes little: typographic marks become plain
# ones, a letter of another alphabet is about a byte, as a Latin one is, and Chinese and Japanese have words.

from __future__ import annotations

_MARKS = (
    ("‘’‚‛´′", "'"),
    ("“”„«»″", '"'),
    ("‐‑‒–—−", "-"),
    ("…", "..."),
    ("\u00a0\u2009\u202f\u3000", " "),
    ("。．", ". "),
    ("，、", ", "),
    ("？؟", "?"),
    ("！", "!"),
    ("：", ":"),
    ("；", ";"),
    ("（", "("),
    ("）", ")"),
)
_REPLACED = tuple((mark, plain) for marks, plain in _MARKS for mark in marks)
# First bytes in UTF-8 of letters beyond ASCII: of two bytes (Latin with accents, Greek, Cyrillic, Arabic) or of three
# (Devanagari, Hangul). Without them a letter counts about as much as a Latin one.
_FIRST = bytes((*range(0xC2, 0xE1), *range(0xEA, 0xF5)))
# First bytes of Chinese characters. Each is taken for a word, as it says about as much as a short one; kana go with the
# one before them, as its endings.
WORD_MARKS = bytes(range(0xE4, 0xEA))


def plain_bytes(text: str) -> bytes:
    """Return a text as the model reads it, without white space around it. ASCII stays as it is, but for line ends."""
    text = text.strip().replace("\r\n", "\n")
    if text.isascii():
        return text.encode()
    for mark, plain in _REPLACED:
        text = text.replace(mark, plain)
    return text.encode("utf-8", "replace").translate(None, _FIRST)
