# What a checkpoint's files say about the pictures that its model reads: the tower that makes vectors of patches, and
# how a picture is cut to size before. The one that is known is Pixtral's (Mistral AI 2024, arXiv:2410.07073), which
# Mistral Small 3.1 and later and Ministral 3 have, too.

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_backend.models.config.errors import UnsupportedModel

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "silu")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's: by channel, of 0 to 1
TOWERS = ("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration")  # what has a Pixtral's, where it says so


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A Pixtral's tower: each patch is a vector, and ``merge`` · ``merge`` neighbouring ones become one token."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a side
    activation: str  # one of ACTIVATIONS
    rope_theta: float
    text_size: int  # numbers of a token's vector
    merges: bool  # patches, after a norm, as a Mistral 3 does
    merge: int
    norm_eps: float  # of that norm
    projector_bias: bool
    projector_activation: str
    longest_side: int  # pixels, to which a larger picture is made smaller
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # What a picture is in a prompt: rows of image tokens, each ended by a break, but the last by an end.
    image_token: str
    break_token: str
    end_token: str

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens that a picture of so many pixels takes."""
        ratio = max(width / self.longest_side, height / self.longest_side, 1.0)
        side = self.patch_size * self.merge
        rows, columns = ((math.floor(pixels / ratio) - 1) // side + 1 for pixels in (height, width))
        return max(1, rows), max(1, columns)

    def products(self, rows: int, columns: int) -> int:
        """Return how often it multiplies and adds for a picture of so many tokens: each patch looks at all of them."""
        tokens, size = rows * columns, self.hidden_size
        patches = tokens * self.merge**2
        layer = 4 * size**2 + 3 * size * self.intermediate_size + 2 * size * patches
        merger = (self.merge * size) ** 2 if self.merges else 0
        projector = merger + self.text_size * (size + self.text_size)
        return patches * (self.num_layers * layer + 3 * self.patch_size**2 * size) + tokens * projector

    @property
    def most_patches(self) -> int:
        """Patches of the largest picture."""
        side = self.patch_size * self.merge
        return (((self.longest_side - 1) // side + 1) * self.merge) ** 2


def vision_config(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> VisionConfig | None:
    """Return what config.json says of the tower, and the files of the ``processor`` of how pictures come to it.

    None: the model reads text alone, or its tower is none that is known here. Raises ``UnsupportedModel``.
    """
    tower, text, processor = config.get("vision_config"), config.get("text_config"), processor or {}
    architecture = next((name for name in config.get("architectures") or () if name in TOWERS), None)
    if architecture is None or not isinstance(tower, Mapping) or not isinstance(text, Mapping):
        return None
    is_known = tower.get("model_type") == "pixtral" and config.get("vision_feature_layer", -1) == -1
    if not is_known or config.get("vision_feature_select_strategy", "full") != "full":
        return None
    merges = architecture.startswith("Mistral3")
    rope = tower.get("rope_parameters") or {}
    size = processor.get("size") or {}
    found = VisionConfig(
        hidden_size=_whole(tower, "hidden_size", 1024),
        intermediate_size=_whole(tower, "intermediate_size", 4096),
        num_layers=_whole(tower, "num_hidden_layers", 24),
        num_heads=_whole(tower, "num_attention_heads", 16),
        patch_size=_whole(tower, "patch_size", 16),
        activation=_activation(tower, "hidden_act"),
        rope_theta=float(rope.get("rope_theta") or tower.get("rope_theta") or 1e4),
        text_size=_whole(text, "hidden_size", 4096),
        merges=merges,
        merge=_whole(config, "spatial_merge_size", 2) if merges else 1,
        norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        projector_bias=bool(config.get("multimodal_projector_bias", not merges)),
        projector_activation=_activation(config, "projector_hidden_act"),
        longest_side=_whole(size, "longest_edge", _whole(tower, "image_size", 1024)),
        mean=tuple(processor.get("image_mean") or MEAN),
        std=tuple(processor.get("image_std") or STD),
        image_token=str(processor.get("image_token", "[IMG]")),
        break_token=str(processor.get("image_break_token", "[IMG_BREAK]")),
        end_token=str(processor.get("image_end_token", "[IMG_END]")),
    )
    if found.hidden_size % (4 * found.num_heads):
        raise UnsupportedModel(
            f"vision_config has hidden_size = {found.hidden_size}, of which each of {found.num_heads} heads needs a "
            "multiple of 4"
        )
    return found


def _activation(config: Mapping[str, Any], name: str) -> str:
    value = str(config.get(name, "gelu"))
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"{name} of the vision tower is {value!r}; supported: {', '.join(ACTIVATIONS)}")
    return value


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {name} = {value!r} for pictures; a whole number above 0 is needed")
    return value
