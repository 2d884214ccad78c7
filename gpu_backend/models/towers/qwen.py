# The towers of Qwen2-VL (arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631) in plain
# torch: patches turned by where they lie in two dimensions, which see only those of their window in most of a 2.5's
# layers. Four neighbours become one token. Tensors are named as transformers names them.

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
class _Merger:
    """Makes a token of neighbours, which are normed one by one, or all together."""

    norm: Norm
    first: Affine
    second: Affine

    def __call__(self, x: Tensor) -> Tensor:
        wide = self.first[0].shape[1]
        together = _norm(x.view(-1, len(self.norm[0])), self.norm).view(-1, wide)
        return F.linear(F.gelu(F.linear(together, *self.first)), *self.second)


@dataclass(frozen=True, slots=True)
class QwenTower:
    """Pixels to vectors, one picture at a time."""

    config: QwenVisionConfig
    # In float32, as pictures come: (hidden, 3, patch, patch), of both pictures that a moment has, which are the same;
    patches: Tensor
    patch_bias: Tensor | None
    places: Tensor | None  # learned, stretched over a picture: (1, hidden, places, places)
    layers: tuple[_Layer, ...]
    merger: _Merger
    deep: tuple[_Merger, ...]  # of the numbers behind each layer of ``config.deep``

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Return vectors (tokens, hidden) of uint8 pixels (height, width, 3), whose sides are whole tokens."""
        config, merge = self.config, self.config.merge
        colours = normal(pixels, config, self.patches)
        grid = F.conv2d(colours[None], self.patches, self.patch_bias, stride=config.patch_size)[0]
        if self.places is not None:
            places = F.interpolate(self.places, grid.shape[1:], mode="bilinear", align_corners=True)[0]
            grid = grid + places  # (hidden, rows, columns)
        rows, columns = (side // merge for side in grid.shape[1:])
        order, windows = _by_window(rows, columns, config.window, grid.device)

        def by_token(x: Tensor) -> Tensor:
            """Return numbers (…, rows, columns) of patches, the patches of a token together: (patches, …)."""
            parts = x.reshape(*x.shape[:-2], rows, merge, columns, merge).movedim((-4, -2, -3, -1), (0, 1, 2, 3))
            return parts.reshape(rows * columns, merge**2, *x.shape[:-2])[order].flatten(0, 1)

        x = by_token(grid).to(self.merger.second[0].dtype)
        places = torch.stack(torch.meshgrid(*map(torch.arange, grid.shape[1:]), indexing="ij")).to(grid.device)
        cos, sin = self._turns(by_token(places))
        whole = [(1, len(x))]
        deep: list[Tensor] = []
        for index, (layer, sees_all) in enumerate(zip(self.layers, config.whole, strict=True)):
            parts = whole if sees_all else [(count, size * merge**2) for count, size in windows]
            x = x + self._attend(layer, _norm(x, layer.attention_norm), cos, sin, parts)
            inner = F.linear(_norm(x, layer.mlp_norm), *layer.up)
            act = ACTIVATIONS[config.activation]
            if config.is_gated:
                gate, up = inner.chunk(2, -1)
                x = x + F.linear(act(gate) * up, *layer.down)
            else:
                x = x + F.linear(act(inner), *layer.down)
            if index in config.deep:
                deep.append(self.deep[config.deep.index(index)](x))
        tokens = torch.cat([self.merger(x), *deep], 1)
        return tokens[order.argsort()]

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
    """Load a tower and its mergers. Raises ``UnsupportedModel`` where a tensor does not fit."""
    hidden, inner, patch = config.hidden_size, config.intermediate_size, config.patch_size
    wide, is_third = hidden * config.merge**2, config.places > 0
    names = ("up_proj", "down_proj") if config.is_gated else ("fc1", "fc2")
    up_name, down_name = ("linear_fc1", "linear_fc2") if is_third else names

    def affine(name: str, *shape: int) -> Affine:
        return weights.get(f"{name}.weight", *shape), weights.get(f"{name}.bias", shape[0])

    def norm(name: str, size: int = hidden) -> Norm:
        return weights.get(f"{name}.weight", size), None if config.is_gated else weights.get(f"{name}.bias", size)

    def up(prefix: str) -> Affine:
        if not config.is_gated:
            return affine(f"{prefix}.{up_name}", inner, hidden)
        gate, other = (affine(f"{prefix}.{name}", inner, hidden) for name in ("gate_proj", up_name))
        return torch.cat((gate[0], other[0])), torch.cat((gate[1], other[1]))

    def layer(prefix: str) -> _Layer:
        return _Layer(
            attention_norm=norm(f"{prefix}.norm1"),
            qkv=affine(f"{prefix}.attn.qkv", 3 * hidden, hidden),
            out=affine(f"{prefix}.attn.proj", hidden, hidden),
            mlp_norm=norm(f"{prefix}.norm2"),
            up=up(f"{prefix}.mlp"),
            down=affine(f"{prefix}.mlp.{down_name}", hidden, inner),
        )

    def merger(prefix: str, normed: int = hidden) -> _Merger:
        norm_name, first, second = ("norm", up_name, down_name) if is_third else ("ln_q", "mlp.0", "mlp.2")
        return _Merger(
            norm(f"{prefix}.{norm_name}", normed),
            affine(f"{prefix}.{first}", wide, wide),
            affine(f"{prefix}.{second}", config.text_size, wide),
        )

    embed, places = "visual.patch_embed.proj", None
    if is_third:
        places = weights.get("visual.pos_embed.weight", config.places**2, hidden)
        places = places.float().t().reshape(1, hidden, config.places, config.places)
    return QwenTower(
        config=config,
        patches=weights.get(f"{embed}.weight", hidden, 3, 2, patch, patch).float().sum(2),
        patch_bias=weights.get(f"{embed}.bias", hidden).float() if is_third else None,
        places=places,
        layers=tuple(layer(f"visual.blocks.{index}") for index in range(config.num_layers)),
        merger=merger("visual.merger"),
        deep=tuple(merger(f"visual.deepstack_merger_list.{index}", wide) for index in range(config.num_deep)),
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


def _norm(x: Tensor, by: Norm) -> Tensor:
    weight, bias = by
    if bias is not None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
