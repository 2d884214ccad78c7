# One name for each tensor that models ask for, and where it lies in checkpoints that call it otherwise, or have it in
# one tensor with others: below each other, or one expert behind the other.

from __future__ import annotations

import re

# A module's tensor may hold several, by their modules' names: queries, keys and values; the MLP's gate and up.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED["up_proj"] = "gate_up_proj"
# Of one expert: which tensor holds all experts' (as newer transformers name it).
STACKED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
ONE_EXPERT = re.compile(r"^(.+\.experts)\.(\d+)\.(\w+)\.weight$")
RENAMED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"^model\.language_model\.", "model."),  # of a model that sees
        (r"^language_model\.(?=model\.|lm_head\.)", ""),
        (r"^(midlayer|layers\.0)\.", "model.layers.0."),  # of an EAGLE-3 head
        (r"^(?=embed_tokens\.|norm\.)", "model."),
        (r"^model\.(?=vision_tower\.|multi_modal_projector\.|visual\.)", ""),
        (r"^vision_tower\.vision_model\.", "vision_tower."),  # of a SigLIP
        (r"^(model\.layers\.\d+)\.feed_forward\.", r"\1.mlp."),  # Llama 4's
        (r"\.block_sparse_moe\.", ".mlp."),  # Mixtral's and Granite's mixtures of experts
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),  # MiniMax's
        (r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.mlp\.router\.(layer\.)?(weight|bias)$", r".mlp.gate.\2"),
    )
]


def asked_name(stored: str) -> str:
    """Return what models call a tensor that a checkpoint has under the name ``stored``."""
    for pattern, by in RENAMED:
        stored = pattern.sub(by, stored)
    return stored


def fused_name(name: str) -> str:
    """Return the name of the tensor that may hold this one below or above others; "": none does."""
    *before, module, kind = name.split(".")
    return ".".join([*before, FUSED[module], kind]) if module in FUSED else ""


def stacked_name(name: str) -> tuple[str, int, str]:
    """Return the name of the tensor that may hold all experts' of one, which of them it is, and its module.

    The name is "" where none does.
    """
    found = ONE_EXPERT.match(name)
    if found is None or found[3] not in STACKED:
        return "", 0, ""
    return f"{found[1]}.{STACKED[found[3]]}", int(found[2]), found[3]
