# Ids by which a provider finds what it keeps of an answer: the sound of one by voice, the container that code ran in.
# All teams share the provider's account, so each is told sealed for its team, and opened where that team names it.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from gateway.calls.call import Call
from gateway.calls.hooks import ReplyHook
from protocol.chat import ChatReply, ChatRequest, Choice, Message, Spoken, SpokenBefore
from protocol.decoding import NOT_JSON
from protocol.errors import invalid_param
from protocol.events import Delta
from protocol.inference import WholeReply
from protocol.responses import InputItem
from router.prompt_size.bounds import is_spoken

CODE, CODE_CALL = "code_interpreter", "code_interpreter_call"
Fields = dict[str, Raw]


def has_ids(call: Call) -> bool:
    """Whether the reply to a call may tell such ids."""
    return is_spoken(call.request) or (call.shown is not None and any(t.type == CODE for t in call.shown.tools or ()))


class TiedIds(ReplyHook):
    """Tells one reply's ids as ``tie`` makes them."""

    def __init__(self, tie: Callable[[str], str]) -> None:
        self._tie = cache(tie)  # one id is told in one form

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Return a delta with its ids tied."""
        if delta.spoken is not None:
            delta = replace(delta, spoken=self._spoken(delta.spoken))
        if delta.told is not None:
            delta = replace(delta, told=self._event(delta.told))
        return (delta,)

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Return a whole reply with its ids tied."""
        if not isinstance(whole, ChatReply):
            return whole
        told = None if whole.told is None else self._response(whole.told)
        return replace(whole, choices=tuple(map(self._choice, whole.choices)), told=told)

    def _choice(self, choice: Choice) -> Choice:
        if (audio := choice.message.audio) is None:
            return choice
        return replace(choice, message=replace(choice.message, audio=self._spoken(audio)))

    def _spoken(self, spoken: Spoken) -> Spoken:
        return replace(spoken, id=self._tie(spoken.id)) if spoken.id else spoken

    def _event(self, told: Fields) -> Fields:
        if (item := told.get("item")) is not None:
            told = told | {"item": self._item(item)}
        if (response := told.get("response")) is not None:
            with suppress(*NOT_JSON):
                whole = self._response(msgspec.json.decode(response, type=Fields))
                told = told | {"response": Raw(msgspec.json.encode(whole))}
        return told

    def _response(self, response: Fields) -> Fields:
        with suppress(*NOT_JSON):
            items = msgspec.json.decode(response.get("output", b"[]"), type=list[Raw])
            return response | {"output": Raw(msgspec.json.encode([self._item(item) for item in items]))}
        return response

    def _item(self, item: Raw) -> Raw:
        with suppress(*NOT_JSON, KeyError):
            fields = msgspec.json.decode(item, type=Fields)
            if msgspec.json.decode(fields["type"]) == CODE_CALL:
                container = msgspec.json.decode(fields["container_id"], type=str)
                return Raw(msgspec.json.encode(fields | {"container_id": self._tie(container)}))
        return item


def names_ids(call: Call) -> bool:
    """Whether a call names such an id."""
    request, shown = call.request, call.shown
    if isinstance(request, ChatRequest) and [True for message in request.messages if message.audio is not None]:
        return True
    if shown is None or isinstance(shown.input, str):
        return False
    return any(item.container_id is not None for item in shown.input)


def opened(call: Call, untie: Callable[[str], str | None]) -> Call:
    """Return a call with the ids that it names as its provider knows them; ``untie`` gives ``None`` for those that are
    not its team's. Raises BadRequest."""
    if not names_ids(call):
        return call

    def heard(place: int, message: Message) -> Message:
        if message.audio is None:
            return message
        if (ident := untie(message.audio.id)) is None:
            words = "No answer by voice of this id was told to your team here. Send its transcript as 'content'."
            raise invalid_param(f"messages[{place}].audio.id", words)
        return replace(message, audio=SpokenBefore(ident))

    def ran(place: int, item: InputItem) -> InputItem:
        if item.container_id is None:
            return item
        if (ident := untie(item.container_id)) is None:
            words = "No container of this id ran code for your team here. Leave the item out, with what it did."
            raise invalid_param(f"input[{place}].container_id", words)
        return replace(item, container_id=ident)

    request, shown = call.request, call.shown
    if isinstance(request, ChatRequest):
        request = replace(request, messages=tuple(heard(*each) for each in enumerate(request.messages)))
    if shown is not None and not isinstance(shown.input, str):
        shown = replace(shown, input=tuple(ran(*each) for each in enumerate(shown.input)))
    return replace(call, request=request, shown=shown)
