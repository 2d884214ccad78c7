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

# Events that tell the whole response, as it begins and at its end: those are written here.
OF_THE_RESPONSE = ("response.created", "response.queued", "response.in_progress")
SAID = tuple(f"response.{name}.delta" for name in ("output_text", "function_call_arguments", "custom_tool_call_input"))
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
        self._said: dict[int, list[str]] = {}  # of messages and calls

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
        if kind in ("response.output_item.added", "response.output_item.done"):
            self._note(told, is_whole=kind == "response.output_item.done")
        elif kind in SAID:
            words = delta.text or "".join([piece.arguments for piece in delta.tool_calls])
            self._said.setdefault(_place(told), []).append(words)
        return [told]

    def _note(self, told: dict[str, Any], *, is_whole: bool) -> None:
        place = _place(told)
        item = self._items[place] = told["item"] = self._own(_fields(told["item"]), place)
        if is_whole:
            self._open.discard(place)
        else:
            self._open.add(place)
            self._items[place] = dict(item)

    def _own(self, item: Fields, place: int) -> dict[str, Any]:
        """Return an item with its id here."""
        theirs = bytes(item.get("id", b""))
        own = self._ids.get(theirs) or item_id(PREFIX, self._suffix, place, _text(theirs))
        if _text(theirs):  # null and "" name nothing: items that have these have nothing in common
            self._ids[theirs] = own
        return dict(item, id=own)

    def _end_early(self) -> list[Told]:
        """End the response where the gateway does: what is not whole has the words until then."""
        out: list[Told] = []
        for place in sorted(self._open):
            item, words = self._items[place] | {"status": "incomplete"}, "".join(self._said.get(place, ()))
            match _text(item.get("type", b"")):
                case "message":
                    part = {"type": "output_text", "text": words, "annotations": [], "logprobs": []}
                    item["content"] = [part] if words else []
                case "function_call":
                    item["arguments"] = words
                case "custom_tool_call":
                    item["input"] = words
            self._items[place] = item
            out.append({"type": "response.output_item.done", "output_index": place, "item": item})
        return out


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


def _place(told: dict[str, Any]) -> int:
    try:
        return int(bytes(told["output_index"]))
    except (KeyError, ValueError):
        return 0
