# Fitted weights as they ship with a package: an .npz, and beside it a manifest that says which bytes it must have.

from __future__ import annotations

import hashlib
import io
import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from router.catalog.errors import ArtifactMismatch

Arrays = dict[str, npt.NDArray[Any]]


def read_artifact(weights: Traversable, manifest: Traversable, version: int) -> Arrays:
    """Return the arrays in ``weights``, which must be what ``manifest`` states: {"sha256": of the file, "format": …}.

    Raises ``ArtifactMismatch`` when they do not belong together, have another format than ``version``, or are not both
    there.
    """
    stated = _stated_in(manifest)
    data = _bytes_of(weights)
    if hashlib.sha256(data).hexdigest() != stated["sha256"]:
        raise ArtifactMismatch(
            f"{weights.name} does not match the checksum in {manifest.name}; restore both or fit again."
        )
    if stated["format"] != version:
        raise ArtifactMismatch(f"{weights.name} has format {stated['format']}; this version reads {version}.")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {each: arrays[each] for each in arrays.files}


def digest_of(manifest: Traversable) -> str:
    """Return the beginning of the checksum that ``manifest`` states: it names the weights."""
    return str(_stated_in(manifest)["sha256"])[:16]


def write_artifact(weights: Path, manifest: Path, version: int, arrays: Arrays, facts: dict[str, object]) -> None:
    """Write what ``read_artifact`` reads, into a folder that may be new; ``facts`` say where the model comes from."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_bytes(buffer.getvalue())
    stated = {"format": version, "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(), **facts}
    manifest.write_text(json.dumps(stated, indent=2) + "\n")


def _stated_in(manifest: Traversable) -> dict[str, Any]:
    try:
        stated = json.loads(_bytes_of(manifest))
    except ValueError:
        stated = None
    if not isinstance(stated, dict) or not {"sha256", "format"} <= stated.keys():
        raise ArtifactMismatch(f"{manifest.name} states no sha256 and format; restore it or fit again.")
    return stated


def _bytes_of(file: Traversable) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise ArtifactMismatch(f"{file.name} cannot be read ({exc.strerror}); restore it or fit again.") from exc
