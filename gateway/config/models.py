# One model of tollgate.yaml: where it is, what it can do and what it costs. A price comes from the file or from the
# price library, never from silence.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from billing.core.money import NanoDollars
from billing.core.pictures import AUTO, PicturePrice
from billing.core.prices import UNIT_PRICES, Price, PriceStep, times
from gateway.config.fields import Faults, Fields, Read, complain, is_empty, kind_of, meant, shown
from gateway.config.presets import priced_at
from gateway.config.readers import dollars, integer, list_of, number, one_of, section_of, text
from gateway.config.tree import Fault, Items, Node, Section, join, merge
from gateway.core.settings import PRICED_TIERS, ProviderSettings
from gateway.model_facts.claude_models import rules_of
from gateway.model_facts.listed_models import ListedModel, NoPrice, longest_output
from router.catalog.targets import Capability, ModelSpec, Tier
from router.prompt_size.token_counts import BYTES, ENCODINGS, NEWER_CLAUDE, counter_of, encoding_of

DEFAULT_CONTEXT = 32_768  # tokens, where neither the file nor the price library knows
DEFAULT_MAX_OUTPUT = 16_384
PROVIDERS_DISCOUNT = 0.5  # of the Batch APIs of OpenAI, Anthropic, Google and Azure, by their pages (November 2026)
NOTHING = Price(input=NanoDollars(0), output=NanoDollars(0))  # lets the check of a faulty file go on
OWN_CAPABILITIES = (Capability.CHAT, Capability.COMPLETIONS, Capability.JSON, Capability.LOGPROBS)
SIZE = re.compile(r"[0-9]+x[0-9]+")  # of a picture
KINDS = ("input", "output", "cached_input", "cache_write", "cache_write_1h", "reasoning")  # of tokens,
MEDIA_KINDS = ("audio_input", "cached_audio", "image_input", "cached_image", "audio_output")  # and those of a voice
WORDLESS = {Capability.EMBEDDINGS, Capability.RERANK}  # answers have no tokens
PIECES = {
    Capability.RERANK: "search_unit",
    Capability.IMAGES: "image",
    Capability.SPEECH: "character",
    Capability.TRANSCRIPTION: "audio_second",
}
HEAR = ("openai", "gemini")  # formats that have recordings among the parts of a prompt
OUTSIDE_CAPABILITIES = (Capability.CHAT, Capability.TOOLS, Capability.JSON)


def read_model(
    node: Node, faults: Faults, providers: Mapping[str, ProviderSettings], known: tuple[str, ...]
) -> ModelSpec | None:
    """Read one model. ``known``: every provider that the file names, the faulty ones too."""
    targets = node.entries.get("targets") if isinstance(node, Section) else None
    if targets is None or not isinstance(node, Section) or is_empty(targets):
        return _read_at_one(node, name_of(node), faults, providers, known)
    places = [one for one in targets.items if isinstance(one, Section)] if isinstance(targets, Items) else []
    if not places or not isinstance(targets, Items) or len(places) < len(targets.items):
        right = "[{provider: openai, weight: 2}, {provider: azure}]"
        return complain(targets, faults, f"expected a list of where it is served: {right}; found {kind_of(targets)}")
    if "provider" in node.entries:
        return complain(node.entries["provider"], faults, "each of `targets` names its provider; leave it out here")
    apart = ("targets", "weight")
    common = replace(node, entries={key: value for key, value in node.entries.items() if key not in apart})
    weight = Fields(node, node.path, faults).get("weight", number(0, 1000, above=True), 1.0)
    read: list[ModelSpec] = []
    for one in places:
        portion = Fields(one, one.path, faults).find("weight", number(0, 1000))
        own = replace(one, entries={key: value for key, value in one.entries.items() if key != "weight"})
        found: Faults = []
        spec = _read_at_one(merge(common, own), name_of(node), found, providers, known)
        told = {(fault.line, fault.message) for fault in faults}  # what all have in common is told once
        missing = [fault for fault in found if fault.message.startswith("missing")]
        faults += [fault for fault in found if fault in missing or (fault.line, fault.message) not in told]
        if spec.provider in (other.provider for other in read):
            complain(one, faults, f"{spec.provider} stands here twice; give a provider another of its `endpoints`")
        read.append(replace(spec, weight=weight, portion=portion))
    if all(spec.portion == 0 for spec in read):
        complain(targets, faults, "every weight is 0; a place with 0 is only asked when the others cannot be")
    return replace(read[0], others=tuple(read[1:]))


