# Mixtures of experts: how checkpoints name them, cut across ranks, of float8, and what they count for.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.roofline import MIXTURES
from gpu_backend.kernels import reference_experts
from gpu_backend.kernels.layout.mxfp4 import unpack_mxfp4
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig, load_model_config, parse_model_config
from gpu_backend.models.config.packed_format import PackedFormat
from gpu_backend.models.experts import Experts, load_experts
from gpu_backend.models.llama import load_model
from gpu_backend.models.shards import config_of_rank, num_bytes, shard, stage_of
from gpu_backend.models.weights import Checkpoint, LinearOptions, RandomWeights
from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model
from tests.unit.gpu_backend.models.test_packed import FORMATS, pack

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp"
OF_SIX: dict[str, Any] = {"num_experts": 6, "num_heads": 6, "num_kv_heads": 3}


def experts_of(folder: Path, ranks: int = 1, by_expert: bool = False, **options: Any) -> list[Experts]:
    """Load the second layer's, each rank's part."""
    config, found = load_model_config(folder), []
    for rank in range(ranks):
        source = Checkpoint(folder, CPU, torch.float32, LinearOptions(**options), config.packed)
        weights = shard(source, config, rank, ranks, by_expert) if ranks > 1 else source
        found.append(load_experts(config_of_rank(config, ranks, by_expert), weights, LAYER))
    return found


def mixed(experts: Experts, x: Tensor) -> Tensor:
    return experts.of_norm(x, None, torch.ones(x.shape[1]), 1e-6)[0]


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize(
    ("architecture", "width"), [("MixtralForCausalLM", 96), ("Qwen3MoeForCausalLM", 64), ("Qwen3MoeForCausalLM", 128)]
)
def test_experts_in_one_tensor_load_as_one_by_one(
    architecture: str, width: int, inputs_first: bool, tmp_path: Path
) -> None:
    """Newer transformers stack what older checkpoints name one by one, Qwen3-VL with inputs first; the weights are the
    same, of a square stack too (gate and up of 2 · 32 × 64, down of 64 × 64): the other of the two tells."""
    single, stacked = (
        TinyModel(architecture, intermediate_size=width, stacks_experts=stacks) for stacks in (False, True)
    )
    (one,) = experts_of(write_tiny_model(tmp_path / "one", single))
    folder, tensors = write_tiny_model(tmp_path / "other", stacked), stacked.tensors()
    turned = {name: each.mT.contiguous() for name, each in tensors.items() if ".experts." in name and inputs_first}
    write_shards(folder, tensors | turned)
    (other,) = experts_of(folder)

    assert single.tensors().keys() != tensors.keys()
    assert torch.equal(one.gate_up, other.gate_up) and torch.equal(one.down, other.down)
    assert torch.equal(one.router, other.router)


def test_stacked_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """Its shape stands beside what config.json calls for."""
    model = TinyModel("Qwen3MoeForCausalLM", stacks_experts=True)
    folder = write_tiny_model(tmp_path, model)
    tensors = model.tensors()
    tensors[f"{LAYER}.experts.gate_up_proj"] = tensors[f"{LAYER}.experts.gate_up_proj"][:, 1:].clone()
    write_shards(folder, tensors)

    with pytest.raises(UnsupportedModel, match=r"experts\.gate_up_proj has shape \(5, 95, 64\).* calls for \(96, 64\)"):
        experts_of(folder)


@pytest.mark.parametrize("stacks", [False, True])
def test_ranks_have_a_part_of_every_expert(stacks: bool, tmp_path: Path) -> None:
    """The parts' sum is the whole mixture, and each has half of the experts' weights; the router is on both."""
    folder = write_tiny_model(tmp_path, TinyModel("Qwen2MoeForCausalLM", stacks_experts=stacks))
    (whole,), parts = experts_of(folder), experts_of(folder, 2)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(sum(mixed(part, x) for part in parts), mixed(whole, x), atol=1e-5, rtol=1e-5)
    assert all(num_bytes((part.gate_up, part.down)) * 2 == num_bytes((whole.gate_up, whole.down)) for part in parts)


