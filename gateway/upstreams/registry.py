# Which format, credentials and patience each provider of tollgate.yaml has.

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import count

import structlog
from msgspec.structs import replace

from gateway.core.keys import label_of_provider_key
from gateway.core.principals import Team
from gateway.core.settings import DIRECT, ProviderSettings
from gateway.storage.encryption import Sealer, Unsealable
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.bedrock.wire_format import BedrockFormat
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.gemini.wire_format import GeminiFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.responses.wire_format import ResponsesFormat
from gateway.upstreams.tokens import Tokens, source_of
from gateway.upstreams.wire.base import Provider, UpstreamRequest
from gateway.upstreams.wire.quirks import KnownQuirks
from router.catalog.targets import Endpoint, Target, TeamKeys

FORMATS: dict[str, Provider] = {
    "openai": OpenAIFormat(),
    "anthropic": AnthropicFormat(),
    "gemini": GeminiFormat(),
    "bedrock": BedrockFormat(),
}
RESPONSES: Provider = ResponsesFormat()  # of calls for a response, at a provider that has this API too
KEPT_FOR = "kept\n{}"  # the label of a sealed id, by team
PURPOSE = "provider-key"  # of the sealer of teams' own keys
# Headers that name the deployment's account.
OF_ACCOUNTS = frozenset({"openai-organization", "openai-project", "x-goog-user-project"})
MOST_RETIRED = 5000  # places that were left, the latest: more than come and go while any call runs


log = structlog.get_logger()


class ProviderRegistry:
    """The providers by name; deals their keys out in turn.

    ``before``: what the file said until it was read again. A call that began then may still ask an endpoint that is no
    longer named, with the keys that belonged there; a key is never sent to an endpoint that it did not stand beside.
    """

    def __init__(
        self,
        providers: dict[str, ProviderSettings],
        before: ProviderRegistry | None = None,
        sealer: Sealer | None = None,
    ) -> None:
        self._settings = providers
        self._sealer: Sealer | None = sealer if before is None else before._sealer
        self.names_teams = any(one.team_keys is not None for one in providers.values())
        self.teams_named = frozenset(team for one in providers.values() for team in one.team_keys or ())
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
        """Return the next of the deployment's keys for a target, each in its turn, or ``None`` when it needs none."""
        return self._next_of(self.settings_at(target))

    def keys_at(self, target: Target) -> tuple[str, ...]:
        """Return the keys that a target is asked with: the deployment's, or those of its team, as far as they open."""
        provider, own = self.settings_at(target), target.own
        if own is None:
            return provider.api_keys
        keys = [key for ident, sealed in own.sealed if (key := self._opened(own.team, ident, sealed)) is not None]
        return tuple(dict.fromkeys((*keys, *(provider.team_keys or {}).get(own.team, ()))))

    def own_keys(self, team: Team, provider: ProviderSettings) -> TeamKeys | None:
        """Return a team's own keys of a provider, if it has any."""
        sealed = team.provider_keys.get(provider.name, ()) if takes_team_keys(provider) else ()
        return TeamKeys(team.id, sealed) if sealed or team.id in (provider.team_keys or ()) else None

    async def token_for(self, target: Target, client: UpstreamClient, now: float) -> str | None:
        """Return the bearer token for a target, or ``None`` when it takes keys. ``now``: monotonic seconds. Raises
        UpstreamFailure."""
        provider = self.settings_at(target)
        source = source_of(provider) if target.own is None else None
        return None if source is None else await self.tokens.of(source, client, now, provider.egress)

    def dress(self, built: UpstreamRequest, target: Target) -> UpstreamRequest:
        """Return a request with the headers that tollgate.yaml adds, to go the way that it says."""
        provider = self.settings_at(target)
        if target.own is not None:  # on connections of its team's alone, and without what names another account
            headers = {name: value for name, value in provider.headers.items() if name not in OF_ACCOUNTS}
            headers = {**built.headers, **headers}
            return replace(built, headers=headers, egress=provider.egress, party=target.own.team)
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

    def tied(self, team_id: str, ident: str) -> str:
        """Return an id of what a provider keeps, as its team is told it: another one cannot use it."""
        assert self._sealer is not None, "a registry without a sealer meets ids of teams"
        kind, sealed = ident.partition("_")[0], self._sealer.seal(ident.encode(), KEPT_FOR.format(team_id))
        return f"{kind}_{urlsafe_b64encode(sealed).decode()}"

    def untied(self, team_id: str, told: str) -> str | None:
        """Return what a team was told as the provider knows it; ``None`` where it was told no such id."""
        assert self._sealer is not None, "a registry without a sealer meets ids of teams"
        try:
            return self._sealer.unseal(urlsafe_b64decode(told.partition("_")[2]), KEPT_FOR.format(team_id)).decode()
        except (Unsealable, ValueError):
            return None

    def _next_of(self, provider: ProviderSettings) -> str | None:
        keys = provider.api_keys
        return keys[next(self._turns[provider.name]) % len(keys)] if keys else None

    def _opened(self, team: str, ident: str, sealed: bytes) -> str | None:
        assert self._sealer is not None, "a registry without a sealer meets keys of teams"
        try:
            return self._sealer.unseal(sealed, label_of_provider_key(team, ident)).decode()
        except Unsealable as exc:
            log.error("provider_key_does_not_open", team_id=team, key_id=ident, reason=str(exc))
            return None

    def _by_place(self) -> dict[tuple[str, Endpoint], ProviderSettings]:
        return {(each.name, endpoint): each for each in self._settings.values() for endpoint in each.endpoints}


def takes_team_keys(provider: ProviderSettings) -> bool:
    """Whether teams can bring keys of their own: where a provider is asked with keys, and is none of our engines."""
    return source_of(provider) is None and not provider.self_hosted
