# Checkpoints of eight bits: float8 and int8 as transformers and llm-compressor write them serve as if the engine itself
# had rounded the same weights, by one rank or two; what is not understood is refused by name.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, parse_model_config
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.linear import load_linear
from gpu_backend.models.quantization import Linear, quantize
from gpu_backend.models.shards import ShardedWeights
from gpu_backend.models.weights import Checkpoint, LinearOptions
from tests.support.engine import answer_all, greedy, model_loop
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")
MODEL = TinyModel("Qwen2ForCausalLM", hidden_size=64, intermediate_size=128)


def compressed(kind: str, strategy: str = "channel", bits: int = 8, inputs: bool = True, **more: Any) -> dict[str, Any]:
    """Return what llm-compressor writes into config.json."""
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False} | more
    of_inputs = {"type": kind, "num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": of_inputs if inputs else None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["re:.*lm_head"]}


BLOCKS = (
    {"quant_method": "fp8", "weight_block_size": [32, 16]},
    compressed("float", "block", block_structure=[32, 16]),
)
FORMATS = {
    "int8 weights alone": ("int8", compressed("int", inputs=False)),
    "float8, a scale a row": ("fp8", compressed("float")),
    "int8 with its inputs": ("w8a8", compressed("int")),
    "float8, a scale a matrix": ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_engine_serves_weights_of_eight_bits(name: str, tmp_path: Path) -> None:
    """Where rows have their own scales, replies and scores are those of an engine that rounded the weights itself."""
    method, form = FORMATS[name]
    plain = write_tiny_model(tmp_path / "plain", MODEL)
    folder = write_rounded_model(tmp_path / "rounded", method, form)
    command = greedy("x", range(40, 75), 6)

    own = answer_all(model_loop(plain, quantization=method), [command])["x", 0].token_ids
    reply = answer_all(model_loop(folder), [command])["x", 0].token_ids

    assert len(reply) == 6
    if form["quant_method"] == "compressed-tensors":
        assert reply == own


@pytest.mark.parametrize("name", FORMATS)
def test_every_number_is_as_it_was_stored_on_one_rank_and_on_two(name: str, tmp_path: Path) -> None:
    """Weights times scales are the same bits in all: two halves of the outputs, or of the inputs."""
    method, form = FORMATS[name]
    folder = write_rounded_model(tmp_path, method, form)
    stored = load_file(folder / "model.safetensors")
    packed = load_model_config(folder).packed
    whole = Checkpoint(folder, CPU, torch.float32, packed=packed)
    ranks = [ShardedWeights(Checkpoint(folder, CPU, torch.float32, packed=packed), rank, 2) for rank in (0, 1)]
    mlp = "model.layers.1.mlp"
    names = (f"{mlp}.gate_proj", f"{mlp}.up_proj")

    both = numbers_of(load_linear(whole, names, (128, 128), 64, bias=False))
    up = [numbers_of(load_linear(rank, (f"{mlp}.up_proj",), (64,), 64, bias=False)) for rank in ranks]
    down = [numbers_of(load_linear(rank, (f"{mlp}.down_proj",), (64,), 64, bias=False)) for rank in ranks]

    expected = {n: stored[f"{n}.weight"].float() * stored[f"{n}.weight_scale"] for n in (*names, f"{mlp}.down_proj")}
    assert torch.equal(both, torch.cat([expected[n] for n in names]))
    assert torch.equal(torch.cat(up), expected[names[1]])
    assert torch.equal(torch.cat(down, 1), expected[f"{mlp}.down_proj"])


@pytest.mark.parametrize("form", BLOCKS, ids=["transformers", "llm-compressor"])
def test_blocks_are_as_they_were_stored(form: dict[str, Any], tmp_path: Path) -> None:
    """Float8 with a scale for each block of outputs and inputs, on one rank and on two."""
    folder = write_rounded_model(tmp_path, "fp8", form)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    (scales,) = [tensor for key, tensor in stored.items() if key.startswith(f"{name}.weight_scale")]
    expected = stored[f"{name}.weight"].float() * scales.repeat_interleave(32, 0).repeat_interleave(16, 1)

    weights = Checkpoint(folder, CPU, torch.float32, packed=load_model_config(folder).packed)
    found = load_linear(weights, (name,), (64,), 128, bias=False)(torch.eye(128))
    parts = [
        load_linear(ShardedWeights(weights, rank, 2), (name,), (64,), 64, bias=False)(torch.eye(64)) for rank in (0, 1)
    ]

    assert torch.equal(found.T, expected)
    assert torch.equal(torch.cat(parts), found)


def test_engine_serves_blocks(tmp_path: Path) -> None:
    """Its replies are those of the same numbers written out as float32."""
    folder = write_rounded_model(tmp_path / "blocks", "fp8", BLOCKS[0])
    plain = write_tiny_model(tmp_path / "plain", MODEL)
    whole = load_file(folder / "model.safetensors")
    for name in [name for name in whole if name.endswith("_scale_inv")]:
        scales = whole.pop(name).repeat_interleave(32, 0).repeat_interleave(16, 1)
        weight = name.removesuffix("_scale_inv")
        whole[weight] = whole[weight].float() * scales
    save_file(whole, plain / "model.safetensors")
    command = greedy("x", range(40, 75), 6)
    replies = [answer_all(model_loop(some), [command])["x", 0].token_ids for some in (folder, plain)]

    assert replies[0] == replies[1] and len(replies[0]) == 6


def test_blocks_that_are_cut_are_refused(tmp_path: Path) -> None:
    """Whole blocks of inputs are multiplied at once, a power of two of them."""
    form = {"quant_method": "fp8", "weight_block_size": [32, 48]}
    with pytest.raises(UnsupportedModel, match="blocks of 48 inputs; a power of two"):
        parse_model_config(MODEL.config() | {"quantization_config": form})

    folder = write_rounded_model(tmp_path, "fp8", BLOCKS[0])
    weights = Checkpoint(folder, CPU, torch.float32, packed=PackedFormat("fp8", block=(32, 256)))
    with pytest.raises(UnsupportedModel, match="128 inputs, which blocks of 256 do not divide"):
        load_linear(weights, ("model.layers.0.mlp.down_proj",), (64,), 128, bias=False)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (compressed("int", bits=4), "supported of compressed-tensors"),
        (compressed("int", strategy="group"), "supported of compressed-tensors"),
        (compressed("float", inputs=False), "inputs of None"),
        (compressed("int", "block"), "supported of compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "cannot be read"),
    ],
)
def test_other_formats_are_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        parse_model_config(MODEL.config() | {"quantization_config": asked})


