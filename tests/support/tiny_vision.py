# Adds a random tiny tower to a tiny model: a checkpoint of a model that reads pictures, as transformers names it.

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gpu_backend.models.config.model import load_vision_config
from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.models.towers.vision import normal
from gpu_backend.step.picture import Picture
from tests.support.front import IMAGE, IMAGE_END, LINE, SEEING_TEMPLATE, write_small_files
from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model

HIDDEN, INNER, LAYERS = 32, 48, 2


class TinySeer(Protocol):
    """A tiny model that reads pictures."""

    text: TinyModel

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Draw the weights of its tower and its projector, under the names of transformers 4."""
        ...


class Dice:
    """Draws weights."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int) -> Tensor:
        """Draw a matrix."""
        return torch.randn(shape, generator=self._generator) * (2.0 / shape[-1] ** 0.5)

    def norm(self, size: int = HIDDEN, around: float = 1.0) -> Tensor:
        """Draw a norm's weights."""
        return around + 0.2 * torch.randn(size, generator=self._generator)

    def affine(self, name: str, *shape: int) -> dict[str, Tensor]:
        """Draw a product, or a norm, and what is added to it."""
        weight = self.draw(*shape) if len(shape) > 1 else self.norm(*shape)
        return {f"{name}.weight": weight, f"{name}.bias": self.norm(shape[0], 0.0)}


