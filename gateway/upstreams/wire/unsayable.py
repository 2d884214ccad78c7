# What a wire format has no words for and what changes the answer's meaning: no upstream is asked for it; another model
# of the route may be. And what changes no meaning: a provider that refuses it is asked without, which its caller hears.

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from billing.core.pictures import PicturePrice, fitting
from gateway.core.settings import DROPPABLE
from gateway.upstreams.wire.errors import UpstreamRefused, UpstreamUnable
from protocol.chat import ChatRequest, ItemMessage, Message, ToolCall
from protocol.inference import Request
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest

FORCED_BIAS = 100  # of a token that must not, or must alone, be said; less is a wish


class Unsayable(UpstreamUnable):
    """The format, or the model, has no way to say this; no upstream was asked."""

    outcome = "unsupported"


def refuse_openais_own(request: ChatRequest) -> None:
    """Raise Unsayable for what OpenAI's format alone can say: several replies, log probabilities, forced tokens."""
    asked = {
        "n": (request.n or 1) > 1,
        "logprobs": bool(request.logprobs),
        "logit_bias": any(abs(bias) >= FORCED_BIAS for bias in (request.logit_bias or {}).values()),
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise Unsayable(f"The model that answers here does not know '{name}'. Leave it out.", param=name)
    refuse_voice(request)


def refuse_voice(request: ChatRequest) -> None:
    """Raise Unsayable for an answer by voice, asked for or referred to: OpenAI's models alone give such."""
    if request.modalities:
        raise Unsayable("The model that answers here has no voice. Ask for 'text' alone.", param="modalities")
    if any(message.audio is not None for message in request.messages):
        words = "The model that answers here knows no earlier answer by voice. Send its transcript as 'content'."
        raise Unsayable(words, param="messages")


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call that a model made earlier, for APIs where they are an object and no JSON text."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        words = f"The arguments of the tool call {call.id!r} are not a JSON object."
        raise UpstreamRefused(words, outcome="unsayable", param="messages", code="invalid_tool_arguments")
    return arguments


def openais_wishes(request: ChatRequest) -> dict[str, bool]:
    """Return fields that APIs other than OpenAI's lack, and that say nothing about what the answer is to be: whether
    each is wished for."""
    return {
        "presence_penalty": bool(request.presence_penalty),
        "frequency_penalty": bool(request.frequency_penalty),
        "logit_bias": any((request.logit_bias or {}).values()),
        "verbosity": request.verbosity is not None,
        "prompt_cache_key": request.prompt_cache_key is not None,
        "messages.name": any(message.name for message in request.messages if message.role != "tool"),
    }


def is_marked(message: Message) -> bool:
    """Whether a message has a mark of Anthropic's for the cache."""
    return isinstance(message.content, tuple) and any(getattr(part, "cache_control", None) for part in message.content)


def told_in_words(schema: dict[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with the rules that its API has no keyword for in its description."""
    if not rules:
        return schema
    said = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode() for key, value in rules.items()
    }
    words = f"({', '.join(f'{key}: {value}' for key, value in said.items())})"
    return schema | {"description": f"{schema['description']} {words}" if schema.get("description") else words}


SomeRequest = TypeVar("SomeRequest", bound=Request)


def without_fields(request: SomeRequest, names: Collection[str]) -> tuple[SomeRequest, tuple[str, ...]]:
    """Return a request without these of its fields, and the names of those that it had."""
    if not names:
        return request, ()
    gone = tuple(name for name in DROPPABLE if name in names and _is_said(request, name))
    return (replace(request, **dict.fromkeys(gone)), gone) if gone else (request, ())


def _is_said(request: Request, name: str) -> bool:
    value = getattr(request, name, None)
    if isinstance(value, dict) and name == "logit_bias":
        return all(abs(bias) < FORCED_BIAS for bias in value.values())
    return value is not None


def without_items(request: ChatRequest, asked: ResponsesRequest) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the chat that a response is without items that other APIs cannot read, and the names of those. Raises
    UpstreamUnable for tools and items that only its own API has."""
    if (kind := asked.kind_of_its_own) is not None:
        right = "Send tools of type 'function' or 'custom', or ask one whose provider has this API."
        words = f"The model that answers here does not know '{kind}'. {right}"
        if kind == "compaction":
            words = (
                f"'{asked.place_of_its_own}' is no summary that this gateway made for your team, and the model that "
                "answers here can read no other. Send the items of the conversation, or ask the model that made it."
            )
        raise UpstreamUnable(words, param=asked.place_of_its_own)
    gone = dict.fromkeys(message.told_as for message in request.messages if isinstance(message, ItemMessage))
    if not gone:
        return request, ()
    told = tuple(message for message in request.messages if not isinstance(message, ItemMessage))
    if not told:
        raise UpstreamUnable("'input' holds nothing that the model which answers here could read.", param="messages")
    return replace(request, messages=told), tuple(gone)


def leave_out_anthropics(asked: MessagesRequest) -> Iterator[str]:
    """Yield the names of the fields that no other API has. Raises UpstreamUnable for tools and blocks of Claude's own,
    which change the meaning."""
    yield from asked.anthropics_wishes()
    if (kind := asked.kind_of_its_own) is not None:
        is_tool = any(tool.type == kind for tool in asked.tools or ())
        what = f"does not know the tool '{kind}'" if is_tool else f"takes no block of type '{kind}'"
        right = "Describe it with an 'input_schema'" if is_tool else "Send its text"
        if kind == "document":
            what, right = "cites no documents", "Send it without 'citations'"
        words = f"The model that answers here {what}. {right}, or ask one of Anthropic's models."
        raise UpstreamUnable(words, param="tools" if is_tool else "messages")


def refuse_unpriced(rows: Sequence[PicturePrice], quality: str | None, size: str | None, where: str = "") -> None:
    """Raise Unsayable for pictures of which a model's price does not say what they cost. ``where`` stands before the
    name of the field."""
    found = fitting(rows, quality, None)
    name, said, known = ("size", size, found) if found else ("quality", quality, rows)
    if rows and not fitting(found, quality, size):
        words = f"What pictures of {name} '{(said or '')[:50]}' cost at the model that answers here is not known."
        priced = ", ".join(f"'{each}'" for each in dict.fromkeys(getattr(row, name) for row in known))
        raise Unsayable(f"{words} It is of {priced}.", param=where + name)
