# Attention over latent vectors (MLA) of a tiny model: what its config.json says of it, and its tensors.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tests.support.tiny_model import TinyModel

MODEL_TYPES_OF_LATENT = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "YoutuForCausalLM": "youtu",
}
SIZES = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}


def latent_config(model: TinyModel) -> dict[str, Any]:
    """Return what config.json says of it; nothing of a model without."""
    if model.architecture not in MODEL_TYPES_OF_LATENT:
        return {}
    return SIZES | {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": model.num_heads}


def latent_tensors(
    model: TinyModel, prefix: str, matrix: Callable[[int, int], Tensor], norm: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Draw one layer's; ``prefix`` names its attention."""
    config, hidden, heads = model.config(), model.hidden_size, model.num_heads
    rank, query_rank, value_dim = config["kv_lora_rank"], config["q_lora_rank"], config["v_head_dim"]
    own, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    tensors = {
        "kv_a_proj_with_mqa": matrix(rank + turned, hidden),
        "kv_a_layernorm": norm(rank),
        "kv_b_proj": matrix(heads * (own + value_dim), rank),
        "o_proj": matrix(hidden, heads * value_dim),
    }
    queries = matrix(heads * (own + turned), query_rank or hidden)
    if query_rank:
        tensors |= {"q_a_proj": matrix(query_rank, hidden), "q_a_layernorm": norm(query_rank), "q_b_proj": queries}
    else:
        tensors["q_proj"] = queries
    return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}
