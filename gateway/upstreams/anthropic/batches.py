# Anthropic's Message Batches: the requests in one body, the results as lines once all have ended. A batch has no name
# of ours: one that may have been made unheard is found by its moment and its size, and told by its results.
# https://docs.anthropic.com/en/api/creating-message-batches

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.batches import BatchPlace, BatchWire, LineAnswer, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamError
from gateway.upstreams.wire.reading import NOTHING
from protocol.decoding import NOT_JSON

VERSION = "2023-06-01"
BATCHES = "/v1/messages/batches"


class AnthropicBatches(BatchWire):
    """Speaks of batches as Anthropic does."""

    most_lines = 100_000  # of 256 MB there
    keeps_names = False
    headers = MappingProxyType({"anthropic-version": VERSION})
    key_header = "x-api-key"
    newest = f"{BATCHES}?limit=100"
    cancelling = "/cancel"

    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return one of the requests."""
        return b'{"custom_id":' + msgspec.json.encode(custom_id) + b',"params":' + built.body + b"}"

    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes a batch."""
        return self.request("POST", place, BATCHES, b'{"requests":[' + b",".join(lines) + b"]}")

    def path_of(self, ident: str) -> str:
        """Return where a batch is."""
        return f"{BATCHES}/{quote(ident, safe='')}"

    def url_of(self, place: BatchPlace, path: str) -> str:
        """Return the URL of a path."""
        return place.base_url.rstrip("/") + path

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
            results=(f"{self.path_of(batch.id)}/results",) if has_ended else (),
        )

    def read_answer(self, line: bytes) -> LineAnswer | None:
        """Return what a line of the results tells."""
        try:
            found = _line_decoder.decode(line)
        except NOT_JSON:
            return None
        message = bytes(found.result.message) if found.result.type == "succeeded" else b""
        return LineAnswer(found.custom_id, message or None)


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
