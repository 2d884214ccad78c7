# The output items of a response that an upstream of the same API gives: its events and items as they came, but for
# their numbers and their ids, which are this gateway's.

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from gateway.dialects.parts.output_items import Told
from protocol.chat import FinishReason
from protocol.decoding import NOT_JSON
from protocol.events import Delta
from protocol.responses import item_id

Fields = dict[str, Raw]
Part = tuple[str, int, str]  # the field of an item that has it, its place there, its type
PARTED = ("content", "summary")  # fields that have parts

# Events that tell the whole response, as it begins and at its end: those are written here.
OF_THE_RESPONSE = ("response.created", "response.queued", "response.in_progress")
ITEM_EVENTS = ("response.output_item.added", "response.output_item.done")
# Events of tools that the upstream runs: which field of their item they tell of.
HOSTED_FIELDS = {"response.mcp_call_arguments": "arguments", "response.code_interpreter_call_code": "code"}
PREFIX = "item"  # of the id of an item that came without one
ENDS = ("response.completed", "response.incomplete")


class NativeItems:
    """Takes the items of one response in, as its events tell them, or all at once."""

    def __init__(self, suffix: str) -> None:
        self.finish_reason = FinishReason.STOP
        self.response: Fields = {}  # as the upstream told it last
        self._suffix = suffix  # of every item's id
        self._ids: dict[bytes, str] = {}  # of the items, by what the upstream calls them in JSON
        self._items: dict[int, dict[str, Any]] = {}  # by their places
        self._open: set[int] = set()  # places of those that are not whole
        self._said: dict[int, dict[Part, list[str]]] = {}  # of each item by its place, and of each of its parts

    def all(self) -> list[dict[str, Any]]:
        """Return the items as far as they are."""
        return [item for _, item in sorted(self._items.items())]

    def begin(self, told: Fields) -> None:
        """Take in what the first event says of the response."""
        if "response" in told:
            self.response = _fields(told["response"])

    def take_whole(self, response: Fields) -> None:
        """Take in a response that came whole, or the end of one."""
        self.response = response
        items = msgspec.json.decode(response["output"], type=list[Fields])
        if items:  # some tell none at the end, as all have been told
            self._items = {place: self._own(item, place) for place, item in enumerate(items)}
            self._open.clear()

    def add(self, delta: Delta) -> list[Told]:
        """Take in what one event says, and return the event that tells of it."""
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.told is None:
            return [] if delta.finish_reason is None else self._end_early()
        told: dict[str, Any] = dict(delta.told)
        kind = told["type"] = _text(delta.told["type"])
        if kind in OF_THE_RESPONSE:
            self.begin(delta.told)
            return []
        if kind in ENDS:
            self.take_whole(_fields(told["response"]))
            return []
        if (theirs := told.get("item_id")) is not None:
            by_place = {} if _text(theirs) else self._items.get(_place(told), {})
            told["item_id"] = self._ids.get(bytes(theirs)) or by_place.get("id", theirs)
        if kind in ITEM_EVENTS:
            self._note(told, is_whole=kind == "response.output_item.done")
        elif words := _words(delta):
            said, part = self._said.setdefault(_place(told), {}), _part(kind, told, delta)
            if not kind.endswith(".delta"):  # all that the part says
                said.pop(part, None)
            said.setdefault(part, []).append(words)
        return [told]

    def _note(self, told: dict[str, Any], *, is_whole: bool) -> None:
        place = _place(told)
        item = self._items[place] = told["item"] = self._own(_fields(told["item"]), place)
        if is_whole:
            self._open.discard(place)
        else:
            self._open.add(place)
            self._items[place] = dict(item)
            self._said[place] = _begun_with(item)

    def _own(self, item: Fields, place: int) -> dict[str, Any]:
        """Return an item with its id here."""
        theirs = bytes(item.get("id", b""))
        own = self._ids.get(theirs) or item_id(PREFIX, self._suffix, place, _text(theirs))
        if _text(theirs):  # null and "" name nothing: items that have these have nothing in common
            self._ids[theirs] = own
        return dict(item, id=own)

    def _end_early(self) -> list[Told]:
        """End the response where the gateway does: what is not whole has what was said of it until then, with its
        beginning or in pieces."""
        out: list[Told] = []
        for place in sorted(self._open):
            item, said = self._items[place] | {"status": "incomplete"}, self._said.get(place, {})
            for (name, number, kind), pieces in sorted(said.items()):
                words = "".join(pieces)
                item[name] = _with_part(item.get(name), number, kind, words) if name in PARTED else words
            self._items[place] = item
            out.append({"type": "response.output_item.done", "output_index": place, "item": item})
        return out


def _words(delta: Delta) -> str:
    said = delta.text or delta.refusal or delta.reasoning
    return said or "".join([piece.arguments for piece in delta.tool_calls])


def _part(kind: str, told: dict[str, Any], delta: Delta) -> Part:
    """Return which part of an item an event tells of."""
    if delta.tool_calls:
        return "input" if "input" in kind else "arguments", 0, ""
    if (field := HOSTED_FIELDS.get(kind.rpartition(".")[0])) is not None:
        return field, 0, ""
    if "summary" in kind:
        return "summary", _place(told, "summary_index"), "summary_text"
    shape = "refusal" if delta.refusal else "reasoning_text" if delta.reasoning else "output_text"
    return "content", _place(told, "content_index"), shape


def _begun_with(item: dict[str, Any]) -> dict[Part, list[str]]:
    """Return what an item says where it begins."""
    said = {(name, 0, ""): [_text(item.get(name, b""))] for name in ("arguments", "input", "code")}
    for name in PARTED:
        for number, part in enumerate(_parts(item.get(name))):
            kind = _text(part.get("type", b""))
            said[name, number, kind] = [_text(part.get(_field(kind), b""))]
    return {part: words for part, words in said.items() if words != [""]}


def _with_part(parts: Any, number: int, kind: str, words: str) -> list[Any]:
    """Return an item's parts with what one of them says."""
    told = _parts(parts)
    if number < len(told) and (kind_there := told[number].get("type")) is not None:
        known = kind_there if isinstance(kind_there, str) else _text(kind_there)
        if known == kind:
            return [*told[:number], told[number] | {_field(kind): words}, *told[number + 1 :]]
    annotated: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [*told, {"type": kind, _field(kind): words, **annotated}]


def _field(kind: str) -> str:
    return "refusal" if kind == "refusal" else "text"


def _parts(data: Any) -> list[dict[str, Any]]:
    """Return the parts that an item has, as it came or as they were put together here."""
    if isinstance(data, list):
        return data
    try:
        return list[dict[str, Any]](msgspec.json.decode(data or b"[]", type=list[Fields]))
    except NOT_JSON:
        return []


def _text(data: bytes | Raw) -> str:
    try:
        return msgspec.json.decode(data, type=str)
    except NOT_JSON:
        return ""


def _fields(data: Any) -> Fields:
    try:
        return msgspec.json.decode(data, type=Fields)
    except NOT_JSON:
        return {}


def _place(told: dict[str, Any], name: str = "output_index") -> int:
    try:
        return int(bytes(told[name]))
    except (KeyError, ValueError):
        return 0
