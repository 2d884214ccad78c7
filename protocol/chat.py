# A chat completion: what is asked and what is answered, in the field's own names.
# Requests decode strictly and encode again from what was decoded; nothing else of a client's body travels on.

from __future__ import annotations

import re
from base64 import b64decode
from enum import StrEnum
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field
from msgspec.structs import replace

from protocol.decoding import MAX_VALUES, has_more_values
from protocol.errors import invalid_value
from protocol.media.audio import plain_seconds
from protocol.usage import Usage

# What one request may hold: several times more than any model reads, and few enough to be translated in half a second.
MOST_MESSAGES = 16_384
MOST_PARTS = 16_384  # of one message, and as many tool calls or thoughts
MOST_TOOLS = 4_096


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"  # the model was done, or a stop string came
    LENGTH = "length"  # the output limit or the context is full
    TOOL_CALLS = "tool_calls"  # the model waits for the results of tools
    CONTENT_FILTER = "content_filter"  # the rest was withheld


class CacheControl(Struct, frozen=True, omit_defaults=True):
    """Marks the end of a prefix that shall be cached, for five minutes: an hour is asked for at /v1/messages alone."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    def __post_init__(self) -> None:
        if self.ttl == "1h":
            raise ValueError("a cache of an hour is kept for /v1/messages alone; leave 'ttl' out, or say 5m")


class TextPart(Struct, frozen=True, tag="text", omit_defaults=True):
    text: str
    cache_control: CacheControl | None = None  # Anthropic's; told to no other upstream


class ImageUrl(Struct, frozen=True, omit_defaults=True):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Struct, frozen=True, tag="image_url", omit_defaults=True):
    image_url: ImageUrl
    cache_control: CacheControl | None = None


class PdfFile(Struct, frozen=True, omit_defaults=True):
    """A PDF, which needs a model that sees. It may lie where images may, where a message or a response says so."""

    file_data: str = ""  # its data URL, or where it lies
    filename: str | None = None
    file_id: str | None = None  # refused by name

    @property
    def url(self) -> str:
        """Where it is, as an image says it."""
        return self.file_data

    @property
    def detail(self) -> None:
        """None: its pages are read as they are."""


class FilePart(Struct, frozen=True, tag="file", omit_defaults=True):
    file: PdfFile
    cache_control: CacheControl | None = None


BASE64 = re.compile("[A-Za-z0-9+/]*={0,2}")


class AudioData(Struct, frozen=True, dict=True):
    """What is heard: a recording that comes along in base64."""

    data: str
    format: Literal["wav", "mp3"]

    def __post_init__(self) -> None:
        _ = self.seconds  # looked at here alone, where long bodies are decoded: beside the event loop

    @cached_property
    def seconds(self) -> tuple[int, int]:
        """The most seconds that it lasts, and about how many."""
        if BASE64.fullmatch(self.data) is None:
            words = "'data' is no base64 of a recording: letters, digits, '+' and '/', with '=' at the end alone"
            raise ValueError(f"{words}; no line breaks, and no 'data:…;base64,' before it")
        if (seconds := plain_seconds(b64decode(self.data[: len(self.data) // 4 * 4]), self.format)) is None:
            raise ValueError(
                f"no {self.format.upper()} in base64 is in 'data': a WAV of samples one by one (PCM), or an MP3"
            )
        return seconds


class AudioPart(Struct, frozen=True, tag="input_audio"):
    input_audio: AudioData


class RefusalPart(Struct, frozen=True, tag="refusal", omit_defaults=True):
    refusal: str


ContentPart = TextPart | ImagePart | FilePart | AudioPart | RefusalPart
PDF = "data:application/pdf;base64,"  # begins the data URL of one


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str  # a JSON text; "{}" when there are none


class ToolCall(Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """What a model thought, with the signature under which it takes it back. No other model can read it."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, frozen=True, tag="redacted_thinking"):
    data: str


class VoiceId(Struct, frozen=True):
    """A voice of the account's own."""

    id: str


class AudioAsked(Struct, frozen=True):
    """How an answer is said aloud."""

    voice: str | VoiceId
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class SpokenBefore(Struct, frozen=True):
    """An earlier answer by voice, which its provider keeps for a while."""

    id: str


