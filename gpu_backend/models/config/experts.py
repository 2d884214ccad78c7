# What config.json says about a model's mixtures of experts, in the words of each architecture, and what they come to.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel

NUMBER = ("num_experts", "num_local_experts", "n_routed_experts")  # what the number of experts is called


@dataclass(frozen=True, slots=True)
class Mixture:
    """What an architecture's code does with experts, which config.json does not tell."""

    size: str = "moe_intermediate_size"  # how config.json calls the inner width of an expert
    is_normalised: bool = False  # the shares of those chosen add up to one, whatever norm_topk_prob says
    is_optional: bool = False  # some layers have an MLP: by decoder_sparse_step and mlp_only_layers
    begins_dense: bool = False  # the first layers have one: by first_k_dense_replace
    shared: str = ""  # beside those chosen there is one that every token goes through: "gated", or "whole"
    is_sigmoid: bool = False  # shares are sigmoids, chosen with a bias (DeepSeek-V3's router), and have a factor
    has_factor: bool = False  # shares of the softmax have one (DeepSeek-V2)
    scales_inputs: bool = False  # shares are sigmoids, and multiply what goes into an expert (Llama 4)
    is_clamped: bool = False  # gate and up are bounded, and router and experts have biases (GPT-OSS)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts among a model's MLPs; all have the same shape."""

    number: int
    per_token: int
    intermediate_size: int  # of each
    is_normalised: bool  # a token's shares add up to one
    shared_size: int  # the inner width of the expert that every token goes through; 0: there is none
    gates_shared: bool  # by a sigmoid of its own
    is_sigmoid: bool  # shares are sigmoids, chosen with a bias
    factor: float  # of all shares
    layers: tuple[bool, ...]  # by layer: whether its MLP is a mixture
    scales_inputs: bool = False  # shares multiply what goes into an expert, not what comes out
    groups: int = 1  # that experts lie in
    most_groups: int = 1  # of which a token's are chosen
    of_rank: int | None = None  # how many of them a rank has, whole; None: all, or a part of each
    clamp: tuple[float, float] | None = None  # GPT-OSS' alpha and limit, see ``reference_experts``; biases come with it

    @property
    def held(self) -> int:
        """How many of them are on this rank."""
        return self.of_rank or self.number

    def share_read(self, tokens: float) -> float:
        """Return the share of a mixture's experts that so many tokens choose, if they choose evenly."""
        return 1 - (1 - self.per_token / self.number) ** tokens

    def weights_read(self, hidden_size: int, tokens: float) -> float:
        """Return how many weights of one mixture are read for so many tokens, if they choose experts evenly."""
        chosen = self.number * self.share_read(tokens)
        shared = 3 * self.shared_size + self.gates_shared
        return hidden_size * (3 * self.intermediate_size * chosen + shared + self.number)


def experts_config(config: Mapping[str, Any], mixture: Mixture | None, num_layers: int) -> ExpertsConfig | None:
    """Read it; None of an architecture without ``mixture``, or of no layer. Raises ``UnsupportedModel``."""
    if mixture is None:
        return None
    layers = _layers(config, num_layers, mixture)
    number_name = next((name for name in NUMBER if name in config), NUMBER[0])
    number, per_token = whole(config, number_name), whole(config, "num_experts_per_tok")
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act is {activation!r}; supported for a mixture of experts: 'silu'")
    if per_token > number:
        raise UnsupportedModel(f"num_experts_per_tok is {per_token}, but there are {number} experts")
    _check_router(config, mixture)
    groups, most_groups = _groups(config, mixture, number, per_token)
    if not any(layers):
        return None
    inner = whole(config, mixture.size)
    shared = {
        "": lambda: 0,
        "gated": lambda: whole(config, "shared_expert_intermediate_size"),
        "whole": lambda: inner * int(config.get("n_shared_experts") or 0),
    }[mixture.shared]()
    return ExpertsConfig(
        number=number,
        per_token=per_token,
        intermediate_size=inner,
        is_normalised=mixture.is_normalised or bool(config.get("norm_topk_prob", mixture.is_sigmoid)),
        shared_size=shared,
        gates_shared=mixture.shared == "gated",
        is_sigmoid=mixture.is_sigmoid,
        factor=float(config.get("routed_scaling_factor") or 1.0) if mixture.is_sigmoid or mixture.has_factor else 1.0,
        layers=layers,
        scales_inputs=mixture.scales_inputs,
        groups=groups,
        most_groups=most_groups,
        clamp=_clamp(config) if mixture.is_clamped else None,
    )


