# The part of a model that a rank computes: which layers, its share of each, and which rank hidden states go to. And
# what drafts for it, which lies whole on the first rank.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from gpu_backend.models.config.draft_heads import load_eagle_config
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig, load_model_config
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.config.vision import PixtralConfig, QwenVisionConfig, SiglipConfig, VisionConfig
from gpu_backend.models.draft_heads import DraftHead, FeatureReader, load_eagle_head, load_mtp_head
from gpu_backend.models.layers import Decoder
from gpu_backend.models.llama import load_model
from gpu_backend.models.shards import shard
from gpu_backend.models.towers.pixtral import load_pixtral
from gpu_backend.models.towers.qwen import load_qwen_vision
from gpu_backend.models.towers.siglip import load_siglip
from gpu_backend.models.towers.vision import PictureVectors, VisionTower
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
    rows = config.steps.max_num_seqs
    if ranks is None:
        return load_model(part, weights, max_model_len, rows)
    if shares_layers:
        weights = shard(weights, part, ranks.place, ranks.width, by_expert=config.device.enable_expert_parallel)
    receive = ranks.receive if part.layers_before else None
    send = ranks.send if part.layers_after else None
    return replace(load_model(part, weights, max_model_len, rows), receive=receive, send=send)


def load_pictures(
    config: EngineConfig, part: ModelConfig, device: torch.device, dtype: torch.dtype
) -> PictureVectors | None:
    """Load the tower, whole on each rank that has the first layers; None where no pictures are read.

    Raises ``UnsupportedModel``.
    """
    if part.vision is None or part.layers_before or not config.pictures.max_images:
        return None
    if part.vision.num_deep > part.num_layers:
        raise UnsupportedModel(
            f"this model's pictures go into its first {part.vision.num_deep} layers, of which the first stage has "
            f"{part.num_layers}: take fewer pipeline stages, or set max_images to 0"
        )
    if part.vision.both_ways:
        _check_room_for_whole(part.vision, config, device)
    checkpoint = config.checkpoint
    weights = open_weights(checkpoint.folder, checkpoint.load_format, device, dtype, LinearOptions(), part.packed)
    return PictureVectors(_load_tower(part.vision, weights), device)


def _load_tower(vision: VisionConfig, weights: WeightSource) -> VisionTower:
    match vision:
        case PixtralConfig():
            return load_pixtral(vision, weights)
        case QwenVisionConfig():
            return load_qwen_vision(vision, weights)
        case SiglipConfig():
            return load_siglip(vision, weights)
    raise AssertionError(vision)


def _check_room_for_whole(vision: VisionConfig, config: EngineConfig, device: torch.device) -> None:
    """Raise ``UnsupportedModel`` where a step cannot compute all tokens of a picture, which look at each other."""
    rows, columns = vision.grid(1, 1)
    steps, tokens = config.steps, rows * columns
    without = "or set max_images to 0"
    if device.type == "cpu" and config.device.batch_invariant:
        raise UnsupportedModel(
            "batch_invariant computes token by token on a CPU, but this model's tokens of a picture look at each "
            f"other; leave it out, {without}"
        )
    # Half of a step may be kept for long prompts.
    if steps.max_num_batched_tokens < (least := steps.max_num_seqs + 2 * tokens):
        raise UnsupportedModel(
            f"this model's pictures have {tokens} tokens each, which one step computes: max_num_batched_tokens must be "
            f"at least {least}, beside max_num_seqs = {steps.max_num_seqs}; raise it, {without}"
        )
    tier = steps.max_batch_tier_tokens
    if tier is not None and tier < (least := steps.max_num_seqs + tokens):
        raise UnsupportedModel(
            f"this model's pictures have {tokens} tokens each, which one step computes: max_batch_tier_tokens must be "
            f"at least {least}; raise it, {without}"
        )


def load_draft_config(config: EngineConfig, target: ModelConfig) -> ModelConfig | None:
    """Read what config.json says of a checkpoint that drafts; None without one. Raises ``UnsupportedModel``."""
    if config.speculation.speculative_model is None:
        return None
    folder = Path(config.speculation.speculative_model)
    is_head = config.speculation.speculative_method == "eagle3"
    return load_eagle_config(folder, target).layer if is_head else load_model_config(folder)


def load_draft_model(
    config: EngineConfig,
    target: ModelConfig,
    model: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
) -> tuple[Decoder | DraftHead, FeatureReader | None]:
    """Load what drafts for ``model``, of which ``target`` is the whole: a smaller model, or a head, and what reads the
    model for it. Raises ``UnsupportedModel`` for one that does not fit."""
    method, linear = config.speculation.speculative_method, LinearOptions(batch_invariant=config.device.batch_invariant)
    folder = Path(config.speculation.speculative_model or config.checkpoint.folder)
    if method == "mtp":
        weights = open_weights(folder, config.checkpoint.load_format, device, dtype, linear, target.packed)
        return load_mtp_head(target, model, weights, max_model_len)
    if method == "eagle3":
        found = load_eagle_config(folder, target)
        weights = open_weights(folder, config.checkpoint.load_format, device, dtype, linear, found.layer.packed)
        return load_eagle_head(found, target, model, weights, max_model_len)
    draft = load_model_config(folder)
    if draft.linear is not None:
        raise UnsupportedModel(
            f"the draft model of {folder} has linear attention, whose states cannot go back; take another"
        )
    _check_fit(config.checkpoint.tokenizer_folder, target, folder, draft, max_model_len)
    weights = open_weights(folder, config.checkpoint.load_format, device, dtype, linear, draft.packed)
    return load_model(draft, weights, max_model_len), None


def _check_fit(folder: Path, model: ModelConfig, draft_folder: Path, draft: ModelConfig, max_model_len: int) -> None:
    """Raise ``UnsupportedModel`` for a draft model that has another tokenizer, or reaches less far."""
    if draft.max_position < max_model_len:
        raise UnsupportedModel(
            f"the draft model knows only {draft.max_position} positions, but replies may have {max_model_len}; "
            "lower max_model_len or take another"
        )
    files = [path / "tokenizer.json" for path in (folder, draft_folder)]
    if all(file.exists() for file in files):
        known, drafted = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        if known != drafted:
            raise UnsupportedModel(
                f"the tokenizers of {folder} and {draft_folder} differ; a draft model needs the same"
            )
    elif draft.vocab_size != model.vocab_size:
        raise UnsupportedModel(
            f"the vocabulary of {draft_folder} has {draft.vocab_size} tokens, that of {folder} {model.vocab_size}; "
            "a draft model needs the same"
        )


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
