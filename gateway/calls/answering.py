# An upstream that has begun to answer a call: what is there, and how the rest is read.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from gateway.core.settings import ProviderSettings
from gateway.upstreams.resilience.breakers import Permit
from gateway.upstreams.wire.base import EventStream
from gateway.upstreams.wire.quirks import Quirks
from protocol.events import Event
from protocol.inference import WholeReply
from protocol.usage import Usage
from router.catalog.targets import Target


class OpenResponse(Protocol):
    """What a reply is read from: an upstream's response, or those of several replies."""

    async def next_piece(self, patience: float = math.inf) -> bytes | None:
        """Return the next bytes, as ``UpstreamResponse`` does."""

    def close(self) -> None:
        """Let the upstream go. Never raises."""


class Answering(Struct, frozen=True, eq=False):
    """An upstream that has begun to answer: a stream with its first events, or a whole reply."""

    target: Target
    provider: ProviderSettings
    first: list[Event]
    events: EventStream | None = None
    response: OpenResponse | None = None
    whole: WholeReply | None = None
    usage: Usage | None = None
    dropped: tuple[str, ...] = ()  # fields of the request that the upstream was not told
    permit: Permit | None = None  # under which it was asked,
    began: float = 0.0  # and when it began to answer, in monotonic seconds
    found: Quirks | None = None  # how it was asked, where that is not what is known of its target
    let_go: Callable[[], None] | None = None  # gives back the slot that it holds
    expected_hit: float | None = None  # share of the prompt that was known to be cached there; None: it does not tell
    prompt: Usage | None = None  # what our own engine told of the prompt, before its first token
    is_kept: bool = False  # no upstream was asked: the cache has the answer

    def close(self) -> None:
        """Close the upstream, at once if it is still speaking, and give its slot back."""
        if self.response is not None:
            self.response.close()
        if self.let_go is not None:
            self.let_go()
