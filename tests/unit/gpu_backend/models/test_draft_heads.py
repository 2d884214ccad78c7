# What heads that draft compute, beside transformers' MTP and a plain EAGLE-3; and what of them is refused.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu_backend.execution.loading import load_draft_model, load_part
from gpu_backend.kernels.layout.grouping import Grouping
from gpu_backend.models.config.draft_heads import load_eagle_config
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config
from gpu_backend.models.draft_heads import DraftHead, FeatureStore
from gpu_backend.step.config import engine_config
from gpu_backend.step.plan import SequenceStep, StepPlan
from gpu_backend.step.sampling_params import SamplingParams
from gpu_backend.step.step_tensors import build_tensors
from tests.support.tiny_heads import EAGLE_LAYERS, write_eagle_head, write_mtp_model
from tests.support.tiny_model import TinyModel, write_tiny_model

CPU = torch.device("cpu")
TOKENS = [(7 * place * place + 3 * place) % 250 for place in range(40)]
LLAMA = TinyModel(num_layers=3)
MTPS = {
    "DeepSeek V3": TinyModel("DeepseekV3ForCausalLM", extra={"first_k_dense_replace": 1}),
    "GLM 4.5": TinyModel("Glm4MoeForCausalLM", attention_bias=True, seed=1),
}
TOLERANCE = 1e-4  # of the largest logit


def head_of(folder: Path, **speculation: Any) -> tuple[Any, DraftHead]:
    """Return a model with what reads it, and its head, whose features have room for 64 tokens."""
    config, whole = engine_config(str(folder), device="cpu", **speculation), load_model_config(folder)
    model = load_part(config, whole, None, CPU, torch.float32, 512)
    head, reader = load_draft_model(config, whole, model, CPU, torch.float32, 512)
    assert isinstance(head, DraftHead)
    layers = head.features.layers_beside(whole.kv_floats_per_token // whole.num_layers, torch.float32)
    head.features.open(torch.zeros(layers, 5, 16, *whole.kv_shape))
    return replace(model, reader=reader), head


def logits_of(folder: Path, **speculation: Any) -> Tensor:
    """Return the head's logits at each place but the last, model and head in two chunks, in blocks in no order."""
    with torch.inference_mode():
        model, head = head_of(folder, **speculation)
        rows = []
        for part, first in ((model, 0), (head, 1)):
            cache = torch.zeros(part.config.num_layers, 5, 16, *part.config.kv_shape)
            grouping, hidden = Grouping(16, 4, 512, CPU, torch.float32), []
            for start, end in ((0, 23), (23, len(TOKENS) - 1)):
                table, ids = (2, 0, 3)[: -(-end // 16)], tuple(TOKENS[start + first : end + first])
                step = SequenceStep(0, ids, start, table, True, SamplingParams(1), 0)
                hidden.append(part.hidden_states(build_tensors(StepPlan(0, (step,)), grouping, CPU), cache))
            rows = hidden
        return head.logits(torch.cat(rows))


@pytest.mark.parametrize("name", MTPS)
def test_mtp_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """At every place: of the token behind it, and what the model made of the one that stands there."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    folder = write_mtp_model(tmp_path, MTPS[name])
    ids, places = torch.tensor([TOKENS]), torch.arange(1, len(TOKENS))[None]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        whole._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # it knows the numbers of real models
        oracle = MtpModel.from_pretrained(whole).eval()
        states = whole.model(ids[:, :-1]).last_hidden_state
        cache = MtpCache(config=whole.config.get_mtp_config())
        made = oracle.forward_layer(0, states, places, cache, input_ids=ids[:, 1:])
        expected: Tensor = oracle._project_to_logits(made)[0]

    found = logits_of(folder, speculative_method="mtp")

    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def plain_eagle(folder: Path, head: Path, before: bool) -> Tensor:
    """Return an EAGLE-3 head's logits at each place by its paper's formulas, of states that transformers computes."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        read: dict[int, Tensor] = {}
        for number, layer in enumerate(whole.model.layers):
            layer.register_forward_hook(lambda _, __, out, number=number: read.update({number + 1: out[0]}))
        whole(torch.tensor([TOKENS[:-1]]))
        tensors = load_file(head / "model.safetensors")
        w = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], 1e-5)

    features = torch.cat([read[layer].view(-1, 64) for layer in EAGLE_LAYERS], 1) @ w["fc"].T
    normed = norm(features, "midlayer.hidden_norm")
    tokens = norm(whole.model.embed_tokens.weight.detach()[TOKENS[1:]], "midlayer.input_layernorm")
    both, count = torch.cat((tokens, normed), 1), len(TOKENS) - 1
    q, k, v = ((both @ w[f"midlayer.self_attn.{of}_proj"].T).view(count, 4, 16).transpose(0, 1) for of in "qkv")
    angles = torch.outer(torch.arange(count), 1e4 ** (-torch.arange(0, 16, 2) / 16))
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()
    q, k = (x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin for x in (q, k))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(count, -1)
    x = (normed if before else features) + mixed @ w["midlayer.self_attn.o_proj"].T
    y = norm(x, "midlayer.post_attention_layernorm")
    inner = F.silu(y @ w["midlayer.mlp.gate_proj"].T) * (y @ w["midlayer.mlp.up_proj"].T)
    return norm(x + inner @ w["midlayer.mlp.down_proj"].T, "norm") @ w["lm_head"].T


@pytest.mark.parametrize("before", [False, True])
def test_eagle_logits_equal_the_formulas(before: bool, tmp_path: Path) -> None:
    """At every place, of the tokens that it drafts; all others are impossible."""
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    head = write_eagle_head(tmp_path / "head", LLAMA, norm_before_residual=before)
    expected = plain_eagle(folder, head, before)
    drafted = torch.arange(200) + load_file(head / "model.safetensors")["d2t"]

    found = logits_of(folder, speculative_method="eagle3", speculative_model=str(head))

    assert found.shape == (39, 260)
    assert (found[:, drafted] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert torch.equal(found.isfinite().all(0), torch.zeros(260, dtype=torch.bool).index_fill_(0, drafted, True))


def test_eagle_heads_come_as_speculators_write_them(tmp_path: Path) -> None:
    """Their layer nested, and numbered; with an embedding of their own, and layers told as others tell them."""
    model = load_model_config(write_tiny_model(tmp_path / "model", LLAMA))
    head = write_eagle_head(tmp_path / "head", LLAMA)
    flat = logits_of(tmp_path / "model", speculative_method="eagle3", speculative_model=str(head))
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    own = {"draft_vocab_size": config.pop("draft_vocab_size")}
    read = config.pop("eagle_aux_hidden_state_layer_ids")
    nested = own | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": config}
    nested |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in read]}}
    nested |= {"norm_before_fc": False, "fc_norm": False, "norm_output": False}
    (head / "config.json").write_text(json.dumps(nested))
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = LLAMA.tensors()["model.embed_tokens.weight"]
    save_file(renamed, head / "model.safetensors")

    found = load_eagle_config(head, model)

    assert (found.layer.vocab_size, found.layers_read) == (200, EAGLE_LAYERS)
    again = logits_of(tmp_path / "model", speculative_method="eagle3", speculative_model=str(head))
    assert torch.equal(again, flat)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.uint8])
