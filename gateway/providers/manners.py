# What OpenAI-compatible upstreams differ in: under which name they take the output limit, and whether they know
# ``stream_options`` and ``reasoning_effort``. What one refuses as unknown is learnt from its words, once, for as long
# as the process lives.

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal
from urllib.parse import urlsplit

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gateway.providers.errors import UpstreamRefused
from router.targets import Target

log = structlog.get_logger()

# Whose newer models take no ``max_tokens``. Elsewhere that is the name which everybody knows, and some that don't know
# the other one ignore it in silence.
NEWER_NAME = ("openai.com", "azure.com")
UNKNOWN = re.compile(
    r"unsupported|unknown|unrecogni[sz]ed|unexpected|extra|additional propert"
    r"|\bnot (?:supported|permitted|allowed|recogni[sz]ed|known|a valid)",
    re.IGNORECASE,
)

OutputLimit = Literal["max_tokens", "max_completion_tokens"]
OTHER_NAME: dict[OutputLimit, OutputLimit] = {
    "max_tokens": "max_completion_tokens",
    "max_completion_tokens": "max_tokens",
}


class Manners(Struct, frozen=True):
    """How one target wants to be asked."""

    output_limit: OutputLimit = "max_completion_tokens"
    stream_options: bool = True  # without them, an upstream that tells no usage is counted by its pieces
    effort: bool = True  # else what Anthropic's clients say of thinking is left to the model

    def bettered_by(self, refusal: UpstreamRefused, is_native: bool) -> Manners | None:
        """Return what to try after a refusal of a field as such; ``None`` for refusals of anything else.

        ``is_native``: the caller spoke Anthropic's dialect, and an effort is what we made of its thinking.
        """
        words = f"{refusal.code} {refusal.message}"
        if UNKNOWN.search(words) is None:
            return None
        named = refusal.param or words
        if self.stream_options and "stream_options" in named:
            return replace(self, stream_options=False)
        if re.search(rf"\b{self.output_limit}\b", named):
            return replace(self, output_limit=OTHER_NAME[self.output_limit])
        if self.effort and is_native and "reasoning_effort" in named and "value" not in words:
            return replace(self, effort=False)
        return None


class KnownManners:
    """What was learnt of each target."""

    def __init__(self) -> None:
        self._learnt: dict[str, Manners] = {}

    def of(self, target: Target) -> Manners:
        """Return how to ask a target."""
        if self._learnt and (learnt := self._learnt.get(target.key)) is not None:
            return learnt
        return usual_manners(target.endpoint.base_url)

    def learn(self, target: Target, tried: Manners, refusal: UpstreamRefused, is_native: bool) -> bool:
        """Learn from a refusal of what was ``tried``; return whether asking again may help."""
        better = tried.bettered_by(refusal, is_native)
        if better is None:
            return False
        if self.of(target) == tried:  # else another call has learnt it meanwhile
            self._learnt[target.key] = better
            log.info("upstream_manners_learnt", target=target.key, refused=refusal.message[:200])
        return True


@lru_cache(256)
def usual_manners(base_url: str) -> Manners:
    """Return how an upstream is asked of which nothing is known yet."""
    host = urlsplit(base_url).hostname or ""
    is_newer = any(host == name or host.endswith(f".{name}") for name in NEWER_NAME)
    return Manners("max_completion_tokens" if is_newer else "max_tokens")
