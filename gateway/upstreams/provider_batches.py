# Asks providers about batches at their Batch APIs, with the key that a batch belongs to: made, found, looked at, ended,
# read. What a provider may have taken without a word of it is told apart from what it has not.

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing, suppress
from enum import Enum
from typing import Any

from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings
from gateway.upstreams.anthropic.batches import AnthropicBatches
from gateway.upstreams.client import UpstreamClient, UpstreamResponse, read_error_body
from gateway.upstreams.gemini.batches import GeminiBatches
from gateway.upstreams.openai.batches import OpenAIBatches
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.batches import MIB, BatchPlace, BatchWire, LineAnswer, RemoteBatch
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamRefused
from gateway.upstreams.wire.reading import OBJECTS, decoded
from router.catalog.targets import Target

WIRES: Mapping[str, BatchWire] = {"openai": OpenAIBatches(), "anthropic": AnthropicBatches(), "gemini": GeminiBatches()}
PATIENCE = 60.0  # seconds until a provider answers
UPLOADED_IN = 300.0  # seconds, with all the lines
LONGEST_RESULTS = 256 * MIB  # bytes of results that come as one document
LONGEST_ANSWER = 32 * MIB  # bytes of one line of them
NOT_TAKEN = ("connect", "refused_key", "forbidden", "rate_limited", "spend_cap", "too_large")  # outcomes that say so
CLOCKS_DIFFER = 60.0  # seconds, ours and a provider's, at the most


class NotMade(Enum):
    """Why there is no batch after it was to be made."""

    REFUSED = "refused"  # and would be again
    LATER = "later"  # it was not taken now
    UNKNOWN = "unknown"  # it may have been made


