# Chat completions in OpenAI's shapes: what is checked of a request, and how its reply is written.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from billing.core.money import to_text
from gateway.dialects.checks import require, require_between, require_short
from gateway.dialects.endpoint import ApiEndpoint, Asked, ReplyFacts
from protocol.chat import (
    PDF,
    AudioPart,
    ChatReply,
    ChatRequest,
    Choice,
    FilePart,
    JsonObjectFormat,
    Message,
    Reasoning,
    Spoken,
    check_arguments,
)
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError, invalid_param
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import WholeReply
from protocol.sse import DONE, encode_event
from protocol.usage import Usage

# As many as our own engine takes; OpenAI's models take four, and say so themselves.
MOST_STOPS = 16
LONGEST_NAME = 255  # characters of a file's


def check_chat(request: ChatRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(bool(request.messages), "messages", "'messages' must hold at least one message.")
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        words = "'max_tokens' and 'max_completion_tokens' mean the same and differ. Send one of them."
        raise invalid_param("max_completion_tokens", words)
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    require_between(request.output_limit, 1, 2**31, limit_name)
    check_sampling(request)
    require_between(request.top_logprobs, 0, 20, "top_logprobs")
    require(not request.top_logprobs or bool(request.logprobs), "top_logprobs", "'top_logprobs' needs 'logprobs'.")
    is_moot = request.tool_choice in (None, "auto", "none")  # clients say so with no tools at hand
    require(is_moot or bool(request.tools), "tool_choice", "'tool_choice' needs 'tools'.")
    check_arguments(request)
    _check_voice(request)
    for place, message in enumerate(request.messages):
        if isinstance(message.content, tuple):
            _check_files(message, f"messages[{place}]")
        if message.role == "tool":
            require(
                message.tool_call_id is not None,
                f"messages[{place}].tool_call_id",
                "A message of role 'tool' needs the 'tool_call_id' that it answers.",
            )
        elif message.content is None and message.role != "assistant":
            require(False, f"messages[{place}].content", f"A {message.role} message needs 'content'.")
        if message.audio is not None:
            words = "An earlier answer by voice, by its id, stands in an assistant message."
            require(message.role == "assistant", f"messages[{place}].audio", words)
            require_short(message.audio.id, LONGEST_NAME, f"messages[{place}].audio.id")


def _check_voice(request: ChatRequest) -> None:
    """Refuse an answer by voice that does not say which voice and form, or the other way. Raises BadRequest."""
    is_spoken = "audio" in (request.modalities or ())
    right = """An answer by voice takes 'modalities': ["text", "audio"], and 'audio' with a 'voice' and a 'format'."""
    require(request.modalities != (), "modalities", "'modalities' is empty. Leave it out, or send [\"text\"].")
    require(is_spoken or request.audio is None, "modalities", right)
    require(not is_spoken or request.audio is not None, "audio", right)
    if request.audio is not None:
        voice = request.audio.voice
        name = voice if isinstance(voice, str) else voice.id
        require(0 < len(name) <= LONGEST_NAME, "audio.voice", f"A voice's name has 1 to {LONGEST_NAME} characters.")


def _check_files(message: Message, where: str) -> None:
    """Refuse files that are no PDF within the request, or not the user's. Raises BadRequest."""
    for place, part in enumerate(message.content or ()):
        if isinstance(part, FilePart):
            field = f"{where}.content[{place}].file"
            words = f"No files are kept for chats, nor fetched. Send a PDF as '{PDF}…' in 'file_data'."
            require(part.file.file_id is None, f"{field}.file_id", words)
            require(part.file.file_data.startswith(PDF), f"{field}.file_data", words)
            require_short(part.file.filename, LONGEST_NAME, f"{field}.filename")
        if isinstance(part, FilePart | AudioPart):
            words = "Files and recordings stand in a turn of the user's."
            require(message.role == "user", f"{where}.content[{place}].type", words)


def check_sampling(request: Any) -> None:
    """Refuse sampling parameters out of range. Raises BadRequest. Chat completions and completions share these."""
    require_between(request.temperature, 0, 2, "temperature")
    require_between(request.top_p, 0, 1, "top_p")
    require_between(request.n, 1, 128, "n")
    require_between(request.presence_penalty, -2, 2, "presence_penalty")
    require_between(request.frequency_penalty, -2, 2, "frequency_penalty")
    if request.logit_bias:
        are_ids = all(token.isascii() and token.isdigit() and len(token) < 10 for token in request.logit_bias)
        require(are_ids, "logit_bias", "'logit_bias' names token ids: numbers of at most nine digits, as text.")
    if isinstance(request.stop, tuple):
        require(len(request.stop) <= MOST_STOPS, "stop", f"'stop' may hold at most {MOST_STOPS} sequences.")
    require(
        request.stream_options is None or bool(request.stream), "stream_options", "'stream_options' needs 'stream'."
    )


class Kept(Protocol):
    """What a streamed reply adds up to."""

    def add(self, delta: Delta) -> None:
        """Take in a piece."""

    def reply(self) -> WholeReply:
        """Return what came so far."""


class ChunkWriter(ABC):
    """What streams of chat completions and of completions have alike."""

    def __init__(self, request: ChatRequest | CompletionRequest, request_id: str, created: int) -> None:
        self._asked, self._created = request.model, created
        self._request_id = request_id
        options = request.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._keeps_telling = self._includes_usage and bool(options and options.continuous_usage_stats)

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the chunks for ``events``, and [DONE] at the end."""
        return b"".join([self._piece(reply, event) for event in events])

    def _so_far(self, reply: ReplyFacts) -> Raw:
        """Return what the call has used until now, in JSON."""
        used = reply.meter.so_far()
        return Raw(msgspec.json.encode(usage_object(used.usage, used.cost_nanousd)))

    @abstractmethod
    def _piece(self, reply: ReplyFacts, event: Event) -> bytes:
        """Return the chunk for an event."""

    def error(self, error: ServiceError) -> bytes:
        """Return the error chunk that SDKs raise for."""
        return encode_event(msgspec.json.encode(error.body(self._request_id)))


class ChatWriter(ChunkWriter):
    """Writes chat completions and their chunks."""

    def __init__(self, request: ChatRequest, request_id: str, created: int) -> None:
        super().__init__(request, request_id, created)
        self._id = "chatcmpl-" + request_id.replace("-", "")
        self._head = b""  # of every chunk, up to its choices
        self._tail = b',"usage":null}\n\n' if self._includes_usage else b"}\n\n"
        self._begun: dict[int, bytes] = {}  # choices, and what stands before the words in chunks of nothing else
        self._after_words = b'},"logprobs":null,"finish_reason":null}]' + self._tail
        self._thoughts: dict[int, _Thoughts] = {}  # by choice, where there are any
        self.kept: Kept | None = None  # of a stream that is to be stored

    @property
    def completion_id(self) -> str:
        """The id that the answer has."""
        return self._id

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the chunks for ``events``, and [DONE] at the end."""
        if self.kept is not None:
            self.keep(self.kept, events)
        return super().pieces(reply, events)

    @staticmethod
    def keep(kept: Kept, events: list[Event]) -> None:
        """Add events to what is stored."""
        for event in events:
            if isinstance(event, Delta):
                kept.add(event)

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a ``chat.completion`` object."""
        assert isinstance(whole, ChatReply)
        return msgspec.json.encode(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._asked,
                "model_used": reply.target.model.name,
                "choices": [_choice(choice) for choice in whole.choices],
                "usage": usage_object(usage, reply.record.cost_nanousd),
                "system_fingerprint": whole.system_fingerprint,
                **({"service_tier": whole.service_tier} if whole.service_tier else {}),
            }
        )

    def _piece(self, reply: ReplyFacts, event: Event) -> bytes:
        match event:
            case Delta():
                before = self._begun.get(event.index)
                is_more = event.tool_calls or event.refusal or event.reasoning or event.signature or event.redacted
                is_odd = event.finish_reason or event.logprobs or event.spoken or self._keeps_telling
                if before is not None and event.text and not (is_more or is_odd):  # as nearly all are
                    return before + msgspec.json.encode(event.text) + self._after_words
                head = self._head or self._begin(reply)
                choice = self._choice(event, head)
                tail = b',"usage":' + self._so_far(reply) + b"}\n\n" if self._keeps_telling else self._tail
                return head + choice + tail if choice else b""
            case UsageReport(usage):
                if not self._includes_usage:
                    return b""
                counted = msgspec.json.encode(usage_object(usage, reply.record.cost_nanousd))
                return (self._head or self._begin(reply)) + b'[],"usage":' + counted + b"}\n\n"
            case ReplyEnd():
                return DONE

    def _begin(self, reply: ReplyFacts) -> bytes:
        head = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._asked,
            "model_used": reply.target.model.name,
        }
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":'
        return self._head

    def _choice(self, delta: Delta, head: bytes) -> bytes:
        """Return a chunk's choices; nothing for a delta that says nothing to a client."""
        piece = _DeltaOut(
            content=delta.text or None, refusal=delta.refusal or None, reasoning_content=delta.reasoning or None
        )
        if delta.spoken is not None:
            piece = msgspec.structs.replace(piece, content=None, audio=_spoken(delta.spoken, delta.text))
        if delta.reasoning or delta.signature or delta.redacted:
            thoughts = self._thoughts.setdefault(delta.index, _Thoughts())
            if (block := thoughts.add(delta)) is not None:
                piece = msgspec.structs.replace(piece, thinking_blocks=[block])
        if delta.tool_calls:
            calls = [_call_piece(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls]
            piece = msgspec.structs.replace(piece, tool_calls=calls)
        if delta.index not in self._begun:
            self._begun[delta.index] = head + b'[{"index":%d,"delta":{"content":' % delta.index
            # A lone role has an empty text only where the upstream said so: some clients begin a text part with it.
            is_silent = not delta.has_content and delta.spoken is None
            begins_text = (delta.begins_text or delta.finish_reason is not None) and is_silent
            content = piece.content or ("" if begins_text else None)
            piece = msgspec.structs.replace(piece, role="assistant", content=content)
        elif not (delta.has_content or delta.signature or delta.finish_reason or delta.logprobs or delta.spoken):
            return b""  # the ids of tokens that complete no character
        reason = b'"%s"' % delta.finish_reason.value.encode() if delta.finish_reason is not None else b"null"
        logprobs = bytes(delta.logprobs) if delta.logprobs is not None else b"null"
        body = b'[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]'
        return body % (delta.index, msgspec.json.encode(piece), logprobs, reason)


class _Thoughts:
    """Thinking of one choice as it comes: a block goes out once it is signed, whole and numbered, so that clients can
    send it back as it is."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._blocks = 0

    def add(self, delta: Delta) -> dict[str, Any] | None:
        """Return the block that ``delta`` completes, if it does."""
        self._words.append(delta.reasoning)
        if not (delta.signature or delta.redacted):
            return None
        block = _thinking_block(Reasoning("".join(self._words), delta.signature, delta.redacted))
        self._words.clear()
        self._blocks += 1
        return {"index": self._blocks - 1, **block}


class _DeltaOut(Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    audio: dict[str, Any] | None = None


def _spoken(audio: Spoken, transcript: str) -> dict[str, Any]:
    """Return an answer by voice, or a piece of one, as OpenAI has it: what is not said is not there."""
    said = {"id": audio.id, "data": audio.data, "transcript": transcript, "expires_at": audio.expires_at}
    return {name: value for name, value in said.items() if value}


def usage_object(usage: Usage, cost_nanousd: int) -> dict[str, Any]:
    """Return OpenAI's usage object, with the cost as a decimal text."""
    prompt = {"cached_tokens": usage.cached_input_tokens, "audio_tokens": usage.audio_input_tokens}
    if usage.cache_write_tokens:
        prompt["cache_write_tokens"] = usage.cache_write_tokens
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": prompt,
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": usage.audio_output_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
        "cost_usd": to_text(cost_nanousd),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.message.content,
        "refusal": choice.message.refusal,
    }
    if (audio := choice.message.audio) is not None:
        message["audio"] = {"data": "", "transcript": "", **_spoken(audio, audio.transcript)}
    if choice.message.tool_calls:
        message["tool_calls"] = choice.message.tool_calls
    if choice.message.reasoning_content is not None:
        message["reasoning_content"] = choice.message.reasoning_content
    if choice.message.reasoning:
        message["thinking_blocks"] = [_thinking_block(stretch) for stretch in choice.message.reasoning]
    logprobs: Raw | None = choice.logprobs
    return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _thinking_block(stretch: Reasoning) -> dict[str, Any]:
    """Return thinking that the model wants back in its next turn, in Anthropic's words, as LiteLLM has it."""
    if stretch.redacted:
        return {"type": "redacted_thinking", "data": stretch.redacted}
    return {"type": "thinking", "thinking": stretch.text, "signature": stretch.signature}


def _call_piece(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    if call_id is None and name is None:
        return {"index": index, "function": {"arguments": arguments}}
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_asked(chat: ChatRequest, extra: dict[str, Any]) -> Asked:
    """Return a chat with its schema, where it names one, in the place that upstreams look for it, and without saying
    that it is answered in words, as all are."""
    if chat.modalities is not None and "audio" not in chat.modalities:
        chat = msgspec.structs.replace(chat, modalities=None)
    form = chat.response_format
    if isinstance(form, JsonObjectFormat) and form != JsonObjectFormat():
        chat = msgspec.structs.replace(chat, response_format=form.in_openais_words())
    return Asked(chat, extra)


ENDPOINT = ApiEndpoint(
    path="/v1/chat/completions",
    name="chat.completions",
    operation="create_chat_completion",
    summary="Answer a conversation",
    description="Answer the last turn of a conversation, whole or as a stream of chunks.",
    body_type=ChatRequest,
    check=check_chat,
    translate=as_asked,
    writer=ChatWriter,
    is_for_batches=True,
    route_field="messages",
)
