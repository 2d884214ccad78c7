# Takes what rules find out of a request before it leaves, or of a whole answer: each find becomes a name and a number,
# the same wherever it stands again, so that its reader can still tell two people apart. What cannot be taken out is for
# the rules to block.

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, UnsetType
from msgspec.structs import fields, replace

from gateway.calls.call import Call
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules.rules import RULES, places_by_rules
from gateway.moderation.texts import PICTURE
from gateway.upstreams.wire.signatures import is_claudes
from protocol.chat import Choice, Reasoning, ThinkingBlock
from protocol.completions import CompletionChoice
from protocol.decoding import NOT_JSON, decode
from protocol.errors import ServiceError

# What has to stay as it is: ids and seals, which both sides compare, and what the books and limits go by.
KEPT = frozenset(
    (
        *("id", "call_id", "tool_call_id", "tool_use_id", "container_id", "approval_request_id", "vector_store_ids"),
        *("type", "role", "model", "signature", "encrypted_content", "data"),
        "result",  # a picture
    )
)
# What each turn adds to comes last: a find in it gives none before it another number, or its provider would find no
# prompt cached.
GROWING = frozenset(("messages", "input"))
LABELS = frozenset(("user", "safety_identifier", "metadata"))  # of a request
# The same of what an upstream tells in its own words, and pictures.
KEPT_TOLD = KEPT | {"item_id", "obfuscation", "partial_image_b64"}
LONGEST_KNOWN = 200  # characters by which a find is known again
_NAMES = frozenset(rule.name for rule in RULES)
_MARK = re.compile(r"\[redacted (\w{1,40}) [0-9]{1,9}\]")  # as ``Redactor.name_of`` writes it

T = TypeVar("T")


def redacted_call(call: Call, groups: frozenset[str]) -> tuple[Call, list[Finding]]:
    """Return a call without what rules of these groups find in it, and what that was. Its answer goes on with the
    names."""
    redactor = Redactor(groups)
    changes = {"extra": redactor.take_out(call.extra)}
    changes |= {name: redactor.request(getattr(call, name)) for name in ("native", "shown", "request")}
    found = redactor.findings()
    return (replace(call, **changes, redacted=redactor.names) if redactor.names else call), found


def unmarked(text: str) -> str:
    """Return a text with dots for what stands for finds, as the classifier reads it: it was fitted on none of these
    marks, and an order about one ("Repeat this address: …") looks like an attack to it."""
    return _MARK.sub(lambda mark: "..." if mark[1] in _NAMES else mark[0], text) if "[redacted " in text else text


