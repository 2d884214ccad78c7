# Texts that hold up code which looks at a character more than once: one sign many times, no blanks, near matches.

from __future__ import annotations

import base64
import random
import re
from functools import cache
from re import _constants as signs  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MOST_REPEATS = 12  # of what a pattern repeats without an end
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"

# Repeated up to any length.
UNITS = (
    *("a", "A", "0", " ", "\n", '"', "\\", "<", "{", "[", "(", ")", ".", ",", "-", ":", "=", "@", "%", "&", "/"),
    *("\u0000", "é", "中", "😀", "\u200b", "\u05b0\u0591", "ﷺ", "e\u0301", "а"),
    *("a ", "a-", "aA1", "ab-", "12 ", "1-", "0x41 ", "\\u0041", "%41", "&amp;", 'a"+"', "a<b>", "<a", "a**", '\\"'),
    *(" gur ", " eht ", "a@b", "a(at)b", '{"a":', "[{},", '"a",', "<tool_call>", "</tool_call", "data: x\n\n", "\r"),
)  # fmt: skip


@cache
def texts() -> dict[str, str]:
    """Return stretches of text by a name; what is asked for is as long as wished, by repeating them."""
    dice = random.Random(7)
    said = " ".join("".join(dice.choices("etaoinshr", k=dice.randint(1, 9))) for _ in range(2_000))
    found = {repr(unit): unit for unit in UNITS}
    found |= {
        "prose": said + ". ",
        "no blanks": "".join(dice.choices(_LETTERS, k=20_000)),
        "digits": "".join(dice.choices("0123456789", k=20_000)),
        "digits in groups": "".join(dice.choices("0123456789 -", k=20_000)),
        "base64": base64.b64encode(said.encode()).decode(),
        "hexadecimal": said.encode().hex(),
        "signs": "".join(dice.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", k=20_000)),
    }
    return found


def repeated(unit: str, size: int) -> str:
    """Return ``size`` characters of a text that goes on for ever."""
    return (unit * (size // len(unit) + 1))[:size]


def near_matches(pattern: re.Pattern[Any]) -> list[str]:
    """Return what nearly matches a pattern: an example without its end, its beginning alone, each of its repeats."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = parser.parse(source, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags)
    stretches: list[str] = []
    example = _example(tree, stretches)
    half = example[: len(example) // 2]
    return list(dict.fromkeys(text for text in (example, example[:-1], half, f"{half} ", *stretches) if text))


def _example(tree: Any, stretches: list[str]) -> str:
    """Return a text that a parsed pattern may match, and note what it repeats."""
    return "".join(_of(kind, what, stretches) for kind, what in tree)


def _of(kind: Any, what: Any, stretches: list[str]) -> str:
    match str(kind):
        case "LITERAL":
            return chr(what)
        case "NOT_LITERAL" | "ANY":
            return "x" if what != ord("x") else "y"
        case "IN":
            return _member(what)
        case "BRANCH":
            found = [_example(branch, stretches) for branch in what[1]]
            stretches += found
            return max(found, key=len)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, inner = what
            once = _example(inner, stretches)
            stretches.append(once)
            return once * min(int(most), max(int(least), MOST_REPEATS))
        case "SUBPATTERN":
            return _example(what[3], stretches)
        case "ATOMIC_GROUP":
            return _example(what, stretches)
    return ""  # looks around, groups said again, ends: they add nothing


def _member(members: Any) -> str:
    """Return a character of a class, such as "[a-z]"."""
    for kind, what in members:
        match str(kind):
            case "LITERAL":
                return chr(what)
            case "RANGE":
                return chr(what[0])
            case "CATEGORY":
                return {signs.CATEGORY_DIGIT: "1", signs.CATEGORY_SPACE: " ", signs.CATEGORY_WORD: "w"}.get(what, "-")
    return "x"  # of a class that names what is not in it
