# Sections of tollgate.yaml whose keys are names that calls ask for: `canaries`, which names send a share of their
# conversations to another model; and `cache`, which calls go by the cache, and how much of it there may be.

from __future__ import annotations

from collections.abc import Iterable

from gateway.config.catalog import Catalogue
from gateway.config.fields import Fields, complain, meant
from gateway.config.models import name_in
from gateway.config.readers import duration, integer, list_of, number, one_of, struct_of, text
from gateway.config.tree import Section
from gateway.core.settings import CacheSettings, CacheUse
from router.catalog.catalog import Canary
from router.catalog.targets import Capability

USES = ("on", "all", "off")


def read_canaries(root: Fields, whole: Catalogue, kept: Catalogue) -> dict[str, Canary]:
    """Read the section: names are of the ``whole`` file; a canary goes whose name or model is not ``kept``."""
    section = Fields(root.node("canaries"), "canaries", root.faults).section
    if section is None:
        return {}
    asked = (*whole.models, *whole.auto, *whole.aliases)
    read = struct_of(
        Canary,
        {
            "model": name_in(whole.models, "model"),
            "share": number(0, 1, above=True),
            "errors": number(0, 1),
            "slower": number(1),
            "dearer": number(1),
            "least": integer(1),
            "window": duration,
        },
        needed=("model", "share"),
    )
    found: dict[str, Canary] = {}
    for name, node in section.entries.items():
        if name not in asked:
            complain(node, root.faults, f"unknown model {name}; {meant(name, asked)}")
        canary = read(node, root.faults)
        if canary is None:
            continue
        if canary.model == whole.aliases.get(name, name):
            complain(node, root.faults, f"{name} means {canary.model} already; a canary is another model")
        if Capability.EMBEDDINGS in whole.models[canary.model].capabilities and not (
            {Capability.CHAT, Capability.COMPLETIONS} & whole.models[canary.model].capabilities
        ):
            complain(node, root.faults, "vectors of different models do not compare: a canary answers in words")
        found[name] = canary
    names = {*kept.models, *kept.auto, *kept.aliases}
    return {name: canary for name, canary in found.items() if name in names and canary.model in kept.models}


def read_cache(root: Fields, offered: Iterable[str]) -> CacheSettings:
    """Read the section; a model's name is any that is ``offered``, a team's any at all."""
    usual = CacheSettings()
    fields = Fields(root.node("cache"), "cache", root.faults)
    settings = CacheSettings(
        models=_models(root, fields, offered),
        ttl=fields.get("ttl", duration, usual.ttl),
        max_bytes=fields.get("max_bytes", integer(0), usual.max_bytes),
        max_answer_bytes=fields.get("max_answer_bytes", integer(1), usual.max_answer_bytes),
        shared=frozenset(fields.find("shared", list_of(text, what="team ids")) or ()),
    )
    fields.close()
    return settings


def _models(root: Fields, fields: Fields, offered: Iterable[str]) -> dict[str, CacheUse]:
    section = Fields(fields.node("models"), "cache.models", root.faults).section
    if section is None:
        return {}
    named = (name for kind in ("models", "routes", "aliases") for name in _names(root, kind))
    known = [*dict.fromkeys((*named, *offered))]
    found: dict[str, CacheUse] = {}
    for name, node in section.entries.items():
        if name not in known:
            complain(node, root.faults, f"unknown model {name}; {meant(name, known)}")
        if (use := one_of(*USES)(node, root.faults)) is not None:
            found[name] = use
    return found


def _names(root: Fields, kind: str) -> tuple[str, ...]:
    node = root.node(kind)
    return tuple(node.entries) if isinstance(node, Section) else ()
