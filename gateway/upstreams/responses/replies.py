# Responses of an upstream, whole and streamed. What must be counted, judged and found is read; the rest goes past as it
# came, in ``told``.

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from gateway.upstreams.openai.parts import TokenDetails, UsageObject
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from gateway.upstreams.wire.filters import read_filtered
from gateway.upstreams.wire.reading import NOTHING, SseEvents, decoded, read_error_fields, read_usage, text_in
from protocol.chat import MOST_PARTS, ChatReply, Choice, FinishReason, FunctionCall, ReplyMessage, ToolCall
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ReplyEnd, ToolCallDelta, UsageReport
from protocol.responses import OF_HOSTED
from protocol.usage import Usage

ENDS = ("completed", "incomplete")  # statuses of a response that has an answer
CALLS = ("function_call", "custom_tool_call")
KIND = re.compile(r"[a-z0-9_.]{1,100}")  # of an event; what is named otherwise is none
HOSTED_WORDS = ("response.mcp_call_arguments.", "response.code_interpreter_call_code.")  # begin events of what it calls
# Events that say a piece of an answer, and as what it is counted and judged.
WORDS = {
    "response.output_text.delta": "text",
    "response.refusal.delta": "refusal",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    **dict.fromkeys([f"{kind}delta" for kind in HOSTED_WORDS], "text"),
}
T = TypeVar("T", bound=Struct)
UNKNOWN_WORDS = ("delta", "code", "transcript")  # fields by which other events say a piece of what was made
THOUGHTS = ("reasoning_text", "summary_text")  # types of parts
ARGUMENT = "argument"  # what is said of a call, which no field of a delta holds alone
FIRST_PART = (False, 0)
ARGUMENTS = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")


def read_response(body: bytes) -> tuple[ChatReply, Usage | None]:
    """Return the reply that a body holds. Raises UpstreamFailure."""
    told = _fields(body)
    ended = _ended(told, body)
    items = _items(ended.output)
    said = [Delta(**item.words(place)) for place, item in enumerate(items)]
    text, refusal = "".join([delta.text for delta in said]), "".join([delta.refusal for delta in said])
    calls = tuple(
        ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
        for delta in said
        for call in delta.tool_calls
    )
    message = ReplyMessage(
        content=text if text or not (calls or refusal) else None,
        refusal=refusal or None,
        tool_calls=calls or None,
        reasoning_content="\n".join([delta.reasoning for delta in said if delta.reasoning]) or None,
    )
    choice = Choice(index=0, message=message, finish_reason=_reason(ended, items))
    used = _used(items, set())
    reply = ChatReply(
        choices=(choice,),
        service_tier=text_in(ended.service_tier),
        told=told,
        used=used if any(item.type in OF_HOSTED for item in items) else None,
    )
    return reply, _usage(ended, used)


class ResponsesEvents(SseEvents):
    """Reads one streamed response. It is whole once the event has come that tells all of it."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[int, _Said] = {}  # by the places of items: what has gone past of them
        self._begun: dict[int, str] = {}  # and the names of calls, by their places
        self._used = Usage()  # of the upstream's own tools,
        self._containers: set[str] = set()  # these of them

    def _has_reason(self) -> bool:
        return self._is_done

    def _read_event(self, data: bytes, events: list[Event]) -> None:
        if data.strip() == b"[DONE]":
            self._end(events)
            return
        told = _fields(data)
        kind = text_in(told.get("type", NOTHING)) or ""
        if kind in ("error", "response.failed") or (not kind and "error" in told):
            raise _failed(told.get("response", Raw(data)))
        if KIND.fullmatch(kind) is None:
            return
        if kind in WORDS or kind in ARGUMENTS:
            place, piece = _place(told), text_in(told.get("delta", NOTHING)) or ""
            field = WORDS.get(kind, ARGUMENT)
            self._of(place).add(field, _part(told, kind), piece)
            events.append(Delta(**_words(field, piece, place), told=told))
        elif kind in ("response.output_item.added", "response.output_item.done"):
            events.append(self._of_item(told, is_whole=kind == "response.output_item.done"))
        elif kind in ("response.completed", "response.incomplete"):
            self._finish(told, events)
        else:
            said = self._at_once(kind, told)
            if not said and not kind.startswith(HOSTED_WORDS):  # whose pieces have said it
                said = _otherwise(told)
            events.append(Delta(**said, told=told))

    def _at_once(self, kind: str, told: dict[str, Raw]) -> dict[str, Any]:
        """Return what an event says of a part at once, unless the pieces before it have said just that."""
        place, out = _place(told), dict[str, Any]()
        fields = told | (_fields(told["part"]) if bytes(told.get("part", NOTHING))[:1] == b"{" else {})
        is_thought = "reasoning" in kind or text_in(fields.get("type", NOTHING)) in THOUGHTS
        names = {"text": "reasoning" if is_thought else "text", "refusal": "refusal"}
        names |= {"arguments": ARGUMENT, "input": ARGUMENT}
        if kind.startswith(HOSTED_WORDS):
            names = {"arguments": "text", "code": "text"}
        for name, field in names.items():
            if said := text_in(fields.get(name, NOTHING)):
                out |= self._of(place).whole_part(field, _part(told, kind), said, place)
        return out

    def _of_item(self, told: dict[str, Raw], *, is_whole: bool) -> Delta:
        """Return what an item's begin or end says: a call's name; what the pieces before have not said; what a tool of
        the upstream's used."""
        item, place = _item(told.get("item", NOTHING)), _place(told)
        said = self._unsaid(item, place)
        if item.type not in OF_HOSTED:
            return Delta(**said, told=told)
        used = _used([item], self._containers) if is_whole else Usage()
        self._used += used
        return Delta(**said, told=told, used=used)

    def _unsaid(self, item: _Item, place: int) -> dict[str, Any]:
        """Return what an item says that has not gone past: all of it, where it is not what its pieces have said."""
        out: dict[str, Any] = {}
        for field, said in item.said.items():
            out |= self._of(place).whole(field, said, place)
        if isinstance(item, _Call) and self._begun.get(place) != item.name:
            self._begun[place] = item.name
            out["tool_calls"] = item.begun(place, out.get("tool_calls", ()))
        return out

    def _of(self, place: int) -> _Said:
        return self._said.setdefault(place, _Said())

    def _finish(self, told: dict[str, Raw], events: list[Event]) -> None:
        data = told.get("response", NOTHING)
        ended = _ended(_fields(data), data)
        items = _items(ended.output)
        for place, item in enumerate(items):  # what was said nowhere but here: its client is told the whole
            if said := self._unsaid(item, place):
                events.append(Delta(**said))
        events.append(Delta(finish_reason=_reason(ended, items), told=told))
        if (usage := _usage(ended, self._used.at_least(_used(items, set())))) is not None:
            events.append(UsageReport(usage, text_in(ended.service_tier)))
        self._is_done = True
        events.append(ReplyEnd())


