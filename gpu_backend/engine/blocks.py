# Who holds which block of the KV cache. Blocks are counted references; full blocks can be found again by the hash of
# everything before and in them, so that prompts with a common beginning share its blocks. Nothing here touches a
# device.

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Allocation:
    """A new block table; the first ``num_cached`` blocks already hold their tokens' keys and values."""

    block_table: tuple[int, ...]
    num_cached: int


class BlockManager:
    """Hands out ``num_blocks`` blocks, counts who uses them, and remembers what full ones hold.

    A block is in one of three states: in use (referenced), evictable (unused, but found by its hash until someone needs
    the room) or free. Evictable blocks are given away in the order in which they were last used.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_in_use(self) -> int:
        """Blocks that some sequence references."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate_table(self, hashes: SequenceOf[bytes], num_blocks: int, headroom: int = 0) -> Allocation | None:
        """Make a table of ``num_blocks``, its beginning found by ``hashes`` where possible; None if there is no room.

        There is room if ``headroom`` blocks would still be available afterwards.
        """
        found = self._find(hashes[:num_blocks])
        resting = sum(self._references[block] == 0 for block in found)
        if self.num_available - resting - (num_blocks - len(found)) < headroom:
            return None
        for block in found:
            self._hold(block)
        fresh = [self._take() for _ in range(num_blocks - len(found))]
        return Allocation((*found, *fresh), len(found))

    def allocate_block(self) -> int | None:
        """Hand out one more block; None if all are in use."""
        return self._take() if self.num_available else None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let others find a full, computed block by its hash; of two with equal content the first stays known."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, block_table: SequenceOf[int]) -> None:
        """Give a table's references back. Its end is evicted before its beginning, which more prompts share."""
        for block in reversed(block_table):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than it was taken"
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def forget(self, block_table: SequenceOf[int]) -> None:
        """Let nobody find these blocks again: what they hold cannot be trusted. Call it before ``release``."""
        for block in block_table:
            if block in self._hash_of:
                del self._block_of[self._hash_of.pop(block)]

    def check(self, block_tables: Iterable[SequenceOf[int]]) -> None:
        """Assert that the books are in order, and that exactly these tables are out."""
        held = Counter(block for table in block_tables for block in table)
        assert all(self._references[block] == held[block] for block in range(self.num_blocks)), "references differ"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable and not (free | evictable) & set(held), "a block is in two states"
        assert len(free) + len(evictable) + len(held) == self.num_blocks, "a block is lost"
        assert evictable <= set(self._hash_of) and not free & set(self._hash_of), "only findable blocks are evictable"
        assert {block: key for key, block in self._block_of.items()} == self._hash_of, "the two indexes differ"

    def _find(self, hashes: SequenceOf[bytes]) -> list[int]:
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._evictable.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] = 1
        return block


def extend_hashes(hashes: list[bytes], token_ids: SequenceOf[int], block_size: int, salt: bytes) -> None:
    """Append to ``hashes`` the hash of each full block of ``token_ids`` that has none yet.

    A block's hash covers the salt and every token up to its end. It is a cryptographic one (BLAKE2b, 128 bits): whoever
    could forge a collision would read another tenant's prompt.
    """
    for start in range(len(hashes) * block_size, len(token_ids) // block_size * block_size, block_size):
        digest = blake2b(hashes[-1] if hashes else salt, digest_size=16)
        digest.update(array("q", token_ids[start : start + block_size]).tobytes())
        hashes.append(digest.digest())
