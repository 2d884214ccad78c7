# SigLIP's tower (Zhai et al. 2023) as Gemma 3 has it (arXiv:2503.19786), in plain torch: patches of a square that see
# all of it, whose vectors are pooled by their mean and projected to the size of the decoder's. Tensors are named as
# transformers names them.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.models.config.vision import SiglipConfig
from gpu_backend.models.towers.vision import ACTIVATIONS, normal
from gpu_backend.models.weights import WeightSource

Affine = tuple[Tensor, Tensor]  # weights and what is added


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Affine
    qkv: Affine  # (3 · hidden, hidden)
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class SiglipTower:
    """Pixels to vectors, one picture at a time."""

    config: SiglipConfig
    patches: Affine  # (hidden, 3, patch, patch)
    places: Tensor  # (patches, hidden)
    layers: tuple[_Layer, ...]
    norm: Affine
    pooled_norm: Tensor  # (hidden,), from 0 on
    projector: Tensor  # (text, hidden)

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return vectors (tokens, hidden) of uint8 pixels (height, width, 3), a square of the one size."""
        config = self.config
        weight, bias = self.patches
        grid = F.conv2d(normal(pixels, config, weight)[None], weight, bias, stride=config.patch_size)[0]
        x = grid.flatten(1).t() + self.places
        for layer in self.layers:
            x = x + self._attend(layer, self._norm(x, layer.attention_norm))
            inner = ACTIVATIONS[config.activation](F.linear(self._norm(x, layer.mlp_norm), *layer.up))
            x = x + F.linear(inner, *layer.down)
        grid = self._norm(x, self.norm).t().reshape(1, -1, config.side, config.side)
        pooled = F.avg_pool2d(grid, config.merge)[0].flatten(1).t()
        wide = pooled.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.norm_eps)
        return F.linear((wide * (1 + self.pooled_norm.float())).to(pooled.dtype), self.projector)

    def _norm(self, x: Tensor, by: Affine) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *by, self.config.norm_eps)

    def _attend(self, layer: _Layer, x: Tensor) -> Tensor:
        query, key, value = F.linear(x, *layer.qkv).view(len(x), 3, self.config.num_heads, -1).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        return F.linear(attended.transpose(0, 1).reshape(len(x), -1), *layer.out)


def load_siglip(config: SiglipConfig, weights: WeightSource) -> SiglipTower:
    """Load a tower and its projector. Raises ``UnsupportedModel`` where a tensor does not fit."""
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    tower, projector = "vision_tower", "multi_modal_projector"

    def affine(name: str, *shape: int) -> Affine:
        return weights.get(f"{name}.weight", *shape), weights.get(f"{name}.bias", shape[0])

    def layer(prefix: str) -> _Layer:
        qkv = [affine(f"{prefix}.self_attn.{of}_proj", hidden, hidden) for of in "qkv"]
        both = zip(*qkv, strict=True)
        return _Layer(
            attention_norm=affine(f"{prefix}.layer_norm1", hidden),
            qkv=(torch.cat(next(both)), torch.cat(next(both))),
            out=affine(f"{prefix}.self_attn.out_proj", hidden, hidden),
            mlp_norm=affine(f"{prefix}.layer_norm2", hidden),
            up=affine(f"{prefix}.mlp.fc1", inner, hidden),
            down=affine(f"{prefix}.mlp.fc2", hidden, inner),
        )

    return SiglipTower(
        config=config,
        patches=affine(f"{tower}.embeddings.patch_embedding", hidden, 3, patch, patch),
        places=weights.get(f"{tower}.embeddings.position_embedding.weight", config.side**2, hidden),
        layers=tuple(layer(f"{tower}.encoder.layers.{index}") for index in range(config.num_layers)),
        norm=affine(f"{tower}.post_layernorm", hidden),
        pooled_norm=weights.get(f"{projector}.mm_soft_emb_norm.weight", hidden),
        projector=weights.get(f"{projector}.mm_input_projection_weight", hidden, config.text_size).t().contiguous(),
    )
