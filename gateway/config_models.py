# One model of tollgate.yaml: where it is, what it can do and what it costs. A price comes from the file or from the
# price library, never from silence.

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from billing.money import NanoDollars
from billing.prices import Price
from gateway.config_fields import Faults, Fields, Read, complain, meant, shown
from gateway.config_readers import dollars, integer, list_of, number, one_of, struct_of, text
from gateway.config_yaml import Fault, Node, join
from gateway.price_library import ListedModel, listed_model
from gateway.settings import ProviderSettings
from router.targets import Ability, ModelSpec, Tier

DEFAULT_CONTEXT = 32_768  # tokens, where neither the file nor the price library knows
DEFAULT_MAX_OUTPUT = 16_384
OWN_ABILITIES = (Ability.CHAT, Ability.COMPLETIONS)
OUTSIDE_ABILITIES = (Ability.CHAT, Ability.TOOLS, Ability.JSON)


def read_model(
    node: Node, faults: Faults, providers: Mapping[str, ProviderSettings], known: tuple[str, ...]
) -> ModelSpec | None:
    """Read one model. ``known``: every provider that the file names, the faulty ones too."""
    fields = Fields(node, node.path, faults)
    provider_name = fields.need("provider", name_in(known, "provider"), "", "the name of one of `providers`")
    provider = providers.get(provider_name)
    own = provider is not None and provider.self_hosted
    upstream = fields.get("upstream_model", text, name_of(node))
    listed = _listed(upstream, provider_name, provider)
    usual = OWN_ABILITIES if own else OUTSIDE_ABILITIES
    abilities = fields.get("abilities", list_of(one_of(*Ability), what="abilities", least=1), usual)
    tiers = fields.get("tiers", list_of(one_of(*Tier), what="tiers", least=1), tuple(Tier))
    context = fields.get("context", integer(1), _usual_context(listed, fields.has("price")))
    max_output = fields.get("max_output", integer(1), min(context, DEFAULT_MAX_OUTPUT))
    if max_output > context:
        complain(fields.node("max_output") or node, faults, f"more than the {context} tokens of `context`")
    if fields.has("gpu_hour") and provider is not None and not own:
        complain(fields.node("gpu_hour") or node, faults, f"only for our own engine; {provider_name} is no such thing")
    spec = ModelSpec(
        name=name_of(node),
        provider=provider_name,
        upstream_model=upstream,
        price=_price(fields, upstream, set(abilities) == {Ability.EMBEDDINGS}, context, listed),
        context=context,
        max_output=max_output,
        abilities=frozenset(map(Ability, abilities)),
        tiers=frozenset(map(Tier, tiers)),
        weight=fields.get("weight", number(0, 1000, above=True), 1.0),
        gpu_hour_nanousd=fields.find("gpu_hour", dollars),
        note=fields.find("note", text),
    )
    fields.close()
    return spec


def _listed(upstream: str, provider_name: str, provider: ProviderSettings | None) -> ListedModel | None:
    if provider is not None and provider.self_hosted:
        return None
    endpoints = provider.endpoints if provider is not None else ()
    return listed_model(upstream, provider=provider_name, base_url=endpoints[0].base_url if endpoints else "")


def _usual_context(listed: ListedModel | None, is_priced: bool) -> int:
    if listed is None or listed.context is None:
        return DEFAULT_CONTEXT
    return listed.context if is_priced or listed.true_up_to is None else min(listed.context, listed.true_up_to)


def _price(fields: Fields, upstream: str, only_embeds: bool, context: int, listed: ListedModel | None) -> Price:
    """Return the file's price, else the library's; never a zero that nobody wrote."""
    discount = fields.get("batch_discount", number(0, 1, above=True), 1.0)
    node = fields.node("price")
    if node is not None:
        kinds = dict.fromkeys(("input", "output", "cached_input", "cache_write"), dollars)
        needed = ("input",) if only_embeds else ("input", "output")
        written = struct_of(_WrittenPrice, kinds, needed=needed)(node, fields.faults) or _WrittenPrice()
        return Price(
            input=written.input,
            output=written.output,
            cached_input=written.cached_input,
            cache_write=written.cache_write,
            batch_discount=discount,
        )
    right = "{input: …, output: …} in USD per million tokens"
    if listed is None:
        if fields.section is not None:
            node = fields.node("upstream_model")
            known = f"the price library does not know {shown(node) if node is not None else upstream}"
            fields.faults.append(
                Fault(fields.line, join(fields.path, "price"), f"missing, and {known}; add price: {right}")
            )
        return Price(input=NanoDollars(0), output=NanoDollars(0))
    if listed.true_up_to is not None and context > listed.true_up_to:
        step = f"{upstream} costs more beyond {listed.true_up_to} prompt tokens"
        message = f"{step}: set context: {listed.true_up_to}, or add price: {right} that covers both"
        fields.faults.append(Fault(fields.line, join(fields.path, "price"), message))
    return replace(listed.price, batch_discount=discount)


class _WrittenPrice(Struct, frozen=True, kw_only=True):
    input: NanoDollars = NanoDollars(0)
    output: NanoDollars = NanoDollars(0)
    cached_input: NanoDollars | None = None
    cache_write: NanoDollars | None = None


def name_in(known: Iterable[str], what: str) -> Read[str]:
    """Make a reader of a name that must be one of ``known``."""

    def read(node: Node, faults: Faults) -> str | None:
        name = text(node, faults)
        if name is None or name in known:
            return name
        return complain(node, faults, f"unknown {what} {shown(node)}; {meant(name, known)}")

    return read


def name_of(node: Node) -> str:
    """Return the name that an entry stands under."""
    return node.path.partition(".")[2]
