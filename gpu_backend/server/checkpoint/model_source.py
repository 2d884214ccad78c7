# Where a model's files come from: a local folder, the Hugging Face hub, or object storage. What is not here is copied
# to a cache on disk, file by file and never whole in memory, and checked by its digest where one is known.

from __future__ import annotations

import importlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b, file_digest, sha256
from pathlib import Path, PurePosixPath
from typing import Any

from gpu_backend.server.checkpoint.model_cache import ModelCache, open_cache

log = logging.getLogger("gpu_backend")

PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
PICTURE_FILES = ("preprocessor_config.json", "processor_config.json")
SMALL_FILES = ("config.json", "generation_config.json", *PICTURE_FILES, *TOKENIZER_FILES)
INDEX, SINGLE, DIGESTS = "model.safetensors.index.json", "model.safetensors", "SHA256SUMS"
CHUNK = 8 * 1024 * 1024  # bytes in memory at once
HASHERS = min(8, os.cpu_count() or 1)  # files that are checked at once; hashing lets go of the interpreter
NO_DIGESTS: Mapping[str, str] = {}
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def fetch_model(model: str, cache: ModelCache | None = None, digests: Mapping[str, str] | None = None) -> Path:
    """Return the folder with a model's files; copy them there first if ``model`` is a URL or a name on the hub.

    ``digests`` (SHA-256 by file name) go before those beside the files; with them, a folder here is checked too, and
    weights without one are refused. Raises ``ValueError`` if a package or a digest is missing, ``OSError`` if a file
    is, or is not what its digest says.
    """
    url = source_url(model)
    if url is None:
        if digests:
            _check_folder(Path(model), digests)
        return Path(model)
    remote = _Remote(url, cache, "config.json", "a Hugging Face checkpoint in one folder is needed", digests or {})

    def copy_all(folder: Path) -> None:
        remote.copy(folder, (*SMALL_FILES, INDEX))
        weights = _weights(folder, remote.names)
        _check_names(url, remote.names, weights, digests or {})
        remote.copy(folder, weights)

    return remote.into_folder(copy_all)


def fetch_tokenizer(source: str, cache: ModelCache | None = None) -> Path:
    """Return the folder with a tokenizer's files, which may be a model's; nothing else of a model is copied."""
    url = source_url(source)
    if url is None:
        return Path(source)
    remote = _Remote(url, cache, "tokenizer.json", "a fast tokenizer is needed")
    return remote.into_folder(lambda folder: remote.copy(folder, TOKENIZER_FILES))


def parse_digests(text: str) -> dict[str, str]:
    """Read what ``sha256sum`` writes: digests by file name. Raises ``ValueError`` for a line that is none of its."""
    digests = {}
    for line in filter(str.strip, text.splitlines()):
        digest, _, name = line.strip().partition(" ")
        name = name.strip().removeprefix("*").removeprefix("./")
        if not _DIGEST.fullmatch(digest) or not name:
            raise ValueError(f"{line[:100]!r} is no line of sha256sum; it has 64 hexadecimal digits and a file's name")
        digests[name] = digest.lower()
    return digests


def source_url(model: str) -> str | None:
    """Return where to fetch a model from: a URL as it is, ``owner/name`` from the hub; None for a local folder."""
    if "://" in model:
        return model.rstrip("/")
    is_hub_name = model.count("/") == 1 and model[0] not in "./~" and not model.endswith("/")
    return f"hf://{model}" if is_hub_name and not Path(model).exists() else None


class _IsRead(Exception):
    """Another engine reads a file that is to become this version."""

    def __init__(self, version: str) -> None:
        self.version = version


