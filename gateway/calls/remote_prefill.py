# Long prompts of a call for our own engine are computed by replicas that do nothing else, and the replica that replies
# reads their KV blocks. Whatever fails there, it computes the prompt itself.

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import msgspec
import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from billing.core.records import Prefill
from gateway.calls.call import Call
from gateway.core.clock import Clock
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.openai.parts import seconds
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.wire.base import Asking, UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Target
from router.prompt_size.bounds import with_output_limit
from router.prompt_size.prompt_bounds import USUAL_TOKEN_BYTES
from router.replicas import by_beginning

ASKED = {"do_remote_decode": True, "do_remote_prefill": False}  # as vLLM's proxies ask
FIELD = "kv_transfer_params"
ABOUT_REPLIES = frozenset({"min_tokens", "stop_token_ids", "ignore_eos"})  # fields that mean nothing to a prompt
AWAY = 5.0  # seconds for which a replica that failed is not asked
SHARE_OF_PATIENCE = 0.5  # of what the first token may take
LONGEST = 1024 * 1024  # bytes of an answer

log = structlog.get_logger()


class _Usage(Struct, frozen=True):
    gpu_seconds: float | None = None


class _Answer(Struct, frozen=True):
    kv_transfer_params: dict[str, Any] | None = None
    usage: _Usage | None = None


_read = msgspec.json.Decoder(_Answer).decode


class RemotePrefills(Struct, eq=False):
    """Asks for prompts to be computed where their provider says so."""

    _providers: ProviderRegistry
    _client: UpstreamClient
    # The characters of a call's prompt, and how many of them a target has cached; None where it takes no prompt that
    # was computed elsewhere.
    _prompt_at: Callable[[Call, Target], tuple[int, int] | None]
    _clock: Clock
    # Until when, by address, and by address and model; then one call at a time, until one is answered.
    _away: dict[str, float] = {}
    _running: Counter[str] = field(default_factory=Counter)  # by address

    async def params_for(
        self, call: Call, asking: Asking, patience: float
    ) -> tuple[dict[str, Any] | None, Prefill | None]:
        """Have a prompt computed, if that pays; return what the replica that replies is to be told, and what it took.

        ``None``: it computes the prompt itself. Raises UpstreamUnable for what it could not be asked either.
        """
        place = self._place_for(call, asking)
        if place is None:
            return None, None
        address = place.endpoint.base_url
        self._running[address] += 1
        try:
            return await self._told_by(place, await self._build(call, replace(asking, target=place)), patience)
        finally:
            self._running[address] -= 1

    async def _told_by(
        self, place: Target, built: UpstreamRequest, patience: float
    ) -> tuple[dict[str, Any] | None, Prefill | None]:
        address, began = place.endpoint.base_url, self._clock.monotonic()
        try:
            answer = await self._ask(built, place, patience * SHARE_OF_PATIENCE)
        except (UpstreamFailure, TimeoutError, msgspec.DecodeError) as exc:
            self._away[address] = self._clock.monotonic() + AWAY
            log.warning("prefill_failed", endpoint=address, error=str(exc))
            return None, None
        self._away.pop(address, None)
        if answer is None:
            return None, None
        if (told := answer.kv_transfer_params) is None:
            self._away[place.key] = self._clock.monotonic() + AWAY
            log.warning("prefill_not_held", endpoint=address, model=place.model.name)
        else:
            self._away.pop(place.key, None)
        took = seconds(answer.usage.gpu_seconds) if answer.usage is not None else 0.0
        return told, Prefill(place.key, round((self._clock.monotonic() - began) * 1000, 3), took)

    def _place_for(self, call: Call, asking: Asking) -> Target | None:
        """Return where a prompt is computed, if not where its reply is made."""
        target, request = asking.target, asking.request
        said = self._providers.settings(target.model.provider).prefill
        if said is None or asking.resume is not None or not _has_one_prompt(request):
            return None
        if (prompt := self._prompt_at(call, target)) is None:
            return None
        size, found = prompt
        if size - found < max(said.tokens * USUAL_TOKEN_BYTES, said.share * size):
            return None
        now, model = self._clock.monotonic(), replace(target.model, provider=said.provider)
        endpoints = self._providers.settings(said.provider).endpoints
        able = [place for place in (Target(model, one) for one in endpoints) if self._may_be_asked(place, now)]
        if not able:
            return None
        loads = [self._running[one.endpoint.base_url] for one in able]
        return by_beginning(able, call.beginning, loads)[0]

    def _may_be_asked(self, place: Target, now: float) -> bool:
        """Whether a replica is well, and holds what it computes of a model. Of one that failed, or held nothing, one
        call finds out: where it hangs, all others would wait."""
        address = place.endpoint.base_url
        away = max(self._away.get(address, -math.inf), self._away.get(place.key, -math.inf))
        return away == -math.inf or (away <= now and not self._running[address])

    async def _build(self, call: Call, asking: Asking) -> UpstreamRequest:
        """Return what one replica is asked. Raises UpstreamUnable."""
        target = asking.target
        asking = replace(
            asking,
            request=_prompt_alone(asking.request),
            api_key=self._providers.next_key_at(target),
            token=None,
            streams=False,
            extra={**_without_replies(asking.extra), FIELD: ASKED},
            fails_over=True,
            marks="",
        )
        wire = self._providers.format(target.model.provider)
        return self._providers.dress(await off_loop(call.size, lambda: wire.build_request(asking)), target)

    async def _ask(self, built: UpstreamRequest, target: Target, patience: float) -> _Answer | None:
        """Have one replica compute a prompt; return what it says, ``None`` where the request is at fault. Raises
        UpstreamFailure, TimeoutError and DecodeError."""
        provider = self._providers.settings(target.model.provider)
        async with asyncio.timeout(patience):
            with closing(await self._client.send(built, provider.timeouts.connect, patience)) as response:
                if response.status in (400, 413):
                    return None  # the replica that replies says what is wrong with the request
                if response.status != 200:
                    raise UpstreamError(f"It answered {response.status}.", outcome=f"status_{response.status}")
                return _read(await response.read(LONGEST))


def _has_one_prompt(request: object) -> bool:
    if isinstance(request, CompletionRequest):
        return isinstance(request.prompt, str) and not request.echo
    return isinstance(request, ChatRequest)


def _prompt_alone(request: Any) -> Any:
    """Return a request for a prompt's first token: what belongs to the prompt stays, tools among it."""
    alone = replace(request, n=None, logprobs=None, stop=None)
    if isinstance(alone, ChatRequest):
        alone = replace(alone, top_logprobs=None)
    return with_output_limit(alone, 1)


def _without_replies(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name not in ABOUT_REPLIES}
