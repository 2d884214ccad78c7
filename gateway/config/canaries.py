# The section `canaries` of tollgate.yaml: which names send a share of their conversations to another model.

from __future__ import annotations

from gateway.config.catalog import Catalogue
from gateway.config.fields import Fields, complain, meant
from gateway.config.models import name_in
from gateway.config.readers import duration, integer, number, struct_of
from router.catalog.catalog import Canary
from router.catalog.targets import Capability


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