class Message(Struct, frozen=True, omit_defaults=True):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[tuple[ContentPart, ...], Meta(max_length=MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    # As LiteLLM's clients send them.
    thinking_blocks: (
        Annotated[tuple[ThinkingBlock | RedactedThinkingBlock, ...], Meta(max_length=MOST_PARTS)] | None
    ) = None
    audio: SpokenBefore | None = None

    def text(self) -> str:
        """Return the words of the message, parts joined; images and files count as nothing."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or () if isinstance(part, TextPart))


class ItemMessage(Message, frozen=True, omit_defaults=True):
    """An item of a response that upstreams of that API alone can read: it stands here to be counted and judged."""

    told_as: str = ""  # its name where it is left out


class Function(Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    function: Function
    type: Literal["function"] = "function"


class HostedTool(Tool, frozen=True):
    """A tool that the upstream runs for the model, as a search of the web: of Anthropic's API, and of OpenAI's
    responses."""

    most: int = 0  # calls in one request; of all such tools together, unless ``calls`` says that
    unit: str = "web_searches"  # of a usage, in which they are counted; "": they cost nothing but tokens
    found: int | None = None  # tokens that a call of it may add to the prompt, where that is said
    calls: int = 0  # in one request, of all such tools together, where each has a bound of its own


class NamedFunction(Struct, frozen=True):
    name: str


class NamedTool(Struct, frozen=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class TextFormat(Struct, frozen=True, tag="text"):
    pass


class JsonSchema(Struct, frozen=True, omit_defaults=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, tag="json_schema"):
    json_schema: JsonSchema


class JsonObjectFormat(Struct, frozen=True, tag="json_object", omit_defaults=True):
    """Any object, or one that fits a schema: ``schema`` as Together has it, ``value`` as Hugging Face's clients do."""

    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None

    def in_openais_words(self) -> JsonObjectFormat | JsonSchemaFormat:
        """Return the format as every upstream knows it."""
        schema = self.value if self.schema is None else self.schema
        return self if schema is None else JsonSchemaFormat(JsonSchema("answer", schema))


class StreamOptions(Struct, frozen=True, omit_defaults=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: each chunk has the usage so far, where the last has it
    include_obfuscation: bool | None = None


class ChatRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A chat completion as asked. ``None`` means that the caller did not say."""

    model: str
    messages: Annotated[tuple[Message, ...], Meta(max_length=MOST_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    seed: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    modalities: tuple[Literal["text", "audio"], ...] | None = None  # None: text; else said aloud, too
    audio: AudioAsked | None = None

    @property
    def output_limit(self) -> int | None:
        """The most tokens a reply may have, by whichever of its two names it was given."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def check_arguments(request: ChatRequest) -> None:
    """Refuse calls whose arguments hold more values than a body may: they are decoded, too. Raises BadRequest."""
    calls = [call for message in request.messages if message.tool_calls for call in message.tool_calls]
    said = "".join([call.function.arguments for call in calls]) if calls else ""
    if has_more_values(said.encode("utf-8", "replace"), MAX_VALUES):
        raise invalid_value("messages", f"holds tool calls whose arguments have more than {MAX_VALUES} values")


class Reasoning(Struct, frozen=True):
    """One stretch of what a model thought, as it wants it back in its next turn: in words, or withheld."""

    text: str = ""
    signature: str = ""
    redacted: str = ""


class NativeEnd(Struct, frozen=True, kw_only=True):
    """What Anthropic's API says at the end of a reply and no other has a place for; its own clients are told it."""

    stop_reason: str | None = None
    message: dict[str, Any] = {}  # fields of the message: stop_details, container, context_management
    usage: dict[str, Any] = {}  # fields of its usage: cache_creation, server_tool_use, service_tier, …


class Spoken(Struct, frozen=True, omit_defaults=True):
    """An answer by voice, or a piece of one."""

    id: str | None = None
    data: str = ""  # the sound, in base64
    expires_at: int | None = None  # unix seconds; until then its provider knows it by its id
    transcript: str = ""  # of a whole one; that of a piece is its delta's text


class ReplyMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = field(default=None)
    reasoning_content: str | None = None
    reasoning: tuple[Reasoning, ...] = ()  # where the upstream signs it
    blocks: tuple[Struct, ...] = ()  # all of it as Anthropic's API has it, where citations or the order say more
    audio: Spoken | None = None


class Choice(Struct, frozen=True, kw_only=True):
    index: int
    message: ReplyMessage
    finish_reason: FinishReason
    logprobs: Raw | None = None
    token_ids: tuple[int, ...] | None = None
    stop_sequence: str | None = None  # which of them ended it, where the upstream says
    native: NativeEnd | None = None

    def without_sound(self) -> Choice:
        """Return it as it is kept: of an answer by voice the words alone."""
        if (audio := self.message.audio) is None:
            return self
        return replace(self, message=replace(self.message, audio=replace(audio, data="")))


class ChatReply(Struct, frozen=True, kw_only=True):
    """A whole answer, before it is put in a dialect's shape."""

    choices: tuple[Choice, ...]
    system_fingerprint: str | None = None
    service_tier: str | None = None  # in which the upstream says that it answered
    told: dict[str, Raw] | None = None  # the response that it is, where its upstream speaks that API
    used: Usage | None = None  # by calls of tools of the upstream's, as that response tells

    def without_sound(self) -> ChatReply:
        """Return it as it is kept: of answers by voice the words alone."""
        return replace(self, choices=tuple([choice.without_sound() for choice in self.choices]))