@dataclass(frozen=True)
class TinyVision:
    """A tiny Mistral 3, or a Pixtral, whose patches are not merged."""

    text: TinyModel = field(default_factory=lambda: TinyModel("MistralForCausalLM", extra={"sliding_window": None}))
    architecture: str = "Mistral3ForConditionalGeneration"
    patch_size: int = 4
    merge: int = 2
    bias: bool = False
    extra: dict[str, Any] = field(default_factory=dict)  # of the tower
    longest_side: int = 64
    seed: int = 3

    @property
    def merges(self) -> bool:
        return self.architecture.startswith("Mistral3")

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        tower = {
            "model_type": "pixtral",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "head_dim": HIDDEN // 2,
            "patch_size": self.patch_size,
            "image_size": self.longest_side,
            "hidden_act": "gelu",
            "rope_theta": 10000.0,
        }
        both = {"image_token_index": IMAGE, "vision_feature_layer": -1, "multimodal_projector_bias": self.bias}
        if self.merges:
            both |= {"spatial_merge_size": self.merge}
        else:
            both |= {"vision_feature_select_strategy": "full", "image_seq_length": 1}
        return both | {
            "architectures": [self.architecture],
            "model_type": "mistral3" if self.merges else "llava",
            "projector_hidden_act": "gelu",
            "tie_word_embeddings": self.text.tie_word_embeddings,
            "text_config": self.text.config(),
            "vision_config": tower | self.extra,
            "eos_token_id": self.text.eos_token_id,
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        """Draw the tower's weights and the projector's, under the names of transformers 4."""
        dice = Dice(self.seed)
        draw, norm = dice.draw, dice.norm
        text, merged = self.text.hidden_size, HIDDEN * self.merge**2
        tensors = {
            "vision_tower.patch_conv.weight": draw(HIDDEN, 3, self.patch_size, self.patch_size),
            "vision_tower.ln_pre.weight": norm(),
            "multi_modal_projector.linear_1.weight": draw(text, HIDDEN),
            "multi_modal_projector.linear_2.weight": draw(text, text),
        }
        for index in range(LAYERS):
            layer = f"vision_tower.transformer.layers.{index}"
            tensors |= {f"{layer}.attention.{of}_proj.weight": draw(HIDDEN, HIDDEN) for of in "qkvo"}
            tensors |= {f"{layer}.feed_forward.{of}_proj.weight": draw(INNER, HIDDEN) for of in ("gate", "up")}
            tensors[f"{layer}.feed_forward.down_proj.weight"] = draw(HIDDEN, INNER)
            tensors |= {f"{layer}.{of}_norm.weight": norm() for of in ("attention", "ffn")}
        if self.bias:
            tensors |= {f"multi_modal_projector.linear_{each}.bias": draw(text) for each in (1, 2)}
        if self.merges:
            tensors["multi_modal_projector.norm.weight"] = norm()
            tensors["multi_modal_projector.patch_merger.merging_layer.weight"] = draw(HIDDEN, merged)
        return tensors


@dataclass(frozen=True)
class TinyGemma:
    """A tiny Gemma 3 whose pictures have nine tokens, more than its windows."""

    text: TinyModel = field(
        default_factory=lambda: TinyModel(
            "Gemma3ForCausalLM",
            extra={"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        )
    )

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "image_token_index": IMAGE,
            "boi_token_index": LINE,
            "eoi_token_index": IMAGE_END,
            "mm_tokens_per_image": 9,
            "tie_word_embeddings": self.text.tie_word_embeddings,
            "text_config": self.text.config(),
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 2,
                "patch_size": 2,
                "image_size": 12,
                "vision_use_head": False,
            },
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        dice, tower = Dice(3), "vision_tower.vision_model"
        tensors = {
            f"{tower}.embeddings.position_embedding.weight": dice.draw(36, HIDDEN),
            "multi_modal_projector.mm_soft_emb_norm.weight": dice.norm(around=0.0),
            "multi_modal_projector.mm_input_projection_weight": dice.draw(HIDDEN, self.text.hidden_size),
        }
        tensors |= dice.affine(f"{tower}.embeddings.patch_embedding", HIDDEN, 3, 2, 2)
        tensors |= dice.affine(f"{tower}.post_layernorm", HIDDEN)
        for index in range(LAYERS):
            layer = f"{tower}.encoder.layers.{index}"
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                tensors |= dice.affine(f"{layer}.self_attn.{name}", HIDDEN, HIDDEN)
            tensors |= dice.affine(f"{layer}.mlp.fc1", INNER, HIDDEN) | dice.affine(f"{layer}.mlp.fc2", HIDDEN, INNER)
            tensors |= dice.affine(f"{layer}.layer_norm1", HIDDEN) | dice.affine(f"{layer}.layer_norm2", HIDDEN)
        return tensors


@dataclass(frozen=True)
class TinyQwen:
    """A tiny Qwen2-VL or 2.5, whose text is described beside its tower or apart."""

    is_newer: bool = True
    text: TinyModel = field(
        default_factory=lambda: TinyModel(
            "Qwen2ForCausalLM", extra={"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        )
    )

    def config(self) -> dict[str, Any]:
        kind, text = ("qwen2_5_vl", "Qwen2_5_VL") if self.is_newer else ("qwen2_vl", "Qwen2VL"), self.text.config()
        tower = {"depth": LAYERS + 1, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "in_channels": 3}
        if self.is_newer:
            tower |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "window_size": 16}
            tower |= {"fullatt_block_indexes": [1], "out_hidden_size": self.text.hidden_size}
        else:
            tower |= {"embed_dim": HIDDEN, "mlp_ratio": 2, "hidden_size": self.text.hidden_size}
        both = {"text_config": text | {"model_type": "qwen2_5_vl_text"}} if self.is_newer else text
        return both | {
            "architectures": [f"{kind[1]}ForConditionalGeneration"],
            "model_type": kind[0],
            "image_token_id": IMAGE,
            "vision_start_token_id": LINE,
            "vision_end_token_id": IMAGE_END,
            "tie_word_embeddings": self.text.tie_word_embeddings,
            "vision_config": tower,
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        dice, wide = Dice(3), 4 * HIDDEN
        tensors = {"visual.patch_embed.proj.weight": dice.draw(HIDDEN, 3, 2, 4, 4)}
        tensors |= dice.affine("visual.merger.mlp.0", wide, wide)
        tensors |= dice.affine("visual.merger.mlp.2", self.text.hidden_size, wide)
        norms = ["visual.merger.ln_q"]
        for index in range(LAYERS + 1):
            block = f"visual.blocks.{index}"
            norms += [f"{block}.norm1", f"{block}.norm2"]
            tensors |= dice.affine(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN)
            tensors |= dice.affine(f"{block}.attn.proj", HIDDEN, HIDDEN)
            if self.is_newer:
                for name in ("gate_proj", "up_proj"):
                    tensors |= dice.affine(f"{block}.mlp.{name}", INNER, HIDDEN)
                tensors |= dice.affine(f"{block}.mlp.down_proj", HIDDEN, INNER)
            else:
                tensors |= dice.affine(f"{block}.mlp.fc1", 2 * HIDDEN, HIDDEN)
                tensors |= dice.affine(f"{block}.mlp.fc2", HIDDEN, 2 * HIDDEN)
        for name in norms:
            tensors |= {f"{name}.weight": dice.norm()} if self.is_newer else dice.affine(name, HIDDEN)
        return tensors


@dataclass(frozen=True)
class TinyQwen3:
    """A tiny Qwen3-VL, two of whose tower's layers go into the decoder's first two; or its mixture of experts."""

    text: TinyModel = field(
        default_factory=lambda: TinyModel("Qwen3ForCausalLM", num_layers=4, extra={"rope_scaling": TURNS})
    )

    def config(self) -> dict[str, Any]:
        is_mixture = self.text.architecture == "Qwen3MoeForCausalLM"
        kind, name = ("qwen3_vl_moe", "Qwen3VLMoe") if is_mixture else ("qwen3_vl", "Qwen3VL")
        return {
            "architectures": [f"{name}ForConditionalGeneration"],
            "model_type": kind,
            "image_token_id": IMAGE,
            "vision_start_token_id": LINE,
            "vision_end_token_id": IMAGE_END,
            "tie_word_embeddings": self.text.tie_word_embeddings,
            "text_config": self.text.config() | {"model_type": f"{kind}_text"},
            "vision_config": {
                "model_type": kind if is_mixture else "qwen3_vl",
                "depth": LAYERS + 1,
                "num_heads": 2,
                "patch_size": 4,
                "hidden_size": HIDDEN,
                "intermediate_size": INNER,
                "out_hidden_size": self.text.hidden_size,
                "num_position_embeddings": 25,
                "deepstack_visual_indexes": [2, 0],
            },
            "torch_dtype": "float32",
        }

    def tensors(self) -> dict[str, Tensor]:
        dice, wide, before = Dice(3), 4 * HIDDEN, "model.visual"
        tensors = {f"{before}.pos_embed.weight": dice.draw(25, HIDDEN)}
        tensors |= dice.affine(f"{before}.patch_embed.proj", HIDDEN, 3, 2, 4, 4)
        for index in range(LAYERS + 1):
            block = f"{before}.blocks.{index}"
            tensors |= dice.affine(f"{block}.norm1", HIDDEN) | dice.affine(f"{block}.norm2", HIDDEN)
            tensors |= dice.affine(f"{block}.attn.qkv", 3 * HIDDEN, HIDDEN)
            tensors |= dice.affine(f"{block}.attn.proj", HIDDEN, HIDDEN)
            tensors |= dice.affine(f"{block}.mlp.linear_fc1", INNER, HIDDEN)
            tensors |= dice.affine(f"{block}.mlp.linear_fc2", HIDDEN, INNER)
        for merger, size in (("merger", HIDDEN), ("deepstack_merger_list.0", wide), ("deepstack_merger_list.1", wide)):
            tensors |= dice.affine(f"{before}.{merger}.norm", size)
            tensors |= dice.affine(f"{before}.{merger}.linear_fc1", wide, wide)
            tensors |= dice.affine(f"{before}.{merger}.linear_fc2", self.text.hidden_size, wide)
        return tensors


TURNS = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
TINY_VISIONS: dict[str, TinySeer] = {
    "Gemma 3": TinyGemma(),
    "Mistral 3": TinyVision(),
    "Ministral 3": TinyVision(
        TinyModel("Ministral3ForCausalLM", extra={"rope_scaling": YARN, "sliding_window": None}),
        patch_size=2,
        merge=3,
        extra={"hidden_act": "silu", "rope_theta": 100.0},
    ),
    "Qwen2-VL": TinyQwen(is_newer=False),
    "Qwen2.5-VL": TinyQwen(),
    "Qwen3-VL": TinyQwen3(),
    "Qwen3-VL MoE": TinyQwen3(
        TinyModel("Qwen3MoeForCausalLM", num_layers=2, stacks_experts=True, extra={"rope_scaling": TURNS})
    ),
    "Pixtral": TinyVision(architecture="LlavaForConditionalGeneration", patch_size=8, merge=1, bias=True),
}


def write_tiny_vision(folder: Path, model: TinySeer | None = None, with_tokenizer: bool = False) -> Path:
    """Write the checkpoint into ``folder``, and a byte-level tokenizer with it if asked; return ``folder``."""
    model = model or TinyVision()
    write_tiny_model(folder, model.text)
    if with_tokenizer:
        write_small_files(folder, SEEING_TEMPLATE)
    (folder / "config.json").write_text(json.dumps(model.config()))
    if isinstance(model, TinyQwen | TinyQwen3):
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"min_pixels": 64, "max_pixels": 4096, "size": {"shortest_edge": 64, "longest_edge": 4096}})
        )
    before = "" if isinstance(model, TinyQwen | TinyQwen3) else "language_model."
    text = {f"{before}{name}": tensor for name, tensor in model.text.tensors().items()}
    if isinstance(model, TinyQwen3):
        text = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in text.items()}
        text = {name: of.mT.contiguous() if ".experts." in name else of for name, of in text.items()}
    write_shards(folder, text | model.tensors())
    return folder


