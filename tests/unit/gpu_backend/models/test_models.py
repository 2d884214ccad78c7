# Loading checkpoints: what is read, and how what cannot be read is explained.

from __future__ import annotations

import ctypes
import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, parse_model_config
from gpu_backend.models.config.vision import vision_config
from gpu_backend.models.llama import load_model
from gpu_backend.models.rope import rope_frequencies
from gpu_backend.models.shards import ShardedWeights, config_of_rank, num_bytes
from gpu_backend.models.weights import Checkpoint, RandomWeights, WeightSource
from tests.support.tiny_model import TinyModel, write_shards, write_tiny_model

CPU = torch.device("cpu")


def load(folder: Path) -> Any:
    """Load a checkpoint as the runner does."""
    return load_model(load_model_config(folder), Checkpoint(folder, CPU, torch.float32), 64)


def change_config(folder: Path, **fields: Any) -> None:
    """Overwrite fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_shards_and_single_file_load_alike(tmp_path: Path) -> None:
    """Tensors are found through the index wherever they lie."""
    whole = load(write_tiny_model(tmp_path / "whole", TinyModel()))
    sharded = load(write_tiny_model(tmp_path / "sharded", TinyModel(num_shards=4)))

    assert torch.equal(whole.layers[1].mlp.gate_up.weight, sharded.layers[1].mlp.gate_up.weight)
    assert torch.equal(whole.head, sharded.head)


def test_tied_model_has_one_matrix_for_both_ends(tmp_path: Path) -> None:
    """With tied embeddings the head is the embedding itself, not a copy."""
    model = load(write_tiny_model(tmp_path, TinyModel(tie_word_embeddings=True)))

    assert model.head is model.embedding


def test_missing_tensor_is_named_with_its_shape_and_nearest_name(tmp_path: Path) -> None:
    """Whoever renamed a tensor reads which name was expected, and which one is there."""
    folder = write_tiny_model(tmp_path, TinyModel())
    tensors = TinyModel().tensors()
    tensors["model.layers.1.mlp.down_projection.weight"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    write_shards(folder, tensors)

    with pytest.raises(
        UnsupportedModel, match=r"no tensor model\.layers\.1\.mlp\.down_proj\.weight of shape \(64, 96\)"
    ):
        load(folder)
    with pytest.raises(UnsupportedModel, match=r"nearest name there is model\.layers\.1\.mlp\.down_projection\.weight"):
        load(folder)


def test_wrong_shape_is_told_beside_the_right_one(tmp_path: Path) -> None:
    """A checkpoint that contradicts its config says by how much."""
    folder = write_tiny_model(tmp_path, TinyModel())
    change_config(folder, intermediate_size=80)

    with pytest.raises(
        UnsupportedModel, match=r"gate_proj\.weight has shape \(96, 64\); config\.json calls for \(80, 64\)"
    ):
        load(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    """Quantized tensors must not be mistaken for numbers."""
    folder = write_tiny_model(tmp_path, TinyModel())
    tensors = TinyModel().tensors()
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    write_shards(folder, tensors)

    with pytest.raises(UnsupportedModel, match=r"torch\.int8"):
        load(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """No weights, a missing shard and a cut shard each get their own line."""
    folder = write_tiny_model(tmp_path, TinyModel(num_shards=2))
    shard = folder / "model-00001-of-00002.safetensors"
    contents = shard.read_bytes()

    shard.write_bytes(contents[:1000])
    with pytest.raises(UnsupportedModel, match=r"00001-of-00002\.safetensors is no complete safetensors file"):
        load(folder)
    shard.unlink()
    with pytest.raises(UnsupportedModel, match=r"00001-of-00002\.safetensors does not exist"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"config\.json does not exist"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM; supported: LlamaForCausalLM, Mistral",
        ),
        ({"architectures": None}, r"architecture \(none\)"),
        ({"hidden_act": "gelu"}, "'gelu'; supported: 'silu'"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, "'axial'; supported: default, dynamic, linear"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "'longrope': .* of 8 numbers"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.35}, "turn 5 of 16 numbers"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window = 0"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["chunked_attention"] * 2},
            "full_attention or sliding",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2}},
            "'linear'; supported: default",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1}, "attn_logit_softcapping = -1"),
        ({"architectures": ["Ministral3ForCausalLM"]}, "neither rope_parameters nor rope_scaling"),
        ({"use_bidirectional_attention": True}, "only models that look back"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling = 0"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "for each of 2 layers"),
        ({"architectures": ["Mistral3ForConditionalGeneration"]}, "text_config of the model_type None"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "'llama'; supported: 'mistral', 'ministral3'",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized by None"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
    ],
)
def test_config_that_would_change_the_numbers_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """An option that is not implemented is an error by name, never silently ignored."""
    folder = write_tiny_model(tmp_path, TinyModel())
    change_config(folder, **fields)

    with pytest.raises(UnsupportedModel, match=message):
        load_model_config(folder)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_text_of_a_model_that_sees_is_loaded(tmp_path: Path, prefix: str) -> None:
    """A Mistral 3's tensors are a Mistral's under a longer name, beside those that see; transformers 5 has another."""
    model = TinyModel("MistralForCausalLM")
    plain = load(write_tiny_model(tmp_path / "plain", model))
    folder = write_tiny_model(tmp_path / "sees", model)
    inner = {"model.": prefix, "lm_head.": "lm_head."} if prefix.startswith("model.") else {"": prefix}
    named = {
        next(new + name.removeprefix(old) for old, new in inner.items() if name.startswith(old)): tensor
        for name, tensor in model.tensors().items()
    }
    write_shards(folder, named | {"vision_tower.patch_conv.weight": torch.zeros(2, 2)})
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": model.config(), "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    found = load(folder)

    assert found.config == plain.config
    assert torch.equal(found.layers[1].attention.qkv.weight, plain.layers[1].attention.qkv.weight)
    assert torch.equal(found.head, plain.head)


def test_text_of_kimi_k25_is_a_deepseek_v3s(tmp_path: Path) -> None:
    """Its config names it kimi_k2, with what it is packed in; its tensors have a longer name."""
    model = TinyModel("DeepseekV3ForCausalLM")
    folder = write_tiny_model(tmp_path, model)
    write_shards(folder, {f"language_model.{name}": tensor for name, tensor in model.tensors().items()})
    text = model.config() | {"model_type": "kimi_k2"}
    both = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(both))
    found, plain = load(folder), load(write_tiny_model(tmp_path / "plain", model))

    assert found.config == plain.config
    assert torch.equal(found.layers[1].attention.out.weight, plain.layers[1].attention.out.weight)


def test_gemma_3_leaves_much_of_its_config_to_transformers() -> None:
    """As its checkpoints that see have it, which name of their text what differs from the class's defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    both = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    config = parse_model_config(both)

    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.windows == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert [(rope.theta, rope.factor) for rope in config.ropes if rope][4:6] == [(1e4, 1.0), (1e6, 8.0)]
    assert config.max_position == 131072 and config.tie_word_embeddings and config.eos_token_ids == {1, 106}
    assert (config.softcap, config.logits_softcap, config.factors.attention) == (0.0, 0.0, 1 / 16)


