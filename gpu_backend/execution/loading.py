# The part of a model that a rank computes: which layers, its share of each, and which rank hidden states go to.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.layers import Decoder
from gpu_backend.models.llama import load_model
from gpu_backend.models.pixtral import load_pixtral
from gpu_backend.models.shards import shard
from gpu_backend.models.vision import PictureVectors
from gpu_backend.models.weights import Checkpoint, LinearOptions, RandomWeights, WeightSource
from gpu_backend.step.config import EngineConfig

if TYPE_CHECKING:
    from gpu_backend.execution.ranks import Ranks


def load_part(
    config: EngineConfig,
    part: ModelConfig,
    ranks: Ranks | None,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> Decoder:
    """Load what ``part`` describes: this rank's layers, and its share of them. Raises ``UnsupportedModel``."""
    shares_layers = ranks is not None and ranks.width > 1
    add = ranks.add if ranks is not None and shares_layers else None
    has_adapters = config.lora.num_slots > 0
    linear = LinearOptions(config.checkpoint.quantization, config.device.batch_invariant, add, has_adapters)
    weights = open_weights(config.checkpoint.folder, config.checkpoint.load_format, device, dtype, linear, part.packed)
    if ranks is None:
        return load_model(part, weights, max_model_len)
    if shares_layers:
        weights = shard(weights, part, ranks.place, ranks.width)
    receive = ranks.receive if part.layers_before else None
    send = ranks.send if part.layers_after else None
    return replace(load_model(part, weights, max_model_len), receive=receive, send=send)


def load_pictures(
    config: EngineConfig, part: ModelConfig, device: torch.device, dtype: torch.dtype
) -> PictureVectors | None:
    """Load the tower, whole on each rank that has the first layers; None where no pictures are read.

    Raises ``UnsupportedModel``.
    """
    if part.vision is None or part.layers_before or not config.pictures.max_images:
        return None
    checkpoint = config.checkpoint
    weights = open_weights(checkpoint.folder, checkpoint.load_format, device, dtype, LinearOptions(), part.packed)
    return PictureVectors(load_pixtral(part.vision, weights), device)


def open_weights(
    folder: Path,
    load_format: str,
    device: torch.device,
    dtype: torch.dtype,
    linear: LinearOptions,
    packed: PackedFormat | None = None,
) -> WeightSource:
    """Return where a model's tensors come from. Raises ``UnsupportedModel``."""
    if load_format == "dummy":
        return RandomWeights(device, dtype, linear=linear)
    return Checkpoint(folder, device, dtype, linear, packed)
