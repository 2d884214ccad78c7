# Embeddings in OpenAI's shapes: what is checked of a request, and how its reply is written.

from __future__ import annotations

import base64
import struct

import msgspec

from billing.core.money import to_text
from gateway.dialects.checks import require, require_between
from gateway.dialects.endpoint import ApiEndpoint, ReplyFacts
from protocol.completions import MOST_PROMPTS, number_of
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.errors import ServiceError
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.usage import Usage


def check_embeddings(request: EmbeddingRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(request.input not in ([], "", [[]]), "input", "'input' must hold at least one text.")
    require(number_of(request.input) <= MOST_PROMPTS, "input", f"'input' may hold at most {MOST_PROMPTS} texts.")
    require_between(request.dimensions, 1, 65536, "dimensions")


class EmbeddingWriter:
    """Writes lists of embeddings."""

    def __init__(self, request: EmbeddingRequest, request_id: str, created: int) -> None:
        self._asked = request.model
        self._write = as_base64 if request.encoding_format == "base64" else as_floats

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a list object, the vectors in the order of the inputs."""
        assert isinstance(whole, EmbeddingReply)
        data = [
            {"object": "embedding", "index": index, "embedding": self._write(vector)}
            for index, vector in enumerate(whole.vectors)
        ]
        return msgspec.json.encode(
            {
                "object": "list",
                "data": data,
                "model": self._asked,
                "model_used": reply.target.model.name,
                "usage": {
                    "prompt_tokens": usage.input_tokens,
                    "total_tokens": usage.total_tokens,
                    "cost_usd": to_text(reply.record.cost_nanousd),
                },
            }
        )

    def pieces(self, reply: ReplyFacts, events: list[Event]) -> bytes:
        """Embeddings are never streamed."""
        raise AssertionError("an embedding request has no stream")

    def error(self, error: ServiceError) -> bytes:
        """Embeddings are never streamed."""
        raise AssertionError("an embedding request has no stream")


def as_base64(vector: tuple[float, ...] | str) -> str:
    """Return a vector as base64 of little-endian float32."""
    if isinstance(vector, str):
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def as_floats(vector: tuple[float, ...] | str) -> tuple[float, ...]:
    """Return a vector as floats."""
    if not isinstance(vector, str):
        return vector
    packed = base64.b64decode(vector)
    return struct.unpack(f"<{len(packed) // 4}f", packed)


ENDPOINT = ApiEndpoint(
    path="/v1/embeddings",
    name="embeddings",
    operation="create_embeddings",
    summary="Turn texts into vectors",
    description="Return one vector for each input, as floats or as base64 of little-endian float32.",
    body_type=EmbeddingRequest,
    check=check_embeddings,
    writer=EmbeddingWriter,
    is_for_batches=True,
    route_field="input",
)