def _check_router(config: Mapping[str, Any], mixture: Mixture) -> None:
    """Refuse what would choose other experts, or count them otherwise."""
    known: dict[str, tuple[Any, ...]] = {}
    if mixture.is_sigmoid:
        known = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
    elif mixture.has_factor:
        known = {"scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy")}
        known |= {"moe_layer_freq": (1,), "norm_topk_prob": (False,)}
    for name, values in known.items():
        if config.get(name, values[0]) not in values:
            supported = " or ".join(map(repr, values))
            raise UnsupportedModel(f"config.json has {name} = {config[name]!r}; supported here: {supported}")


def _groups(config: Mapping[str, Any], mixture: Mixture, number: int, per_token: int) -> tuple[int, int]:
    """Return how many groups experts lie in, and of how many a token's are chosen; 1 and 1: of all."""
    is_grouped = mixture.is_sigmoid or config.get("topk_method") == "group_limited_greedy"
    groups, most = (config.get(name) or 1 for name in ("n_group", "topk_group"))
    if not is_grouped or groups == most:
        return 1, 1
    size = number // groups if isinstance(groups, int) and groups > 0 and number % groups == 0 else 0
    if not isinstance(most, int) or not 0 < most < groups or size < 2 or most * size < per_token:
        raise UnsupportedModel(
            f"config.json has n_group = {groups!r} and topk_group = {most!r}, of which {per_token} of {number} experts "
            "cannot be chosen"
        )
    return groups, most


def _clamp(config: Mapping[str, Any]) -> tuple[float, float]:
    alpha, limit = (config.get(name, default) for name, default in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)))
    if not all(isinstance(value, int | float) and value > 0 for value in (alpha, limit)):
        raise UnsupportedModel(
            f"config.json has swiglu_alpha = {alpha!r} and swiglu_limit = {limit!r}; numbers above 0 are needed"
        )
    return float(alpha), float(limit)


def _layers(config: Mapping[str, Any], num_layers: int, mixture: Mixture) -> tuple[bool, ...]:
    """Return which layers have a mixture: all, those behind the first, or each so many-th but for those named."""
    if mixture.begins_dense and (kinds := config.get("mlp_layer_types")) is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or not {*kinds} <= {"dense", "sparse"}:
            raise UnsupportedModel(f"mlp_layer_types is {kinds!r}; each of {num_layers} layers is dense or sparse")
        return tuple(kind == "sparse" for kind in kinds)
    first = config.get("first_k_dense_replace", 1) if mixture.begins_dense else 0
    if not mixture.is_optional:
        return tuple(layer >= first for layer in range(num_layers))
    if mixture.scales_inputs and (named := config.get("moe_layers")) is not None:
        if not isinstance(named, list) or not {*named} <= {*range(num_layers)}:
            raise UnsupportedModel(f"moe_layers is {named!r}; a list of some of {num_layers} layers is needed")
        return tuple(layer in named for layer in range(num_layers))
    step_name = "interleave_moe_layer_step" if mixture.scales_inputs else "decoder_sparse_step"
    step, without = config.get(step_name, 1), config.get("mlp_only_layers") or []
    if not isinstance(step, int) or step < 1 or not isinstance(without, list):
        raise UnsupportedModel(
            f"config.json has {step_name} = {step!r} and mlp_only_layers = {without!r}; a whole number above 0 "
            "and a list of layers are needed"
        )
    return tuple((layer + 1) % step == 0 and layer not in without for layer in range(num_layers))


def whole(config: Mapping[str, Any], name: str) -> int:
    """Return a size that config.json has. Raises ``UnsupportedModel`` where it has none."""
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {name} = {value!r}; a whole number above 0 is needed")
    return value
