# How a model that reads pictures finds them in its prompt.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_backend.models.config.errors import UnsupportedModel
from gpu_backend.models.config.model import load_model_config, load_vision_config
from gpu_backend.models.config.vision import VisionConfig
from gpu_backend.server.checkpoint.tokens import TextCodec

MOST_TOKENS = 64  # that a text around a picture is encoded to


@dataclass(frozen=True, slots=True)
class Sight:
    """What reads pictures, and the tokens that stand for one: ``before``, rows of ``image`` with ``line`` between them,
    and ``after``.

    A chat template writes one ``written`` for each picture.
    """

    vision: VisionConfig
    codec: TextCodec
    image: int
    written: int
    before: tuple[int, ...]
    line: tuple[int, ...]
    after: tuple[int, ...]
    products_per_token: int  # of the model

    def rows_of(self, width: int, height: int) -> Sequence[int]:
        """Return the tokens of a picture of so many pixels, from the first that has a vector to the last."""
        rows, columns = self.vision.grid(width, height)
        row = (self.image,) * columns
        return (*(row + self.line) * (rows - 1), *row)

    def tower_tokens(self, width: int, height: int) -> int:
        """Return how many of the model's tokens have as many matrix products as the tower computes for a picture."""
        return round(self.vision.products(*self.vision.grid(width, height)) / self.products_per_token)

    def extend(self, prompt: list[int], tokens: Sequence[int]) -> None:
        """Put tokens behind a prompt. Line breaks that meet are encoded together, as in a text they would be."""
        if prompt and tokens:
            both = self.codec.label(prompt[-1]) + self.codec.label(tokens[0])
            if both and not both.strip(b"\n"):
                prompt[-1:], tokens = self.codec.encode(both.decode(), len(both), add_special_tokens=False), tokens[1:]
        prompt += tokens


def load_sight(folder: Path, codec: TextCodec) -> Sight | None:
    """Return what a checkpoint says of pictures; None for a model of texts. Raises ``ValueError`` for nonsense."""
    try:
        vision = load_vision_config(folder)
        products = load_model_config(folder).products_per_token if vision is not None else 0
    except UnsupportedModel as exc:
        raise ValueError(str(exc)) from exc
    return None if vision is None else sight_of(vision, codec, products)


def sight_of(vision: VisionConfig, codec: TextCodec, products_per_token: int) -> Sight:
    """Find the tokens of pictures in a vocabulary. Raises ``ValueError`` where one is missing."""
    tokens = vision.tokens
    names = dict.fromkeys(name for name in (tokens.image, tokens.written, tokens.line, tokens.after.strip()) if name)
    ids = {name: token for name in names if (token := codec.token_id(name)) is not None}
    if len(ids) < len(names):
        raise ValueError(f"the tokenizer lacks one of {', '.join(names)}, by which the model finds pictures")
    before, line, after = (
        codec.encode(text, MOST_TOKENS, add_special_tokens=False) for text in (tokens.before, tokens.line, tokens.after)
    )
    return Sight(vision, codec, ids[tokens.image], ids[tokens.written], before, line, after, products_per_token)
