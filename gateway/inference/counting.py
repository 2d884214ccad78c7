# How many tokens a prompt has, without a call: where its upstream counts them (Anthropic's and OpenAI's own APIs, and
# engines, by their /tokenize), as that says; else about how many. Nothing of it is held, charged or kept, and nothing
# that an upstream does here speaks for its health or its keys: it counts under limits of its own.

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial

from msgspec import Struct, field

from gateway.calls.call import Call
from gateway.calls.estimate import probable_prompt_tokens
from gateway.calls.image_urls import ImageUrls, is_outside
from gateway.core.settings import ProviderSettings
from gateway.model_facts.price_library import knows_provider
from gateway.moderation.moderator import Moderator
from gateway.moderation.tied_ids import opened
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.registry import RESPONSES, ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.team_keys import targets_for
from gateway.upstreams.wire.base import Asking
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamFull, UpstreamRefused
from gateway.upstreams.wire.quirks import LEARNT_FOR, NO_PATH
from gateway.upstreams.wire.reading import read_count
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import ChatRequest
from protocol.serving.off_loop import off_loop
from router.catalog.catalog import Catalog
from router.catalog.targets import Route, Target
from router.choose import permitted_name
from router.preferences import at_preferred

PATIENCE = 3.0  # seconds; an estimate now is worth more than a count later
MOST_CONTEXTS = 2  # of a model, that a prompt has about as many tokens as, at the most, for an engine to count it
LONGEST_COUNT = 16 * 2**20  # bytes of an answer: an engine's has the tokens, too


class PromptCounter(Struct, eq=False):
    """Counts prompts, under limits of its own."""

    _catalog: Catalog
    _providers: ProviderRegistry
    _client: UpstreamClient
    _breakers: Breakers
    _moderator: Moderator
    _images: ImageUrls
    _lacking: dict[str, float] = field(default_factory=dict)  # accounts that count nothing; loop's seconds

    async def count(self, call: Call) -> int:
        """Return the tokens of a call's prompt: the upstream's own count where it has one and is well, else about how
        many.

        Raises UnknownModel, ModelNotAllowed, NoTargetFits where the caller wants none of its providers asked,
        UpstreamRefused for a prompt that its upstream would not take, and BadRequest for images that it may not fetch.
        """
        call = opened(call, partial(self._providers.untied, call.caller.team.id))
        catalog, chat, size, team = self._catalog, call.request, call.size, call.caller.team
        assert isinstance(chat, ChatRequest)
        name = permitted_name(chat.model, call.routing, catalog)
        estimate = await off_loop(size, lambda: probable_prompt_tokens(chat))
        if (model := catalog.models.get(name)) is None:
            return estimate
        served = [target for one in model.everywhere for target in catalog.targets_at(one)]
        at: Sequence[Target] = targets_for(served, team, self._providers)
        if at and (preference := call.routing.providers) is not None:
            at = at_preferred(Route(name, tuple(at), "named"), preference, {}).targets
        targets = [target for target in at if self._may_ask(target, call, estimate)]
        if targets and await self._moderator.may_leave(team.safety, chat, call.native):
            if not all(is_outside(target, self._providers) for target in targets):
                await self._images.check(chat, size, team.id)
            ends = asyncio.get_running_loop().time() + PATIENCE  # of all that are asked
            for target in targets:
                with suppress(TargetAway, UpstreamFull):
                    return await self._count_at(target, call, ends) or estimate
        return estimate

    def _may_ask(self, target: Target, call: Call, estimate: int) -> bool:
        """Whether a target counts for those who ask with keys (at Vertex AI it is tokens): an engine by its /tokenize,
        which any upstream may be that the price library does not know; a maker's API by its own.

        An engine counts no prompt that is far too long for it: its calls would wait for that."""
        provider = self._providers.settings_at(target)
        wire, loop = self._providers.format(provider.name), asyncio.get_running_loop()
        if not self._providers.takes_keys(target) or self._lacking.get(target.account, 0.0) > loop.time():
            return False
        if provider.responses and call.shown is not None:
            return True
        if isinstance(wire, OpenAIFormat):
            is_known = not provider.self_hosted and knows_provider(target.endpoint.base_url)
            is_bearable = estimate <= MOST_CONTEXTS * target.model.context
            return not is_known and provider.api_version is None and is_bearable
        return isinstance(wire, AnthropicFormat)

    async def _count_at(self, target: Target, call: Call, ends: float) -> int | None:
        """Return a target's own count, ``None`` when it gives none until ``ends``, in the loop's seconds. Raises
        TargetAway, UpstreamRefused, or UpstreamFull of an engine that has too many to count."""
        provider, loop = self._providers.settings_at(target), asyncio.get_running_loop()
        permit = await self._breakers.enter(target)
        asking = _asking(target, call, provider, permit.api_key)
        wire = self._providers.format(provider.name) if asking.response is None else RESPONSES
        assert isinstance(wire, AnthropicFormat | OpenAIFormat)
        patience = min(ends - loop.time(), provider.timeouts.first_token)
        ends = loop.time() + patience
        try:
            built = await off_loop(call.size, lambda: wire.build_count(asking))
            built = self._providers.dress(built, target)
            with closing(await self._client.send(built, provider.timeouts.connect, patience)) as response:
                response.due = ends
                body = await response.read(LONGEST_COUNT)
                if response.status == 200:
                    return await off_loop(len(body), lambda: read_count(body))
                raise wire.read_error(response.status, response.headers, body)
        except UpstreamFull:
            raise
        except UpstreamFailure as exc:
            is_guess = asking.response is None and not provider.self_hosted and isinstance(wire, OpenAIFormat)
            if exc.outcome in NO_PATH and isinstance(wire, OpenAIFormat):
                self._lacking[target.account] = loop.time() + LEARNT_FOR
            elif isinstance(exc, UpstreamRefused) and exc.outcome != Unsayable.outcome and not is_guess:
                raise
            return None
        finally:
            self._breakers.abandoned(permit)


def _asking(target: Target, call: Call, provider: ProviderSettings, api_key: str | None) -> Asking:
    """Return what a target is to count."""
    return Asking(
        request=call.request,
        target=target,
        api_key=api_key,
        streams=False,
        self_hosted=provider.self_hosted,
        native=call.as_message,
        response=call.shown if provider.responses else None,
        hosted=provider.hosted_tools,
    )
