# Mistral: a Llama whose queries look back only so far. Each layer's window stands in the config, so what is left to say
# is that no projection has a bias.

from __future__ import annotations

from dataclasses import replace

from gpu_backend.models import llama
from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Decoder
from gpu_backend.models.weights import WeightSource


def load_mistral(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Mistral with positions up to ``max_model_len``. Raises ``UnsupportedModel`` if a tensor does not fit."""
    return llama.load_llama(replace(config, attention_bias=False, mlp_bias=False), weights, max_model_len)
