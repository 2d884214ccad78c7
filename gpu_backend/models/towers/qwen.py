# The towers of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923) in plain torch: patches turned by where
# they lie in two dimensions, which see only those of their window in most of a 2.5's layers. Four neighbours become one
# token. Tensors are named as transformers names them.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.models.config.vision import QwenVisionConfig
from gpu_backend.models.towers.vision import ACTIVATIONS, normal
from gpu_backend.models.weights import WeightSource

EPS = 1e-6  # of all norms
THETA = 1e4
Affine = tuple[Tensor, Tensor]  # weights and what is added
Norm = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Norm
    qkv: Affine  # (3 · hidden, hidden)
    out: Affine
    mlp_norm: Norm
    up: Affine  # a 2.5's gate before it: (2 · inner, hidden)
    down: Affine


@dataclass(frozen=True, slots=True)
class QwenTower:
    """Pixels to vectors, one picture at a time."""

    config: QwenVisionConfig
    patches: Tensor  # (hidden, 3, patch, patch): of both of the pictures that a moment has, which are the same
    layers: tuple[_Layer, ...]
    norm: Norm
    merger: tuple[Affine, Affine]

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return vectors (tokens, hidden) of uint8 pixels (height, width, 3), whose sides are whole tokens."""
        config, merge = self.config, self.config.merge
        colours = normal(pixels, config, self.patches)
        grid = F.conv2d(colours[None], self.patches, stride=config.patch_size)[0]  # (hidden, rows, columns)
        rows, columns = (side // merge for side in grid.shape[1:])
        order, windows = _by_window(rows, columns, config.window, grid.device)

        def by_token(x: Tensor) -> Tensor:
            """Return numbers (…, rows, columns) of patches, the patches of a token together: (patches, …)."""
            parts = x.reshape(*x.shape[:-2], rows, merge, columns, merge).movedim((-4, -2, -3, -1), (0, 1, 2, 3))
            return parts.reshape(rows * columns, merge**2, *x.shape[:-2])[order].flatten(0, 1)

        x = by_token(grid)
        places = torch.stack(torch.meshgrid(*map(torch.arange, grid.shape[1:]), indexing="ij")).to(grid.device)
        cos, sin = self._turns(by_token(places))
        whole = [(1, len(x))]
        for layer, sees_all in zip(self.layers, config.whole, strict=True):
            parts = whole if sees_all else [(count, size * merge**2) for count, size in windows]
            x = x + self._attend(layer, self._norm(x, layer.attention_norm), cos, sin, parts)
            inner = F.linear(self._norm(x, layer.mlp_norm), *layer.up)
            act = ACTIVATIONS[config.activation]
            if config.is_gated:
                gate, up = inner.chunk(2, -1)
                x = x + F.linear(act(gate) * up, *layer.down)
            else:
                x = x + F.linear(act(inner), *layer.down)
        first, second = self.merger
        tokens = F.linear(F.gelu(F.linear(self._norm(x, self.norm).view(rows * columns, -1), *first)), *second)
        return tokens[order.argsort()]

    def _norm(self, x: Tensor, by: Norm) -> Tensor:
        weight, bias = by
        if bias is not None:
            return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)

    def _turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (patches, 1, head_dim) of rows and columns (patches, 2)."""
        half = self.config.hidden_size // self.config.num_heads // 2
        frequencies = THETA ** -(torch.arange(0, half, 2, dtype=torch.float32, device=places.device) / half)
        angles = (places[..., None] * frequencies).flatten(1).repeat(1, 2)[:, None]
        return angles.cos(), angles.sin()

    def _attend(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
        """Let patches look at those of their part; ``parts`` are how many there are of each size."""
        query, key, value = F.linear(x, *layer.qkv).view(len(x), 3, self.config.num_heads, -1).unbind(1)
        query, key = (_turned(each.float(), cos, sin).to(x.dtype) for each in (query, key))
        attended = []
        lengths = [count * size for count, size in parts]
        for part, *of_part in zip(parts, *(each.split(lengths) for each in (query, key, value)), strict=True):
            q, k, v = (each.reshape(*part, *each.shape[1:]).transpose(1, 2) for each in of_part)
            attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(of_part[0]), -1))
        return F.linear(torch.cat(attended), *layer.out)


def load_qwen_vision(config: QwenVisionConfig, weights: WeightSource) -> QwenTower:
    """Load a tower and its merger. Raises ``UnsupportedModel`` where a tensor does not fit."""
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    wide = hidden * config.merge**2

    def affine(name: str, *shape: int) -> Affine:
        return weights.get(f"{name}.weight", *shape), weights.get(f"{name}.bias", shape[0])

    def norm(name: str) -> Norm:
        return weights.get(f"{name}.weight", hidden), None if config.is_gated else weights.get(f"{name}.bias", hidden)

    def up(prefix: str) -> Affine:
        if not config.is_gated:
            return affine(f"{prefix}.fc1", inner, hidden)
        gate, other = (affine(f"{prefix}.{name}_proj", inner, hidden) for name in ("gate", "up"))
        return torch.cat((gate[0], other[0])), torch.cat((gate[1], other[1]))

    def layer(prefix: str) -> _Layer:
        return _Layer(
            attention_norm=norm(f"{prefix}.norm1"),
            qkv=affine(f"{prefix}.attn.qkv", 3 * hidden, hidden),
            out=affine(f"{prefix}.attn.proj", hidden, hidden),
            mlp_norm=norm(f"{prefix}.norm2"),
            up=up(f"{prefix}.mlp"),
            down=affine(f"{prefix}.mlp.{'down_proj' if config.is_gated else 'fc2'}", hidden, inner),
        )

    return QwenTower(
        config=config,
        patches=weights.get("visual.patch_embed.proj.weight", hidden, 3, 2, patch, patch).float().sum(2),
        layers=tuple(layer(f"visual.blocks.{index}") for index in range(config.num_layers)),
        norm=norm("visual.merger.ln_q"),
        merger=(affine("visual.merger.mlp.0", wide, wide), affine("visual.merger.mlp.2", config.text_size, wide)),
    )


def _by_window(rows: int, columns: int, window: int, device: torch.device) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return the order of tokens in which those of a window come together, windows of one size behind each other, and
    how many there are of each size."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    window_of = (row // window * -(-columns // window) + column // window).flatten()
    size_of = window_of.bincount()[window_of]
    order = (size_of * len(window_of) + window_of).argsort(stable=True)
    sizes, counts = size_of.unique(return_counts=True)
    return order.to(device), [
        (count // size, size) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
    ]


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
