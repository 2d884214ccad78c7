# What the shipped model's card says of thresholds: on rows that were not fitted, how many calls each sends to the large
# model, and how often the answer is right. The card is where these figures stand, so it is what is read.

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from msgspec import Struct

CARD = "MODEL_CARD.md"
HEADING = "| rows | quality asked | calls to the large model | share right | small alone | large alone |"
LINE = re.compile(r"\| (?P<rows>[^|]+) \| ([\d.]+) \| (\d+)% \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|")
ROWS = "another pair never fitted"  # a pair of models that no fit has seen: what a team's own are, too


class CardPoint(Struct, frozen=True):
    """What asking for a quality brought on the card's rows; shares from 0 to 1."""

    quality: float
    share_large: float  # of calls that went to the large model
    share_right: float


@cache
def card_curve() -> tuple[CardPoint, ...]:
    """Return the card's thresholds, rising, from all calls at the small model to all at the large one."""
    said = (files("router") / "complexity" / "artifacts" / CARD).read_text().partition(HEADING)[2]
    table = said.partition("\n\n")[0]
    lines = [[float(cell) for cell in found.groups()[1:]] for found in LINE.finditer(table) if found["rows"] == ROWS]
    small, large = lines[0][3:]
    points = [CardPoint(quality, share / 100, right) for quality, share, right, *_ in lines]
    return CardPoint(0.0, 0.0, small), *points, CardPoint(1.0, 1.0, large)
