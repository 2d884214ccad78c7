# What a provider's Batch API must be told and tells: lines go there together, at a lower price, and are answered within
# the day. Values in, values out; provider_batches.py does the I/O.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError
from protocol.chat import ChatRequest
from protocol.errors import Unshown
from protocol.inference import Request

MIB = 1024 * 1024
LARGEST = 32 * MIB  # bytes of the lines of one batch, whatever the provider takes: they lie in a worker's memory once
LONGEST_LINE = 4 * MIB  # bytes; a longer one is an ordinary call


class BatchPlace(Unshown, Struct, frozen=True):
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

    def __post_init__(self) -> None:
        if "\0" in self.id or "\0" in self.told:  # which are stored, and Postgres knows none in text
            raise UpstreamError("The upstream's batch is none.", outcome="malformed")


class LineAnswer(Struct, frozen=True):
    """What came out for one line: a body as a live call's, or ``None`` where it has none."""

    custom_id: str | None  # None where the provider goes by the order of the lines alone
    body: bytes | None


class BatchWire(ABC):
    """One provider's way with batches: what most of them have alike, and what each says itself."""

    most_lines: int
    most_bytes = LARGEST
    keeps_names = True  # whether a batch can be found by the name that we gave it
    is_read_whole = False  # whether results come as one JSON document, and not as lines
    headers: Mapping[str, str] = {}  # that every request has besides
    key_header: str
    newest: str  # what lists the newest batches: a path, as those below
    cancelling: str  # behind the path of a batch that is to end
    listed_under: tuple[str, ...] = ("data",)  # keys of a list, of which the first that is there has the batches

    def takes(self, request: Request) -> bool:
        """Whether a line may ask this."""
        return isinstance(request, ChatRequest)

    @abstractmethod
    def line(self, built: UpstreamRequest, custom_id: str, place: BatchPlace) -> bytes:
        """Return a line that asks what ``built`` would ask."""

    def upload(self, place: BatchPlace, name: str, lines: Sequence[bytes]) -> UpstreamRequest | None:
        """Return the request that brings the lines there beforehand; ``None``: they go with the batch."""
        return None

    @abstractmethod
    def create(
        self, place: BatchPlace, name: str, lines: Sequence[bytes], uploaded: Mapping[str, object]
    ) -> UpstreamRequest:
        """Return the request that makes the batch. ``uploaded``: the answer to the upload."""

    @abstractmethod
    def path_of(self, ident: str) -> str:
        """Return where a batch is."""

    def look(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that asks how far a batch is."""
        return self.request("GET", place, self.path_of(ident))

    def search(self, place: BatchPlace) -> UpstreamRequest:
        """Return the request that lists the newest batches."""
        return self.request("GET", place, self.newest)

    def cancel(self, place: BatchPlace, ident: str) -> UpstreamRequest:
        """Return the request that ends a batch."""
        return self.request("POST", place, self.path_of(ident) + self.cancelling, b"{}")

    @abstractmethod
    def read(self, told: Mapping[str, object]) -> RemoteBatch:
        """Return the batch that an answer tells of. Raises UpstreamError."""

    def read_list(self, told: Mapping[str, object]) -> list[RemoteBatch]:
        """Return the batches of a list, but for those that cannot be read: other programs make some, too."""
        found = next(filter(None, map(told.get, self.listed_under)), None)
        batches = list[RemoteBatch]()
        for one in found if isinstance(found, list) else ():
            with suppress(UpstreamError):
                if isinstance(one, dict):
                    batches.append(self.read(one))
        return batches

    def read_answer(self, line: bytes) -> LineAnswer | None:
        """Return what a line of the results tells; ``None`` where it is none."""
        return None

    def read_whole(self, told: Mapping[str, object]) -> list[LineAnswer]:
        """Return what a document of results tells, in its order."""
        return []

    def clean_up(self, place: BatchPlace, told: Mapping[str, object]) -> list[UpstreamRequest]:
        """Return what lets go of all that is kept of a batch whose results were read: as a rule, the batch."""
        ident = told.get("name", told.get("id"))
        return [self.request("DELETE", place, self.path_of(ident))] if isinstance(ident, str) else []

    def request(
        self, method: str, place: BatchPlace, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> UpstreamRequest:
        """Return a request to ``path`` with the credentials of a batch."""
        headers = {"accept-encoding": "identity", **self.headers} | ({"content-type": kind} if body else {})
        return UpstreamRequest(method, self.url_of(place, path), headers | self.credentials(place), body)

    def url_of(self, place: BatchPlace, path: str) -> str:
        """Return the URL of a path."""
        return place.base_url + path

    def credentials(self, place: BatchPlace) -> dict[str, str]:
        """Return the header that says who asks."""
        if place.token:
            return {"authorization": f"Bearer {place.token}"}
        return {self.key_header: place.api_key} if place.api_key else {}
