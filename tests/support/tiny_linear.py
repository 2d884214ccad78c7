# The linear attention of a tiny model: what its config.json says of it, and its tensors as its architecture names them.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpu_backend.models.config.linear_attention import LinearAttentionConfig, linear_attention_config

if TYPE_CHECKING:
    from tests.support.tiny_model import TinyModel

MODEL_TYPES_OF_LINEAR = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}


def linear_config(model: TinyModel) -> dict[str, Any]:
    """Return what config.json says of it; nothing of a model without."""
    if model.architecture not in MODEL_TYPES_OF_LINEAR:
        return {}
    kinds = ("full_attention", "linear_attention")
    return SIZES | {"layer_types": [kinds[layer % 2] for layer in range(model.num_layers)]}


def linear_sizes(model: TinyModel) -> LinearAttentionConfig | None:
    """Return which layers have it, and their shape."""
    if model.architecture not in MODEL_TYPES_OF_LINEAR:
        return None
    return linear_attention_config(model.config(), model.num_layers, model.architecture == "Qwen3NextForCausalLM")


def linear_tensors(
    sizes: LinearAttentionConfig, layer: str, hidden: int, matrix: Callable[[int, int], Tensor]
) -> dict[str, Tensor]:
    """Draw one layer's; ``layer`` names it."""
    heads, values = sizes.value_heads, sizes.value_width
    widths = {"qkv": sizes.channels, "z": values, "b": heads, "a": heads}
    if sizes.is_grouped:
        widths = {"qkvz": sizes.channels + values, "ba": 2 * heads}
    tensors = {f"{layer}.in_proj_{name}.weight": matrix(width, hidden) for name, width in widths.items()}
    return tensors | {
        f"{layer}.conv1d.weight": matrix(sizes.channels, sizes.taps)[:, None].contiguous(),
        f"{layer}.A_log": matrix(1, heads)[0],
        f"{layer}.dt_bias": matrix(1, heads)[0] - 2,  # states that last for some dozens of tokens
        f"{layer}.norm.weight": 1 + 0.1 * matrix(1, sizes.value_dim)[0],
        f"{layer}.out_proj.weight": matrix(hidden, values),
    }
