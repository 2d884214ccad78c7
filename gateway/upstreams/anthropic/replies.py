# Whole messages of Anthropic's Messages API, and its counts. Only what we read is named in the shapes; the rest is
# skipped without being built. Compatible services send null for what they leave out.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.anthropic.json_answer import answer_tool
from gateway.upstreams.anthropic.names import safe_name
from gateway.upstreams.wire.reading import NOTHING, count_of, decoded, object_in, read_usage
from gateway.upstreams.wire.short_ids import names_given
from protocol.chat import (
    ChatReply,
    ChatRequest,
    Choice,
    FinishReason,
    FunctionCall,
    NativeEnd,
    Reasoning,
    RedactedThinkingBlock,
    ReplyMessage,
    ThinkingBlock,
    ToolCall,
)
from protocol.inference import Request
from protocol.messages import Block as NativeBlock
from protocol.messages import (
    CodeResult,
    CodeResultBlock,
    EditorResultBlock,
    ServerBlock,
    ServerResultBlock,
    ServerToolUseBlock,
    TextBlock,
    ToolUseBlock,
    WebFetchResultBlock,
    WebSearchResultBlock,
)
from protocol.usage import Usage

STOP_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "pause_turn": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "tool_use": FinishReason.TOOL_CALLS,
    "refusal": FinishReason.CONTENT_FILTER,
}
KINDS = ("thinking", "redacted_thinking", "text", "tool_use")  # of blocks, as our shape has them in a row
TEXT = KINDS.index("text")
RESULTS: dict[str, type[ServerResultBlock]] = {
    str(each.__struct_config__.tag): each for each in (WebFetchResultBlock, CodeResultBlock, EditorResultBlock)
}
SERVER_KINDS = ("server_tool_use", "web_search_tool_result", *RESULTS)
OWN_REASONS = ("pause_turn", "model_context_window_exceeded")  # which our words for them do not tell apart


class Told(Struct, frozen=True):
    """What a request told the model that stands otherwise in its reply."""

    names: Mapping[str, str] = {}  # of tools, as the caller gave them, by those that went out
    answer: str | None = None  # the tool whose input is the answer

    def name(self, name: str | None) -> str:
        """Return the caller's name of a tool that the model calls."""
        return self.names.get(name or "", name or "")


NOTHING_TOLD = Told()


def told_in(request: Request) -> Told:
    """Return what to read a reply by."""
    if not isinstance(request, ChatRequest) or not (request.tools or request.response_format):
        return NOTHING_TOLD
    return Told(names_given(request, safe_name), answer_tool(request))


def read_message(body: bytes, told: Told = NOTHING_TOLD) -> tuple[ChatReply, Usage | None]:
    """Return the message that ``body`` holds, and its count. Raises UpstreamError."""
    message = decoded(body, _message_decoder)
    reply, usage = message.reply(told), (read_usage(message.usage, UsageObject) or UsageObject()).count()
    has_result = any(issubclass(RESULTS.get(block.type, Block), CodeResult) for block in message.content)
    if has_result or message.container is not None:  # that is told without a result, too: of a turn that is paused
        used = Usage(containers=1)
        reply, usage = msgspec.structs.replace(reply, used=used), usage and usage.at_least(used)
    return reply, usage


def read_stop_reason(word: str | None) -> FinishReason:
    """Return the reason that an upstream's word means; none and strangers count as a plain stop."""
    return STOP_REASONS.get(word or "", FinishReason.STOP)


class _OutputDetails(Struct, frozen=True):
    thinking_tokens: int | float | None = None


class _ServerTools(Struct, frozen=True):
    web_search_requests: int | float | None = None


class UsageObject(Struct, frozen=True):
    """The ``usage`` of a message or an event.

    ``input_tokens`` leaves out what was read from and written to the cache; the prompt is the sum of the three.
    """

    input_tokens: int | float | None = None
    cache_creation_input_tokens: int | float | None = None
    cache_read_input_tokens: int | float | None = None
    output_tokens: int | float | None = None
    output_tokens_details: _OutputDetails | None = None
    server_tool_use: _ServerTools | None = None

    def replaced_by(self, later: UsageObject) -> UsageObject:
        """Return the counts with those that ``later`` names in place of the earlier ones."""
        named = {name: value for name in self.__struct_fields__ if (value := getattr(later, name)) is not None}
        return msgspec.structs.replace(self, **named)

    def count(self) -> Usage | None:
        """Return the counts as ours, or ``None`` where they cannot be counts."""
        plain, written, read, output = (
            count_of(number)
            for number in (
                self.input_tokens,
                self.cache_creation_input_tokens,
                self.cache_read_input_tokens,
                self.output_tokens,
            )
        )
        if plain is None or output is None or not plain + (written or 0) + (read or 0):
            return None
        thought = count_of((self.output_tokens_details or _OutputDetails()).thinking_tokens) or 0
        return Usage(
            input_tokens=plain + (written or 0) + (read or 0),
            cached_input_tokens=read or 0,
            cache_write_tokens=written or 0,
            output_tokens=output,
            reasoning_tokens=min(thought, output),
            web_searches=count_of((self.server_tool_use or _ServerTools()).web_search_requests) or 0,
        )


