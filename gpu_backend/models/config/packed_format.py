# How a checkpoint of rounded weights keeps them, as the quantization_config in its config.json says.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel

PACKED_BITS, PACKED_GROUPS = 4, 32  # the one width that is read, and what its groups are multiples of
MXFP4_GROUP = 32  # inputs that share a scale
PACKED_FORMATS = (("awq", "gemm"), ("gptq", "gptq"), ("gptq", "gptq_v2"))


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint keeps weights of few bits: ``packed.py`` loads them."""

    method: str  # of four bits: awq, gptq or mxfp4; of eight: fp8 or w8a8
    group_size: int = -1  # inputs that share a scale; -1: all
    zeros_are_one_less: bool = False  # as GPTQ's first format stores them
    kept_whole: tuple[str, ...] = ()  # parts of the names of matrices that are not packed; re: and a pattern
    scales: str = "weight_scale"  # of eight bits: what follows a matrix's name
    block: tuple[int, int] | None = None  # of eight bits: outputs and inputs that share a scale; None: all inputs

    @property
    def is_of_words(self) -> bool:
        """Whether numbers of four bits are packed into words."""
        return self.method in ("awq", "gptq")

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 8 if self.method in ("fp8", "w8a8") else 4


def packed_format(config: Mapping[str, Any]) -> PackedFormat | None:
    """Read the quantization_config of a config.json; None if it has none. Raises ``UnsupportedModel``."""
    asked = config.get("quantization_config")
    if not asked:
        return None
    if asked.get("quant_method") == "fp8":
        return _fp8_format(asked)
    if asked.get("quant_method") == "compressed-tensors":
        return _compressed_format(asked)
    if asked.get("quant_method") == "mxfp4":
        return _mxfp4_format(asked, config)
    method, bits = asked.get("quant_method"), asked.get("bits", asked.get("w_bit", PACKED_BITS))
    version = asked.get("version", "gemm") if method == "awq" else asked.get("checkpoint_format", "gptq")
    if (method, str(version).lower()) not in PACKED_FORMATS or bits != PACKED_BITS:
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method} ({version}) to {bits} bits; supported: awq (gemm) and "
            "gptq (gptq, gptq_v2) of 4 bits, mxfp4 of GPT-OSS, fp8 and compressed-tensors of 8 bits, and float32, "
            "float16 or bfloat16"
        )
    group = int(asked.get("group_size", asked.get("q_group_size", 128)))
    if group != -1 and (group < 1 or group % PACKED_GROUPS):
        raise UnsupportedModel(f"quantization_config has groups of {group}; they are of a multiple of {PACKED_GROUPS}")
    return PackedFormat(method, group, version == "gptq", tuple(asked.get("modules_to_not_convert") or ()))


def _fp8_format(asked: Mapping[str, Any]) -> PackedFormat:
    """Read the format of transformers' own float8: a scale for each matrix, or for each of its blocks."""
    kept = tuple(asked.get("modules_to_not_convert") or asked.get("ignored_layers") or ())
    block = asked.get("weight_block_size")
    if not block:
        return PackedFormat("fp8", kept_whole=kept)
    return PackedFormat("fp8", kept_whole=kept, scales="weight_scale_inv", block=(int(block[0]), int(block[1])))


def _mxfp4_format(asked: Mapping[str, Any], config: Mapping[str, Any]) -> PackedFormat:
    """Read GPT-OSS' own: experts of four-bit floats in blocks with a scale each, all else whole."""
    kept = tuple(asked.get("modules_to_not_convert") or ())
    if config.get("model_type", "gpt_oss") != "gpt_oss" or any("experts" in part for part in kept):
        raise UnsupportedModel(
            f"quantization_config is of mxfp4, of a {config.get('model_type')} and without {', '.join(kept)}; mxfp4 is "
            "supported of all experts of a gpt_oss"
        )
    return PackedFormat("mxfp4", group_size=MXFP4_GROUP, kept_whole=("self_attn",))


def _compressed_format(asked: Mapping[str, Any]) -> PackedFormat:
    """Read the format that llm-compressor writes: float8, or int8 weights and inputs (after SmoothQuant or GPTQ)."""
    described = (
        "; supported of compressed-tensors: one group of symmetric 8-bit weights, float or int, each with a scale "
    )
    described += "for a channel or for all, and inputs rounded to the same"
    try:
        (group,) = asked["config_groups"].values()
        weights, inputs = group["weights"], group["input_activations"]
        found = (weights["type"], weights["num_bits"], weights["strategy"], weights.get("symmetric", True))
        of_inputs = None if inputs is None else (inputs["type"], inputs["num_bits"], inputs.get("symmetric", True))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"quantization_config cannot be read: {error!r}{described}") from error
    kind = {"float": "fp8", "int": "w8a8"}.get(found[0])
    if kind is None or found[1:] not in ((8, "channel", True), (8, "tensor", True)) or of_inputs != (found[0], 8, True):
        raise UnsupportedModel(f"the checkpoint has weights of {found} and inputs of {of_inputs}{described}")
    return PackedFormat(kind, kept_whole=tuple(asked.get("ignore") or ()))