SCOUT = {
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "vocab_size": 202048,
}
LLAMA_4 = {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"model_type": "llama4_vision_model"}}


def test_llama_4_leaves_much_of_its_config_to_transformers() -> None:
    """As its checkpoints that see have it; every second layer of Maverick has an MLP of its own width."""
    config = parse_model_config(LLAMA_4 | {"text_config": SCOUT})
    maverick = parse_model_config(LLAMA_4 | {"text_config": SCOUT | {"interleave_moe_layer_step": 2}})

    assert config.windows == (-8192, -8192, -8192, 0, -8192, -8192)
    assert [rope.theta if rope and rope.share else None for rope in config.ropes][2:5] == [5e5, None, 5e5]
    still = config.ropes[3]
    assert still is not None and (still.query_beta, still.original_max_position, still.query_ahead) == (0.1, 8192, 1)
    assert config.experts is not None and maverick.experts is not None
    assert (config.experts.per_token, config.experts.shared_size, config.intermediate_size) == (1, 8192, 16384)
    assert (all(config.experts.layers), maverick.experts.layers) == (True, (False, True) * 3)
    assert vision_config(LLAMA_4 | {"text_config": SCOUT}) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attention_chunk_size": None}, "attention_chunk_size = None"),
        ({"moe_layers": [7]}, r"moe_layers is \[7\]"),
        ({"floor_scale": 0}, "floor_scale = 0"),
    ],
)
def test_llama_4_that_makes_no_sense_is_refused(wrong: dict[str, Any], words: str) -> None:
    """By the name that stands in its config.json."""
    with pytest.raises(UnsupportedModel, match=words):
        parse_model_config(LLAMA_4 | {"text_config": SCOUT | wrong})


