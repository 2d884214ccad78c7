# What a checkpoint's config.json says about the model's shape, checked: an unknown architecture or an option that would
# change the numbers is refused here, by name, before any weight is read.

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_backend.models.config.architectures import ARCHITECTURES, TEXT_OF, Architecture
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.experts import ExpertsConfig, experts_config, whole
from gpu_backend.models.config.latent import LatentConfig, latent_config, score_scale
from gpu_backend.models.config.linear_attention import LinearAttentionConfig, linear_attention_config
from gpu_backend.models.config.packed_format import PackedFormat, packed_format
from gpu_backend.models.config.rope import RopeConfig, layer_ropes, max_position
from gpu_backend.models.config.vision import VisionConfig, vision_config

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class Factors:
    """What a model multiplies on its way; most by 1."""

    embedding: float = 1.0  # embeddings, before the first layer
    residual: float = 1.0  # what attention and MLP add
    attention: float | None = None  # scores; None: one over the root of head_dim
    logits: float = 1.0  # by which logits are divided


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder of the Llama family; what its architecture does otherwise is in ``ARCHITECTURES``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of a key in the KV cache
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: str  # one of ACTIVATIONS
    softcap: float  # what scores are bounded by; 0: nothing
    logits_softcap: float
    eos_token_ids: frozenset[int]
    packed: PackedFormat | None  # None: weights are there as they are
    windows: tuple[int, ...]  # by layer: how far back a query looks, as ``Scoring`` has it; 0: all
    ropes: tuple[RopeConfig | None, ...]  # by layer: how positions turn queries and keys; None: not at all
    factors: Factors
    experts: ExpertsConfig | None = None  # in the place of some layers' MLPs
    latent: LatentConfig | None = None  # keys and values are made of one vector, which is the one key that is kept
    linear: LinearAttentionConfig | None = None  # in the place of some layers' attention
    gates_attention: bool = False  # what the others attend to is multiplied with gates
    qk_norm: str = "none"  # of queries and keys, as ``Architecture`` says
    has_sinks: bool = False  # each head has a score of its own, which adds nothing
    vision: VisionConfig | None = None  # what reads pictures; None: nothing does
    num_mtp_layers: int = 0  # behind the model's own, which draft
    # Of a pipeline's stage, which has ``num_layers`` of them: those that other stages compute.
    layers_before: int = 0
    layers_after: int = 0

    @property
    def window(self) -> int:
        """The window of its layers that have one; 0: none has."""
        return max(self.windows, key=abs)

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """The shape of what a token has in a layer's KV cache: keys and values, or what is both; heads; numbers."""
        return 2 if self.latent is None else 1, self.num_kv_heads, self.head_dim

    @property
    def kv_floats_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, all layers together."""
        return self.num_kv_layers * math.prod(self.kv_shape)

    @property
    def num_kv_layers(self) -> int:
        """Layers that have keys and values in the KV cache: all but those of linear attention."""
        return self.num_layers - (sum(self.linear.layers) if self.linear is not None else 0)

    @property
    def rope_dim(self) -> int:
        """Numbers of a head of which some turn, or all."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attended_width(self) -> int:
        """Numbers that all heads together make of a token's values."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def pair_operations(self) -> int:
        """Operations of a layer for one query and one key, all heads together."""
        value_dim = self.head_dim if self.latent is None else self.latent.rank
        return 2 * self.num_heads * (self.head_dim + value_dim)

    @property
    def products_per_token(self) -> int:
        """Weights that one token is multiplied with, the head's among them: those of experts that it has chosen."""
        return round(self.weights_read(1)) + self.vocab_size * self.hidden_size

    def weights_read(self, tokens: float = math.inf) -> float:
        """Return how many weights a step reads of all layers' matrices, if its tokens choose their experts evenly.

        A step of very many tokens reads all.
        """
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        if self.gates_attention:
            attention += self.num_heads * self.head_dim * self.hidden_size
        if self.latent is not None:
            attention = self.latent.weights(self.num_heads, self.hidden_size)
        mixtures = sum(self.experts.layers) if self.experts is not None else 0
        mlps: float = (self.num_layers - mixtures) * 3 * self.intermediate_size * self.hidden_size
        if self.experts is not None:
            mlps += mixtures * self.experts.weights_read(self.hidden_size, tokens)
        linear = 0
        if self.linear is not None:
            linear = sum(self.linear.layers) * self.linear.weights(self.hidden_size)
        return self.num_kv_layers * attention + linear + mlps


