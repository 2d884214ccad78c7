# The classifier that ships, as gateways have it: with the sentence encoder where it is installed, and without.

from __future__ import annotations

from functools import cache

from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.reading.encoder import is_installed, load_encoder

WAYS = ("words alone", "with the encoder") if is_installed() else ("words alone",)
_encoder = cache(load_encoder)
_classifier = cache(Classifier.load)


class Judge:
    """What scores texts in one of ``WAYS``."""

    def __init__(self, way: str) -> None:
        self._encode = None if way == "words alone" else _encoder()

    def score(self, text: str) -> dict[str, float]:
        """Return the score of every category, 0..1."""
        return _classifier().score(text, self._encode)
