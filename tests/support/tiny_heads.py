# Heads that draft for a tiny model: an MTP layer behind its own, or an EAGLE-3 head in a checkpoint beside it.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model

EAGLE_LAYERS = (1, 2, 3)  # that a head reads of a model of three


def write_mtp_model(folder: Path, model: TinyModel, agrees: bool = False, with_tokenizer: bool = False) -> Path:
    """Write a model with one layer more that drafts: of random weights, or such as agree with the model often."""
    extra = model.extra | {"num_nextn_predict_layers": 1}
    model = replace(model, extra=extra)
    write_tiny_model(folder, model, with_tokenizer)
    tensors = replace(model, num_layers=model.num_layers + 1).tensors()
    prefix, hidden = f"model.layers.{model.num_layers}", model.hidden_size
    draw = torch.Generator().manual_seed(model.seed + 1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=draw)
    tensors[f"{prefix}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=draw) / hidden**0.5
    if agrees:
        _calm(tensors)
        tensors[f"{prefix}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        tensors[f"{prefix}.eh_proj.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    write_shards(folder, tensors)
    return folder


def write_calm_model(folder: Path, model: TinyModel) -> Path:
    """Write a model whose next token follows from the last one more than from those before."""
    write_tiny_model(folder, model, with_tokenizer=True)
    tensors = model.tensors()
    _calm(tensors)
    write_shards(folder, tensors)
    return folder


def write_eagle_head(folder: Path, model: TinyModel, drafted: int = 200, agrees: bool = False, **config: Any) -> Path:
    """Write an EAGLE-3 head of ``drafted`` of the model's tokens, as its authors name tensors; ``config`` goes into its
    config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(model.seed + 2)
    hidden, heads, head_dim = model.hidden_size, 4, model.hidden_size // 4
    of_head = replace(model, architecture="LlamaForCausalLM", num_layers=1, num_heads=heads, num_kv_heads=heads)
    written = replace(of_head, head_dim=head_dim, extra={}).config()
    written |= {"draft_vocab_size": drafted, "eagle_aux_hidden_state_layer_ids": [*EAGLE_LAYERS]}
    (folder / "config.json").write_text(json.dumps(written | config))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * (1.5 / columns**0.5)

    inner = model.intermediate_size
    token_ids = torch.randperm(model.vocab_size, generator=draw)[:drafted].sort().values
    tensors = {f"midlayer.self_attn.{of}_proj.weight": matrix(hidden, 2 * hidden) for of in "qkv"}
    tensors |= {f"midlayer.mlp.{of}_proj.weight": matrix(inner, hidden) for of in ("gate", "up")}
    tensors |= {"midlayer.self_attn.o_proj.weight": matrix(hidden, hidden), "fc.weight": matrix(hidden, 3 * hidden)}
    tensors |= {"midlayer.mlp.down_proj.weight": matrix(hidden, inner), "lm_head.weight": matrix(drafted, hidden)}
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=draw)
    tensors["d2t"] = token_ids - torch.arange(drafted)
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, token_ids, True)
    if agrees:  # each token attends to itself alone, and what it is goes through
        of_model, nothing = model.tensors(), torch.zeros(hidden, hidden)
        sharp = torch.linalg.qr(matrix(hidden, hidden)).Q * 3
        tensors |= {f"midlayer.self_attn.{of}_proj.weight": torch.cat((sharp, nothing), 1) for of in "qk"}
        tensors["midlayer.self_attn.v_proj.weight"] = torch.cat((torch.eye(hidden), nothing), 1)
        tensors["midlayer.self_attn.o_proj.weight"] = 2 * torch.eye(hidden)
        tensors["midlayer.mlp.down_proj.weight"] *= 0.1
        tensors["fc.weight"] *= 0.05
        tensors["norm.weight"] = of_model["model.norm.weight"]
        tensors["lm_head.weight"] = of_model["lm_head.weight"][token_ids]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _calm(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 0.04
