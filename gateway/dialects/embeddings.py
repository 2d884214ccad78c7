# What is answered in numbers: embeddings in OpenAI's shapes; and documents ranked by a query, in the shape that Cohere,
# Jina, Together and vLLM share. What is checked of a request, and how its reply is written.

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec

from billing.core.money import to_text
from gateway.dialects.checks import check_tags, require, require_between
from gateway.dialects.endpoint import ApiEndpoint, ReplyFacts, WholeWriter
from protocol.completions import MOST_PROMPTS, number_of
from protocol.embeddings import MOST_DOCUMENTS, EmbeddingReply, EmbeddingRequest, RerankReply, RerankRequest
from protocol.inference import WholeReply
from protocol.usage import Usage


def check_embeddings(request: EmbeddingRequest) -> None:
    """Refuse what the types let through and OpenAI's API does not. Raises BadRequest."""
    require(request.input not in ([], "", [[]]), "input", "'input' must hold at least one text.")
    require(number_of(request.input) <= MOST_PROMPTS, "input", f"'input' may hold at most {MOST_PROMPTS} texts.")
    require_between(request.dimensions, 1, 65536, "dimensions")


class EmbeddingWriter(WholeWriter):
    """Writes lists of embeddings."""

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return a list object, the vectors in the order of the inputs."""
        assert isinstance(whole, EmbeddingReply)
        write = as_base64 if self._request.encoding_format == "base64" else as_floats
        vectors = enumerate(map(write, whole.vectors))
        data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in vectors]
        names = {"model": self._request.model, "model_used": reply.target.model.name}
        return msgspec.json.encode({"object": "list", "data": data, **names, "usage": _usage(reply, usage)})


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


def check_rerank(request: RerankRequest) -> None:
    """Refuse what the types let through and no such API takes. Raises BadRequest."""
    count = len(request.documents)
    require(request.query != "", "query", "'query' must not be empty.")
    require(count > 0, "documents", "'documents' must hold at least one text.")
    require(count <= MOST_DOCUMENTS, "documents", f"'documents' may hold at most {MOST_DOCUMENTS} texts.")
    require_between(request.top_n, 1, MOST_DOCUMENTS, "top_n")
    require_between(request.max_tokens_per_doc, 1, 2**20, "max_tokens_per_doc")
    check_tags(request)


class RerankWriter(WholeWriter):
    """Writes documents as they were ranked."""

    def whole(self, reply: ReplyFacts, whole: WholeReply, usage: Usage) -> bytes:
        """Return the results with their scores, the best first; texts are the request's own, where it asks for them."""
        assert isinstance(whole, RerankReply)
        texts = self._request.texts if self._request.return_documents else None
        results = []
        for ranked in whole.results:
            shown: dict[str, Any] = {"index": ranked.index, "relevance_score": ranked.relevance_score}
            results.append(shown if texts is None else {**shown, "document": {"text": texts[ranked.index]}})
        told: dict[str, Any] = {
            "id": self._id,
            "object": "rerank",
            "model": self._request.model,
            "model_used": reply.target.model.name,
            "results": results,
            "usage": _usage(reply, usage),
        }
        if usage.search_units:
            told["meta"] = {"billed_units": {"search_units": usage.search_units}}
        return msgspec.json.encode(told)


def _usage(reply: ReplyFacts, usage: Usage) -> dict[str, Any]:
    counts = {"prompt_tokens": usage.input_tokens, "total_tokens": usage.total_tokens}
    return {**counts, "cost_usd": to_text(reply.record.cost_nanousd)}


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

RERANK = ApiEndpoint(
    path="/v1/rerank",
    name="rerank",
    operation="create_rerank",
    summary="Rank documents by a query",
    description="Return the documents' places and scores, the one that answers the query best first.",
    body_type=RerankRequest,
    check=check_rerank,
    writer=RerankWriter,
    is_for_batches=True,
    route_field="documents",
)
