# Control tokens in what callers say: there the text of one, such as those that begin and end turns, is text like any
# other. A mark breaks it, at which the codec cuts before it encodes; a template's own control tokens stay as they are.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MARK = "\ufdd0"  # a code point that Unicode keeps free of any character


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How a tokenizer rewrites texts (compatible characters, small letters) before it looks for added tokens."""

    rewrite: Callable[[str], str]
    found: Callable[[str], Iterable[tuple[str, int, int]]]  # added tokens in a text, and from where to where they are


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """What a vocabulary adds to the words of its model, by texts: no word is cut there, wherever it stands."""

    special: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()  # marks of thoughts and calls; in DeepSeek's, those that begin turns, too
    rewriting: Rewriting | None = None  # None: they are looked for in texts as they come

    def control_tokens(self, template: str, without: Iterable[str] = ()) -> ControlTokens:
        """Return those that control a model: all special ones, and of the others those that its template names."""
        named = {text for text in self.others if text in template and not text.isspace()}
        return ControlTokens(self.special | named.difference(without), self.rewriting)


class ControlTokens:
    """The control tokens of one vocabulary, by their texts."""

    def __init__(self, texts: Iterable[str], rewriting: Rewriting | None = None) -> None:
        texts = sorted(text for text in texts if len(text) > 1)
        self._texts = frozenset(texts)
        self._rewriting = rewriting
        heads = {text[0]: {other[1:] for other in texts if other[0] == text[0]} for text in texts}
        begun = "|".join(f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in heads.items())
        self._begun = re.compile(begun or r"(?!)")
        # A text without any is harmless.
        self._pairs = tuple({pair for text in texts for pair in (text[:2], text[-2:])})
        # What a neighbour's text might complete: of two parts, one is half of the token or more.
        halves = [(text, size) for text in texts for size in range(-(-len(text) // 2), len(text))]
        self._beginnings = tuple({text[:size] for text, size in halves})
        self._ends = tuple({text[-size:] for text, size in halves})

    def guard(self, text: str) -> str:
        """Return a caller's text with a mark inside each control token that it holds, or has half of at an end: what a
        template puts beside it may be the other half. White space around the text does not count, since templates trim.
        """
        if MARK in text:
            text = text.replace(MARK, "")
        seen = text if self._rewriting is None else self._rewriting.rewrite(text)
        if not any(pair in text or pair in seen for pair in self._pairs):
            return text
        text = self._begun.sub(lambda found: found[0] + MARK, text)
        if self._rewriting is not None:
            text = MARK.join([self._broken(part, self._rewriting) for part in text.split(MARK)])
        cores = (text.strip(), seen.strip())
        if any(core.endswith(self._beginnings) for core in cores):
            end = len(text.rstrip())
            text = text[:end] + MARK + text[end:]
        if any(core.startswith(self._ends) for core in cores):
            start = len(text) - len(text.lstrip())
            text = text[:start] + MARK + text[start:]
        return text

    def _broken(self, text: str, rewriting: Rewriting) -> str:
        """Return a text with marks in what only its rewriting makes a control token, as often as it takes."""
        found = [place for token, *place in rewriting.found(text) if token in self._texts]
        cuts = [(start + end) // 2 for start, end in found if end - start > 1]  # a token may have the space around it
        if not cuts:
            return text
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return MARK.join([self._broken(part, rewriting) for part in parts])

    def guard_all(self, value: Any) -> Any:
        """Return a JSON value with all its texts guarded."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard_all(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.guard_all(inner) for inner in value]
        return value


def _any_of(words: set[str]) -> str:
    """Return an expression for texts that begin with one of ``words``; it looks at each character once."""
    if "" in words:
        return ""
    heads = {word[0]: {other[1:] for other in words if other[0] == word[0]} for word in words}
    return "(?:" + "|".join(re.escape(first) + _any_of(rests) for first, rests in sorted(heads.items())) + ")"
