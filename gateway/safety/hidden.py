# What is written inside a text in another code: base64, hexadecimal and other numbers, escapes, rot13, backwards,
# letter by letter, in groups, or with seams of markup and quotes in its words. Each code is looked for only where a
# cheap sign of it is seen, and all of it takes linear time.

from __future__ import annotations

import base64
import codecs
import html
import re
from collections.abc import Iterator
from itertools import compress
from urllib.parse import unquote

from gateway.safety.plain import plain

DEEPEST = 3  # how often what was decoded is decoded again
MOST = 32  # readings of one text: no disguise needs as many, and what costs time is bounded
LEAST = 15  # characters of an encoding that are worth decoding
ALIKE = 5  # words in a row of one length: they are groups of something
LONG, LONGER = 8, 12  # characters of words of which three and two are enough
LEET = 4  # words with digits for letters, in a text that is written so
DIGITS = 16  # in the shortest list of numbers that is read
PRINTABLE = 0.9  # share of a decoded text that makes it one


def hidden(text: str) -> list[str]:
    """Return what is written inside a plain ``text`` in other codes, and inside of that, each reading once."""
    found: list[str] = []
    level = [text]
    for _ in range(DEEPEST):
        fresh = dict.fromkeys(plain(said) for one in level for said in _readings(one))
        level = [said for said in fresh if said != text and said not in found][: MOST - len(found)]
        if not level:
            break
        found += level
    return found


def with_letters(text: str) -> str:
    """Return a text with letters in place of the digits that stand for some, if it is wr1tt3n so."""
    if _count(text, _LEET_SIGNS) < LEET or len(_LEET.findall(text)) < LEET:
        return text
    return text.translate(_LEET_LETTERS)


def _readings(text: str) -> Iterator[str]:
    tokens = text.split()
    lengths = _lengths_of(tokens)
    yield from _regrouped(tokens, lengths)
    if runs := " ".join(compress(tokens, lengths.translate(_IS_CUT))):
        yield from _spelt(runs, _SPELT_TIGHT)
        groups = (match.group() for match in _GROUPS.finditer(runs))
        if joined := "\n".join(_JOINTS.sub("", group) for group in groups if _CODED.search(group)):
            yield joined
        yield from _decoded(runs)
        if _MIXED.search(runs) and (unbroken := _BROKEN.sub("", text)) != text:
            yield from _decoded(unbroken)
        if any(map(runs.__contains__, _ROTATED)):
            yield codecs.encode(runs, "rot13")
        if any(map(runs.__contains__, _BACKWARDS)):
            yield runs[::-1]
    if any(map(text.__contains__, _ESCAPES)) and (said := _unescaped(text)) != text:
        yield said
    if any(map(text.__contains__, _SEAMS)) and (said := _SEAM.sub("", text)) != text:
        yield said
    lists = _NUMBERS.finditer(text) if not text.isascii() or _count(text, _DIGITS) >= DIGITS else ()
    if numbered := "\n".join(said for match in lists for said in _numbered(match.group())):
        yield numbered
    if " gur " in text or " naq " in text:
        yield codecs.encode(text, "rot13")
    if " eht " in text or " dna " in text:
        yield text[::-1]


def _lengths_of(tokens: list[str]) -> bytes:
    try:
        return bytes(map(len, tokens))
    except ValueError:
        return bytes([min(len(token), 255) for token in tokens])


def _count(text: str, signs: bytes) -> int:
    """Return how many characters of a text are among the ASCII ones of which ``signs`` has all others."""
    return len(text.encode("utf-8", "replace").translate(None, signs))


# Runs of base64 and hexadecimal.

_RUN = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{15,}")
_CODED = re.compile(r"[0-9][A-Za-z]|[a-z][A-Z]|[0-9]{4}|[A-Z]{4}")  # in every run that is no word
# What ends a line of a run, quotes and joins it, and begins the next.
_BROKEN = re.compile(r"(?<=[A-Za-z0-9+/_-]{15})(?:[\"'`,;\\+&.|]|\s){1,8}[>#*|/+&. \t\"'`]{0,16}(?=[A-Za-z0-9+/_=-])")
_URL_SAFE = str.maketrans("-_", "+/")
_TEXT_BYTES = bytes([9, 10, 13, *range(32, 127)])
_STRETCH = re.compile(rb"[\t\n\r -~]{12,}")  # by chance in one of some 100,000 random runs
_MIXED = re.compile(r"(?<![^\s\"'`])[A-Za-z+/_-]{0,15}[0-9][A-Za-z0-9+/_-]{14}")  # a line of a run has a digit early on
_IS_CUT = bytes(length > 11 for length in range(256))  # by length: words that signs may cut


def _decoded(text: str) -> Iterator[str]:
    """Yield what the runs of base64 or hexadecimal in ``text`` say."""
    runs = (match.group() for match in _RUN.finditer(text))
    if said := "".join(_meaning_of(run) for run in runs if _CODED.search(run)):
        yield said


def _meaning_of(run: str) -> str:
    """Return the text that a run stands for; of one that is no text as a whole, what is text in it, wherever in its
    groups it was begun."""
    for data in (_from_hexadecimal(run), _from_base64(run), _from_base32(run), _from_bits(run)):
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


def _from_base32(run: str) -> bytes:
    if not (run.isupper() or run.islower()):
        return b""
    try:
        return base64.b32decode(run + "=" * (-len(run) % 8), casefold=True)
    except ValueError:
        return b""


def _from_bits(run: str) -> bytes:
    return b"" if run.strip("01") else bytes(int(run[at : at + 8], 2) for at in range(0, len(run) - 7, 8))


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


