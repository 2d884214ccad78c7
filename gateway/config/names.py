# The names of tollgate.yaml that stand for models: aliases, automatic routes, fallbacks. Each must lead to a model that
# exists, and that can do what it is named for.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from billing.core.money import to_nano
from gateway.config.fields import Faults, Fields, Read, complain, meant
from gateway.config.models import name_in, name_of
from gateway.config.readers import dollars, list_of, number, switch, text
from gateway.config.tree import Node
from router.catalog.catalog import AutoRoute, ShadowTraffic
from router.catalog.targets import Capability, ModelSpec

WORDS = {Capability.CHAT, Capability.COMPLETIONS}
ONLY = {  # what models without words do
    Capability.EMBEDDINGS: "embeds",
    Capability.RERANK: "ranks",
    Capability.IMAGES: "makes pictures",
}
KINDS = WORDS | ONLY.keys()  # of requests: each needs one of these

Models = Mapping[str, ModelSpec]  # those that the file has right
Names = Mapping[str, str]  # every model by its own name, and by its aliases


def read_alias(node: Node, faults: Faults, models: tuple[str, ...]) -> str | None:
    """Read the model that another name stands for."""
    if name_of(node) in models:
        return complain(node, faults, "there is a model of this name; an alias would hide it")
    return name_in(models, "model")(node, faults)


def read_route(node: Node, faults: Faults, names: Names, models: Models) -> AutoRoute | None:
    """Read an automatic choice between models that answer."""
    if name_of(node) in names:
        complain(node, faults, "there is a model or an alias of this name; a route needs a name of its own")

    def why_never(model: ModelSpec) -> str | None:
        if model.capabilities & WORDS:
            return None
        only = " and ".join(ONLY[kind] for kind in ONLY if kind in model.capabilities)
        return f"a route chooses who answers, and {model.name} only {only}; requests name it themselves"

    read_models = list_of(_model_in(names, models, why_never), what="models", least=1)
    fields = Fields(node, node.path, faults)
    route = AutoRoute(
        small=_once(fields.need("small", read_models, (), "models that answer simple requests")),
        large=_once(fields.need("large", read_models, (), "models that answer the others")),
        quality=fields.get("quality", number(0, 1), 0.8),
        shadow=_shadow_of(fields, names, models),
    )
    fields.close()
    return route


def _shadow_of(route: Fields, names: Names, models: Models) -> ShadowTraffic | None:
    if (node := route.node("held_back")) is None:
        return None

    def why_never(model: ModelSpec) -> str | None:
        return None if Capability.CHAT in model.capabilities else f"a judge is asked by chat, which {model.name} lacks"

    fields = Fields(node, node.path, route.faults)
    shadow = ShadowTraffic(
        share=fields.need("share", number(0, 1, above=True), 0.0, "of calls that a small model answers, such as 0.02"),
        budget_nanousd=fields.need("usd_per_day", dollars, to_nano(0), "the most for each team, such as 1.00"),
        explore=fields.get("explore", switch, False),
        judge=fields.find("judge", _model_in(names, models, why_never)),
        recalibrate=frozenset(fields.find("recalibrate", list_of(text, what="team ids")) or ()),
    )
    fields.close()
    return shadow


def read_fallbacks(root: Fields, names: Names, models: Models) -> dict[str, tuple[str, ...]]:
    """Read which models are asked in another's place."""
    found: dict[str, tuple[str, ...]] = {}
    section = Fields(root.node("fallbacks"), "fallbacks", root.faults).section
    for name, node in section.entries.items() if section is not None else ():
        if name not in names:
            complain(node, root.faults, f"unknown model {name}; {meant(name, names)}")
        first = names.get(name, name)
        read_spare = _model_in(names, models, partial(_why_no_spare, models.get(first)))
        found[first] = _once(list_of(read_spare, what="models", least=1)(node, root.faults) or ())
    return found


def _why_no_spare(first: ModelSpec | None, spare: ModelSpec) -> str | None:
    """Return why a model can never be asked in the place of ``first``, and what could; ``None`` where it can."""
    if first is None:
        return None
    kinds = first.capabilities & KINDS
    if spare.name == first.name:
        return "a model cannot fall back to itself"
    if not (shared := kinds & spare.capabilities):
        return f"{spare.name} serves nothing that is asked of {first.name}: a model with {' or '.join(sorted(kinds))}"
    if not first.tiers & spare.tiers:
        return f"{spare.name} serves no tier that {first.name} does: a model with {' or '.join(sorted(first.tiers))}"
    if shared == {Capability.EMBEDDINGS} and spare.upstream_model != first.upstream_model:
        return f"vectors of different models do not compare: one whose `upstream_model` is {first.upstream_model}, too"
    return None


def _model_in(names: Names, models: Models, why_never: Callable[[ModelSpec], str | None]) -> Read[str]:
    """Make a reader of a name that leads to a model; it returns the model's own. ``why_never`` says of a model why it
    can't do what it is named for."""
    read_name = name_in(names, "model")

    def read(node: Node, faults: Faults) -> str | None:
        if (name := read_name(node, faults)) is None:
            return None
        model = models.get(names[name])
        if model is not None and (why := why_never(model)) is not None:
            return complain(node, faults, why)
        return names[name]

    return read


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
