# OpenAI's Batch API, and Azure's, which is spoken to in other places: a file of lines, a batch of the file, and files
# of what came out. https://platform.openai.com/docs/api-reference/batch

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.batches import BatchPlace, BatchWire, LineAnswer, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamError
from protocol.decoding import NOT_JSON
from protocol.embeddings import EmbeddingRequest
from protocol.inference import Generation, Request

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
NAME = "tollgate"  # of the metadata that has ours
FULL = "token_limit_exceeded"  # the code of a batch for which too much waits already
FILES_LIVE = 3 * 86_400  # seconds, in case we never come to delete one


class OpenAIBatches(BatchWire):
    """Speaks of batches as OpenAI does."""

    most_lines = 50_000  # of 200 MB there
    key_header = "api-key"  # at Azure
    newest = "/batches?limit=100"
    cancelling = "/cancel"

    def takes(self, request: Request) -> bool:
        """Whether a line may ask this: of vectors one each, since a batch may ask for 50,000."""
        is_vector = isinstance(request, EmbeddingRequest) and isinstance(request.input, str)
        return is_vector or isinstance(request, Generation)

    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return a line of the input file."""
        head = msgspec.json.encode({"custom_id": custom_id, "method": "POST", "url": _path_of(built, place)})
        return head[:-1] + b',"body":' + built.body + b"}"

    def upload(self, place: BatchPlace, name: str, lines: Sequence[bytes]) -> UpstreamRequest:
        """Return the upload of the input file."""
        fields = {"purpose": "batch"}
        if place.api_version is None:
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(FILES_LIVE)}
        boundary = f"tollgate-{secrets.token_hex(16)}"
        parts = [
            f'--{boundary}\r\ncontent-disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
            for field, value in fields.items()
        ]
        head = f'content-disposition: form-data; name="file"; filename="{name}.jsonl"\r\n'
        parts.append(f"--{boundary}\r\n{head}content-type: application/jsonl\r\n\r\n".encode())
        body = b"".join((*parts, b"\n".join(lines), f"\r\n--{boundary}--\r\n".encode()))
        return self.request("POST", place, "/files", body, f"multipart/form-data; boundary={boundary}")

    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes a batch of the file."""
        asked = {
            "input_file_id": uploaded.get("id"),
            "endpoint": msgspec.json.decode(lines[0], type=_Input).url,
            "completion_window": "24h",
            "metadata": {NAME: name},
        }
        return self.request("POST", place, "/batches", msgspec.json.encode(asked))

    def path_of(self, ident: str) -> str:
        """Return where a batch is."""
        return f"/batches/{quote(ident, safe='')}"

    def read(self, told: Mapping[str, object]) -> RemoteBatch:
        """Return the batch that an answer tells of."""
        try:
            batch = msgspec.convert(told, _Batch)
        except NOT_JSON as exc:
            raise UpstreamError("The upstream's batch is none.", outcome="malformed") from exc
        files = [f"/files/{quote(one, safe='')}/content" for one in (batch.output_file_id,) if one]
        codes = [one.code for one in (batch.errors.data if batch.errors else ())]
        return RemoteBatch(
            id=batch.id,
            state="ended" if batch.status in ENDED else "running",
            told=batch.status,
            name=(batch.metadata or {}).get(NAME),
            lines=None if batch.request_counts is None else batch.request_counts.total or None,
            created_at=batch.created_at,
            results=tuple(files),
            waits_for_room=batch.status == "failed" and FULL in codes,
        )

    def read_answer(self, line: bytes) -> LineAnswer | None:
        """Return what a line of the output file tells."""
        try:
            found = _line_decoder.decode(line)
        except NOT_JSON:
            return None
        is_answered = found.response is not None and found.response.status_code == 200
        return LineAnswer(found.custom_id, bytes(found.response.body) if is_answered and found.response else None)

    def clean_up(self, place: BatchPlace, told: Mapping[str, object]) -> list[UpstreamRequest]:
        """Return what deletes the files of a batch."""
        names = ("input_file_id", "output_file_id", "error_file_id")
        files = [one for name in names if isinstance(one := told.get(name), str) and one]
        return [self.request("DELETE", place, f"/files/{quote(one, safe='')}") for one in files]

    def url_of(self, place: BatchPlace, path: str) -> str:
        """Return the URL of a path: at Azure with its version."""
        if place.api_version is None:
            return place.base_url + path
        version = f"api-version={quote(place.api_version, safe='')}"
        return f"{place.base_url}/openai{path}{'&' if '?' in path else '?'}{version}"

    def credentials(self, place: BatchPlace) -> dict[str, str]:
        """Return the header that says who asks: at Azure a key goes first."""
        if place.api_version is not None and place.api_key:
            return {self.key_header: place.api_key}
        secret = place.token or place.api_key
        return {"authorization": f"Bearer {secret}"} if secret else {}


class _Input(Struct, frozen=True):
    url: str


class _Counts(Struct, frozen=True):
    total: int = 0


class _Error(Struct, frozen=True):
    code: str | None = None


class _Errors(Struct, frozen=True):
    data: tuple[_Error, ...] = ()


class _Batch(Struct, frozen=True):
    id: str
    status: str
    created_at: float | None = None
    metadata: dict[str, str] | None = None
    request_counts: _Counts | None = None
    output_file_id: str | None = None
    errors: _Errors | None = None


class _Response(Struct, frozen=True):
    status_code: int
    body: Raw


class _Line(Struct, frozen=True):
    custom_id: str
    response: _Response | None = None


_line_decoder = msgspec.json.Decoder(_Line)


def _path_of(built: UpstreamRequest, place: BatchPlace) -> str:
    """Return the endpoint of a line: with its version at OpenAI, without one at Azure's deployments."""
    path = built.url.partition("?")[0]
    if place.api_version is not None:
        return path.partition("/deployments/")[2].partition("/")[2].join(("/", ""))
    return "/v1" + path.removeprefix(place.base_url)
