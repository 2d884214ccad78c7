# Writes a random tiny model of the Llama family as a Hugging Face checkpoint: small enough for milliseconds per step,
# wide enough in its options to meet every branch of the loader.

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from tests.support.tiny_experts import MODEL_TYPES_OF_MIXTURES, experts_config, experts_tensors, has_experts
from tests.support.tiny_latent import MODEL_TYPES_OF_LATENT, latent_config, latent_tensors
from tests.support.tiny_linear import MODEL_TYPES_OF_LINEAR, linear_config, linear_sizes, linear_tensors

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FUSED = {  # as Phi-3 has them, GLM the second
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
# Norms of a layer, where they are not Llama's; and what is not called after the architecture.
_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    "Gemma2ForCausalLM": _AROUND,
    "Gemma3ForCausalLM": _AROUND,
    "Olmo2ForCausalLM": _AROUND[1::2],
    "Olmo3ForCausalLM": _AROUND[1::2],
    "Glm4ForCausalLM": (*_AROUND[:2], "post_self_attn_layernorm", "post_mlp_layernorm"),
}
MODEL_TYPES = {"Gemma3ForCausalLM": "gemma3_text"} | MODEL_TYPES_OF_MIXTURES | MODEL_TYPES_OF_LATENT
MODEL_TYPES |= MODEL_TYPES_OF_LINEAR
FROM_ZERO = ("Gemma", *MODEL_TYPES_OF_LINEAR)  # whose norms' weights count from there
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


@dataclass(frozen=True)
class TinyModel:
    """The shape of a tiny model; ``extra`` goes into config.json as it is."""

    architecture: str = "LlamaForCausalLM"
    vocab_size: int = 260  # the bytes and the special tokens
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_position: int = 512
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    num_shards: int = 1
    eos_token_id: int | None = None
    num_experts: int = 5  # of an architecture that has some
    experts_per_token: int = 2
    stacks_experts: bool = False  # as newer transformers name them
    packs_experts: bool = False  # of a GPT-OSS: in mxfp4
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        model_type = MODEL_TYPES.get(self.architecture, self.architecture.removesuffix("ForCausalLM").lower())
        return {
            "architectures": [self.architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": None if self.architecture.startswith("Gemma") else "silu",  # it has hidden_activation
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": None,
            "torch_dtype": "float32",
            **experts_config(self),
            **latent_config(self),
            **linear_config(self),
            **self.extra,
        }

    def _has_bias(self, name: str) -> bool:
        if name == "o_proj" and self.architecture.startswith("Glm"):
            return False
        return self.attention_bias or (self.architecture.startswith("Qwen2") and name != "o_proj")

    def tensors(self) -> dict[str, Tensor]:
        """Draw the weights, wide enough apart that no two logits come near a tie."""
        generator = torch.Generator().manual_seed(self.seed)
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

        def norm(size: int) -> Tensor:
            return (not self.architecture.startswith(FROM_ZERO)) + 0.2 * torch.randn(size, generator=generator)

        tensors = {"model.embed_tokens.weight": torch.randn(self.vocab_size, hidden, generator=generator)}
        linear = linear_sizes(self)
        for index in range(self.num_layers):
            layer = f"model.layers.{index}"
            attention = f"{layer}.self_attn"
            shapes = {
                "q_proj": (queries if linear is None else 2 * queries, hidden),
                "k_proj": (keys, hidden),
                "v_proj": (keys, hidden),
                "o_proj": (hidden, queries),
            }
            if self.architecture in MODEL_TYPES_OF_LATENT:
                shapes = {}
                tensors |= latent_tensors(self, attention, matrix, norm)
            elif linear is not None and linear.layers[index]:
                shapes = {}
                tensors |= linear_tensors(linear, f"{layer}.linear_attn", hidden, matrix)
            for name, shape in shapes.items():
                tensors[f"{attention}.{name}.weight"] = matrix(*shape)
                if self._has_bias(name):
                    tensors[f"{attention}.{name}.bias"] = torch.randn(shape[0], generator=generator)
            if self.architecture == "GptOssForCausalLM":
                tensors[f"{attention}.sinks"] = 2 * torch.randn(self.num_heads, generator=generator)
            has_norms = self.extra.get("use_qk_norm") and self.architecture != "Llama4ForCausalLM"
            if shapes and (has_norms or self.architecture.startswith(("Qwen3", "Gemma3", "Dots"))):
                tensors[f"{attention}.q_norm.weight"] = norm(self.head_dim)
                tensors[f"{attention}.k_norm.weight"] = norm(self.head_dim)
            if self.architecture.startswith(("Olmo", "MiniMax")):
                tensors[f"{attention}.q_norm.weight"] = norm(queries)
                tensors[f"{attention}.k_norm.weight"] = norm(keys)
            if has_experts(self, index):
                tensors |= experts_tensors(self, layer, matrix)
            else:
                tensors[f"{layer}.mlp.gate_proj.weight"] = matrix(inner, hidden)
                tensors[f"{layer}.mlp.up_proj.weight"] = matrix(inner, hidden)
                tensors[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, inner)
            for name in NORMS.get(self.architecture, ("input_layernorm", "post_attention_layernorm")):
                tensors[f"{layer}.{name}.weight"] = norm(hidden)
            if self.architecture in ("Phi3ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM"):
                for fused, parts in list(FUSED.items())[self.architecture != "Phi3ForCausalLM" :]:
                    of_layer = [tensors.pop(f"{layer}.{part}.weight") for part in parts]
                    tensors[f"{layer}.{fused}.weight"] = torch.cat(of_layer)
        tensors["model.norm.weight"] = norm(hidden)
        if not self.tie_word_embeddings:
            tensors["lm_head.weight"] = matrix(self.vocab_size, hidden)
        if self.architecture == "Llama4ForCausalLM":
            return {name.replace(".mlp.", ".feed_forward."): tensor for name, tensor in tensors.items()}
        return tensors


def write_tiny_model(folder: Path, model: TinyModel | None = None, with_tokenizer: bool = False) -> Path:
    """Write the checkpoint into ``folder``, and a byte-level tokenizer with it if asked; return ``folder``."""
    model = model or TinyModel()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config()))
    write_shards(folder, model.tensors(), model.num_shards)
    if with_tokenizer:
        _write_tokenizer(folder)
    return folder


def write_shards(folder: Path, tensors: dict[str, Tensor], num_shards: int = 1) -> None:
    """Write the tensors as one safetensors file, or dealt out to several with an index."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        shard = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(shard, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _write_tokenizer(folder: Path) -> None:
    """One token per byte: any text round-trips, and its length in tokens is its length in UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
