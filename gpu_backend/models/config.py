# What a checkpoint's config.json says about the model's shape, checked: an unknown architecture or an option that would
# change the numbers is refused here, by name, before any weight is read.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModel(Exception):
    """The checkpoint cannot be served; the message says what is wrong and what would be right."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; see ``layers.rope_frequencies``."""

    theta: float
    kind: str = "default"  # default, linear or llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "linear", "llama3")


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json, and generation_config.json where there is one. Raises ``UnsupportedModel``."""
    config = _read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    return parse_model_config(config, generation)


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Turn the contents of config.json, as transformers 4 and 5 write it, into a ``ModelConfig``."""
    architecture = _architecture(config)
    _refuse_options(config)
    hidden_size, num_heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_dim = config.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=int(config.get("max_position_embeddings", 2048)),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=_eos(config) | _eos(generation or {}),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or []
    for architecture in named:
        if architecture in ARCHITECTURES:
            return str(architecture)
    raise UnsupportedModel(
        f"config.json names the architecture {', '.join(named) or '(none)'}; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_options(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act is {config['hidden_act']!r}; supported: 'silu'")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedModel("config.json asks for sliding-window attention; only full attention is supported")
    if config.get("quantization_config"):
        raise UnsupportedModel("the checkpoint is quantized; only float32, float16 and bfloat16 weights are supported")


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters with the base in it; transformers 4 wrote rope_theta and rope_scaling.
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"the rope type is {kind!r}; supported: {', '.join(ROPE_KINDS)}")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not 1; only full rotary embeddings are supported")
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", 8192)),
    )


def _eos(config: Mapping[str, Any]) -> frozenset[int]:
    eos = config.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {name} = {value!r}; a whole number above 0 is needed")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} does not exist; a Hugging Face checkpoint folder is needed") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return contents
