# What is not words, in OpenAI's shapes: pictures, speech, and recordings written down. What is checked of a request,
# and how its reply is written.

from __future__ import annotations

import base64
from typing import Any

import msgspec
from msgspec import Raw

from billing.core.money import to_text
from gateway.dialects.checks import check_tags, require, require_between, require_short
from gateway.dialects.endpoint import ApiEndpoint, Asked, ReplyFacts, WholeWriter
from protocol.completions import CompletionRequest
from protocol.errors import ServiceError, UnsupportedParameter
from protocol.events import Delta, Event, UsageReport
from protocol.inference import WholeReply
from protocol.media.audio import (
    SpeechRequest,
    TranscriptionReply,
    TranscriptionRequest,
    TranslationRequest,
    srt_of,
    vtt_of,
)
from protocol.media.images import (
    MOST_EDITED,
    MOST_IMAGES,
    MOST_PARTIAL,
    ImageEditRequest,
    ImageReply,
    ImageRequest,
    StreamedPicture,
)
from protocol.sse import encode_event
from protocol.usage import Usage

LONGEST_PROMPT = 32_000  # characters, as OpenAI has it
ELSEWHERE = frozenset({"image", "images", "url", "urls", "image_url", "image_urls"})
LONGEST_TEXT = 4_096  # characters of what is said, as OpenAI has it, and of how
MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def check_images(request: ImageRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not, and what comes in pieces. Raises BadRequest."""
    require(request.prompt != "", "prompt", "'prompt' must not be empty.")
    require_short(request.prompt, LONGEST_PROMPT, "prompt")
    require_between(request.n, 1, MOST_IMAGES, "n")
    require_between(request.output_compression, 0, 100, "output_compression")
    require(not request.stream or request.number == 1, "n", "A stream is of one picture: leave 'n' out, or 'stream'.")
    require_between(request.partial_images, 0, MOST_PARTIAL, "partial_images")
    words = "What is not whole yet comes in a stream alone: send 'stream': true, or leave 'partial_images' out."
    require(request.stream or not request.partial_images, "partial_images", words)
    check_tags(request)


def check_edit(request: ImageEditRequest) -> None:
    """Refuse what OpenAI's API would of an edit, once it had all of it. Raises BadRequest."""
    check_images(request)
    require(request.mask is None or request.markup is None, "markup", "Send 'mask' or 'markup', not both.")
    first = request.image[0].pixels
    for name, drawn in (("mask", request.mask), ("markup", request.markup)):
        if first and drawn is not None and drawn.pixels:  # a camera's picture may lie on its side
            sizes = " × ".join(map(str, drawn.pixels)), " × ".join(map(str, first))
            words = f"'{name}' is {sizes[0]} pixels large: it must be as large as the first picture, {sizes[1]}."
            require(sorted(drawn.pixels) == sorted(first), name, words)


def asked_edit(request: ImageEditRequest, extra: dict[str, Any]) -> Asked:
    """Return what an edit asks. Raises UnsupportedParameter for pictures in fields that engines have beside OpenAI's:
    nothing would be held for these, and their addresses are not looked at."""
    for name in ELSEWHERE & extra.keys():
        if extra[name] is not None:
            words = f"'{name}' brings no pictures here. Send them in 'image' of a form, or in 'images' of JSON."
            raise UnsupportedParameter(words, param=name)
    return Asked(request, extra)


class ImageWriter(WholeWriter):
    """Writes pictures: all at once, or one as it becomes whole."""

    _whole: StreamedPicture | None = None

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the events for pictures that came together; the whole one goes with what it took."""
        out = []
        for event in events:
            match event:
                case Delta(picture=StreamedPicture(partial_image_index=None) as picture):
                    self._whole = picture
                case Delta(picture=StreamedPicture() as picture):
                    out.append(self._event("partial_image", picture))
                case UsageReport(usage) if self._whole is not None:
                    told = {"model_used": reply.target.model.name, "usage": _picture_usage(reply, usage)}
                    out.append(self._event("completed", self._whole, **told))
        return b"".join(out)

    def error(self, error: ServiceError) -> bytes:
        """Return the event that tells of a broken reply."""
        return _event({"type": "error", **error.body()})

    def _event(self, what: str, picture: StreamedPicture, **more: Any) -> bytes:
        kind = "image_edit" if isinstance(self._request, ImageEditRequest) else "image_generation"
        said = {name: value for name, value in msgspec.structs.asdict(picture).items() if value not in (None, Raw())}
        return _event({"type": f"{kind}.{what}", "created_at": self._created, **said, **more})

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the pictures, what the upstream says of them, and what they cost."""
        assert isinstance(whole, ImageReply)
        told: dict[str, Any] = msgspec.structs.asdict(whole)
        return msgspec.json.encode(
            {
                "created": self._created,
                "data": told.pop("images"),
                **{name: value for name, value in told.items() if value is not None},
                "model_used": reply.target.model.name,
                "usage": _picture_usage(reply, usage),
            }
        )


def _picture_usage(reply: ReplyFacts, usage: Usage) -> dict[str, Any]:
    seen = usage.image_input_tokens
    details = {"text_tokens": usage.input_tokens - seen, "image_tokens": seen}
    return {"input_tokens_details": details, **_tokens(reply, usage)}


PICTURES = ApiEndpoint(
    path="/v1/images/generations",
    name="images",
    operation="create_image",
    summary="Make pictures",
    description="Return pictures of what the prompt says, in base64 or where they lie.",
    body_type=ImageRequest,
    check=check_images,
    writer=ImageWriter,
    is_for_batches=False,
    route_field="prompt",
    route_signs=frozenset({*ImageRequest.__struct_fields__} - {*CompletionRequest.__struct_fields__}),
)


EDITS = ApiEndpoint(
    path="/v1/images/edits",
    name="images.edits",
    operation="edit_image",
    summary="Edit pictures",
    description="Return pictures made of up to 16 others as the prompt says, in base64 or where they lie. JSON, with "
    "`images` and `mask` as `image_url`, is taken in the form's place.",
    body_type=ImageEditRequest,
    check=check_edit,
    translate=asked_edit,
    writer=ImageWriter,
    files={"image": MOST_EDITED, "mask": 1, "markup": 1},
    takes_json=True,
    is_for_batches=False,
    route_field=None,
)


def check_speech(request: SpeechRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(request.input.strip() != "", "input", "'input' must not be empty.")
    for name in ("input", "instructions"):
        require_short(getattr(request, name), LONGEST_TEXT, name, " Send it in parts.")
    require_between(request.speed, 0.25, 4.0, "speed")
    check_tags(request)


def media_type(request: SpeechRequest) -> str | None:
    """Return what the audio is; ``None`` where it is wanted in events."""
    return None if request.stream_format == "sse" else MEDIA_TYPES[request.response_format or "mp3"]


class SpeechWriter:
    """Writes audio as it comes, or events that hold it."""

    def __init__(self, request: SpeechRequest, request_id: str, created: int) -> None:
        self._has_events = request.stream_format == "sse"

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Nothing comes whole."""
        raise AssertionError("speech comes in pieces")

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the audio of events that came together, and at the end, in an event, what it took."""
        audio = b"".join([event.audio for event in events if isinstance(event, Delta)])
        if not self._has_events:
            return audio
        out = [_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})] if audio else []
        for event in events:
            if isinstance(event, UsageReport):
                out.append(_event({"type": "speech.audio.done", "usage": _tokens(reply, event.usage)}))
        return b"".join(out)

    def error(self, error: ServiceError) -> bytes:
        """Return the event that tells of a broken reply; nothing where bytes of audio can only end too soon."""
        return _event({"type": "error", **error.body()}) if self._has_events else b""


