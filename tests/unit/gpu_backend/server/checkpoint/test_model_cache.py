# Copies of models on one machine: made once, shared by their digests, deleted when others need the room.

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpu_backend.server.checkpoint.model_cache import ModelCache, open_cache
from gpu_backend.server.checkpoint.model_source import fetch_model

WEIGHTS = b"w" * 5000


@pytest.fixture
def storage() -> Iterator[Any]:
    """Object storage of fsspec's own, in memory, with what the models "one" and "two" have in common."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("one", "two"):
        put(memory, name, WEIGHTS)
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def put(storage: Any, name: str, weights: bytes) -> str:
    """Store a model, with the digest of its weights; return its URL."""
    config = b'{"name": "%s"}' % name.encode()
    told = f"{hashlib.sha256(weights).hexdigest()}  model.safetensors\n".encode()
    for file, data in (("config.json", config), ("model.safetensors", weights), ("SHA256SUMS", told)):
        storage.pipe_file(f"/bucket/{name}/{file}", data)
    return f"memory://bucket/{name}"


def test_what_two_models_share_is_copied_once(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its digest, and not by its name: it lies there once, in the folders of both."""
    opened: list[str] = []
    original = type(storage).open
    monkeypatch.setattr(type(storage), "open", lambda *a, **k: opened.append(a[1]) or original(*a, **k))  # type: ignore[func-returns-value]

    one, two = (fetch_model(f"memory://bucket/{name}", ModelCache(tmp_path)) for name in ("one", "two"))

    assert [path for path in opened if path.endswith("safetensors")] == ["/bucket/one/model.safetensors"]
    assert (one / "model.safetensors").samefile(two / "model.safetensors")
    assert (two / "model.safetensors").read_bytes() == WEIGHTS
    assert (one / "config.json").read_bytes() != (two / "config.json").read_bytes()


def test_an_engine_waits_for_the_copy_of_another(storage: Any, tmp_path: Path) -> None:
    """Of one model: then all of it is there, and it copies nothing. Another model's is not waited for, and what waits
    reads nothing yet."""
    first, entered = ModelCache(tmp_path), threading.Event()

    def enter() -> bool:
        with ModelCache(tmp_path).copying("one") as folder:
            entered.set()
            return (folder / "done").exists()

    with ThreadPoolExecutor(1) as threads:
        with first.copying("one") as folder:
            waiting = threads.submit(enter)
            fetch_model("memory://bucket/two", ModelCache(tmp_path))
            is_early = entered.wait(0.05)
            is_read = first.is_read("one")
            (folder / "done").touch()
        assert waiting.result(30) and not is_early and not is_read


def test_models_that_are_not_used_make_room(storage: Any, tmp_path: Path) -> None:
    """That used longest ago first, one that is in use never, and what they share with another stays for it."""
    urls = {name: put(storage, name, name.encode() * 2000) for name in ("old", "mid", "new")}
    caches = {name: ModelCache(tmp_path, 16_000) for name in (*urls, "one", "two")}
    folders = {name: fetch_model(url, caches[name]) for name, url in urls.items() if name != "new"}
    for cache in caches.values():
        cache.close()
    for when, name in enumerate(("mid", "old"), 1):
        os.utime(tmp_path / ".locks" / f"{folders[name].name}.used", (when, when))
    folders |= {name: fetch_model(f"memory://bucket/{name}", caches[name]) for name in ("one", "two")}
    before = {name for name, folder in folders.items() if folder.exists()}
    folders["new"] = fetch_model(urls["new"], caches["new"])
    after = {name for name, folder in folders.items() if folder.exists()}
    caches["one"].close()
    most = ModelCache(tmp_path, 16_000)
    most.make_room(16_000)

    assert before == {"old", "one", "two"}
    assert after == {"one", "two", "new"}
    assert {name for name, folder in folders.items() if folder.exists()} == {"two", "new"}
    assert (folders["two"] / "model.safetensors").read_bytes() == WEIGHTS
    assert len(list((tmp_path / ".sha256").iterdir())) == 2


