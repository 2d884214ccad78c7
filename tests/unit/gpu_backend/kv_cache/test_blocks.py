# The KV blocks' books: references, hashes and eviction.

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.kv_cache.block_tables import extend_hashes
from gpu_backend.kv_cache.blocks import BlockManager

BLOCK = 4


def hashes_of(tokens: list[int], salt: bytes = b"a") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, BLOCK, salt)
    return hashes


def test_full_blocks_are_found_again_by_their_hash() -> None:
    """A released table's published blocks serve the next table with the same beginning."""
    blocks = BlockManager(8, BLOCK)
    hashes = hashes_of(list(range(8)))
    first = blocks.allocate_table(hashes, 3)
    assert first is not None
    for block, key in zip(first.block_table, hashes, strict=False):
        blocks.publish(block, key)
    blocks.release(first.block_table)

    second = blocks.allocate_table(hashes, 3)

    assert second is not None
    assert second.num_cached == 2
    assert second.block_table[:2] == first.block_table[:2]
    blocks.check([second.block_table])


def test_hashes_differ_when_anything_before_differs() -> None:
    """A block's hash covers every token before it, and the salt."""
    plain = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])

    assert hashes_of([9, 2, 3, 4, 5, 6, 7, 8])[1] != plain[1]
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8], b"b")[0] != plain[0]
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9]) == plain


def test_table_needs_its_headroom() -> None:
    """An allocation that would leave less than the headroom is declined, and takes nothing."""
    blocks = BlockManager(4, BLOCK)

    assert blocks.allocate_table([], 3, headroom=2) is None
    assert blocks.num_available == 4
    assert blocks.allocate_table([], 3, headroom=1) is not None


def test_cached_blocks_count_against_the_room_they_take() -> None:
    """A cached block that is revived is no longer available: it must not be counted as both found and free."""
    blocks = BlockManager(3, BLOCK)
    hashes = hashes_of(list(range(8)))
    table = blocks.allocate_table([], 2)
    assert table is not None
    for block, key in zip(table.block_table, hashes, strict=True):
        blocks.publish(block, key)
    blocks.release(table.block_table)

    assert blocks.allocate_table(hashes, 4) is None
    assert blocks.allocate_table(hashes, 3) is not None


def test_least_recently_used_block_is_evicted_first() -> None:
    """Room comes from the cached blocks whose last use is longest ago, a table's end before its beginning."""
    blocks = BlockManager(2, BLOCK)
    hashes = hashes_of(list(range(8)))
    table = blocks.allocate_table([], 2)
    assert table is not None
    for block, key in zip(table.block_table, hashes, strict=True):
        blocks.publish(block, key)
    blocks.release(table.block_table)

    assert blocks.allocate_block() == table.block_table[1]
    found = blocks.allocate_table(hashes, 1)
    assert found is not None and found.num_cached == 1


def test_forgotten_blocks_are_never_found() -> None:
    """What a failed sequence computed is shared with no other."""
    blocks = BlockManager(4, BLOCK)
    hashes = hashes_of([1, 2, 3, 4])
    table = blocks.allocate_table([], 1)
    assert table is not None
    blocks.publish(table.block_table[0], hashes[0])

    blocks.forget(table.block_table)
    blocks.release(table.block_table)

    again = blocks.allocate_table(hashes, 1)
    assert again is not None and again.num_cached == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_books_balance_after_every_move(seed: int, num_blocks: int) -> None:
    """Whatever is allocated, published, forgotten and released, every block stays in exactly one state."""
    blocks = BlockManager(num_blocks, BLOCK)
    held: list[tuple[list[int], list[bytes]]] = []
    dice = Random(seed)  # lists that are drawn move by move have six of them on average: nothing is found in so few
    for _ in range(80):
        kind, choice = dice.choice((0, 0, 1, 2, 2, 3, 4)), dice.randrange(2**16)
        table, hashes = held[choice % len(held)] if held else ([], [])
        if kind == 0:
            wanted = hashes_of([choice % 3] * (choice % 5) * BLOCK)
            allocation = blocks.allocate_table(wanted, len(wanted) + choice % 2, choice % 3)
            if allocation is not None:
                held.append((list(allocation.block_table), wanted))
        elif kind == 1 and held:
            block = blocks.allocate_block()
            if block is not None:
                table.append(block)
        elif kind == 2:
            for block, key in zip(table, hashes, strict=False):
                blocks.publish(block, key)
        elif kind == 3:
            blocks.forget(table)
        elif kind == 4 and held:
            held.pop(choice % len(held))
            blocks.release(table)

        blocks.check(table for table, _ in held)
        assert blocks.num_in_use == len({block for table, _ in held for block in table})