@pytest.mark.parametrize(
    "model",
    [
        TinyModel("Qwen2MoeForCausalLM", **OF_SIX),
        TinyModel("Llama4ForCausalLM", **OF_SIX),
        TinyModel("GptOssForCausalLM", **OF_SIX, attention_bias=True),
        TinyModel("GptOssForCausalLM", **OF_SIX, attention_bias=True, packs_experts=True),
    ],
    ids=lambda model: f"{model.architecture}{' packed' * model.packs_experts}",
)
def test_ranks_have_some_of_the_experts(model: TinyModel, tmp_path: Path) -> None:
    """Each reads its own alone, whole, of a token that chooses none of them too; their sum is the whole mixture."""
    folder = write_tiny_model(tmp_path, model)
    (whole,), parts = experts_of(folder), experts_of(folder, 3, by_expert=True)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(sum(mixed(part, x) for part in parts), mixed(whole, x), atol=1e-4, rtol=1e-4)
    assert torch.equal(torch.cat([part.gate_up for part in parts]), whole.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts]), whole.down)
    assert [part.first for part in parts] == [0, 2, 4] and whole.first is None
    assert not mixed(replace(parts[0], first=100, shared=None), x).any()


def test_ranks_read_no_other_ranks_experts(tmp_path: Path) -> None:
    """Neither of those that have tensors of their own: they are not asked for."""
    model = TinyModel("MixtralForCausalLM", num_experts=6)
    folder = write_tiny_model(tmp_path, model)
    tensors = model.tensors()
    write_shards(folder, {name: each for name, each in tensors.items() if ".experts.5." not in name})
    config, found = load_model_config(folder), Checkpoint(folder, CPU, torch.float32)

    part = load_experts(config_of_rank(config, 2, True), shard(found, config, 0, 2, True), LAYER)
    assert len(part.gate_up) == 3
    with pytest.raises(UnsupportedModel, match=r"no tensor .*experts\.5"):
        load_experts(config_of_rank(config, 2, True), shard(found, config, 1, 2, True), LAYER)


def test_ranks_that_do_not_divide_experts_are_refused() -> None:
    """The size that does not divide is named: of an expert, or how many there are."""
    config = parse_model_config(TinyModel("Qwen3MoeForCausalLM", intermediate_size=84, num_kv_heads=4).config())

    with pytest.raises(UnsupportedModel, match="the experts' intermediate_size is 42, which 4 ranks do not divide"):
        config_of_rank(config, 4)
    with pytest.raises(UnsupportedModel, match="the number of experts is 5, which 4 ranks do not divide"):
        config_of_rank(config, 4, by_expert=True)


def test_stages_have_their_own_layers_mixtures() -> None:
    """Of four layers, of which every other has one, each of three stages knows which of its own do."""
    tiny = TinyModel("Qwen3MoeForCausalLM", num_layers=4, extra={"decoder_sparse_step": 2})
    config = parse_model_config(tiny.config())
    stages = [stage_of(config, stage, 3).experts for stage in range(3)]

    assert [stage.layers for stage in stages if stage] == [(False,), (True,), (False, True)]


def test_float8_experts_are_near_the_whole_ones(tmp_path: Path) -> None:
    """Weights keep a scale for each output of each expert, router and inputs stay whole: a third of a bit in 24."""
    folder = write_tiny_model(tmp_path, TinyModel("MixtralForCausalLM"))
    (whole,), (small,) = experts_of(folder), experts_of(folder, quantization="fp8")
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    assert small.scales is not None
    wide = [w.float() * scale[:, :, None] for w, scale in zip((small.gate_up, small.down), small.scales, strict=True)]

    assert num_bytes((small.gate_up, small.down)) * 4 == num_bytes((whole.gate_up, whole.down))
    expected = mixed(replace(whole, gate_up=wide[0], down=wide[1]), x)
    torch.testing.assert_close(mixed(small, x), expected, atol=1e-4, rtol=1e-4)
    assert (mixed(small, x) - mixed(whole, x)).norm() < 0.08 * mixed(whole, x).norm()


