# tollgate.yaml as a tree that remembers where everything stood: each node knows its line and the path of keys to it.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gateway.config.variables import Variables

MAX_NODES = 100_000  # aliases may repeat themselves without end
MAX_DEPTH = 32

_CORE_TAG = re.compile(r"tag:yaml\.org,2002:(str|int|float|bool|null|map|seq|timestamp|merge|value)")


class Fault(Struct, frozen=True, order=True):
    """One thing wrong with the file. ``line`` counts from 1; 0 is the file as a whole."""

    line: int
    path: str  # keys from the root: models.gpt-4o.price.input
    message: str  # what is wrong and what would be right; never a secret


class ConfigFaults(Exception):
    """The file is refused. Everything wrong with it at once, in the file's order."""

    def __init__(self, file: Path | None, faults: list[Fault]) -> None:
        self.file = file
        self.faults = tuple(sorted(set(faults)))
        super().__init__("\n".join(self.lines()))

    def lines(self) -> Iterator[str]:
        """Yield one line of text per fault: ``tollgate.yaml:12: models.gpt-4o.prise: …``."""
        for fault in self.faults:
            where = f"{self.file or 'built in'}:{fault.line}" if fault.line else f"{self.file or 'built in'}"
            yield f"{where}: {fault.path}: {fault.message}" if fault.path else f"{where}: {fault.message}"


class Scalar(Struct, frozen=True, kw_only=True):
    line: int
    path: str
    text: str  # with variables filled in
    shown: str  # with their names instead
    is_quoted: bool = False
    is_expanded: bool = False  # at least a part came from a variable or a file
    is_broken: bool = False  # a fault is already on the list; readers say nothing more


class Items(Struct, frozen=True, kw_only=True):
    line: int
    path: str
    items: tuple[Node, ...]


class Section(Struct, frozen=True, kw_only=True):
    line: int
    path: str
    entries: dict[str, Node]
    key_lines: dict[str, int]


Node = Scalar | Items | Section


def read_file(path: Path, env: Mapping[str, str], faults: list[Fault]) -> Section | None:
    """Return the tree of the file at ``path``, or ``None`` after noting why there is none."""
    try:
        content = path.read_bytes()
    except OSError as exc:
        faults.append(Fault(0, "", f"cannot be read: {exc.strerror}"))
        return None
    try:
        return read_tree(content.decode("utf-8-sig"), env, faults)
    except UnicodeDecodeError as exc:
        faults.append(Fault(content[: exc.start].count(b"\n") + 1, "", "not UTF-8 text"))
        return None


