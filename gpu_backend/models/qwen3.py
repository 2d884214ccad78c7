# Qwen3: a Llama whose queries and keys are normalised, head by head, before they are rotated.

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_backend.models import llama
from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Attention, Decoder
from gpu_backend.models.weights import WeightSource


def load_qwen3(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Qwen3 with positions up to ``max_model_len``. Raises ``UnsupportedModel`` where a tensor does not fit."""
    return llama.load_decoder(config, weights, max_model_len, load_attention)


def load_attention(config: ModelConfig, weights: WeightSource, prefix: str) -> Attention:
    """Load one layer's projections and its two norms, which are applied to all heads in one go."""
    query_norm = weights.get(f"{prefix}.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
    key_norm = weights.get(f"{prefix}.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
    return replace(llama.load_attention(config, weights, prefix), qk_norm=torch.cat([query_norm, key_norm]))
