# Which format, credentials and patience each provider of tollgate.yaml has.

from __future__ import annotations

from itertools import count

from gateway.providers.anthropic import AnthropicFormat
from gateway.providers.base import Provider
from gateway.providers.manners import KnownManners
from gateway.providers.openai import OpenAIFormat
from gateway.settings import ProviderSettings

FORMATS: dict[str, Provider] = {"openai": OpenAIFormat(), "anthropic": AnthropicFormat()}


class ProviderRegistry:
    """The providers by name; deals their keys out in turn."""

    def __init__(self, providers: dict[str, ProviderSettings]) -> None:
        self._settings = providers
        self._turns = {name: count() for name in providers}
        self.manners = KnownManners()

    def settings(self, name: str) -> ProviderSettings:
        """Return what tollgate.yaml says of a provider."""
        return self._settings[name]

    def format(self, name: str) -> Provider:
        """Return the wire format that a provider speaks."""
        return FORMATS[self._settings[name].format]

    def next_key(self, name: str) -> str | None:
        """Return the provider's next key, each in its turn, or ``None`` when it has none."""
        keys = self._settings[name].api_keys
        return keys[next(self._turns[name]) % len(keys)] if keys else None
