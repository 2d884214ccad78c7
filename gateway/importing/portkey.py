# Portkey's gateway config, a JSON object: one strategy over targets, which may nest.

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gateway.importing.draft import Draft, kinds, usual_variable
from gateway.importing.source import Part

HINTS = {
    "on_status_codes": "the next target follows every failure that may pass, and no other",
    "onStatusCodes": "the next target follows every failure that may pass, and no other",
    "conditions": "a route by conditions is a model of its own name for each",
    "input_guardrails": "see `safety` (docs/safety.md)",
    "output_guardrails": "see `safety` (docs/safety.md)",
    "before_request_hooks": "see `safety` (docs/safety.md)",
    "after_request_hooks": "see `safety` (docs/safety.md)",
    "forward_headers": "no header of a client's is forwarded; see `providers.NAME.headers`",
    "max_tokens": "callers say it themselves, or `default_output` does",
    "temperature": "callers say it themselves",
    "plugins_enabled": "see `safety` (docs/safety.md)",
    "rate_limits": "limits are a team's or key's: `tollgate teams set`",
    "admin_token": "set TOLLGATE_ADMIN_KEY",
}


class Flat(Struct):
    """A strategy without its nesting: who shares the calls, by weight, and who steps in."""

    shared: list[tuple[Part, float]]
    spares: list[Part]


def read_portkey(root: Part, name: str) -> Draft:
    """Return what a config comes to here, where its calls ask for the model ``name``."""
    draft = Draft()
    flat = _flatten(root, draft)
    spares = []
    for leaf, weight in flat.shared:
        if (place := _place_of(leaf, root, draft)) is not None:
            if len(flat.shared) > 1:
                place["weight"] = int(weight) if weight == int(weight) else weight
            _add(draft, name, place, leaf)
    for number, leaf in enumerate(flat.spares, start=1):
        if (place := _place_of(leaf, root, draft)) is not None:
            spare = f"{name}-fallback-{number}"
            _add(draft, spare, place, leaf)
            spares.append(spare)
    if spares and name in draft.models:
        draft.fallbacks[name] = spares
    elif spares:
        draft.note(
            root.line, root.path, "fallbacks need a model that they are for: give each target override_params.model"
        )
    _read_cache(root, name, draft)
    draft.notes += root.left(HINTS)
    return draft


def _add(draft: Draft, name: str, place: dict[str, Any], leaf: Part) -> None:
    if not draft.add(name, place):
        draft.note(leaf.line, leaf.path, f"left out: {name} is at {place['provider']} already, with the same key")


def _flatten(part: Part, draft: Draft) -> Flat:
    targets = part.parts("targets")
    if not targets:
        return Flat([(part, 1.0)], [])
    strategy = part.part("strategy")
    mode = (strategy.text("mode") if strategy is not None else None) or "single"
    below = [_flatten(target, draft) for target in targets]
    match mode:
        case "loadbalance":
            shared = []
            for target, flat in zip(targets, below, strict=True):
                weight, whole = float(target.text("weight") or 1), sum(each for _, each in flat.shared)
                shared += [(leaf, round(weight * part_of / whole, 6)) for leaf, part_of in flat.shared if whole]
            return Flat(shared, [leaf for flat in below for leaf in flat.spares])
        case "fallback":
            first, *rest = below
            return Flat(first.shared, [*first.spares, *(one for flat in rest for one in _all(flat))])
        case _:
            if mode != "single" or len(targets) > 1:
                words = f"a strategy {mode!r} is not carried over: the first of its targets answers"
                draft.tell(part, "strategy", words)
                for target in targets[1:]:
                    target.drop()
            return below[0]


def _all(flat: Flat) -> list[Part]:
    return [*(leaf for leaf, _ in flat.shared), *flat.spares]


def _place_of(leaf: Part, root: Part, draft: Draft) -> dict[str, Any] | None:
    """Return where a target's model is; ``None`` where it cannot be told, and a note says why."""
    said = leaf.text("provider") or _of_virtual_key(leaf.text("virtual_key") or leaf.text("virtualKey"))
    kind = kinds().get((said or "").lstrip("@"))
    if kind is None:
        what = said or "a target without provider"
        draft.note(leaf.line, leaf.path or "provider", f"left out: {what} is none of the catalogue's providers")
        leaf.drop()
        return None
    base = leaf.text("custom_host") or leaf.text("customHost")
    usual = usual_variable(kind, base)
    field = "api_key" if leaf.has("api_key") else "apiKey"
    said_key = leaf.text(field)
    key = draft.secret(said_key, leaf, field, usual) if said_key is not None else None
    if key is None and (leaf.has("virtual_key") or leaf.has("virtualKey")):
        draft.note(leaf.line, leaf.path, f"the key lies with Portkey: set {usual}")
    version = None
    if kind == "azure":
        resource, version = leaf.text("resource_name") or leaf.text("resourceName"), leaf.text("api_version")
        base = f"https://{resource}.openai.azure.com" if resource else base or "${AZURE_API_BASE}"
        version, key = version or leaf.text("apiVersion") or "2024-10-21", key or f"${{{usual}}}"
    provider = draft.provider(kind, api_key=key, base_url=base, version=version)
    _read_patience(leaf, draft.providers[provider])
    if leaf is not root:
        _read_patience(root, draft.providers[provider])
    params = leaf.part("override_params") or leaf.part("overrideParams")
    model = (
        (None if params is None else params.text("model")) or leaf.text("deployment_id") or leaf.text("deploymentId")
    )
    if model is None:
        if kind != "azure":
            draft.providers[provider]["models"] = "*"
        draft.note(leaf.line, leaf.path or "provider", f"its model is each call's own: ask for {provider}/MODEL")
        return None
    return {"provider": provider, "upstream_model": model}


def _read_patience(part: Part, provider: dict[str, Any]) -> None:
    if (retry := part.part("retry")) is not None and (attempts := retry.text("attempts")) is not None:
        provider.setdefault("retries", {}).setdefault("attempts", min(10, int(attempts) + 1))
    timeout = part.text("request_timeout") or part.text("requestTimeout")
    if timeout is not None:
        provider.setdefault("timeouts", {}).setdefault("total", f"{float(timeout) / 1000:g}s")


def _read_cache(root: Part, name: str, draft: Draft) -> None:
    cache = root.part("cache")
    mode = root.text("cache") if cache is None else cache.text("mode")
    if mode in (None, "false"):
        return
    if mode != "simple":
        draft.note(
            root.line_of("cache"), "cache", f"a cache of mode {mode} is not carried over: only the same request is"
        )
        return
    age = None if cache is None else cache.text("max_age") or cache.text("maxAge")
    draft.rest["cache"] = {"models": {name: "all"}} | ({} if age is None else {"ttl": f"{age}s"})


def _of_virtual_key(key: str | None) -> str | None:
    """Return the provider that a virtual key is named after, as Portkey does by itself: ``openai-a1b2c3``."""
    return next((name for name in kinds() if key is not None and key.lower().startswith(name)), key)
