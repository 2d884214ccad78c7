# Writes random LoRA adapters for tiny models as PEFT does, and tiny models with such an adapter merged into their
# weights by PEFT's formula: W + scale · B · A.

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_model import TinyModel, write_shards

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class TinyAdapter:
    """What an adapter is like; ``extra`` goes into adapter_config.json as it is."""

    seed: int = 1
    rank: int = 4
    alpha: float = 8.0
    modules: tuple[str, ...] = ALL
    rslora: bool = False
    alphas: dict[str, float] = field(default_factory=dict)  # of single modules, by the end of their names
    extra: dict[str, Any] = field(default_factory=dict)

    def scale_of(self, name: str) -> float:
        """Return what a matrix's B · A is multiplied by."""
        alpha = next((own for end, own in self.alphas.items() if name.endswith(f".{end}")), self.alpha)
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def config(self) -> dict[str, Any]:
        """Return the contents of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "alpha_pattern": self.alphas,
            "target_modules": list(self.modules),
            "use_rslora": self.rslora,
            "use_dora": False,
            "bias": "none",
            "modules_to_save": None,
            "init_lora_weights": True,
            **self.extra,
        }

    def parts(self, model: TinyModel) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and B of each matrix, by the matrix's name."""
        generator = torch.Generator().manual_seed(self.seed)
        found = {}
        for name, weight in model.tensors().items():
            if name.split(".")[-2] in self.modules and name.endswith(".weight"):
                outputs, inputs = weight.shape
                a = torch.randn(self.rank, inputs, generator=generator) / inputs**0.5
                found[name.removesuffix(".weight")] = a, torch.randn(outputs, self.rank, generator=generator) / 4
        return found


def write_adapter(folder: Path, adapter: TinyAdapter, model: TinyModel) -> Path:
    """Write the adapter into ``folder``, and return that."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config()))
    halves = {}
    for name, (a, b) in adapter.parts(model).items():
        halves[f"base_model.model.{name}.lora_A.weight"] = a
        halves[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(halves, folder / "adapter_model.safetensors")
    return folder


def write_merged(folder: Path, adapter: TinyAdapter, model: TinyModel) -> Path:
    """Write the model with the adapter merged into it, and return its folder."""
    tensors = model.tensors()
    for name, (a, b) in adapter.parts(model).items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + adapter.scale_of(name) * (b @ a)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config()))
    write_shards(folder, tensors, 1)
    return folder
