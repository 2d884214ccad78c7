# What clients may say in a conversation: the events of OpenAI's Realtime API (as it is since 2025), decoded, checked
# and encoded again. What could cost what no hold covers is refused: other models, hosted tools, prompts that lie at the
# provider, transcripts by a model of their own. So is what is not known here.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.dialects.checks import require
from protocol.decoding import decode
from protocol.errors import Unshown, UnsupportedParameter

Text = str | UnsetType
Whatever = Raw | UnsetType  # passed on as it is: it chooses between things that cost the same
Modalities = list[Literal["text", "audio"]] | UnsetType
Role = Literal["system", "user", "assistant", "tool"]
Output = int | Literal["inf"] | UnsetType  # tokens


class _Known(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An object of which every field is known."""


class Format(_Known, frozen=True, kw_only=True):
    """How sound is written."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
    rate: int | UnsetType = UNSET


class AudioInput(_Known, frozen=True, kw_only=True):
    """How the conversation hears."""

    format: Format | UnsetType = UNSET
    noise_reduction: Whatever = UNSET
    turn_detection: Whatever = UNSET
    transcription: dict[str, Any] | UnsetType | None = UNSET


class AudioOutput(_Known, frozen=True, kw_only=True):
    """How it speaks."""

    format: Format | UnsetType = UNSET
    voice: Whatever = UNSET
    speed: float | UnsetType = UNSET


class Audio(_Known, frozen=True, kw_only=True):
    """Both."""

    input: AudioInput | UnsetType = UNSET
    output: AudioOutput | UnsetType = UNSET


class Tool(Unshown, _Known, frozen=True, kw_only=True):
    """A function of the client's."""

    type: str
    name: Text = UNSET
    description: Text = UNSET
    parameters: Whatever = UNSET
    # Of tools that the upstream runs, which are refused by name:
    server_label: Whatever = UNSET
    server_url: Whatever = UNSET
    connector_id: Whatever = UNSET
    server_description: Whatever = UNSET
    authorization: Whatever = UNSET
    headers: Whatever = UNSET
    allowed_tools: Whatever = UNSET
    require_approval: Whatever = UNSET


class Part(_Known, frozen=True, kw_only=True):
    """A part of a message."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio", "text", "audio"]
    text: str | UnsetType | None = UNSET
    audio: str | UnsetType | None = UNSET
    transcript: str | UnsetType | None = UNSET
    image_url: Text = UNSET
    detail: Text = UNSET


class Item(_Known, frozen=True, kw_only=True):
    """A turn, a call of a function, or its result."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"]
    id: Text = UNSET
    object: Text = UNSET
    status: Text = UNSET
    role: Literal["user", "assistant", "system"] | UnsetType = UNSET
    content: list[Part] | UnsetType = UNSET
    call_id: Text = UNSET
    name: Text = UNSET
    arguments: Text = UNSET
    output: Text = UNSET


class _Settings(_Known, frozen=True, kw_only=True):
    """What a session and one response can say alike."""

    instructions: Text = UNSET
    output_modalities: Modalities = UNSET
    max_output_tokens: Output = UNSET
    audio: Audio | UnsetType = UNSET
    tools: list[Tool] | UnsetType = UNSET
    tool_choice: Whatever = UNSET
    parallel_tool_calls: bool | UnsetType = UNSET
    reasoning: Whatever = UNSET
    prompt: dict[str, Any] | UnsetType | None = UNSET


class Session(_Settings, frozen=True, kw_only=True):
    """How a conversation goes on."""

    type: Literal["realtime"]
    model: Text = UNSET
    truncation: Whatever = UNSET
    tracing: Any = UNSET


class ResponseSettings(_Settings, frozen=True, kw_only=True):
    """One response."""

    conversation: Literal["auto", "none"] | UnsetType = UNSET
    input: list[Item] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType | None = UNSET


class _Event(_Known, frozen=True, kw_only=True, tag_field="type"):
    event_id: Text = UNSET


class SessionUpdate(_Event, frozen=True, kw_only=True, tag="session.update"):
    """Change the session."""

    session: Session


class AudioAppend(_Event, frozen=True, kw_only=True, tag="input_audio_buffer.append"):
    """Sound, in base64."""

    audio: str


class AudioCommit(_Event, frozen=True, kw_only=True, tag="input_audio_buffer.commit"):
    """What was said is a turn."""


class AudioClear(_Event, frozen=True, kw_only=True, tag="input_audio_buffer.clear"):
    """Forget what was said."""


class ItemCreate(_Event, frozen=True, kw_only=True, tag="conversation.item.create"):
    """Add an item."""

    item: Item
    previous_item_id: str | UnsetType | None = UNSET


class ItemRetrieve(_Event, frozen=True, kw_only=True, tag="conversation.item.retrieve"):
    """Read an item."""

    item_id: str


class ItemTruncate(_Event, frozen=True, kw_only=True, tag="conversation.item.truncate"):
    """Forget what was not heard of an item."""

    item_id: str
    content_index: int
    audio_end_ms: int