@pytest.mark.parametrize("kept", [["mlp.gate.", "self_attn"], ["gate", "e_score_correction_bias", "lm_head"]])
def test_checkpoint_of_float8_experts_is_loaded(kept: list[str], tmp_path: Path) -> None:
    """As transformers writes it: a scale for each matrix, and the router among what is kept whole, in any words."""
    model = TinyModel("Qwen3MoeForCausalLM", extra={"quantization_config": {"quant_method": "fp8",
                      "modules_to_not_convert": kept}})  # fmt: skip
    folder, tensors = write_tiny_model(tmp_path, model), model.tensors()
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[name].abs().amax() / 448
        tensors[f"{name}_scale"], tensors[name] = scale, (tensors[name] / scale).to(torch.float8_e4m3fn)
    write_shards(folder, tensors)
    (found,) = experts_of(folder)
    name = f"{LAYER}.experts.3.down_proj.weight"

    assert found.scales is not None and torch.equal(found.scales[1][3], tensors[f"{name}_scale"].expand(64))
    assert torch.equal(found.down[3].view(torch.uint8), tensors[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("quantization", "packed", "words"),
    [("int8", None, "int8"), ("int4", None, "int4"), (None, PackedFormat("w8a8", bits=8), "w8a8")],
)
def test_formats_that_experts_do_not_have_are_refused(
    quantization: str | None, packed: PackedFormat | None, words: str
) -> None:
    """By name, with those that they have."""
    config = parse_model_config(TinyModel("MixtralForCausalLM").config())
    weights = RandomWeights(CPU, torch.float32, linear=LinearOptions(quantization))
    weights.packed = packed

    with pytest.raises(UnsupportedModel, match=f"experts' weights cannot be {words}; supported .* float8"):
        load_experts(config, weights, LAYER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6, but there are 5 experts"),
        ({"num_experts": 0}, "num_experts = 0; a whole number above 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size = None"),
    ],
)
def test_config_of_experts_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(TinyModel("Qwen3MoeForCausalLM").config() | fields)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("Mixtral-8x7B", 46.7e9, 12.9e9), ("Qwen3-30B-A3B", 30.5e9, 3.3e9)]
)
def test_all_weights_and_those_of_a_token_are_counted(name: str, total: float, active: float) -> None:
    """As their makers count them: with both ends of the vocabulary."""
    config: ModelConfig = parse_model_config(MIXTURES[name])
    ends = config.vocab_size * config.hidden_size

    assert config.weights_read() + 2 * ends == pytest.approx(total, rel=0.01)
    assert config.products_per_token + ends == pytest.approx(active, rel=0.02)
    assert config.weights_read(1) < config.weights_read(16) < config.weights_read(1000) <= config.weights_read()


def packed_experts(folder: Path, form: dict[str, Any], architecture: str = "Qwen3MoeForCausalLM") -> tuple[Path, Path]:
    """Write a model whose experts are packed, and one with the same numbers written out."""
    model = TinyModel(architecture, intermediate_size=128, extra={"quantization_config": form})
    whole = model.tensors()
    stored = dict(whole)
    torch.manual_seed(3)
    for name in [name for name in whole if ".experts." in name]:
        parts, whole[name] = pack(name, stored.pop(name), form)
        stored |= {part: tensor.contiguous() for part, tensor in parts.items()}
    folders = write_tiny_model(folder / "packed", model), write_tiny_model(folder / "whole", replace(model, extra={}))
    for written, tensors in zip(folders, (stored, whole), strict=True):
        write_shards(written, tensors)
    return folders


