# Embeddings by Gemini's batchEmbedContents: several texts in, a vector for each out. Vertex AI has another API for
# them, which is not spoken.

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.gemini.request import Block
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOT_JSON, NOTHING, count_of, read_usage
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.usage import Usage

LARGEST_FLOAT32 = 3.4028235e38


def embedding_body(request: EmbeddingRequest, model: str) -> tuple[Block, list[str]]:
    """Return the body of batchEmbedContents, and the names of the fields that it leaves out. Raises Unsayable for
    tokens in place of texts: they are of another maker's vocabulary."""
    given = [request.input] if isinstance(request.input, str) else request.input
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        words = "The model that answers here embeds texts, not token ids: its vocabulary is another one."
        raise Unsayable(words, param="input")
    wanted = {} if request.dimensions is None else {"outputDimensionality": request.dimensions}
    name = f"models/{model.removeprefix('models/')}"
    asked = [{"model": name, "content": {"parts": [{"text": text}]}, **wanted} for text in texts]
    return {"requests": asked}, ["user"] if request.user is not None else []


def read_embeddings(request: EmbeddingRequest, body: bytes) -> tuple[EmbeddingReply, Usage | None]:
    """Return the vectors that ``body`` holds, and their count. Raises UpstreamError."""
    try:
        said = _decoder.decode(body)
    except NOT_JSON as exc:
        raise UpstreamError("The upstream's answer is not what its format promises.", outcome="malformed") from exc
    wanted = 1 if isinstance(request.input, str) else len(request.input)
    vectors = [each.values for each in said.embeddings]
    if len(vectors) != wanted or not all(map(_is_vector, vectors)):
        raise UpstreamError("The upstream's answer is empty, or not what was asked for.", outcome="malformed")
    told = read_usage(said.usage_metadata, _UsageMetadata)
    count = count_of(told.prompt_token_count) if told is not None else None
    return EmbeddingReply(tuple(vectors)), Usage(input_tokens=count) if count else None


def _is_vector(vector: tuple[float, ...]) -> bool:
    return max(map(abs, vector), default=LARGEST_FLOAT32 * 2) <= LARGEST_FLOAT32


class _Vector(Struct, frozen=True):
    values: tuple[float, ...]


class _UsageMetadata(Struct, frozen=True, rename="camel"):
    prompt_token_count: int | float | None = None


class _Embeddings(Struct, frozen=True, rename="camel"):
    embeddings: tuple[_Vector, ...]
    usage_metadata: Raw = NOTHING


_decoder = msgspec.json.Decoder(_Embeddings)