def draw_tokens(folder: Path, columns: int, rows: int, seed: int = 0) -> Tensor:
    """Draw a picture of so many tokens, or as many as the model has for each."""
    vision = load_vision_config(folder)
    assert vision is not None
    rows, columns = vision.grid(columns * vision.token_side, rows * vision.token_side)
    return draw_picture(columns * vision.token_side, rows * vision.token_side, seed)


def draw_picture(width: int, height: int, seed: int = 0) -> Tensor:
    """Draw the pixels (height, width, 3) of a picture, some of them alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)


def with_pictures(
    folder: Path, words: Sequence[Sequence[int]], pictures: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return a prompt of words with a picture between each two stretches of them, and where these stand."""
    vision = load_vision_config(folder)
    assert vision is not None
    prompt, placed = list(words[0]), []
    for pixels, after in zip(pictures, words[1:], strict=True):
        height, width = pixels.shape[:2]
        rows, columns = vision.grid(width, height)
        line = [LINE] if vision.tokens.line else []
        tokens = (([IMAGE] * columns + line) * rows)[: -len(line) or None]
        prompt += [LINE] if vision.tokens.before else []
        data = pixels.numpy().tobytes()
        digest = blake2b(data, digest_size=16).digest()
        axes = {"columns": columns, "moved": placed[-1].moves if placed else 0} if vision.has_axes else {}
        of_data = {"both_ways": vision.both_ways, **axes}
        placed.append(Picture(len(prompt), len(tokens), IMAGE, digest, width, height, data, **of_data))
        prompt += [*tokens, IMAGE_END, *after]
    return tuple(prompt), tuple(placed)


