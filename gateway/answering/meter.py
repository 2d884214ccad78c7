# What a reply has used, as far as anybody can tell: what its upstream counted, else what went past.

from __future__ import annotations

from msgspec.structs import replace

from billing.holds import Settlement
from billing.prices import cost_of
from gateway.answering.call import Call
from gateway.answering.continuation import Source
from gateway.answering.estimate import probable_prompt_tokens, probable_usage, tokens_of
from gateway.providers.base import WholeReply
from protocol.events import Delta
from protocol.usage import Usage
from router.bounds import output_tokens_most
from router.targets import Tier


class Meter:
    """Counts one reply. Show it every delta, and what its upstream tells."""

    def __init__(self, call: Call, source: Source) -> None:
        self.told = source.answering.usage  # by its upstream, or settled on
        self.output_seen = 0  # tokens, by what went past
        self._call = call
        self._source = source
        self._prompt_seen: int | None = None
        self._most = 0  # output tokens that the hold covers; known with the prompt
        self._gpu_seconds: dict[int, float] = {}  # by choice: what our own engine told as it went

    def take(self, delta: Delta) -> None:
        """Count a delta that goes past."""
        self.output_seen += tokens_of(delta)
        if delta.gpu_seconds:
            self._gpu_seconds[delta.index] = delta.gpu_seconds

    def take_whole(self, whole: WholeReply) -> None:
        """Count a reply that came whole, unless its upstream has."""
        self.told = self.told or probable_usage(self._call.request, whole, self._output_most())

    def so_far(self) -> Settlement:
        """Return what was used so far, and what it costs."""
        if self._prompt_seen is None:
            self._prompt_seen = probable_prompt_tokens(self._call.request)
            self._most = self._output_most()
        seen = self._source.tokens_made or self.output_seen
        seen = min(seen, self._most)  # what is only estimated never exceeds the hold
        usage = self.told or Usage(
            input_tokens=self._prompt_seen,
            output_tokens=seen,
            gpu_seconds=sum(self._gpu_seconds.values()),
        )
        if usage.output_tokens < seen:  # told at the beginning of a reply that has gone on since
            usage = replace(usage, output_tokens=seen)
        return Settlement(usage, self.cost_of(usage))

    def settle_on_seen(self) -> None:
        """Go by what was used so far: the reply ends here, and an earlier count may be less than what went past."""
        self.told = self.so_far().usage

    def whole(self) -> Usage:
        """Return what a whole reply has used: what its upstream said, if it did."""
        if self.told is None:
            self.told = self.so_far().usage
        return self.told

    def cost_of(self, usage: Usage) -> int:
        """Return what ``usage`` costs the team, in nano-dollars."""
        batch = self._call.wish.tier is Tier.BATCH
        return cost_of(usage, self._source.answering.target.model.price, batch=batch, at=self._call.created_at)

    def _output_most(self) -> int:
        return output_tokens_most(self._call.request, self._source.answering.target.model)
