# What is answered in numbers: texts to vectors; and documents to scores of how well each answers a query, as Cohere,
# Jina, Together and vLLM have it.

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocol.completions import Prompts, check_prompts

MOST_DOCUMENTS = 10_000  # in one request: what Cohere takes


class EmbeddingRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Texts (or token ids) to embed; ``encoding_format`` says how the vectors travel."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        check_prompts(self.input)


class EmbeddingReply(Struct, frozen=True):
    """One vector per input, in order: a list of floats, or base64 of little-endian float32."""

    vectors: tuple[tuple[float, ...] | str, ...]


class Document(Struct, frozen=True):
    """A document of text, where it is an object."""

    text: str


class RerankRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Documents to score against a query; the best ``top_n`` of them come back, or all."""

    model: str
    query: str
    documents: tuple[str | Document, ...]
    top_n: int | None = None
    return_documents: bool | None = None  # with their texts
    max_tokens_per_doc: int | None = None  # what is longer is cut by the model
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class Ranked(Struct, frozen=True):
    """One document, by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float


class RerankReply(Struct, frozen=True):
    """What was found, the best first."""

    results: tuple[Ranked, ...]
