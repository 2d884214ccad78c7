# Models that a file offers by their provider alone: `models: "*"` or some names in a provider's section. Each becomes
# a model PROVIDER/NAME, at the price library's price: without one it is refused by name, or, of all, left out.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from gateway.config.fields import Faults
from gateway.config.models import read_model
from gateway.config.presets import priced_at
from gateway.config.tree import Fault, Node, Section, tree_of
from gateway.core.settings import ProviderSettings
from gateway.model_facts.listed_models import embeds, hears, is_offered, sees, speaks
from router.catalog.targets import Capability, ModelSpec

ALL = "*"
MAKERS = {"gemini": ("gemini-", "gemma-"), "anthropic": ("claude",)}  # whose models a format alone can ask
PREFIXES = {"api.fireworks.ai": "accounts/fireworks/models/"}  # what a provider's names for its models begin with


def read_offers(
    root: Mapping[str, Node], faults: Faults, providers: Mapping[str, ProviderSettings], taken: Mapping[str, object]
) -> dict[str, ModelSpec]:
    """Return the models that providers offer by themselves, but those whose name the file has given to another."""
    found: dict[str, ModelSpec] = {}
    for provider in providers.values():
        at = root.get(provider.name)
        line = at.key_lines.get("models", at.line) if isinstance(at, Section) else 0
        if not (provider.models and provider.endpoints):
            continue  # it offers nothing, or where it answers is a fault already
        if not _has_prices(provider):
            words = "no prices are known of this provider: offer its models under `models`, each with its price"
            faults.append(Fault(line, f"providers.{provider.name}.models", words))
            continue
        for model in dict.fromkeys((*_named(provider), *all_priced(provider)[0])):
            name = f"{provider.name}/{model}"
            if name in taken:
                continue
            asked_as = _prefix(provider) + model
            said = {"provider": provider.name, "upstream_model": asked_as, "abilities": _abilities(model)}
            spec = read_model(tree_of(said, f"models.{name}", line), faults, providers, (provider.name,))
            if spec is not None:
                found[name] = spec
    return found


def all_priced(provider: ProviderSettings) -> tuple[list[str], list[str]]:
    """Return the models of a provider that the price library lists and that the gateway could offer: those with a
    price, and those without; nothing of a provider that does not offer all."""
    if ALL not in provider.models:
        return [], []
    from gateway.model_facts.price_library import listed_names

    priced, unpriced = listed_names(base_url=priced_at(provider), prefix=_prefix(provider))
    makers = MAKERS.get(provider.format)

    def may(model: str) -> bool:
        return is_offered(model) and (makers is None or model.startswith(makers))

    return list(filter(may, priced)), list(filter(may, unpriced))


def _has_prices(provider: ProviderSettings) -> bool:
    from gateway.model_facts.price_library import knows_provider

    return not provider.self_hosted and knows_provider(priced_at(provider))


def _prefix(provider: ProviderSettings) -> str:
    return PREFIXES.get(urlsplit(priced_at(provider)).hostname or "", "")


def _named(provider: ProviderSettings) -> Iterator[str]:
    yield from (name for name in provider.models if name != ALL)


def _abilities(model: str) -> list[str]:
    if embeds(model):
        return [Capability.EMBEDDINGS.value]
    usual = [Capability.CHAT.value, Capability.TOOLS.value, Capability.JSON.value]
    more = ((Capability.VISION, sees), (Capability.AUDIO, hears), (Capability.VOICE, speaks))
    return [*usual, *(capability.value for capability, has in more if has(model))]