def test_a_copy_that_broke_off_changes_no_other(storage: Any, tmp_path: Path) -> None:
    """What it left may be one file with that of other models, under a name that the next process writes to: in a
    container each has the number that the last one had."""
    two = fetch_model("memory://bucket/two", ModelCache(tmp_path))
    one = fetch_model("memory://bucket/one", ended := ModelCache(tmp_path))
    ended.close()
    os.link(one / "model.safetensors", one / f".model.safetensors.{os.getpid()}.part")
    put(storage, "one", b"n" * 5000)
    fetch_model("memory://bucket/one", ModelCache(tmp_path))

    assert (one / "model.safetensors").read_bytes() == b"n" * 5000
    assert (two / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_that_is_here_already_leaves_nothing_behind(storage: Any, tmp_path: Path) -> None:
    """Its process ended before it noted which file that is: it is linked over itself, which the system does not do."""
    one = fetch_model("memory://bucket/one", ModelCache(tmp_path))
    (one / ".model.safetensors.version").unlink()
    fetch_model("memory://bucket/one", ModelCache(tmp_path))

    assert not list(one.glob(".*.part"))


def test_a_version_that_is_read_stays_as_it_is(storage: Any, tmp_path: Path) -> None:
    """Another that comes meanwhile, at the same address, lies beside it: an engine that loads one never has both."""
    url, caches = "memory://bucket/one", [ModelCache(tmp_path) for _ in range(4)]
    old = fetch_model(url, caches[0])
    put(storage, "one", b"n" * 5000)
    new = [fetch_model(url, cache) for cache in caches[1:3]]
    before = (old / "model.safetensors").read_bytes()
    for cache in caches:
        cache.close()
    last = fetch_model(url, caches[3])

    assert before == WEIGHTS
    assert new[0] == new[1] and (new[0] / "model.safetensors").read_bytes() == b"n" * 5000
    assert last == old and last.joinpath("model.safetensors").samefile(new[0] / "model.safetensors")


def test_folders_that_are_no_copies_stay(storage: Any, tmp_path: Path) -> None:
    """Models of one's own may lie beside them: they are neither counted nor deleted."""
    own = tmp_path / "my-model" / "model.safetensors"
    own.parent.mkdir()
    own.write_bytes(b"o" * 50_000)
    copies = [fetch_model(put(storage, name, WEIGHTS), unused := ModelCache(tmp_path)) for name in ("one", ".two")]
    unused.close()
    cache = ModelCache(tmp_path, 20_000)
    cache.make_room(10_000)
    before = [copy.exists() for copy in copies]
    cache.make_room(20_000)

    assert own.exists()
    assert before == [True, True] and [copy.exists() for copy in copies] == [True, False]


@pytest.mark.parametrize("has_locks", [True, False])
def test_copies_that_may_only_be_read_are_used(
    has_locks: bool, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's, or on a volume of which engines only read: theirs is not written to, and counts as in use."""
    folder = fetch_model("memory://bucket/one", unused := ModelCache(tmp_path))
    unused.close()
    if not has_locks:
        shutil.rmtree(tmp_path / ".locks")
    own_open = os.open

    def only_read(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return own_open(path, flags, *more, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", only_read)
        found = fetch_model("memory://bucket/one", ModelCache(tmp_path))
    ModelCache(tmp_path, 1).make_room(1)

    assert found == folder
    assert folder.exists() is has_locks


def test_the_bound_is_a_number_of_gib(tmp_path: Path) -> None:
    """Without one there is none."""
    told = {"TOLLGATE_MODELS": str(tmp_path)}

    assert open_cache(told)._limit is None
    assert open_cache({**told, "TOLLGATE_MODELS_GIB": "1.5"})._limit == 3 * 2**29
    for wrong in ("much", "0", "-1", "nan", "1e12"):
        with pytest.raises(ValueError, match=r"TOLLGATE_MODELS_GIB is .*GiB that copies"):
            open_cache({**told, "TOLLGATE_MODELS_GIB": wrong})