class _Remote:
    """A folder of files elsewhere, and what is copied of it. Raises ``FileNotFoundError`` where it lacks ``needed``."""

    def __init__(
        self, url: str, cache: ModelCache | None, needed: str, why: str, digests: Mapping[str, str] = NO_DIGESTS
    ) -> None:
        self._url = url
        self._cache = cache or open_cache(os.environ)
        scheme = url.partition("://")[0]
        package = PACKAGES.get(scheme, f"for {scheme}://")
        try:
            self._files, root = importlib.import_module("fsspec.core").url_to_fs(url)
        except ImportError:
            raise ValueError(f"{url} needs the package {package}: pip install 'tollgate[remote]'") from None
        except ValueError as exc:
            raise ValueError(
                f"{url} is no source of models: {exc}; use a folder, owner/name, hf://, s3:// or gs://"
            ) from exc
        self._root = root.rstrip("/")
        with _reading(self._files.unstrip_protocol(self._root)):
            self.names = {PurePosixPath(path).name for path in self._files.ls(self._root, detail=False)}
        if needed not in self.names:
            raise FileNotFoundError(f"{url} has no {needed}; {why}")
        self._digests = {**(self._read_digests() if DIGESTS in self.names else {}), **digests}

    def into_folder(self, copy_all: Callable[[Path], None]) -> Path:
        """Copy into the folder of that URL, or, while another engine reads an older version there, into one beside."""
        version = ""
        while True:
            digest = blake2b(f"{self._url}{version}".encode(), digest_size=6).hexdigest()
            try:
                with self._cache.copying(f"{PurePosixPath(self._root).name}-{digest}") as folder:
                    copy_all(folder)
                    return folder
            except _IsRead as exc:
                version = f" {exc.version}"

    def copy(self, folder: Path, names: Iterable[str]) -> None:
        """Copy those of these files that there are, unless they are here as they are there."""
        for name in names:
            if name in self.names:
                self._copy(f"{self._root}/{name}", folder / name, self._digests.get(name))

    def _read_digests(self) -> dict[str, str]:
        """Read the digests that ``sha256sum`` wrote beside the files."""
        path = f"{self._root}/{DIGESTS}"
        with _reading(self._files.unstrip_protocol(path)):
            contents = self._files.cat_file(path)
        try:
            return parse_digests(contents.decode())
        except ValueError as exc:
            raise ValueError(f"{path}: {exc}") from exc

    def _copy(self, path: str, goal: Path, digest: str | None) -> None:
        """Copy one file. A copy that broke off leaves nothing that looks like a file."""
        with _reading(self._files.unstrip_protocol(path)):
            info = self._files.info(path)
            identity = self._files.ukey(path)
        digest = digest or ((info.get("lfs") or {}).get("sha256") if isinstance(info, dict) else None)
        version = goal.with_name(f".{goal.name}.version")
        identity = digest or identity
        if goal.exists() and version.exists():
            if version.read_text() == identity:
                return
            if self._cache.is_read(goal.parent.name):
                raise _IsRead(identity)
        part = goal.with_name(f".{goal.name}.{os.getpid()}.part")
        try:
            if digest is None or not self._cache.take(digest, part):
                size = info.get("size")
                log.info("copying %s (%.1f MB)", path, (size or 0) / 1e6)
                self._cache.make_room(size or 0)
                self._read_into(part, path, size, digest)
                if digest is not None:
                    self._cache.keep(digest, part)
            version.unlink(missing_ok=True)  # it speaks of the file that goes
            part.replace(goal)
            version.write_text(identity)
        finally:
            part.unlink(missing_ok=True)  # also where both are links to one file: such a rename does nothing

    def _read_into(self, goal: Path, path: str, size: int | None, digest: str | None) -> None:
        """Read a file chunk by chunk. Raises ``OSError`` where not all of it came, or something else."""
        url, seen = self._files.unstrip_protocol(path), sha256()
        with goal.open("wb") as target:
            for chunk in _chunks(self._files, path, url):
                seen.update(chunk)
                target.write(chunk)
        if size is not None and (came := goal.stat().st_size) != size:
            raise OSError(f"{url} has {size} bytes, but only {came} of them came; try again")
        if digest is not None:
            _check_digest(path, seen.hexdigest(), digest)


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Turn whatever a library raises for what it cannot reach, or may not, into ``OSError``."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{url} does not exist, or may not be read") from None
    except Exception as exc:
        raise OSError(f"{url} cannot be read: {exc}; check the network, the endpoint and the credentials") from exc


def _weights(folder: Path, names: Collection[str]) -> list[str]:
    """Return the files of weights: those that the index names; other formats of the same weights are not used."""
    if INDEX not in names:
        return [SINGLE]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _check_names(where: str, names: Collection[str], weights: Collection[str], digests: Mapping[str, str]) -> None:
    """Raise unless all files are there, and, if there are digests, those of all weights."""
    for name in (*weights, *digests):
        if name not in names:
            raise FileNotFoundError(f"{where} has no {name}")
    for name in weights if digests else ():
        if name not in digests:
            raise ValueError(f"{where}/{name} has no SHA-256 digest, though others have; give those of all weights")


def _check_folder(folder: Path, digests: Mapping[str, str]) -> None:
    """Read all files that have a digest, several at once. Raises ``OSError`` for the first that is not what it says."""
    names = {path.name for path in folder.iterdir()}
    _check_names(str(folder), names, _weights(folder, names), digests)
    with ThreadPoolExecutor(HASHERS) as threads:
        for name, found in zip(digests, threads.map(_digest, (folder / name for name in digests)), strict=True):
            _check_digest(folder / name, found, digests[name])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _check_digest(path: Path | str, found: str, expected: str) -> None:
    if found != expected:
        raise OSError(f"{path} has the SHA-256 digest {found}, not {expected}; it was changed or cut")


def _chunks(files: Any, path: str, url: str) -> Iterator[bytes]:
    with _reading(url), files.open(path, "rb") as source:
        while chunk := source.read(CHUNK):
            yield chunk