def load_model_config(folder: Path) -> ModelConfig:
    """Read config.json, and the files beside it where there are some. Raises ``UnsupportedModel``."""
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return replace(parse_model_config(config, generation), vision=_vision_of(folder, config))


def load_vision_config(folder: Path) -> VisionConfig | None:
    """Read what reads pictures; None: nothing does. Raises ``UnsupportedModel``."""
    return _vision_of(folder, read_json(folder / "config.json"))


def _vision_of(folder: Path, config: Mapping[str, Any]) -> VisionConfig | None:
    """Return the tower: how pictures come to it stands in files of their own, together in those of transformers 5."""
    processor: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            found = read_json(folder / name)
            processor |= found | (found.get("image_processor") or {})
    return vision_config(config, processor)


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Turn the contents of config.json, as transformers 4 and 5 write it, into a ``ModelConfig`` of its text."""
    eos = _eos(config) | _eos(generation or {})
    architecture, config = _find_architecture(config)
    does = ARCHITECTURES[architecture]
    config = {**does.defaults, **config}
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act is {activation!r}; supported: {', '.join(map(repr, ACTIVATIONS))}")
    if config.get("clip_qkv"):
        raise UnsupportedModel(f"clip_qkv is {config['clip_qkv']!r}; only models without it are supported")
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("use_bidirectional_attention is set; only models that look back are supported")
    hidden_size, num_heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads ({num_heads}) is no multiple of num_key_value_heads ({num_kv_heads})"
        )
    num_layers = whole(config, "num_hidden_layers")
    rotates = _rotates(config, does, num_layers)
    linear = linear_attention_config(config, num_layers, does.linear == "grouped") if does.linear else None
    if does.linear:  # the others see all
        config = {**config, "layer_types": None}
    kinds, windows = _windows(config, architecture, rotates)
    latent = latent_config(config) if does.is_latent else None
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if latent is not None:
        num_kv_heads, head_dim, config = 1, latent.key_dim, {**config, "head_dim": latent.rope_dim}
    ropes = layer_ropes(config, does, kinds, rotates)
    factors = _factors(config, does, hidden_size)
    if latent is not None:
        factors = replace(factors, attention=score_scale(config, latent, ropes[0]))
    return ModelConfig(
        architecture=architecture,
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole(config, does.mlp_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=max_position(config, ropes),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_bias(config, "qkv_bias" if "qkv_bias" in config else "attention_bias", does.qkv_bias),
        out_bias=_bias(config, "attention_bias", does.out_bias),
        mlp_bias=_bias(config, "mlp_bias", does.mlp_bias),
        activation=activation,
        softcap=_cap(config, "attn_logit_softcapping") if does.bounds else 0.0,
        logits_softcap=_cap(config, "final_logit_softcapping") if does.bounds else 0.0,
        eos_token_ids=eos | _eos(config),
        packed=packed_format(config),
        windows=windows,
        ropes=ropes,
        factors=factors,
        latent=latent,
        linear=linear,
        gates_attention=bool(does.linear),
        experts=experts_config(config, does.mixture, num_layers),
        qk_norm=does.qk_norm if config.get("use_qk_norm", True) else "none",
        has_sinks=does.has_sinks,
        num_mtp_layers=int(config.get("num_nextn_predict_layers") or 0) if does.has_mtp else 0,
    )


def _find_architecture(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the architecture, and the config of its text."""
    named = config.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return str(name), config
        if name in TEXT_OF:
            return _text_of(config, TEXT_OF[name])
    supported = ", ".join((*ARCHITECTURES, *TEXT_OF))
    raise UnsupportedModel(f"config.json names the architecture {', '.join(named) or '(none)'}; supported: {supported}")


def _text_of(config: Mapping[str, Any], known: Mapping[str, str]) -> tuple[str, Mapping[str, Any]]:
    text = config.get("text_config", config if config.get("model_type") in known else None)  # a Qwen's may be the whole
    kind = str(text.get("model_type", next(iter(known)))) if isinstance(text, dict) else None
    if not isinstance(text, dict) or kind is None or kind not in known:
        supported = ", ".join(map(repr, known))
        raise UnsupportedModel(f"config.json has a text_config of the model_type {kind!r}; supported: {supported}")
    return known[kind], {**config, **text}


