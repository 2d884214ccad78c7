# What a checkpoint's config.json says about the model's shape, checked: an unknown architecture or an option that would
# change the numbers is refused here, by name, before any weight is read.

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_backend.models.errors import UnsupportedModel
from gpu_backend.models.packed_format import PackedFormat, packed_format


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; see ``rope.rope_frequencies``."""

    theta: float
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's ramp begins and ends at whole dimensions
    attention_factor: float = 1.0  # what cosines and sines are multiplied with


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
    packed: PackedFormat | None  # None: weights are there as they are
    windows: tuple[int, ...]  # by layer: how many tokens a query looks back to, itself included; 0: all
    # Of a pipeline's stage, which has ``num_layers`` of them: those that other stages compute.
    layers_before: int = 0
    layers_after: int = 0

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def products_per_token(self) -> int:
        """Weights that one token is multiplied with."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        mlp = 3 * self.intermediate_size * self.hidden_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size


ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_KINDS = ("default", "dynamic", "linear", "llama3", "yarn")


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
    rope = _rope(config)
    num_layers = _whole(config, "num_hidden_layers")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=_max_position(config, rope),
        rope=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=_eos(config) | _eos(generation or {}),
        packed=packed_format(config),
        windows=_windows(config, architecture, num_layers),
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


def _windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int, ...]:
    """Return each layer's window, as transformers reads it: Mistral's in all layers, Qwen's in those it names."""
    kinds = list(config.get("layer_types") or ())
    window = config.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM":
        kinds = kinds or ["sliding_attention"] * num_layers
        known = {"sliding_attention"}
    elif architecture == "LlamaForCausalLM":
        if config.get("use_sliding_window"):
            raise UnsupportedModel("config.json asks for sliding-window attention, which no Llama has")
        kinds = kinds or ["full_attention"] * num_layers
        known = {"full_attention"}
    else:
        window = window if config.get("use_sliding_window") else None
        full = int(config.get("max_window_layers", 28))
        kinds = kinds or ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
        known = {"full_attention", "sliding_attention"}
    if len(kinds) != num_layers or set(kinds) - known:
        raise UnsupportedModel(f"layer_types is {kinds}; each of {num_layers} layers is {' or '.join(sorted(known))}")
    if window is None:
        return (0,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModel(f"config.json has sliding_window = {window!r}; a number above 0, or null, is needed")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters with the base in it; transformers 4 wrote rope_theta and rope_scaling.
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"the rope type is {kind!r}; supported: {', '.join(ROPE_KINDS)}")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor is not 1; only full rotary embeddings are supported")
    original = int(parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 2048)
    factor = float(parameters.get("factor") or config.get("max_position_embeddings", original) / original)
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0),
        kind=kind,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
    )


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Return what yarn multiplies cosines and sines with (Peng et al. 2023, section 3.4), as transformers has it."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


def _max_position(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """Return how long a sequence may be. Stretched ropes reach further than what the model was trained on.

    A dynamic one would, too, but by turning all positions by the length of the longest sequence in the batch: a reply
    would depend on its company, and no key in the cache could stay. Within the trained length it is the plain one.
    """
    trained = int(config.get("max_position_embeddings", 2048))
    if rope.kind == "linear":
        return int(trained * rope.factor)
    return max(trained, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else trained


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