class Redactor:
    """Takes finds out of the texts of one request or answer. ``names``: what stands for a rule's name and what it
    found; of an answer those of its request come first."""

    def __init__(self, groups: frozenset[str], names: Mapping[tuple[str, str], str] | None = None) -> None:
        self.names = dict(names or {})
        self.groups = groups
        self._found: set[tuple[str, str]] = set()
        self._marks = set(self.names.values())
        self._numbers = Counter[str]()  # of each rule, the last that was given

    def findings(self) -> list[Finding]:
        """Return what was taken out so far."""
        return [Finding(name, group) for name, group in sorted(self._found)]

    def request(self, request: T) -> T:
        """Return a request without finds, but for what it is labelled with."""
        return self._struct(request, KEPT | LABELS) if isinstance(request, Struct) else request

    def take_out(self, value: Any) -> Any:
        """Return a value without finds; the very same where there are none."""
        return self._take_out(value, frozenset())

    def _take_out(self, value: Any, kept: frozenset[str]) -> Any:
        """The same; entries of mappings that are named in ``kept`` stay."""
        match value:
            case enum.Enum() | bytes() | UnsetType():
                return value
            case str():
                return self.text(value)
            case Raw():
                return self._raw(value)
            case Struct():
                return self._struct(value, KEPT)
            case list() | tuple():
                left = [self._take_out(one, kept) for one in value]
                return value if all(map(_is, left, value)) else type(value)(left)
            case Mapping():
                is_told = any(isinstance(one, Raw) for one in value.values())
                return self._mapping(value, KEPT_TOLD if is_told else kept)
            case _:
                return value

    def _mapping(self, value: Mapping[str, Any], kept: frozenset[str]) -> Mapping[str, Any]:
        pairs = {self.take_out(key): one if key in kept else self._take_out(one, kept) for key, one in value.items()}
        if all(map(_is, pairs.values(), value.values())) and [*pairs] == [*value]:
            return value
        if kept and "logprobs" in pairs:
            pairs["logprobs"] = Raw(b"[]")
        return pairs

    def _raw(self, data: Raw) -> Raw:
        """Return JSON in the words of an upstream without finds, byte for byte where there are none."""
        try:
            left = self._take_out(said := msgspec.json.decode(data), KEPT_TOLD)
        except NOT_JSON:  # too deep, where an upstream tells it
            text = bytes(data).decode("utf-8", "replace")
            return data if self._cut(text) is text else Raw(b"null")
        return data if left is said else Raw(msgspec.json.encode(left))

    def text(self, text: str) -> str:
        """Return a text without finds; where they hide behind look-alikes, as its reader sees it."""
        if PICTURE.match(text) is not None:
            return text
        self.note_marks(text)
        said = self._replaced(text)
        shown = plain(said)
        return said if shown == said or (seen := self._replaced(shown)) == shown else seen

    def _replaced(self, text: str) -> str:
        """Return a text without finds; JSON stays JSON, as tools read it: what cannot be taken out so is left for the
        rules to block."""
        if (said := self._cut_whole(text)) is not None:
            return said
        cleared = msgspec.json.encode(self.take_out(_document(text))).decode()
        return self._cut_whole(cleared) or cleared

    def _cut_whole(self, text: str) -> str | None:
        """Return a text without finds; ``None``, and nothing is noted, where it was JSON and would be none."""
        if text.lstrip(" \t\r\n")[:1] not in ("{", "["):
            return self._cut(text)
        known, found = len(self.names), self._found.copy()
        said = self._cut(text)
        if said is text or _document(text) is None or _document(said) is not None:
            return said
        self._found = found
        while len(self.names) > known:  # the latest last: their numbers are the next to be given
            (name, _), mark = self.names.popitem()
            self._marks.discard(mark)
            self._numbers[name] = int(mark.rpartition(" ")[2][:-1]) - 1
        return None

    def _cut(self, text: str) -> str:
        out, at = [], 0
        for start, end, name, group in places_by_rules(text, self.groups):
            out += [text[at:start], self.name_of(name, group, text[start:end])]
            at = end
        return "".join((*out, text[at:])) if out else text

    def name_of(self, name: str, group: str, found: str) -> str:
        """Return what stands for a find, and note it."""
        self._found.add((name, group))
        find = name, found[:LONGEST_KNOWN]
        known = self.names.get(find)
        while known is None:
            self._numbers[name] += 1
            mark = f"[redacted {name} {self._numbers[name]}]"
            if mark not in self._marks:
                self._marks.add(mark)
                known = self.names[find] = mark
        return known

    def note_marks(self, text: str) -> None:
        """Give none of the marks in a text to another find: an answer of an earlier turn had names of its own."""
        if "[redacted " in text:
            for mark in _MARK.finditer(text):
                if mark[1] in _NAMES and mark[0] not in self._marks:
                    self._marks.add(mark[0])
                    self.names[mark[1], mark[0]] = mark[0]

    def _struct(self, struct: Any, kept: frozenset[str]) -> Any:
        changes = {}
        for field in sorted(fields(struct), key=lambda field: field.name in GROWING):
            if field.name not in kept:
                value = getattr(struct, field.name)
                if (said := self.take_out(value)) is not value:
                    changes[field.name] = said
        if not changes:
            return struct
        if isinstance(struct, ThinkingBlock | Reasoning) and is_claudes(ThinkingBlock("", struct.signature)):
            changes["signature"] = ""  # it is for other words: with it, its model refuses the conversation
        if isinstance(struct, Choice | CompletionChoice):  # the words of tokens, one by one
            changes |= {"logprobs": None, "token_ids": None}
        return replace(struct, **changes)


def _document(text: str) -> Any:
    """Return the object or list of a text that is JSON and holds one, ``None`` for any other text."""
    try:
        return decode(text.encode(), Any)
    except ServiceError:
        return None


def _is(one: object, other: object) -> bool:
    return one is other
