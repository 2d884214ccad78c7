# Reads tollgate.yaml into Settings, or says everything that is wrong with it at once, each fault with its line, the
# path of its key and what would be right. What each section may hold stands here, in the order of the file.

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from gateway.config.by_name import read_cache, read_canaries, read_hedges, read_mcp
from gateway.config.catalog import leave_out, read_catalogue
from gateway.config.fields import Faults, Fields, Read, complain
from gateway.config.fleet import fleet_reader
from gateway.config.identity import read_jwt_auth, read_sign_in
from gateway.config.presets import with_presets
from gateway.config.providers import check_prefills
from gateway.config.readers import (
    duration_or_zero,
    integer,
    list_of,
    network,
    one_of,
    origin,
    redis_url,
    secret,
    secrets,
    section_of,
    strong_secret,
    struct_of,
    text,
    url,
)
from gateway.config.tree import ConfigFaults, Fault, Node, Section, merge, read_file, tree_of
from gateway.core.keys import KEY_PREFIX
from gateway.core.settings import (
    BatchLimits,
    CheckerSettings,
    FindingLevel,
    QueueSettings,
    QuotaSettings,
    ReaderUse,
    Retention,
    Safety,
    Settings,
    Tracing,
)
from gateway.moderation.classifier.plain import visible
from gateway.moderation.reading import encoder
from gateway.moderation.rules.policy import NAMES, REDACTABLE

__all__ = ["ConfigFaults", "Fault", "load_settings"]

DEFAULT_DATA_DIR = "/var/lib/tollgate"

_ADMIN_KEYS = secrets(1, strong_secret)
_POSTGRES_URL = url(("postgresql", "postgres", "postgresql+asyncpg"), "postgresql://user:password@host:5432/tollgate")


def load_settings(
    path: Path | None, env: Mapping[str, str] = os.environ, base: Mapping[str, Any] | None = None
) -> Settings:
    """Return what the file at ``path`` says, its variables taken from ``env``.

    ``base`` holds settings in the file's own shape that lie under it (``tollgate dev`` joins the demo model this way):
    sections join entry by entry, and where both speak the file wins. Without ``path``, ``base`` is all there is.
    Raises :class:`ConfigFaults` with every fault there is.
    """
    faults: Faults = []
    tree = read_file(path, env, faults) if path is not None else None
    if base is not None:
        below = tree_of(base)
        assert isinstance(below, Section)
        tree = merge(below, tree) if tree is not None else below
    folder = (path or Path()).resolve().parent
    settings = _settings(with_presets(tree, env, faults), folder, faults) if tree is not None else None
    if faults or settings is None:
        raise ConfigFaults(path, faults)
    return settings


def _settings(tree: Section, folder: Path, faults: Faults) -> Settings:
    root = Fields(tree, "", faults)
    whole = read_catalogue(root, faults)
    check_prefills(root.node("providers"), whole.providers, faults)
    catalogue, left_out = leave_out(whole)
    if left_out and not catalogue.models and not faults:
        complain(root.node("providers") or tree, faults, "every model is left out, for no provider has a key: set one")
    settings = Settings(
        database_url=root.need(
            "database_url", _postgres, "", "where Postgres answers: postgresql://user:password@host:5432/db"
        ),
        redis_url=root.need("redis_url", redis_url, "", "where Redis answers: redis://host:6379/0"),
        data_dir=folder / root.get("data_dir", text, DEFAULT_DATA_DIR),
        admin_keys=root.need("admin_keys", _ADMIN_KEYS, (), "at least one admin key: [${TOLLGATE_ADMIN_KEY}]"),
        key_pepper=root.need("key_pepper", strong_secret, "", "what keys are stored under: ${TOLLGATE_KEY_PEPPER}"),
        left_out=left_out,
        fleet=root.find("fleet", fleet_reader(whole.providers, whole.models)),
        canaries=read_canaries(root, whole, catalogue),
        hedges=read_hedges(root, (*whole.models, *whole.auto, *whole.aliases)),
        cache=read_cache(root, (*whole.models, *whole.auto, *whole.aliases)),
        mcp_servers=read_mcp(root),
        **asdict(catalogue),
        **_optional(root),
    )
    root.close()
    if any(key.startswith(KEY_PREFIX) for key in settings.admin_keys):
        complain(root.node("admin_keys") or tree, faults, f"an admin key may not begin like a team's, {KEY_PREFIX}…")
    if not {*settings.admin_keys}.isdisjoint(settings.metrics_keys):
        complain(
            root.node("metrics_keys") or tree, faults, "an admin key opens everything; give Prometheus one of its own"
        )
    return settings


