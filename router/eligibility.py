# Which models can serve a request at all, however healthy they are; and when none can, the refusal that says why.

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from billing.core.money import to_text
from billing.core.prices import UNIT_PRICES
from protocol.chat import ChatRequest
from protocol.completions import CompletionRequest
from protocol.embeddings import RerankRequest
from protocol.inference import Generation, Request
from protocol.media.images import ImageRequest
from router.catalog.capabilities import FIELD_OF, TOLD_BY_ENGINES, missing_capabilities, needed_capabilities
from router.catalog.catalog import Catalog
from router.catalog.errors import ContextTooShort, CostLimitTooLow, LacksCapability, NoReplica, NoTargetFits
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Capability, ModelSpec, Tier
from router.prompt_size.bounds import cost_most, hosted_most
from router.prompt_size.prompt_bounds import PromptBound, bound_prompt
from router.prompt_size.prompt_lengths import prompt_characters, prompt_tokens_least

NAMED = 10  # models that a refusal names
PRICE_OF = dict(UNIT_PRICES)  # the field of a price, by the unit of a usage


class Needs(Struct, frozen=True, kw_only=True):
    """What a request asks of a model, measured once for all of them."""

    request: Request
    capabilities: frozenset[Capability]
    tokens_least: int  # tokens of the prompt and of the shortest reply, at the least
    tier: Tier
    max_cost_nanousd: int | None
    prompt: PromptBound | None = None  # looked at closely, where the call's cost matters

    def are_affordable(self, model: ModelSpec) -> bool:
        return self.max_cost_nanousd is None or self.cost_most(model) <= self.max_cost_nanousd

    def cost_most(self, model: ModelSpec) -> int:
        return cost_most(self.request, model, self.prompt, batch=self.tier is Tier.BATCH)


def needs_of(request: Request, options: RoutingOptions, models: Sequence[ModelSpec]) -> Needs:
    """Measure the request, as far as it matters to ``models``."""
    contexts = [one.context for model in models for one in model.everywhere]
    tokens = 0
    # A token has a character at the least, so only a prompt of many characters is worth a closer look.
    if prompt_characters(request) >= min(contexts):
        tokens = prompt_tokens_least(request, enough=max(contexts)) + _reply_least(request)
    return Needs(
        request=request,
        capabilities=needed_capabilities(request),
        tokens_least=tokens,
        tier=options.tier,
        max_cost_nanousd=options.max_cost_nanousd,
        prompt=None if options.max_cost_nanousd is None else bound_prompt(request).closely(),
    )


def can_serve(model: ModelSpec, needs: Needs) -> bool:
    """Whether nothing that the request needs is missing from the model."""
    return (
        needs.capabilities <= model.capabilities
        and needs.tokens_least <= model.context
        and needs.tier in model.tiers
        and (needs.max_cost_nanousd is None or needs.are_affordable(model))
    )


def part_that_can(model: ModelSpec, needs: Needs) -> ModelSpec | None:
    """Return the model at those of its providers where it can serve the request; ``None``: at none."""
    if not model.others:
        return model if can_serve(model, needs) else None
    able = [one for one in model.everywhere if can_serve(one, needs)]
    if not able or len(able) > len(model.others):
        return model if able else None
    return replace(able[0], others=tuple(able[1:]))


def is_smaller(model: ModelSpec, other: ModelSpec, catalog: Catalog) -> bool:
    """Whether ``model`` is a smaller model than ``other``: by an automatic route that names both, else by its price.

    A catalogue tells no sizes. Where no route does, less than half the price of an answer means a smaller model, unless
    it is the same one elsewhere.
    """
    if model.upstream_model == other.upstream_model:
        return False
    routes = [route for route in catalog.auto.values() if {model.name, other.name} <= {*route.small, *route.large}]
    if routes:
        return any(model.name not in route.large and other.name not in route.small for route in routes)
    return 2 * model.price.output < other.price.output


class Shortcoming(Struct, frozen=True):
    """Why a model is not asked: a short stable word, and the same to be read after the model's name."""

    code: str
    words: str