class _Said:
    """What has been said of one item, by the field of a delta that said it and the part of the item."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, dict[tuple[bool, int], list[str]]] = {}

    def add(self, field: str, part: tuple[bool, int], piece: str) -> None:
        """Note a piece."""
        self._parts.setdefault(field, {}).setdefault(part, []).append(piece)

    def whole_part(self, field: str, part: tuple[bool, int], said: str, place: int) -> dict[str, Any]:
        """Note what a part says in all, and return it as fields of a delta; none where just that has been said."""
        parts = self._parts.setdefault(field, {})
        if said in ("".join(parts.get(part, ())), self._all(field)):
            return {}
        parts[part] = [said]
        return _words(field, said, place)

    def whole(self, field: str, said: str, place: int) -> dict[str, Any]:
        """The same of what the item says in all its parts."""
        if said == self._all(field):
            return {}
        self._parts[field] = {FIRST_PART: [said]}
        return _words(field, said, place)

    def _all(self, field: str) -> str:
        return "".join(piece for _, pieces in sorted(self._parts.get(field, {}).items()) for piece in pieces)


def _words(field: str, said: str, place: int) -> dict[str, Any]:
    """Return the fields of a delta that say so."""
    return {"tool_calls": (ToolCallDelta(place, said),)} if field == ARGUMENT else {field: said}


class _Item(Struct, frozen=True):
    """What is read of an item, whatever it is."""

    type: str = ""

    @property
    def unit(self) -> str:
        """The unit of a usage in which it is billed, where it is; ``""``: it is not."""
        return ""

    @property
    def said(self) -> dict[str, str]:
        """What it says, by the fields of a delta, or as a call's argument."""
        return {}

    def words(self, place: int) -> dict[str, Any]:
        """Return all that the item at a place says as fields of a delta."""
        out: dict[str, Any] = {}
        for field, said in self.said.items():
            out |= _words(field, said, place)
        return out


