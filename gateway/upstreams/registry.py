# Which format, credentials and patience each provider of tollgate.yaml has.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count

from msgspec.structs import replace

from gateway.core.settings import DIRECT, ProviderSettings
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.bedrock.wire_format import BedrockFormat
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.gemini.wire_format import GeminiFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.responses.wire_format import ResponsesFormat
from gateway.upstreams.tokens import Tokens, source_of
from gateway.upstreams.wire.base import Provider, UpstreamRequest
from gateway.upstreams.wire.quirks import KnownQuirks
from router.catalog.targets import Endpoint, Target

FORMATS: dict[str, Provider] = {
    "openai": OpenAIFormat(),
    "anthropic": AnthropicFormat(),
    "gemini": GeminiFormat(),
    "bedrock": BedrockFormat(),
}
RESPONSES: Provider = ResponsesFormat()  # of calls for a response, at a provider that has this API too
MOST_RETIRED = 5000  # places that were left, the latest: more than come and go while any call runs


class ProviderRegistry:
    """The providers by name; deals their keys out in turn.

    ``before``: what the file said until it was read again. A call that began then may still ask an endpoint that is no
    longer named, with the keys that belonged there; a key is never sent to an endpoint that it did not stand beside.
    """

    def __init__(self, providers: dict[str, ProviderSettings], before: ProviderRegistry | None = None) -> None:
        self._settings = providers
        self.quirks: KnownQuirks = before.quirks if before is not None else KnownQuirks()
        self.tokens: Tokens = before.tokens if before is not None else Tokens()
        self._turns: defaultdict[str, Iterator[int]] = defaultdict(count)
        self._retired: dict[tuple[str, Endpoint], ProviderSettings] = {}  # by places that are no longer named
        if before is not None:
            known, here = before._retired | before._by_place(), self._by_place().keys()
            retired = [(place, said) for place, said in known.items() if place not in here]
            self._retired = dict(retired[-MOST_RETIRED:])

    def names(self) -> Iterable[str]:
        """Return every provider's name."""
        return self._settings.keys()

    def settings(self, name: str) -> ProviderSettings:
        """Return what tollgate.yaml says of a provider."""
        return self._settings[name]

    def settings_at(self, target: Target) -> ProviderSettings:
        """Return what tollgate.yaml says, or said, of a target's provider at its endpoint."""
        name = target.model.provider
        if self._retired and (retired := self._retired.get((name, target.endpoint))) is not None:
            return retired
        return self._settings[name]

    def stands_at(self, target: Target) -> bool:
        """Return whether tollgate.yaml says, or said in the time of this process, that a target's provider is there."""
        name, place = target.model.provider, target.endpoint
        if name not in self._settings:
            return False
        places = {one.base_url for one in self._settings[name].endpoints}
        return place.base_url in places or (name, place) in self._retired

    def format(self, name: str) -> Provider:
        """Return the wire format that a provider speaks."""
        return FORMATS[self._settings[name].format]

    def next_key(self, name: str) -> str | None:
        """Return the provider's next key, each in its turn, or ``None`` when it has none."""
        return self._next_of(self._settings[name])

    def next_key_at(self, target: Target) -> str | None:
        """Return the next key for a target, each in its turn, or ``None`` when it needs none."""
        return self._next_of(self.settings_at(target))

    async def token_for(self, target: Target, client: UpstreamClient, now: float) -> str | None:
        """Return the bearer token for a target, or ``None`` when it takes keys. ``now``: monotonic seconds. Raises
        UpstreamFailure."""
        provider = self.settings_at(target)
        source = source_of(provider)
        return None if source is None else await self.tokens.of(source, client, now, provider.egress)

    def dress(self, built: UpstreamRequest, target: Target) -> UpstreamRequest:
        """Return a request with the headers that tollgate.yaml adds, to go the way that it says."""
        provider = self.settings_at(target)
        if not provider.headers and provider.egress is DIRECT:
            return built
        return replace(built, headers={**built.headers, **provider.headers}, egress=provider.egress)

    def takes_keys(self, target: Target) -> bool:
        """Whether a target is asked with keys, or with nothing; else with tokens."""
        return source_of(self.settings_at(target)) is None

    def refuse_token(self, target: Target, token: str) -> None:
        """Use a token no longer that a target refused."""
        if (source := source_of(self.settings_at(target))) is not None:
            self.tokens.drop(source, token)

    def _next_of(self, provider: ProviderSettings) -> str | None:
        keys = provider.api_keys
        return keys[next(self._turns[provider.name]) % len(keys)] if keys else None

    def _by_place(self) -> dict[tuple[str, Endpoint], ProviderSettings]:
        return {(each.name, endpoint): each for each in self._settings.values() for endpoint in each.endpoints}
