# Checkpoints of four bits: every number, scale and zero comes out as AWQ and GPTQ put them in, and the engine serves
# them. The packing is written here a second time, number by number, from the two formats' definitions.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, parse_model_config
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.linear import load_linear
from gpu_backend.models.shards import ShardedWeights, config_of_rank
from gpu_backend.models.weights import Checkpoint, LinearOptions
from tests.gpu.plain import PlainModel
from tests.support.engine import answer_all, greedy, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")
MODEL = TinyModel("Qwen2ForCausalLM", hidden_size=64, intermediate_size=128)
FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq in an order of its own": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq, one group": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
}


@pytest.mark.parametrize("form", FORMATS)
def test_every_number_is_read_as_it_was_packed(form: str, tmp_path: Path) -> None:
    """A product with the identity gives back (number − zero) · scale, bit by bit; matrices may share one product."""
    folder, whole = write_packed_model(tmp_path, FORMATS[form])
    weights = Checkpoint(folder, CPU, torch.float32, packed=load_model_config(folder).packed)
    mlp = "model.layers.1.mlp"

    both = load_linear(weights, (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (128, 128), 64, bias=False)
    out = both(torch.eye(64)).T

    assert torch.equal(out, torch.cat([whole[f"{mlp}.{name}.weight"] for name in ("gate_proj", "up_proj")]))


@pytest.mark.parametrize("form", FORMATS)
def test_engine_serves_weights_of_four_bits(form: str, tmp_path: Path) -> None:
    """Its replies are those of the same numbers written out as float32."""
    folder, whole = write_packed_model(tmp_path / "packed", FORMATS[form])
    plain_folder = write_tiny_model(tmp_path / "plain", MODEL)
    save_file(whole, plain_folder / "model.safetensors")
    prompt = tuple(range(40, 75))

    reply = answer_all(model_loop(folder), [greedy("x", prompt, 6)])["x", 0].token_ids

    logits = PlainModel(plain_folder).logits([*prompt, *reply[:-1]])
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == reply


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_share_packed_weights(form: str, tmp_path: Path) -> None:
    """Two ranks' outputs beside each other, or the sum of what they make of half of the inputs each, are the whole's.

    Groups that are spread over all inputs cannot be cut by inputs, and that is said.
    """
    folder, whole = write_packed_model(tmp_path, FORMATS[form])
    packed = load_model_config(folder).packed
    ranks = [ShardedWeights(Checkpoint(folder, CPU, torch.float32, packed=packed), rank, 2) for rank in (0, 1)]
    mlp = "model.layers.1.mlp"
    up = [load_linear(rank, (f"{mlp}.up_proj",), (64,), 64, bias=False)(torch.eye(64)).T for rank in ranks]

    assert torch.equal(torch.cat(up), whole[f"{mlp}.up_proj.weight"])
    if FORMATS[form].get("desc_act"):
        with pytest.raises(UnsupportedModel, match=r"down_proj.g_idx spreads groups .* \(desc_act\)"):
            load_linear(ranks[1], (f"{mlp}.down_proj",), (64,), 64, bias=False)
        return
    down = [load_linear(rank, (f"{mlp}.down_proj",), (64,), 64, bias=False)(torch.eye(64)).T for rank in ranks]
    assert torch.equal(torch.cat(down, 1), whole[f"{mlp}.down_proj.weight"])


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    folder, _ = write_packed_model(tmp_path, FORMATS["awq"])

    assert config_of_rank(load_model_config(folder), 2).num_kv_heads == 1
    with pytest.raises(UnsupportedModel, match="2 ranks cut through the checkpoint's groups of 128"):
        form = PackedFormat("awq", 128)
        config_of_rank(replace(load_model_config(folder), packed=form), 2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"quant_method": "gptq", "bits": 8}, "gptq .* to 8 bits; supported: awq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"awq \(gemv\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "awq", "bits": 4, "group_size": 48}, "groups of 48"),
    ],
)
def test_other_formats_are_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        parse_model_config(MODEL.config() | {"quantization_config": asked})


def test_packed_weights_are_not_rounded_again(tmp_path: Path) -> None:
    folder, _ = write_packed_model(tmp_path, FORMATS["awq"])

    with pytest.raises(UnsupportedModel, match="4 bits already"):
        Checkpoint(folder, CPU, torch.float32, LinearOptions("int8"), load_model_config(folder).packed)


def write_packed_model(folder: Path, form: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """Write a tiny model packed; return its folder and the weights that the packed ones stand for."""
    write_tiny_model(folder, MODEL)
    torch.manual_seed(7)
    tensors = load_file(folder / "model.safetensors")
    packed, whole = {}, dict(tensors)
    for name, tensor in tensors.items():
        if "proj.weight" not in name:
            packed[name] = tensor
            continue
        outs, inputs = tensor.shape
        size = inputs if form["group_size"] == -1 else form["group_size"]
        of_input = torch.arange(inputs) // size
        if form.get("desc_act"):  # matrices that share an input share its order
            of_input = of_input[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        numbers = torch.randint(0, 16, (outs, inputs))
        zeros = torch.randint(1, 16, (outs, inputs // size))
        scales = (0.02 + 0.02 * torch.rand(outs, inputs // size)).half()
        whole[name] = (numbers - zeros[:, of_input]).float() * scales[:, of_input].float()
        prefix = name.removesuffix(".weight")
        packed[f"{prefix}.scales"] = scales.t().contiguous()
        if form["quant_method"] == "awq":
            packed[f"{prefix}.qweight"], packed[f"{prefix}.qzeros"] = _awq(numbers.t()), _awq(zeros.t())
        else:
            packed[f"{prefix}.g_idx"] = of_input.int()
            packed[f"{prefix}.qweight"] = _in_order(numbers).t().contiguous()
            one_less = form.get("checkpoint_format") != "gptq_v2"
            packed[f"{prefix}.qzeros"] = _in_order(zeros.t() - int(one_less))
    save_file(packed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return folder, whole


def _awq(numbers: Tensor) -> Tensor:
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight stand in a word from its lowest bits up."""
    return _words([[row[8 * i + j] for j in (0, 2, 4, 6, 1, 3, 5, 7)] for i in range(len(row) // 8)]
                  for row in numbers.tolist())  # fmt: skip


def _in_order(numbers: Tensor) -> Tensor:
    return _words([row[8 * i : 8 * i + 8] for i in range(len(row) // 8)] for row in numbers.tolist())


def _words(rows: Any) -> Tensor:
    """Put eights of numbers into int32, whose highest bit is a sign."""
    words = [[sum(number << 4 * place for place, number in enumerate(eight)) for eight in row] for row in rows]
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words]).int()
