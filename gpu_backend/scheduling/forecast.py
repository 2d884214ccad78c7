# How much room running replies will take before they end, judged by the replies that ended lately. Admission goes by
# the highest point of that forecast rather than by what is free now, so that none is preempted later (Past-Future
# scheduling: Gong et al., ASPLOS 2025).

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from gpu_backend.step.sequence import Sequence

PRIOR = (16, 64, 128, 256, 512, 1024)  # lengths that stand for replies until real ones have ended
WINDOW = 1000  # ended replies that are remembered
GOLDEN = 0.6180339887498949  # whose multiples spread evenly between 0 and 1


class LengthForecast:
    """Knows how long replies got, and from it how long running ones will."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(PRIOR)
        self._lengths = sorted(PRIOR)

    def learn(self, length: int) -> None:
        """Take note of a reply that ended after ``length`` tokens."""
        self._recent.append(length)
        insort(self._lengths, length)
        if len(self._recent) > WINDOW:
            del self._lengths[bisect_right(self._lengths, self._recent.popleft()) - 1]

    @property
    def longest(self) -> int:
        """The longest reply that is remembered."""
        return self._lengths[-1]

    @property
    def mean(self) -> int:
        """The mean length of the remembered replies."""
        return sum(self._lengths) // len(self._lengths)

    def remaining(self, generated: int, lot: float) -> int:
        """Say how many more tokens a reply gets that has ``generated``.

        ``lot``, between 0 and 1, says how lucky it is among the remembered ones that got there: were all given the
        mean, all would seem to end at once. One that is longer than all of them is taken to be half done.
        """
        index = bisect_right(self._lengths, generated)
        if index == len(self._lengths):
            return max(generated, 1)
        return self._lengths[index + int(lot * (len(self._lengths) - index))] - generated


def remaining_tokens(sequence: Sequence, forecast: LengthForecast) -> int:
    """Say how many tokens a sequence will still add to the KV cache."""
    most = max(0, sequence.sampling.max_tokens - sequence.num_generated)
    if sequence.sampling.ignore_eos:
        return most
    return min(most, forecast.remaining(sequence.num_generated, sequence.sequence_id * GOLDEN % 1))


def highest_use(replies: Iterable[tuple[int, int]], in_use: float, block_size: int) -> float:
    """Return the most blocks that will be in use at once, from now until all replies have ended.

    A reply is (blocks it holds, tokens to come); all of them grow by a token a step. ``in_use`` is what is in use now,
    less than the sum of all tables where replies share blocks.
    """
    waiting = sorted(replies, key=lambda reply: reply[1])
    held = sum(blocks for blocks, _ in waiting)
    own = min(1.0, in_use / held) if held else 0.0
    highest, gone = in_use, 0.0
    for ended, (blocks, tokens) in enumerate(waiting):
        grown = (len(waiting) - ended) * (tokens / block_size)  # since now, by those that still run
        highest = max(highest, in_use - gone + grown)
        gone += blocks * own
    return highest
