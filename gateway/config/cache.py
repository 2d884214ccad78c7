# The section `cache` of tollgate.yaml: which calls go by the cache, and how much of it there may be.

from __future__ import annotations

from collections.abc import Iterable

from gateway.config.fields import Fields, complain, meant
from gateway.config.readers import duration, integer, list_of, one_of, text
from gateway.config.tree import Section
from gateway.core.settings import CacheSettings, CacheUse

USES = ("on", "all", "off")


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