def test_pixtral_leaves_its_heads_to_transformers() -> None:
    """As its checkpoint of transformers' own names neither the text's heads nor its tower's layers."""
    text = {"hidden_size": 5120, "head_dim": 128, "intermediate_size": 14336, "model_type": "mistral"}
    text |= {"num_hidden_layers": 40, "rope_theta": 1e9, "rms_norm_eps": 1e-5, "sliding_window": None}
    text |= {"vocab_size": 131072, "max_position_embeddings": 1024000}
    tower = {"model_type": "pixtral", "image_size": 1024, "patch_size": 16, "hidden_act": "silu", "head_dim": 64}
    both = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "vision_config": tower}
    config, vision = parse_model_config(both), vision_config(both)

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert vision is not None
    assert (vision.hidden_size, vision.num_layers, vision.num_heads, vision.intermediate_size) == (1024, 24, 16, 4096)
    assert (vision.merges, vision.merge, vision.projector_bias, vision.longest_side) == (False, 1, True, 1024)
    assert vision.grid(1024, 768) == (48, 64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_that_hold_several_are_read_by_rows(tmp_path: Path, ranks: int) -> None:
    """As those of Phi-3: the same weights as of a Llama that has each by itself, also of each rank's part."""
    folders = [write_tiny_model(tmp_path / name, TinyModel(f"{name}ForCausalLM")) for name in ("Llama", "Phi3")]
    for rank in range(ranks):
        parts: list[Any] = []
        for folder in folders:
            config = config_of_rank(load_model_config(folder), ranks)
            weights: WeightSource = Checkpoint(folder, CPU, torch.float32)
            parts.append(load_model(config, ShardedWeights(weights, rank, ranks) if ranks > 1 else weights, 64))
        for one, other in zip(*(part.layers for part in parts), strict=True):
            assert torch.equal(one.attention.qkv.weight, other.attention.qkv.weight)
            assert torch.equal(one.mlp.gate_up.weight, other.mlp.gate_up.weight)


def test_tensor_of_several_that_does_not_fit_is_named(tmp_path: Path) -> None:
    """A config with other numbers of heads must not find rows of its neighbours."""
    folder = write_tiny_model(tmp_path, TinyModel("Phi3ForCausalLM"))
    change_config(folder, num_key_value_heads=1)

    with pytest.raises(UnsupportedModel, match=r"qkv_proj\.weight has shape \(128, 64\); config.json calls for"):
        load(folder)


def test_end_of_sequence_tokens_come_from_both_files(tmp_path: Path) -> None:
    """A chat model names its end of turn in generation_config.json, as one number or several."""
    folder = write_tiny_model(tmp_path, TinyModel(eos_token_id=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))

    assert load_model_config(folder).eos_token_ids == {2, 5, 6}


def test_both_spellings_of_rope_settings_are_read() -> None:
    """transformers 4 wrote rope_theta and rope_scaling, transformers 5 writes rope_parameters."""
    base = TinyModel().config()
    old = parse_model_config(base | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = parse_model_config(
        base | {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    )

    assert old.ropes == new.ropes
    assert all(rope and rope.theta == 5e5 for rope in old.ropes)


def test_llama3_rope_keeps_fast_and_divides_slow_frequencies() -> None:
    """Pairs that turn often in the original context stay, those that never complete a turn are stretched."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = parse_model_config(TinyModel().config() | {"rope_scaling": scaling, "rope_theta": 5e5}).ropes[0]
    assert rope is not None

    stretched, plain = (rope_frequencies(some, 128, 512) for some in (rope, replace(rope, kind="default")))

    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(stretched[turns > 4], plain[turns > 4])
    torch.testing.assert_close(stretched[turns < 1], plain[turns < 1] / 8)
    assert (stretched <= plain).all() and (stretched >= plain / 8.001).all()


def test_context_reaches_as_far_as_the_rope_was_stretched() -> None:
    """Linear and yarn stretch the trained length; llama3's is in the config already; dynamic stays within it."""

    def reach(rope_type: str, **more: Any) -> int:
        scaling = {"rope_type": rope_type, "factor": 4.0, **more}
        return parse_model_config(TinyModel().config() | {"rope_scaling": scaling}).max_position

    assert reach("linear") == 2048
    assert reach("yarn", original_max_position_embeddings=256) == 1024
    assert reach("llama3", original_max_position_embeddings=128) == 512
    assert reach("dynamic") == 512


def test_random_weights_have_the_shape_and_start_of_a_model() -> None:
    """Norms are ones, biases zeros, the rest small and the same for the same seed."""
    weights = RandomWeights(CPU, torch.bfloat16, seed=4)

    assert torch.equal(weights.get("model.norm.weight", 8), torch.ones(8, dtype=torch.bfloat16))
    assert not weights.get("x.bias", 8).any()
    matrix = weights.get("lm_head.weight", 100, 100)
    assert matrix.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(matrix, RandomWeights(CPU, torch.bfloat16, seed=4).get("lm_head.weight", 100, 100))


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        (torch.bfloat16, 2),
        *(pytest.param(dtype, 1, marks=pytest.mark.soak) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_loading_keeps_no_second_copy_in_memory(
    dtype: torch.dtype, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the model keeps there are never more than a few matrices, however many shards and layers there are.

    Anonymous memory, which excludes the shards: their pages are the file's, and the kernel takes them back.
    """
    shape = TinyModel(hidden_size=256, intermediate_size=2048, num_layers=12, num_shards=5, vocab_size=512)
    folder = write_tiny_model(tmp_path, shape)
    sizes: list[int] = []
    original = Checkpoint._read

    def read(self: Checkpoint, *asked: Any) -> torch.Tensor:
        sizes.append(anonymous_bytes())
        return original(self, *asked)

    monkeypatch.setattr(Checkpoint, "_read", read)
    source: WeightSource = Checkpoint(folder, CPU, dtype)
    source = ShardedWeights(source, 0, ranks) if ranks > 1 else source
    gc.collect()
    before = anonymous_bytes()
    model = load_model(config_of_rank(load_model_config(folder), ranks), source, 64)

    matrix = 2 * shape.intermediate_size * shape.hidden_size * 4  # the largest: gate and up, as the shards have them
    assert num_bytes(model) > 4 * matrix, "a second copy would show"
    assert max(sizes) - before < num_bytes(model) + 3 * matrix


def anonymous_bytes() -> int:
    """Memory of this process that is in use, and no file's."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back now, not when the allocator likes
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
