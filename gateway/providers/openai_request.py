# Requests in OpenAI's dialect: the decoded fields encoded again, and what our own engine is told beyond them.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gateway.providers.base import Asking, UpstreamRequest
from protocol.chat import ChatRequest, StreamOptions
from protocol.completions import CompletionRequest
from protocol.embeddings import EmbeddingRequest

# What our own engine understands beyond OpenAI's fields, and any caller may say.
ENGINE_FIELDS = frozenset({"top_k", "min_p", "stop_token_ids", "ignore_eos"})

PATHS: dict[type, str] = {ChatRequest: "/chat/completions", CompletionRequest: "/completions"}


def write_request(asking: Asking) -> UpstreamRequest:
    """Return the request, the model under its upstream name."""
    request = msgspec.structs.replace(asking.request, model=asking.target.model.upstream_model)
    if isinstance(request, EmbeddingRequest):
        path = "/embeddings"
    else:
        path = PATHS[type(request)]
        options = StreamOptions(include_usage=True) if asking.streams else None
        request = msgspec.structs.replace(request, stream=asking.streams or None, stream_options=options)
    if isinstance(request, ChatRequest) and request.max_tokens is not None and not asking.self_hosted:
        # The older name is refused by newer models; the newer one is understood by all that know both.
        request = msgspec.structs.replace(request, max_tokens=None, max_completion_tokens=request.output_limit)
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if asking.api_key:
        headers["authorization"] = f"Bearer {asking.api_key}"
    extra: dict[str, Any] = dict(asking.extra)
    if asking.self_hosted:
        headers |= {"x-tenant": asking.tenant, "x-weight": str(asking.weight), "x-tier": asking.tier}
        if not isinstance(request, EmbeddingRequest):
            extra["return_token_ids"] = True
            extra["return_gpu_seconds"] = True
            if request.seed is None:
                request = msgspec.structs.replace(request, seed=asking.seed)
    return UpstreamRequest("POST", asking.target.endpoint.base_url + path, headers, _encode_with(request, extra))


def _encode_with(request: Struct, extra: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode(request)
    return body[:-1] + b"," + msgspec.json.encode(extra)[1:] if extra else body
