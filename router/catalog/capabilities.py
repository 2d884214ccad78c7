# What a request needs of a model: read from the request once, then compared with each target.

from __future__ import annotations

from protocol.chat import ChatRequest, ImagePart, JsonObjectFormat, JsonSchemaFormat
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest
from router.catalog.targets import Ability, ModelSpec

InferenceRequest = ChatRequest | CompletionRequest | EmbeddingRequest

# The field of a request that asks for each ability, for the ``param`` of a refusal.
FIELD_OF = {
    Ability.CHAT: "model",
    Ability.COMPLETIONS: "model",
    Ability.EMBEDDINGS: "model",
    Ability.TOOLS: "tools",
    Ability.JSON: "response_format",
    Ability.LOGPROBS: "logprobs",
    Ability.VISION: "messages",
}


_CHAT_ALONE = frozenset({Ability.CHAT})  # what most requests need


def needed_abilities(request: InferenceRequest) -> frozenset[Ability]:
    """Return every ability that a model must have to serve the request, its endpoint kind among them."""
    match request:
        case ChatRequest():
            needs = _chat_needs(request)
            return _CHAT_ALONE if len(needs) == 1 else frozenset(needs)
        case CompletionRequest():
            logprobs = (Ability.LOGPROBS,) if request.logprobs is not None else ()
            return frozenset((Ability.COMPLETIONS, *logprobs))
        case EmbeddingRequest():
            return frozenset((Ability.EMBEDDINGS,))


def missing_abilities(needed: frozenset[Ability], model: ModelSpec) -> list[Ability]:
    """Return what the model lacks, in the order in which the abilities are defined."""
    return [ability for ability in Ability if ability in needed and ability not in model.abilities]


def _chat_needs(request: ChatRequest) -> list[Ability]:
    needs = [Ability.CHAT]
    if request.tools:
        needs.append(Ability.TOOLS)
    if isinstance(request.response_format, (JsonObjectFormat, JsonSchemaFormat)):
        needs.append(Ability.JSON)
    if request.logprobs or request.top_logprobs:
        needs.append(Ability.LOGPROBS)
    for message in request.messages:
        content = message.content
        if isinstance(content, tuple) and any(isinstance(part, ImagePart) for part in content):
            needs.append(Ability.VISION)
        if message.tool_calls or message.role == "tool":
            needs.append(Ability.TOOLS)  # a model without tools cannot read the calls of earlier turns either
    return needs
