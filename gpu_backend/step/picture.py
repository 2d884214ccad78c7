# Pictures in a prompt: what the front made of them, and where in the prompt their vectors stand.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: pixels as the model's tower reads them, and the tokens of the prompt that stand for it.

    ``digest`` names the pixels, and whose they are: blocks of the KV cache go by it, and what the tower made of them.
    """

    start: int  # where in the prompt its tokens begin
    num_tokens: int
    token_id: int  # the placeholder: each of these tokens has a vector of the tower's, in their order
    digest: bytes
    width: int
    height: int
    pixels: bytes = field(repr=False)  # rows of RGB
    tower_tokens: int = 0  # of the model, whose matrix products are as many as those of its tower
    # Where its tokens turn by their rows and columns: how many of these there are, and by how many positions what comes
    # before it in the prompt has moved it forward. 0 columns: they turn by their places, as those of texts do.
    columns: int = 0
    moved: int = 0
    both_ways: bool = False  # its tokens look at each other, all of them: one step computes what is left of them

    @property
    def end(self) -> int:
        """Where in the prompt its tokens end."""
        return self.start + self.num_tokens

    @property
    def moves(self) -> int:
        """By how many positions what comes behind it moves forward: it takes as many as its longer side."""
        return self.moved + self.num_tokens - max(self.columns, self.num_tokens // self.columns) if self.columns else 0


@dataclass(frozen=True, slots=True)
class PicturePart:
    """What a step computes of a picture: vectors from ``first`` on, at these ``rows`` among its sequence's tokens."""

    picture: Picture
    first: int
    rows: tuple[int, ...]


def parts_of(pictures: Iterable[Picture], prompt: Sequence[int], start: int, end: int) -> tuple[PicturePart, ...]:
    """Return what of the pictures lies at the prompt's positions from ``start`` to before ``end``."""
    parts = []
    for picture in pictures:
        first, last = max(start, picture.start), min(end, picture.end)
        rows = tuple([i - start for i in range(first, last) if prompt[i] == picture.token_id])
        if rows:
            parts.append(PicturePart(picture, prompt[picture.start : first].count(picture.token_id), rows))
    return tuple(parts)


def uncut(pictures: Iterable[Picture], start: int, count: int) -> int:
    """Return how many of ``count`` tokens from position ``start`` on a step can compute, cutting no picture whose
    tokens look at each other."""
    end = start + count
    for picture in pictures:
        if picture.both_ways and picture.start < end < picture.end:
            return max(0, picture.start - start)
    return count


def with_whole(pictures: Iterable[Picture], start: int, count: int) -> int:
    """Return how many tokens these are with the rest of a picture that ``uncut`` would leave out."""
    end = start + count
    cut = (each.end for each in pictures if each.both_ways and each.start < end < each.end)
    return next(cut, end) - start


def tower_tokens(pictures: Iterable[Picture], start: int, end: int) -> int:
    """Return what the tower takes, in tokens, in a step from position ``start`` to before ``end``: all of each picture
    that begins there."""
    return sum(picture.tower_tokens for picture in pictures if start <= picture.start < end)


def names_of(pictures: Iterable[Picture], start: int, end: int) -> bytes:
    """Return what tells prompts apart whose tokens from ``start`` to before ``end`` stand for other pictures."""
    found = [picture for picture in pictures if picture.start < end and picture.end > start]
    return b"".join([picture.digest + picture.start.to_bytes(8) for picture in found])
