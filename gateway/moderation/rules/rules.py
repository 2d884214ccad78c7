# Rules for what can be told by its form: secrets, numbers that belong to one person, ways to reach one, and the phrases
# that the deployment forbids. Each rule has words that its text must hold, which costs next to nothing to look for;
# only then its pattern runs. Every pattern is linear: what repeats is bounded, or cannot be matched in two ways.

from __future__ import annotations

import re
import string
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules import genuine

Group = Literal["secrets", "personal_data", "contacts"]


@dataclass(frozen=True)
class Rule:
    """One thing to find. ``marks``: one of these stands in every text that has it. ``before``: how many characters
    before a match belong to what is found; a pattern that begins with a digit (``[0-9]``: in a plain text there
    are no others) is sought several times faster than one that begins with any letter. ``in_run``: whether a mark
    always stands in ``LONG_RUN`` letters, digits and ``_-.`` without a break, which few texts have."""

    name: str
    group: Group
    marks: tuple[str, ...]
    expression: str
    is_real: Callable[[str], bool] = genuine.is_any
    before: int = 0
    in_run: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the text must match: compiled when a text first has a mark, as all of them take a start 70 ms."""
        return re.compile(self.expression)


class Place(NamedTuple):
    """Where a rule has found something in a text."""

    start: int
    end: int
    name: str
    group: Group


def find_by_rules(text: str) -> list[Finding]:
    """Return what ``RULES`` find in a plain text, each rule once."""
    return [Finding(rule.name, rule.group) for rule in _due(text) if next(_matches(text, rule), None)]


def places_by_rules(
    text: str, groups: frozenset[str], end_of: Callable[[int], int | None] = lambda _: None
) -> list[Place]:
    """Return where ``RULES`` of these groups find something in a text, in its order. A rule may know no
    more of a secret than how it begins: its place goes on to the end of its word, that of a key without an end to where
    ``end_of`` says that what holds its beginning ends, or to the end of the text."""
    found: list[Place] = []
    for rule in _due(text):
        if rule.group in groups:
            found += _places_of(text, rule, end_of)
    found.sort()
    apart: list[Place] = []
    for place in found:
        if apart and place.start < apart[-1].end:
            whole = place if place.name == "private_key" else apart[-1]  # a key goes on to the line that ends it
            apart[-1] = whole._replace(start=apart[-1].start, end=max(place.end, apart[-1].end))
        else:
            apart.append(place)
    return apart


def _due(text: str) -> list[Rule]:
    """Return the rules whose marks stand in a text."""
    due: set[int] = set()
    for sign, marked in _BY_SIGN:
        if sign in text:
            for mark, rules in marked:
                if mark in text:
                    due |= rules
    data = text.encode("utf-8", "replace")
    if _LONG_RUN in data.translate(_AS_RUN):
        runs = b" ".join(run for run in data.translate(_RUN_ALONE).split() if len(run) >= LONG_RUN)
        due.update(place for start, place in _BY_START if start in runs)
    return [RULES[place] for place in sorted(due)]


def _matches(text: str, rule: Rule) -> Iterator[tuple[int, int]]:
    """Yield where a rule finds something, from and to."""
    for match in rule.pattern.finditer(text):
        if rule.is_real(text[match.start() - rule.before : match.end()]):
            yield max(0, match.start() - rule.before), match.end()


def _places_of(text: str, rule: Rule, end_of: Callable[[int], int | None]) -> Iterator[Place]:
    """Yield the places of what one rule finds. What lies in the one before is a part of it, and is not looked at: to
    look for the end of each would take the square of the time."""
    over = 0
    for start, end in _matches(text, rule):
        if start >= over:
            start, over = _place_of(text, rule, start, end, end_of)
            yield Place(start, over, rule.name, rule.group)


def _place_of(text: str, rule: Rule, start: int, end: int, end_of: Callable[[int], int | None]) -> tuple[int, int]:
    """Return the place of what a rule has found, of an assignment what is assigned."""
    if rule.is_real is genuine.is_assigned and (head := _ASSIGNS.match(text, start, end)) is not None:
        start = head.end()
    if rule.name == "private_key":
        most = end_of(start)
        most = len(text) if most is None else max(end, most)
        over = _KEY_ENDS.search(text, end, most)
        return start, most if over is None else over.end()
    if rule.name == "email":  # found by the sign inside it
        if text[start - 1 : start] == " " and text[start] != "@":  # anna (at) example.com
            start -= 1
        while start and (text[start - 1].isalnum() or text[start - 1] in "._%+-"):
            start -= 1
        if text[start - 1 : start] == "\\" and (escaped := _ESCAPED.match(text, start, end)) is not None:
            start = escaped.end()
    while end > start and text[end - 1] in _QUOTES:
        end -= 1
    if rule.group == "secrets" and (rest := _WORD_GOES_ON.match(text, end)) is not None:
        end = rest.end()
    return start, end


def end_so_far(place: Place, text: str) -> Place:
    """Return a long find in a text that goes on, without what may be the line that ends its key."""
    is_open = place.name == "private_key" and place.end == len(text)
    return place._replace(end=max(place.start, place.end - LONGEST_END)) if is_open else place


def end_of_open(name: str, text: str, *, is_over: bool) -> tuple[int, bool]:
    """Return up to where a text belongs to a find of a rule that reached the end of what came before it, and whether it
    goes on behind the text."""
    if name == "private_key":
        over = _KEY_ENDS.search(text)
        if over is not None and (is_over or over.end() < len(text) or over.group().endswith("-")):
            return over.end(), False
        return (len(text), False) if is_over else (max(0, len(text) - LONGEST_END), True)
    word = _REST_OF_WORD.match(text)
    assert word is not None
    end = len(word.group().rstrip("."))
    return end, not is_over and word.end() == len(text) and word.end() - end <= LONGEST_END


def holds_phrase(text: str, phrases: Iterable[str]) -> bool:
    """Whether a text holds one of the forbidden phrases, in any case and spacing, look-alikes undone in either."""
    said = foldings(text)
    return any(phrase in one for phrase in phrases for one in said)


def foldings(text: str) -> set[str]:
    """Return ``text`` without case, runs of space and look-alikes. What a letter looks like may hang on its case, so
    there are two ways."""
    if text.isascii():
        return {" ".join(text.lower().split())}
    return {" ".join(one.split()) for one in (plain(text).casefold(), plain(text.casefold()))}


def _rules(table: dict[str, Any]) -> Iterator[Rule]:
    for one in table["rules"]:
        marks = tuple(string.digits if one["marks"] == "digits" else one["marks"])
        pattern, is_real = "".join(one["pattern"]), getattr(genuine, one.get("check", "is_any"))
        yield Rule(one["name"], one.get("group", "secrets"), marks, pattern, is_real, one.get("before", 0))
    yield from _tokens(table["tokens"], genuine.is_any)
    yield from _tokens(table["random_tokens"], genuine.is_random)
    for mark, pattern in table["marked"].items():
        yield Rule("service_token", "secrets", (mark,), pattern)


def _tokens(kinds: dict[str, dict[str, str]], is_real: Callable[[str], bool]) -> Iterator[Rule]:
    """Yield a rule for each start of a token. None begins inside a word, though an escaped line break or tab before it
    ends in a letter."""
    for name, rests in kinds.items():
        for start, rest in rests.items():
            begun = rf"{re.escape(start)}(?<![A-Za-z0-9](?<!\\[nrtbfv]).{{{len(start)}}})"
            yield Rule(name, "secrets", (start,), begun + rest, is_real, in_run="+/" not in rest)


RULES = tuple(_rules(tomllib.loads((files("gateway") / "moderation" / "rules" / "rules.toml").read_text())))

_QUOTES = " \"'\\,;"
_WORD_GOES_ON = re.compile(r"[\w+/=.~%-]*[\w+/=~%-]")
_REST_OF_WORD = re.compile(r"[\w+/=.~%-]*")
LONGEST_END = 80  # characters of the line that ends a key
_ESCAPED = re.compile(r"[bfnrt]|u[0-9a-fA-F]{4}")  # what follows the backslash of a string of JSON
_ASSIGNS = re.compile(r"[^=:]{0,60}?(?:=>|:=|[:=])[ \t\"'\\]*")
_KEY_ENDS = re.compile(r"-----END [A-Z ]{1,40}-----|Private-MAC: [0-9a-fA-F]+")

LONG_RUN = 20
_RUN_SIGNS = (string.ascii_letters + string.digits + "_-.").encode()
_RUN_ALONE = bytes(code if code in _RUN_SIGNS else ord(" ") for code in range(256))
_AS_RUN = bytes(ord("x") if code in _RUN_SIGNS else ord(" ") for code in range(256))
_LONG_RUN = b"x" * LONG_RUN
_BY_START = [(rule.marks[0].encode(), place) for place, rule in enumerate(RULES) if rule.in_run]

_USUAL = "zjqxkvbKSACyTPwgfmpcu.-dlhrsinaote "  # signs that texts often have, the rarer ones first


def _by_sign() -> tuple[tuple[str, tuple[tuple[str, set[int]], ...]], ...]:
    """Return the rules by their marks, and these by their rarest sign: to look for one sign takes a tenth of the time
    of a mark."""
    found: dict[str, dict[str, set[int]]] = {}
    for place, rule in enumerate(RULES):
        for mark in () if rule.in_run else rule.marks:
            found.setdefault(min(mark, key=_USUAL.find), {}).setdefault(mark, set()).add(place)
    return tuple((sign, tuple(marked.items())) for sign, marked in found.items())


_BY_SIGN = _by_sign()