def _event(told: dict[str, object]) -> bytes:
    return encode_event(msgspec.json.encode(told))


SPEECH = ApiEndpoint(
    path="/v1/audio/speech",
    name="speech",
    operation="create_speech",
    summary="Say a text",
    description="Return a text as audio, byte by byte as it is made, or in events (``stream_format: sse``).",
    body_type=SpeechRequest,
    check=check_speech,
    writer=SpeechWriter,
    media_type=media_type,
    is_for_batches=False,
    route_field="input",
    route_signs=frozenset({"voice", "stream_format", "speed"}),
)


def check_transcription(request: TranscriptionRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require_between(request.temperature, 0, 1, "temperature")
    require_short(request.prompt, LONGEST_TEXT, "prompt")
    is_plain = not request.stream or request.response_format in (None, "json", "text")
    require(is_plain, "stream", "A stream has words alone: leave 'response_format' out, or 'stream'.")
    check_tags(request)


def text_type(request: TranscriptionRequest) -> str | None:
    """Return what an answer is that is no JSON."""
    is_text = request.response_format in ("text", "srt", "vtt") and not request.stream
    return "text/plain; charset=utf-8" if is_text else None


class TranscriptionWriter:
    """Writes what was said: as its upstream tells it, as a text or subtitles, or in events."""

    def __init__(self, request: TranscriptionRequest, request_id: str, created: int) -> None:
        self._format = request.response_format
        self._said: list[str] = []

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return what was said in the form that was asked for; JSON has what it cost."""
        assert isinstance(whole, TranscriptionReply)
        match self._format:
            case "text":
                return (whole.text.rstrip("\n") + "\n").encode()
            case "srt":
                return srt_of(whole.segments).encode()
            case "vtt":
                return vtt_of(whole.segments).encode()
        told: dict[str, Any] = msgspec.json.decode(whole.told)
        if self._format != "verbose_json" and "segments" in told:  # it was asked for more, for the count of seconds
            told = {"text": whole.text}
        told["usage"] = _usage(reply, usage)
        return msgspec.json.encode({**told, "model_used": reply.target.model.name})

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Return the events for what came together, and all of the text at the end."""
        out = []
        for event in events:
            match event:
                case Delta(text=text, logprobs=logprobs) if text:
                    self._said.append(text)
                    scores = {} if logprobs is None else {"logprobs": logprobs}
                    out.append(_event({"type": "transcript.text.delta", "delta": text, **scores}))
                case UsageReport(usage):
                    told = {"text": "".join(self._said), "usage": _usage(reply, usage)}
                    out.append(_event({"type": "transcript.text.done", **told}))
        return b"".join(out)

    def error(self, error: ServiceError) -> bytes:
        """Return the event that tells of a broken reply."""
        return _event({"type": "error", **error.body()})


def _usage(reply: ReplyFacts, usage: Usage) -> dict[str, Any]:
    """Return the count that was charged: seconds where they have a price, else tokens."""
    if usage.audio_seconds:
        cost = to_text(reply.record.cost_nanousd)
        return {"type": "duration", "seconds": usage.audio_seconds, "cost_usd": cost}
    return {"type": "tokens", **_tokens(reply, usage)}


def _tokens(reply: ReplyFacts, usage: Usage) -> dict[str, Any]:
    counts = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
    return {**counts, "total_tokens": usage.total_tokens, "cost_usd": to_text(reply.record.cost_nanousd)}


TRANSCRIPTIONS, TRANSLATIONS = (
    ApiEndpoint(
        path=f"/v1/audio/{name}",
        name=name,
        operation=operation,
        summary=summary,
        description="Return what a recording says, as JSON, text or subtitles, or as a stream of events.",
        body_type=kind,
        check=check_transcription,
        writer=TranscriptionWriter,
        media_type=text_type,
        files={"file": 1},
        is_for_batches=False,
        route_field=None,
    )
    for name, operation, summary, kind in (
        ("transcriptions", "create_transcription", "Write down a recording", TranscriptionRequest),
        ("translations", "create_translation", "Write down a recording in English", TranslationRequest),
    )
)
