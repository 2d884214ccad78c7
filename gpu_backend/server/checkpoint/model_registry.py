# The registry of models: a YAML file with an entry for each version of each model, which says where its files are, what
# they must be by digest, and in what precision, on how many devices and with which tokenizer they are served.

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gpu_backend.server.checkpoint.model_source import parse_digests, source_url


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version, as the file has it. All but ``source`` and ``sha256`` are flags of the command line."""

    source: str  # a folder, from the file's own on; owner/name on the hub; hf://, s3:// or gs://
    tokenizer: str | None = None  # like source; None: the model's own
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    enable_expert_parallel: bool | None = None
    max_model_len: int | None = None
    sha256: str = ""  # what ``sha256sum *`` prints there; if it is not empty, all files of weights are in it


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """What is to be served: ``flags`` are defaults of the command line by their names."""

    name: str
    version: str
    source: str
    flags: Mapping[str, str | int]
    digests: Mapping[str, str]  # SHA-256 by file name


def find_version(file: Path, asked: str) -> ModelVersion:
    """Return the entry ``NAME@VERSION``; ``NAME`` is enough for a model with one version.

    Raises ``OSError`` without the file, ``ValueError`` for a file with a fault or a version that is not in it.
    """
    models = _read(file)
    name, _, version = asked.partition("@")
    if name not in models:
        near = get_close_matches(name, models, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(models)}"
        raise ValueError(f"{file} has no model {name}{hint}")
    versions = models[name]
    if not version and len(versions) == 1:
        (version,) = versions
    if version not in versions:
        fault = f"no version {version} of {name}" if version else f"several versions of {name}"
        raise ValueError(f"{file} has {fault}; ask for {' or '.join(f'{name}@{v}' for v in versions)}")
    entry = versions[version]
    flags = {
        field: value
        for field, value in msgspec.structs.asdict(entry).items()
        if field not in ("source", "sha256") and value is not None
    }
    if entry.tokenizer:
        flags["tokenizer"] = _resolve(entry.tokenizer, file.parent)
    try:
        digests = parse_digests(entry.sha256)
    except ValueError as exc:
        raise ValueError(f"{file}: models.{name}.{version}.sha256: {exc}") from exc
    return ModelVersion(name, version, _resolve(entry.source, file.parent), flags, digests)


def _read(file: Path) -> dict[str, dict[str, Entry]]:
    """Return all entries, checked, by name and version."""
    try:
        contents = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as exc:
        raise ValueError(f"{file} is no YAML: {exc}") from exc
    if not isinstance(contents, dict) or contents.keys() != {"models"} or not isinstance(contents["models"], dict):
        raise ValueError(f"{file} must hold 'models:', and under it NAME: {{VERSION: {{source: …}}}}")
    models: dict[str, dict[str, Entry]] = {}
    for name, versions in contents["models"].items():
        if not isinstance(versions, dict) or not versions:
            raise ValueError(f"{file}: models.{name} must hold versions, each with a source")
        for version, entry in versions.items():
            where = f"{file}: models.{name}.{version}"
            for word in (name, version):
                if not isinstance(word, str) or not word or "@" in word:
                    raise ValueError(f"{where}: names and versions are texts without '@'; put {word!r} in quotes")
            try:
                models.setdefault(name, {})[version] = msgspec.convert(entry, Entry)
            except msgspec.ValidationError as exc:
                known = ", ".join(Entry.__struct_fields__)
                raise ValueError(f"{where}: {exc}; an entry has a source, and any of {known}") from exc
    return models


def _resolve(source: str, folder: Path) -> str:
    """Return a path seen from the file's folder; what is elsewhere as it is."""
    beside = folder / Path(source).expanduser()
    return str(beside) if source_url(source) is None or beside.exists() else source


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, where YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the library says what is wrong with it
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is there twice; leave one out", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
