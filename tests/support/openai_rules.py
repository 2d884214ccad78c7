# What OpenAI accepts, written down a second time and strictly: the judge of every request that we send upstream.
# Shares nothing with protocol/, so that a mistake there cannot excuse itself here.

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from multipart import MultipartSegment, PushMultipartParser

Words = Annotated[str, Meta(min_length=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Tokens = Annotated[int, Meta(ge=1)]
Replies = Annotated[int, Meta(ge=1, le=128)]
Stop = str | Annotated[list[str], Meta(max_length=4)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

# The headers that an upstream of OpenAI's has reason to see. Everything else leaked from a client.
ALLOWED_HEADERS = {
    "accept",
    "accept-encoding",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "host",
    "openai-organization",
    "openai-project",
    "user-agent",
}


class Violation(Exception):
    """A request that OpenAI would refuse with a 400 (or the given status)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        error = {"message": self.message, "type": "invalid_request_error", "param": self.param, "code": self.code}
        return {"error": error}


class Strict(Struct, forbid_unknown_fields=True, frozen=True):
    pass


class TextPart(Strict, tag="text", frozen=True):
    text: Words


class RefusalPart(Strict, tag="refusal", frozen=True):
    refusal: str


class Image(Strict, frozen=True):
    url: Words
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Strict, tag="image_url", frozen=True):
    image_url: Image


class File(Strict, frozen=True):
    filename: Words
    file_data: Annotated[str, Meta(pattern="^data:application/pdf;base64,")]


class FilePart(Strict, tag="file", frozen=True):
    file: File


class Audio(Strict, frozen=True):
    data: Words
    format: Literal["wav", "mp3"]


class AudioPart(Strict, tag="input_audio", frozen=True):
    input_audio: Audio


class SpokenBefore(Strict, frozen=True):
    id: Words


class VoiceId(Strict, frozen=True):
    id: Words


class AudioAsked(Strict, frozen=True):
    voice: Words | VoiceId
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class Called(Strict, frozen=True):
    name: Words
    arguments: str


class ToolCall(Strict, frozen=True):
    id: Words
    type: Literal["function"]
    function: Called


class Instructions(Strict, frozen=True):
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: str | None = None


class System(Instructions, tag="system", tag_field="role", frozen=True):
    pass


class Developer(Instructions, tag="developer", tag_field="role", frozen=True):
    pass


class User(Strict, tag="user", tag_field="role", frozen=True):
    content: str | Annotated[list[TextPart | ImagePart | FilePart | AudioPart], Meta(min_length=1)]
    name: str | None = None


class Assistant(Strict, tag="assistant", tag_field="role", frozen=True):
    content: str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1)] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(min_length=1)] | None = None
    audio: SpokenBefore | None = None


class ToolResult(Strict, tag="tool", tag_field="role", frozen=True):
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    tool_call_id: Words
    name: str | None = None  # in no reference, but taken: OpenAI's own examples of tools send it


class Function(Strict, frozen=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionName(Strict, frozen=True):
    name: Words


class NamedTool(Strict, frozen=True):
    type: Literal["function"]
    function: FunctionName


class Schema(Strict, frozen=True):
    name: Words
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Strict, tag="text", frozen=True):
    pass


class JsonFormat(Strict, tag="json_object", frozen=True):
    pass


class SchemaFormat(Strict, tag="json_schema", frozen=True):
    json_schema: Schema


class StreamOptions(Strict, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Strict, kw_only=True, frozen=True):
    """What chat and plain completions have in common."""

    model: Words
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Replies | None = None
    max_tokens: Tokens | None = None
    stop: Stop | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


class Chat(Sampled, kw_only=True, frozen=True):
    messages: Annotated[list[System | Developer | User | Assistant | ToolResult], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonFormat | SchemaFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    modalities: Annotated[list[Literal["text", "audio"]], Meta(min_length=1)] | None = None
    audio: AudioAsked | None = None


class Completion(Sampled, kw_only=True, frozen=True):
    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0 with an echo scores the prompt alone
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None


class Embedding(Strict, kw_only=True, frozen=True):
    model: Words
    input: Words | Annotated[list[Words | int | list[int]], Meta(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Tokens | None = None
    user: str | None = None


class Rerank(Strict, kw_only=True, frozen=True):
    model: Words
    query: Words
    documents: Annotated[list[Words], Meta(min_length=1, max_length=10_000)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens_per_doc: Tokens | None = None


class Pictures(Strict, kw_only=True, frozen=True):
    model: Words
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: str | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto"] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    output_format: Literal["png", "webp", "jpeg"] | None = None
    response_format: Literal["url", "b64_json"] | None = None
    stream: Literal[True] | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    user: str | None = None


class Reference(Strict, kw_only=True, frozen=True):
    image_url: Annotated[str, Meta(pattern="^(https://|data:image/(png|jpeg|webp);base64,)")]


class EditedJson(Pictures, kw_only=True, frozen=True):
    images: Annotated[list[Reference], Meta(min_length=1, max_length=16)]
    mask: Reference | None = None
    input_fidelity: Literal["high", "low"] | None = None


class Edited(Strict, kw_only=True, frozen=True):
    model: Words
    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    image: dict[str, Any] | Annotated[list[dict[str, Any]], Meta(min_length=2, max_length=16)]
    mask: dict[str, Any] | None = None
    markup: dict[str, Any] | None = None
    n: str | None = None
    stream: Literal["true"] | None = None
    partial_images: str | None = None
    quality: Literal["low", "medium", "high", "xhigh", "max", "auto"] | None = None
    input_fidelity: Literal["high", "low"] | None = None
    user: str | None = None


class Speech(Strict, kw_only=True, frozen=True):
    model: Words
    input: Annotated[str, Meta(min_length=1, max_length=4_096)]
    voice: str | dict[str, str]
    instructions: str | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["audio", "sse"] | None = None


class Written(Strict, kw_only=True, frozen=True):
    model: Words
    file: dict[str, Any]
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    temperature: str | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    include: list[Literal["logprobs"]] | None = None
    stream: Literal["true"] | None = None


SHAPES: dict[str, Any] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/embeddings": Embedding,
    "/v1/rerank": Rerank,
    "/v1/images/generations": Pictures,
    "/v1/images/edits": Edited,
    "/v1/audio/speech": Speech,
    "/v1/audio/transcriptions": Written,
    "/v1/audio/translations": Written,
}


def check_headers(headers: dict[str, str], has_body: bool) -> None:
    """Raise Violation for a header that is missing, odd, or leaked from a client."""
    if strange := sorted(headers.keys() - ALLOWED_HEADERS):
        raise Violation(f"Headers that no provider should see: {', '.join(strange)}.", code="leaked_header")
    if headers.get("user-agent", "").startswith(("OpenAI/", "AsyncOpenAI/")):
        raise Violation("The client's own user-agent came through.", code="leaked_header")
    if "authorization" not in headers:
        message = "You didn't provide an API key. You need to provide your API key in an Authorization header."
        raise Violation(message, status=401)
    if not headers["authorization"].startswith("Bearer sk-"):
        raise Violation("Incorrect API key provided.", code="invalid_api_key", status=401)
    kind = headers.get("content-type", "")
    if has_body and kind != "application/json" and not kind.startswith("multipart/form-data; boundary="):
        raise Violation("Content-Type must be application/json.", code="unsupported_content_type", status=415)


def check_body(path: str, body: bytes, content_type: str = "application/json") -> dict[str, Any]:
    """Return the decoded body, or raise Violation for whatever OpenAI would not take."""
    try:
        is_form = SHAPES[path] in (Written, Edited) and content_type != "application/json"
        plain = read_form(body, content_type) if is_form else json.loads(body, object_pairs_hook=_unique)
    except ValueError as exc:
        raise Violation(f"We could not parse the JSON body of your request: {exc}") from exc
    try:
        shape = EditedJson if SHAPES[path] is Edited and not is_form else SHAPES[path]
        request = msgspec.convert(plain, shape)
    except msgspec.ValidationError as exc:
        raise Violation(f"Invalid request: {exc}", code="invalid_request") from exc
    if isinstance(request, Sampled):
        _check_sampled(request)
    if isinstance(request, (Completion, Embedding)):
        _check_one_kind(request.input if isinstance(request, Embedding) else request.prompt)
    if isinstance(request, Chat):
        _check_chat(request, body)
        _check_turns(request)
    return plain


def read_form(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the fields of a form; of its files, name, type and SHA-256. Raises ValueError."""
    fields: dict[str, Any] = {}
    boundary = content_type.partition("boundary=")[2]
    with PushMultipartParser(boundary) as parser:
        for event in parser.parse(body):
            if isinstance(event, MultipartSegment):
                segment, data = event, bytearray()
            elif event is not None:
                data += event
            elif segment.filename is not None:
                file = {"name": segment.filename, "type": segment.content_type, "size": len(data)}
                file["sha256"] = hashlib.sha256(data).hexdigest()
                if segment.name.endswith("[]"):
                    fields.setdefault(segment.name[:-2], []).append(file)
                else:
                    fields = _unique([*fields.items(), (segment.name, file)])
            elif segment.name.endswith("[]"):
                fields.setdefault(segment.name[:-2], []).append(data.decode())
            else:
                fields = _unique([*fields.items(), (segment.name, data.decode())])
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return dict(pairs)


def _check_one_kind(texts: Any) -> None:
    if isinstance(texts, list) and len({type(item) for item in texts}) > 1:
        raise Violation("A list must be all strings, all token ids, or all lists of token ids.", "input")


def _check_sampled(request: Sampled) -> None:
    if request.stream_options is not None and not request.stream:
        raise Violation("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")


def _check_chat(request: Chat, body: bytes) -> None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise Violation("Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.")
    if request.top_logprobs is not None and not request.logprobs:
        raise Violation("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    for name in ("tool_choice", "parallel_tool_calls"):
        if getattr(request, name) is not None and not request.tools:
            raise Violation(f"'{name}' is only allowed when 'tools' are specified.", name)
    known = {tool.function.name for tool in request.tools or ()}
    if isinstance(request.tool_choice, NamedTool) and request.tool_choice.function.name not in known:
        raise Violation("'tool_choice' names a function that 'tools' does not have.", "tool_choice")
    if isinstance(request.response_format, JsonFormat) and b"json" not in _words(body):
        raise Violation("'messages' must contain the word 'json' to use a response_format of json_object.", "messages")


def _words(body: bytes) -> bytes:
    return json.dumps(json.loads(body)["messages"]).lower().encode()


def _check_turns(request: Chat) -> None:
    """Every tool message answers a call of the assistant turn before it, and every call is answered."""
    open_calls: set[str] = set()
    for place, message in enumerate(request.messages):
        param = f"messages.[{place}]"
        if isinstance(message, ToolResult):
            if message.tool_call_id not in open_calls:
                raise Violation("A 'tool' message must follow the assistant message that made its call.", param)
            open_calls.discard(message.tool_call_id)
            continue
        if open_calls:
            raise Violation(f"Tool calls without an answer: {', '.join(sorted(open_calls))}.", param)
        if isinstance(message, Assistant):
            said = (message.content, message.tool_calls, message.refusal, message.audio)
            if all(each is None for each in said):
                raise Violation("An assistant message needs 'content', 'tool_calls', 'refusal' or 'audio'.", param)
            open_calls = {call.id for call in message.tool_calls or ()}
    if open_calls:
        raise Violation(f"Tool calls without an answer: {', '.join(sorted(open_calls))}.", "messages")
