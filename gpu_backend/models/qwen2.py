# Qwen 2 and 2.5: a Llama whose queries, keys and values have a bias, while their output has none.

from __future__ import annotations

from gpu_backend.models import llama
from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Attention, Decoder
from gpu_backend.models.weights import WeightSource


def load_qwen2(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Qwen 2 with positions up to ``max_model_len``. Raises ``UnsupportedModel`` if a tensor does not fit."""
    return llama.load_decoder(config, weights, max_model_len, load_attention)


def load_attention(config: ModelConfig, weights: WeightSource, prefix: str) -> Attention:
    """Load one layer's projections; the biases are no option of its config."""
    return llama.load_projections(config, weights, prefix, qkv_bias=True, out_bias=False)