def read_tree(text: str, env: Mapping[str, str], faults: list[Fault]) -> Section | None:
    """Return a text's tree, or ``None`` after noting why there is none."""
    variables = Variables(env)
    try:
        root = yaml.compose(variables.hide(text), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        faults.append(Fault(mark.line + 1 if mark else 0, "", f"not YAML: {_problem(exc)}"))
        return None
    except RecursionError:
        faults.append(Fault(0, "", "nested too deeply"))
        return None
    except yaml.YAMLError:
        faults.append(Fault(0, "", "not YAML: it holds a character that YAML does not allow"))
        return None
    if root is None:
        return Section(line=1, path="", entries={}, key_lines={})
    tree = _Builder(variables, faults).build(root, "", 1, 0)
    if isinstance(tree, Section):
        return tree
    if not faults:
        faults.append(Fault(1, "", "the file must be a mapping of settings, such as `database_url: …`"))
    return None


def tree_of(value: Any, path: str = "", line: int = 0) -> Node:
    """Return built-in settings, plain Python values, as nodes at the line that asks for them; at 0 where none does."""
    if isinstance(value, Mapping):
        entries = {str(key): tree_of(each, join(path, str(key)), line) for key, each in value.items()}
        return Section(line=line, path=path, entries=entries, key_lines=dict.fromkeys(entries, line))
    if isinstance(value, list | tuple):
        items = tuple(tree_of(each, f"{path}[{index}]", line) for index, each in enumerate(value))
        return Items(line=line, path=path, items=items)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(line=line, path=path, text=text, shown=text, is_expanded=True)


def merge(base: Section, over: Section) -> Section:
    """Return ``base`` with ``over`` laid upon it: sections join entry by entry, anything else is replaced whole."""
    entries = dict(base.entries)
    for key, node in over.entries.items():
        below = base.entries.get(key)
        if isinstance(node, Section) and isinstance(below, Section):
            node = _laid_over(below, node, {**below.entries, **node.entries})
        entries[key] = node
    return _laid_over(base, over, entries)


def _laid_over(below: Section, over: Section, entries: dict[str, Node]) -> Section:
    lines = {**below.key_lines, **over.key_lines}
    return Section(line=over.line, path=over.path, entries=entries, key_lines=lines)


def join(path: str, key: str) -> str:
    """Return the path of ``key`` under ``path``."""
    return f"{path}.{key}" if path else key


class _Builder:
    """Turns PyYAML's nodes into ours; it never makes Python objects, so no tag can run anything."""

    def __init__(self, variables: Variables, faults: list[Fault]) -> None:
        self.variables = variables
        self.faults = faults
        self.count = 0

    def build(self, node: yaml.Node, path: str, line: int, depth: int) -> Node:
        self.count += 1
        if self.count > MAX_NODES or depth > MAX_DEPTH:
            return self._broken(line, path, "nested too deeply, or repeated too often through aliases")
        if not _CORE_TAG.fullmatch(node.tag):
            return self._broken(line, path, "YAML tags (!…) are not used here; quote a value that begins with `!`")
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path, line, depth)
            case yaml.SequenceNode():
                items = [
                    self.build(each, f"{path}[{index}]", each.start_mark.line + 1, depth + 1)
                    for index, each in enumerate(node.value)
                ]
                return Items(line=line, path=path, items=tuple(items))
            case yaml.ScalarNode():
                return self._scalar(node, path)
        raise AssertionError(node)  # YAML has no other kind

    def _mapping(self, node: yaml.MappingNode, path: str, line: int, depth: int) -> Section:
        entries: dict[str, Node] = {}
        lines: dict[str, int] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                for each in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    below = self.build(each, path, at, depth + 1)
                    if isinstance(below, Section):
                        merged = {**below.entries, **merged}
                        lines = {**dict.fromkeys(below.entries, at), **lines}
                continue
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or self.variables.are_in(key):
                self.faults.append(Fault(at, path, "a key must be plain text; variables belong in values"))
            elif key in entries:
                self.faults.append(
                    Fault(at, join(path, key), f"duplicate key, first on line {lines[key]}; keep one of the two")
                )
                again, first = self.build(value_node, join(path, key), at, depth + 1), entries[key]
                if isinstance(first, Section) and isinstance(again, Section):  # what is wrong in either is told
                    entries[key] = merge(first, again)
            else:
                lines[key] = at
                entries[key] = self.build(value_node, join(path, key), at, depth + 1)
        return Section(line=line, path=path, entries={**merged, **entries}, key_lines=lines)

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Scalar:
        line = node.start_mark.line + 1
        text, wrong = self.variables.fill(node.value)
        self.faults += [Fault(line, path, message) for message in wrong]
        if "${" in node.value:
            return self._broken(line, path, "`${` without its `}`; a literal one is written `$${…}`")
        return Scalar(
            line=line,
            path=path,
            text=text,
            shown=self.variables.show(node.value),
            is_quoted=node.style in ("'", '"', "|", ">"),
            is_expanded=self.variables.are_in(node.value),
            is_broken=bool(wrong),
        )

    def _broken(self, line: int, path: str, message: str) -> Scalar:
        self.faults.append(Fault(line, path, message))
        return Scalar(line=line, path=path, text="", shown="", is_broken=True)


def _problem(exc: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's complaint in words that cannot quote a value of the file."""
    problem = exc.problem or "it cannot be parsed"
    if "alias" in problem:
        return "an alias (*name) without its anchor (&name); quote a value that begins with `*`"
    if "tag" in problem:
        return "a YAML tag (!…) that cannot be read; quote a value that begins with `!`"
    if "tab" in problem or "'\\t'" in problem:
        return "a tab where YAML wants spaces"
    if "mapping values are not allowed" in problem or "'<block" in problem:
        return (
            "no key can stand here: it is indented otherwise than its neighbours, or no space follows a colon before it"
        )
    if "got '{'" in problem:
        return f"{problem}; a variable is written ${{NAME}}, with its end"
    return problem
