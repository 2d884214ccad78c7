# Where a model's files come from: a local folder, the Hugging Face hub, or object storage. What is not here is copied
# to a cache on disk, file by file and never whole in memory, and checked by its digest where one is known.

from __future__ import annotations

import importlib
import json
import logging
import os
from hashlib import blake2b, sha256
from pathlib import Path, PurePosixPath
from typing import Any

log = logging.getLogger("gpu_backend")

PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"}
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
INDEX, SINGLE, DIGESTS = "model.safetensors.index.json", "model.safetensors", "SHA256SUMS"
CHUNK = 8 * 1024 * 1024  # bytes in memory at once


def fetch_model(model: str, cache: Path | None = None) -> Path:
    """Return the folder with a model's files; copy them there first if ``model`` is a URL or a name on the hub.

    Raises ``ValueError`` if a package is missing, ``OSError`` if a file is, or is not what its digest says.
    """
    url = source_url(model)
    if url is None:
        return Path(model)
    files, root = _open(url)
    names = set(_names(files, root))
    if "config.json" not in names:
        raise FileNotFoundError(f"{url} has no config.json; a Hugging Face checkpoint in one folder is needed")
    named = f"{PurePosixPath(root).name}-{blake2b(url.encode(), digest_size=6).hexdigest()}"
    folder = (cache or default_cache()) / named
    folder.mkdir(parents=True, exist_ok=True)
    digests = _read_digests(files, root) if DIGESTS in names else {}
    for name in (name for name in (*SMALL_FILES, INDEX) if name in names):
        _fetch(files, f"{root}/{name}", folder / name, digests.get(name))
    for name in _shards(folder) if INDEX in names else [SINGLE]:
        if name not in names:
            raise FileNotFoundError(f"{url} has no {name}")
        _fetch(files, f"{root}/{name}", folder / name, digests.get(name))
    return folder


def source_url(model: str) -> str | None:
    """Return where to fetch a model from: a URL as it is, ``owner/name`` from the hub; None for a local folder."""
    if "://" in model:
        return model.rstrip("/")
    is_hub_name = model.count("/") == 1 and model[0] not in "./~" and not model.endswith("/")
    return f"hf://{model}" if is_hub_name and not Path(model).exists() else None


def default_cache() -> Path:
    """Return the folder that copies are kept in: $TOLLGATE_MODELS, else one in the user's cache."""
    return Path(os.environ.get("TOLLGATE_MODELS") or Path.home() / ".cache" / "tollgate" / "models")


def _open(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    package = PACKAGES.get(scheme, f"for {scheme}://")
    try:
        files, root = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError:
        raise ValueError(f"{url} needs the package {package}: pip install 'tollgate[remote]'") from None
    except ValueError as exc:
        raise ValueError(
            f"{url} is no source of models: {exc}; use a folder, owner/name, hf://, s3:// or gs://"
        ) from exc
    return files, root.rstrip("/")


def _names(files: Any, root: str) -> list[str]:
    try:
        return [PurePosixPath(path).name for path in files.ls(root, detail=False)]
    except FileNotFoundError:
        raise FileNotFoundError(f"{files.unstrip_protocol(root)} does not exist, or may not be read") from None


def _read_digests(files: Any, root: str) -> dict[str, str]:
    """Read the digests that ``sha256sum`` wrote beside the files."""
    lines = files.cat_file(f"{root}/{DIGESTS}").decode().splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line.strip())
    return {name.strip().lstrip("*").removeprefix("./"): digest.lower() for digest, name in pairs}


def _shards(folder: Path) -> list[str]:
    """Return the files that the index names; other formats of the same weights stay where they are."""
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _fetch(files: Any, path: str, goal: Path, digest: str | None) -> None:
    """Copy one file, unless it is here as it is there. A copy that broke off leaves nothing that looks like a file."""
    info = files.info(path)
    digest = digest or ((info.get("lfs") or {}).get("sha256") if isinstance(info, dict) else None)
    version = goal.with_name(f".{goal.name}.version")
    identity = digest or files.ukey(path)
    if goal.exists() and version.exists() and version.read_text() == identity:
        return
    log.info("copying %s (%.1f MB)", path, (info.get("size") or 0) / 1e6)
    part = goal.with_name(f".{goal.name}.{os.getpid()}.part")
    seen = sha256()
    try:
        with files.open(path, "rb") as source, part.open("wb") as target:
            while chunk := source.read(CHUNK):
                seen.update(chunk)
                target.write(chunk)
        if digest is not None and seen.hexdigest() != digest:
            raise OSError(f"{path} has the SHA-256 digest {seen.hexdigest()}, not {digest}; it was changed or cut")
        part.replace(goal)
        version.write_text(identity)
    finally:
        part.unlink(missing_ok=True)
