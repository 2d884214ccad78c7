# Which beginnings of prompts a replica of our engine has cached, by the marks that gateways gave them and the KV events
# in which it tells of its blocks. Marks are salted by team, so that nothing here is found by another team's prompt.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.serving.prompt_marks import LENGTHS

ON_DEVICE, ON_HOST = 1, 2
WORTH = {
    ON_DEVICE: 1.0,
    ON_HOST: 0.75,
}  # of a cached token beside one that need not be computed: host blocks are copied
MOST_MARKS = 500_000  # of one replica: some 100 MB; a mark stands for 128 tokens or more
MOST_OF_BLOCK = 64  # marks: an engine tells fewer


class Found(NamedTuple):
    """How much of a prompt is cached at a replica, in bytes of it."""

    length: int  # its longest cached beginning
    worth: float  # the same, what lies in host memory counted as less


NOTHING_FOUND = Found(0, 0.0)


class CachedPrompts:
    """The marks of one replica, by where their blocks are. Blocks that have no mark are not kept."""

    def __init__(self) -> None:
        self._media: dict[int, int] = {}  # by mark: a sum of the above
        self._marks: dict[int, list[int]] = {}  # by block, the one first that was marked first

    def __len__(self) -> int:
        return len(self._media)

    def store(self, marked: Iterable[tuple[int, int]], medium: int) -> None:
        """Note marks and the blocks that their beginnings end in, which lie in a memory now."""
        for mark, block in marked:
            own = self._marks.setdefault(block, [])
            if mark not in own:
                if len(own) == MOST_OF_BLOCK:
                    continue
                own.append(mark)
            self._media[mark] = self._media.get(mark, 0) | medium
            while max(len(self._media), len(self._marks)) > MOST_MARKS:
                self._forget(next(iter(self._marks)))

    def remove(self, blocks: Iterable[int], medium: int) -> None:
        """Note that blocks are in a memory no more."""
        for block in blocks:
            own = self._marks.get(block)
            if own is None:
                continue
            for mark in own:
                self._media[mark] = self._media.get(mark, 0) & ~medium
            if not self._media[own[0]]:
                self._forget(block)

    def clear(self) -> None:
        """Forget everything."""
        self._media.clear()
        self._marks.clear()

    def find(self, marks: Sequence[int]) -> Found:
        """Return the longest beginning that is cached, by the marks of a prompt, shortest first."""
        media = self._media
        longest = len(marks)
        while longest and marks[longest - 1] not in media:
            longest -= 1
        if not longest:
            return NOTHING_FOUND
        worth, before = 0.0, 0
        for mark, length in zip(marks[:longest], LENGTHS, strict=False):
            worth += (length - before) * (1.0 if media.get(mark, ON_DEVICE) & ON_DEVICE else WORTH[ON_HOST])
            before = length
        return Found(before, worth)

    def _forget(self, block: int) -> None:
        for mark in self._marks.pop(block):
            self._media.pop(mark, None)
