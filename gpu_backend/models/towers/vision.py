# Pictures as vectors: the seam behind which a model's tower lies, and what puts its vectors in the places of tokens.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.models.layers import Decoder
from gpu_backend.step.picture import Picture, PicturePart
from gpu_backend.step.step_tensors import StepTensors

KEPT_BYTES = 256 * 2**20  # of vectors: those of pictures whose prompts are computed in chunks
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


class VisionTower(Protocol):
    """Makes vectors of a picture's pixels, the same whatever other pictures there are."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return vectors (tokens, hidden) of uint8 pixels (height, width, 3); a tower that gives ``num_deep`` layers
        more has theirs behind them: (tokens, (1 + layers) · hidden)."""
        ...


def normal(pixels: Tensor, config: VisionConfig, like: Tensor) -> Tensor:
    """Return colours (3, height, width) as a tower was trained on, of uint8 pixels (height, width, 3)."""
    mean, std = (torch.tensor(each, device=pixels.device).view(3, 1, 1) for each in (config.mean, config.std))
    return ((pixels.permute(2, 0, 1).float() / 255 - mean) / std).to(like.dtype)


class PictureVectors:
    """What a tower made of pictures; that of the last ones is kept, by their digests, for the rest of their prompts."""

    def __init__(self, tower: VisionTower, device: torch.device, kept_bytes: int = KEPT_BYTES) -> None:
        self.tower = tower
        self._device = device
        self._kept_bytes = kept_bytes
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_computed = 0  # pictures

    def put_into(self, tensors: StepTensors, model: Decoder) -> StepTensors:
        """Return the tensors of a step with what goes into the first layer, if pictures are among its tokens."""
        if not any(step.pictures for step in tensors.steps):
            return tensors
        inputs, added = model.embed(tensors.token_ids), tensors.added
        begins = accumulate((len(step.token_ids) for step in tensors.steps), initial=0)
        for step, begin in zip(tensors.steps, begins, strict=False):
            for part in step.pictures:
                rows = torch.tensor(part.rows, device=self._device) + begin
                first, *deep = self._part(part).to(inputs.dtype).split(inputs.shape[1], 1)
                inputs.index_copy_(0, rows, first)
                if deep:
                    added = inputs.new_zeros(len(deep), *inputs.shape) if added is None else added
                    added.index_copy_(1, rows, torch.stack(deep))
        return replace(tensors, inputs=inputs, added=added)

    def forget(self) -> None:
        """Keep no vectors: they are made again where they are asked for."""
        self._vectors.clear()

    def _part(self, part: PicturePart) -> Tensor:
        return self._of(part.picture)[part.first : part.first + len(part.rows)]

    def _of(self, picture: Picture) -> Tensor:
        vectors = self._vectors.pop(picture.digest, None)
        if vectors is None:
            pixels = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8)
            vectors = self.tower(pixels.view(picture.height, picture.width, 3).to(self._device))
            self.num_computed += 1
        self._vectors[picture.digest] = vectors
        while len(self._vectors) > 1 and sum(kept.nbytes for kept in self._vectors.values()) > self._kept_bytes:
            self._vectors.popitem(last=False)
        return vectors
