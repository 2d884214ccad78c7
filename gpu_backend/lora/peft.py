# LoRA adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors. What would change the numbers
# and is not implemented is refused by name.

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpu_backend.models.config.architectures import ARCHITECTURES
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.tensor_names import asked_name

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
MODULES = (*ATTENTION, *MLP)
_TENSOR = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<module>\w+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight"
)
_REPEATS = re.compile(r"\)[*+{]|([*+{].*){4}", re.DOTALL)  # a group that repeats, or so much that does
# Initial values that PEFT takes out of the base's own weights: those of the checkpoint are others.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")

Place = tuple[int, str]  # layer and module


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one matrix: ``expand`` · ``shrink``."""

    shrink: Tensor  # (rank, inputs): PEFT's lora_A
    expand: Tensor  # (outputs, rank), float32: PEFT's lora_B times the adapter's scale


def read_adapter(folder: Path, model: ModelConfig, max_rank: int) -> dict[Place, LowRank]:
    """Return what an adapter adds, by layer and module, on the host. Raises ``UnsupportedModel``."""
    config = _read_config(folder)
    _check_config(folder, config)
    try:
        tensors = load_file(folder / WEIGHTS)
    except FileNotFoundError:
        raise UnsupportedModel(f"{folder} has no {WEIGHTS}; adapters are loaded from safetensors alone") from None
    except (OSError, SafetensorError) as error:
        raise UnsupportedModel(f"{folder / WEIGHTS} is no complete safetensors file: {error}") from error
    halves: dict[Place, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(asked_name(name.removeprefix("base_model.model.")))
        if found is None or found["module"] not in MODULES:
            raise UnsupportedModel(f"{folder}: {name} belongs to no supported module; these are {', '.join(MODULES)}")
        halves.setdefault((int(found["layer"]), found["module"]), {})[found["side"]] = tensor
    return {place: _low_rank(folder, config, model, place, both, max_rank) for place, both in halves.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(
            f"{folder} has no {CONFIG}; the folder of an adapter as PEFT saves it is needed"
        ) from None
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{folder / CONFIG} must hold a JSON object")
    return config


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is more than a product of two matrices beside each of the model's."""
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{folder} is of peft_type {config.get('peft_type')!r}; LORA is supported")
    for name, what in (
        ("use_dora", "DoRA"),
        ("modules_to_save", "whole modules beside the adapter"),
        ("lora_bias", "biases of lora_B"),
        ("fan_in_fan_out", "matrices the other way round"),
        ("layer_replication", "layers that are there several times"),
        ("trainable_token_indices", "tokens of its own"),
        ("alora_invocation_tokens", "adapters that begin in mid-prompt (aLoRA)"),
        ("use_qalora", "QALoRA"),
    ):
        if config.get(name):
            raise UnsupportedModel(f"{folder} has {name}: {what} are not supported; train without, or merge it")
    if config.get("bias", "none") != "none":
        raise UnsupportedModel(f"{folder} has bias {config['bias']!r}; adapters that leave biases alone are supported")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(CHANGES_BASE):
        raise UnsupportedModel(
            f"{folder} was begun by init_lora_weights {start!r}, which changes the base model's weights; save it as a "
            "plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    targets = config.get("target_modules")
    if isinstance(targets, list) and (others := sorted({str(each).split(".")[-1] for each in targets} - {*MODULES})):
        raise UnsupportedModel(f"{folder} targets {', '.join(others)}; supported are {', '.join(MODULES)}")


def _low_rank(
    folder: Path, config: Mapping[str, Any], model: ModelConfig, place: Place, halves: Mapping[str, Tensor], most: int
) -> LowRank:
    layer, module = place
    where = f"{folder}: layer {layer}'s {module}"
    if layer >= model.num_layers:
        raise UnsupportedModel(f"{where} is of a model with more layers; this one has {model.num_layers}")
    if module in MLP and model.experts is not None and model.experts.layers[layer]:
        raise UnsupportedModel(
            f"{where} is a mixture of experts, to whose MLPs no adapter can be added; attention alone"
        )
    if halves.keys() != {"A", "B"}:
        raise UnsupportedModel(f"{where} lacks its lora_{'B' if 'A' in halves else 'A'}")
    shrink, expand = halves["A"], halves["B"]
    outputs, inputs = shape_of(model, module)
    rank = shrink.shape[0] if shrink.ndim else 0
    if not rank or tuple(shrink.shape) != (rank, inputs) or tuple(expand.shape) != (outputs, rank):
        raise UnsupportedModel(
            f"{where} has lora_A of {tuple(shrink.shape)} and lora_B of {tuple(expand.shape)}; the model calls for "
            f"(r, {inputs}) and ({outputs}, r)"
        )
    if rank > most:
        raise UnsupportedModel(f"{where} is of rank {rank}; this engine has room up to {most} (--max-lora-rank)")
    scale = _alpha(config, f"model.layers.{layer}.{'mlp' if module in MLP else 'self_attn'}.{module}", rank)
    scale /= math.sqrt(rank) if config.get("use_rslora") else rank
    if module in ("o_proj", "down_proj") and ARCHITECTURES[model.architecture].multiplies:
        scale *= model.factors.residual  # which the model's own matrices have in them
    expand = expand.float() * scale
    if not all(half.is_floating_point() and half.float().isfinite().all() for half in (shrink, halves["B"], expand)):
        # Rows of other adapters in the same tile would be no numbers either.
        raise UnsupportedModel(f"{where} is not of finite numbers all, times its scale")
    return LowRank(shrink, expand)


def shape_of(model: ModelConfig, module: str) -> tuple[int, int]:
    """Return the outputs and inputs of a module's matrix."""
    hidden, inner = model.hidden_size, model.intermediate_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }[module]


def _alpha(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return a module's lora_alpha: its own where ``alpha_pattern`` has one, as PEFT matches them."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    for pattern in patterns:
        if _REPEATS.search(pattern):
            raise UnsupportedModel(f"alpha_pattern has {pattern[:100]!r}, which could take for ever: name the modules")
        if re.match(rf"(.*\.)?({pattern})$", name):
            alpha = patterns[pattern]
            break
    return float(8 if alpha is None else alpha)  # PEFT's own default
