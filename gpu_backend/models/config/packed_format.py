# How a checkpoint of rounded weights keeps them, as the quantization_config in its config.json says.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel

PACKED_GROUPS = 32  # what groups of packed weights are multiples of
MXFP4_GROUP = 32  # inputs that share a scale
PACKED_FORMATS = (  # method, version and bits
    ("awq", "gemm", 4),
    ("gptq", "gptq", 4),
    ("gptq", "gptq_v2", 4),
    ("gptq", "gptq", 8),
    ("gptq", "gptq_v2", 8),
)


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint keeps weights of few bits: ``packed.py`` loads them. Which matrices are, its tensors tell."""

    method: str  # in words: awq, gptq or compressed; one by one: fp8, int8 or w8a8; of GPT-OSS: mxfp4
    group_size: int = -1  # inputs that share a scale; -1: all
    bits: int = 4  # of a weight
    zeros_are_one_less: bool = False  # as GPTQ's first format stores them
    has_zeros: bool = True  # of words: what numbers count from; False: the middle
    has_order: bool = False  # of compressed: inputs say which group is theirs
    scales: str = "weight_scale"  # of those one by one: what follows a matrix's name
    block: tuple[int, int] | None = None  # of these: outputs and inputs that share a scale; None: all inputs

    @property
    def is_of_words(self) -> bool:
        """Whether numbers are packed into words."""
        return self.method in ("awq", "gptq", "compressed")

    @property
    def per_word(self) -> int:
        """Numbers in a word."""
        return 32 // self.bits


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
    method, bits = asked.get("quant_method"), asked.get("bits", asked.get("w_bit", 4))
    version = asked.get("version", "gemm") if method == "awq" else asked.get("checkpoint_format", "gptq")
    if (method, str(version).lower(), bits) not in PACKED_FORMATS:
        raise UnsupportedModel(
            f"the checkpoint is quantized by {method} ({version}) to {bits} bits; supported: awq (gemm) of 4 bits, "
            "gptq (gptq, gptq_v2) and compressed-tensors of 4 and 8 bits, mxfp4 of GPT-OSS, fp8, and float32, float16 "
            "or bfloat16"
        )
    if any(said and not rule.startswith("-:") for rule, said in (asked.get("dynamic") or {}).items()):
        raise UnsupportedModel(
            "quantization_config has dynamic rules; supported are those that leave matrices whole (-:), and one way "
            "for all others"
        )
    group = _group_size(int(asked.get("group_size", asked.get("q_group_size", 128))))
    return PackedFormat(method, group, bits, version == "gptq")


def _group_size(group: int) -> int:
    if group != -1 and (group < 1 or group % PACKED_GROUPS):
        raise UnsupportedModel(f"quantization_config has groups of {group}; they are of a multiple of {PACKED_GROUPS}")
    return group


def _fp8_format(asked: Mapping[str, Any]) -> PackedFormat:
    """Read the format of transformers' own float8: a scale for each matrix, or for each of its blocks."""
    block = asked.get("weight_block_size")
    if not block:
        return PackedFormat("fp8", bits=8)
    return PackedFormat("fp8", bits=8, scales="weight_scale_inv", block=_block(block))


def _block(asked: Any) -> tuple[int, int]:
    """Return how many outputs and inputs of a block share a scale."""
    tall, wide = map(int, asked)
    if wide < 16 or wide & wide - 1:
        raise UnsupportedModel(
            f"quantization_config has blocks of {wide} inputs; a power of two, 16 or more, is needed"
        )
    return tall, wide


def _mxfp4_format(asked: Mapping[str, Any], config: Mapping[str, Any]) -> PackedFormat:
    """Read GPT-OSS' own: experts of four-bit floats in blocks with a scale each, all else whole."""
    kept = tuple(asked.get("modules_to_not_convert") or ())
    if config.get("model_type", "gpt_oss") != "gpt_oss" or any("experts" in part for part in kept):
        raise UnsupportedModel(
            f"quantization_config is of mxfp4, of a {config.get('model_type')} and without {', '.join(kept)}; mxfp4 is "
            "supported of all experts of a gpt_oss"
        )
    return PackedFormat("mxfp4", group_size=MXFP4_GROUP)


def _compressed_format(asked: Mapping[str, Any]) -> PackedFormat:
    """Read the format that llm-compressor writes: words of int4 or int8, or float8 or int8 one by one."""
    described = (
        "; supported of compressed-tensors: one group of pack-quantized weights of 4 or 8 bits, a scale for a channel "
        "or for groups of inputs; or of symmetric 8-bit weights, float or int, a scale for a channel, for all, or for "
        "a block of float ones, with inputs rounded to the same or, of int ones, left whole"
    )
    try:
        (group,) = asked["config_groups"].values()
        weights, inputs = group["weights"], group.get("input_activations")
        found = (weights["type"], weights["num_bits"], weights["strategy"], weights.get("symmetric", True))
        of_inputs = None if inputs is None else (inputs["type"], inputs["num_bits"], inputs.get("symmetric", True))
        form = str(group.get("format") or asked.get("format"))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"quantization_config cannot be read: {error!r}{described}") from error
    kind, bits, strategy, is_symmetric = found
    if form == "pack-quantized":
        if kind != "int" or bits not in (4, 8) or strategy not in ("group", "channel") or inputs is not None:
            raise UnsupportedModel(f"the checkpoint has packed weights of {found} and inputs of {of_inputs}{described}")
        size = _group_size(int(weights["group_size"])) if strategy == "group" else -1
        has_order = weights.get("actorder") in ("group", True)  # False, "weight", "static": as they stand
        return PackedFormat("compressed", size, bits, False, not is_symmetric, has_order)
    strategies = ("channel", "tensor", "block") if kind == "float" else ("channel", "tensor")
    method = {("float", True): "fp8", ("int", True): "w8a8", ("int", False): "int8"}.get((kind, inputs is not None))
    is_read = bits == 8 and strategy in strategies and is_symmetric and of_inputs in (None, (kind, 8, True))
    if method is None or not is_read:
        raise UnsupportedModel(f"the checkpoint has weights of {found} and inputs of {of_inputs}{described}")
    block = _block(weights["block_structure"]) if strategy == "block" else None
    return PackedFormat(method, bits=8, block=block)
