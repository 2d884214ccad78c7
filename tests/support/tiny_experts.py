# The mixtures of experts of a tiny model: what its config.json says of them, and their tensors as its architecture
# names them, one by one or all experts' in one.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.support.tiny_model import TinyModel

MODEL_TYPES_OF_MIXTURES = {
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "GraniteMoeForCausalLM": "granitemoe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "OlmoeForCausalLM": "olmoe",
    "Dots1ForCausalLM": "dots1",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "Llama4ForCausalLM": "llama4_text",
}
NAMES = {  # of router, gate, up and down; Granite has all experts' in two tensors
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "w3", "w2"),
    "MiniMaxM2ForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "w3", "w2"),
    "GraniteMoeForCausalLM": ("block_sparse_moe.router.layer", "", "", ""),
}
QWEN = ("mlp.gate", "mlp.experts.{}.gate_proj", "up_proj", "down_proj")
SHARED_SIZE = 24
GATED = ("Qwen2MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")  # have a shared expert with a gate
Matrix = Callable[[int, int], Tensor]


def experts_config(model: TinyModel) -> dict[str, Any]:
    """Return what config.json says of the experts; nothing of a dense model."""
    if model.architecture not in MODEL_TYPES_OF_MIXTURES:
        return {}
    routed = dict.fromkeys(("Glm4", "Deep", "Dots"), "n_routed_experts")
    named = ({"Qwen": "num_experts", "Olmo": "num_experts"} | routed).get(model.architecture[:4], "num_local_experts")
    config: dict[str, Any] = {named: model.num_experts, "num_experts_per_tok": model.experts_per_token}
    if model.packs_experts:
        config["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}  # which transformers asks for
    if named == "n_routed_experts":
        config |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 1}
        config |= {"n_group": 1, "topk_group": 1}
    if named != "num_local_experts" and not model.architecture.startswith("Olmo"):
        is_normalised = model.seed % 2 == 0 and model.architecture != "DeepseekV2ForCausalLM"
        config |= {"moe_intermediate_size": model.intermediate_size // 2, "norm_topk_prob": is_normalised}
    if model.architecture == "Llama4ForCausalLM":
        config |= {
            "intermediate_size": model.intermediate_size // 2 + 6,
            "intermediate_size_mlp": model.intermediate_size,
        }
    if model.architecture in GATED:
        config["shared_expert_intermediate_size"] = SHARED_SIZE
    return config


def experts_tensors(model: TinyModel, layer: str, matrix: Matrix) -> dict[str, Tensor]:
    """Draw one layer's; ``layer`` names it."""
    if model.architecture == "GptOssForCausalLM":
        return _clamped(model, f"{layer}.mlp", matrix)
    config, hidden = model.config(), model.hidden_size
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    router, first, up, down = (f"{layer}.{name}" for name in NAMES.get(model.architecture, QWEN))
    tensors = {f"{router}.weight": matrix(model.num_experts, hidden)}
    each = [(matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)) for _ in range(model.num_experts)]
    gate_up = torch.stack([torch.cat(expert[:2]) for expert in each])
    if model.architecture == "GraniteMoeForCausalLM":
        names = (f"{layer}.block_sparse_moe.{which}_linear.weight" for which in ("input", "output"))
        tensors |= dict(zip(names, (gate_up, torch.stack([expert[2] for expert in each])), strict=True))
    elif model.architecture == "Llama4ForCausalLM":  # inputs before outputs
        tensors = {f"{layer}.mlp.router.weight": tensors.popitem()[1]}
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = gate_up.mT.contiguous()
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack([expert[2] for expert in each]).mT.contiguous()
        tensors |= _shared(f"{layer}.mlp.shared_expert", hidden, inner, matrix)
    elif model.stacks_experts:
        tensors = {f"{layer}.mlp.gate.weight": tensors.popitem()[1], f"{layer}.mlp.experts.gate_up_proj": gate_up}
        tensors[f"{layer}.mlp.experts.down_proj"] = torch.stack([expert[2] for expert in each])
    else:
        for number, expert in enumerate(each):
            stem, gate = first.format(number).rsplit(".", 1)
            names = (f"{stem}.{module.removeprefix(f'{layer}.')}.weight" for module in (gate, up, down))
            tensors |= dict(zip(names, expert, strict=True))
    if model.architecture == "MiniMaxM2ForCausalLM":
        tensors[f"{layer}.block_sparse_moe.e_score_correction_bias"] = matrix(1, model.num_experts)[0] / 4
    if "n_shared_experts" in config:
        if model.architecture != "DeepseekV2ForCausalLM":
            tensors[f"{router}.e_score_correction_bias"] = matrix(1, model.num_experts)[0] / 4
        shared = inner * config["n_shared_experts"]
        tensors |= _shared(f"{layer}.mlp.shared_experts", hidden, shared, matrix)
    elif model.architecture in GATED:
        tensors |= _shared(f"{layer}.mlp.shared_expert", hidden, config["shared_expert_intermediate_size"], matrix)
        tensors[f"{layer}.mlp.shared_expert_gate.weight"] = matrix(1, hidden)
    return tensors


def _clamped(model: TinyModel, name: str, matrix: Matrix) -> dict[str, Tensor]:
    number, hidden, inner = model.num_experts, model.hidden_size, model.intermediate_size
    tensors = {f"{name}.router.weight": matrix(number, hidden), f"{name}.router.bias": matrix(1, number)[0]}
    for module, inputs, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        drawn = torch.stack([matrix(outputs, inputs) for _ in range(number)])
        tensors[f"{name}.experts.{module}_bias"] = matrix(number, outputs)
        if not model.packs_experts:
            tensors[f"{name}.experts.{module}"] = drawn.mT.contiguous()
            continue
        exponents = drawn.view(number, outputs, -1, 32).abs().amax(-1).log2().floor() - 2 + 127
        bits = (matrix(number * outputs, inputs // 2).abs() * 997 % 256).to(torch.uint8)
        tensors[f"{name}.experts.{module}_blocks"] = bits.view(number, outputs, -1, 16)
        tensors[f"{name}.experts.{module}_scales"] = exponents.to(torch.uint8)
    return tensors


def _shared(name: str, hidden: int, inner: int, matrix: Matrix) -> dict[str, Tensor]:
    widening = {f"{name}.{module}.weight": matrix(inner, hidden) for module in ("gate_proj", "up_proj")}
    return widening | {f"{name}.down_proj.weight": matrix(hidden, inner)}


def has_experts(model: TinyModel, index: int) -> bool:
    """Whether a layer has a mixture in the place of its MLP."""
    if model.architecture not in MODEL_TYPES_OF_MIXTURES:
        return False
    config = model.config()
    if "moe_layers" in config:
        return index in config["moe_layers"]
    step = config.get("decoder_sparse_step", config.get("interleave_moe_layer_step", 1))
    without = config.get("mlp_only_layers") or ()
    return index >= config.get("first_k_dense_replace", 0) and (index + 1) % step == 0 and index not in without
