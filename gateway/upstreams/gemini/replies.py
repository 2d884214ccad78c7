# What Gemini answers, whole or in pieces: both have one shape. Only what we read is named in it.

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2s

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.gemini.request import safe_name
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFiltered
from gateway.upstreams.wire.reading import NOTHING, count_of, decoded, object_in, read_usage, text_in
from gateway.upstreams.wire.short_ids import names_given
from gateway.upstreams.wire.signatures import GEMINI
from protocol.chat import ChatReply, ChatRequest, Choice, FinishReason, FunctionCall, Reasoning, ReplyMessage, ToolCall
from protocol.inference import Request
from protocol.usage import Usage

FINISHES = {
    "STOP": FinishReason.STOP,
    "MAX_TOKENS": FinishReason.LENGTH,
    **dict.fromkeys(
        ("SAFETY", "RECITATION", "LANGUAGE", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"),
        FinishReason.CONTENT_FILTER,
    ),
}
# The model's own slips: what it said is not to be used, and another try may go well.
BROKEN = ("MALFORMED_FUNCTION_CALL", "MALFORMED_RESPONSE", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS")


LONGEST_ID = 200  # characters of what tells replies apart


class Told(Struct, frozen=True):
    """What a request told the model that stands otherwise in its reply."""

    names: Mapping[str, str] = {}  # of functions, as the caller gave them, by those that went out
    one_call: bool = False  # more than one at a time is not wanted, which this API has no word for

    def name(self, name: str) -> str:
        """Return the caller's name of a function that the model calls."""
        return self.names.get(name, name)


NOTHING_TOLD = Told()


def told_in(request: Request) -> Told:
    """Return what to read a reply by."""
    if not isinstance(request, ChatRequest) or not request.tools:
        return NOTHING_TOLD
    return Told(names_given(request, safe_name), request.parallel_tool_calls is False)


class _Call(Struct, frozen=True):
    name: str = ""
    args: Raw = NOTHING
    id: str | None = None


class Part(Struct, frozen=True, rename="camel"):
    """One part of what the model said: words, thought words, or a call."""

    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _Call | None = None


class _Content(Struct, frozen=True):
    parts: tuple[Part, ...] | None = None


class Candidate(Struct, frozen=True, rename="camel"):
    """A choice. There is one: more are not asked for."""

    content: _Content | None = None
    finish_reason: str | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """What was said."""
        return (self.content.parts or ()) if self.content is not None else ()


class _PromptFeedback(Struct, frozen=True, rename="camel"):
    block_reason: str | None = None


class Answer(Struct, frozen=True, rename="camel"):
    """A whole answer, or a piece of a streamed one."""

    candidates: tuple[Candidate, ...] | None = None
    prompt_feedback: _PromptFeedback | None = None
    usage_metadata: Raw = NOTHING
    response_id: Raw = NOTHING
    error: Raw = NOTHING

    @property
    def reply(self) -> str:
        """What tells this reply from others."""
        return (text_in(self.response_id) or "")[:LONGEST_ID]

    def refused(self) -> UpstreamFiltered | None:
        """Return the refusal of a prompt that Google's filter blocks."""
        reason = self.prompt_feedback.block_reason if self.prompt_feedback is not None else None
        if reason is None or self.candidates:
            return None
        named = reason.lower().replace("_", " ")[:40]
        return UpstreamFiltered(f"The content filter of the model's provider refused this call ({named}).")

    def usage(self, *, is_last: bool = True) -> Usage | None:
        """Return the counts so far, if they are told. Where more is to come, a count that names no output says nothing
        of what was said; at the end, it says that there is none."""
        told = read_usage(self.usage_metadata, _UsageMetadata)
        if told is None or not (is_last or told.candidates_token_count is not None or told.thoughts_token_count):
            return None
        return told.usage()


class _Modality(Struct, frozen=True, rename="camel"):
    modality: str = ""
    token_count: int | float | None = None


def _heard(details: tuple[_Modality, ...] | None) -> int:
    return sum(count_of(each.token_count or 0) or 0 for each in details or () if each.modality == "AUDIO")


class _UsageMetadata(Struct, frozen=True, rename="camel"):
    prompt_token_count: int | float | None = None
    tool_use_prompt_token_count: int | float | None = None
    cached_content_token_count: int | float | None = None  # a part of the prompt's
    candidates_token_count: int | float | None = None
    thoughts_token_count: int | float | None = None  # beside the candidates'
    prompt_tokens_details: tuple[_Modality, ...] | None = None
    cache_tokens_details: tuple[_Modality, ...] | None = None

    def usage(self) -> Usage | None:
        """Return the counts as ours, or ``None`` where they cannot be counts."""
        prompt, of_tools, cached, said, thought = (
            count_of(number or 0)
            for number in (
                self.prompt_token_count,
                self.tool_use_prompt_token_count,
                self.cached_content_token_count,
                self.candidates_token_count,
                self.thoughts_token_count,
            )
        )
        if not prompt or said is None:
            return None
        whole, thought = prompt + (of_tools or 0), thought or 0
        return Usage(
            input_tokens=whole,
            cached_input_tokens=min(cached or 0, whole),
            output_tokens=said + thought,
            reasoning_tokens=thought,
            audio_input_tokens=min(_heard(self.prompt_tokens_details), whole),
            cached_audio_tokens=_heard(self.cache_tokens_details),
        )


def read_finish(word: str) -> FinishReason:
    """Return the reason that Gemini's word means; strangers count as a plain stop. Raises UpstreamError for a slip."""
    if word in BROKEN:
        raise UpstreamError("The upstream's model broke off in a malformed call.", outcome="malformed")
    return FINISHES.get(word, FinishReason.STOP)


def read_call(call: _Call, told: Told, reply: str, place: int) -> ToolCall:
    """Return a call, with an id of ours where it came without one: results must name the call that they are of."""
    made_up = blake2s(f"{reply} {place}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    arguments = object_in(call.args) or "{}"
    return ToolCall(call.id or f"call_{made_up}", FunctionCall(told.name(call.name), arguments))


def read_content(body: bytes, told: Told) -> tuple[ChatReply, Usage | None]:
    """Return the reply that ``body`` holds, and its count. Raises UpstreamError, UpstreamFiltered."""
    answer = decoded(body, answer_decoder)
    if (refused := answer.refused()) is not None:
        raise refused
    if not answer.candidates:
        raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")
    return ChatReply(choices=(_choice(answer.candidates[0], told, answer.reply),)), answer.usage()


def _choice(candidate: Candidate, told: Told, reply: str) -> Choice:
    words, thoughts, calls, signature = [], [], list[ToolCall](), ""
    for part in candidate.parts:
        if part.function_call is not None:
            if not (told.one_call and calls):
                calls.append(read_call(part.function_call, told, reply, len(calls)))
            signature = signature or part.thought_signature or ""
        elif part.thought:
            thoughts.append(part.text or "")
        else:
            words.append(part.text or "")
    finish = read_finish(candidate.finish_reason or "STOP")
    thought = "".join(thoughts)
    said = ReplyMessage(
        content="".join(words) or (None if calls else ""),
        tool_calls=tuple(calls) or None,
        reasoning_content=thought or None,
        reasoning=(Reasoning(thought, GEMINI + signature),) if signature else (),
    )
    if calls and finish is FinishReason.STOP:
        finish = FinishReason.TOOL_CALLS
    return Choice(index=0, message=said, finish_reason=finish)


answer_decoder = msgspec.json.Decoder(Answer)
