# What engines of our own say that they can do, where tollgate.yaml names no `abilities` of their models: whether they
# read pictures, and whether their chat template has tools. A model has what every replica that was heard says; one that
# does not answer was last heard as it probably still is. Of a model none of whose replicas was heard nothing is known.

from __future__ import annotations

from msgspec.structs import replace

from gateway.core.settings import ProviderSettings, Settings
from router.catalog.capabilities import TOLD_BY_ENGINES
from router.catalog.targets import Capability, ModelSpec


class ToldAbilities:
    """What the engines at each address said last."""

    def __init__(self) -> None:
        self._by_address: dict[str, frozenset[Capability]] = {}

    def hear(self, address: str, abilities: tuple[str, ...]) -> bool:
        """Take what an engine says of itself, and return whether it is news."""
        known, told = self._by_address.get(address), frozenset(one for one in TOLD_BY_ENGINES if one in abilities)
        self._by_address[address] = told
        return told != known  # a first word is news, also that it can do nothing more: what others can counts no more

    def has_heard(self, address: str) -> bool:
        """Whether anything was heard of what is there."""
        return address in self._by_address

    def hear_nothing(self, address: str) -> bool:
        """Take that what answers there is no engine of ours, unless it was one; return whether that is news."""
        return address not in self._by_address and self.hear(address, ())

    def keep(self, addresses: set[str]) -> None:
        """Forget what was said at all other addresses."""
        self._by_address = {where: told for where, told in self._by_address.items() if where in addresses}

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
        capabilities = model.capabilities | frozenset.intersection(*heard)
        return replace(model, capabilities=capabilities, follows_engine=False)