def test_features_come_back_as_they_were_put(kept: torch.dtype) -> None:
    """Whatever numbers the cache is of: more than a layer has go into the next, and bytes are bytes."""
    store = FeatureStore(20, torch.bfloat16 if kept == torch.uint8 else kept)
    layers = store.layers_beside(2 * 1 * 8, kept)
    store.open(torch.zeros(layers, 3, 4, 2, 1, 8, dtype=kept))
    features = torch.randn(3, 20).to(store.get(torch.tensor([0])).dtype)

    store.put(torch.tensor([7, 0, 11]), features)

    assert layers == (3 if kept == torch.uint8 else 2)
    assert torch.equal(store.get(torch.tensor([11, 7])), features[[2, 0]])
    assert not store.get(torch.tensor([1, 8])).any()


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """With what is supported, before any weight is read, or by the tensor that is wrong."""
    folder = write_tiny_model(tmp_path / "model", LLAMA)
    model, written = load_model_config(folder), 0

    def refused(match: str, **config: Any) -> None:
        nonlocal written
        written += 1
        head = write_eagle_head(tmp_path / str(written), LLAMA, **config)
        with pytest.raises(UnsupportedModel, match=match):
            load_eagle_config(head, model)

    refused("architecture MedusaModel, no EAGLE-3 head; supported: Llama", architectures=["MedusaModel"])
    refused("has 2 layers", num_hidden_layers=2)
    refused("has 300 tokens, that of the model 260", vocab_size=300)
    refused("reads 99 numbers", target_hidden_size=99)
    refused(r"reads layers \[2, 1, 0\]; three of 3", eagle_aux_hidden_state_layer_ids=None)
    none = {"eagle_aux_hidden_state_layer_ids": []}  # as heads say that read the usual ones
    refused(r"reads layers \[2, 1, 0\]; three of 3", **none, eagle_config=none)
    refused("use_aux_hidden_state = false", eagle_config={"use_aux_hidden_state": False})
    refused(r"= \[1.5, 2, 3\]; a list of layers' numbers is needed", eagle_aux_hidden_state_layer_ids=[1.5, 2, 3])
    refused("has eagle_config = 'x'; an object is needed", eagle_config="x")
    refused("has norm_before_fc; only heads without", norm_before_fc=True)
    refused("has norm_output; only heads without", eagle_config={"norm_output": True})
    with pytest.raises(UnsupportedModel, match="no num_nextn_predict_layers; supported: DeepSeek V3"):
        head_of(folder, speculative_method="mtp")
    whole = write_eagle_head(tmp_path / "whole", LLAMA)
    tensors = load_file(whole / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    for changed, match in (
        (without | {"d2t": tensors["d2t"] + 250}, "names tokens twice, or others"),
        (without, "has no d2t"),
        (tensors | {"input_norm.weight": torch.ones(192)}, "norms what no EAGLE-3 head .* does: input_norm.weight"),
    ):
        save_file(changed, whole / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=match):
            head_of(folder, speculative_method="eagle3", speculative_model=str(whole))
    with pytest.raises(ValueError, match="several stages; leave out pipeline_parallel_size"):
        engine_config("x", speculative_method="eagle3", speculative_model="y", pipeline_parallel_size=2)
