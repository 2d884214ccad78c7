# Anthropic's Messages API: what is checked of a request, which chat it is, and its row in the table of endpoints.

from __future__ import annotations

from itertools import islice
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway.calls.rate_limits import anthropic_limit_headers, rate_limit_headers
from gateway.dialects.anthropic_errors import ANTHROPIC_ERRORS
from gateway.dialects.checks import require, require_between
from gateway.dialects.endpoint import ApiEndpoint, Asked
from gateway.dialects.messages_writer import MessagesWriter
from protocol.errors import UnsupportedParameter, not_supported
from protocol.messages import (
    CLIENT_TOOLS,
    CODE_EXECUTION,
    CONTEXT_EDITS,
    MOST_SEARCHES,
    RUN_UPSTREAM,
    MessagesRequest,
    MessageTool,
)
from protocol.messages_to_chat import to_chat

AnyMessage = TypeVar("AnyMessage", bound=MessagesRequest)
# How the types of tools begin that the upstream runs, but for those that are known here.
UPSTREAMS_TOOLS = ("web_search_2026", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_")
# Fields of a request that cannot be said here, and without which it would mean something else.
MEANT = {
    "thread": "Nothing of a conversation is kept here: send all of its turns in 'messages'.",
    "compaction": "What it costs is in no price that is known here. Have a message of its own sum up the conversation.",
    "billing_policy": "Calls are billed to the team whose key they carry. Leave it out.",
}
# How Anthropic's packages tell that a server has no threads: they send all turns then, as their tool runners need.
DETAILS: dict[str, dict[str, Any]] = {
    "thread": {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
}
MOST_USES = 100  # of a search, or of pages fetched, in one request
LONGEST_BETA, MOST_BETAS = 100, 64  # characters of a name, and names


def check_message(asked: MessagesRequest) -> None:
    """Refuse what the types let through and Anthropic's API does not. Raises BadRequest."""
    spoken = any(turn.role != "system" for turn in asked.messages)
    require(spoken, "messages", "'messages' must hold at least one turn of the user's or the assistant's.")
    for place, turn in enumerate(asked.messages):
        is_prefill = turn.role == "assistant" and place == len(asked.messages) - 1
        require(bool(turn.content) or is_prefill, f"messages[{place}]", f"'messages[{place}]' holds no content.")
    require_between(asked.max_tokens, 1, 2**31, "max_tokens")
    require_between(asked.temperature, 0, 1, "temperature")
    require_between(asked.top_p, 0, 1, "top_p")
    require_between(asked.top_k, 0, 2**31, "top_k")
    require(asked.tool_choice is None or bool(asked.tools), "tool_choice", "'tool_choice' needs 'tools'.")
    for place, tool in enumerate(asked.tools or ()):
        _check_tool(tool, f"tools[{place}]")
    for place, edit in enumerate(asked.context_management.edits if asked.context_management else ()):
        right = f"Send {' or '.join(CONTEXT_EDITS)}: what others cost is in no price that is known here."
        name = f"context_management.edits[{place}].type"
        require(edit.type in CONTEXT_EDITS, name, f"'{name}' is none that is known here. {right}")
    kept = {mark.ttl or "5m" for mark in asked.cache_marks()}
    words = "'cache_control' of five minutes and of an hour cannot be priced apart in one request. Say one 'ttl'."
    require(len(kept) <= 1, "cache_control", words)
    blank = any(not stop.strip() for stop in asked.stop_sequences or ())
    require(not blank, "stop_sequences", "A stop sequence must hold more than white space.")


def _check_tool(tool: MessageTool, where: str) -> None:
    if (hosted := RUN_UPSTREAM.get(tool.type or "")) is not None:
        most = MOST_SEARCHES if tool.type == CODE_EXECUTION else MOST_USES
        require_between(tool.max_uses, 1, most, f"{where}.max_uses")
        require_between(tool.max_content_tokens, 1, 2**31, f"{where}.max_content_tokens")
        require(tool.name == hosted[0], f"{where}.name", f"'{where}' is called '{hosted[0]}', and nothing else.")
    elif (tool.type or "").startswith(UPSTREAMS_TOOLS):
        words = f"'{tool.type}' is run by the upstream, and what a call of it costs is in no price that is known here."
        raise UnsupportedParameter(f"{words} Run such a tool yourself, as one with an 'input_schema'.", param=where)
    elif tool.is_anthropics:
        known = tool.type in CLIENT_TOOLS
        right = f"Send a tool with an 'input_schema', or one of {', '.join((*CLIENT_TOOLS, *RUN_UPSTREAM))}."
        require(known, f"{where}.type", f"'{where}' is of no type that is known here. {right}")
    else:
        require(tool.input_schema is not None, f"{where}.input_schema", f"'{where}' needs an 'input_schema'.")


def with_betas(asked: AnyMessage, header: str | None) -> AnyMessage:
    """Return a request with the betas that its ``anthropic-beta`` header names, the first of very many."""
    named = (name.strip()[:LONGEST_BETA] for name in (header or "").split(","))
    betas = dict.fromkeys([*(asked.anthropic_beta or ()), *filter(None, named)])
    return replace(asked, anthropic_beta=tuple(islice(betas, MOST_BETAS))) if betas else asked


def as_chat(asked: MessagesRequest, extra: dict[str, Any]) -> Asked:
    """Return a message as the chat that it is, beside itself. Raises UnsupportedParameter for what has no place there
    and is no wish."""
    for name in MEANT.keys() & extra.keys():
        if extra[name] is not None:
            refusal = not_supported(name, MEANT[name])
            refusal.facts = DETAILS.get(name, {})
            raise refusal
    if asked.top_k is not None:
        extra["top_k"] = asked.top_k  # our own engine knows it; it has no place in a chat completion
    return Asked(to_chat(asked), extra, asked)


ENDPOINT = ApiEndpoint(
    path="/v1/messages",
    name="messages",
    operation="create_message",
    summary="Answer a conversation, in Anthropic's shapes",
    description="Answer the last turn of a conversation, whole or as a stream of events.",
    body_type=MessagesRequest,
    check=check_message,
    translate=as_chat,
    with_headers=lambda native, headers: with_betas(native, headers.get("anthropic-beta")),
    writer=MessagesWriter,
    errors=ANTHROPIC_ERRORS,
    limit_headers=lambda held, now: rate_limit_headers(held) | anthropic_limit_headers(held, now),
    is_for_batches=True,
    route_field="messages",
)
