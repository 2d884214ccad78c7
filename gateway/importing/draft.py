# The tollgate.yaml that is being made of another gateway's configuration: providers as they are met, models with their
# places, and the notes on what could not be said.

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway.config.presets import presets
from gateway.importing.source import Note, Part

VARIABLE = re.compile(r"\$\{[^}]+\}")

# What others call providers of our catalogue by other names than ours; ``azure`` is one that is said in full.
ELSEWHERE = {
    "together_ai": "together",
    "together-ai": "together",
    "fireworks_ai": "fireworks",
    "fireworks-ai": "fireworks",
    "ollama_chat": "ollama",
    "hosted_vllm": "vllm",
    "cohere_chat": "cohere",
    "nvidia_nim": "nvidia",
    "google": "gemini",
    "x-ai": "xai",
    "mistral-ai": "mistral",
    "text-completion-openai": "openai",
    "azure": "azure",
    "azure_text": "azure",
    "azure-openai": "azure",
}


@cache
def kinds() -> Mapping[str, str]:
    """Return the providers that can be carried over, by the names that others have for them."""
    return {**{name: name for name in presets()}, **ELSEWHERE}


class Draft:
    """A configuration in the making."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        """``named``: variables that the file names itself."""
        self.notes: list[Note] = []
        self.providers: dict[str, dict[str, Any]] = {}
        self.models: dict[str, list[dict[str, Any]]] = {}  # the places of each
        self.aliases: dict[str, str] = {}
        self.fallbacks: dict[str, list[str]] = {}
        self.rest: dict[str, Any] = {}  # other settings of the file
        self._by_place: dict[tuple[str | None, ...], str] = {}
        self._variables: dict[str, str] = {}  # for secrets that stood in the file
        self._named = {*named}

    def note(self, line: int, path: str, words: str) -> None:
        """Say what could not be carried over, or was changed."""
        self.notes.append(Note(line, path, words))

    def tell(self, part: Part, key: str, words: str) -> None:
        """Say the same of what stands under ``key``."""
        self.note(part.line_of(key), f"{part.path}.{key}".lstrip("."), words)

    def secret(self, said: str, part: Part, key: str, usual: str) -> str:
        """Return a secret as a variable; one that stands in the file is not copied."""
        if said.startswith("os.environ/"):
            return f"${{{said.removeprefix('os.environ/')}}}"
        if VARIABLE.fullmatch(said):
            return said
        if (name := self._variables.get(said)) is None:
            taken, name, number = self._named.union(self._variables.values()) - {"TOLLGATE_ADMIN_KEY"}, usual, 2
            while name in taken:
                name, number = f"{usual}_{number}", number + 1
            self._variables[said] = name
        self.tell(part, key, f"a secret is not copied: set {name} to it")
        return f"${{{name}}}"

    def provider(
        self, kind: str, *, api_key: str | None = None, base_url: str | None = None, version: str | None = None
    ) -> str:
        """Return the name of the provider of this kind, place and key, which stands in the draft from then on.

        ``kind``: a row of the catalogue, or ``azure``.
        """
        place = (kind, api_key, base_url, version)
        if place not in self._by_place:
            usual = kind if kind not in self.providers or base_url is None else _host_of(base_url, kind)
            name, number = usual, 2
            while name in self.providers:
                name, number = f"{usual}-{number}", number + 1
            self._by_place[place] = name
            self.providers[name] = _provider(name, kind, api_key, base_url, version)
        return self._by_place[place]

    def add(self, name: str, place: dict[str, Any]) -> bool:
        """Add one place of a model; return whether it is another than those that it has."""
        places = self.models.setdefault(name, [])
        if place["provider"] in (other["provider"] for other in places):
            return False
        places.append(place)
        return True

    def to_yaml(self) -> str:
        """Return the file."""
        models = {name: _model(places) for name, places in self.models.items()}
        known = {*models, *self.aliases}
        fallbacks = {name: [one for one in spares if one in known] for name, spares in self.fallbacks.items()}
        sections: dict[str, Any] = {
            "database_url": "${DATABASE_URL}",
            "redis_url": "${REDIS_URL}",
            "admin_keys": ["${TOLLGATE_ADMIN_KEY}"],
            "key_pepper": "${TOLLGATE_KEY_PEPPER}",
            **self.rest,
            "providers": self.providers,
            "models": models,
            "aliases": self.aliases,
            "fallbacks": {name: spares for name, spares in fallbacks.items() if spares and name in known},
        }
        said = {name: value for name, value in sections.items() if value}
        return yaml.safe_dump(said, sort_keys=False, allow_unicode=True, width=120)


def _provider(name: str, kind: str, api_key: str | None, base_url: str | None, version: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if kind == "azure":
        made = {"format": "openai", "api_version": version}
    elif kind == "openai" and base_url is not None:
        made = {"format": "openai"}  # a service that is like it
    elif name != kind:
        made = {"preset": kind}
    if api_key is not None and (kind == "azure" or api_key != f"${{{next(iter(presets()[kind].keys), '')}}}"):
        made["api_keys"] = [api_key]
    if base_url is not None:
        made["endpoints"] = [{"region": "global", "base_url": base_url}]
    return made


def _model(places: list[dict[str, Any]]) -> dict[str, Any]:
    if len(places) == 1:
        return {key: value for key, value in places[0].items() if key != "weight"}
    return {"targets": places}


def usual_variable(kind: str, base_url: str | None) -> str:
    """Return the variable that a provider's key is usually in: at an address of its own, one of its host's name."""
    if kind == "azure":
        return "AZURE_API_KEY"
    if base_url is not None and "://" in base_url:
        return f"{_host_of(base_url, kind).upper().replace('-', '_')}_API_KEY"
    return next(iter(presets()[kind].keys), f"{kind.upper()}_API_KEY")


def _host_of(base_url: str, kind: str) -> str:
    host = (urlsplit(base_url).hostname or kind) if "://" in base_url else kind
    return re.sub(r"[^a-z0-9-]+", "-", host.split(".")[0].lower()).strip("-") or kind
