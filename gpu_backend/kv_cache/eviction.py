# Which cached block is given away first. Least recently used alone keeps nothing long enough for the next turn of a
# conversation when memory is small; two segments keep what came back, and how much each gets follows what is missed.

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

FIRST_SHARE = 0.5  # of the blocks, for those seen once; an estimate that the first misses correct
LEAST_SHARE, MOST_SHARE = 0.02, 0.9
REMEMBERED = 4.0  # evicted keys, as a multiple of the blocks
MARGIN = 0.25  # of the blocks: a key evicted that lately would be here, had its segment been that much larger
SMALLEST = 16  # blocks, below which shares mean nothing


class EvictionOrder:
    """The unused blocks of one cache, by key, in the order in which they are given away.

    A key that was seen once is in one segment; a key that came back, while cached or soon after, in the other. Both are
    least recently used first. The first segment yields while it has more than its share (2Q: Johnson & Shasha 1994,
    "full version", with longer memory of what was evicted). The share moves by one block towards the segment that a
    missed key was lately evicted from (ARC: Megiddo & Modha 2003, section 3; but the two look-backs are of one size, as
    the shadow queues of Cliffhanger are: Cidon et al. 2016, section 4.2). Every move is O(1).
    """

    def __init__(self) -> None:
        self._segments: tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]] = (OrderedDict(), OrderedDict())
        self._evicted = [0, 0]  # keys, by segment
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # segment, and its count of the time
        self._share = FIRST_SHARE
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return chain(*self._segments)

    def add(self, key: bytes, again: bool) -> None:
        """Put a block that fell out of use at the end of its segment; ``again`` if its key ever came back."""
        self._segments[again][key] = None
        self._size += 1

    def remove(self, key: bytes) -> None:
        """Take a block out that is used again, or must not be found any more."""
        once, again = self._segments
        del (once if key in once else again)[key]
        self._size -= 1

    def evict(self, count: int) -> list[bytes]:
        """Choose the blocks to give away, and return their keys."""
        once, again = self._segments
        keys = []
        for _ in range(count):
            index = int(not once or (bool(again) and len(once) <= self._share * self._size))
            key, _ = self._segments[index].popitem(last=False)
            self._size -= 1
            self._evicted[index] += 1
            self._remembered[key] = index, self._evicted[index]
            keys.append(key)
        for _ in range(len(self._remembered) - int(REMEMBERED * max(self._size + count, SMALLEST))):
            self._remembered.popitem(last=False)
        return keys

    def recall(self, key: bytes) -> bool:
        """Whether a key that had to be computed was here not long ago; if lately, its segment was too small."""
        entry = self._remembered.pop(key, None)
        if entry is None:
            return False
        index, count = entry
        size = max(self._size, SMALLEST)
        if self._evicted[index] - count <= MARGIN * size:
            step = 1 / size if index == 0 else -1 / size
            self._share = min(MOST_SHARE, max(LEAST_SHARE, self._share + step))
        return True
