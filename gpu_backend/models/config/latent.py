# What config.json says of attention over latent vectors (MLA; DeepSeek-V2, Liu et al. 2024): a token keeps one small
# vector, from which each head makes its keys and values, and one key that positions turn, which all heads share.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.rope import RopeConfig, growth


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of a token's latent vector, and of what heads make of it."""

    query_rank: int  # of the vector that queries are made of; 0: they are made of hidden states
    rank: int  # of the vector that keys and values are made of
    rope_dim: int  # of a head's query, and of the key that all heads share: they turn
    own_dim: int  # of a head's query and own key: they do not
    value_dim: int  # of a head's value

    @property
    def key_dim(self) -> int:
        """Numbers that a token has in the KV cache of a layer."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.own_dim + self.rope_dim

    def weights(self, heads: int, hidden_size: int) -> int:
        """Return the weights of a layer's attention."""
        queries = heads * self.query_dim
        makes_queries = self.query_rank * (hidden_size + queries) if self.query_rank else hidden_size * queries
        of_heads = heads * (self.own_dim + self.value_dim)
        return makes_queries + hidden_size * (self.key_dim + heads * self.value_dim) + self.rank * of_heads


def latent_config(config: Mapping[str, Any]) -> LatentConfig:
    """Read it. Raises ``UnsupportedModel``."""
    if config.get("attention_bias"):
        raise UnsupportedModel("attention_bias is set; of attention over latent vectors only that without is supported")
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = {name: config.get(name) for name in names} | {"q_lora_rank": config.get("q_lora_rank") or 0}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < (name != "q_lora_rank"):
            raise UnsupportedModel(f"config.json has {name} = {size!r}; a whole number above 0 is needed")
    return LatentConfig(sizes["q_lora_rank"] or 0, *(sizes[name] or 0 for name in names))


def score_scale(config: Mapping[str, Any], latent: LatentConfig, rope: RopeConfig | None) -> float:
    """Return what scores are multiplied with: where a rope is stretched, by how much more than its cosines grow."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    weight = float(parameters.get("mscale_all_dim") or 0.0)
    if rope is None or rope.kind == "default" or not weight:
        return latent.query_dim**-0.5
    return float(latent.query_dim**-0.5 * growth(rope.factor, weight) ** 2)