class UsageBeside(Struct, frozen=True):
    """What a ``usage`` says that no price rests on."""

    cache_creation: dict[str, Any] | None = None
    server_tool_use: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    speed: str | None = None

    def named(self) -> dict[str, Any]:
        """Return what is said at all."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


def native_end(reason: str | None, message: Struct, usage: dict[str, Any]) -> NativeEnd | None:
    """Return what an upstream said at a reply's end for its own clients alone, if anything."""
    beside = {
        name: value
        for name in ("stop_details", "container", "context_management")
        if isinstance(value := getattr(message, name, None), dict)
    }
    word = reason if reason in OWN_REASONS else None
    return NativeEnd(stop_reason=word, message=beside, usage=usage) if word or beside or usage else None


class Block(Struct, frozen=True):
    """One block of a message's content, whole or as a stream begins it."""

    type: str = ""
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None  # of thinking that is withheld
    citations: Any = None

    def cited(self) -> list[dict[str, Any]]:
        """Return what a text rests on."""
        return [each for each in self.citations if isinstance(each, dict)] if isinstance(self.citations, list) else []

    id: str | None = None
    name: str | None = None
    input: Raw = NOTHING
    tool_use_id: str | None = None  # of what a search found
    content: Any = None
    caller: Any = None

    def of_server(self, arguments: str) -> ServerBlock | None:
        """Return the block of a tool that the upstream ran, with its arguments, if it is one that is known here."""
        caller = self.caller if isinstance(self.caller, dict) else None
        match self.type:
            case "server_tool_use":
                given = msgspec.json.decode(arguments or "{}")
                said = given if isinstance(given, dict) else {}
                return ServerToolUseBlock(self.id or "", self.name or "", said, caller=caller)
            case "web_search_tool_result":
                if isinstance(self.content, dict):  # an error
                    return WebSearchResultBlock(self.tool_use_id or "", self.content, caller=caller)
                found = self.content if isinstance(self.content, list) else ()
                pages = tuple(each for each in found if isinstance(each, dict))
                return WebSearchResultBlock(self.tool_use_id or "", pages, caller=caller)
        if (kind := RESULTS.get(self.type)) is not None:
            given = self.content if isinstance(self.content, dict) else {}
            return cast(ServerBlock, kind(self.tool_use_id or "", given, caller=caller))
        return None


class _Message(Struct, frozen=True):
    content: tuple[Block, ...]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Raw = NOTHING
    stop_details: Any = None
    container: Any = None
    context_management: Any = None

    def reply(self, told: Told) -> ChatReply:
        """Return the message in our shape: its texts joined, its calls in their order."""
        used = [block for block in self.content if block.type == "tool_use"]
        answers = [block for block in used if block.name == told.answer][:1]
        calls = tuple(
            ToolCall(block.id or "", FunctionCall(told.name(block.name), object_in(block.input) or "{}"))
            for block in used
            if block.name != told.answer
        )
        words = [block.text or "" for block in self.content if block.type == "text"]
        words += [object_in(block.input) or "{}" for block in answers]
        said = ReplyMessage(
            content="".join(words) or (None if calls else ""),
            tool_calls=calls or None,
            reasoning_content="".join(block.thinking or "" for block in self.content) or None,
            reasoning=tuple(
                Reasoning(block.thinking or "", block.signature or "", block.data or "")
                for block in self.content
                if block.signature or block.data
            ),
            blocks=() if answers else self._blocks(told),
        )
        reason = read_stop_reason(self.stop_reason)
        if answers and not calls and reason is FinishReason.TOOL_CALLS:
            reason = FinishReason.STOP
        usage = (read_usage(self.usage, UsageBeside) or UsageBeside()).named()
        choice = Choice(
            index=0,
            message=said,
            finish_reason=reason,
            stop_sequence=self.stop_sequence,
            native=native_end(self.stop_reason, self, usage),
        )
        return ChatReply(choices=(choice,))

    def _blocks(self, told: Told) -> tuple[NativeBlock, ...]:
        """Return the blocks as they are, where our shape would lose what a text rests on, or how they stand."""
        kinds = [KINDS.index(block.type) for block in self.content if block.type in KINDS]
        is_plain = kinds == sorted(kinds) and kinds.count(TEXT) <= 1
        is_plain = is_plain and not any(block.type in SERVER_KINDS for block in self.content)
        if is_plain and not any(block.cited() for block in self.content):
            return ()
        return tuple(found for block in self.content if (found := _native(block, told)) is not None)


def _native(block: Block, told: Told) -> NativeBlock | None:
    match block.type:
        case "text" if block.text:
            return TextBlock(block.text, citations=tuple(block.cited()) or None)
        case "thinking":
            return ThinkingBlock(block.thinking or "", block.signature or "")
        case "redacted_thinking":
            return RedactedThinkingBlock(block.data or "")
        case "tool_use":
            arguments = msgspec.json.decode(object_in(block.input) or "{}")
            return ToolUseBlock(block.id or "", told.name(block.name), arguments)
    return block.of_server(object_in(block.input))


_message_decoder = msgspec.json.Decoder(_Message)