def _windows(
    config: Mapping[str, Any], name: str, rotates: tuple[bool, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return each layer's kind of attention and window, as transformers reads them."""
    does, num_layers = ARCHITECTURES[name], len(rotates)
    window, is_asked = config.get("sliding_window"), bool(config.get("use_sliding_window"))
    known = {"full_attention", "sliding_attention"}
    period = int(config.get("sliding_window_pattern") or num_layers + 1)
    default = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    if does.slides == "all":
        known = {"sliding_attention"}
    elif does.slides == "never":
        if is_asked:
            raise UnsupportedModel(f"config.json asks for sliding-window attention, which no {name} has")
        known, default = {"full_attention"}, ["full_attention"] * num_layers
    elif does.slides == "chunks":
        window, known = config.get("attention_chunk_size"), {"full_attention", "chunked_attention"}
        default = ["chunked_attention" if turned else "full_attention" for turned in rotates]
    elif does.slides == "all if asked":
        window = window if is_asked else None
        known = {"sliding_attention"} if is_asked else known
    elif does.slides == "every other":
        window = window if is_asked else None
        full = int(config.get("max_window_layers", 28))
        default = ["full_attention" if i % 2 or i >= full else "sliding_attention" for i in range(num_layers)]
    elif does.slides in ("late", "if asked"):
        window = window if is_asked or does.slides == "late" else None
        full = int(config.get("max_window_layers", 28))
        whole = rotates if does.skips_rope else [layer < full for layer in range(num_layers)]
        default = ["full_attention" if sees_all else "sliding_attention" for sees_all in whole]
    kinds = tuple(config.get("layer_types") or default)
    if len(kinds) != num_layers or set(kinds) - known:
        named = " or ".join(sorted(known))
        raise UnsupportedModel(f"layer_types is {list(kinds)}; each of {num_layers} layers is {named}")
    if window is None and "chunked_attention" not in kinds:
        return kinds, (0,) * num_layers
    if not isinstance(window, int) or window < 1:
        name = "attention_chunk_size" if does.slides == "chunks" else "sliding_window"
        raise UnsupportedModel(f"config.json has {name} = {window!r}; a number above 0, or null, is needed")
    by_kind = {"sliding_attention": window, "chunked_attention": -window}
    return kinds, tuple(by_kind.get(kind, 0) for kind in kinds)


def _rotates(config: Mapping[str, Any], does: Architecture, num_layers: int) -> tuple[bool, ...]:
    """Return in which layers positions turn queries and keys: of a SmolLM3's, three of four or those that it names."""
    if not does.skips_rope:
        return (True,) * num_layers
    named, interval = config.get("no_rope_layers"), int(config.get("no_rope_layer_interval") or 4)
    if named is None or named == []:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not isinstance(named, list) or len(named) < num_layers:
        raise UnsupportedModel(f"no_rope_layers is {named!r}; it is a list of 0 or 1 for each of {num_layers} layers")
    return tuple(bool(turned) for turned in named[:num_layers])


def _factors(config: Mapping[str, Any], does: Architecture, hidden_size: int) -> Factors:
    if does.bounds:
        return Factors(embedding=hidden_size**0.5, attention=_number(config, "query_pre_attn_scalar") ** -0.5)
    if not does.multiplies:
        return Factors()
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return Factors(*(_number(config, name) for name in names))


def _cap(config: Mapping[str, Any], name: str) -> float:
    return 0.0 if config.get(name) is None else _number(config, name)


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name, 1.0)
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UnsupportedModel(f"config.json has {name} = {value!r}; a number above 0 is needed")
    return float(value)


def _bias(config: Mapping[str, Any], name: str, always: bool | None) -> bool:
    return bool(config.get(name, False)) if always is None else always


def _eos(config: Mapping[str, Any]) -> frozenset[int]:
    eos = config.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path} does not exist; a Hugging Face checkpoint folder is needed") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise UnsupportedModel(f"{path} holds no JSON object")
    return contents