def test_float8_without_its_scale_is_no_plain_weight(tmp_path: Path) -> None:
    """A head of eight bits, or a config that forgets to say so, is refused rather than served without its scales."""
    folder = write_rounded_model(tmp_path, "fp8", compressed("float"))

    with pytest.raises(UnsupportedModel, match="float8_e4m3fn; float32, float16 or bfloat16 is needed"):
        Checkpoint(folder, CPU, torch.float32).get("model.layers.0.mlp.down_proj.weight", 64, 128)
    with pytest.raises(UnsupportedModel, match="8 bits already"):
        Checkpoint(folder, CPU, torch.float32, LinearOptions("int8"), load_model_config(folder).packed)


def numbers_of(product: Any) -> torch.Tensor:
    """Return the weights that a product stands for."""
    assert isinstance(product, Linear) and product.scales is not None
    return product.weight.float() * product.scales[:, None]


def write_rounded_model(folder: Path, method: str, form: dict[str, Any]) -> Path:
    """Write the tiny model with its products' weights rounded, as that format has them."""
    write_tiny_model(folder, MODEL)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "proj.weight" in name]:
        weight, prefix = tensors[name], name.removesuffix(".weight")
        if form in BLOCKS:
            tall, wide = 32, 16
            tiles = weight.view(weight.shape[0] // tall, tall, -1, wide)
            scales = tiles.abs().amax((1, 3)) / 448
            tensors[name] = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(weight.shape)
            tensors[f"{prefix}.weight_scale{'_inv' * (form['quant_method'] == 'fp8')}"] = scales
        elif form["quant_method"] == "fp8":
            scale = weight.abs().amax() / 448
            tensors[name], tensors[f"{prefix}.weight_scale"] = (weight / scale).to(torch.float8_e4m3fn), scale
            tensors[f"{prefix}.input_scale"] = torch.ones(())
        else:
            kept = quantize(weight, None, method)
            tensors[name], tensors[f"{prefix}.weight_scale"] = kept.weight, kept.scales[:, None].contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return folder