def _read_at_one(
    node: Node, name: str, faults: Faults, providers: Mapping[str, ProviderSettings], known: tuple[str, ...]
) -> ModelSpec:
    """Read a model at one provider."""
    fields = Fields(node, node.path, faults)
    provider_name = fields.need("provider", name_in(known, "provider"), "", "the name of one of `providers`")
    provider = providers.get(provider_name)
    own = provider is not None and provider.self_hosted
    upstream = fields.get("upstream_model", text, name)
    known_as = fields.get("listed_as", text, upstream)
    is_said = fields.has("price") and fields.has("context")
    listed = NoPrice("not asked for") if is_said else _listed(known_as, provider_name, provider)
    usual = OWN_CAPABILITIES if own else OUTSIDE_CAPABILITIES
    abilities = fields.get("abilities", list_of(one_of(*Capability), what="abilities", least=1), usual)
    tiers = fields.get("tiers", list_of(one_of(*Tier), what="tiers", least=1), tuple(Tier))
    context, max_output, default_output = _read_sizes(
        fields, node, faults, listed, None if own else longest_output(known_as)
    )
    if fields.has("gpu_hour") and provider is not None and not own:
        complain(fields.node("gpu_hour") or node, faults, f"only for our own engine; {provider_name} is no such thing")
    said = fields.find("batch_discount", number(0, 1, above=True))
    own_discount = said if own and said is not None else 1.0
    price = _price(fields, known_as, set(abilities), listed, own_discount)
    if provider is not None:
        _check_capabilities(fields.node("abilities") or node, faults, abilities, price, provider)
    has_batch_api = provider is not None and provider.batch_api
    batch_price = replace(price, batch_discount=PROVIDERS_DISCOUNT if said is None else said)
    spec = ModelSpec(
        name=name,
        provider=provider_name,
        upstream_model=upstream,
        price=price,
        batch_price=batch_price if has_batch_api else None,
        service_tiers=() if own else fields.get("service_tiers", _service_tiers(price), ()),
        context=context,
        max_output=max_output,
        default_output=default_output,
        capabilities=frozenset(map(Capability, abilities)),
        follows_engine=own and not fields.has("abilities"),
        tiers=frozenset(map(Tier, tiers)),
        parallel_n=provider is not None and provider.parallel_n,
        weight=fields.get("weight", number(0, 1000, above=True), 1.0),
        tokenizer=fields.find("tokenizer", _tokenizer) or _encoding(known_as, own=own),
        gpu_hour_nanousd=fields.find("gpu_hour", dollars),
        note=fields.find("note", text),
    )
    fields.close()
    return spec


def _read_sizes(
    fields: Fields, node: Node, faults: Faults, listed: ListedModel | NoPrice, known_output: int | None
) -> tuple[int, int, int]:
    """Read how long a prompt and its answer may be, the answer alone, and an answer whose caller names no limit."""
    known_context = listed.context if isinstance(listed, ListedModel) else None
    context = fields.get("context", integer(1), known_context or DEFAULT_CONTEXT)
    max_output = fields.get("max_output", integer(1), min(context, known_output or DEFAULT_MAX_OUTPUT))
    usual_output = max_output if fields.has("max_output") else min(max_output, DEFAULT_MAX_OUTPUT)
    default_output = fields.get("default_output", integer(1), usual_output)
    if default_output > max_output:
        at = fields.node("default_output") or node
        complain(at, faults, f"more than the {max_output} tokens of `max_output`")
    if max_output > context:
        complain(fields.node("max_output") or node, faults, f"more than the {context} tokens of `context`")
    return context, max_output, default_output


