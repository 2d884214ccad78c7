# What a checkpoint says about a head that drafts: one layer that reads what the model made of its tokens. MTP's stands
# behind the model's own layers (DeepSeek-V3, DeepSeek-AI 2024, section 2.2), EAGLE-3's is a checkpoint of its own (Li
# et al. 2025, arXiv:2503.01840), as SafeAILab, SGLang and vLLM's speculators write it.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig, parse_model_config, read_json

EAGLE_3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",  # as its authors name it, with a draft_vocab_size
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
# Of later heads: norms before the states are made one, or of what is handed on. Without them no draft would hold.
UNKNOWN_NORMS = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-3 head: ``layer`` is its one layer, whose vocabulary is that of its drafts."""

    layer: ModelConfig
    layers_read: tuple[int, ...]  # of the model: the states that go into them; as many as it has: its last
    adds_to_normed: bool  # the layer adds to what it has normed, not to what came in


def mtp_layer(model: ModelConfig) -> ModelConfig:
    """Return the shape of the first layer behind the model's own. Raises ``UnsupportedModel`` if there is none."""
    if not model.num_mtp_layers:
        raise UnsupportedModel(
            f"speculative_method is mtp, but config.json of this {model.architecture} has no num_nextn_predict_layers; "
            "supported: DeepSeek V3, V3.1 and R1, GLM-4.5 to 4.7 and GLM-4.7-Flash, with their layers that predict"
        )
    return replace(
        model,
        num_layers=1,
        layers_before=model.num_layers,
        windows=model.windows[-1:],
        ropes=model.ropes[-1:],
        experts=model.experts and replace(model.experts, layers=(True,)),
        vision=None,
    )


def load_eagle_config(folder: Path, model: ModelConfig) -> EagleConfig:
    """Read config.json of a head for ``model``. Raises ``UnsupportedModel``."""
    config = read_json(folder / "config.json")
    named = config.get("architectures") or []
    config = {**config, **_nested(config, "transformer_layer_config")}  # as speculators nest it
    if not {*named} & {*EAGLE_3} or (named == ["LlamaForCausalLM"] and "draft_vocab_size" not in config):
        raise UnsupportedModel(
            f"{folder} is of the architecture {', '.join(named) or '(none)'}, no EAGLE-3 head; supported: "
            f"{', '.join(EAGLE_3)}, the last but two with a draft_vocab_size"
        )
    drafted = config.get("draft_vocab_size") or config.get("vocab_size")
    layer = parse_model_config({**config, "architectures": ["LlamaForCausalLM"]})
    if layer.num_layers != 1:
        raise UnsupportedModel(f"the head of {folder} has {layer.num_layers} layers; EAGLE-3's have one")
    if not isinstance(drafted, int) or not 0 < drafted <= layer.vocab_size:
        raise UnsupportedModel(f"config.json has draft_vocab_size = {drafted!r}, of {layer.vocab_size} tokens")
    if layer.vocab_size != model.vocab_size:
        raise UnsupportedModel(
            f"the vocabulary of {folder} has {layer.vocab_size} tokens, that of the model {model.vocab_size}; "
            "a head is trained for one model"
        )
    if norms := [name for name in UNKNOWN_NORMS if config.get(name) or _nested(config, "eagle_config").get(name)]:
        raise UnsupportedModel(f"config.json of {folder} has {', '.join(norms)}; only heads without are supported")
    if (of_model := config.get("target_hidden_size") or model.hidden_size) != model.hidden_size:
        raise UnsupportedModel(
            f"the head of {folder} reads {of_model} numbers of a token; the model has {model.hidden_size}"
        )
    return EagleConfig(
        replace(layer, vocab_size=drafted), _layers_read(config, model), bool(config.get("norm_before_residual"))
    )


def _layers_read(config: Mapping[str, Any], model: ModelConfig) -> tuple[int, ...]:
    """Return into which layers the states go that are read. Of an ``eagle_config`` ids are those of layers that they
    come out of, as SGLang has them; beside it, those that they go into, as vLLM does."""
    nested = _nested(config, "eagle_config")
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            "eagle_config has use_aux_hidden_state = false; only heads that read three layers are known"
        )
    count, name = model.num_layers, "eagle_aux_hidden_state_layer_ids"
    out_of, into = nested.get(name), config.get(name)
    ids = out_of or into or [2, count // 2, count - 3]
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        raise UnsupportedModel(f"config.json has {name} = {ids!r}; a list of layers' numbers is needed")
    asked = [number + 1 for number in ids] if out_of else ids
    if len({*asked}) != 3 or sorted(asked) != asked or asked[0] < 0 or asked[-1] > count:
        raise UnsupportedModel(f"the head reads layers {asked}; three of {count} are needed, in their order")
    return tuple(asked)


def _nested(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise UnsupportedModel(f"config.json has {name} = {found!r}; an object is needed")
    return found
