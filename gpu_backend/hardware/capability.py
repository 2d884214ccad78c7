# What kernels need of a GPU: float8, and shared memory. Known from compiling them for cards that were not there.

from __future__ import annotations

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import ModelConfig
from gpu_backend.step.config import EngineConfig

FLOAT8_FROM = (8, 9)  # Triton compiles no float8 (e4m3) for a compute capability below
LITTLE_SHARED = ((8, 6), (8, 9), (12, 0))  # 99 KiB of shared memory a program: A10, L4, L40S, RTX
LATENT_KIB = 112  # that a tile of attention over latent vectors takes


def check_capability(
    config: EngineConfig, model: ModelConfig, capability: tuple[int, int], draft: ModelConfig | None = None
) -> None:
    """Raise ``UnsupportedModel`` where kernels, the ``draft`` model's too, cannot run on a GPU of that capability."""
    named = f"this GPU has compute capability {capability[0]}.{capability[1]}"
    asked = (
        (
            "quantization",
            config.checkpoint.quantization,
            "leave it out" if model.experts else "take int8, or leave it out",
        ),
        ("kv_cache_dtype", config.cache.kv_cache_dtype, "leave it out"),
        ("the checkpoint's weights", model.packed and model.packed.method, "take its checkpoint of 16 bits, or of 4"),
        (
            "the weights of speculative_model",
            draft and draft.packed and draft.packed.method,
            "take its checkpoint of 16 bits, or of 4",
        ),
    )
    for name, value, remedy in asked:
        if value == "fp8" and not has_float8(capability):
            raise UnsupportedModel(
                f"{named}, and float8 needs 8.9 or more (L4, L40S, H100): {name} cannot be fp8; {remedy}"
            )
    is_latent = model.latent is not None or (draft is not None and draft.latent is not None)
    if is_latent and not has_latent_attention(capability):
        raise UnsupportedModel(
            f"{named}, whose programs have 99 KiB of shared memory; attention over latent vectors takes {LATENT_KIB}"
        )


def has_float8(capability: tuple[int, int]) -> bool:
    """Whether kernels with float8 can be compiled for it."""
    return capability >= FLOAT8_FROM


def has_latent_attention(capability: tuple[int, int]) -> bool:
    """Whether a tile of attention over latent vectors fits its shared memory."""
    return capability not in LITTLE_SHARED