def _check_capabilities(
    node: Node, faults: Faults, named: Iterable[str], price: Price, provider: ProviderSettings
) -> None:
    """Say which capabilities need another provider, or another price."""
    for capability, formats in (("realtime", ("openai",)), ("audio", HEAR), ("voice", ("openai",))):
        if capability in named and (provider.self_hosted or provider.format not in formats):
            right = "` or `".join(formats)
            words = f"`{capability}` needs a provider with `format: {right}` that is no engine of our own"
            complain(node, faults, f"{words}; {provider.name} is none")
        elif capability == Capability.VOICE and capability in named and price.audio_output is None:
            complain(node, faults, "`voice` needs to know what is said aloud costs: add `audio_output` to `price`")


def _service_tiers(price: Price) -> Read[tuple[tuple[str, Price], ...]]:
    """Make a reader of service tiers, each with the factor on every price."""
    readers = dict.fromkeys(PRICED_TIERS, number(0, 100, above=True))
    read_factors: Read[dict[str, float]] = section_of(dict, readers)

    def read(node: Node, faults: Faults) -> tuple[tuple[str, Price], ...] | None:
        factors = read_factors(node, faults)
        return None if factors is None else tuple((tier, times(price, factor)) for tier, factor in factors.items())

    return read


def _encoding(upstream: str, *, own: bool) -> str | None:
    """Return what counts a model's prompts, where its name tells that: an encoding of OpenAI's, loaded, the way of the
    newer Claude; at our own engine, which may run a model with any vocabulary, its bytes."""
    if own:
        return BYTES
    encoding = NEWER_CLAUDE if rules_of(upstream).has_newer_tokenizer else encoding_of(upstream)
    if encoding is not None:
        counter_of(encoding)
    return encoding


def _tokenizer(node: Node, faults: Faults) -> str | None:
    """Read what counts a model's prompts: it is loaded here, so that no call waits for it and none finds it broken."""
    if (name := text(node, faults)) is None:
        return None
    if name not in (*ENCODINGS, BYTES) and not Path(name).is_file():
        right = f"the path of the model's tokenizer.json, {', '.join(ENCODINGS)} or {BYTES}"
        return complain(node, faults, f"there is no file {shown(node)}; expected {right}")
    try:
        counter_of(name)
    except ImportError as exc:
        return complain(node, faults, f"needs the package {exc.name}: pip install 'tollgate[tokenizers]'")
    except Exception:  # the package for it raises nothing more precise
        return complain(node, faults, f"{shown(node)} is no tokenizer.json that can be read")
    return name


def _listed(upstream: str, provider_name: str, provider: ProviderSettings | None) -> ListedModel | NoPrice:
    if provider is not None and provider.self_hosted:
        return NoPrice("no price library knows our own engine")
    from gateway.model_facts.price_library import listed_model

    base_url = priced_at(provider) if provider is not None else ""
    return listed_model(upstream, provider=provider_name, base_url=base_url)


def _price(
    fields: Fields, upstream: str, abilities: set[Capability], listed: ListedModel | NoPrice, discount: float
) -> Price:
    """Return the file's price, else the library's; never a zero that is not written.

    ``discount`` is that of tier batch at our own engines: it yields to others there. A commercial provider bills an
    ordinary call in full, whatever its tier; what goes through its Batch API has a price of its own.
    """
    if (node := fields.node("price")) is not None:
        return _written_price(node, fields.faults, abilities, discount)
    right = "{input: …, output: …}"
    match listed:
        case ListedModel(price=price) if Capability.AUDIO in abilities and not _prices_sound(upstream, price):
            why = f"the price library knows what words cost {upstream}, not what it hears"
            right = "{input: …, output: …, audio_input: …}"
        case ListedModel(price=price, has_output=has_output) if has_output or abilities <= WORDLESS:
            if Capability.TRANSCRIPTION in abilities:  # its prompts are heard, and counted as one kind of tokens
                price = replace(price, input=price.audio_input or price.input)
            return replace(price, batch_discount=discount)
        case ListedModel():
            why = f"the price library has no price for answers of {upstream}; if it only embeds"
            why += " or ranks, say so in `abilities`"
        case NoPrice(why):
            pass
    if fields.section is not None:
        node = fields.node("listed_as") or fields.node("upstream_model")
        why = why.replace(upstream, shown(node)) if node is not None else why
        why = f"missing, and {why}; add price: {right} in USD per million tokens"
        fields.faults.append(Fault(fields.line, join(fields.path, "price"), why))
    return NOTHING


