# What a request needs of a model: read from the request once, then compared with each target.

from __future__ import annotations

from protocol.chat import AudioPart, ChatRequest, FilePart, ImagePart, JsonObjectFormat, JsonSchemaFormat
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.inference import Request
from protocol.media.audio import RealtimeRequest, SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageRequest
from router.catalog.targets import Capability, ModelSpec

# The field of a request that asks for each capability, for the ``param`` of a refusal.
FIELD_OF = {
    Capability.CHAT: "model",
    Capability.COMPLETIONS: "model",
    Capability.EMBEDDINGS: "model",
    Capability.RERANK: "model",
    Capability.IMAGES: "model",
    Capability.SPEECH: "model",
    Capability.TRANSCRIPTION: "model",
    Capability.REALTIME: "model",
    Capability.TOOLS: "tools",
    Capability.JSON: "response_format",
    Capability.LOGPROBS: "logprobs",
    Capability.VISION: "messages",
    Capability.AUDIO: "messages",
    Capability.VOICE: "modalities",
}

# What adds to chats, and our own engines say of themselves; an endpoint of its own (embeddings, speech, …) is offered
# where the file says so.
TOLD_BY_ENGINES = frozenset((Capability.TOOLS, Capability.VISION))

_CHAT_ALONE = frozenset({Capability.CHAT})  # what most requests need


def needed_capabilities(request: Request) -> frozenset[Capability]:
    """Return every capability that a model must have to serve the request, its endpoint kind among them."""
    match request:
        case ChatRequest():
            needs = _chat_needs(request)
            return _CHAT_ALONE if len(needs) == 1 else frozenset(needs)
        case CompletionRequest():
            logprobs = (Capability.LOGPROBS,) if request.logprobs is not None else ()
            return frozenset((Capability.COMPLETIONS, *logprobs))
        case EmbeddingRequest():
            return frozenset((Capability.EMBEDDINGS,))
        case RerankRequest():
            return frozenset((Capability.RERANK,))
        case ImageRequest():
            return frozenset((Capability.IMAGES,))
        case SpeechRequest():
            return frozenset((Capability.SPEECH,))
        case TranscriptionRequest():
            return frozenset((Capability.TRANSCRIPTION,))
        case RealtimeRequest():
            return frozenset((Capability.REALTIME,))


def missing_capabilities(needed: frozenset[Capability], model: ModelSpec) -> list[Capability]:
    """Return what the model lacks, in the order in which the capabilities are defined."""
    return [capability for capability in Capability if capability in needed and capability not in model.capabilities]


def _chat_needs(request: ChatRequest) -> list[Capability]:
    needs = [Capability.CHAT]
    if request.tools:
        needs.append(Capability.TOOLS)
    if isinstance(request.response_format, (JsonObjectFormat, JsonSchemaFormat)):
        needs.append(Capability.JSON)
    if request.logprobs or request.top_logprobs:
        needs.append(Capability.LOGPROBS)
    if request.modalities:
        needs.append(Capability.VOICE)
    for message in request.messages:
        content = message.content
        if isinstance(content, tuple):
            if any(isinstance(part, ImagePart | FilePart) for part in content):
                needs.append(Capability.VISION)
            if any(isinstance(part, AudioPart) for part in content):
                needs.append(Capability.AUDIO)
        if message.audio is not None:
            needs.append(Capability.VOICE)
        if message.tool_calls or message.role == "tool":
            needs.append(Capability.TOOLS)  # a model without tools cannot read the calls of earlier turns either
    return needs
