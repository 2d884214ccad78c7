# What a checkpoint's files say about the pictures that its model reads: the tower that makes vectors of patches, and
# how a picture is cut to size before.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpu_backend.models.config.errors import UnsupportedModel

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's: by channel, of 0 to 1


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """What a picture is in a prompt, as texts of the tokenizer: rows of ``image``, each of which has a vector.

    A chat template writes one ``written`` where all of it is to stand.
    """

    image: str
    written: str
    before: str = ""
    line: str = ""  # after each row but the last
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(ABC):
    """A tower: each patch is a vector, and ``merge`` · ``merge`` neighbouring ones become one token."""

    both_ways: ClassVar[bool] = False  # whether the tokens of a picture look at those behind them, too
    has_axes: ClassVar[bool] = False  # whether the tokens of a picture are turned by their rows and columns
    resampling: ClassVar[str] = "BICUBIC"  # of Pillow's, by which pictures are made as large as they are to be

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels of a side
    merge: int
    activation: str  # one of ACTIVATIONS
    text_size: int  # numbers of a token's vector
    tokens: PictureTokens
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @abstractmethod
    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens that a picture of so many pixels takes."""

    @property
    @abstractmethod
    def most_patches(self) -> int:
        """Patches of the largest picture."""

    @property
    @abstractmethod
    def projector_products(self) -> int:
        """How often it multiplies and adds for a token behind the last layer."""

    @property
    def mlp_matrices(self) -> int:
        """Of a layer."""
        return 3

    @property
    def num_deep(self) -> int:
        """How many first layers of the decoder have vectors of their own added to a picture's tokens behind them."""
        return 0

    @property
    def token_side(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge

    def products(self, rows: int, columns: int) -> int:
        """Return how often it multiplies and adds for a picture of so many tokens: each patch looks at all of them."""
        tokens, size = rows * columns, self.hidden_size
        patches = tokens * self.merge**2
        layer = 4 * size**2 + self.mlp_matrices * size * self.intermediate_size + 2 * size * patches
        return patches * (self.num_layers * layer + 3 * self.patch_size**2 * size) + tokens * self.projector_products


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig(VisionConfig):
    """Pixtral's (Mistral AI 2024, arXiv:2410.07073), which Mistral Small 3.1 and later and Ministral 3 have, too."""

    rope_theta: float
    merges: bool  # patches, after a norm, as a Mistral 3 does
    norm_eps: float  # of that norm
    projector_bias: bool
    projector_activation: str
    longest_side: int  # pixels, to which a larger picture is made smaller

    def grid(self, width: int, height: int) -> tuple[int, int]:
        ratio = max(width / self.longest_side, height / self.longest_side, 1.0)
        rows, columns = ((math.floor(pixels / ratio) - 1) // self.token_side + 1 for pixels in (height, width))
        return max(1, rows), max(1, columns)

    @property
    def projector_products(self) -> int:
        merger = (self.merge * self.hidden_size) ** 2 if self.merges else 0
        return merger + self.text_size * (self.hidden_size + self.text_size)

    @property
    def most_patches(self) -> int:
        return (((self.longest_side - 1) // self.token_side + 1) * self.merge) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipConfig(VisionConfig):
    """SigLIP's (Zhai et al. 2023), as Gemma 3 has it (arXiv:2503.19786): squares of one size, pooled by their mean."""

    both_ways: ClassVar[bool] = True
    resampling: ClassVar[str] = "BILINEAR"

    side: int  # patches of a picture's
    norm_eps: float

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self.side // self.merge, self.side // self.merge

    @property
    def mlp_matrices(self) -> int:
        return 2

    @property
    def projector_products(self) -> int:
        return self.hidden_size * self.text_size

    @property
    def most_patches(self) -> int:
        return self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """Qwen2-VL's (arXiv:2409.12191), Qwen2.5-VL's (arXiv:2502.13923), most of whose layers look within windows, and
    Qwen3-VL's (arXiv:2511.21631), which has learned places and gives the decoder what some of its layers make, too."""

    has_axes: ClassVar[bool] = True

    is_gated: bool  # a 2.5's, with norms that subtract no mean
    window: int  # tokens of its side
    whole: tuple[bool, ...]  # by layer: whether patches see all of their picture
    least_pixels: int
    most_pixels: int
    places: int = 0  # of the side of the square of learned ones, which is stretched over a picture; 0: there are none
    deep: tuple[int, ...] = ()  # layers whose numbers come behind the decoder's first ones, by merger

    @property
    def num_deep(self) -> int:
        return len(self.deep)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        side, pixels = self.token_side, width * height
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.most_pixels:
            ratio = math.sqrt(pixels / self.most_pixels)
            return max(1, math.floor(height / ratio / side)), max(1, math.floor(width / ratio / side))
        if rows * columns * side**2 < self.least_pixels:
            ratio = math.sqrt(self.least_pixels / pixels)
            return math.ceil(height * ratio / side), math.ceil(width * ratio / side)
        return rows, columns

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.is_gated else 2

    @property
    def projector_products(self) -> int:
        wide = self.hidden_size * self.merge**2
        return wide * (wide + self.text_size) * (1 + self.num_deep)

    @property
    def most_patches(self) -> int:
        return self.most_pixels // self.patch_size**2


def vision_config(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> VisionConfig | None:
    """Return what config.json says of the tower, and the files of the ``processor`` of how pictures come to it.

    None: the model reads text alone, or its tower is none that is known here. Raises ``UnsupportedModel``.
    """
    tower, text = config.get("vision_config"), config.get("text_config", config)  # a Qwen's may be the whole
    architecture = next((name for name in config.get("architectures") or () if name in TOWERS), None)
    if architecture is None or not isinstance(tower, Mapping) or not isinstance(text, Mapping):
        return None
    return TOWERS[architecture](config, tower, text, processor or {})


def _pixtral(
    config: Mapping[str, Any], tower: Mapping[str, Any], text: Mapping[str, Any], processor: Mapping[str, Any]
) -> PixtralConfig | None:
    is_known = tower.get("model_type") == "pixtral" and config.get("vision_feature_layer", -1) == -1
    if not is_known or config.get("vision_feature_select_strategy", "full") != "full":
        return None
    merges = config["architectures"][0].startswith("Mistral3")
    rope = tower.get("rope_parameters") or {}
    size = processor.get("size") or {}
    image = str(processor.get("image_token", "[IMG]"))
    found = PixtralConfig(
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
        tokens=PictureTokens(
            image=image,
            written=image,
            line=str(processor.get("image_break_token", "[IMG_BREAK]")),
            after=str(processor.get("image_end_token", "[IMG_END]")),
        ),
    )
    _check_heads(found, 4)
    return found


def _siglip(
    config: Mapping[str, Any], tower: Mapping[str, Any], text: Mapping[str, Any], processor: Mapping[str, Any]
) -> SiglipConfig | None:
    if tower.get("model_type", "siglip_vision_model") != "siglip_vision_model" or processor.get("do_pan_and_scan"):
        return None
    patch = _whole(tower, "patch_size", 16)
    side, tokens = _whole(tower, "image_size", 224) // patch, math.isqrt(_whole(config, "mm_tokens_per_image", 256))
    if tokens > side or side % tokens:
        raise UnsupportedModel(f"a picture has {side} patches a side, which {tokens} tokens a side do not divide")
    found = SiglipConfig(
        hidden_size=_whole(tower, "hidden_size", 768),
        intermediate_size=_whole(tower, "intermediate_size", 3072),
        num_layers=_whole(tower, "num_hidden_layers", 12),
        num_heads=_whole(tower, "num_attention_heads", 12),
        patch_size=patch,
        activation=_activation(tower, "hidden_act", "gelu_pytorch_tanh"),
        text_size=_whole(text, "hidden_size", 2304),
        merge=side // tokens,
        side=side,
        norm_eps=float(tower.get("layer_norm_eps", 1e-6)),
        mean=tuple(processor.get("image_mean") or (0.5, 0.5, 0.5)),
        std=tuple(processor.get("image_std") or (0.5, 0.5, 0.5)),
        tokens=PictureTokens(
            image="<image_soft_token>",
            written="<start_of_image>",
            before="\n\n<start_of_image>",
            after="<end_of_image>\n\n",
        ),
    )
    _check_heads(found, 1)
    return found


def _qwen(
    config: Mapping[str, Any], tower: Mapping[str, Any], text: Mapping[str, Any], processor: Mapping[str, Any]
) -> QwenVisionConfig | None:
    is_gated = config["architectures"][0].startswith("Qwen2_5")
    if _whole(tower, "temporal_patch_size", 2) != 2:
        return None
    size = processor.get("size") or {}
    hidden, layers = _whole(tower, "hidden_size" if is_gated else "embed_dim", 1280), _whole(tower, "depth", 32)
    patch, merge = _whole(tower, "patch_size", 14), _whole(tower, "spatial_merge_size", 2)
    full = tower.get("fullatt_block_indexes", (7, 15, 23, 31))
    inner = _whole(tower, "intermediate_size", 3420) if is_gated else round(hidden * float(tower.get("mlp_ratio", 4)))
    found = QwenVisionConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=_whole(tower, "num_heads", 16),
        patch_size=patch,
        activation=_activation(tower, "hidden_act", "silu" if is_gated else "quick_gelu"),
        text_size=_whole(text, "hidden_size", 8192),
        merge=merge,
        is_gated=is_gated,
        window=max(1, _whole(tower, "window_size", 112) // merge // patch),
        whole=tuple(not is_gated or layer in full for layer in range(layers)),
        least_pixels=_whole(processor, "min_pixels", _whole(size, "shortest_edge", 56 * 56)),
        most_pixels=_whole(processor, "max_pixels", _whole(size, "longest_edge", 28 * 28 * 1280)),
        mean=tuple(processor.get("image_mean") or MEAN),
        std=tuple(processor.get("image_std") or STD),
        tokens=PictureTokens(image="<|image_pad|>", written="<|image_pad|>"),
    )
    _check_heads(found, 4)
    return found


def _qwen_3(
    config: Mapping[str, Any], tower: Mapping[str, Any], text: Mapping[str, Any], processor: Mapping[str, Any]
) -> QwenVisionConfig | None:
    if _whole(tower, "temporal_patch_size", 2) != 2:
        return None
    size = processor.get("size") or {}
    layers, places = _whole(tower, "depth", 27), _whole(tower, "num_position_embeddings", 2304)
    deep, rope = (
        tower.get("deepstack_visual_indexes", (8, 16, 24)),
        text.get("rope_parameters") or text.get("rope_scaling"),
    )
    if not (isinstance(rope, Mapping) and rope.get("mrope_section") and rope.get("mrope_interleaved")):
        raise UnsupportedModel("rope_scaling has no mrope_section, or no mrope_interleaved; pictures need both here")
    if not {*deep} <= {*range(layers)} or len({*deep}) < len(deep):
        raise UnsupportedModel(f"deepstack_visual_indexes is {deep!r}; some of the tower's {layers} layers are needed")
    if math.isqrt(places) ** 2 != places:
        raise UnsupportedModel(f"num_position_embeddings is {places}; a square is needed")
    found = QwenVisionConfig(
        hidden_size=_whole(tower, "hidden_size", 1152),
        intermediate_size=_whole(tower, "intermediate_size", 4304),
        num_layers=layers,
        num_heads=_whole(tower, "num_heads", 16),
        patch_size=_whole(tower, "patch_size", 16),
        activation=_activation(tower, "hidden_act", "gelu_pytorch_tanh"),
        text_size=_whole(text, "hidden_size", 4096),
        merge=_whole(tower, "spatial_merge_size", 2),
        is_gated=False,
        window=1,
        whole=(True,) * layers,
        least_pixels=_whole(size, "shortest_edge", 65536),
        most_pixels=_whole(size, "longest_edge", 16777216),
        places=math.isqrt(places),
        deep=tuple(deep),
        mean=tuple(processor.get("image_mean") or (0.5, 0.5, 0.5)),
        std=tuple(processor.get("image_std") or (0.5, 0.5, 0.5)),
        tokens=PictureTokens(image="<|image_pad|>", written="<|image_pad|>"),
    )
    _check_heads(found, 4)
    return found


# How a model's tower is read from config.json, by its architecture.
TOWERS = {
    "Gemma3ForConditionalGeneration": _siglip,
    "LlavaForConditionalGeneration": _pixtral,
    "Mistral3ForConditionalGeneration": _pixtral,
    "Qwen2VLForConditionalGeneration": _qwen,
    "Qwen2_5_VLForConditionalGeneration": _qwen,
    "Qwen3VLForConditionalGeneration": _qwen_3,
    "Qwen3VLMoeForConditionalGeneration": _qwen_3,
}


def _check_heads(found: VisionConfig, multiple: int) -> None:
    if found.hidden_size % (multiple * found.num_heads):
        raise UnsupportedModel(
            f"vision_config has hidden_size = {found.hidden_size}, of which each of {found.num_heads} heads needs a "
            f"multiple of {multiple}"
        )


def _activation(config: Mapping[str, Any], name: str, default: str = "gelu") -> str:
    value = str(config.get(name, default))
    if value not in ACTIVATIONS:
        raise UnsupportedModel(f"{name} of the vision tower is {value!r}; supported: {', '.join(ACTIVATIONS)}")
    return value


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {name} = {value!r} for pictures; a whole number above 0 is needed")
    return value