class ProviderBatches:
    """Speaks to the Batch APIs of one edition's providers."""

    def __init__(self, providers: ProviderRegistry, client: UpstreamClient, clock: Clock) -> None:
        self._providers = providers
        self._client = client
        self._clock = clock

    def wire_of(self, target: Target) -> BatchWire:
        """Return how a target's provider speaks of batches."""
        return WIRES[self._providers.settings(target.model.provider).format]

    def knows(self, target: Target) -> bool:
        """Whether a target's provider is one of this edition's, has batches, and is where the target is: its keys are
        for no other place."""
        return self._providers.stands_at(target) and self._providers.settings(target.model.provider).format in WIRES

    def may_ask(self, target: Target) -> bool:
        """Whether there is a key to ask with: a team may have none of its own any more."""
        return target.own is None or bool(self._providers.keys_at(target))

    def next_key(self, target: Target) -> str | None:
        """Return the key that a new batch belongs to."""
        return self._providers.next_key_at(target) if target.own is None else next(iter(self._keys_at(target)))

    def _keys_at(self, target: Target) -> tuple[str, ...]:
        """Return the keys that batches are spoken of with. Raises UpstreamFailure where a team has none any more."""
        if not (keys := self._providers.keys_at(target)) and target.own is not None:
            raise UpstreamFailure(f"The team has no key for {target.model.provider} any more.", outcome="refused_key")
        return keys

    def line(self, target: Target, built: UpstreamRequest, custom_id: str) -> bytes:
        """Return a line that asks what ``built`` would ask."""
        version = self._settings(target).api_version
        place = BatchPlace(target.endpoint.base_url, target.model.upstream_model, None, None, version)
        return self.wire_of(target).line(built, custom_id, place)

    async def place_of(self, target: Target, digest: str) -> BatchPlace:
        """Return where a batch is, spoken of with the key of that ``digest``, or another where it is gone. Raises
        UpstreamFailure."""
        if not self.knows(target):
            raise UpstreamFailure(f"No batch of {target.model.provider} is asked about there.", outcome="unknown")
        settings = self._settings(target)
        keys = self._keys_at(target)
        key = next((one for one in keys if digest_of(one) == digest), keys[0] if keys else None)
        token = await self._providers.token_for(target, self._client, self._clock.monotonic())
        model, base_url = target.model.upstream_model, target.endpoint.base_url
        return BatchPlace(base_url, model, key, token, settings.api_version)

    async def make(self, target: Target, place: BatchPlace, name: str, lines: Sequence[bytes]) -> RemoteBatch | NotMade:
        """Make a batch of ``lines``, of which there is one at least, and all ask the same endpoint."""
        wire, uploaded = self.wire_of(target), dict[str, Any]()
        try:
            if (upload := wire.upload(place, name, lines)) is not None:
                uploaded = await self._ask(target, upload, UPLOADED_IN)
        except UpstreamFailure as exc:
            return NotMade.REFUSED if _is_final(exc, target) else NotMade.LATER
        request = wire.create(place, name, lines, uploaded)
        try:
            return wire.read(await self._ask(target, request, UPLOADED_IN))
        except UpstreamFailure as exc:
            if _is_final(exc, target):
                return NotMade.REFUSED
            return NotMade.LATER if exc.outcome in NOT_TAKEN else NotMade.UNKNOWN

    async def find(
        self, target: Target, place: BatchPlace, name: str, *, since: float, lines: int, known: frozenset[str]
    ) -> RemoteBatch | None:
        """Return the batch that may have been made unheard: by its name; or one of that size and no earlier than
        ``since`` (unix seconds) that is none of the ``known``. Raises UpstreamFailure."""
        wire = self.wire_of(target)
        for one in wire.read_list(await self._ask(target, wire.search(place))):
            if wire.keeps_names and one.name == name:
                return one
            is_new = one.created_at is not None and one.created_at >= since - CLOCKS_DIFFER
            if not wire.keeps_names and is_new and one.lines == lines and one.id not in known:
                return one
        return None

    async def look(self, target: Target, place: BatchPlace, ident: str) -> tuple[RemoteBatch, dict[str, Any]]:
        """Return how far a batch is, and all that was told of it. Raises UpstreamFailure."""
        wire = self.wire_of(target)
        longest = LONGEST_RESULTS if wire.is_read_whole else MIB
        told = await self._ask(target, wire.look(place, ident), longest=longest)
        return wire.read(told), told

    async def cancel(self, target: Target, place: BatchPlace, ident: str) -> None:
        """Ask a provider to end a batch. One that has ended already may refuse: that is no failure. Raises
        UpstreamFailure."""
        with suppress(UpstreamRefused):
            await self._ask(target, self.wire_of(target).cancel(place, ident))

    async def results(
        self, target: Target, place: BatchPlace, batch: RemoteBatch, told: Mapping[str, Any]
    ) -> AsyncIterator[LineAnswer]:
        """Yield what came out, as it comes. Raises UpstreamFailure."""
        wire = self.wire_of(target)
        if wire.is_read_whole:
            for answer in wire.read_whole(told):
                yield answer
            return
        for path in batch.results:
            request = wire.request("GET", place, path)
            with closing(await self._send(target, request, PATIENCE)) as response:
                async for line in _lines_of(response):
                    if line.strip() and (found := wire.read_answer(line)) is not None:
                        yield found

    async def clean_up(self, target: Target, place: BatchPlace, told: Mapping[str, Any]) -> None:
        """Let go of what a provider keeps of a batch; what fails expires there by itself."""
        for request in self.wire_of(target).clean_up(place, told):
            with suppress(UpstreamFailure):
                (await self._send(target, request, PATIENCE)).close()

    async def _ask(
        self, target: Target, request: UpstreamRequest, patience: float = PATIENCE, longest: int = 8 * MIB
    ) -> dict[str, Any]:
        with closing(await self._send(target, request, patience)) as response:
            return decoded(await response.read(longest), OBJECTS)

    async def _send(self, target: Target, request: UpstreamRequest, patience: float) -> UpstreamResponse:
        settings = self._settings(target)
        built = self._providers.dress(request, target)
        response = await self._client.send(built, settings.timeouts.connect, patience)
        if 200 <= response.status < 300:
            return response
        with closing(response):
            body = await read_error_body(response)
        raise self._providers.format(target.model.provider).read_error(response.status, response.headers, body)

    def _settings(self, target: Target) -> ProviderSettings:
        return self._providers.settings_at(target)


def _is_final(failure: UpstreamFailure, target: Target) -> bool:
    """Whether a provider does not take it, now or later; one without a Batch API knows no such path. A team's own key
    that is refused is no fault that the deployment mends: ordinary calls have other keys, or tell the team of it."""
    is_own_refused = target.own is not None and failure.outcome in ("refused_key", "forbidden")
    return isinstance(failure, UpstreamRefused) or failure.outcome == "not_found" or is_own_refused


def digest_of(key: str | None) -> str:
    """Return what tells a provider's keys apart, and does not tell the key."""
    return "" if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]


async def _lines_of(response: UpstreamResponse) -> AsyncIterator[bytes]:
    """Yield the lines of an answer. Raises UpstreamError for one that is too long, or an answer that is cut."""
    rest = bytearray()
    while (piece := await response.next_piece(PATIENCE)) is not None:
        *ends, beginning = piece.split(b"\n")
        for end in ends:
            rest += end
            yield bytes(rest)
            rest.clear()
        rest += beginning
        if len(rest) > LONGEST_ANSWER:
            raise UpstreamError("A line of the upstream's results is too long.", outcome="too_long")
    if rest:
        yield bytes(rest)
