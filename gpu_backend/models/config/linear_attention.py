# What config.json says about layers of linear attention, which keep one state of a sequence in the place of keys and
# values: the gated delta rule behind a short convolution (Qwen3-Next, Qwen3.5).

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.experts import whole
from gpu_backend.step.config import EngineConfig

KINDS = {"linear_attention", "full_attention"}


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """The shape of those layers; all are alike."""

    layers: tuple[bool, ...]  # by layer: whether it is one of them
    key_heads: int
    value_heads: int  # so many to each key head, one behind the other
    key_dim: int  # of a head
    value_dim: int
    taps: int  # tokens that the convolution sees, the own one included
    is_grouped: bool  # a checkpoint has what comes before it by key head, in two matrices; else in four, by kind

    @property
    def key_width(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Numbers of its values, and of what multiplies them."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers of queries, keys and values, which go through the convolution."""
        return 2 * self.key_width + self.value_width

    def weights(self, hidden_size: int) -> int:
        """Return how many weights a layer has."""
        made = self.channels + self.value_width + 2 * self.value_heads
        return hidden_size * (made + self.value_width) + self.channels * self.taps

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of what all of its layers keep of a sequence, a number of the model having ``itemsize``."""
        of_rule = 4 * self.value_heads * self.key_dim * self.value_dim
        return sum(self.layers) * (of_rule + itemsize * self.channels * (self.taps - 1))


def linear_attention_config(
    config: Mapping[str, Any], num_layers: int, is_grouped: bool
) -> LinearAttentionConfig | None:
    """Read it; None where every layer sees all. Raises ``UnsupportedModel``."""
    every = config.get("full_attention_interval") or 4
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    kinds = config.get("layer_types") or default
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - KINDS:
        named = " or ".join(sorted(KINDS))
        raise UnsupportedModel(f"layer_types is {kinds!r}; each of {num_layers} layers is {named}")
    layers = tuple(kind == "linear_attention" for kind in kinds)
    if not any(layers):
        return None
    if all(layers):
        raise UnsupportedModel("no layer has full attention; at least one that keeps keys and values is needed")
    key_heads, value_heads = (whole(config, f"linear_num_{of}_heads") for of in ("key", "value"))
    if value_heads % key_heads:
        raise UnsupportedModel(
            f"linear_num_value_heads ({value_heads}) is no multiple of linear_num_key_heads ({key_heads})"
        )
    return LinearAttentionConfig(
        layers=layers,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=whole(config, "linear_key_head_dim"),
        value_dim=whole(config, "linear_value_head_dim"),
        taps=whole(config, "linear_conv_kernel_dim"),
        is_grouped=is_grouped,
    )


def check_beside_states(config: EngineConfig) -> None:
    """Raise ``UnsupportedModel`` for what goes on from blocks alone, which say nothing of a state at their end, for
    what goes back in one, and for what these layers lack."""
    asked = {
        "speculative_method": config.speculation.speculative_method != "off",
        "host_kv_bytes": config.cache.host_kv_bytes,
        "kv_transfer_address": config.transfer.kv_transfer_address,
        "kv_events_config": config.kv_events.publishes,
        "shared_prompts": config.prefixes.shared_prefixes,
        "lora_modules, allow_runtime_lora_updating": config.lora.num_slots,
        "batch_invariant": config.device.batch_invariant,
        "quantization (all but fp8)": config.checkpoint.quantization not in (None, "fp8"),
    }
    if found := [name for name, is_asked in asked.items() if is_asked]:
        raise UnsupportedModel(
            f"this model has linear attention, whose states are kept for running sequences alone; leave out "
            f"{', '.join(found)}"
        )
