# Logits against transformers, for configurations drawn by chance: every architecture, with what its configs may say.

from __future__ import annotations

import asyncio
import random
import re
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_backend.execution.loading import load_pictures
from gpu_backend.kernels import reference
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.lora.loading import load_adapters
from gpu_backend.lora.slots import AdapterSlots, with_adapters
from gpu_backend.models.config.architectures import ARCHITECTURES
from gpu_backend.models.config.model import load_model_config, load_vision_config, parse_model_config
from gpu_backend.models.llama import load_model
from gpu_backend.models.shards import config_of_rank, shard, stage_of
from gpu_backend.models.smoothing import begin_passage, smooth
from gpu_backend.models.towers.vision import normal
from gpu_backend.models.weights import Checkpoint, LinearOptions
from gpu_backend.server.requests.pictures import read_pictures
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.config import LoraConfig, PicturesConfig, engine_config
from gpu_backend.step.picture import Picture, parts_of
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import build_tensors
from tests.support.tiny_lora import ATTENTION, TinyAdapter, write_adapter, write_merged
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.tiny_vision import (
    TINY_VISIONS,
    draw_picture,
    draw_tokens,
    oracle_logits,
    with_pictures,
    write_tiny_vision,
)
from tests.unit.gpu_backend.models.test_packed import FORMATS, has_order, write_packed_model

CPU = torch.device("cpu")
BLOCK = 16
TOLERANCE = 1e-4  # of the largest logit; float32 on both sides
MAYBE_BIASED = ("LlamaForCausalLM", "GlmForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM")
DENSE = [name for name, does in ARCHITECTURES.items() if does.mixture is None]
SMOOTHED = [name for name in DENSE if not (ARCHITECTURES[name].is_latent or ARCHITECTURES[name].linear)]
NAMED_ALWAYS = {
    "architectures", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings",
}  # fmt: skip
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 2.5, "beta_fast": 20.0, "beta_slow": 2.0, "attention_factor": 0.9},
)


