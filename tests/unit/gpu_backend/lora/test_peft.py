# Adapters that would say something else than they were trained to say are refused, and it is told why.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_backend.lora.loading import load_adapters
from gpu_backend.lora.peft import WEIGHTS, read_adapter
from gpu_backend.lora.slots import AdapterSlots
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig, load_model_config
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import LoraConfig
from tests.support.tiny_lora import TinyAdapter, write_adapter
from tests.support.tiny_model import TinyModel, write_tiny_model

MODEL = TinyModel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(write_tiny_model(tmp_path_factory.mktemp("model"), MODEL))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; LORA is supported"),
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: whole modules"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "biases of lora_B"),
        ({"target_modules": ["q_proj", "model.embed_tokens"]}, "targets embed_tokens; supported are q_proj"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"lora_alpha": float("inf")}, "layer 0's .* is not of finite numbers"),
        ({"alpha_pattern": {r"(\w+\.?)+x": 4}}, "could take for ever"),
        ({"alpha_pattern": {".*.*.*.*.*.*.*.*.*.*.*.*x": 4}}, "could take for ever"),
    ],
)
def test_what_is_more_than_two_matrices_is_refused(
    tmp_path: Path, model: ModelConfig, config: dict[str, Any], said: str
) -> None:
    """By the name that it has in adapter_config.json."""
    write_adapter(tmp_path, TinyAdapter(extra=config), MODEL)

    with pytest.raises(UnsupportedModel, match=said):
        read_adapter(tmp_path, model, 16)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, model: ModelConfig) -> None:
    """Of another model, of another kind, of too high a rank, or half of them."""
    whole = load_file(write_adapter(tmp_path, TinyAdapter(), MODEL) / WEIGHTS)
    layer = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"

    def refused(changes: dict[str, Any], max_rank: int = 16) -> str:
        save_file({name: some for name, some in {**whole, **changes}.items() if some is not None}, tmp_path / WEIGHTS)
        with pytest.raises(UnsupportedModel) as told:
            read_adapter(tmp_path, model, max_rank)
        return str(told.value).removeprefix(f"{tmp_path}: ")

    assert "is of rank 4; this engine has room up to 3 (--max-lora-rank)" in refused({}, 3)
    assert "layer 0's q_proj lacks its lora_B" in refused({layer.format(0, "B"): None})
    assert "of a model with more layers; this one has 2" in refused({layer.format(7, "A"): torch.ones(4, 64)})
    for value in (torch.nan, -torch.inf):  # which rows of other adapters in the same tile would have in them, too
        for half in ((4, 64), "A"), ((64, 4), "B"):
            assert "not of finite numbers" in refused({layer.format(0, half[1]): torch.full(half[0], value)})
    assert "not of finite numbers" in refused({layer.format(0, "A"): torch.ones(4, 64, dtype=torch.int8)})
    assert "lora_A of (0, 64)" in refused(
        {layer.format(0, "A"): torch.ones(0, 64), layer.format(0, "B"): torch.ones(64, 0)}
    )
    assert "lora_A of ()" in refused({layer.format(0, "A"): torch.ones(())})
    assert "lora_A of (4, 60)" in refused({layer.format(0, "A"): torch.ones(4, 60)})
    assert refused({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}).startswith(
        "base_model.model.lm_head.lora_A.weight belongs to no supported module"
    )
    assert "lora_magnitude_vector" in refused(
        {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": torch.ones(96)}
    )
    (tmp_path / WEIGHTS).write_bytes(b"half of it")
    with pytest.raises(UnsupportedModel, match="no complete safetensors file"):
        read_adapter(tmp_path, model, 16)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModel, match="adapters are loaded from safetensors alone"):
        read_adapter(tmp_path, model, 16)
    with pytest.raises(UnsupportedModel, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path / "elsewhere", model, 16)


def test_what_became_of_a_loaded_adapter_keeps_no_engine_from_starting_again(
    tmp_path: Path, model: ModelConfig
) -> None:
    """Whatever is wrong with its folder now; one that the operator names keeps it from that."""
    write_adapter(tmp_path, TinyAdapter(extra={"lora_alpha": "much"}), MODEL)

    def load(came_later: bool) -> bool:
        adapter = Adapter(1, "own", str(tmp_path), came_later)
        return adapter in load_adapters(LoraConfig((adapter,)), AdapterSlots(1, 16), model)

    assert not load(came_later=True)
    with pytest.raises(ValueError, match="much"):
        load(came_later=False)


def test_mlps_of_experts_take_no_adapter(tmp_path: Path) -> None:
    """Their attention does."""
    mixture = TinyModel("MixtralForCausalLM")
    model = load_model_config(write_tiny_model(tmp_path / "model", mixture))
    halves = load_file(write_adapter(tmp_path / "own", TinyAdapter(), MODEL) / WEIGHTS)
    assert any("mlp" in name for name in halves)

    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        read_adapter(tmp_path / "own", model, 16)
