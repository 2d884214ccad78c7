# Models that are not on this machine: copied once, checked, and explained where they cannot be had.

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.llama import load_model
from gpu_backend.models.weights import Checkpoint
from gpu_backend.server.checkpoint import model_source
from gpu_backend.server.checkpoint.model_cache import ModelCache, open_cache
from gpu_backend.server.checkpoint.model_source import fetch_model, fetch_tokenizer, source_url
from tests.support.tiny_model import TinyModel, write_tiny_model

URL = "memory://bucket/models/tiny"


@pytest.fixture
def storage() -> Iterator[Any]:
    """Object storage of fsspec's own, in memory."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    yield memory
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def tiny(storage: Any, tmp_path: Path) -> Path:
    """A sharded model, there and here, with other files beside it there."""
    folder = write_tiny_model(tmp_path / "original", TinyModel(num_shards=3), with_tokenizer=True)
    for file in folder.iterdir():
        storage.pipe_file(f"/bucket/models/tiny/{file.name}", file.read_bytes())
    storage.pipe_file("/bucket/models/tiny/consolidated.safetensors", b"the same weights in another format")
    return folder


def test_model_from_object_storage_is_the_local_one(tiny: Path, tmp_path: Path) -> None:
    """What is needed is copied and loads as the original does; another format of the weights stays where it is."""
    folder = fetch_model(URL, ModelCache(tmp_path / "cache"))

    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert names == {file.name for file in tiny.iterdir()}
    there, here = (
        load_model(load_model_config(f), Checkpoint(f, torch.device("cpu"), torch.float32), 64) for f in (tiny, folder)
    )
    assert torch.equal(there.head, here.head)


def test_second_start_copies_only_what_changed(
    tiny: Path, storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is here as it is there is not read again."""
    fetch_model(URL, first := ModelCache(tmp_path / "cache"))
    first.close()
    storage.pipe_file("/bucket/models/tiny/config.json", json.dumps(TinyModel(eos_token_id=9).config()).encode())
    opened: list[str] = []
    original = type(storage).open
    monkeypatch.setattr(
        type(storage), "open", lambda self, path, *a, **k: opened.append(path) or original(self, path, *a, **k)
    )

    folder = fetch_model(URL, ModelCache(tmp_path / "cache"))

    assert [Path(path).name for path in opened] == ["config.json"]
    assert load_model_config(folder).eos_token_ids == {9}


def test_file_that_is_not_what_its_digest_says_is_refused(tiny: Path, storage: Any, tmp_path: Path) -> None:
    """A changed shard is an error with both digests, and leaves nothing that the next start could take for it."""
    shard = "model-00002-of-00003.safetensors"
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" for file in tiny.iterdir()]
    storage.pipe_file("/bucket/models/tiny/SHA256SUMS", "\n".join(sums).encode())
    good = (tiny / shard).read_bytes()
    storage.pipe_file(f"/bucket/models/tiny/{shard}", good[:-1] + b"x")

    with pytest.raises(OSError, match=r"00002-of-00003.safetensors has the SHA-256 digest [0-9a-f]{64}, not"):
        fetch_model(URL, ModelCache(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob(f"*/*{shard}*"))

    storage.pipe_file(f"/bucket/models/tiny/{shard}", good)
    assert (fetch_model(URL, ModelCache(tmp_path / "cache")) / shard).read_bytes() == good


def test_missing_files_are_named(tiny: Path, storage: Any, tmp_path: Path) -> None:
    """No such folder, no checkpoint in it, and a shard that is not there each say so."""
    with pytest.raises(FileNotFoundError, match=r"bucket/nothing does not exist"):
        fetch_model("memory://bucket/nothing", ModelCache(tmp_path))
    storage.rm("/bucket/models/tiny/model-00001-of-00003.safetensors")
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/models/tiny has no model-00001-of-00003"):
        fetch_model(URL, ModelCache(tmp_path))
    storage.rm("/bucket/models/tiny/config.json")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        fetch_model(URL, ModelCache(tmp_path))


@pytest.mark.parametrize(("url", "package"), [("s3://bucket/model", "s3fs"), ("gs://bucket/model", "gcsfs")])
def test_missing_package_is_named_with_what_to_install(url: str, package: str) -> None:
    """Object storage needs a package of its own; without it the message says which."""
    if importlib.util.find_spec(package):
        pytest.skip(f"SKIPPED: {package} is installed")

    with pytest.raises(ValueError, match=rf"{url} needs the package {package}: pip install 'tollgate\[remote\]'"):
        fetch_model(url)


def test_unknown_scheme_is_refused() -> None:
    """A URL that no package knows says what would be right."""
    with pytest.raises(ValueError, match="use a folder, owner/name, hf://, s3:// or gs://"):
        fetch_model("gopher://models/tiny")


def test_what_is_a_folder_and_what_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``owner/name`` is looked for on the hub unless it is a folder here; paths never are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local" / "model").mkdir(parents=True)

    assert source_url("Qwen/Qwen3-0.6B") == "hf://Qwen/Qwen3-0.6B"
    assert source_url("s3://bucket/model/") == "s3://bucket/model"
    for path in ("local/model", "/models/llama", "./models/llama", "../llama", "~/llama", "llama"):
        assert source_url(path) is None
    assert fetch_model("local/model") == Path("local/model")


def test_copies_are_kept_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TOLLGATE_MODELS names the folder."""
    monkeypatch.setenv("TOLLGATE_MODELS", str(tmp_path))

    assert open_cache(os.environ)._root == tmp_path


def test_digests_that_are_given_go_before_those_beside_the_files(tiny: Path, storage: Any, tmp_path: Path) -> None:
    """A registry's digests hold even where the list beside a changed shard was changed, too."""
    weights = [file for file in tiny.iterdir() if file.name.startswith("model")]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}
    assert fetch_model(URL, ModelCache(tmp_path / "cache"), digests).is_dir()
    shard = "model-00002-of-00003.safetensors"
    storage.pipe_file(f"/bucket/models/tiny/{shard}", b"other")
    storage.pipe_file("/bucket/models/tiny/SHA256SUMS", f"{hashlib.sha256(b'other').hexdigest()}  {shard}".encode())

    with pytest.raises(OSError, match=rf"{shard} has the SHA-256 digest [0-9a-f]{{64}}, not {digests[shard]}"):
        fetch_model(URL, ModelCache(tmp_path / "another"), digests)
    del digests[shard]
    with pytest.raises(ValueError, match=rf"{shard} has no SHA-256 digest"):
        fetch_model(URL, ModelCache(tmp_path / "third"), digests)


def test_tokenizer_is_copied_without_the_model(tiny: Path, tmp_path: Path) -> None:
    """Its files alone, though a model lies beside them."""
    folder = fetch_tokenizer(URL, ModelCache(tmp_path / "cache"))

    names = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
    assert names == {file.name for file in tiny.iterdir()} & set(model_source.TOKENIZER_FILES)
    assert "tokenizer.json" in names


def test_weights_are_never_whole_in_memory(tiny: Path, tmp_path: Path) -> None:
    """Copied and hashed piece by piece, whatever their size."""
    big = 6 * model_source.CHUNK
    with (tiny / "model-00001-of-00003.safetensors").open("r+b") as shard:
        shard.truncate(big)

    tracemalloc.start()
    try:
        folder = fetch_model(f"file://{tiny}", ModelCache(tmp_path / "cache"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (folder / "model-00001-of-00003.safetensors").stat().st_size == big
    assert most < 3 * model_source.CHUNK
