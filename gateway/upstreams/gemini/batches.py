# Gemini's Batch API: requests of one model in one body, and their answers in the batch itself once it has ended. What
# came out has the keys that we gave, or nothing but its place. https://ai.google.dev/api/batch-api

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.batches import MIB, BatchPlace, BatchWire, LineAnswer, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamError

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED")


class GeminiBatches(BatchWire):
    """Speaks of batches as Gemini does."""

    most_lines = 2_000  # their answers come in one document
    most_bytes = 16 * MIB  # 20 MB there, for requests that come in the body
    is_read_whole = True
    key_header = "x-goog-api-key"
    newest = "/batches?pageSize=100"
    cancelling = ":cancel"
    listed_under = ("operations", "batches")

    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return one of the requests."""
        return b'{"request":' + built.body + b',"metadata":{"key":' + msgspec.json.encode(custom_id) + b"}}"

    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes a batch."""
        requests = b'{"requests":{"requests":[' + b",".join(lines) + b"]}}"
        body = b'{"batch":{"displayName":' + msgspec.json.encode(name) + b',"inputConfig":' + requests + b"}}"
        model = quote(place.model.removeprefix("models/"), safe="@")
        return self.request("POST", place, f"/models/{model}:batchGenerateContent", body)

    def path_of(self, ident: str) -> str:
        """Return where a batch is."""
        return f"/{quote(ident)}"

    def read(self, told: Mapping[str, object]) -> RemoteBatch:
        """Return the batch that an operation tells of."""
        name, batch = told.get("name"), _dict(told.get("metadata")) or told
        state = str(batch.get("state", "")).rpartition("STATE_")[2]
        if not isinstance(name, str):
            raise UpstreamError("The upstream's batch is none.", outcome="malformed")
        has_ended = state in ENDED or told.get("done") is True
        count = _dict(batch.get("batchStats")).get("requestCount")
        return RemoteBatch(
            id=name,
            state="ended" if has_ended else "running",
            told=state.lower() or "ended",
            name=str(batch.get("displayName", "")) or None,
            lines=int(count) if isinstance(count, int | str) and str(count).isdigit() else None,
            results=(self.path_of(name),) if has_ended else (),
        )

    def read_whole(self, told: Mapping[str, object]) -> list[LineAnswer]:
        """Return the answers of an operation, in the order of its requests."""
        output = _dict(told.get("response")) or _dict(_dict(told.get("metadata")).get("output"))
        answers: Any = output.get("inlinedResponses")
        if isinstance(answers, dict):
            answers = answers.get("inlinedResponses")
        return [_answer_of(_dict(one)) for one in answers] if isinstance(answers, list) else []


def _answer_of(one: Mapping[str, Any]) -> LineAnswer:
    key, response = _dict(one.get("metadata")).get("key"), one.get("response")
    body = msgspec.json.encode(response) if isinstance(response, dict) else None
    return LineAnswer(key if isinstance(key, str) else None, body)


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
