# Pixtral's tower (Mistral AI 2024, arXiv:2410.07073) in plain torch: patches that see all of their picture, turned by
# where they lie in two dimensions, and a projector to the size of the decoder's vectors. Tensors are named as
# transformers names them.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.models.config.vision import PixtralConfig
from gpu_backend.models.towers.vision import ACTIVATIONS, normal
from gpu_backend.models.weights import WeightSource

EPS = 1e-5  # of the tower's norms


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor  # (3 · hidden, hidden)
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor  # (2 · inner, hidden)
    down: Tensor


@dataclass(frozen=True, slots=True)
class PixtralTower:
    """Pixels to vectors, one picture at a time."""

    config: PixtralConfig
    patches: Tensor  # (hidden, 3, patch, patch)
    norm: Tensor
    layers: tuple[_Layer, ...]
    merge_norm: Tensor | None
    merger: Tensor | None  # (hidden, merge · merge · hidden)
    projector: tuple[tuple[Tensor, Tensor | None], ...]  # two matrices with their biases

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return vectors (tokens, hidden) of uint8 pixels (height, width, 3), whose sides are whole tokens."""
        config = self.config
        colours = normal(pixels, config, self.patches)
        grid = F.conv2d(colours[None], self.patches, stride=config.patch_size)[0]  # (hidden, rows, columns)
        rows, columns = grid.shape[1:]
        x = _norm(grid.flatten(1).t(), self.norm, EPS)
        cos, sin = _turns(config, rows, columns, x)
        for layer in self.layers:
            x = x + self._attend(layer, _norm(x, layer.attention_norm, EPS), cos, sin)
            gate, up = F.linear(_norm(x, layer.mlp_norm, EPS), layer.gate_up).chunk(2, -1)
            x = x + F.linear(ACTIVATIONS[config.activation](gate) * up, layer.down)
        if self.merger is not None and self.merge_norm is not None:
            x = self._merge(_norm(x, self.merge_norm, config.norm_eps), rows, columns, self.merger)
        (first, first_bias), (second, second_bias) = self.projector
        inner = ACTIVATIONS[config.projector_activation](F.linear(x, first, first_bias))
        return F.linear(inner, second, second_bias)

    def _attend(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = F.linear(x, layer.qkv).view(len(x), 3, self.config.num_heads, -1).permute(1, 2, 0, 3)
        query, key = (each * cos + _turned(each) * sin for each in (query, key))
        attended = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        return F.linear(attended.transpose(0, 1).reshape(len(x), -1), layer.out)

    def _merge(self, x: Tensor, rows: int, columns: int, merger: Tensor) -> Tensor:
        """Return one vector for each square of neighbours, of all numbers of all of them, number by number."""
        grid = x.t().reshape(1, -1, rows, columns)
        return F.linear(F.unfold(grid, self.config.merge, stride=self.config.merge)[0].t(), merger)


def load_pixtral(config: PixtralConfig, weights: WeightSource) -> PixtralTower:
    """Load a tower and its projector. Raises ``UnsupportedModel`` where a tensor does not fit."""
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    tower, projector = "vision_tower", "multi_modal_projector"

    def layer(prefix: str) -> _Layer:
        qkv = [weights.get(f"{prefix}.attention.{of}_proj.weight", hidden, hidden) for of in "qkv"]
        gate_up = [weights.get(f"{prefix}.feed_forward.{of}_proj.weight", inner, hidden) for of in ("gate", "up")]
        return _Layer(
            attention_norm=weights.get(f"{prefix}.attention_norm.weight", hidden),
            qkv=torch.cat(qkv),
            out=weights.get(f"{prefix}.attention.o_proj.weight", hidden, hidden),
            mlp_norm=weights.get(f"{prefix}.ffn_norm.weight", hidden),
            gate_up=torch.cat(gate_up),
            down=weights.get(f"{prefix}.feed_forward.down_proj.weight", hidden, inner),
        )

    def project(name: str, width: int) -> tuple[Tensor, Tensor | None]:
        matrix = weights.get(f"{projector}.{name}.weight", config.text_size, width)
        return matrix, weights.get(f"{projector}.{name}.bias", config.text_size) if config.projector_bias else None

    merger = f"{projector}.patch_merger.merging_layer.weight"
    return PixtralTower(
        config=config,
        patches=weights.get(f"{tower}.patch_conv.weight", hidden, 3, patch, patch),
        norm=weights.get(f"{tower}.ln_pre.weight", hidden),
        layers=tuple(layer(f"{tower}.transformer.layers.{index}") for index in range(config.num_layers)),
        merge_norm=weights.get(f"{projector}.norm.weight", hidden) if config.merges else None,
        merger=weights.get(merger, hidden, hidden * config.merge**2) if config.merges else None,
        projector=(project("linear_1", hidden), project("linear_2", config.text_size)),
    )


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turns(config: PixtralConfig, rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (patches, head_dim): rows turn every other frequency, columns those in between."""
    head_dim = config.hidden_size // config.num_heads
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device)
    frequencies = 1.0 / config.rope_theta ** (steps / head_dim)
    by_row = torch.arange(rows, device=like.device)[:, None] * frequencies[0::2]
    by_column = torch.arange(columns, device=like.device)[:, None] * frequencies[1::2]
    both = torch.cat([by_row.repeat_interleave(columns, 0), by_column.repeat(rows, 1)], -1)
    angles = torch.cat([both, both], -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
