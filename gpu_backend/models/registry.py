# The models that can be run, by the name of their architecture in config.json, and what the others do otherwise than
# Llama.

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Attention, Decoder
from gpu_backend.models.llama import load_attention, load_decoder, load_llama, load_projections
from gpu_backend.models.weights import WeightSource


def load_model(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build the model that ``config`` describes, with positions up to ``max_model_len``.

    Raises ``UnsupportedModel`` where a tensor does not fit.
    """
    return LOADERS[config.architecture](config, weights, max_model_len)


def load_mistral(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Mistral: queries look back only as far as the config says of each layer, and no projection has a bias."""
    return load_llama(replace(config, attention_bias=False, mlp_bias=False), weights, max_model_len)


def load_qwen2(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Qwen 2 or 2.5: queries, keys and values have a bias, which is no option of its config; outputs none."""

    def attention(config: ModelConfig, weights: WeightSource, prefix: str) -> Attention:
        return load_projections(config, weights, prefix, qkv_bias=True, out_bias=False)

    return load_decoder(config, weights, max_model_len, attention)


def load_qwen3(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Qwen3: queries and keys are normalised, head by head, before they are rotated."""

    def attention(config: ModelConfig, weights: WeightSource, prefix: str) -> Attention:
        """Load one layer's projections and its two norms, which are applied to all heads in one go."""
        query_norm = weights.get(f"{prefix}.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
        key_norm = weights.get(f"{prefix}.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
        return replace(load_attention(config, weights, prefix), qk_norm=torch.cat([query_norm, key_norm]))

    return load_decoder(config, weights, max_model_len, attention)


LOADERS = {
    "LlamaForCausalLM": load_llama,
    "MistralForCausalLM": load_mistral,
    "Qwen2ForCausalLM": load_qwen2,
    "Qwen3ForCausalLM": load_qwen3,
}