def _optional(root: Fields) -> dict[str, Any]:
    """Return what the file says of settings that have a default."""
    found = {key: root.find(key, read) for key, read in _OPTIONAL.items()}
    for (section, key), read in _ALONE.items():
        fields = Fields(root.node(section), section, root.faults)
        found[f"{section}_{key}"] = fields.find(key, read)
        fields.close()
    return {key: value for key, value in found.items() if value is not None}


def _postgres(node: Node, faults: Faults) -> str | None:
    found = _POSTGRES_URL(node, faults)
    return None if found is None else "postgresql://" + found.partition("://")[2]


def _tracing(node: Node, faults: Faults) -> Tracing | None:
    try:
        is_installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except (ModuleNotFoundError, ValueError):
        is_installed = False
    if not is_installed:
        return complain(node, faults, "needs OpenTelemetry's SDK, which is an extra: pip install 'tollgate[otel]'")
    return _TRACING(node, faults)


_TRACING = struct_of(Tracing, url=url(("http", "https"), "http://collector:4318"))


def _phrase(node: Node, faults: Faults) -> str | None:
    """Read a phrase, in lower case with single spaces."""
    phrase = text(node, faults)
    if phrase is not None and not visible(phrase).strip():  # it would stand in every text
        return complain(node, faults, "expected a phrase, found invisible characters alone")
    return None if phrase is None else " ".join(phrase.casefold().split())


# What the content policy does where.
_LEVEL = one_of("block", "flag", "off")
_REDACTS = one_of("block", "redact", "flag", "off")
_MODERATIONS = "https://checker.example.com/v1/moderations"
_CHECKER_FIELDS = struct_of(CheckerSettings, url=url(("https", "http"), _MODERATIONS), api_key=secret)


def _checker(node: Node, faults: Faults) -> CheckerSettings | None:
    """Read what an outside checker is asked, which as Llama Guard has a model."""
    checker: CheckerSettings | None = _CHECKER_FIELDS(node, faults)
    if checker is not None and checker.format == "llama_guard" and checker.model is None:
        return complain(node, faults, "format llama_guard needs a model: its name at the url")
    return checker


_READER = one_of("off", "safety")


def _reader(node: Node, faults: Faults) -> ReaderUse | None:
    """Read what the sentence encoder reads, which has to be installed for it."""
    use: ReaderUse | None = _READER(node, faults)
    if use == "safety" and not encoder.is_installed():
        return complain(node, faults, "needs a sentence encoder, which is an extra: pip install 'tollgate[reader]'")
    return use


_SAFETY = struct_of(
    Safety,
    levels=section_of(dict[str, FindingLevel], dict.fromkeys(NAMES, _LEVEL) | dict.fromkeys(REDACTABLE, _REDACTS)),
    deny=list_of(_phrase, what="phrases"),
    checker=_checker,
    reader=_reader,
)

# What may be left out: then the default of Settings holds.
_OPTIONAL: dict[str, Read[Any]] = {
    "database_direct_url": _postgres,
    "metrics_keys": secrets(0, strong_secret),
    "sign_in": read_sign_in,
    "jwt_auth": read_jwt_auth,
    "other_key_peppers": secrets(0),
    "safety": _SAFETY,
    "quotas": struct_of(QuotaSettings),
    "queue": struct_of(QueueSettings),
    "batch": struct_of(BatchLimits),
    "retention": struct_of(Retention),
    "tracing": _tracing,
    "trusted_proxies": list_of(network, what="ranges"),
    "drain": duration_or_zero,
    "keep_alive": duration_or_zero,
    "lame_duck": duration_or_zero,
}
# Sections of one setting each, which Settings keeps as `section_key`.
_ALONE: dict[tuple[str, str], Read[Any]] = {
    ("callbacks", "allow"): list_of(network, what="ranges"),
    ("journal", "fsync"): one_of("never", "interval", "always"),
    ("connections", "per_address"): integer(0),
    ("responses", "stored_bytes"): integer(0),
    ("cors", "origins"): list_of(origin, what="origins"),
}
