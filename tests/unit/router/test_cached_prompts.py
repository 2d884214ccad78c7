# What a replica has of a prompt, by the marks in its events.

from __future__ import annotations

from protocol.serving.prompt_marks import LENGTHS
from router import cached_prompts
from router.cached_prompts import MOST_OF_BLOCK, NOTHING_FOUND, ON_DEVICE, ON_HOST, CachedPrompts, Found

MARKS = (11, 12, 13, 14)
BLOCKS = (1, 2, 3, 4)


def index() -> CachedPrompts:
    cached = CachedPrompts()
    cached.store(zip(MARKS, BLOCKS, strict=True), ON_DEVICE)
    return cached


def test_the_longest_cached_beginning_is_found() -> None:
    """Of this prompt, and of one that begins like it; of another, nothing."""
    assert index().find(MARKS) == Found(LENGTHS[3], LENGTHS[3])
    assert index().find((*MARKS[:2], 98, 99)) == Found(LENGTHS[1], LENGTHS[1])
    assert index().find((97, 98)) == index().find(()) == NOTHING_FOUND


def test_what_lies_in_host_memory_is_worth_less() -> None:
    """A block that moves there is found still, at three quarters; once it is nowhere, its beginning ends before it."""
    cached = index()
    cached.remove(BLOCKS[2:], ON_DEVICE)
    gone = cached.find(MARKS)
    cached.store(zip(MARKS[2:], BLOCKS[2:], strict=True), ON_HOST)

    assert gone == Found(LENGTHS[1], LENGTHS[1])
    assert cached.find(MARKS) == Found(LENGTHS[3], LENGTHS[1] + 0.75 * (LENGTHS[3] - LENGTHS[1]))


def test_a_block_in_both_memories_is_lost_with_the_second() -> None:
    """Whichever that is; a block without a mark is passed over."""
    cached = index()
    cached.store([(MARKS[3], BLOCKS[3])], ON_HOST)
    cached.remove([BLOCKS[3], 99], ON_DEVICE)
    kept = cached.find(MARKS).length
    cached.remove([BLOCKS[3]], ON_HOST)

    assert (kept, cached.find(MARKS).length) == (LENGTHS[3], LENGTHS[2])
    cached.clear()
    assert cached.find(MARKS) == NOTHING_FOUND and len(cached) == 0


def test_memory_is_bounded(monkeypatch) -> None:
    """What was marked first is forgotten first."""
    monkeypatch.setattr(cached_prompts, "MOST_MARKS", 3)
    cached = index()

    assert len(cached) == 3
    assert cached.find(MARKS[:1]) == NOTHING_FOUND and cached.find(MARKS).length == LENGTHS[3]


def test_memory_is_bounded_by_what_is_told_of_one_mark_or_block(monkeypatch) -> None:
    """A replica may say that one beginning ends in any number of blocks, and one block any number of beginnings."""
    monkeypatch.setattr(cached_prompts, "MOST_MARKS", 100)
    cached = CachedPrompts()
    cached.store([(7, block) for block in range(1000)], ON_DEVICE)
    blocks = len(cached._marks)
    cached.store([(mark, 2000) for mark in range(1000)], ON_DEVICE)

    assert blocks == 100
    assert len(cached) <= 1 + MOST_OF_BLOCK
