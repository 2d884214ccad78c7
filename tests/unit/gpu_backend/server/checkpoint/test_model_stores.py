# Models from the hub, from S3 and from Google Cloud Storage, by the libraries that speak to the real ones: in a process
# of its own, because they read their endpoints when they are imported.

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_backend.server.checkpoint.model_source import PACKAGES, SMALL_FILES
from tests.support.model_stores import BUCKET, PREFIX, REPO, ModelStores, model_stores
from tests.support.tiny_model import TinyModel, write_tiny_model

FETCH = """
import sys
from pathlib import Path
from gpu_backend.server.checkpoint.model_cache import ModelCache
from gpu_backend.server.checkpoint.model_source import fetch_model
for url in sys.argv[2:]:
    try:
        print(fetch_model(url, ModelCache(Path(sys.argv[1]))))
    except OSError as exc:
        print(exc)
"""
SCHEMES = ("hf", "s3", "gs")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_model_comes_as_it_is_there(scheme: str, tmp_path: Path) -> None:
    """All files that are needed and no others, byte for byte, though a connection breaks; and each of them once."""
    need(scheme)
    there = write_tiny_model(tmp_path / "there", TinyModel(num_shards=3), with_tokenizer=True)
    (there / "README.md").write_text("Not needed.")
    model = REPO if scheme == "hf" else f"{scheme}://{BUCKET}/{PREFIX}"

    with model_stores(there) as stores:
        stores.num_cut = 1
        said = fetch(stores, tmp_path / "cache", model, model, "acme/none" if scheme == "hf" else f"{model}s")

    here, again, missing = said
    assert here == again
    wanted = {file.name for file in there.iterdir()} & {*SMALL_FILES, *(f.name for f in there.glob("model*"))}
    assert {file.name for file in Path(here).iterdir() if not file.name.startswith(".")} == wanted
    for name in wanted:
        assert (Path(here) / name).read_bytes() == (there / name).read_bytes()
    asked = [path for path in stores.asked if path.endswith("-of-00003.safetensors") and "/cdn/" not in path]
    assert len(asked) == len(set(asked)) == 3
    assert "does not exist, or may not be read" in missing


def test_changed_shard_of_the_hub_is_refused(tmp_path: Path) -> None:
    """The hub says what its large files are by digest; nothing else is taken for them. One that is away is an error."""
    there = write_tiny_model(tmp_path / "there", TinyModel())

    with model_stores(there) as stores:
        stores.forged = "model.safetensors"
        (changed,) = fetch(stores, tmp_path / "cache", REPO)
    (away,) = fetch(stores, tmp_path / "cache", REPO)

    assert "has the SHA-256 digest" in changed and "it was changed or cut" in changed
    assert not list((tmp_path / "cache").glob("*/*.safetensors"))
    assert away.startswith(f"hf://{REPO} cannot be read: ") and "check the network" in away


def need(scheme: str) -> None:
    """Skip the test without the library."""
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        pytest.skip(f"SKIPPED: {PACKAGES[scheme]} is not installed: pip install -e '.[remote]'")


def fetch(stores: ModelStores, cache: Path, *models: str) -> list[str]:
    """Fetch one model after the other; return the folder of each, or what was wrong."""
    done = subprocess.run(
        [sys.executable, "-c", FETCH, str(cache), *models],
        env={**os.environ, **stores.environment()},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()
