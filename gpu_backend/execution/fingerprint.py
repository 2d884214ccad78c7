# What tells two engines that their keys and values mean the same: of one model, rounded in one way.

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from gpu_backend.kernels.layout.quantized_kv import KvScales
from gpu_backend.models.rope import RopeTable
from gpu_backend.step.config import EngineConfig

SAMPLE = 4096  # bytes of a file that are read at each of so many places; a smaller file is read whole
PLACES = 1024
TURNS = 16  # positions that tell ropes apart


def fingerprint_of(
    config: EngineConfig, dtype: torch.dtype, scales: Sequence[KvScales] | None, ropes: Sequence[RopeTable]
) -> str:
    """Return what is equal for engines whose blocks may be exchanged, and for no others.

    ``ropes`` are the model's: how far a longrope turns keys follows from how long an engine's sequences may be.
    """
    folder, digest = config.checkpoint.folder, blake2b(digest_size=16)
    has_adapters = config.lora.num_slots > 0  # of their model other outliers are smoothed
    ways = (config.checkpoint.load_format, config.checkpoint.quantization, str(dtype), has_adapters)
    digest.update(f"{ways}\n".encode())
    for scale in scales or ():
        for numbers in (scale.key, scale.value):
            digest.update(repr(numbers.tolist()).encode())
    for rope in ropes:
        digest.update(repr((rope.cos[:TURNS].tolist(), rope.sin[:TURNS].tolist())).encode())
    files = [folder / "config.json"]
    if config.checkpoint.load_format != "dummy":
        files += sorted(folder.glob("*.safetensors"))
    if config.speculation.has_head:  # what it reads of the model lies in the blocks
        digest.update(config.speculation.speculative_method.encode())
        head = Path(config.speculation.speculative_model or folder)
        files += [head / "config.json", *sorted(head.glob("*.safetensors"))] if head != folder else []
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for start in range(0, size, max(SAMPLE, size // PLACES)):
                content.seek(start)
                digest.update(content.read(SAMPLE))
    return digest.hexdigest()
