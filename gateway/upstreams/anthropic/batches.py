# Anthropic's Message Batches: the requests in one body, the results as lines once all have ended. A batch has no name
# of ours: one that may have been made unheard is found by its moment and its size, and told by its results.
# https://docs.anthropic.com/en/api/creating-message-batches

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.batches import LARGEST, BatchPlace, LineAnswer, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOT_JSON, NOTHING
from protocol.chat import ChatRequest
from protocol.inference import Request

VERSION = "2023-06-01"
BATCHES = "/v1/messages/batches"


class AnthropicBatches:
    """Speaks of batches as Anthropic does."""

    most_lines = 100_000
    most_bytes = LARGEST  # 256 MB there
    keeps_names = False
    is_read_whole = False

    def takes(self, request: Request) -> bool:
        """Whether a line may ask this."""
        return isinstance(request, ChatRequest)

    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return one of the requests."""
        return b'{"custom_id":' + msgspec.json.encode(custom_id) + b',"params":' + built.body + b"}"

    def upload(self, place: BatchPlace, name: str, lines: Sequence[bytes]) -> None:
        """Return nothing: the lines go with the batch."""

    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes a batch."""
        return _request("POST", place, "", b'{"requests":[' + b",".join(lines) + b"]}")

    def look(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that asks for a batch."""
        return _request("GET", place, f"/{quote(ident, safe='')}")

    def search(self, place: BatchPlace) -> UpstreamRequest:
        """Return the request that lists the newest batches."""
        return _request("GET", place, "?limit=100")

    def cancel(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that cancels a batch."""
        return _request("POST", place, f"/{quote(ident, safe='')}/cancel", b"{}")

    def read(self, told: Mapping[str, object]) -> RemoteBatch:
        """Return the batch that an answer tells of."""
        try:
            batch = msgspec.convert(told, _Batch)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream's batch is none.", outcome="malformed") from exc
        has_ended = batch.processing_status == "ended"
        return RemoteBatch(
            id=batch.id,
            state="ended" if has_ended else "running",
            told=batch.processing_status,
            lines=sum(batch.request_counts.values()),
            created_at=None if batch.created_at is None else batch.created_at.timestamp(),
            results=(f"{BATCHES}/{quote(batch.id, safe='')}/results",) if has_ended else (),
        )

    def read_list(self, told: Mapping[str, object]) -> list[RemoteBatch]:
        """Return the batches of a list."""
        found = told.get("data")
        return [self.read(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []

    def read_answer(self, line: bytes) -> LineAnswer | None:
        """Return what a line of the results tells."""
        try:
            found = _line_decoder.decode(line)
        except NOT_JSON:
            return None
        message = bytes(found.result.message) if found.result.type == "succeeded" else b""
        return LineAnswer(found.custom_id, message or None)

    def read_whole(self, told: Mapping[str, object]) -> list[LineAnswer]:
        """Return nothing: results are lines."""
        return []

    def clean_up(self, place: BatchPlace, told: Mapping[str, object]) -> list[UpstreamRequest]:
        """Return what deletes a batch, with all that it holds."""
        ident = told.get("id")
        return [_request("DELETE", place, f"/{quote(ident, safe='')}")] if isinstance(ident, str) else []


class _Batch(Struct, frozen=True):
    id: str
    processing_status: str
    request_counts: dict[str, int] = {}
    created_at: datetime | None = None


class _Result(Struct, frozen=True):
    type: str
    message: Raw = NOTHING


class _Line(Struct, frozen=True):
    custom_id: str
    result: _Result


_line_decoder = msgspec.json.Decoder(_Line)


def _request(method: str, place: BatchPlace, path: str, body: bytes = b"") -> UpstreamRequest:
    headers = {"accept-encoding": "identity", "anthropic-version": VERSION}
    if body:
        headers["content-type"] = "application/json"
    if place.token:
        headers["authorization"] = f"Bearer {place.token}"
    elif place.api_key:
        headers["x-api-key"] = place.api_key
    return UpstreamRequest(method, place.base_url.rstrip("/") + BATCHES + path, headers, body)
