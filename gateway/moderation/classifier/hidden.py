# What is written inside a text in another code: base64, hexadecimal and other numbers, escapes, rot13, backwards,
# letter by letter, in groups, or with seams of markup and quotes in its words. Each code is looked for only where a
# cheap sign of it is seen, and all of it takes linear time.

from __future__ import annotations

import codecs
import html
import re
from collections.abc import Iterator
from itertools import compress
from urllib.parse import unquote

from gateway.moderation.classifier.plain import plain
from gateway.moderation.classifier.runs import CODED, decoded, is_text

DEEPEST = 3  # how often what was decoded is decoded again
MOST = 32  # readings of one text: no disguise needs as many, and what costs time is bounded
ALIKE = 5  # words in a row of one length: they are groups of something
LONG, LONGER = 8, 12  # characters of words of which three and two are enough
LEET = 4  # words with digits for letters, in a text that is written so
DIGITS = 16  # in the shortest list of numbers that is read


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
        yield from _inside(runs, text)
    signs = text.encode("utf-8", "replace").translate(None, _UNREMARKABLE)
    if signs:
        if any(map(text.__contains__, _ESCAPES)) and (said := _unescaped(text)) != text:
            yield said
        if any(map(text.__contains__, _SEAMS)) and (said := _SEAM.sub("", text)) != text:
            yield said
    lists = _NUMBERS.finditer(text) if len(signs) >= DIGITS or not text.isascii() else ()
    if numbered := "\n".join(said for match in lists for said in _numbered(match.group())):
        yield numbered
    if " gur " in text or " naq " in text:
        yield codecs.encode(text, "rot13")
    if " eht " in text or " dna " in text:
        yield text[::-1]


def _inside(runs: str, text: str) -> Iterator[str]:
    """Yield what is written in the long words of a text, and in what they come to when they are not broken."""
    yield from _spelt(runs, _SPELT_TIGHT)
    groups = (match[match.lastindex or 0] + match.group() for match in _matches(_GROUPS, runs))
    if joined := "\n".join(said for group in groups if CODED.search(said := _JOINTS.sub("", group))):
        yield joined
    yield from decoded(runs)
    if _EARLY.search(runs) and _MIXED.search(runs) and (unbroken := _BROKEN.sub("", text)) != text:
        yield from decoded(unbroken)
    if any(map(runs.__contains__, _ROTATED)):
        yield codecs.encode(runs, "rot13")
    if any(map(runs.__contains__, _BACKWARDS)):
        yield runs[::-1]


def _lengths_of(tokens: list[str]) -> bytes:
    try:
        return bytes(map(len, tokens))
    except ValueError:
        return bytes([min(len(token), 255) for token in tokens])


def _count(text: str, signs: bytes) -> int:
    """Return how many characters of a text are among the ASCII ones of which ``signs`` has all others."""
    return len(text.encode("utf-8", "replace").translate(None, signs))


# Letter by letter, and in groups.

_IS_CUT = bytes(length > 11 for length in range(256))  # by length: words that signs may cut
_SAME, _SAME_TWO = re.compile(rb"\0{2,}"), re.compile(rb"\0+")
_NOT_LONGER = bytes(range(LONGER))
# Both from the first sign on, before which the first letter stands: signs are rarer than letters.
_SPELT = re.compile(r"([^\w](?<=(?<!\w)\S.)[^\w]{0,5})(?:\S\1){4,}\S(?!\w)", re.DOTALL)
_SPELT_TIGHT = re.compile(r"([^\w\s](?<=(?<!\w)\S.)[^\w\s]{0,5})(?:\S\1){4,}\S(?!\w)")
_QUOTES = "\"'`,;()[]{}|"
_JOINTS = re.compile(r"[-_.:/|]")
_GROUPS = re.compile(  # from the first joint on; what stands before it is the group that took part
    r"[-.:/|](?<=\w\w.)(?:(?<=(?<!\w)(\w\w).)(?:\w\w[-.:/|]){4,}|(?<=(?<!\w)(\w{3}).)(?:\w{3}[-.:/|]){3,}"
    r"|(?<=(?<!\w)(\w{4}).)(?:\w{4}[-.:/|]){2,}|(?<=(?<!\w)(\w{5}).)(?:\w{5}[-.:/|]){2,}"
    r"|(?<=(?<!\w)(\w{8}).)(?:\w{8}[-.:/|])+)\w{1,8}(?!\w)"
)
# What ends a line of a run, quotes and joins it, and begins the next.
_BROKEN = re.compile(r"(?<=[A-Za-z0-9+/_-]{15})(?:[\"'`,;\\+&.|]|\s){1,8}[>#*|/+&. \t\"'`]{0,16}(?=[A-Za-z0-9+/_=-])")
_EARLY = re.compile(r"[0-9][A-Za-z0-9+/_-]{14}")  # a line of a run has a digit early on
_MIXED = re.compile(r"(?<![^\s\"'`])[A-Za-z+/_-]{0,15}[0-9][A-Za-z0-9+/_-]{14}")