class _Call(_Item, frozen=True):
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""

    @property
    def said(self) -> dict[str, str]:
        said = self.arguments or self.input
        return {ARGUMENT: said} if said else {}

    def words(self, place: int) -> dict[str, Any]:
        return {"tool_calls": self.begun(place, super().words(place).get("tool_calls", ()))}

    def begun(self, place: int, pieces: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
        """Return what a call says first: its name beside its argument, as far as that has come."""
        return (ToolCallDelta(place, pieces[0].arguments if pieces else "", id=self.call_id, name=self.name),)


class _Part(Struct, frozen=True):
    type: str = ""
    text: str = ""
    refusal: str = ""


class _Words(_Item, frozen=True):
    """A message, or what the model thought."""

    content: tuple[_Part, ...] | None = None
    summary: tuple[_Part, ...] | None = None

    @property
    def said(self) -> dict[str, str]:
        parts = (*(self.summary or ()), *(self.content or ()))
        text, refusal = "".join([part.text for part in parts]), "".join([part.refusal for part in parts])
        said = {"reasoning" if self.type == "reasoning" else "text": text, "refusal": refusal}
        return {field: words for field, words in said.items() if words}


class _Search(_Item, frozen=True):
    action: Raw = NOTHING

    @property
    def unit(self) -> str:
        """That of a search: a page that was opened costs nothing."""
        try:
            kind = _action_decoder.decode(self.action).type if self.action is not NOTHING else ""
        except NOT_JSON:
            kind = ""
        return "web_searches" if kind in ("", "search") else ""


class _Hosted(_Item, frozen=True):
    """Another call of a tool that the upstream ran."""

    status: str | None = None
    container_id: str | None = None

    @property
    def unit(self) -> str:
        """That of its tool: a picture that was not made costs nothing."""
        return "" if self.type == "image_generation_call" and self.status == "failed" else UNITS_OF[self.type]


UNITS_OF = {
    "file_search_call": "file_searches",
    "code_interpreter_call": "containers",
    "image_generation_call": "images",
}
KINDS: dict[str, type[_Item]] = dict.fromkeys(CALLS, _Call) | dict.fromkeys(("message", "reasoning"), _Words)
KINDS |= {"web_search_call": _Search, **dict.fromkeys(UNITS_OF, _Hosted)}


class _Details(Struct, frozen=True):
    reason: str | None = None


class _Ended(Struct, frozen=True):
    output: tuple[Raw, ...]
    status: str | None = None  # where none is said, it has an answer
    incomplete_details: _Details | None = None
    usage: Raw = NOTHING
    service_tier: Raw = NOTHING


class _Usage(Struct, frozen=True):
    input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None


def _usage(ended: _Ended, used: Usage) -> Usage | None:
    if (told := read_usage(ended.usage, _Usage)) is None:
        return None
    counts = UsageObject(
        told.input_tokens, told.output_tokens, told.input_tokens_details, told.output_tokens_details
    ).usage()
    return counts and counts.at_least(used)


def _used(items: Iterable[_Item], containers: set[str]) -> Usage:
    """Return what items used of the upstream's own tools; code runs in one of ``containers`` for nothing more."""
    units: Counter[str] = Counter()
    for item in items:
        container = item.container_id if isinstance(item, _Hosted) else None
        if item.unit and container not in containers:
            units[item.unit] += 1
        if container is not None:
            containers.add(container)
    return Usage(**units)


def _reason(ended: _Ended, items: Iterable[_Item]) -> FinishReason:
    if ended.status == "incomplete":
        details = ended.incomplete_details or _Details()
        return FinishReason.CONTENT_FILTER if details.reason == "content_filter" else FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if any(item.type in CALLS for item in items) else FinishReason.STOP


def _ended(told: dict[str, Raw], data: bytes | Raw) -> _Ended:
    """Return how a response ended. Raises UpstreamFailure for one without an answer."""
    if text_in(told.get("status", NOTHING)) == "failed":
        raise _failed(data)
    ended = _read(data, _Ended)
    if ended.status not in (*ENDS, None):
        raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed")
    return ended


def _items(output: Iterable[Raw]) -> list[_Item]:
    return [_item(item) for item in output]


def _item(data: Raw) -> _Item:
    item = _read(data, _Item)
    return _read(data, KINDS[item.type]) if item.type in KINDS else item


def _place(told: dict[str, Raw]) -> int:
    """Return the place of the item that an event is of."""
    try:
        return _places.decode(told["output_index"])
    except (KeyError, *NOT_JSON):
        return 0


def _part(told: dict[str, Raw], kind: str) -> tuple[bool, int]:
    """Return the part of an item that an event is of, in the order of its parts: what sums thinking up comes first."""
    is_summary = "summary" in kind
    try:
        return not is_summary, _places.decode(told["summary_index" if is_summary else "content_index"])
    except (KeyError, *NOT_JSON):
        return not is_summary, 0


def _otherwise(told: dict[str, Raw]) -> dict[str, Any]:
    """Return what an event of a kind that is not known here says: it goes out, so it is counted and judged."""
    said = "".join([text_in(told.get(name, NOTHING)) or "" for name in UNKNOWN_WORDS])
    return {"text": said} if said else {}


def _failed(data: bytes | Raw) -> UpstreamFailure:
    """Return the failure that an upstream tells of under a 200."""
    error = read_error_fields(bytes(data))
    filtered = read_filtered(error)
    return filtered or UpstreamError("The upstream reported an error.", outcome="error_frame")


def _fields(data: bytes | Raw) -> dict[str, Raw]:
    """Return the fields of an object as they came, but on one line and in UTF-8: they may go out in an event."""
    said = bytes(data)
    if not said.isascii():
        said = said.decode("utf-8", "replace").encode()
    said = said.replace(b"\n", b" ").replace(b"\r", b" ")
    return decoded(said, _fields_decoder, "The upstream sent what is not JSON.")


def _read(data: bytes | Raw, shape: type[T]) -> T:
    return decoded(data, _decoder_of(shape))


@cache
def _decoder_of(shape: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(shape)


_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_action_decoder = msgspec.json.Decoder(_Item)
_places = msgspec.json.Decoder(Annotated[int, Meta(ge=0, le=MOST_PARTS)])
