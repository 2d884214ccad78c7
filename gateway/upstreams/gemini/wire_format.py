# The Gemini wire format: generateContent of Google's API, and of Vertex AI. Requests are written in request.py, replies
# read in replies.py and events.py, here are vectors, how all are sent, and what failures of its own kind mean.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.gemini.events import GeminiEvents
from gateway.upstreams.gemini.replies import read_content, told_in
from gateway.upstreams.gemini.request import Block, content_body
from gateway.upstreams.wire.base import Asking, EventStream, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamError, UpstreamFailure
from gateway.upstreams.wire.filters import STATUSES, read_filtered
from gateway.upstreams.wire.reading import (
    LONGEST_WAIT,
    NOTHING,
    count_of,
    decoded,
    read_error_fields,
    read_retry_after,
    read_usage,
    text_of,
    usual_failure,
)
from gateway.upstreams.wire.unsayable import Unsayable, leave_out_anthropics
from protocol.chat import ChatRequest
from protocol.embeddings import EmbeddingReply, EmbeddingRequest
from protocol.inference import Request, WholeReply
from protocol.usage import Usage

TOO_LONG = re.compile(r"The input token count.{0,40} exceeds the maximum number of tokens")
# A key that is none is a 400 here, and so is a project without billing, or in a country that Google does not serve.
OF_THE_KEY = re.compile(r"API key (?:not valid|expired|not found)|API_KEY_", re.IGNORECASE)
OF_THE_ACCOUNT = "FAILED_PRECONDITION"
DELAY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)s")
AT_VERTEX = "/publishers/google"
AS_MESSAGE = {"reasoning_effort": "thinking", "user": "metadata.user_id"}  # names in Anthropic's dialect


class GeminiFormat:
    """Speaks Gemini's API to an upstream. Its base URL ends before ``/models``: in the API's version, or, at Vertex AI,
    in ``publishers/google``. Its key goes in a header, never in a URL."""

    def build_request(self, asking: Asking) -> UpstreamRequest:
        """Return the request for POST …:generateContent, or for vectors. Raises Unsayable for what this API lacks."""
        request, model = asking.request, asking.target.model
        dropped = [*asking.left_out]
        match request:
            case ChatRequest():
                dropped += [] if asking.native is None else leave_out_anthropics(asking.native)
                body, left_out = content_body(request, model.upstream_model, model.usual_output)
                method = "streamGenerateContent?alt=sse" if asking.streams else "generateContent"
            case EmbeddingRequest() if not asking.target.endpoint.base_url.endswith(AT_VERTEX):
                body, left_out = embedding_body(request, model.upstream_model)
                method = "batchEmbedContents"
            case _:
                words = (
                    "The model that answers here takes chat completions, and texts to embed only at Gemini's own API."
                )
                raise Unsayable(words, param="model")
        dropped += [name if asking.native is None else AS_MESSAGE.get(name, name) for name in left_out]
        headers = {"content-type": "application/json", "accept-encoding": "identity", **_credentials(asking)}
        name = quote(model.upstream_model.removeprefix("models/"), safe="@")
        url = f"{asking.target.endpoint.base_url}/models/{name}:{method}"
        return UpstreamRequest(
            "POST", url, headers, msgspec.json.encode(body | dict(asking.extra)), dropped=tuple(dropped)
        )

    def read_reply(self, request: Request, body: bytes) -> tuple[WholeReply, Usage | None]:
        """Return the answer, or the vectors, that ``body`` holds."""
        if isinstance(request, EmbeddingRequest):
            return read_embeddings(request, body)
        return read_content(body, told_in(request))

    def open_events(self, request: Request) -> EventStream:
        """Return a reader for a streamed answer."""
        return GeminiEvents(told_in(request))

    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> UpstreamFailure:
        """Return what a failing answer means: whose fault it is, and whether another target may be tried."""
        error = read_error_fields(body.strip().removeprefix(b"[").removesuffix(b"]"))  # some come in a list
        if status in STATUSES and (filtered := read_filtered(error, status)) is not None:
            return filtered
        message = error.get("message", "")
        if status == 400 and (error.get("status") == OF_THE_ACCOUNT or any(map(OF_THE_KEY.search, _reasons(error)))):
            return UpstreamError("The upstream refused the gateway's own credentials.", outcome="refused_key")
        wait = _delay(error, read_retry_after(headers))
        if status == 429:
            return UpstreamBusy("The upstream's rate limit is reached.", retry_after=wait)
        if status == 503:
            return UpstreamError("The upstream is overloaded.", outcome="overloaded", retry_after=wait)
        code = "context_length_exceeded" if TOO_LONG.match(message) else None
        return usual_failure(status, headers, message, code=code)


def _credentials(asking: Asking) -> dict[str, str]:
    if asking.token:
        return {"authorization": f"Bearer {asking.token}"}
    return {"x-goog-api-key": asking.api_key} if asking.api_key else {}


def _details(error: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    details = error.get("details")
    yield from (each for each in (details if isinstance(details, list) else ()) if isinstance(each, dict))


def _reasons(error: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an error says of whose fault it is. A message may repeat what a caller wrote: its beginning counts."""
    yield from (reason for each in _details(error) if (reason := text_of(each.get("reason"))) is not None)
    yield error.get("message", "")[:40]


def _delay(error: Mapping[str, Any], said: float | None) -> float | None:
    """Return the seconds to wait: those of a header, else of the error's RetryInfo."""
    delays = (text_of(each.get("retryDelay")) for each in _details(error))
    found = next((match for text in delays if text and (match := DELAY.fullmatch(text))), None)
    return said if said is not None or found is None else min(float(found[1]), LONGEST_WAIT)


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
    said = decoded(body, _decoder)
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
