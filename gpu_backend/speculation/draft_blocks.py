# Blocks of drafts: a sequence gets room for its drafts, and each block knows how far the draft model has come in it.

from __future__ import annotations

from array import array
from dataclasses import replace

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.speculation.draft_value import Offer
from gpu_backend.step.plan import TEXT_WINDOW, UNKNOWN, SequenceStep
from gpu_backend.step.sequence import Sequence


def lengthen_ahead(offer: Offer, length: int, sequence: Sequence, blocks: BlockManager, headroom: int) -> SequenceStep:
    """Let the device draft, as many tokens as have room if all hold, from the text's last ones."""
    step = lengthen(offer, length, sequence, blocks, headroom)
    length = step.num_to_draft
    if not length:
        return step
    known = len(sequence.token_ids)
    first = max(sequence.num_on_device, known - TEXT_WINDOW)
    sequence.num_on_device = known
    sequence.num_computed += length
    sequence.num_awaited += length
    return replace(
        step,
        token_ids=step.token_ids + (UNKNOWN,) * length,
        num_draft_tokens=length,
        num_to_draft=0,
        text=array("i", sequence.token_ids[first:]).tobytes(),
        text_start=first,
    )


def lengthen(offer: Offer, length: int, sequence: Sequence, blocks: BlockManager, headroom: int) -> SequenceStep:
    """Add an offer's first drafts to its step, as many as have room while each running sequence can fill a block."""
    step, table = offer.step, sequence.block_table
    known = step.start + len(step.token_ids)
    while len(table) < blocks.blocks_for(known + length) and blocks.available_to(sequence.tenant) > headroom:
        block = blocks.allocate_block(sequence.tenant)
        assert block is not None
        table = sequence.block_table = (*table, block)
    length = min(length, len(table) * blocks.block_size - known)
    covering = table[: blocks.blocks_for(known + length)]
    if not offer.drafts:
        return replace(step, block_table=covering, num_to_draft=length)
    drafts = offer.drafts[:length]
    return replace(step, token_ids=step.token_ids + drafts, block_table=covering, num_draft_tokens=length)


def num_drafted(blocks: BlockManager, block_table: tuple[int, ...], most: int) -> int:
    """Return how many leading tokens of a table, at most that many, the draft model has computed."""
    drafted = 0
    for block in block_table:
        drafted += blocks.num_drafted[block]
        if blocks.num_drafted[block] < blocks.block_size:
            break
    return min(drafted, most)


def note_drafted(blocks: BlockManager, block_table: tuple[int, ...], start: int, end: int) -> None:
    """Note that the draft model has computed a table's tokens up to ``end``, from ``start`` on anew."""
    size = blocks.block_size
    for index in range(start // size, blocks.blocks_for(end)):
        block = block_table[index]
        blocks.num_drafted[block] = max(blocks.num_drafted[block], min(size, end - index * size))
