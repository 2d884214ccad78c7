# Builds the model that a config describes.

from __future__ import annotations

from gpu_backend.models.config.architectures import ARCHITECTURES
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.layers import Decoder
from gpu_backend.models.llama import load_decoder
from gpu_backend.models.weights import MultipliedWeights, WeightSource


def load_model(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build the model that ``config`` describes, with positions up to ``max_model_len``.

    Raises ``UnsupportedModel`` where a tensor does not fit.
    """
    if ARCHITECTURES[config.architecture].multiplies:
        if weights.packed is not None:
            raise UnsupportedModel("a Granite's weights are multiplied as they are loaded, which packed ones cannot be")
        weights = MultipliedWeights(weights, dict.fromkeys(("o_proj", "down_proj"), config.factors.residual))
    return load_decoder(config, weights, max_model_len)
