# The keys of one section of tollgate.yaml, and how messages describe their values: every fault says what was expected
# and what was found, and nothing that came from a variable is ever shown.

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gateway.config.tree import Fault, Items, Node, Scalar, Section, join

T = TypeVar("T")
Faults = list[Fault]
Read = Callable[[Node, Faults], T | None]

NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
WORDS_OF_YAML = {"true", "false", "yes", "no", "on", "off", "null", "~", ""}


class Fields:
    """The keys of one section, read one by one; ``close`` refuses those that were not read."""

    def __init__(self, node: Node | None, path: str, faults: Faults) -> None:
        self.path = path
        self.faults = faults
        self.asked: list[str] = []
        self.section = node if isinstance(node, Section) else None
        self.line = node.line if node is not None else 0
        if node is not None and self.section is None and not is_empty(node):
            complain(node, faults, f"expected a mapping of settings, found {kind_of(node)}")

    def get(self, key: str, read: Read[T], default: T) -> T:
        """Return the value of ``key``, or ``default`` where it is missing or faulty."""
        value = self.find(key, read)
        return default if value is None else value

    def need(self, key: str, read: Read[T], stand_in: T, hint: str) -> T:
        """Return the value of ``key``; a missing one is a fault, and ``stand_in`` lets the check go on."""
        if not self.has(key):
            self.faults.append(Fault(self.line, join(self.path, key), f"missing; {hint}"))
        return self.get(key, read, stand_in)

    def find(self, key: str, read: Read[T]) -> T | None:
        """Return the value of ``key``, or ``None`` where it is missing or faulty."""
        node = self.node(key)
        return None if node is None else read(node, self.faults)

    def node(self, key: str) -> Node | None:
        """Return the value under ``key`` as it is; an empty value counts as absent."""
        self.asked.append(key)
        return self.section.entries[key] if self.section is not None and self.has(key) else None

    def has(self, key: str) -> bool:
        """Tell whether the file says anything under ``key``."""
        return self.section is not None and key in self.section.entries and not is_empty(self.section.entries[key])

    def close(self) -> None:
        """Note every unknown key, with the one that was probably meant."""
        if self.section is None:
            return
        known = list(dict.fromkeys(self.asked))
        for key in self.section.entries:
            if key not in known:
                line = self.section.key_lines.get(key, self.line)
                self.faults.append(Fault(line, join(self.path, key), f"unknown key; {meant(key, known)}"))


def meant(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known word closest to ``word``, or all of them."""
    words = list(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6) or difflib.get_close_matches(
        word.lower().replace("-", "_"), words, n=1, cutoff=0.6
    )
    if close:
        return f"did you mean `{close[0]}`?"
    return f"known here: {', '.join(words)}" if words else "nothing is known here"


def complain(node: Node, faults: Faults, message: str) -> Any:
    """Note a fault at ``node``, unless the node already has one, and return ``None`` for the reader to pass on."""
    if not (isinstance(node, Scalar) and node.is_broken):
        faults.append(Fault(node.line, node.path, message))


def is_empty(node: Node) -> bool:
    """Tell whether the file names the key but says nothing: a bare ``key:`` or ``~``."""
    return isinstance(node, Scalar) and not node.is_quoted and not node.is_broken and node.text in ("", "~", "null")


def shown(node: Node) -> str:
    """Return a value as messages may show it: what the file says, with variables by name."""
    return node.shown if isinstance(node, Scalar) else kind_of(node)


def kind_of(node: Node) -> str:
    """Return what a node is, in words, without its value."""
    match node:
        case Section():
            return "a mapping"
        case Items():
            return "a list"
        case Scalar(is_expanded=True):
            return f"the text of {node.shown}"
        case Scalar(is_quoted=False) if NUMBER.fullmatch(node.text):
            return f"the number {node.text[:60]}"
        case Scalar(is_quoted=False) if node.text.lower() in WORDS_OF_YAML:
            return f"`{node.text}`" if node.text else "nothing"
        case Scalar():
            return f"the text {node.text!r}" if len(node.text) <= 60 else "a long text"
