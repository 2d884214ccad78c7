# Requests in OpenAI's dialect: the decoded fields encoded again, and what our own engine is told beyond them.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.providers.base import Asking, UpstreamRequest
from protocol.chat import ChatRequest, Message, RefusalPart, StreamOptions
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest

# What our own engine understands beyond OpenAI's fields, and any caller may say.
ENGINE_FIELDS = frozenset(
    {"top_k", "min_p", "stop_token_ids", "ignore_eos", "min_tokens", "repetition_penalty"}
    | {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"}
)

PATHS: dict[type, str] = {ChatRequest: "/chat/completions", CompletionRequest: "/completions"}


def write_request(asking: Asking) -> UpstreamRequest:
    """Return the request, the model under its upstream name."""
    request = replace(asking.request, model=asking.target.model.upstream_model)
    if isinstance(request, EmbeddingRequest):
        path = "/embeddings"
    else:
        path = PATHS[type(request)]
        options = StreamOptions(include_usage=True) if asking.streams and asking.manners.stream_options else None
        request = replace(request, stream=asking.streams or None, stream_options=options)
    if isinstance(request, ChatRequest) and not asking.self_hosted and (limit := request.output_limit) is not None:
        is_newer = asking.manners.output_limit == "max_completion_tokens"
        limits = (None, limit) if is_newer else (limit, None)
        request = replace(request, max_tokens=limits[0], max_completion_tokens=limits[1])
    if isinstance(request, ChatRequest):
        request = replace(request, messages=tuple(map(_plain, request.messages)))
        if not request.tools:  # what is said of none would be refused
            request = replace(request, tools=None, tool_choice=None, parallel_tool_calls=None)
        if asking.native is not None and not asking.manners.effort:
            request = replace(request, reasoning_effort=None)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if asking.api_key:
        headers["authorization"] = f"Bearer {asking.api_key}"
    extra: dict[str, Any] = dict(asking.extra)
    if asking.self_hosted:
        headers |= {"x-tenant": asking.tenant, "x-weight": str(asking.weight), "x-tier": asking.tier}
        if asking.fails_over:
            headers["x-fails-over"] = "1"
        if not isinstance(request, EmbeddingRequest):
            extra["return_token_ids"] = True
            extra["return_gpu_seconds"] = True
            if request.seed is None:
                request = replace(request, seed=asking.seed)
            if asking.resume is not None and asking.resume.token_ids:
                extra["resume_token_ids"] = asking.resume.token_ids
                extra["resume_text_chars"] = asking.resume.text_chars
    return UpstreamRequest("POST", asking.target.endpoint.base_url + path, headers, _encode_with(request, extra))


def _plain(message: Message) -> Message:
    """Return a message without what only Anthropic's models understand: signed thinking and marks for the cache."""
    if message.thinking_blocks:
        message = replace(message, thinking_blocks=None)
    if isinstance(message.content, tuple) and any(getattr(part, "cache_control", None) for part in message.content):
        parts = tuple(
            part if isinstance(part, RefusalPart) else replace(part, cache_control=None) for part in message.content
        )
        message = replace(message, content=parts)
    return message


def _encode_with(request: Struct, extra: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode(request)
    return body[:-1] + b"," + msgspec.json.encode(extra)[1:] if extra else body