@pytest.mark.parametrize("form", ["gptq", "compressed, 4 bits", "compressed, 8 bits from zeros", "gptq of 8 bits"])
def test_packed_experts_are_as_they_were_stored(form: str, tmp_path: Path) -> None:
    """On one rank and on two: what the numbers written out say. A row of the product is a sum in float32."""
    folders = packed_experts(tmp_path, FORMATS[form] | ({"desc_act": False} if "gptq" in form else {}))
    (packed,), (whole,) = map(experts_of, folders)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(mixed(packed, x), mixed(whole, x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        sum(mixed(p, x) for p in experts_of(folders[0], 2)), mixed(whole, x), atol=1e-5, rtol=1e-4
    )
    assert packed.gate_up.dtype == (torch.int8 if "8" in form else torch.uint8)
    assert (packed.zeros is None) == (form == "compressed, 4 bits")


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        ("Glm4MoeForCausalLM", FORMATS["compressed, 4 bits"] | {"ignore": ["lm_head", "re:.*shared_experts.*"]}),
        ("MixtralForCausalLM", FORMATS["awq"] | {"modules_to_not_convert": ["gate"]}),
    ],
)
def test_what_is_left_whole_beside_packed_experts_may_have_any_name(
    architecture: str, form: dict[str, Any], tmp_path: Path
) -> None:
    """Kimi K2 Thinking and Mixtral name it by their own modules' names, which here are others."""
    (packed,), (whole,) = map(experts_of, packed_experts(tmp_path, form, architecture))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(mixed(packed, x), mixed(whole, x), atol=1e-5, rtol=1e-4)
    assert packed.gate_up.dtype == torch.uint8


def test_experts_in_orders_of_their_own_are_refused(tmp_path: Path) -> None:
    folder, _ = packed_experts(tmp_path, FORMATS["gptq in an order of its own"])

    with pytest.raises(UnsupportedModel, match=r"orders of their own \(desc_act\)"):
        experts_of(folder)


def test_shares_are_those_of_the_softmax() -> None:
    """Over all experts, or over those chosen, as the architecture has it."""
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    best = logits.softmax(-1).topk(3)

    for normalised in (False, True):
        shares, chosen = reference_experts.choose_experts(logits, 3, normalised)
        expected = best.values / best.values.sum(-1, keepdim=True) if normalised else best.values
        torch.testing.assert_close(shares.t(), expected)
        assert torch.equal(chosen.t().long(), best.indices)


def test_sigmoid_router_chooses_by_a_bias_and_shares_without_it() -> None:
    """As DeepSeek-V3's and GLM-4.5's: an expert that the bias favours is chosen, and counts as its sigmoid does."""
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 0.8])

    shares, chosen = reference_experts.choose_experts(logits, 2, True, bias, 2.5)

    sigmoids = logits[0, [3, 0]].sigmoid()
    assert chosen.flatten().tolist() == [3, 0]
    torch.testing.assert_close(shares.flatten(), 2.5 * sigmoids / sigmoids.sum())


def test_router_of_a_deepseek_counts_in_float32(tmp_path: Path) -> None:
    """With groups or without, whatever the model computes in: rounded to 8 bits another expert may be the likeliest."""
    folder = write_tiny_model(tmp_path, TinyModel("DeepseekV2ForCausalLM", num_layers=2))
    config = load_model_config(folder)
    experts = load_experts(config, Checkpoint(folder, CPU, torch.bfloat16), LAYER)

    assert config.experts is not None and config.experts.groups == 1
    assert experts.router.dtype == torch.float32 and experts.gate_up.dtype == torch.bfloat16


def test_experts_are_chosen_of_the_best_groups() -> None:
    """By a group's best two with the bias, or, of a softmax, by its best: another expert that is better is left out."""
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.1, 0.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.31, 0.3])

    by_two = reference_experts.choose_experts(logits, 2, False, bias, 1.0, 3, 2)[1]
    by_best, chosen = reference_experts.choose_experts(logits, 2, False, None, 4.0, 3, 1)

    assert by_two.flatten().tolist() == [4, 5]
    assert chosen.flatten().tolist() == [0, 1]
    torch.testing.assert_close(by_best.flatten(), 4 * logits.softmax(-1)[0, :2])


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("Glm4MoeForCausalLM", {"n_group": 8}, "n_group = 8 and topk_group = 1, of which 2 of 5 experts"),
        ("DeepseekV3ForCausalLM", {"n_group": 5, "topk_group": 2}, "n_group = 5 and topk_group = 2"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func = 'softmax'; supported here: 'sigmoid'"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'; supported here: 'greedy' or"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, "each of 2 layers is dense or sparse"),
    ],
)
def test_routers_that_choose_otherwise_are_refused(architecture: str, fields: dict[str, Any], words: str) -> None:
    """With what config.json would have to say."""
    with pytest.raises(UnsupportedModel, match=words):
        parse_model_config(TinyModel(architecture).config() | fields)


