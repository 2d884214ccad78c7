# The block table of one sequence: it is filled at admission, grown by decodes, named for others to find, copied to host
# memory and back, and let go. Names of full blocks are hash chains over tokens, salted by tenant, so that no tenant
# finds another's; but for beginnings that the operator declares to be shared by all.

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from hashlib import blake2b

from gpu_backend.kv_cache.block_log import BlockLog
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.step.messages import Generate
from gpu_backend.step.picture import Picture, names_of
from gpu_backend.step.sequence import Sequence

SHARED_SALT = b"shared by all"


class BlockTables:
    """Moves blocks between ``blocks`` and sequences. What has no room is not done, and says so.

    Without ``prefix_caching`` only replies to the same request find each other's blocks; none does where a model
    ``keeps_states``, which end with their sequences.
    """

    def __init__(self, blocks: BlockManager, prefix_caching: bool, keeps_states: bool = False) -> None:
        self._blocks = blocks
        self._prefix_caching = prefix_caching
        self._keeps_states = keeps_states
        # Of no sequence: those that are held for other engines, by lease, or that come from such, by ticket.
        self.apart: dict[str | int, tuple[int, ...]] = {}
        self.prompt_tokens_seen = 0
        self.prompt_tokens_found = 0  # of them, those that were cached at the first admission

    def fill(self, sequence: Sequence, headroom: int) -> bool:
        """Give a sequence blocks for its tokens, as many as possible with what they need in them.

        So many blocks are left as ``headroom`` says.
        """
        if sequence.swapped:
            return self._swap_in(sequence, headroom)
        # The last token is always computed, so that there are logits to sample from.
        findable = (len(sequence.token_ids) - 1) // self._blocks.block_size
        if sequence.unscored_from is not None:  # what comes out of the cache has no logits
            findable = min(findable, sequence.unscored_from // self._blocks.block_size)
        if not sequence.pools:
            self._blocks.note_request(sequence.tenant, sequence.request.weight)
            self.extend_hashes(sequence)
        needed = self._blocks.blocks_for(len(sequence.token_ids))
        allocation = self._blocks.allocate_table(sequence.block_hashes[:findable], needed, headroom, sequence.tenant)
        if allocation is None:
            return False
        sequence.block_table = allocation.block_table
        sequence.num_computed = allocation.num_cached * self._blocks.block_size
        sequence.num_published = allocation.num_cached
        if self._blocks.log is not None and sequence.prompt_marks:
            self._mark(self._blocks.log, sequence, 0, allocation.num_cached)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            self.prompt_tokens_seen += sequence.num_prompt
            self.prompt_tokens_found += sequence.cached_tokens
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Give a sequence one block more."""
        block = self._blocks.allocate_block(sequence.request.tenant)
        if block is None:
            return False
        sequence.block_table = (*sequence.block_table, block)
        return True

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks that only drafts needed."""
        needed = self._blocks.blocks_for(max(len(sequence.token_ids), sequence.num_computed))
        if len(sequence.block_table) > needed:
            self._blocks.release(sequence.block_table[needed:])
            sequence.block_table = sequence.block_table[:needed]

    def publish(self, sequence: Sequence, end: int) -> None:
        """Let others find the full blocks of a sequence whose first ``end`` tokens are computed."""
        full = end // self._blocks.block_size
        if self._keeps_states:
            return
        self.extend_hashes(sequence)
        log = self._blocks.log
        if log is not None:
            for index in range(sequence.num_published, full):
                self._describe(log, sequence, index)
            if sequence.prompt_marks:
                self._mark(log, sequence, sequence.num_published, full)
        for index in range(sequence.num_published, full):
            self._blocks.publish(sequence.block_table[index], sequence.block_hashes[index], sequence.request.tenant)
        sequence.num_published = full

    def publish_pulled(self, sequence: Sequence, ticket: int, first: int, end: int) -> None:
        """Let others find the blocks from ``first`` to before ``end``, which came from another engine."""
        table, log = self.apart[ticket], self._blocks.log
        for index in range(first, end):
            if log is not None:
                self._describe(log, sequence, index)
            self._blocks.publish(table[index], sequence.block_hashes[index], sequence.tenant)

    def name_waiting(self, sequence: Sequence) -> None:
        """Name the blocks of a prompt that waits: it is looked up in the cache again and again."""
        if self._prefix_caching and not sequence.pools:
            self.extend_hashes(sequence)

    def extend_hashes(self, sequence: Sequence) -> None:
        """Name a sequence's full blocks: none finds those of another tenant, but declared beginnings, or adapter."""
        blocks, salt = self._blocks, self.salt_of(sequence)
        shared = blocks.shared if sequence.request.adapter is None else frozenset()
        pictures = sequence.pictures
        extend_hashes(sequence.block_hashes, sequence.token_ids, blocks.block_size, salt, shared, pictures)

    def salt_of(self, sequence: Sequence) -> bytes:
        """Return what the hashes of a sequence's blocks are salted with."""
        request = sequence.request
        owner = f"tenant {request.tenant}" if self._prefix_caching else f"request {request.request_id}"
        if isinstance(request, Generate) and request.cache_salt is not None:
            owner = f"salt {len(request.cache_salt)} {request.cache_salt} {owner}"
        return _salt_of(owner if request.adapter is None else f"adapter {request.adapter.number} {owner}")

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away, wherever they are, and with them what was computed."""
        self._blocks.release(sequence.block_table)
        self._blocks.host.free(sequence.swapped)
        sequence.swapped = ()
        sequence.restart()

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy what is computed to host memory, and release the blocks."""
        table, kept = sequence.block_table, self._blocks.blocks_for(sequence.num_computed)
        swapped = self._blocks.swap_out(table[:kept], sequence.tenant)
        if swapped is None:
            return False
        self._blocks.release(table[kept:])
        sequence.swapped, sequence.block_table, sequence.num_published = swapped, (), 0
        return True

    def _describe(self, log: BlockLog, sequence: Sequence, index: int) -> None:
        """Say what a block holds, and whose it is where those before it are shared by all."""
        hashes, size, shared = sequence.block_hashes, self._blocks.block_size, self._blocks.shared
        parent = hashes[index - 1] if index else None
        begins = hashes[index] not in shared and (parent is None or parent in shared)
        tokens = sequence.token_ids[index * size : (index + 1) * size]
        owner = self.salt_of(sequence).hex() if begins else None
        log.describe(hashes[index], parent, tokens, owner, sequence.request.adapter)

    def _mark(self, log: BlockLog, sequence: Sequence, start: int, end: int) -> None:
        """Say which marks of the prompt's beginnings end in its blocks from ``start`` to before ``end``."""
        size = self._blocks.block_size
        for mark, tokens in sequence.prompt_marks:
            if start <= (index := tokens // size - 1) < end:
                log.mark(sequence.block_hashes[index], (mark,))

    def _swap_in(self, sequence: Sequence, headroom: int) -> bool:
        fresh = self._blocks.blocks_for(len(sequence.token_ids)) - len(sequence.swapped)
        table = self._blocks.swap_in(sequence.swapped, headroom, sequence.tenant, fresh)
        if table is None:
            return False
        sequence.block_table, sequence.swapped = table, ()
        return True


@lru_cache(maxsize=1024)  # asked for with every block that is filled
def _salt_of(owner: str) -> bytes:
    return blake2b(owner.encode(), digest_size=16, person=b"tollgate kv root").digest()


def extend_hashes(
    hashes: list[bytes],
    token_ids: SequenceOf[int],
    block_size: int,
    salt: bytes,
    shared: frozenset[bytes] = frozenset(),
    pictures: SequenceOf[Picture] = (),
) -> None:
    """Append to ``hashes`` the hash of each full block of ``token_ids`` that has none yet.

    A block's hash covers the salt, every token up to its end, and the ``pictures`` that these stand for. It is a
    cryptographic one (BLAKE2b, 128 bits): with a forged collision a tenant could read another's prompt. Leading
    blocks whose hash under the shared salt is in ``shared`` go by that one; the salt comes in with the first block that
    is not.
    """
    done = len(hashes)
    is_shared = not done or hashes[-1] in shared
    for start in range(done * block_size, len(token_ids) // block_size * block_size, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        if pictures:
            tokens += names_of(pictures, start, start + block_size)
        before = hashes[-1] if hashes else b""
        if is_shared and shared:
            block_hash = _hash(before or SHARED_SALT, tokens)
            if block_hash in shared:
                hashes.append(block_hash)
                continue
        hashes.append(_hash(before + salt if is_shared else before, tokens))
        is_shared = False


def shared_hashes(prefixes: Iterable[SequenceOf[int]], block_size: int) -> frozenset[bytes]:
    """Return the hashes of the full blocks of prompts' beginnings that all tenants may share."""
    found: set[bytes] = set()
    for token_ids in prefixes:
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, block_size, SHARED_SALT)
        found.update(hashes)
    return frozenset(found)


def _hash(before: bytes, tokens: bytes) -> bytes:
    digest = blake2b(before, digest_size=16)
    digest.update(tokens)
    return digest.digest()
