# What a provider's Batch API must be told and tells: lines go there together, at a lower price, and are answered within
# the day. Values in, values out; provider_batches.py does the I/O.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from gateway.upstreams.wire.base import UpstreamRequest
from protocol.inference import Request

MIB = 1024 * 1024
LARGEST = 32 * MIB  # bytes of the lines of one batch, whatever the provider takes: they lie in a worker's memory once
LONGEST_LINE = 4 * MIB  # bytes; a longer one is an ordinary call


class BatchPlace(Struct, frozen=True):
    """Where a batch is, and as whom it is spoken of."""

    base_url: str
    model: str  # as the provider calls it
    api_key: str | None
    token: str | None = None
    api_version: str | None = None  # of Azure OpenAI


class RemoteBatch(Struct, frozen=True, kw_only=True):
    """A batch as its provider tells of it. ``state`` "ended": nothing more of it will be answered."""

    id: str
    state: Literal["running", "ended"]
    told: str  # the provider's own word for it
    name: str | None = None  # ours, where the provider keeps it
    lines: int | None = None  # how many it has, where that is told
    created_at: float | None = None  # unix seconds
    results: tuple[str, ...] = ()  # URLs of what came out; relative to the base URL where they begin with "/"
    waits_for_room: bool = False  # it was not taken because too much waits there: it may be sent again later


class LineAnswer(Struct, frozen=True):
    """What came out for one line: a body as a live call's, or ``None`` where it has none."""

    custom_id: str | None  # None where the provider goes by the order of the lines alone
    body: bytes | None


class BatchWire(Protocol):
    """One provider's way with batches."""

    most_lines: int
    most_bytes: int
    keeps_names: bool  # whether a batch can be found by the name that we gave it
    is_read_whole: bool  # whether results come as one JSON document, and not as lines

    def takes(self, request: Request) -> bool:
        """Whether a line may ask this."""

    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return a line that asks what ``built`` would ask."""

    def upload(self, place: BatchPlace, name: str, lines: Sequence[bytes]) -> UpstreamRequest | None:
        """Return the request that brings the lines there beforehand; ``None``: they go with the batch."""

    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes the batch. ``uploaded``: the answer to the upload."""

    def look(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that asks how far a batch is."""

    def search(self, place: BatchPlace) -> UpstreamRequest:
        """Return the request that lists the newest batches."""

    def cancel(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that ends a batch."""

    def read(self, told: Mapping[str, object]) -> RemoteBatch:
        """Return the batch that an answer tells of. Raises UpstreamError."""

    def read_list(self, told: Mapping[str, object]) -> list[RemoteBatch]:
        """Return the batches of a list."""

    def read_answer(self, line: bytes) -> LineAnswer | None:
        """Return what a line of the results tells; ``None`` where it is none."""

    def read_whole(self, told: Mapping[str, object]) -> list[LineAnswer]:
        """Return what a document of results tells, in its order."""

    def clean_up(self, place: BatchPlace, told: Mapping[str, object]) -> list[UpstreamRequest]:
        """Return what lets go of the files of a batch whose results were kept."""
