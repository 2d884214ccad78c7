# Requests in OpenAI's dialect: the decoded fields encoded again, and what our own engine is told beyond them.

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil, inf
from operator import attrgetter
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.upstreams.wire.base import Asking, UpstreamRequest
from gateway.upstreams.wire.short_ids import short_id
from gateway.upstreams.wire.unsayable import Unsayable, is_marked, leave_out_anthropics, refuse_unpriced
from protocol.chat import (
    PDF,
    AudioPart,
    ChatRequest,
    ContentPart,
    FilePart,
    Message,
    PdfFile,
    RefusalPart,
    StreamOptions,
)
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.inference import Generation, Request
from protocol.media.audio import Recording, SpeechRequest, TranscriptionRequest, TranslationRequest
from protocol.media.images import ImageEditRequest, ImageRequest, PictureFile
from protocol.serving.prompt_marks import PROMPT_MARKS
from router.prompt_size.pictures import images_of

# What our own engine understands beyond OpenAI's fields, and any caller may say.
ENGINE_FIELDS = frozenset(
    {"top_k", "min_p", "stop_token_ids", "ignore_eos", "min_tokens", "repetition_penalty"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"}
    | {"cache_salt"}
)
ENGINE_LACKS = ("verbosity", "prompt_cache_key")  # fields of a chat that it takes and that change nothing there

MOST_DEADLINE = 2**31 - 1  # milliseconds that our own engine takes for one
NEWER_LIMIT_SINCE = "2024-09-01"  # versions of Azure's API before this one refuse ``max_completion_tokens``, in words
JSON_HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
SomeRequest = TypeVar("SomeRequest", bound=Request)
OF_TOOLS, NOT_SAID = attrgetter("tools", "tool_choice", "parallel_tool_calls"), (None, None, None)
LONGEST_ID = 64  # characters of each of these
NAMED = ("user", "safety_identifier", "prompt_cache_key")
UNNAMED = "document.pdf"  # OpenAI wants a name with each file
PATHS: dict[type, str] = {
    ChatRequest: "/chat/completions",
    CompletionRequest: "/completions",
    EmbeddingRequest: "/embeddings",
    RerankRequest: "/rerank",
    ImageRequest: "/images/generations",
    ImageEditRequest: "/images/edits",
    SpeechRequest: "/audio/speech",
    TranscriptionRequest: "/audio/transcriptions",
    TranslationRequest: "/audio/translations",
}


def write_request(asking: Asking) -> UpstreamRequest:
    """Return the request, the model under its upstream name. Raises UpstreamUnable for tools of Claude's own."""
    request, model, dropped = asking.request, asking.target.model.upstream_model, [*asking.left_out]
    path = PATHS[type(request)]
    if isinstance(request, Generation):  # first, being nearly all
        options = StreamOptions(include_usage=True) if asking.streams and asking.quirks.stream_options else None
        request = replace(request, model=model, stream=asking.streams or None, stream_options=options)
    elif isinstance(request, TranscriptionRequest):
        return _transcription_form(replace(request, model=model), asking, path)
    elif isinstance(request, RerankRequest):  # texts by their places are ours to tell
        request = replace(request, model=model, documents=tuple(request.texts), return_documents=None, user=None)
    elif isinstance(request, SpeechRequest):  # what is priced by tokens is counted in events alone
        is_counted = asking.target.model.price.character is None
        request = replace(request, model=model, stream_format="sse" if is_counted else None, user=None)
    else:
        if isinstance(request, ImageRequest):
            refuse_unpriced(asking.target.model.price.pictures, request.quality, request.size)
            request = replace(request, stream=asking.streams or None)
        request = replace(request, model=model)
    if isinstance(request, ChatRequest):
        request = _plain_chat(request, asking, dropped)
    if not asking.self_hosted:
        request = with_short_ids(request)
    if isinstance(request, ImageEditRequest):
        return _edit(request, asking, path)
    headers = JSON_HEADERS | credentials(asking)
    extra: dict[str, Any] = dict(asking.extra)
    if asking.self_hosted:
        headers |= {"x-tenant": asking.tenant, "x-weight": str(asking.weight), "x-tier": asking.tier}
        if asking.priority != "normal":
            headers["x-priority"] = asking.priority
        if asking.time_left is not None:
            headers["x-deadline-ms"] = _milliseconds(asking.time_left)
        if asking.fails_over:
            headers["x-fails-over"] = "1"
        headers["x-gateway-inference-fairness-id"] = asking.tenant  # what routers of fleets read between us and engines
        headers["x-gateway-destination-endpoint"] = urlsplit(asking.target.endpoint.base_url).netloc
        if asking.session:
            headers["x-session-id"] = asking.session
        if asking.starts_within < inf:
            headers["x-llm-d-slo-ttft-ms"] = _milliseconds(asking.starts_within)
        if asking.marks:
            headers[PROMPT_MARKS] = asking.marks
        if isinstance(request, Generation):
            extra["return_token_ids"] = True
            extra["return_gpu_seconds"] = True
            if request.seed is None:
                request = replace(request, seed=asking.seed)
            if asking.resume is not None and asking.resume.token_ids:
                extra["resume_token_ids"] = asking.resume.token_ids
                extra["resume_text_chars"] = asking.resume.text_chars
    return UpstreamRequest("POST", url_of(asking, path), headers, encode_with(request, extra), dropped=tuple(dropped))


def _milliseconds(seconds: float) -> str:
    return str(min(max(1, ceil(1000 * seconds)), MOST_DEADLINE))


def write_count(asking: Asking) -> UpstreamRequest:
    """Return the request for the tokens of a chat as an engine's template writes it, which stands beside its API."""
    assert isinstance(asking.request, ChatRequest)
    chat = _plain_chat(asking.request, asking, [])
    told: dict[str, Any] = {"model": asking.target.model.upstream_model, "messages": chat.messages}
    if chat.tools and chat.tool_choice != "none":
        told["tools"] = chat.tools
    if asking.self_hosted and chat.reasoning_effort is not None:
        told["reasoning_effort"] = chat.reasoning_effort
    url = asking.target.endpoint.base_url.removesuffix("/v1") + "/tokenize"
    return UpstreamRequest("POST", url, JSON_HEADERS | credentials(asking), msgspec.json.encode(told))


def _transcription_form(request: TranscriptionRequest, asking: Asking, path: str) -> UpstreamRequest:
    """Return a recording with what is asked of it."""
    told_as, streams = told_format(request, asking), asking.streams or None
    told = replace(request, response_format=told_as, stream=streams, user=None)
    return _form(told, ("file",), [("file", request.file)], asking, path)


def _edit(request: ImageEditRequest, asking: Asking, path: str) -> UpstreamRequest:
    """Return what makes pictures of others: a form, or JSON where some of these lie at addresses."""
    drawn = [name for name in ("mask", "markup") if getattr(request, name) is not None]
    if not any(file.url for file in request.files):
        names = (*["image[]" if len(request.image) > 1 else "image"] * len(request.image), *drawn)
        return _form(request, ("image", *drawn), zip(names, request.files, strict=True), asking, path)
    if "markup" in drawn:
        raise Unsayable("A 'markup' goes with pictures that come along: send them as data URLs.", param="markup")
    data = iter(asking.uploads)
    refs = [{"image_url": file.url or _data_url(file, next(data))} for file in request.files]
    told = {name: value for name, value in msgspec.to_builtins(request).items() if name not in ("image", *drawn)}
    told |= {"images": refs[: len(request.image)], **dict(zip(drawn, refs[len(request.image) :], strict=True))}
    body = msgspec.json.encode({**told, **asking.extra})
    return UpstreamRequest(
        "POST", url_of(asking, path), JSON_HEADERS | credentials(asking), body, dropped=asking.left_out
    )


def _data_url(file: PictureFile, data: memoryview) -> str:
    return f"data:{file.media_type};base64,{base64.b64encode(data).decode()}"


def _form(
    request: Struct,
    without: Sequence[str],
    files: Iterable[tuple[str, Recording | PictureFile]],
    asking: Asking,
    path: str,
) -> UpstreamRequest:
    """Return a request as multipart/form-data (RFC 7578): its fields, ``without`` those of its files, and these."""
    told = {name: value for name, value in msgspec.to_builtins(request).items() if name not in without}
    boundary, fields = secrets.token_hex(16), list[str]()  # that no part can have
    for name, value in {**told, **asking.extra}.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            text = each if isinstance(each, str) else msgspec.json.encode(each).decode()
            ending = "[]" if isinstance(value, list | tuple) else ""
            fields.append(f'--{boundary}\r\ncontent-disposition: form-data; name="{name}{ending}"\r\n\r\n{text}\r\n')
    rest = list[bytes | memoryview]()
    for (name, file), data in zip(files, asking.uploads, strict=True):
        named = f'form-data; name="{name}"; filename="{file.name}"'
        head = f"--{boundary}\r\ncontent-disposition: {named}\r\ncontent-type: {file.media_type}\r\n\r\n"
        rest += [head.encode(), data, b"\r\n"]
    headers = {"content-type": f"multipart/form-data; boundary={boundary}", "accept-encoding": "identity"}
    return UpstreamRequest(
        "POST",
        url_of(asking, path),
        headers | credentials(asking),
        "".join(fields).encode(),
        dropped=asking.left_out,
        rest=(*rest, f"--{boundary}--\r\n".encode()),
    )


def told_format(request: TranscriptionRequest, asking: Asking) -> str | None:
    """Return the format that an upstream is asked for: one that says how long the recording is, or its tokens. Texts
    and subtitles say neither, and are written of it here."""
    is_by_seconds = asking.target.model.price.audio_second is not None
    if request.response_format in ("srt", "vtt") or (isinstance(request, TranslationRequest) and is_by_seconds):
        return "verbose_json"
    return "json" if request.response_format == "text" else request.response_format


def credentials(asking: Asking) -> dict[str, str]:
    """Return the header that says who asks: of Azure's deployments a key has one of its own."""
    if asking.api_key and asking.api_version:
        return {"api-key": asking.api_key}
    secret = asking.token or asking.api_key
    return {"authorization": f"Bearer {secret}"} if secret else {}


def url_of(asking: Asking, path: str) -> str:
    """Return where a request goes: below the base URL, or, at Azure, to a deployment in a version of the API."""
    base_url = asking.target.endpoint.base_url
    if asking.api_version is None:
        return base_url + path
    deployment, version = (quote(name, safe="") for name in (asking.target.model.upstream_model, asking.api_version))
    return f"{base_url}/openai/deployments/{deployment}{path}?api-version={version}"


def _plain_chat(request: ChatRequest, asking: Asking, dropped: list[str]) -> ChatRequest:
    """Return a chat as the target is asked it; the names of what it does not know go into ``dropped``."""
    if not asking.self_hosted and (limit := request.output_limit) is not None:
        is_newer = asking.quirks.output_limit == "max_completion_tokens"
        is_newer = is_newer and (asking.api_version is None or asking.api_version >= NEWER_LIMIT_SINCE)
        limits = (None, limit) if is_newer else (limit, None)
        if (request.max_tokens, request.max_completion_tokens) != limits:
            request = replace(request, max_tokens=limits[0], max_completion_tokens=limits[1])
    if [True for message in request.messages if message.thinking_blocks or type(message.content) is tuple]:
        dropped += _marks_in(request.messages)
        _refuse_pdfs(request, asking)
        request = replace(request, messages=tuple(map(_plain, request.messages)))
    if asking.self_hosted:
        dropped += [name for name in ENGINE_LACKS if getattr(request, name)]
    if not request.tools and OF_TOOLS(request) != NOT_SAID:  # what is said of none would be refused
        request = replace(request, tools=None, tool_choice=None, parallel_tool_calls=None)
    if request.top_logprobs == 0 and not request.logprobs:  # nothing of nothing, as clients say it
        request = replace(request, top_logprobs=None)
    if (native := asking.native) is not None:
        dropped += leave_out_anthropics(native)
        if not asking.quirks.effort and request.reasoning_effort is not None:
            dropped.append("thinking")
            request = replace(request, reasoning_effort=None)
    return request


def with_short_ids(request: SomeRequest) -> SomeRequest:
    """Return a request whose names of users and caches are as short as OpenAI, and others, want them."""
    said = {name: value for name in NAMED if (value := getattr(request, name, None)) and len(value) > LONGEST_ID}
    return replace(request, **{name: short_id(value, LONGEST_ID) for name, value in said.items()}) if said else request


def _refuse_pdfs(request: ChatRequest, asking: Asking) -> None:
    """Raise Unsayable for PDFs where the target reads none, or where one does not come along."""
    pdfs = [image for image in images_of(request) if isinstance(image, PdfFile)]
    if pdfs and (asking.self_hosted or not asking.quirks.pdfs):
        words = "The model that answers here reads no PDFs. Send their text, or pictures of their pages."
        raise Unsayable(words, param="messages")
    if not all(pdf.url.startswith(PDF) for pdf in pdfs):
        raise Unsayable("The model that answers here fetches no PDFs. Send them in base64.", param="messages")


def _marks_in(messages: Sequence[Message]) -> Iterator[str]:
    """Yield the names of what ``_plain`` takes out of messages."""
    if any(message.thinking_blocks for message in messages):
        yield "thinking_blocks"
    if any(map(is_marked, messages)):
        yield "cache_control"


def _plain(message: Message) -> Message:
    """Return a message without what only Anthropic's models understand, signed thinking and marks for the cache; its
    files with the names that they need to have."""
    if message.thinking_blocks:
        message = replace(message, thinking_blocks=None)
    if is_marked(message) or _has_files(message):
        assert isinstance(message.content, tuple)
        message = replace(message, content=tuple(map(_plain_part, message.content)))
    return message


def _has_files(message: Message) -> bool:
    return isinstance(message.content, tuple) and any(isinstance(part, FilePart) for part in message.content)


def _plain_part(part: ContentPart) -> ContentPart:
    match part:
        case RefusalPart() | AudioPart():
            return part
        case FilePart(file):
            return FilePart(replace(file, filename=file.filename or UNNAMED))
    return replace(part, cache_control=None)


def encode_with(request: Struct, extra: Mapping[str, Any]) -> bytes:
    """Return a request as JSON with more fields than it has."""
    body = msgspec.json.encode(request)
    return body[:-1] + b"," + msgspec.json.encode(extra)[1:] if extra else body
