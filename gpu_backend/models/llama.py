# Which tensor of a Hugging Face checkpoint goes where in a decoder of the Llama family.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gpu_backend.kernels.layout.scoring import Scoring
from gpu_backend.models.config.architectures import ARCHITECTURES
from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.models.config.rope import RopeConfig
from gpu_backend.models.experts import Experts, load_experts
from gpu_backend.models.latent import LatentAttention, load_latent_attention
from gpu_backend.models.layers import Attention, Decoder, DecoderLayer, Mlp
from gpu_backend.models.linear import load_linear
from gpu_backend.models.linear_attention import LinearAttention, RecurrentStates, load_linear_attention
from gpu_backend.models.rope import rope_table
from gpu_backend.models.smoothing import begin_passage, rounded, smooth
from gpu_backend.models.weights import MultipliedWeights, WeightSource


def load_model(config: ModelConfig, weights: WeightSource, max_model_len: int, num_rows: int = 1) -> Decoder:
    """Build a decoder with positions up to ``max_model_len``, and ``num_rows`` states where its layers keep some.
    Raises ``UnsupportedModel`` where a tensor does not fit.

    Its tensors are named as Llama's, but for what ``ARCHITECTURES`` says.
    """
    if ARCHITECTURES[config.architecture].multiplies:
        if weights.packed is not None:
            raise UnsupportedModel("a Granite's weights are multiplied as they are loaded, which packed ones cannot be")
        weights = MultipliedWeights(weights, dict.fromkeys(("o_proj", "down_proj"), config.factors.residual))
    norm = _load_norm(config, weights, "model.norm", config.hidden_size)
    shape = (config.vocab_size, config.hidden_size)
    embedding = head = weights.get("model.norm.weight", config.hidden_size).new_empty(0, config.hidden_size)
    if not config.layers_before or (config.tie_word_embeddings and not config.layers_after):
        embedding = weights.get("model.embed_tokens.weight", *shape)
    if not config.layers_after:
        head = embedding if config.tie_word_embeddings else weights.get("lm_head.weight", *shape)
    ropes = tuple(rope_table(rope, config.rope_dim, max_model_len, embedding) for rope in distinct_ropes(config))
    model = Decoder(
        config=config,
        embedding=embedding,
        layers=(),
        norm=norm,
        head=head,
        ropes=ropes,
        embedding_factor=torch.tensor(config.factors.embedding, dtype=embedding.dtype).item(),
        batch_invariant=weights.linear.batch_invariant,
        states=RecurrentStates(config.linear, num_rows, embedding) if config.linear is not None else None,
    )
    if weights.linear.is_smoothed and weights.packed is None:
        return replace(model, layers=tuple(_load_smoothed(model, weights)))
    return replace(model, layers=tuple(load_layer(config, weights, index) for index in range(config.num_layers)))


def distinct_ropes(config: ModelConfig) -> list[RopeConfig | None]:
    """Return each rope once."""
    return list(dict.fromkeys(config.ropes))


def _load_attention(
    config: ModelConfig, weights: WeightSource, index: int, prefix: str, inputs: int | None = None
) -> Attention | LatentAttention | LinearAttention:
    """Load one layer's projections, and its norms of queries and keys, which are applied to all heads in one go."""
    own = max(index, 0)  # of a layer before a stage's own, as of its first
    if config.linear is not None and config.linear.layers[own]:
        return load_linear_attention(config, weights, prefix.replace("self_attn", "linear_attn"), own)
    rope = distinct_ropes(config).index(config.ropes[own])
    if config.latent is not None:
        return load_latent_attention(config, weights, prefix, config.windows[own], rope)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    made = queries * (1 + config.gates_attention)
    names = (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj")
    qk_norm: Tensor | None = None
    width_norms: tuple[Tensor, ...] = ()
    if config.qk_norm == "head":
        query_norm, key_norm = (_load_norm(config, weights, f"{prefix}.{of}_norm", config.head_dim) for of in "qk")
        qk_norm = torch.cat([query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1)])
    elif config.qk_norm == "turned" and (turns := config.ropes[own]) is not None and turns.share:
        heads = config.num_heads + config.num_kv_heads
        qk_norm = weights.get("model.norm.weight", config.hidden_size).new_ones(heads, config.head_dim)
    elif config.qk_norm == "width":
        width_norms = tuple(
            _load_norm(config, weights, f"{prefix}.{of}_norm", size) for of, size in (("q", queries), ("k", keys))
        )
    return Attention(
        qkv=load_linear(weights, names, (made, keys, keys), inputs or config.hidden_size, config.qkv_bias),
        out=load_linear(weights, (f"{prefix}.o_proj",), (config.hidden_size,), queries, config.out_bias),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qk_norm=qk_norm,
        eps=config.rms_norm_eps,
        scoring=Scoring(
            config.factors.attention or config.head_dim**-0.5,
            config.windows[own],
            config.softcap,
            weights.get(f"{prefix}.sinks", config.num_heads).float() if config.has_sinks else None,
        ),
        rope=rope,
        width_norms=width_norms,
        add_ranks=weights.linear.add_ranks,
        gates=config.gates_attention,
    )


def _load_smoothed(model: Decoder, weights: WeightSource) -> Iterator[DecoderLayer]:
    """Load layer by layer, each rounded as is best for what comes out of those before it, be they another stage's."""
    config, method = model.config, weights.linear.quantization
    assert method is not None
    if not len(model.embedding):
        shape = (config.vocab_size, config.hidden_size)
        model = replace(model, embedding=weights.get("model.embed_tokens.weight", *shape))
    passage = begin_passage(model)
    for index in range(-config.layers_before, config.num_layers):
        layer, passage = smooth(load_layer(config, weights, index), passage, method)
        if index >= 0:
            yield rounded(layer, method)


def load_layer(config: ModelConfig, weights: WeightSource, index: int, inputs: int | None = None) -> DecoderLayer:
    """Load one layer; ``inputs``: so many numbers, normed before, its queries, keys and values are made of."""
    prefix = f"model.layers.{config.layers_before + index}"
    names = ARCHITECTURES[config.architecture].norms

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else _load_norm(config, weights, f"{prefix}.{name}", config.hidden_size)

    return DecoderLayer(
        attention_norm=norm(names.before_attention) if inputs is None else None,
        attention=_load_attention(config, weights, index, f"{prefix}.self_attn", inputs),
        attention_out_norm=norm(names.after_attention),
        mlp_norm=norm(names.before_mlp),
        mlp_out_norm=norm(names.after_mlp),
        mlp=_load_mlp(config, weights, index, f"{prefix}.mlp"),
        eps=config.rms_norm_eps,
        add_ranks=weights.linear.add_ranks,
    )


def _load_norm(config: ModelConfig, weights: WeightSource, name: str, size: int) -> Tensor:
    """Load a norm's weights; what counts from elsewhere than 0 needs more bits than it is kept in."""
    weight, offset = weights.get(f"{name}.weight", size), ARCHITECTURES[config.architecture].norm_offset
    return weight.float() + offset if offset else weight


def _load_mlp(config: ModelConfig, weights: WeightSource, index: int, prefix: str) -> Mlp | Experts:
    if config.experts is not None and config.experts.layers[max(index, 0)]:
        return load_experts(config, weights, prefix)
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return Mlp(
        gate_up=load_linear(weights, (f"{prefix}.gate_proj", f"{prefix}.up_proj"), (inner, inner), hidden, bias),
        down=load_linear(weights, (f"{prefix}.down_proj",), (hidden,), inner, bias),
        activation=config.activation,
    )
