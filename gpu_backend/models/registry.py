# The models we can run, by the name of their architecture in config.json.

from __future__ import annotations

from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Decoder
from gpu_backend.models.llama import load_llama
from gpu_backend.models.mistral import load_mistral
from gpu_backend.models.qwen2 import load_qwen2
from gpu_backend.models.qwen3 import load_qwen3
from gpu_backend.models.weights import WeightSource

LOADERS = {
    "LlamaForCausalLM": load_llama,
    "MistralForCausalLM": load_mistral,
    "Qwen2ForCausalLM": load_qwen2,
    "Qwen3ForCausalLM": load_qwen3,
}


def load_model(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build the model that ``config`` describes, with positions up to ``max_model_len``."""
    return LOADERS[config.architecture](config, weights, max_model_len)
