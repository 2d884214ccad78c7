# Anthropic's Messages API: what is checked of a request, which chat it is, and its row in the table of endpoints.

from __future__ import annotations

from typing import Any

from gateway.calls.rate_limits import anthropic_limit_headers, rate_limit_headers
from gateway.dialects.anthropic_errors import ANTHROPIC_ERRORS
from gateway.dialects.checks import require, require_between
from gateway.dialects.endpoint import ApiEndpoint, Asked
from gateway.dialects.messages_writer import MessagesWriter
from protocol.messages import CLIENT_TOOLS, MessagesRequest, MessageTool
from protocol.messages_to_chat import to_chat


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
    blank = any(not stop.strip() for stop in asked.stop_sequences or ())
    require(not blank, "stop_sequences", "A stop sequence must hold more than white space.")


def _check_tool(tool: MessageTool, where: str) -> None:
    if tool.is_anthropics:
        known = tool.type in CLIENT_TOOLS
        right = f"Send a tool with an 'input_schema', or one of {', '.join(CLIENT_TOOLS)}."
        require(known, f"{where}.type", f"'{where}' is of no type that is known here. {right}")
    else:
        require(tool.input_schema is not None, f"{where}.input_schema", f"'{where}' needs an 'input_schema'.")


def as_chat(asked: MessagesRequest, extra: dict[str, Any]) -> Asked:
    """Return a message as the chat that it is, beside itself."""
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
    writer=MessagesWriter,
    errors=ANTHROPIC_ERRORS,
    limit_headers=lambda held, now: rate_limit_headers(held) | anthropic_limit_headers(held, now),
    is_for_batches=False,
    route_field="messages",
)
