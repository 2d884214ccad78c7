# What engines of our own say that they can do, where tollgate.yaml names no `abilities` of their models: whether they
# read pictures, and whether their chat template has tools. A model has what every replica that was heard says; one that
# does not answer was last heard as it probably still is.

from __future__ import annotations

from msgspec.structs import replace

from gateway.core.settings import ProviderSettings, Settings
from router.catalog.targets import Capability, ModelSpec

# What adds to chats; an endpoint of its own (embeddings, speech, …) is offered where the file says so.
LEARNED = frozenset((Capability.TOOLS, Capability.VISION, Capability.AUDIO))


class ToldAbilities:
    """What the engines at each address said last."""

    def __init__(self) -> None:
        self._by_address: dict[str, frozenset[Capability]] = {}

    def hear(self, address: str, abilities: tuple[str, ...]) -> bool:
        """Take what an engine says of itself, and return whether it is news."""
        known, told = self._by_address.get(address), frozenset(one for one in LEARNED if one in abilities)
        self._by_address[address] = told
        return told != (known or frozenset())

    def join(self, settings: Settings) -> Settings:
        """Return the settings with what the engines of models can do that the file leaves to them."""
        models = {
            name: replace(self._taught(model, settings), others=tuple(self._taught(o, settings) for o in model.others))
            for name, model in settings.models.items()
            if any(one.follows_engine for one in model.everywhere)
        }
        return replace(settings, models={**settings.models, **models}) if models else settings

    def _taught(self, model: ModelSpec, settings: Settings) -> ModelSpec:
        provider: ProviderSettings | None = settings.providers.get(model.provider)
        if provider is None or not model.follows_engine:
            return model
        heard = [self._by_address[one.base_url] for one in provider.endpoints if one.base_url in self._by_address]
        if not heard:
            return model
        return replace(model, capabilities=model.capabilities | frozenset.intersection(*heard))