def _prices_sound(upstream: str, price: Price) -> bool:
    """Whether what a model hears has a price. Of the library's Gemini without one of its own it is that of words."""
    return price.audio_input is not None or "gemini" in upstream.lower()


def _written_price(node: Node, faults: Faults, abilities: set[Capability], discount: float) -> Price:
    """Read what the file says. A tier names every kind that the price below it names: a gap would be a guess."""
    fields = Fields(node, node.path, faults)
    kinds = dict.fromkeys((*KINDS, *MEDIA_KINDS), dollars)
    needed = _needed(fields, abilities)
    named = [kind for kind in kinds if kind in needed or fields.has(kind)]
    given = {kind: fields.need(kind, dollars, NOTHING.input, "every price needs it") for kind in named}
    make_step = partial(PriceStep, output=NOTHING.output)  # of a model without words
    read_step = section_of(make_step, {"above": integer(1), **kinds}, needed=("above", *named))
    steps: tuple[PriceStep, ...] = fields.get("tiers", list_of(read_step, what="tiers", least=1), ())
    request = fields.get("request", dollars, NOTHING.request)
    no_table: tuple[PicturePrice, ...] = ()
    is_table = isinstance(fields.node("image"), Section)
    pictures = fields.get("image", read_pictures, no_table) if is_table else no_table
    plain = [kind for _, kind in UNIT_PRICES if kind != "image" or not is_table]
    units: dict[str, Any] = {kind: fields.get(kind, dollars, None) for kind in plain}
    if pictures:
        units["image"] = max(row.price for row in pictures)
    for part, whole in (("cached_audio", "audio_input"), ("cached_image", "image_input")):
        if part in given and whole not in given:
            complain(fields.node(part) or node, faults, f"a part of what `{whole}` costs: add that")
    fields.asked += kinds
    fields.close()
    for lower, upper in pairwise(steps):
        if upper.above <= lower.above:
            at = fields.node("tiers") or node
            complain(
                at, faults, f"tiers rise, and {upper.above} does not come after {lower.above} tokens of the prompt"
            )
    rates: dict[str, Any] = {"input": NOTHING.input, "output": NOTHING.output, **given}
    return Price(**rates, **units, pictures=pictures, request=request, steps=steps, batch_discount=discount)


def read_pictures(node: Node, faults: Faults) -> tuple[PicturePrice, ...] | None:
    """Read what pictures cost by quality, by size or by both: {low: 0.01, high: {1024x1024: 0.2, 1536x1024: 0.3}}."""
    section = Fields(node, node.path, faults).section
    rows: list[PicturePrice | None] = []
    for name, each in (section.entries if section is not None else {}).items():
        if SIZE.fullmatch(name):
            rows.append(_picture(each, faults, None, name))
        elif isinstance(each, Section) and each.entries:
            rows += [_of_size(size, one, faults, name) for size, one in each.entries.items()]
        else:
            rows.append(_picture(each, faults, name, None))
    if not rows:
        return complain(node, faults, "expected USD, or what each quality or size costs: {low: 0.01, high: 0.17}")
    read = tuple(row for row in rows if row is not None)
    return read if len(read) == len(rows) else None


def _of_size(size: str, node: Node, faults: Faults, quality: str) -> PicturePrice | None:
    if SIZE.fullmatch(size) or size == AUTO:
        return _picture(node, faults, quality, size)
    return complain(node, faults, "expected a size such as 1024x1024, or auto")


def _picture(node: Node, faults: Faults, quality: str | None, size: str | None) -> PicturePrice | None:
    price = dollars(node, faults)
    return None if price is None else PicturePrice(quality=quality, size=size, price=price)


def _needed(fields: Fields, abilities: set[Capability]) -> tuple[str, ...]:
    """Return the kinds that a price must name: models without words may be priced by the piece alone."""
    if abilities <= PIECES.keys() and all(fields.has(PIECES[each]) for each in abilities):
        return ()
    return ("input",) if abilities <= WORDLESS else ("input", "output")


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