def test_mxfp4_is_kept_as_it_was_stored(tmp_path: Path) -> None:
    """Numbers are those of their bits, gate and up apart, and take 17 bytes for 32."""
    model = TinyModel("GptOssForCausalLM", intermediate_size=64, packs_experts=True)
    folder, tensors = write_tiny_model(tmp_path, model), model.tensors()
    (found,) = experts_of(folder)
    blocks, exponents = (tensors[f"{LAYER}.experts.gate_up_proj_{kind}"] for kind in ("blocks", "scales"))
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    bits = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()  # neighbours share a byte
    numbers = values[bits & 7] * torch.where(bits > 7, -1, 1) * 2.0 ** (exponents.int() - 127)[..., None]
    numbers = numbers.view(5, 128, 64)
    assert found.scales is not None

    for expert in range(5):
        right = torch.cat((numbers[expert, ::2], numbers[expert, 1::2]))
        assert torch.equal(unpack_mxfp4(found.gate_up[expert], found.scales[0][expert], torch.float32), right)
    assert num_bytes((found.gate_up, found.down, found.scales)) == 5 * 3 * 64 * 64 * 17 // 32


@pytest.mark.parametrize("packs", [False, True])
def test_ranks_have_a_part_of_every_clamped_expert(packs: bool, tmp_path: Path) -> None:
    """The parts' sum is the whole mixture: the bias of what comes out is added once."""
    model = TinyModel("GptOssForCausalLM", intermediate_size=64, packs_experts=packs)
    folder = write_tiny_model(tmp_path, model)
    (whole,), parts = experts_of(folder), experts_of(folder, 2)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(sum(mixed(part, x) for part in parts), mixed(whole, x), atol=1e-4, rtol=1e-4)
    assert all(num_bytes((part.gate_up, part.down)) * 2 == num_bytes((whole.gate_up, whole.down)) for part in parts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"swiglu_limit": 0}, "swiglu_alpha = 1.702 and swiglu_limit = 0; numbers above 0"),
        ({"model_type": "llama"}, "mxfp4, of a llama .* supported of all experts of a gpt_oss"),
        ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["layers.0.mlp.experts"]}}, "all"),
    ],
)
def test_gpt_oss_that_is_not_understood_is_refused(fields: dict[str, Any], message: str) -> None:
    model = TinyModel("GptOssForCausalLM", packs_experts=True, intermediate_size=64)

    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(model.config() | fields)


def test_mxfp4_is_cut_between_its_blocks_and_rounded_no_further(tmp_path: Path) -> None:
    """Ranks that would share a block are refused, and so are bits of another kind for experts that are whole."""
    model = TinyModel("GptOssForCausalLM", packs_experts=True, num_kv_heads=4, intermediate_size=64)

    with pytest.raises(UnsupportedModel, match=r"4 ranks cut through the experts' blocks of 32 inputs \(mxfp4\)"):
        config_of_rank(parse_model_config(model.config()), 4)
    with pytest.raises(UnsupportedModel, match="cannot be rounded to fp8; they are served in mxfp4"):
        experts_of(write_tiny_model(tmp_path, replace(model, packs_experts=False)), quantization="fp8")


def test_whole_model_of_random_weights_is_built() -> None:
    """For benchmarks of a shape whose weights are not at hand."""
    config = parse_model_config(TinyModel("GraniteMoeForCausalLM").config())
    model = load_model(config, RandomWeights(CPU, torch.float32), 16)

    weights = num_bytes(model.layers[0].mlp) / 4
    assert weights == 5 * 3 * 64 * 96 + 5 * 64
