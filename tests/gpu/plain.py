# A plain forward pass over a checkpoint of the Llama family, on the CPU: no cache, no blocks, no batch, and nothing of
# the engine's own. What the engine says is judged by it; transformers judges it in turn, in the tests.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


class PlainModel:
    """The checkpoint's weights, rounded to ``dtype``, and one function of them, computed in ``arithmetic``."""

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, arithmetic: torch.dtype = torch.float64
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        files = sorted(folder.glob("*.safetensors"))
        self._weights = {name: t.to(dtype).to(arithmetic) for file in files for name, t in load_file(file).items()}

    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the logits after each token (tokens, vocab)."""
        w, config = self._weights, self.config
        x = w["model.embed_tokens.weight"][token_ids]
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            h = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (h @ w[f"{layer}.mlp.{name}.weight"].T for name in ("gate_proj", "up_proj"))
            x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        return self._norm(x, "model.norm") @ w[head].T

    def _attention(self, x: Tensor, prefix: str) -> Tensor:
        w, dim = self._weights, self.config["head_dim"]
        query, key, value = (self._project(x, f"{prefix}.{name}").view(len(x), -1, dim) for name in
                             ("q_proj", "k_proj", "v_proj"))  # fmt: skip
        if f"{prefix}.q_norm.weight" in w:
            query, key = self._norm(query, f"{prefix}.q_norm"), self._norm(key, f"{prefix}.k_norm")
        query, key = self._rotate(query), self._rotate(key)
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * dim**-0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
        return self._project(attended.flatten(1), f"{prefix}.o_proj")

    def _project(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones((), dtype=torch.float64), torch.arange(len(x))[:, None, None] * frequencies)
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)
