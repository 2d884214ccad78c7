# What a reply has used: what its upstream counted, else what went past. The upstream's last count is what it bills, so
# it is believed; a count that output went past after, or that says there was none, is only a floor.

from __future__ import annotations

from msgspec.structs import replace

from billing.core.holds import Settlement
from billing.core.prices import Price, cost_of, of_picture
from gateway.calls.call import Call
from gateway.calls.estimate import (
    charged_prompt_tokens,
    filled_in,
    heard_tokens,
    probable_usage,
    spoken_tokens,
    tokens_of,
)
from gateway.inference.failover import FailoverStream
from protocol.chat import ChatReply
from protocol.events import Delta
from protocol.inference import Generation, WholeReply
from protocol.media.audio import SpeechRequest, TranscriptionRequest
from protocol.media.images import ImageReply, ImageRequest
from protocol.messages import CodeResult, WebSearchResultBlock
from protocol.usage import Usage
from router.catalog.targets import Tier
from router.prompt_size.bounds import output_tokens_most, requests_made
from router.prompt_size.prompt_bounds import PromptBound

NOTHING_TOLD = Usage()
MEDIA = (SpeechRequest, TranscriptionRequest, ImageRequest)  # what of these no upstream counts is filled in


class Meter:
    """Counts one reply. Show it every delta, and what its upstream tells."""

    def __init__(self, call: Call, source: FailoverStream, prompt: PromptBound | None = None) -> None:
        self.output_seen = 0  # tokens, by what went past
        self._told = source.answering.usage  # by its upstream
        self._seen_when_told = 0  # of output_seen
        self._used = Usage()  # of the upstream's own tools, by what went past
        self._spoken = 0  # tokens of sound, by what went past
        self._tier: str | None = None  # of service, by its upstream
        self._picture: tuple[str | None, str | None] = (None, None)  # quality and size of pictures, by their upstream
        self._call = call
        self._source = source
        self._prompt = prompt  # what its hold covers
        self._prompt_seen: int | None = None
        self._most = 0  # output tokens that the hold covers; known with the prompt
        self._gpu_seconds: dict[int, float] = {}  # by choice: what our own engine told as it went

    def take(self, delta: Delta) -> None:
        """Count a delta that goes past."""
        self.output_seen += tokens_of(delta)
        if delta.spoken or delta.server_block or delta.used or delta.gpu_seconds or delta.picture:
            self._take_beside_words(delta)

    def _take_beside_words(self, delta: Delta) -> None:
        if delta.spoken is not None:
            spoken = spoken_tokens(delta.text)
            self.output_seen += spoken
            self._spoken += spoken
        if isinstance(delta.server_block, WebSearchResultBlock):
            self._used += Usage(web_searches=delta.server_block.has_found)
        elif isinstance(delta.server_block, CodeResult):
            self._used = self._used.at_least(Usage(containers=1))
        if delta.used is not None:
            self._used += delta.used
        if delta.gpu_seconds:
            self._gpu_seconds[delta.index] = delta.gpu_seconds
        if delta.picture is not None:
            self._picture = delta.picture.quality, delta.picture.size

    def tell(self, usage: Usage, tier: str | None = None) -> None:
        """Take in what the upstream has counted until now, and in which tier it says to answer."""
        self._told, self._seen_when_told = usage, self.output_seen
        self._tier = tier or self._tier

    def take_whole(self, whole: WholeReply) -> None:
        """Count a reply that came whole, unless its upstream has."""
        told = self._told
        self._tier = getattr(whole, "service_tier", None)
        if isinstance(whole, ImageReply):
            self._picture = whole.quality, whole.size
        if isinstance(whole, ChatReply):
            voices = [choice.message.audio for choice in whole.choices]
            self._spoken = sum(spoken_tokens(audio.transcript) for audio in voices if audio is not None)
        if not isinstance(self._call.request, Generation):
            self._told = filled_in(self._call.request, self._source.answering.target.model, self._prompt, told)
        elif told is None:
            probable = probable_usage(self._call.request, whole, self._output_most())
            prompt, extra = self._probable_prompt(), self._extra_requests()
            heard = heard_tokens(self._prompt, prompt)
            usage = replace(probable, input_tokens=prompt, extra_requests=extra, audio_input_tokens=heard)
            self._told = usage.at_least(getattr(whole, "used", None) or Usage())
        elif not told.output_tokens:
            probable = probable_usage(self._call.request, whole, self._output_most())
            said, spoken = probable.output_tokens, probable.audio_output_tokens
            self._told = replace(told, output_tokens=said, audio_output_tokens=spoken)

    def so_far(self) -> Settlement:
        """Return what was used so far, and what it costs: nothing, where the cache has it."""
        usage = self.usage()
        return Settlement(usage, 0 if self._source.answering.is_kept else self.cost_of(usage))

    def usage(self) -> Usage:
        """Return what was used so far: all of it, once the reply has ended."""
        if isinstance(self._call.request, MEDIA):
            return filled_in(self._call.request, self._source.answering.target.model, self._prompt, self._told)
        told, seen = self._told, self.output_seen
        if told is not None and seen == self._seen_when_told and (told.output_tokens or not seen):
            return self._with_sound(told) if self._spoken and not told.audio_output_tokens else told
        if self._prompt_seen is None:
            self._prompt_seen = self._probable_prompt()
            self._most = self._output_most()
        seen = min(self._source.tokens_made or seen, self._most)  # what is only estimated never exceeds the hold
        if told is not None:
            seen = max(told.output_tokens, seen)
            spoken = max(told.audio_output_tokens, min(self._spoken, seen))
            return replace(told, output_tokens=seen, audio_output_tokens=spoken).at_least(self._used)
        gpu_seconds, extra = sum(self._gpu_seconds.values()), self._extra_requests()
        prompt = self._source.answering.prompt or NOTHING_TOLD
        usage = Usage(
            self._prompt_seen,
            # Told by a replica that goes on with a reply of one that told nothing, it may be more than was reckoned.
            cached_input_tokens=min(prompt.cached_input_tokens, self._prompt_seen),
            output_tokens=seen,
            gpu_seconds=gpu_seconds,
            extra_requests=extra,
            audio_input_tokens=heard_tokens(self._prompt, self._prompt_seen),
            audio_output_tokens=min(self._spoken, seen),
        )
        return usage.at_least(self._used)

    def cost_of(self, usage: Usage) -> int:
        """Return what ``usage`` costs the team, in nano-dollars."""
        batch = self._call.routing.tier is Tier.BATCH
        return cost_of(usage, self.price, batch=batch, at=self._call.created_at)

    @property
    def price(self) -> Price:
        """The price of what was used: that of the tier in which its upstream says that it answered, where it has one
        of its own; else that of the tier which was asked for. Of pictures: as far as their upstream tells which."""
        model = self._source.answering.target.model
        in_tier = model.price_in(self._tier) if self._tier and model.service_tiers else None
        return of_picture(in_tier or model.price, *self._picture)

    def discount_on(self, usage: Usage, cost: int) -> int:
        """Return by how much ``usage`` costs the team less than the same live call, for its tier, in nano-dollars."""
        if self._call.routing.tier is not Tier.BATCH or (price := self.price).batch_discount == 1.0:
            return 0
        return max(0, cost_of(usage, price, at=self._call.created_at) - cost)

    def _with_sound(self, told: Usage) -> Usage:
        """Return what an upstream counted that does not tell sound from words."""
        return replace(told, audio_output_tokens=min(self._spoken, told.output_tokens - told.reasoning_tokens))

    def _probable_prompt(self) -> int:
        if (told := self._source.answering.prompt) is not None:
            return told.input_tokens
        return charged_prompt_tokens(self._call.request, self._source.answering.target.model, self._prompt)

    def _extra_requests(self) -> int:
        return requests_made(self._call.request, self._source.answering.target.model) - 1

    def _output_most(self) -> int:
        return output_tokens_most(self._call.request, self._source.answering.target.model)
