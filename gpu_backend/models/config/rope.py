# What config.json says about how positions turn queries and keys, in the words of transformers 4 and 5, layer by layer.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.architectures import Architecture
from gpu_backend.models.config.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles; see ``rope.rope_frequencies``."""

    theta: float
    kind: str = "default"  # one of an architecture's ``rope_kinds``
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn's ramp begins and ends at whole dimensions
    attention_factor: float = 1.0  # what cosines and sines are multiplied with
    share: float = 1.0  # of a head's numbers that turn, the first of them
    interleaved: bool = False  # neighbours are a pair, instead of the two halves of what turns
    short_factors: tuple[float, ...] = ()  # of longrope: what each pair is slowed by within the original context
    long_factors: tuple[float, ...] = ()  # and where sequences may be longer
    # Numbers of turns that go by a token's time, row and column (Wang et al. 2024, arXiv:2409.12191); (): by its place.
    sections: tuple[int, ...] = ()
    takes_turns: bool = False  # the three kinds of numbers, one after the other, instead of all of a kind together
    query_beta: float = 0.0  # how much queries grow with each original context before them,
    query_ahead: int = 0  # these many tokens from theirs on

    def turned(self, head_dim: int) -> int:
        """Return how many of a head's numbers turn."""
        return int(head_dim * self.share)


def layer_ropes(
    config: Mapping[str, Any], architecture: Architecture, kinds: Sequence[str], rotates: Sequence[bool]
) -> tuple[RopeConfig | None, ...]:
    """Return each layer's rope, by its kind of attention; None: positions turn nothing there."""
    # transformers 5 writes rope_parameters with the base in it; transformers 4 wrote rope_theta and rope_scaling.
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if architecture.scales_queries and not parameters:
        raise UnsupportedModel("config.json has neither rope_parameters nor rope_scaling; one of them is needed")
    if "short_factor" in parameters and config.get("original_max_position_embeddings"):
        parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    of_sliding = parameters.pop("sliding_attention", None) or {}
    parameters |= parameters.pop("full_attention", None) or {}
    rope = sliding_rope = _rope(config, architecture, parameters, config.get("rope_theta") or 10000.0)
    if architecture.sliding_theta:
        sliding_rope = _rope(config, architecture, of_sliding, config[architecture.sliding_theta])
    still = _still(config) if architecture.scales_still else None
    by_kind = {"sliding_attention": sliding_rope}
    return tuple(by_kind.get(kind, rope) if turned else still for kind, turned in zip(kinds, rotates, strict=True))


def max_position(config: Mapping[str, Any], ropes: Sequence[RopeConfig | None]) -> int:
    """Return how long a sequence may be. A stretched rope reaches further than what the model was trained on, but where
    it is one of several.

    A dynamic one would, too, but by turning all positions by the length of the longest sequence in the batch: a reply
    would depend on its company, and no key in the cache could stay. Within the trained length it is the plain one.
    """
    trained = int(config.get("max_position_embeddings", 2048))
    distinct = {rope for rope in ropes if rope is not None}
    if len(distinct) != 1:
        return trained
    (rope,) = distinct
    if rope.kind == "linear":
        return int(trained * rope.factor)
    return max(trained, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else trained


def _still(config: Mapping[str, Any]) -> RopeConfig | None:
    """Return what a Llama 4's layers have where positions turn nothing: queries grow with the context."""
    beta, context = float(config.get("attn_scale", 0.1)), config.get("floor_scale", 8192)
    if not config.get("attn_temperature_tuning", True):
        return None
    if not isinstance(context, int) or context < 1:
        raise UnsupportedModel(f"config.json has floor_scale = {context!r}; a whole number above 0 is needed")
    return RopeConfig(theta=1.0, share=0.0, original_max_position=context, query_beta=beta, query_ahead=1)


def _rope(
    config: Mapping[str, Any], architecture: Architecture, parameters: Mapping[str, Any], theta: float
) -> RopeConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind in ("su", "yarn") and "short_factor" in parameters:  # as Phi-3 called it first
        kind = "longrope"
    sections = tuple(parameters.get("mrope_section") or ())
    if kind == "mrope" and sections:
        kind = "default"
    if kind not in architecture.rope_kinds:
        raise UnsupportedModel(f"the rope type is {kind!r}; supported: {', '.join(architecture.rope_kinds)}")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if architecture.turns_part and config.get("rotary_dim"):  # as MiniMax says it
        share = config["rotary_dim"] / head_dim
    if share != 1.0 and not (architecture.turns_part and 0 < share < 1):
        raise UnsupportedModel(f"partial_rotary_factor is {share}; here only full rotary embeddings are supported")
    original = int(parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings") or 2048)
    factor = float(parameters.get("factor") or config.get("max_position_embeddings", original) / original)
    factors = [tuple(map(float, parameters.get(f"{which}_factor") or ())) for which in ("short", "long")]
    turned = int(head_dim * share)
    if turned % 2:
        raise UnsupportedModel(f"positions turn {turned} of {head_dim} numbers of a head; an even number is needed")
    if sections and (len(sections) != 3 or sum(sections) != turned // 2):
        raise UnsupportedModel(f"mrope_section is {list(sections)}; three parts of {turned // 2} turns are needed")
    if kind == "longrope" and any(len(some) != turned // 2 for some in factors):
        raise UnsupportedModel(f"the rope type is {kind!r}: each of its factors is of {turned // 2} numbers")
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or theta),
        kind=kind,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_attention_factor(kind, parameters, factor, original),
        share=share,
        interleaved=architecture.interleaves and bool(config.get("rope_interleave", True)),
        short_factors=factors[0],
        long_factors=factors[1],
        sections=sections,
        takes_turns=bool(sections and parameters.get("mrope_interleaved")),
        query_beta=float(parameters.get("llama_4_scaling_beta") or 0.0) if architecture.scales_queries else 0.0,
    )


def _attention_factor(kind: str, parameters: Mapping[str, Any], factor: float, original: int) -> float:
    """Return what cosines and sines are multiplied with, as transformers has it, by yarn (Peng et al. 2023, section
    3.4) and longrope (Ding et al. 2024)."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return growth(factor, parameters["mscale"]) / growth(factor, parameters["mscale_all_dim"])
    return growth(factor, 1.0)


def growth(factor: float, weight: float) -> float:
    """Return by how much yarn's scores grow for a context that is stretched by ``factor``."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
