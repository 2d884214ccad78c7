# The models that were copied to this machine: a folder for each, and every file that has a digest once, whichever
# models have it (hard links). Engines of one machine share it: one copies, the others wait for it and find it there.

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

log = logging.getLogger("gpu_backend")

FOLDER, GIB = "TOLLGATE_MODELS", "TOLLGATE_MODELS_GIB"
BLOBS = ".sha256"  # the folder of files by their digests
LOCKS = ".locks"
_COPY = re.compile(r".*-[0-9a-f]{12}", re.DOTALL)  # a folder's name; what else lies beside them is none of the cache's


class ModelCache:
    """Folders of models below ``root``, of at most ``limit`` bytes in all, as far as what is in use allows.

    What this process takes is in use until it ends, or ``close``; of the rest the model that was used longest ago goes
    first.
    """

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self._root, self._limit = root, limit
        self._held: dict[str, int] = {}  # descriptors of locks, by folders' names

    @contextmanager
    def copying(self, name: str) -> Iterator[Path]:
        """Give the folder of that name, which exists, to this process alone until the end of the block."""
        copied = self._open_lock(f"{name}.copied")
        try:
            if copied is not None:
                flock(copied, LOCK_EX)
            if name not in self._held and (used := self._open_lock(f"{name}.used")) is not None:
                flock(used, LOCK_SH)
                with suppress(OSError):
                    os.utime(used)  # it was used last
                self._held[name] = used
            folder = self._root / name
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                for part in folder.glob(".*.part"):  # of copies that broke off: it may be one file with other models'
                    part.unlink()
            yield folder
        finally:
            if copied is not None:
                os.close(copied)

    def close(self) -> None:
        """Use nothing any more."""
        while self._held:
            os.close(self._held.popitem()[1])

    def is_read(self, name: str) -> bool:
        """Whether others use a folder that this process copies to. Where they do it is not this one's any more."""
        if (used := self._held.get(name)) is None:
            return True
        try:
            flock(used, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            os.close(self._held.pop(name))
            return True
        flock(used, LOCK_SH)
        return False

    def take(self, digest: str, goal: Path) -> bool:
        """Put the file of that digest at ``goal``, if any model has it here."""
        try:
            os.link(self._blob(digest), goal)
        except OSError:  # there is none; or the file system has no links, and then there never is
            return False
        return True

    def keep(self, digest: str, file: Path) -> None:
        """Let other models have a file whose digest was checked."""
        blob = self._blob(digest)
        with suppress(OSError):
            blob.parent.mkdir(exist_ok=True)
            os.link(file, blob)

    def make_room(self, size: int) -> None:
        """Delete models that no process uses, that used longest ago first, until so many bytes have room."""
        while self._limit is not None and self._size() + size > self._limit:
            if not any(self._deletes(folder) for folder in self._by_use()):
                log.warning("all models in %s are in use, and have %.1f GB", self._root, self._size() / 1e9)
                return

    def _by_use(self) -> list[Path]:
        return sorted(self._folders(), key=self._used_at)

    def _folders(self) -> list[Path]:
        return [each for each in self._root.iterdir() if _COPY.fullmatch(each.name) and each.is_dir()]

    def _used_at(self, folder: Path) -> float:
        with suppress(FileNotFoundError):
            return (self._root / LOCKS / f"{folder.name}.used").stat().st_mtime
        return 0.0  # before models were counted

    def _deletes(self, folder: Path) -> bool:
        """Delete a model, unless a process uses it; say whether it did."""
        if (lock := self._open_lock(f"{folder.name}.used")) is None:
            return False
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return False
        else:
            log.info("deleting the copy %s, which is not in use", folder)
            shutil.rmtree(folder, ignore_errors=True)
            for blob in (self._root / BLOBS).glob("*"):
                with suppress(FileNotFoundError):
                    if blob.stat().st_nlink == 1:
                        blob.unlink()
            return not folder.exists()
        finally:
            os.close(lock)

    def _open_lock(self, name: str) -> int | None:
        """Return a descriptor; None where there can be none, on a volume that is only read: there nothing changes."""
        lock = self._root / LOCKS / name
        with suppress(OSError):
            lock.parent.mkdir(parents=True, exist_ok=True)
            return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):
            return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)  # another user's
        return None

    def _size(self) -> int:
        """Return the bytes of all files of models, each once."""
        folders = [self._root / BLOBS, *self._folders()]
        files = (Path(at, name) for folder in folders for at, _, names in os.walk(folder) for name in names)
        sizes: dict[int, int] = {}
        for file in files:
            with suppress(FileNotFoundError):
                status = file.stat()
                sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def _blob(self, digest: str) -> Path:
        return self._root / BLOBS / digest


def open_cache(environment: Mapping[str, str]) -> ModelCache:
    """Return the cache that variables name: its folder, else one in the user's cache, and how many GiB it has at most.

    Raises ``ValueError`` for what is no number of GiB."""
    root = Path(environment.get(FOLDER) or Path.home() / ".cache" / "tollgate" / "models")
    said = environment.get(GIB)
    if not said:
        return ModelCache(root)
    try:
        limit = float(said)
    except ValueError:
        limit = 0.0
    if not 0 < limit < 2**30:
        raise ValueError(f"{GIB} is {said[:50]!r}; it is the GiB that copies of models may take, above 0")
    return ModelCache(root, int(limit * 2**30))