def draw(architecture: str, seed: int, dice: random.Random) -> TinyModel:
    """Draw a configuration: each rope and each number of key heads once or more, the rest by chance.

    Ropes other than the plain, the linear and the dynamic one name their trained length.
    """
    kv_heads = 1 + seed % 3
    layers, is_linear = dice.randint(1, 3), bool(ARCHITECTURES[architecture].linear)
    rope = dict(ROPES[seed])
    if rope.get("rope_type") in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = dice.choice([32, 64, 128])
    extra: dict[str, Any] = {"rope_theta": dice.choice([1e4, 5e5, 1e6]), "rms_norm_eps": dice.choice([1e-5, 1e-6])}
    extra |= {"rope_scaling": rope} if rope else {}
    if architecture == "Phi3ForCausalLM":
        extra.pop("rope_scaling", None)
        if seed > 1:
            extra |= {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64 if seed > 3 else 1024}
            factors = {f"{which}_factor": [1 + dice.random() for _ in range(6)] for which in ("short", "long")}
            extra |= {"rope_scaling": {"type": "longrope", **factors}}
    elif architecture.startswith("Granite"):
        names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        extra |= dict(zip(names, (12.0, 0.22, dice.choice([0.05, 0.3]), dice.choice([1.0, 8.0])), strict=True))
    elif architecture == "Ministral3ForCausalLM":
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": dice.choice([16, 64])}
        extra |= {"rope_scaling": rope | {"llama_4_scaling_beta": dice.choice([0.0, 0.5])}}
    elif architecture in ("Olmo3ForCausalLM", "MinistralForCausalLM"):
        types = [dice.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        extra |= {"sliding_window": dice.choice([7, 50]), "layer_types": types, "rope_theta": 5e5}
    elif architecture.startswith("Gemma"):
        extra |= {"query_pre_attn_scalar": dice.choice([8, 24]), "sliding_window": dice.choice([7, 16, 50])}
        extra |= {"attn_logit_softcapping": dice.choice([None, 2.5, 50.0]), "final_logit_softcapping": 30.0}
        if architecture == "Gemma3ForCausalLM":
            extra |= {"rope_local_base_freq": dice.choice([1e2, 1e4]), "final_logit_softcapping": None}
            extra |= {"sliding_window_pattern": dice.choice([2, 3]), "attn_logit_softcapping": None}
    elif architecture == "SmolLM3ForCausalLM":
        extra |= dice.choice([{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1]}])
        extra |= {"use_sliding_window": dice.random() < 0.5, "sliding_window": 24}
    if architecture in ("MistralForCausalLM", "Phi3ForCausalLM", "Ministral3ForCausalLM"):
        extra["sliding_window"] = dice.choice([None, 7, 16, 50])
    elif is_linear:
        layers = dice.randint(2, 3)
    elif architecture.startswith("Qwen"):
        extra |= {
            "use_sliding_window": dice.random() < 0.5,
            "sliding_window": 24,
            "max_window_layers": dice.randint(0, 3),
        }
    if "Moe" in architecture and architecture.startswith("Qwen") and not is_linear:
        extra |= dice.choice([{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
    elif architecture == "Llama4ForCausalLM":
        extra |= {"attention_chunk_size": dice.choice([7, 16, 50]), "use_qk_norm": dice.random() < 0.7}
        extra |= dice.choice([{}, {"no_rope_layers": [0, 1, 1][:layers]}, {"no_rope_layer_interval": 2}])
        extra |= dice.choice([{}, {"interleave_moe_layer_step": 2}, {"moe_layers": [0]}])
        extra |= dice.choice([{"attn_temperature_tuning": False}, {"floor_scale": 16, "attn_scale": 0.3}])
        if not rope:  # Scout's, between whose two factors there is nothing
            extra |= {"rope_scaling": ROPES[3] | {"high_freq_factor": 1.0, "original_max_position_embeddings": 32}}
    elif architecture == "MixtralForCausalLM":
        extra["sliding_window"] = dice.choice([None, 20])
    elif architecture == "GptOssForCausalLM":
        extra |= {"sliding_window": dice.choice([7, 16, 50])}
        extra |= dice.choice([{}, {"swiglu_limit": 1.0}, {"layer_types": ["full_attention"] * layers}])
    elif architecture == "OlmoeForCausalLM":
        extra["norm_topk_prob"] = dice.random() < 0.5
    elif architecture == "MiniMaxM2ForCausalLM":
        extra["rotary_dim"] = 8
    elif architecture == "Dots1ForCausalLM":
        extra |= {"sliding_window": 7 if seed else None, "max_window_layers": layers // 2}
    elif architecture == "Glm4MoeForCausalLM":
        extra |= {"use_qk_norm": dice.random() < 0.5, "first_k_dense_replace": dice.choice([0, 1])}
    elif ARCHITECTURES[architecture].is_latent:
        extra |= dice.choice([{}, {"q_lora_rank": None}, {"kv_lora_rank": 40, "v_head_dim": 20}])
        extra |= dice.choice([{}, {"rope_interleave": False}]) if "V2" not in architecture else {}
        extra |= dice.choice([{}, {"first_k_dense_replace": 0}, {"n_shared_experts": 2}])
        extra |= {"mlp_layer_types": None} if "Lite" in architecture else {}
        if rope.get("rope_type") == "yarn":
            extra["rope_scaling"] = rope | {"mscale": dice.choice([1.0, 0.707]), "mscale_all_dim": 0.9}
    experts = dice.randint(3, 9)
    if ARCHITECTURES[architecture].is_latent and dice.random() < 0.6:
        experts = 12
        extra |= {"n_group": 4, "topk_group": dice.choice([2, 3]), "topk_method": "group_limited_greedy"}
        extra |= {"topk_method": "noaux_tc"} if "V2" not in architecture else {}
    num_heads = kv_heads * dice.choice([1, 2, 4])
    is_square = architecture in ("Phi3ForCausalLM", "OlmoeForCausalLM")
    model = TinyModel(
        architecture,
        hidden_size=16 * num_heads if is_square else dice.choice([48, 96]),
        intermediate_size=dice.choice([40, 96]),
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=16 if is_square else dice.choice([16, 24] if is_linear else [8, 16, 24]),
        tie_word_embeddings=dice.random() < 0.5,
        attention_bias=architecture in MAYBE_BIASED and dice.random() < 0.5,
        num_experts=experts,
        experts_per_token=dice.randint(1, min(4, experts)),
        stacks_experts=dice.random() < 0.3 or architecture == "Qwen3_5MoeForCausalLM",
        seed=dice.randrange(1000),
        extra=extra,
    )
    packs = architecture == "GptOssForCausalLM" and seed == 4  # in blocks of 32 inputs
    return replace(model, packs_experts=True, hidden_size=96, intermediate_size=64) if packs else model


def our_logits(folder: Path, token_ids: list[int], cut: int, adapter: Path | None = None) -> Tensor:
    """Return the logits after each token, computed in two chunks and as a decode, through blocks in no order."""
    config = load_model_config(folder)
    num_blocks = -(-len(token_ids) // BLOCK)
    order = random.Random(1).sample(range(num_blocks), num_blocks)
    grouping = Grouping(BLOCK, num_blocks, 512, CPU, torch.float32, config.window)
    with torch.inference_mode():
        model = load_model(config, Checkpoint(folder, CPU, torch.float32, None, config.packed), 512)
        slots = AdapterSlots(2, max_rank=16)
        if adapter is not None:
            model = with_adapters(model, slots)
            load_adapters(LoraConfig((Adapter(1, "own", str(adapter)),)), slots, config)
        cache = torch.zeros(config.num_layers, num_blocks + 1, BLOCK, *config.kv_shape)
        rows = []
        for start, end in ((0, cut), (cut, cut + 1), (cut + 1, len(token_ids))):
            if start == end:
                break
            table = tuple(order[: -(-end // BLOCK)])
            ids, number = tuple(token_ids[start:end]), 0 if adapter is None else 1
            step = SequenceStep(0, ids, start, table, True, SamplingParams(1), 0, adapter=number)
            batch = build_tensors(StepPlan(0, (step,)), grouping, CPU, slots.slot_of)
            rows.append(model.logits(model.hidden_states(batch, cache)))
        return torch.cat(rows)


# In a commit each dense model has every second rope, and each rope every second model.
@pytest.mark.parametrize(
    ("architecture", "seed"),
    [
        pytest.param(name, seed, marks=[pytest.mark.soak] * (name in SMOOTHED and (place + seed) % 2))
        for place, name in enumerate(ARCHITECTURES)
        for seed in range(len(ROPES))
        if name in SMOOTHED or seed % 2 == 0
    ],
)
def test_logits_equal_transformers(architecture: str, seed: int, tmp_path: Path) -> None:
    """Within a ten-thousandth of the largest logit, at every position, and the same choice wherever it is clear."""
    from transformers import AutoModelForCausalLM

    dice = random.Random(f"{architecture} {seed}")
    model = draw(architecture, seed, dice)
    folder = write_tiny_model(tmp_path, model)
    token_ids = [dice.randrange(256) for _ in range(dice.randint(90, 150))]

    with torch.no_grad():
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        expected: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    ours = our_logits(folder, token_ids, dice.randint(1, len(token_ids) - 1))

    largest = expected.abs().max()
    assert (ours - expected).abs().max() <= TOLERANCE * largest, model
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE * largest
    assert torch.equal(ours.argmax(-1)[clear], expected.argmax(-1)[clear])
    assert clear.float().mean() > 0.9


@pytest.mark.parametrize(
    ("architecture", "form", "whole"),
    [
        ("Qwen3NextForCausalLM", "awq", "in_proj_ba"),
        ("Qwen3_5ForCausalLM", "gptq in an order of its own", "in_proj_[ab]"),
        ("Qwen3_5MoeForCausalLM", "gptq", "attn|shared_expert"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                ("Qwen3NextForCausalLM", "gptq", "attn|shared_expert"),
                ("Qwen3NextForCausalLM", "gptq of 8 bits", "in_proj_ba|mlp"),
                ("Qwen3_5ForCausalLM", "awq", "in_proj_[ab]"),
                ("Qwen3_5ForCausalLM", "compressed, 4 bits from zeros", "nothing"),
            )
        ),
    ],
)
def test_packed_logits_of_linear_attention_equal_transformers(
    architecture: str, form: str, whole: str, tmp_path: Path
) -> None:
    """Those of the numbers that packed ones stand for, whichever matrices their writer has left whole: a state's gates,
    as GPTQModel does, or all but experts, as Qwen's own checkpoints have it, in rules that exclude the others. In four
    parts, too, where groups are not spread over all inputs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"linear_num_value_heads": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 64}
    model = TinyModel(architecture, intermediate_size=128, num_layers=3, num_experts=6, extra=sizes)
    described = FORMATS[form] | ({"dynamic": {"lm_head": {}, f"-:.*({whole}).*": {}}} if form == "gptq" else {})
    folder, tensors = write_packed_model(tmp_path, described, lambda name: not re.search(whole, name), model)
    token_ids = [(7 * i + i * i) % 256 for i in range(90)]

    config = AutoConfig.for_model(**model.config())
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    oracle.load_state_dict(stacked(tensors))
    with torch.no_grad():
        expected: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    found = {0: our_logits(folder, token_ids, 41)}
    if not has_order(FORMATS[form]) and whole != "nothing":
        found[40] = logits_of_parts(folder, token_ids[:60], by_expert=False)

    for first, logits in found.items():
        of_same = expected[first : first + len(logits)]
        assert (logits - of_same).abs().max() <= TOLERANCE * expected.abs().max()


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors with those of all experts in one, as transformers has them in memory."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{number}.{which}_proj.weight"] for number in range(6)])
            for which in ("gate", "up", "down")
        )
        found |= {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}
    return found


@pytest.mark.parametrize("name", TINY_VISIONS)
def test_logits_of_pictures_equal_transformers(name: str, tmp_path: Path) -> None:
    """At every position, of two pictures of several sizes, in two chunks: the first cuts a picture where it may."""
    folder = write_tiny_vision(tmp_path, TINY_VISIONS[name])
    pictures = [draw_tokens(folder, 3, 2), draw_tokens(folder, 2, 5, 1)]
    prompt, placed = with_pictures(folder, [range(5), [9, 8], [4, 4, 4]], pictures)
    cut = 9 if not placed[0].both_ways else placed[1].start

    expected, ours = oracle_logits(folder, prompt, placed), logits_with_pictures(folder, prompt, placed, cut)

    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))
    others = with_pictures(folder, [range(5), [9, 8], [4, 4, 4]], [pictures[0].flip(0), pictures[1]])[1]
    assert (
        logits_with_pictures(folder, prompt, others, cut)[-1] - expected[-1]
    ).abs().max() > 0.01 * expected.abs().max()


@pytest.mark.parametrize(
    ("width", "height", "kind"), [(200, 150, "RGB"), (9, 400, "RGBA"), (64, 64, "L"), (30, 17, "P")]
)
def test_pictures_come_to_a_tower_as_transformers_has_them(width: int, height: int, kind: str, tmp_path: Path) -> None:
    """Pixel by pixel: larger ones made smaller, whole tokens on both sides, white where they are transparent."""
    images = pytest.importorskip("PIL.Image")
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    vision = load_vision_config(write_tiny_vision(tmp_path))
    assert vision is not None
    pixels = draw_picture(width, height).repeat(1, 1, 2)[:, :, :4].numpy()
    image = images.fromarray(pixels).convert(kind)
    written = BytesIO()
    image.save(written, "PNG")
    url = f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
    side = vision.patch_size * vision.merge
    whole = {"height": side, "width": side}
    made = PixtralImageProcessorPil(patch_size=whole, size={"longest_edge": vision.longest_side})(images.open(written))

    (found,) = asyncio.run(read_pictures([("", url)], vision, PicturesConfig()))

    read = torch.frombuffer(bytearray(found.data), dtype=torch.uint8).view(found.height, found.width, 3)
    normal = (read / 255 - torch.tensor(vision.mean)) / torch.tensor(vision.std)
    assert torch.allclose(normal.permute(2, 0, 1), torch.tensor(made["pixel_values"][0]), atol=1e-6)
    assert max(found.width, found.height) <= vision.longest_side


def test_pictures_come_to_a_gemma_as_transformers_has_them(tmp_path: Path) -> None:
    """Pixel by pixel: whatever their sides are, squares of one size."""
    images = pytest.importorskip("PIL.Image")
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    vision = load_vision_config(write_tiny_vision(tmp_path, TINY_VISIONS["Gemma 3"]))
    assert vision is not None
    image, written = images.fromarray(draw_picture(40, 9).numpy()), BytesIO()
    image.save(written, "PNG")
    made = Gemma3ImageProcessorPil(size={"height": 12, "width": 12})(image)

    url = f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
    (found,) = asyncio.run(read_pictures([("", url)], vision, PicturesConfig()))

    read = torch.frombuffer(bytearray(found.data), dtype=torch.uint8).view(12, 12, 3)
    assert torch.allclose(normal(read, vision, torch.ones(1)), torch.tensor(made["pixel_values"][0]), atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(40, 9), (5, 3), (500, 300), (20, 20), (3, 90)])
def test_pictures_come_to_a_qwen_in_the_sizes_of_transformers(width: int, height: int, tmp_path: Path) -> None:
    """As many pixels as its files allow, in whole tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    vision = load_vision_config(write_tiny_vision(tmp_path, TINY_VISIONS["Qwen2.5-VL"]))
    assert vision is not None
    rows, columns = vision.grid(width, height)

    assert smart_resize(height, width, vision.token_side, 64, 4096) == (8 * rows, 8 * columns)


@pytest.mark.parametrize(
    ("architecture", "adapter"),
    [
        ("LlamaForCausalLM", TinyAdapter(rank=5, alphas={"q_proj": 16.0, "layers.1.mlp.up_proj": 2.0})),
        ("GraniteForCausalLM", TinyAdapter(rslora=True)),  # some of its weights are multiplied as they are loaded
        ("Olmo2ForCausalLM", TinyAdapter()),  # norms all queries together
        ("MixtralForCausalLM", TinyAdapter(modules=ATTENTION)),
    ],
)
def test_logits_of_an_adapter_equal_merged_weights(architecture: str, adapter: TinyAdapter, tmp_path: Path) -> None:
    """Of transformers, by PEFT's formula, at every position."""
    from transformers import AutoModelForCausalLM

    factors = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    extra = dict(zip(factors, (3.0, 0.4, 0.2, 2.0), strict=True)) if architecture.startswith("Granite") else {}
    model, dice = TinyModel(architecture, extra=extra), random.Random(architecture)
    token_ids = [dice.randrange(256) for _ in range(50)]
    folder = write_tiny_model(tmp_path / "model", model)
    with torch.no_grad():
        merged = write_merged(tmp_path / "merged", adapter, model)
        oracle = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, attn_implementation="eager").eval()
        expected: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    ours = our_logits(folder, token_ids, 17, write_adapter(tmp_path / "own", adapter, model))

    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert (our_logits(folder, token_ids, 17) - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parts_of_a_model_say_what_the_whole_says(architecture: str, tmp_path: Path) -> None:
    """Two stages of two ranks each, which add up what each has of a layer: of a mixture a part of each expert, or
    half of the experts."""
    dice = random.Random(architecture)
    model = replace(draw(architecture, 1, dice), num_layers=3, num_heads=4, num_kv_heads=2, hidden_size=64)
    model = replace(model, num_experts=2 * model.num_experts)
    if "layer_types" in model.extra:
        model.extra["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    folder = write_tiny_model(tmp_path, model)
    token_ids = [dice.randrange(256) for _ in range(60)]

    whole = our_logits(folder, token_ids, 40)
    for by_expert in (False,) if architecture in DENSE else (False, True):
        in_parts = logits_of_parts(folder, token_ids, by_expert)
        assert (in_parts - whole[40:]).abs().max() <= TOLERANCE * whole.abs().max(), by_expert


@pytest.mark.parametrize("architecture", SMOOTHED)
def test_tokens_that_smooth_weights_pass_as_others_do(architecture: str, tmp_path: Path) -> None:
    """What reaches a layer while its weights are smoothed is what reaches it when it is served."""
    folder = write_tiny_model(tmp_path, draw(architecture, 0, random.Random(architecture)))
    with torch.inference_mode():
        model = load_model(load_model_config(folder), Checkpoint(folder, CPU, torch.float32), 120)
        passage = begin_passage(model)
        for layer in model.layers:
            _, passage = smooth(layer, passage, "int8")
        assert passage.residual is not None
        hidden, _ = reference.add_rms_norm(passage.x, passage.residual, model.norm, model.config.rms_norm_eps)

        served = our_logits(folder, [2 * place for place in range(120)], 70)

        assert (model.logits(hidden) - served).abs().max() <= TOLERANCE * served.abs().max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_leaves_out_is_as_transformers_takes_it(architecture: str) -> None:
    """A checkpoint's config.json need not name what its class has anyway, such as that head and embedding are one."""
    from transformers import CONFIG_MAPPING

    model_type = TinyModel(architecture).config()["model_type"]
    whole = CONFIG_MAPPING[model_type]().to_dict() | {"architectures": [architecture]}
    for name in ("num_experts_per_tok", "n_routed_experts"):  # some classes have none
        whole[name] = whole.get(name) or 2
    named = {name for name in whole if "expert" in name} | NAMED_ALWAYS
    named |= {"rope_parameters"} if architecture == "Ministral3ForCausalLM" else set()  # refused without
    found, short = (
        parse_model_config({name: value for name, value in whole.items() if name in some})
        for some in (whole.keys(), named)
    )

    for field in ("tie_word_embeddings", "rms_norm_eps", "head_dim", "windows", "factors", "softcap", "logits_softcap",
                  "activation", "qkv_bias", "out_bias", "mlp_bias", "ropes"):  # fmt: skip
        assert getattr(short, field) == getattr(found, field), field


def logits_of_parts(folder: Path, token_ids: list[int], by_expert: bool) -> Tensor:
    """Return the logits after the tokens behind the first 40, a thread for each rank of a stage."""
    config = load_model_config(folder)
    ranks, stages, blocks = 2, 2, 4
    parts: list[Tensor] = []
    turn, done = Barrier(ranks, lambda: parts.sort(key=Tensor.data_ptr), 60), Barrier(ranks, parts.clear, 60)
    between: dict[int, list[Tensor]] = {rank: [] for rank in range(ranks)}

    def add(part: Tensor) -> Tensor:
        parts.append(part)
        turn.wait()
        total = torch.stack(parts).sum(0)
        done.wait()
        return part.copy_(total)

    @torch.inference_mode()
    def compute(rank: int, stage: int) -> list[Tensor]:
        part = stage_of(config_of_rank(config, ranks, by_expert), stage, stages)
        linear = LinearOptions(add_ranks=add)
        weights = shard(Checkpoint(folder, CPU, torch.float32, linear, config.packed), config, rank, ranks, by_expert)
        decoder = replace(
            load_model(part, weights, 512),
            receive=(lambda states: states.copy_(between[rank].pop(0))) if stage else None,
            send=None if stage else between[rank].append,
        )
        grouping = Grouping(BLOCK, blocks, 512, CPU, torch.float32, part.window)
        cache = torch.zeros(part.num_layers, blocks + 1, BLOCK, *part.kv_shape)
        hidden = []
        for start, end in ((0, 40), (40, len(token_ids))):
            table = tuple(range(-(-end // BLOCK)))
            step = SequenceStep(0, tuple(token_ids[start:end]), start, table, True, SamplingParams(1), 0)
            hidden.append(decoder.hidden_states(build_tensors(StepPlan(0, (step,)), grouping, CPU), cache))
        return [decoder.logits(hidden[-1])] if stage else []

    with ThreadPoolExecutor(ranks) as threads:
        for stage in range(stages):
            found = list(threads.map(compute, range(ranks), [stage] * ranks))
    assert torch.equal(*(logits for (logits,) in found))
    return found[0][0]


def logits_with_pictures(folder: Path, prompt: tuple[int, ...], pictures: tuple[Picture, ...], cut: int) -> Tensor:
    """Return the logits after each token, computed in two chunks."""
    config = load_model_config(folder)
    with torch.inference_mode():
        model = load_model(config, Checkpoint(folder, CPU, torch.float32), 512)
        vectors = load_pictures(engine_config(str(folder)), config, CPU, torch.float32)
        assert vectors is not None
        grouping, rows = Grouping(16, 8, 512, CPU, torch.float32, config.window), []
        cache = torch.zeros(config.num_layers, 9, 16, *config.kv_shape)
        for start, end in ((0, cut), (cut, len(prompt))):
            parts, table = parts_of(pictures, prompt, start, end), tuple(range(-(-end // 16)))
            step = SequenceStep(0, prompt[start:end], start, table, True, SamplingParams(1), 0, pictures=parts)
            tensors = vectors.put_into(build_tensors(StepPlan(0, (step,)), grouping, CPU), model)
            rows.append(model.logits(model.hidden_states(tensors, cache)))
        assert vectors.num_computed == len(pictures)
        return torch.cat(rows)
