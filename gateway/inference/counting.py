# How many tokens a prompt has, without a call: Anthropic's models are counted by their own upstream, all others about.
# Nothing of it is held, charged or kept, and nothing that an upstream does here speaks for its health or its keys: it
# counts under limits of its own.

from __future__ import annotations

from contextlib import suppress

from msgspec import Struct

from gateway.calls.estimate import probable_prompt_tokens
from gateway.calls.image_urls import ImageUrls, is_outside
from gateway.core.principals import Caller
from gateway.moderation.moderator import Moderator
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.client import UpstreamClient, read_error_body
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.keys import TargetAway
from gateway.upstreams.team_keys import targets_for
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamRefused
from protocol.messages import CountRequest
from protocol.messages_to_chat import to_chat
from protocol.serving.off_loop import off_loop
from router import RoutingOptions
from router.catalog.catalog import Catalog
from router.catalog.targets import Target
from router.choose import permitted_name

PATIENCE = 3.0  # seconds; an estimate now is worth more than a count later


class PromptCounter(Struct, eq=False):
    """Counts prompts, under limits of its own."""

    _catalog: Catalog
    _providers: ProviderRegistry
    _client: UpstreamClient
    _breakers: Breakers
    _moderator: Moderator
    _images: ImageUrls

    async def count(self, caller: Caller, asked: CountRequest, size: int) -> int:
        """Return the tokens of a prompt: the upstream's own count where it has one and is well, else about how many.

        ``size``: bytes of the request as it came.
        Raises UnknownModel, ModelNotAllowed, UpstreamRefused for a prompt that its upstream would not take, and
        BadRequest for images that it may not fetch.
        """
        catalog = self._catalog
        may = RoutingOptions(allowed_models=caller.team.allowed_models, key_models=caller.key_models)
        name = permitted_name(asked.model, may, catalog)
        chat = await off_loop(size, lambda: to_chat(asked))  # refuses what no dialect could carry
        estimate = await off_loop(size, lambda: probable_prompt_tokens(chat))
        if (model := catalog.models.get(name)) is None:
            return estimate
        wire = self._providers.format(model.provider)
        if isinstance(wire, AnthropicFormat) and await self._moderator.may_leave(caller.team.safety, chat, asked):
            # Who asks with tokens, as at Vertex AI, is told about how many.
            at = targets_for(catalog.targets_at(model), caller.team, self._providers)
            targets = [one for one in at if self._providers.takes_keys(one)]
            if not all(is_outside(target, self._providers) for target in targets):
                await self._images.check(chat, size, caller.team.id)
            for target in targets:
                with suppress(TargetAway):
                    return await self._count_at(wire, target, asked, size) or estimate
        return estimate

    async def _count_at(self, wire: AnthropicFormat, target: Target, asked: CountRequest, size: int) -> int | None:
        """Return a target's own count, ``None`` when it gives none. Raises TargetAway, or UpstreamRefused."""
        timeouts = self._providers.settings(target.model.provider).timeouts
        permit = await self._breakers.enter(target)
        try:
            built = await off_loop(size, lambda: wire.build_count(asked, target, permit.api_key))
            built = self._providers.dress(built, target)
            response = await self._client.send(built, timeouts.connect, min(PATIENCE, timeouts.first_token))
            try:
                body = await read_error_body(response)  # an answer of a few bytes, or of none in a second
                if response.status == 200:
                    return wire.read_count(body)
                raise wire.read_error(response.status, response.headers, body)
            finally:
                response.close()
        except UpstreamRefused:
            raise
        except UpstreamFailure:
            return None
        finally:
            self._breakers.abandoned(permit)