def _regrouped(tokens: list[str], lengths: bytes) -> Iterator[str]:
    """Yield what neighbours of one length come to when they are joined, each row on a line: decoys are no readings."""
    number = int.from_bytes(lengths)
    differ = number ^ number >> 8  # each from the one before
    same = _SAME_TWO if len(lengths.translate(None, _NOT_LONGER)) > 1 else _SAME
    spelt: list[str] = []
    rows: list[str] = []
    longer: list[str] = []  # the same with what comes after a row, which may be what was left over
    for match in same.finditer(differ.to_bytes(len(lengths))):
        first, last = match.start() - 1, match.end() - 1
        size = lengths[first]
        if last - first + 1 < (ALIKE if size < LONG else 3 if size < LONGER else 2):
            continue
        if size <= 4:  # a letter, perhaps in quotes; the first and the last may have a bracket more
            spelt += _spelt(" ".join(tokens[max(0, first - 1) : last + 2]), _SPELT)
        if size > 1:
            bare = [token.strip(_QUOTES) for token in tokens[first : last + 2]]
            row = "".join(bare[: last + 1 - first])
            if CODED.search(row):
                rows.append(row)
                longer.append(row + bare[-1])
    for lines in (spelt, rows, longer):
        if lines:
            yield "\n".join(lines)


def _spelt(text: str, spelling: re.Pattern[str]) -> Iterator[str]:
    rows = (text[match.start() - 1 : match.end() : 1 + len(match[1])] for match in _matches(spelling, text))
    if any(map(str.isalnum, said := " ".join(rows))):
        yield said


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield matches from the sign after a first letter on, which may not be the last letter of the match before."""
    at = 0
    while match := pattern.search(text, at):
        yield match
        at = match.end() + 1


# Escapes, numbers, and letters for letters.

_ESCAPES = ("\\", "%", "=", "&", "U+", "0x")  # one stands in every text that _unescaped changes
_SEAMS = ("<", "**", "`", "\\", "'", '"')
_UNREMARKABLE = bytes(set(range(256)) - set(b"\\%=&+<*`'\"0123456789"))  # no escape, seam or number has only these

# Patterns that begin with the sign they look for, so that a text without it is passed over quickly.
_ESCAPE = re.compile(  # a text that stands inside another one has its backslashes doubled
    r"[\\%=U0](?:(?<=\\)\\{0,3}(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8}))"
    r"|(?<=%)u([0-9a-fA-F]{4})|(?<==)([0-9A-F]{2})"
    r"|(?:(?<=U)\+|(?<=0)x)0{0,4}([0-9a-fA-F]{2})(?![0-9a-fA-F])(?:[\s,;]{1,2}(?=0x|U\+))?)"
)
_OCTAL = re.compile(r"\\([01][0-7]{2})")
_NUMBERS = re.compile(r"[0-9](?<![\w.]\d)\d{1,7}(?:[\s:,;|-]{1,3}\d{2,8}){7,}(?!\w)")
# What stands inside a word without parting it for a reader who sees it rendered, or a machine that runs it.
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
        if len(data) == len(listed) and is_text(data):
            yield data.decode()


def _joined(text: str) -> str:
    """Return a text whose characters beyond 16 bits may have been escaped in two halves."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
