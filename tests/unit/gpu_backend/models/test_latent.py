# Attention over latent vectors: what it keeps of a token, on every rank alike; what its checkpoint may be packed in;
# what it counts for.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_backend.execution.kv_format import KvFormat, Placement
from gpu_backend.lora.slots import AdapterSlots, with_adapters
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.latent import LatentConfig
from gpu_backend.models.config.model import load_model_config, parse_model_config
from gpu_backend.models.latent import LatentAttention
from gpu_backend.models.llama import load_model
from gpu_backend.models.shards import config_of_rank
from gpu_backend.models.weights import Checkpoint, LinearOptions, RandomWeights
from gpu_backend.simulate.hardware import PUBLISHED
from tests.support.engine import answer_all, greedy, model_loop
from tests.support.tiny_latent import SIZES
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.unit.gpu_backend.models.test_packed import pack

CPU = torch.device("cpu")
MODEL = TinyModel("YoutuForCausalLM", tie_word_embeddings=False)
WIDTHS = {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 16}  # that groups and blocks divide


def test_a_token_keeps_one_vector_on_every_rank() -> None:
    """And the key that turns, for all heads together: 576 numbers a layer of DeepSeek-V3, where 128 heads of keys and
    values would be 32,768; ranks have a part of the heads, and all vectors.
    """
    model = PUBLISHED["DeepSeek-V3"]
    part = config_of_rank(model, 8)
    kv = KvFormat(part, 16, torch.bfloat16, CPU)

    assert model.kv_floats_per_token == part.kv_floats_per_token == 61 * 576
    assert part.num_heads == 16 and part.attended_width == 16 * 128
    assert kv.block_bytes == 61 * 576 * 16 * 2


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("DeepSeek-V3", 671e9, 37.6e9), ("Kimi-K2", 1.03e12, 32.9e9)],
)
def test_all_weights_and_those_of_a_token_are_counted(name: str, total: float, active: float) -> None:
    """As their makers count them, with both ends of the vocabulary."""
    model = PUBLISHED[name]
    ends = model.vocab_size * model.hidden_size

    assert model.weights_read() + 2 * ends == pytest.approx(total, rel=0.01)
    assert model.products_per_token + ends == pytest.approx(active, rel=0.03)


def test_queries_of_no_vector_of_their_own_are_counted() -> None:
    """They are made of hidden states, as DeepSeek-V2-Lite's: 13.8 million weights a layer."""
    assert LatentConfig(0, 512, 64, 128, 128).weights(16, 2048) == 2048 * (16 * 192 + 576 + 16 * 128) + 512 * 16 * 256


def test_yarn_makes_scores_grow() -> None:
    """By the square of what mscale_all_dim says, beside the cosines: DeepSeek-V3's factor is 40."""
    model = PUBLISHED["DeepSeek-V3"]

    assert model.factors.attention == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)
    assert model.ropes[0] is not None and model.ropes[0].attention_factor == 1.0 and model.max_position == 163840


@pytest.mark.parametrize("form", ["blocks of float8", "words"])
def test_packed_checkpoint_is_served_as_its_numbers_written_out(form: str, tmp_path: Path) -> None:
    """The matrix that makes keys and values is unpacked, since its halves are multiplied with queries and values."""
    model = TinyModel("YoutuForCausalLM", tie_word_embeddings=False, extra=WIDTHS)
    packed, plain = (write_tiny_model(tmp_path / name, model) for name in ("packed", "plain"))
    config = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    names = [name for name in tensors if "proj" in name]
    stored, whole = dict(tensors), dict(tensors)
    if form == "words":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
        for name in names:
            parts, whole[name] = pack(name, stored.pop(name), config["quantization_config"])
            stored |= parts
    else:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        for name in names:
            out, width = tensors[name].shape
            scales = torch.rand(-(-out // 16), width // 16) / 300
            stored[name] = (tensors[name] * 100).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
            whole[name] = stored[name].float() * scales.repeat_interleave(16, 0)[:out].repeat_interleave(16, 1)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, plain / "model.safetensors")
    (packed / "config.json").write_text(json.dumps(config))
    command = greedy("x", range(40, 75), 6)

    replies = [answer_all(model_loop(folder), [command])["x", 0].token_ids for folder in (packed, plain)]

    assert replies[0] == replies[1] and len(replies[0]) == 6


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    """By name: rounding that moves outliers, a cache of float8, adapters, and biases."""
    folder = write_tiny_model(tmp_path, MODEL)
    config = load_model_config(folder)
    model = load_model(config, Checkpoint(folder, CPU, torch.float32), 32)
    kv = KvFormat(config, 16, torch.float32, CPU)

    assert isinstance(model.layers[0].attention, LatentAttention)
    with pytest.raises(UnsupportedModel, match="cannot be int8; supported: float8"):
        load_model(config, RandomWeights(CPU, torch.float32, linear=LinearOptions("int8")), 32)
    with pytest.raises(UnsupportedModel, match="kv_cache_dtype is fp8; latent vectors"):
        kv.in_float8(model, Placement(16, CPU, torch.float32, batch_invariant=False), 32)
    with pytest.raises(UnsupportedModel, match="LoRA adapters of a model with attention over latent vectors"):
        with_adapters(model, AdapterSlots(1, 8))
    with pytest.raises(UnsupportedModel, match="attention_bias is set"):
        parse_model_config(MODEL.config() | {"attention_bias": True})


@pytest.mark.parametrize("fields", [{"kv_lora_rank": None}, {"qk_rope_head_dim": 0}, {"v_head_dim": "64"}])
def test_sizes_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=f"{next(iter(fields))} = .*; a whole number above 0"):
        parse_model_config(MODEL.config() | fields)


def test_float8_is_rounded_where_products_are(tmp_path: Path) -> None:
    """With --quantization fp8 the engine serves it; what heads make of vectors stays whole."""
    folder = write_tiny_model(tmp_path, TinyModel("DeepseekV3ForCausalLM"))
    reply = answer_all(model_loop(folder, quantization="fp8"), [greedy("x", range(20), 4)])["x", 0].token_ids

    assert len(reply) == 4 and SIZES["kv_lora_rank"] == 32
