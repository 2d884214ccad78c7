# Llama 2 and 3: which tensor of a Hugging Face checkpoint goes where.

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from gpu_backend.models.config import ModelConfig
from gpu_backend.models.layers import Attention, Decoder, DecoderLayer
from gpu_backend.models.linear import load_linear
from gpu_backend.models.rope import rope_tables
from gpu_backend.models.smoothing import begin_passage, rounded, smooth
from gpu_backend.models.weights import WeightSource

AttentionLoader = Callable[[ModelConfig, WeightSource, str], Attention]


def load_llama(config: ModelConfig, weights: WeightSource, max_model_len: int) -> Decoder:
    """Build a Llama with positions up to ``max_model_len``. Raises ``UnsupportedModel`` where a tensor does not fit."""
    return load_decoder(config, weights, max_model_len, load_attention)


def load_decoder(
    config: ModelConfig, weights: WeightSource, max_model_len: int, attention_loader: AttentionLoader
) -> Decoder:
    """Build a decoder whose tensors are named as Llama's, but for what ``attention_loader`` reads."""
    norm = weights.get("model.norm.weight", config.hidden_size)
    embedding = head = norm.new_empty(0, config.hidden_size)
    shape = (config.vocab_size, config.hidden_size)
    if not config.layers_before or (config.tie_word_embeddings and not config.layers_after):
        embedding = weights.get("model.embed_tokens.weight", *shape)
    if not config.layers_after:
        head = embedding if config.tie_word_embeddings else weights.get("lm_head.weight", *shape)
    cos, sin = rope_tables(config.rope, config.head_dim, max_model_len, norm)
    if weights.linear.is_smoothed and weights.packed is None:
        layers = tuple(_load_smoothed(config, weights, attention_loader, embedding, cos, sin))
    else:
        layers = tuple(_load_layer(config, weights, index, attention_loader) for index in range(config.num_layers))
    return Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        cos=cos,
        sin=sin,
        batch_invariant=weights.linear.batch_invariant,
    )


def load_attention(config: ModelConfig, weights: WeightSource, prefix: str) -> Attention:
    """Load one layer's projections; ``prefix`` names it in the checkpoint."""
    return load_projections(config, weights, prefix, qkv_bias=config.attention_bias, out_bias=config.attention_bias)


def load_projections(
    config: ModelConfig, weights: WeightSource, prefix: str, qkv_bias: bool, out_bias: bool
) -> Attention:
    """Load them with biases or without."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    return Attention(
        qkv=load_linear(weights, names, (queries, keys, keys), config.hidden_size, qkv_bias),
        out=load_linear(weights, (f"{prefix}.o_proj",), (config.hidden_size,), queries, out_bias),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm=None,
        eps=config.rms_norm_eps,
    )


def _load_smoothed(
    config: ModelConfig,
    weights: WeightSource,
    attention_loader: AttentionLoader,
    embedding: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Iterator[DecoderLayer]:
    """Load layer by layer, each rounded as is best for what comes out of those before it, be they another stage's."""
    method = weights.linear.quantization
    assert method is not None
    if not len(embedding):
        embedding = weights.get("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    passage = begin_passage(embedding, cos, sin)
    for index in range(-config.layers_before, config.num_layers):
        layer, passage = smooth(_load_layer(config, weights, index, attention_loader), passage, method)
        if index >= 0:
            yield rounded(layer, method)


def _load_layer(
    config: ModelConfig, weights: WeightSource, index: int, attention_loader: AttentionLoader
) -> DecoderLayer:
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{config.layers_before + index}"
    attention = replace(attention_loader(config, weights, f"{prefix}.self_attn"), window=config.windows[max(index, 0)])
    mlp = f"{prefix}.mlp"
    return DecoderLayer(
        attention_norm=weights.get(f"{prefix}.input_layernorm.weight", hidden),
        attention=attention,
        mlp_norm=weights.get(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=load_linear(weights, (f"{mlp}.gate_proj", f"{mlp}.up_proj"), (inner, inner), hidden, config.mlp_bias),
        down=load_linear(weights, (f"{mlp}.down_proj",), (hidden,), inner, config.mlp_bias),
        eps=config.rms_norm_eps,
        add_ranks=weights.linear.add_ranks,
    )
