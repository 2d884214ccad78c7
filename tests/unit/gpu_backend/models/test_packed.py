# Checkpoints of packed weights: every number, scale and zero comes out as AWQ, GPTQ and llm-compressor put them in, and
# the engine serves them. The packing is written here a second time, number by number, from the formats' definitions.

from __future__ import annotations

import json
import re
from collections.abc import Callable
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


def compressed(bits: int, group: int = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    """Return what llm-compressor writes into config.json."""
    weights = {"type": "int", "num_bits": bits, "strategy": "group" if group > 0 else "channel", "symmetric": symmetric}
    weights |= {"group_size": group if group > 0 else None, "actorder": None, "dynamic": False} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    named = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return named | {"config_groups": groups}


FORMATS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq in an order of its own": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq, one group": {"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"},
    "gptq of 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True},
    "compressed, 4 bits": compressed(4),
    "compressed, 4 bits from zeros": compressed(4, symmetric=False),
    "compressed, 4 bits in an order of its own": compressed(4, symmetric=False, actorder="group"),
    "compressed, 8 bits from zeros": compressed(8, symmetric=False),
    "compressed, 8 bits, one group": compressed(8, group=-1),
    "compressed, 4 bits, one group from zeros": compressed(4, group=-1, symmetric=False, actorder="weight"),
}
SERVED = [form for form in FORMATS if "one group" not in form or "gptq" in form]  # the others differ by what is read


def has_order(form: dict[str, Any]) -> bool:
    """Whether inputs say which group is theirs."""
    groups = form.get("config_groups", {"": {"weights": {}}})
    return bool(form.get("desc_act")) or any(some["weights"].get("actorder") == "group" for some in groups.values())


@pytest.mark.parametrize("form", FORMATS)
def test_every_number_is_read_as_it_was_packed(form: str, tmp_path: Path) -> None:
    """A product with the identity gives back (number − zero) · scale, bit by bit; matrices may share one product."""
    folder, whole = write_packed_model(tmp_path, FORMATS[form])
    weights = Checkpoint(folder, CPU, torch.float32, packed=load_model_config(folder).packed)
    mlp = "model.layers.1.mlp"

    both = load_linear(weights, (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (128, 128), 64, bias=False)
    out = both(torch.eye(64)).T

    assert torch.equal(out, torch.cat([whole[f"{mlp}.{name}.weight"] for name in ("gate_proj", "up_proj")]))


@pytest.mark.parametrize("form", SERVED)
def test_engine_serves_packed_weights(form: str, tmp_path: Path) -> None:
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
    if has_order(FORMATS[form]):
        with pytest.raises(UnsupportedModel, match=r"down_proj.*g_idx spreads groups .* \(desc_act\)"):
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
    states = TinyModel("Qwen3_5ForCausalLM", intermediate_size=128).config()  # whose 48 values are cut, too
    with pytest.raises(UnsupportedModel, match="2 ranks cut through the checkpoint's groups of 32"):
        config_of_rank(parse_model_config(states | {"quantization_config": FORMATS["awq"]}), 2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq .* to 3 bits; supported: awq"),
        ({"quant_method": "awq", "bits": 8}, "awq .* to 8 bits; supported: awq"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic rules"),
        (compressed(3), "packed weights of .'int', 3.*supported of compressed-tensors"),
        (compressed(4, group=48), "groups of 48"),
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


def test_matrices_that_are_left_whole_are_read_whole(tmp_path: Path) -> None:
    """Those that `ignore` names, and where `targets` names some, all others."""
    form = compressed(4) | {"ignore": ["lm_head", "re:.*mlp.*"]}
    of_attention = compressed(4) | {"ignore": []}
    of_attention["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*_proj"]
    for index, some in enumerate((form, of_attention)):
        folder, whole = write_packed_model(tmp_path / str(index), some, is_packed=lambda name: "self_attn" in name)
        packed = load_model_config(folder).packed
        weights = Checkpoint(folder, CPU, torch.float32, packed=packed)
        for name in ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"):
            out, width = whole[f"{name}.weight"].shape
            product = load_linear(weights, (name,), (out,), width, bias=False)
            assert (product.scales is not None) == ("self_attn" in name)
            assert torch.equal(product(torch.eye(width)).T, whole[f"{name}.weight"])


def write_packed_model(
    folder: Path, form: dict[str, Any], is_packed: Callable[[str], bool] = lambda name: True, model: TinyModel = MODEL
) -> tuple[Path, dict[str, Tensor]]:
    """Write a tiny model packed; return its folder and the weights that the packed ones stand for."""
    write_tiny_model(folder, model)
    torch.manual_seed(7)
    tensors = load_file(folder / "model.safetensors")
    packed, whole = {}, dict(tensors)
    for name, tensor in tensors.items():
        if re.search(r"_proj(_\w+)?\.weight$", name) and is_packed(name):
            parts, whole[name] = pack(name, tensor, form)
            packed |= parts
        else:
            packed[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": form}))
    return folder, whole


def pack(name: str, tensor: Tensor, form: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return a matrix of chance in the place of ``tensor``: as it is packed, and the weights that it stands for."""
    described = form.get("config_groups", {}).get("group_0", {}).get("weights", form)
    bits = described.get("num_bits") or form["bits"]
    middle, (outs, inputs), prefix = 1 << bits - 1, tensor.shape, name.removesuffix(".weight")
    size = inputs if described["group_size"] in (-1, None) else described["group_size"]
    of_input = torch.arange(inputs) // size
    if has_order(form):  # matrices that share an input share its order
        of_input = of_input[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    numbers = torch.randint(0, 2**bits, (outs, inputs))
    zeros = torch.randint(1, 2**bits, (outs, inputs // size))
    if described.get("symmetric"):
        zeros[:] = middle
    scales = ((0.02 + 0.02 * torch.rand(outs, inputs // size)) * 8 / middle).half()
    whole = (numbers - zeros[:, of_input]).float() * scales[:, of_input].float()
    if form["quant_method"] == "compressed-tensors":
        parts = {"weight_scale": scales, "weight_packed": _in_order(numbers, bits)}
        parts["weight_shape"] = torch.tensor(tensor.shape)
        if not described["symmetric"]:
            parts["weight_zero_point"] = _in_order(zeros.t(), bits).t()
        if has_order(form):
            parts["weight_g_idx"] = of_input.int()
    elif form["quant_method"] == "awq":
        parts = {"scales": scales.t(), "qweight": _awq(numbers.t()), "qzeros": _awq(zeros.t())}
    else:
        parts = {"scales": scales.t(), "g_idx": of_input.int(), "qweight": _in_order(numbers, bits).t()}
        one_less = form.get("checkpoint_format") != "gptq_v2"
        parts["qzeros"] = _in_order(zeros.t() - int(one_less), bits)
    return {f"{prefix}.{part}": some for part, some in parts.items()}, whole


def _awq(numbers: Tensor) -> Tensor:
    """Outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight stand in a word from its lowest bits up."""
    return _in_order(numbers.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)


def _in_order(numbers: Tensor, bits: int) -> Tensor:
    """Put as many numbers as fit into an int32, whose highest bit is a sign, the first into its lowest bits."""
    words = sum(some << bits * place for place, some in enumerate(numbers.unflatten(1, (-1, 32 // bits)).unbind(-1)))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).int()
