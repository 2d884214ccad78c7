# How a model that reads pictures finds them in its prompt.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, load_vision_config
from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.server.checkpoint.tokens import TextCodec


@dataclass(frozen=True, slots=True)
class Sight:
    """What reads pictures, and the tokens that stand for one: rows of ``image``, each but the last ended by ``line``.

    A chat template writes one ``image`` for each picture.
    """

    vision: VisionConfig
    image: int
    line: int
    end: int
    products_per_token: int  # of the model

    def tokens_of(self, width: int, height: int) -> Sequence[int]:
        """Return the tokens of a picture of so many pixels."""
        rows, columns = self.vision.grid(width, height)
        lines = ([self.image] * columns + [self.line]) * rows
        return [*lines[:-1], self.end]

    def tower_tokens(self, width: int, height: int) -> int:
        """Return how many of the model's tokens have as many matrix products as the tower computes for a picture."""
        return round(self.vision.products(*self.vision.grid(width, height)) / self.products_per_token)


def load_sight(folder: Path, codec: TextCodec) -> Sight | None:
    """Return what a checkpoint says of pictures; None for a model of texts. Raises ``ValueError`` for nonsense."""
    try:
        vision = load_vision_config(folder)
        products = load_model_config(folder).products_per_token if vision is not None else 0
    except UnsupportedModel as exc:
        raise ValueError(str(exc)) from exc
    if vision is None:
        return None
    names = (vision.image_token, vision.break_token, vision.end_token)
    image, line, end = (codec.token_id(name) for name in names)
    if image is None or line is None or end is None:
        raise ValueError(
            f"the tokenizer of {folder} lacks one of {', '.join(names)}, by which the model finds pictures"
        )
    return Sight(vision, image, line, end, products)
