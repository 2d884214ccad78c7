# The output items of one response, built from the pieces of its reply, and the events that tell of each step; and how
# items that came in are told.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from protocol.chat import FinishReason, RedactedThinkingBlock, ThinkingBlock
from protocol.decoding import NOT_JSON
from protocol.events import Delta, ToolCallDelta
from protocol.response_tools import OfferedTool, as_input
from protocol.responses import InputItem
from protocol.responses_to_chat import seal_of

Told = dict[str, Any]  # an event but for its number

# Of each kind of part: its field, and how its events begin.
PARTS = {
    "output_text": ("text", "response.output_text"),
    "refusal": ("refusal", "response.refusal"),
    "reasoning_text": ("text", "response.reasoning_text"),
}


class OutputItems:
    """Adds deltas up to items. One item of words is open at a time; calls are open beside each other, as their pieces
    may come by turns, and end together."""

    def __init__(self, suffix: str, tools: Mapping[str, OfferedTool]) -> None:
        self.finish_reason = FinishReason.STOP
        self._suffix = suffix  # of every item's id
        self._tools = tools  # by the functions that stand for them
        self._items: list[dict[str, Any]] = []
        self._words: int | None = None  # index of the item of words that is open
        self._part: dict[str, Any] | None = None  # the part of it that is open
        self._said: list[str] = []  # of that part
        self._scores: list[Any] = []  # the log probabilities of that part
        self._calls: dict[int, int] = {}  # the index of each call's item
        self._arguments: dict[int, list[str]] = {}

    def all(self) -> list[dict[str, Any]]:
        """Return the items as far as they are."""
        return self._items

    def add(self, delta: Delta) -> list[Told]:
        """Take in one delta, and return the events that tell of it."""
        out: list[Told] = []
        if delta.reasoning:
            self._say("reasoning_text", delta.reasoning, out)
        if delta.signature:
            self._seal(delta.signature, out)
        if delta.redacted:
            self._end_words(out)
            self._begin_words("reasoning", out)
            self._current["encrypted_content"] = seal_of(RedactedThinkingBlock(delta.redacted))
            self._end_words(out)
        if delta.text:
            self._say("output_text", delta.text, out, _scores(delta.logprobs))
        if delta.refusal:
            self._say("refusal", delta.refusal, out)
        for piece in delta.tool_calls:
            self._add_call(piece, out)
        if delta.finish_reason is not None:
            self._end(delta.finish_reason, out)
        return out

    @property
    def _current(self) -> dict[str, Any]:
        assert self._words is not None
        return self._items[self._words]

    def _say(self, kind: str, words: str, out: list[Told], scores: list[Any] | None = None) -> None:
        item_type = "reasoning" if kind == "reasoning_text" else "message"
        if self._words is None or self._current["type"] != item_type:
            self._end_words(out)
            self._begin_words(item_type, out)
        if self._part is None or self._part["type"] != kind:
            self._end_part(out)
            self._begin_part(kind, out)
        self._said.append(words)
        told = self._of_part(f"{PARTS[kind][1]}.delta") | {"delta": words}
        if kind == "output_text":
            self._scores += scores or []
            told["logprobs"] = scores or []
        out.append(told)

    def _seal(self, signature: str, out: list[Told]) -> None:
        """End reasoning with what its model wants back; what is thought after that is signed anew."""
        if self._words is None or self._current["type"] != "reasoning":
            self._end_words(out)
            self._begin_words("reasoning", out)
        thought = ThinkingBlock("".join(self._said), signature)
        self._current["encrypted_content"] = seal_of(thought)
        self._end_words(out)

    def _begin_words(self, item_type: str, out: list[Told]) -> None:
        item: dict[str, Any] = {"type": item_type, "content": [], "status": "in_progress"}
        if item_type == "reasoning":
            self._words = self._begin("rs", item | {"summary": []}, out)
        else:
            self._words = self._begin("msg", item | {"role": "assistant"}, out)

    def _end_words(self, out: list[Told], status: str = "completed") -> None:
        if self._words is not None:
            self._end_part(out)
            self._done(self._words, status, out)
            self._words = None

    def _begin_part(self, kind: str, out: list[Told]) -> None:
        self._part = {"type": kind, PARTS[kind][0]: ""}
        if kind == "output_text":
            self._part |= {"annotations": [], "logprobs": []}
        self._current["content"].append(self._part)
        out.append(self._of_part("response.content_part.added") | {"part": dict(self._part)})

    def _end_part(self, out: list[Told]) -> None:
        if self._part is None:
            return
        field, beginning = PARTS[self._part["type"]]
        self._part[field] = "".join(self._said)
        told = self._of_part(f"{beginning}.done") | {field: self._part[field]}
        if self._part["type"] == "output_text":
            self._part["logprobs"] = told["logprobs"] = self._scores
        out += [told, self._of_part("response.content_part.done") | {"part": self._part}]
        self._part, self._said, self._scores = None, [], []

    def _of_part(self, event_type: str) -> Told:
        item = self._current
        place = {"item_id": item["id"], "output_index": self._words, "content_index": len(item["content"]) - 1}
        return {"type": event_type, **place}

    def _add_call(self, piece: ToolCallDelta, out: list[Told]) -> None:
        if (index := self._calls.get(piece.index)) is None:
            self._end_words(out)
            index = self._calls[piece.index] = self._begin_call(piece, out)
            self._arguments[index] = []
        if piece.arguments:
            self._put_arguments(index, piece.arguments, out)

    def _begin_call(self, piece: ToolCallDelta, out: list[Told]) -> int:
        offered = self._tools.get(piece.name or "")
        call = {"call_id": piece.id or "", "name": (piece.name if offered is None else offered.tool.name) or ""}
        if offered is not None and offered.namespace is not None:
            call["namespace"] = offered.namespace
        if offered is not None and offered.is_custom:
            return self._begin("ctc", {"type": "custom_tool_call", **call, "input": "", "status": "in_progress"}, out)
        return self._begin("fc", {"type": "function_call", **call, "arguments": "", "status": "in_progress"}, out)

    def _put_arguments(self, index: int, words: str, out: list[Told]) -> None:
        self._arguments[index].append(words)
        if self._items[index]["type"] == "function_call":
            out.append(self._of_call("response.function_call_arguments.delta", index) | {"delta": words})

    def _of_call(self, event_type: str, index: int) -> Told:
        return {"type": event_type, "item_id": self._items[index]["id"], "output_index": index}

    def _end(self, reason: FinishReason, out: list[Told]) -> None:
        self.finish_reason = reason
        status = "incomplete" if reason in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER) else "completed"
        self._end_words(out, status)
        for index, pieces in self._arguments.items():
            if self._items[index]["type"] == "custom_tool_call":
                self._end_custom(index, as_input("".join(pieces)), out)
            else:
                if not pieces and status == "completed":
                    self._put_arguments(index, "{}", out)
                self._items[index]["arguments"] = arguments = "".join(pieces)
                out.append(self._of_call("response.function_call_arguments.done", index) | {"arguments": arguments})
            self._done(index, status, out)
        self._arguments = {}

    def _end_custom(self, index: int, text: str, out: list[Told]) -> None:
        """Tell a custom tool's input, which is known once the arguments that hold it are whole."""
        self._items[index]["input"] = text
        if text:
            out.append(self._of_call("response.custom_tool_call_input.delta", index) | {"delta": text})
        out.append(self._of_call("response.custom_tool_call_input.done", index) | {"input": text})

    def _begin(self, prefix: str, item: dict[str, Any], out: list[Told]) -> int:
        index = len(self._items)
        self._items.append({"id": f"{prefix}_{self._suffix}{index:04}", **item})
        out.append({"type": "response.output_item.added", "output_index": index, "item": _as_it_is(self._items[index])})
        return index

    def _done(self, index: int, status: str, out: list[Told]) -> None:
        self._items[index]["status"] = status
        out.append({"type": "response.output_item.done", "output_index": index, "item": self._items[index]})


def told_item(item: InputItem, own_id: str) -> dict[str, Any]:
    """Return an item as it is told: with an id, and its content in parts."""
    said: dict[str, Any] = {"id": own_id, "type": item.type} | msgspec.to_builtins(item)
    if isinstance(item.content, str):
        said["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
    for part in said.get("content") or ():
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
        elif part["type"] == "input_image":
            part.setdefault("detail", "auto")
    if item.type == "reasoning":
        said.setdefault("summary", [])
    elif item.type != "compaction":
        said.setdefault("status", "completed")
    return said


def _as_it_is(item: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that stays as the item is now: several deltas are added before anything is written."""
    return item | {"content": list(item["content"])} if "content" in item else dict(item)


def _scores(logprobs: Raw | None) -> list[Any]:
    """Return the log probabilities of a piece of text, which both APIs tell alike."""
    if logprobs is None:
        return []
    try:
        told = msgspec.json.decode(logprobs)
    except NOT_JSON:
        return []
    scores = told.get("content") if isinstance(told, dict) else None
    return scores if isinstance(scores, list) else []