def oracle_logits(folder: Path, prompt: Sequence[int], pictures: Sequence[Picture]) -> Tensor:
    """Return what transformers says after each token."""
    from transformers import AutoModelForImageTextToText

    vision = load_vision_config(folder)
    assert vision is not None
    ids = torch.tensor([prompt])
    asked: dict[str, Tensor] = {"input_ids": ids}
    if vision.has_axes:
        asked |= _patches(vision, pictures) | {"mm_token_type_ids": (ids == IMAGE).int()}
    else:
        asked["pixel_values"] = _padded(vision, pictures)
    if vision.both_ways:
        asked["token_type_ids"] = (ids == IMAGE).long()
    elif not vision.has_axes:
        asked["image_sizes"] = torch.tensor([(each.height, each.width) for each in pictures])
    with torch.no_grad():
        oracle = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        found = oracle.eval()(**asked)
        logits: Tensor = found.logits[0]
        return logits


def _padded(vision: VisionConfig, pictures: Sequence[Picture]) -> Tensor:
    height, width = (max(getattr(each, side) for each in pictures) for side in ("height", "width"))
    pixels = torch.zeros(len(pictures), 3, height, width)
    for place, picture in enumerate(pictures):
        pixels[place, :, : picture.height, : picture.width] = normal(_pixels(picture), vision, torch.ones(1))
    return pixels


def _patches(vision: VisionConfig, pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """Cut pictures as transformers does for a Qwen."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    by = {"image_mean": vision.mean, "image_std": vision.std, "do_resize": False}
    cutter = Qwen2VLImageProcessorPil(patch_size=vision.patch_size, merge_size=vision.merge, **by)
    made = cutter([_pixels(each).numpy() for each in pictures], return_tensors="pt")
    return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


def _pixels(picture: Picture) -> Tensor:
    return torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).view(picture.height, picture.width, 3)
