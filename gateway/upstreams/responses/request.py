# Requests to an upstream's own Responses API: the decoded fields and items encoded again. What is stored is stored here
# alone, so that the upstream is told every item, and asked for its thinking sealed, to have it back in the next turn.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from gateway.upstreams.openai.request import JSON_HEADERS, credentials, encode_with, url_of, with_short_ids
from gateway.upstreams.responses.hosted_tools import tools_allowed
from gateway.upstreams.wire.base import Asking, UpstreamRequest
from protocol.chat import ChatRequest
from protocol.messages import MOST_SEARCHES
from protocol.responses import (
    CALL_FIELDS,
    OF_HOSTED,
    OF_TOOL_SEARCH,
    InputItem,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    told_id,
    upstreams_id,
)
from protocol.responses_to_chat import SEALED_REASONING, is_sealed_elsewhere

PATH = "/responses"
COUNTED = ("model", "input", "instructions", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools")
USUAL_TTL = "30m"  # of what lies in a prompt cache, which `price.cache_write` is for
# Of a request as it came: what only says how it is kept here, and what the chat that it is says, without what the
# provider refuses.
KEPT_HERE = dict.fromkeys(("background", "previous_response_id", "conversation"))
AS_THE_CHAT = ("user", "safety_identifier", "prompt_cache_key", "metadata", "parallel_tool_calls")


def write_request(asking: Asking) -> UpstreamRequest:
    """Return the request, the model under its upstream name. Raises Unsayable for tools of the upstream's that it may
    not run, or whose price is not known."""
    asked, chat, dropped = asking.response, asking.request, [*asking.left_out]
    assert asked is not None and isinstance(chat, ChatRequest)
    chat = with_short_ids(chat)
    sent = replace(
        asked,
        **KEPT_HERE,
        model=asking.target.model.upstream_model,
        input=_input(asked, asking, dropped),
        stream=asking.streams or None,
        store=False,
        include=tuple(_included(asked, asking, dropped)) or None,
        tools=tuple(tools_allowed(asked.tools, asking)) if asked.tools else None,  # it wants one, where it is sent any
        max_output_tokens=chat.output_limit,
        max_tool_calls=_calls_most(asked),
        text=None if asked.text is None else _text(asked.text, chat),
        reasoning=None if asked.reasoning is None else _reasoning(asked.reasoning, chat),
        **{name: getattr(chat, name) for name in AS_THE_CHAT},
    )
    headers = JSON_HEADERS | credentials(asking)
    return UpstreamRequest(
        "POST", url_of(asking, PATH), headers, encode_with(sent, asking.extra), dropped=tuple(dropped)
    )


def write_count(asking: Asking) -> UpstreamRequest:
    """Return the request that has the prompt counted: what makes it, and nothing else. Raises as ``write_request``."""
    built = write_request(asking)
    said = msgspec.json.decode(built.body, type=dict[str, msgspec.Raw])
    body = msgspec.json.encode({name: said[name] for name in COUNTED if name in said})
    return replace(built, url=url_of(asking, f"{PATH}/input_tokens"), body=body)


def _input(asked: ResponsesRequest, asking: Asking, dropped: list[str]) -> str | list[dict[str, Any]]:
    if isinstance(asked.input, str):
        return asked.input
    told = [item for item in asked.input if item.type != "reasoning" or _has_back(item, asking)]
    if len(told) < len(asked.input):
        dropped.append("thinking_blocks")
    items = [_item(item) for item in told]
    left_out = [part for item in items for part in _parts(item) if not _mark_usually(part)]
    if left_out:
        dropped.append("input.prompt_cache_breakpoint.ttl")
    return items


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    fields = (item.get(name) for name in ("content", "output"))
    return [part for parts in fields if isinstance(parts, list | tuple) for part in parts]


def _mark_usually(part: dict[str, Any]) -> bool:
    """Leave of a part's mark of the prompt cache what costs no more than a cache as prices know it; whether that is all
    that it says."""
    if (mark := part.get("prompt_cache_breakpoint")) is None:
        return True
    usual = {name: said for name, said in mark.items() if name == "mode" or (name == "ttl" and said == USUAL_TTL)}
    part["prompt_cache_breakpoint"] = usual
    return usual == mark


def _has_back(item: InputItem, asking: Asking) -> bool:
    """Whether an upstream takes thinking back: its own kind's."""
    return asking.quirks.takes_seals and is_sealed_elsewhere(item)


def _item(item: InputItem) -> dict[str, Any]:
    """Return an item as its upstream knows it."""
    foreign = {} if item.type in (*OF_HOSTED, *OF_TOOL_SEARCH) else dict.fromkeys(CALL_FIELDS)  # no policy read those
    told: dict[str, Any] = {"type": item.type} | msgspec.to_builtins(replace(item, id=told_id(item), **foreign))
    if (request := item.approval_request_id) is not None:
        told["approval_request_id"] = upstreams_id(request) or request
    if item.type == "image_generation_call":
        told.pop("action", None)  # which it tells, and does not take back
    elif item.type == "reasoning":
        told.setdefault("summary", [])
    elif item.type in ("tool_search_call", "tool_search_output"):
        told.setdefault("call_id", None)  # of one that the upstream made
    return told


def _included(asked: ResponsesRequest, asking: Asking, dropped: list[str]) -> Iterator[str]:
    """Yield what the answer is to have beside itself. Of models that do not think some refuse to seal that."""
    yield from (name for name in asked.include or () if name != SEALED_REASONING)
    if asking.quirks.seals:
        yield SEALED_REASONING
    elif SEALED_REASONING in (asked.include or ()):
        dropped.append("include")


def _calls_most(asked: ResponsesRequest) -> int | None:
    """Return how often the upstream may run its own tools: what the call's hold covers."""
    return MOST_SEARCHES if asked.is_hosted and asked.max_tool_calls is None else asked.max_tool_calls


def _reasoning(reasoning: ReasoningConfig, chat: ChatRequest) -> ReasoningConfig | None:
    told = replace(reasoning, effort=reasoning.effort if chat.reasoning_effort is not None else None)
    return None if told == ReasoningConfig() else told


def _text(text: TextConfig, chat: ChatRequest) -> TextConfig | None:
    told = replace(text, verbosity=chat.verbosity)
    return None if told == TextConfig() else told
