# Takes what rules find out of a request before it leaves: each find becomes a name and a number, the same wherever it
# stands again, so that a model can still tell two people apart. What cannot be taken out is for the rules to block.

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, UnsetType
from msgspec.structs import fields, replace

from gateway.calls.call import Call
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.plain import plain
from gateway.moderation.rules.rules import places_by_rules
from gateway.moderation.texts import PICTURE
from gateway.upstreams.wire.signatures import is_claudes
from protocol.chat import ThinkingBlock
from protocol.decoding import decode
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

T = TypeVar("T")


def redacted_call(call: Call, groups: frozenset[str]) -> tuple[Call, list[Finding]]:
    """Return a call without what rules of these groups find in it, and what that was."""
    redactor = Redactor(groups)
    changes = {"extra": redactor.take_out(call.extra)}
    changes |= {name: redactor.request(getattr(call, name)) for name in ("native", "shown", "request")}
    found = [Finding(name, group) for name, group in sorted(redactor.found)]
    return (replace(call, **changes) if found else call), found


class Redactor:
    """Takes finds out of the texts of one request. ``found``: names and groups of what it took."""

    def __init__(self, groups: frozenset[str]) -> None:
        self.found: set[tuple[str, str]] = set()
        self._groups = groups
        self._stands_for: dict[tuple[str, str], str] = {}  # of a rule's name and what it found
        self._numbers: dict[str, int] = {}

    def request(self, request: T) -> T:
        """Return a request without finds, but for what it is labelled with."""
        return self._struct(request, KEPT | LABELS) if isinstance(request, Struct) else request

    def take_out(self, value: Any) -> Any:
        """Return a value without finds; the very same where there are none."""
        match value:
            case enum.Enum() | bytes() | UnsetType():
                return value
            case str():
                return self.text(value)
            case Struct():
                return self._struct(value, KEPT)
            case list() | tuple():
                kept = [self.take_out(one) for one in value]
                return value if all(map(_is, kept, value)) else type(value)(kept)
            case Mapping():
                pairs = {self.take_out(key): self.take_out(one) for key, one in value.items()}
                return value if all(map(_is, pairs.values(), value.values())) and [*pairs] == [*value] else pairs
            case _:
                return value

    def text(self, text: str) -> str:
        """Return a text without finds; where they hide behind look-alikes, as its reader sees it."""
        if PICTURE.match(text) is not None:
            return text
        said = self._replaced(text)
        shown = plain(said)
        return said if shown == said or (seen := self._replaced(shown)) == shown else seen

    def _replaced(self, text: str) -> str:
        """Return a text without finds; JSON stays JSON, as tools read it: what cannot be taken out so is left for the
        rules to block."""
        said = self._cut(text)
        if said is text or (document := _document(text)) is None or _document(said) is not None:
            return said
        cleared = msgspec.json.encode(self.take_out(document)).decode()
        said = self._cut(cleared)
        return cleared if _document(said) is None else said

    def _cut(self, text: str) -> str:
        out, at = [], 0
        for start, end, name, group in places_by_rules(text, self._groups):
            out += [text[at:start], self._name_of(name, group, text[start:end])]
            at = end
        return "".join((*out, text[at:])) if out else text

    def _name_of(self, name: str, group: str, found: str) -> str:
        self.found.add((name, group))
        known = self._stands_for.get((name, found))
        if known is None:
            self._numbers[name] = number = self._numbers.get(name, 0) + 1
            known = self._stands_for[name, found] = f"[redacted {name} {number}]"
        return known

    def _struct(self, struct: Any, kept: frozenset[str]) -> Any:
        changes = {}
        for field in sorted(fields(struct), key=lambda field: field.name in GROWING):
            if field.name not in kept:
                value = getattr(struct, field.name)
                if (said := self.take_out(value)) is not value:
                    changes[field.name] = said
        if "thinking" in changes and isinstance(struct, ThinkingBlock) and is_claudes(struct):
            changes["signature"] = ""  # it is for other words: with it, its model refuses the conversation
        return replace(struct, **changes) if changes else struct


def _document(text: str) -> Any:
    """Return the object or list of a text that is JSON and holds one, ``None`` for any other text."""
    if text.lstrip(" \t\r\n")[:1] not in ("{", "["):
        return None
    try:
        return decode(text.encode(), Any)
    except ServiceError:
        return None


def _is(one: object, other: object) -> bool:
    return one is other