# Letter by letter, and in groups.

_SAME, _SAME_TWO = re.compile(rb"\0{2,}"), re.compile(rb"\0+")
_NOT_LONGER = bytes(range(LONGER))
_SPELT = re.compile(r"(?<!\w)\S([^\w]{1,6})(?:\S\1){4,}\S(?!\w)")
_SPELT_TIGHT = re.compile(r"(?<!\w)\S([^\w\s]{1,6})(?:\S\1){4,}\S(?!\w)")
_QUOTES = "\"'`,;()[]{}|"
_JOINTS = re.compile(r"[-_.:/|]")
_GROUPS = re.compile(
    r"(?<!\w)(?:(?:\w\w[-.:/|]){5,}|(?:\w{3}[-.:/|]){4,}|(?:\w{4}[-.:/|]){3,}|(?:\w{5}[-.:/|]){3,}|(?:\w{8}[-.:/|]){2,})"
    r"\w{1,8}(?!\w)"
)


def _regrouped(tokens: list[str], lengths: bytes) -> Iterator[str]:
    """Yield what neighbours of one length come to when they are joined, each row on a line: decoys are no readings."""
    if len(lengths) < 2:
        return
    differ = int.from_bytes(lengths[1:]) ^ int.from_bytes(lengths[:-1])
    same = _SAME_TWO if len(lengths.translate(None, _NOT_LONGER)) > 1 else _SAME
    spelt: list[str] = []
    rows: list[str] = []
    longer: list[str] = []  # the same with what comes after a row, which may be what was left over
    for match in same.finditer(differ.to_bytes(len(lengths) - 1)):
        size, (first, last) = lengths[match.start()], match.span()
        if last - first + 1 < (ALIKE if size < LONG else 3 if size < LONGER else 2):
            continue
        if size <= 4:  # a letter, perhaps in quotes; the first and the last may have a bracket more
            spelt += _spelt(" ".join(tokens[max(0, first - 1) : last + 2]), _SPELT)
        if size > 1:
            bare = [token.strip(_QUOTES) for token in tokens[first : last + 2]]
            row = "".join(bare[: last + 1 - first])
            if _CODED.search(row):
                rows.append(row)
                longer.append(row + bare[-1])
    for lines in (spelt, rows, longer):
        if lines:
            yield "\n".join(lines)


def _spelt(text: str, spelling: re.Pattern[str]) -> Iterator[str]:
    said = " ".join(match.group()[:: 1 + len(match.group(1))] for match in spelling.finditer(text))
    if any(map(str.isalnum, said)):
        yield said


# Escapes, numbers, and letters for letters.

_ESCAPES = ("\\", "%", "=", "&", "U+", "0x")  # one stands in every text that _unescaped changes
_SEAMS = ("<", "**", "`", "\\", "'", '"')
_DIGITS = bytes(set(range(256)) - set(b"0123456789"))

# Patterns that begin with the sign they look for, so that a text without it is passed over quickly.
_ESCAPE = re.compile(  # a text that stands inside another one has its backslashes doubled
    r"[\\%=U0](?:(?<=\\)\\{0,3}(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8}))"
    r"|(?<=%)u([0-9a-fA-F]{4})|(?<==)([0-9A-F]{2})"
    r"|(?:(?<=U)\+|(?<=0)x)0{0,4}([0-9a-fA-F]{2})(?![0-9a-fA-F])[\s,;]{0,2})"
)
_OCTAL = re.compile(r"\\([01][0-7]{2})")
_NUMBERS = re.compile(r"\d(?<![\w.]\d)\d{1,7}(?:[\s:,;|-]{1,3}\d{2,8}){7,}(?!\w)")
# What stands inside a word without parting it for whoever sees it rendered, or runs it.
_SEAM = re.compile(
    r"[<*`\\\"'](?<=[\w+/=-].)(?:(?<=<)[^<>\s][^<>]{0,64}>(?:<[^<>\s][^<>]{0,64}>){0,3}|(?<=\*)\*|(?<=`)"
    r"|(?<=\\)\r?\n\s{0,20}|(?<=[\"'])\s{0,20}[+.&]?\s{0,20}[\"'])(?=[\w+/=-])"
)
_ROTATED = ("NXVN", "NFVN", "fx-", "tuc_")
_BACKWARDS = ("AIKA", "AISA", "-ks", "_phg")
_LEET = re.compile(r"[013457@$](?<=[A-Za-z].)[A-Za-z]")
_LEET_SIGNS = bytes(set(range(256)) - set(b"013457@$"))
_LEET_LETTERS = str.maketrans("013457@$", "oieastas")


def _unescaped(text: str) -> str:
    if (said := _ESCAPE.sub(_character, text)) is not text:
        said = _joined(said)
    if "\\" in said:
        said = _OCTAL.sub(lambda match: chr(int(match[1], 8)), said)
    if "%" in said:
        said = unquote(said)
    return html.unescape(said) if "&" in said else said


def _character(escape: re.Match[str]) -> str:
    code = int(escape[escape.lastindex or 0], 16)
    return chr(code) if code < 0x110000 else ""


def _numbered(numbers: str) -> Iterator[str]:
    """Yield the texts that a list of numbers can stand for, a letter each: decimal, octal or binary."""
    listed = re.findall(r"\d+", numbers)
    for base, width in ((10, 3), (8, 3), (2, 8)):
        try:
            data = bytes(int(number, base) for number in listed if len(number) <= width)
        except ValueError:
            continue
        if len(data) == len(listed) and _is_text(data):
            yield data.decode()


def _joined(text: str) -> str:
    """Return a text whose characters beyond 16 bits may have been escaped in two halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