def shortcomings(model: ModelSpec, needs: Needs) -> list[Shortcoming]:
    """Return what keeps the model from serving the request; nothing when it can."""
    missing = missing_capabilities(needs.capabilities, model)
    found = [Shortcoming(f"lacks_{capability}", f"lacks {capability}") for capability in missing]
    if needs.tokens_least > model.context:
        words = f"holds {model.context} tokens, and {needs.tokens_least} or more are needed"
        found.append(Shortcoming("context_length", words))
    if needs.tier not in model.tiers:
        found.append(Shortcoming("tier", f"is not served in tier {needs.tier}"))
    if not needs.are_affordable(model):
        words = f"may cost up to ${to_text(needs.cost_most(model))}, above x-max-cost-usd"
        found.append(Shortcoming("max_cost_usd", words))
    return found


def explain_refusal(
    models: Sequence[ModelSpec], needs: Needs, options: RoutingOptions, catalog: Catalog
) -> NoTargetFits | NoReplica:
    """Return the error for a request that none of ``models`` can serve: the first need that leaves none of them."""
    asked = needs.request.model
    able = [model for model in models if needs.capabilities <= model.capabilities]
    if not able:
        if any(one.follows_engine and needs.capabilities <= one.capabilities | TOLD_BY_ENGINES for one in models):
            return NoReplica(f"No replica of '{asked[:100]}' was heard yet, so what it can do is not known. Try again.")
        nearest = max(models, key=lambda model: len(needs.capabilities & model.capabilities))
        missing = missing_capabilities(needs.capabilities, nearest)
        return LacksCapability(
            f"'{asked}' cannot serve this request: it lacks {' and '.join(missing)}. "
            f"{_others(needs, options, catalog)}",
            param=FIELD_OF[missing[0]],
        )
    wide = [model for model in able if needs.tokens_least <= model.context]
    if not wide:
        most = max(model.context for model in able)
        return ContextTooShort(  # in words that clients look for
            f"The prompt is too long: {needs.tokens_least} tokens > {most} maximum, the context of '{asked}'. "
            f"Shorten it. {_others(needs, options, catalog)}",
            param=_prompt_field(needs.request),
        )
    timely = [model for model in wide if needs.tier in model.tiers]
    if not timely:
        return LacksCapability(
            f"'{asked}' is not served in tier {needs.tier}. {_others(needs, options, catalog)}", param="x-tier"
        )
    advice = "lower max_tokens" if isinstance(needs.request, Generation) else "shorten the input"
    return CostLimitTooLow(
        f"This request may cost up to ${to_text(min(needs.cost_most(model) for model in timely))} on '{asked}', more "
        f"than x-max-cost-usd (${to_text(needs.max_cost_nanousd or 0)}) allows. Raise it, or {advice}.",
        param="x-max-cost-usd",
    )


def _others(needs: Needs, options: RoutingOptions, catalog: Catalog) -> str:
    """Say which models of the catalogue could serve the request and are the team's to use."""
    usable = [model for model in catalog.models.values() if options.may_use(model.name)]
    needs = needs_of(needs.request, options, usable) if usable else needs  # measured again, up to the widest context
    prices = [PRICE_OF[unit] for unit in hosted_most(needs.request)]  # a tool without one is run by no provider
    able = [model for model in usable if can_serve(model, needs)]
    names = [model.name for model in able if all(getattr(model.price, kind) is not None for kind in prices)]
    return f"Models that can: {some_of(names)}." if names else "No model that this team may use can serve it."


def some_of(names: Sequence[str]) -> str:
    """Return names as a refusal has room for them: a catalogue may have hundreds."""
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


def _reply_least(request: Request) -> int:
    return 1 if isinstance(request, Generation) and request.output_limit != 0 else 0


def _prompt_field(request: Request) -> str:
    match request:
        case ChatRequest():
            return "messages"
        case CompletionRequest() | ImageRequest():
            return "prompt"
        case RerankRequest():
            return "documents"
        case _:
            return "input"
