# A configuration of another gateway as it is read: what no reader has asked for is told at the end, with its line, so
# that nothing is passed over in silence.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from gateway.config.tree import ConfigFaults, Fault, Items, Node, Scalar, Section, read_file


class Note(Struct, frozen=True, order=True):
    """What became of one place of the file, where it is not what it says there."""

    line: int
    path: str
    words: str


class Part:
    """One mapping of the file. What is read from it counts as carried over."""

    def __init__(self, section: Section) -> None:
        self.line, self.path = section.line, section.path
        self._entries = section.entries
        self._lines = section.key_lines
        self._read: set[str] = set()
        self._parts: list[Part] = []

    def has(self, key: str) -> bool:
        """Whether the file says anything under ``key``."""
        node = self._entries.get(key)
        return node is not None and not (isinstance(node, Scalar) and node.text in ("", "null", "~"))

    def names(self) -> tuple[str, ...]:
        """Return the keys, in their order."""
        return tuple(self._entries)

    def line_of(self, key: str) -> int:
        """Return the line on which ``key`` stands."""
        return self._lines.get(key, self.line)

    def text(self, key: str) -> str | None:
        """Return the text under ``key``; ``None`` where there is none."""
        node = self._entries.get(key)
        if not isinstance(node, Scalar) or not self.has(key):
            return None
        self._read.add(key)
        return node.text

    def switch(self, key: str) -> bool:
        """Return whether ``key`` is set to true."""
        return (self.text(key) or "").lower() in ("true", "yes", "on")

    def texts(self, key: str) -> list[str]:
        """Return the texts of the list under ``key``; empty where there is none."""
        node = self._entries.get(key)
        if not isinstance(node, Items) or not all(isinstance(each, Scalar) for each in node.items):
            return []
        self._read.add(key)
        return [each.text for each in node.items if isinstance(each, Scalar)]

    def part(self, key: str) -> Part | None:
        """Return the mapping under ``key``."""
        node = self._entries.get(key)
        if not isinstance(node, Section):
            return None
        self._read.add(key)
        return self._keep(node)

    def parts(self, key: str) -> list[Part]:
        """Return the mappings of the list under ``key``."""
        node = self._entries.get(key)
        if not isinstance(node, Items) or not all(isinstance(each, Section) for each in node.items):
            return []
        self._read.add(key)
        return [self._keep(each) for each in node.items if isinstance(each, Section)]

    def pass_over(self, *keys: str) -> None:
        """Count keys as carried over: what they ask for is so anyway."""
        self._read.update(keys)

    def drop(self) -> None:
        """Count all of it as told: one note stands for it."""
        self._read.update(self._entries)
        self._parts.clear()

    def left(self, hints: Mapping[str, str]) -> Iterator[Note]:
        """Yield a note for everything that was not read, with a hint by its key where there is one."""
        for key, node in self._entries.items():
            if key not in self._read and not _says_nothing(node):
                words = f"not carried over: {hints[key]}" if key in hints else "not carried over"
                yield Note(self.line_of(key), f"{self.path}.{key}".lstrip("."), words)
        for part in self._parts:
            yield from part.left(hints)

    def _keep(self, section: Section) -> Part:
        part = Part(section)
        self._parts.append(part)
        return part


class _Kept(Mapping[str, str]):
    """Variables that stay what they are."""

    def __getitem__(self, name: str) -> str:
        return f"${{{name}}}"

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def read_source(path: Path) -> Part:
    """Return what a YAML or JSON file says. Raises ConfigFaults."""
    faults: list[Fault] = []
    tree = read_file(path, _Kept(), faults)
    if tree is None or faults:
        raise ConfigFaults(path, faults)
    return Part(tree)


def _says_nothing(node: Node) -> bool:
    match node:
        case Scalar(text=text):
            return text in ("", "null", "~")
        case Items(items=items):
            return not items
        case Section(entries=entries):
            return not entries
