# The architectures that can be run, and what each does otherwise than Llama: facts of its code, which config.json does
# not tell. One decoder is told apart by them, so that a new model of this family is a row here.

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gpu_backend.models.config.experts import Mixture


@dataclass(frozen=True, slots=True)
class NormNames:
    """What a layer's norms are called in a checkpoint; None: there is none at that place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of what attention adds
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """What its code does; where a field is not given, it does as Llama does."""

    norms: NormNames = field(default_factory=NormNames)
    norm_offset: float = 0.0  # what a norm's weights count from
    # Of queries and keys: none; "head": each by itself; "width": all of a token's together; "turned": each by itself,
    # without weights, in layers where positions turn them.
    qk_norm: str = "none"
    qkv_bias: bool | None = None  # None: as attention_bias says
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    # Which layers look back only so far: "never" any, "all", those that layer_types names (else all but the last of
    # every sliding_window_pattern), these "if asked" by use_sliding_window, then "every other" or "all if asked", and
    # "late": those from max_window_layers on; "chunks": where positions turn, back to where their chunk begins.
    slides: str = "never"
    # Where sliding layers have a plain rope of their own: what config.json calls its base.
    sliding_theta: str = ""
    skips_rope: bool = False  # in some layers positions turn nothing
    multiplies: bool = False  # by the factors of a Granite's config
    bounds: bool = False  # embeddings are multiplied by the root of their size; scores and logits may have soft caps
    mixture: Mixture | None = None  # of experts, in the place of MLPs
    turns_part: bool = False  # of a head's numbers, where partial_rotary_factor says so
    interleaves: bool = False  # in what turns, neighbours are a pair
    has_sinks: bool = False  # each head has a score of its own that every softmax counts and that adds nothing
    has_mtp: bool = False  # layers behind its own draft, where num_nextn_predict_layers says so
    is_latent: bool = False  # keys and values of all heads are made of one vector (MLA)
    # Most layers have linear attention, and the others gates: its inputs are "grouped" by key head, or "by kind".
    linear: str = ""
    scales_queries: bool = False  # by how often their position has the original context
    scales_still: bool = False  # the same where positions turn nothing
    mlp_size: str = "intermediate_size"  # how config.json calls the inner width of an MLP
    rope_kinds: tuple[str, ...] = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
    defaults: dict[str, Any] = field(default_factory=dict)  # of config.json, where it says nothing


_GEMMA_2 = Architecture(
    norms=NormNames(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=1.0,
    slides="layer_types",
    bounds=True,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
_GEMMA_3 = replace(
    _GEMMA_2,
    qk_norm="head",
    sliding_theta="rope_local_base_freq",
    defaults=_GEMMA_2.defaults
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)
_GLM = Architecture(
    out_bias=False,
    mlp_bias=False,
    turns_part=True,
    interleaves=True,
    defaults={"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7},
)
_MINISTRAL_3 = Architecture(
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    slides="all",
    scales_queries=True,
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5},
)
_OLMO_2 = Architecture(
    norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    qk_norm="width",
    mlp_bias=False,
    defaults={"rms_norm_eps": 1e-5},
)
_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK_3 = Architecture(
    mlp_bias=False,
    interleaves=True,
    is_latent=True,
    has_mtp=True,
    defaults=_LATENT
    | {
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    mixture=Mixture(begins_dense=True, shared="whole", is_sigmoid=True),
)
_QWEN_NEXT = Architecture(
    norm_offset=1.0,
    qk_norm="head",
    mlp_bias=False,
    turns_part=True,
    linear="grouped",
    defaults={
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 32768,
        "norm_topk_prob": True,
    },
    mixture=Mixture(is_optional=True, shared="gated"),
)
_MISTRAL = Architecture(
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    slides="all",
    defaults={"sliding_window": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
)
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": Architecture(
        qkv_bias=True, out_bias=False, slides="if asked", defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Architecture(
        qk_norm="head", slides="if asked", defaults={"sliding_window": 4096, "head_dim": 128}
    ),
    # Phi-4, too
    "Phi3ForCausalLM": Architecture(
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        slides="all",
        turns_part=True,
        rope_kinds=("default", "longrope"),
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    ),
    "GraniteForCausalLM": Architecture(multiplies=True),
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(
        _GLM, norms=NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    ),
    "MinistralForCausalLM": replace(_MISTRAL, slides="layer_types"),
    "Ministral3ForCausalLM": _MINISTRAL_3,
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": replace(
        _OLMO_2,
        slides="layer_types",
        sliding_theta="rope_theta",
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "SmolLM3ForCausalLM": Architecture(
        slides="if asked",
        skips_rope=True,
        defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "max_position_embeddings": 32768},
    ),
    # the text of Scout and Maverick
    "Llama4ForCausalLM": Architecture(
        qk_norm="turned",
        slides="chunks",
        skips_rope=True,
        scales_still=True,
        interleaves=True,
        mlp_size="intermediate_size_mlp",
        defaults={
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "max_position_embeddings": 131072,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
        },
        mixture=Mixture("intermediate_size", is_optional=True, shared="whole", scales_inputs=True),
    ),
    "MixtralForCausalLM": replace(
        _MISTRAL,
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5},
        mixture=Mixture("intermediate_size", is_normalised=True),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        out_bias=False,
        slides="every other",
        defaults={"sliding_window": 4096, "qkv_bias": True},
        mixture=Mixture(is_optional=True, shared="gated"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        qk_norm="head",
        slides="all if asked",
        defaults={"sliding_window": 4096},
        mixture=Mixture(is_optional=True),
    ),
    "Qwen3NextForCausalLM": _QWEN_NEXT,
    "Qwen3_5ForCausalLM": replace(_QWEN_NEXT, linear="by kind", mixture=None),
    "Qwen3_5MoeForCausalLM": replace(
        _QWEN_NEXT,
        linear="by kind",
        mlp_size="moe_intermediate_size",  # every layer is a mixture
        mixture=Mixture(is_normalised=True, shared="gated"),
    ),
    # GLM-4.5 to 4.7
    "Glm4MoeForCausalLM": Architecture(
        qk_norm="head",
        out_bias=False,
        mlp_bias=False,
        turns_part=True,
        has_mtp=True,
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "use_qk_norm": False},
        mixture=Mixture(begins_dense=True, shared="whole", is_sigmoid=True),
    ),
    "OlmoeForCausalLM": Architecture(
        qk_norm="width",
        mlp_bias=False,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        mixture=Mixture("intermediate_size"),
    ),
    "Dots1ForCausalLM": Architecture(
        qk_norm="head",
        mlp_bias=False,
        slides="late",
        defaults={
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        mixture=Mixture(begins_dense=True, shared="whole", is_sigmoid=True),
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        qk_norm="width",
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        turns_part=True,
        defaults={"head_dim": 128, "max_position_embeddings": 196608, "rope_theta": 5e6},
        mixture=Mixture("intermediate_size", is_normalised=True, is_sigmoid=True),
    ),
    "DeepseekV2ForCausalLM": replace(
        _DEEPSEEK_3,
        defaults=_LATENT | {"first_k_dense_replace": 0, "topk_method": "greedy"},
        mixture=Mixture(begins_dense=True, shared="whole", has_factor=True),
    ),
    # Kimi K2, too
    "DeepseekV3ForCausalLM": _DEEPSEEK_3,
    # GLM-4.7-Flash
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_3,
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
        },
    ),
    "YoutuForCausalLM": replace(
        _DEEPSEEK_3, defaults=_LATENT | {"tie_word_embeddings": True, "max_position_embeddings": 131072}, mixture=None
    ),
    "GraniteMoeForCausalLM": Architecture(multiplies=True, mixture=Mixture("intermediate_size", is_normalised=True)),
    "GptOssForCausalLM": Architecture(
        slides="layer_types",
        has_sinks=True,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.5e5,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
        },
        mixture=Mixture("intermediate_size", is_normalised=True, is_clamped=True),
    ),
}
# Models that see, whose text is one of these, by its model_type; ``config.vision`` knows whose pictures are read.
TEXT_OF = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "LlavaForConditionalGeneration": {"mistral": "MistralForCausalLM"},  # Pixtral
    "KimiK25ForConditionalGeneration": dict.fromkeys(("kimi_k2", "deepseek_v3"), "DeepseekV3ForCausalLM"),
    "Qwen2VLForConditionalGeneration": dict.fromkeys(("qwen2_vl_text", "qwen2_vl"), "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": dict.fromkeys(("qwen2_5_vl_text", "qwen2_5_vl"), "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {
        "qwen3_5_text": "Qwen3_5ForCausalLM"
    },  # its pictures are refused, as the next one's
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