class ItemDelete(_Event, frozen=True, kw_only=True, tag="conversation.item.delete"):
    """Forget an item."""

    item_id: str


class ResponseCreate(_Event, frozen=True, kw_only=True, tag="response.create"):
    """Ask for a response."""

    response: ResponseSettings | UnsetType = UNSET


class ResponseCancel(_Event, frozen=True, kw_only=True, tag="response.cancel"):
    """End a response."""

    response_id: Text = UNSET


ClientEvent = (
    SessionUpdate
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ItemCreate
    | ItemRetrieve
    | ItemTruncate
    | ItemDelete
    | ResponseCreate
    | ResponseCancel
)


def read_event(message: bytes, model: str, upstream_model: str, most_output: int) -> ClientEvent:
    """Return what a client says, as its upstream may be told it: the model under its name there, no output limit above
    ``most_output``. ``model`` is the name that the client asked for. Raises BadRequest and its kin."""
    event: ClientEvent = decode(message, ClientEvent)  # type: ignore[arg-type]  # a union of types
    match event:
        case SessionUpdate(session=session):
            return replace(event, session=checked_session(session, model, upstream_model, most_output))
        case ResponseCreate(response=ResponseSettings() as asked):
            _check_items(asked.input or [], "response.input")
            return replace(event, response=_checked(asked, "response", most_output))
        case ItemCreate(item=item):
            _check_items([item], "item")
    return event


def encode_event(event: ClientEvent) -> bytes:
    """Return an event as it goes to the upstream."""
    return msgspec.json.encode(event)


def texts_in(event: ClientEvent) -> Iterator[tuple[Role, str]]:
    """Yield the words that an event brings, and who says them: instructions are the system's, results a tool's."""
    match event:
        case SessionUpdate(session=said):
            yield from _settings_texts(said)
        case ResponseCreate(response=ResponseSettings() as asked):
            yield from _settings_texts(asked)
            for item in asked.input or ():
                yield from _item_texts(item)
        case ItemCreate(item=item):
            yield from _item_texts(item)


def sound_in(event: ClientEvent) -> int:
    """Return how many characters of sound an event brings, in base64."""
    match event:
        case AudioAppend(audio=audio):
            return len(audio)
        case ItemCreate(item=item):
            items = [item]
        case ResponseCreate(response=ResponseSettings() as asked):
            items = asked.input or []
        case _:
            return 0
    return sum(len(part.audio) for item in items for part in item.content or () if part.audio)


def _settings_texts(said: _Settings) -> Iterator[tuple[Role, str]]:
    if said.instructions:
        yield "system", said.instructions
    if said.tools:
        yield "system", msgspec.json.encode(said.tools).decode()


def _item_texts(item: Item) -> Iterator[tuple[Role, str]]:
    for part in item.content or ():
        yield from ((item.role or "user", text) for text in (part.text, part.transcript) if text)
    if item.arguments:
        yield "assistant", item.arguments
    if item.output:
        yield "tool", item.output


def checked_session(session: Session, model: str, upstream_model: str, most_output: int) -> Session:
    """Return a session as its upstream may be told it. Raises BadRequest and its kin."""
    if session.model is not UNSET:
        words = f"A conversation keeps the model that it was opened with, '{model}'. Open another connection."
        require(session.model in (model, upstream_model), "session.model", words)
        session = replace(session, model=upstream_model)
    if session.tracing not in (None, UNSET):
        words = "Traces at the provider are not kept: leave 'session.tracing' out."
        raise UnsupportedParameter(words, param="session.tracing")
    return _checked(session, "session", most_output)


def _checked(said: Any, where: str, most_output: int) -> Any:
    """Return settings with an output limit that is held for. Raises UnsupportedParameter."""
    if said.prompt not in (None, UNSET):
        words = "Prompts that lie at the provider are not supported: say it in 'instructions'."
        raise UnsupportedParameter(words, param=f"{where}.prompt")
    heard = said.audio.input if said.audio else UNSET
    if heard and heard.transcription:
        words = "Transcripts of what was heard are made by a model of their own, which is not held for: leave it out."
        raise UnsupportedParameter(words, param=f"{where}.audio.input.transcription")
    for place, tool in enumerate(said.tools or ()):
        if tool.type != "function":
            words = f"Tools of the type '{tool.type[:40]}' are not supported here: send functions."
            raise UnsupportedParameter(words, param=f"{where}.tools[{place}]")
    limit = said.max_output_tokens
    if isinstance(limit, int):
        require(limit > 0, f"{where}.max_output_tokens", f"'{where}.max_output_tokens' must be 1 or more.")
        return replace(said, max_output_tokens=min(limit, most_output))
    return said


def _check_items(items: list[Item], where: str) -> None:
    for item in items:
        for part in item.content or ():
            words = f"A picture in '{where}' is a data URL: none is fetched."
            require(not part.image_url or part.image_url.startswith("data:image/"), f"{where}.content", words)
