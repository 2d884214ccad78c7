# Drafts on offer for a step, those that the replies' own texts suggest or those that the draft model or the device can
# make; and the blocks that the chosen ones get. Each block knows how far the draft model has come in it.

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.speculation import prompt_lookup
from gpu_backend.speculation.economics import Offer
from gpu_backend.step.plan import TEXT_WINDOW, UNKNOWN, SequenceStep
from gpu_backend.step.sequence import Sequence

MOST_DRAFTED = 64  # sequences asked for drafts in one step

DraftSource = Callable[[Sequence, int], tuple[int, ...]]  # drafts for a sequence, at most as many as it is told
MostFor = Callable[[Sequence], int]  # drafts that a sequence may get in this step


def text_offers(
    decodes: Iterable[SequenceStep], running: Mapping[int, Sequence], most_for: MostFor, draft_source: DraftSource
) -> list[Offer]:
    """Ask for drafts: as many as may all hold, with room for one more token after the last."""
    offers: list[Offer] = []
    for step in decodes:
        sequence = running[step.sequence_id]
        if not (most := most_for(sequence)):
            continue
        drafts = _cut(sequence, draft_source(sequence, most))
        if drafts:
            offers.append(Offer(step, len(drafts), _trust(sequence), drafts))
        if len(offers) == MOST_DRAFTED:
            break
    return offers


def device_offers(decodes: Iterable[SequenceStep], running: Mapping[int, Sequence], most_for: MostFor) -> list[Offer]:
    """Offer what the device can draft, or will: it fills up what its text does not suggest."""
    asked = [(step, running[step.sequence_id]) for step in decodes]
    offers = [Offer(step, most, _trust(sequence)) for step, sequence in asked if (most := most_for(sequence))]
    return offers[:MOST_DRAFTED]


def draft_offers(
    decodes: Iterable[SequenceStep],
    running: Mapping[int, Sequence],
    blocks: BlockManager,
    most_for: MostFor,
    most: int,
    lag: int = 0,
) -> tuple[list[Offer], dict[int, SequenceStep], int]:
    """Offer what the draft model can draft, once it has computed what it lacks: ``most`` such tokens in this step.

    A head's tokens stand ``lag`` places before their own: it reads what the model made of those there.
    Returns the offers, the steps of those that lack more, with a part of it, and how many tokens are lacking in both.
    """
    offers: list[Offer] = []
    changed: dict[int, SequenceStep] = {}
    lacking = 0
    for step in decodes:
        sequence = running[step.sequence_id]
        if step.start < lag or not (length := most_for(sequence)):
            continue
        start = num_drafted(blocks, sequence.block_table, step.start - lag, lag)
        missing = step.start - lag - start
        if missing <= most:
            known = tuple(sequence.token_ids[start + lag :])
            offers.append(Offer(replace(step, draft_ids=known, draft_start=start), length, _trust(sequence)))
        elif most:
            missing = most
            part = tuple(sequence.token_ids[start + lag : start + lag + most])
            changed[step.sequence_id] = replace(step, draft_ids=part, draft_start=start)
        else:
            continue
        most -= missing
        lacking += missing
        if len(offers) == MOST_DRAFTED:
            break
    return offers, changed, lacking


def draft_from_text(sequence: Sequence, count: int) -> tuple[int, ...]:
    """Draft a sequence's next tokens from its own text."""
    record = sequence.draft_record
    assert record is not None
    record.text += array("i", sequence.token_ids[len(record.text) // prompt_lookup.TOKEN :]).tobytes()
    return prompt_lookup.find_drafts(record.text, count)


def _trust(sequence: Sequence) -> float:
    assert sequence.draft_record is not None
    return sequence.draft_record.trust


def _cut(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the first draft that ends the reply, or that it cannot have, and all after it."""
    for index, token in enumerate(drafts):
        if token in sequence.sampling.stop_token_ids:
            drafts = drafts[:index]
            break
    if drafts and sequence.constraint is not None:
        drafts = drafts[: sequence.constraint.num_allowed(drafts)]
    return drafts


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


def num_drafted(blocks: BlockManager, block_table: tuple[int, ...], most: int, lag: int = 0) -> int:
    """Return how many leading tokens of a table, at most that many, the draft model has computed.

    The last places of a block, as many as a head's tokens ``lag``, are of the block behind it, which may be another
    sequence's.
    """
    drafted = 0
    for block in block_table:
        drafted += blocks.num_drafted[block]
        if blocks.num_drafted[block] < blocks.block_size:
            break
    if drafted % blocks.block_size == 0:
        drafted = max(0, drafted - lag)
    return min(drafted, most)


def note_drafted(blocks: BlockManager, block_table: tuple[int, ...], start: int, end: int) -> None:
    """Note that the draft model has computed a table's tokens up to ``end``, from ``start`` on anew."""
    size = blocks.block_size
    for index in range(start // size, blocks.blocks_for(end)):
        block = block_table[index]
        blocks.num_drafted[block] = max(blocks.num_drafted[block], min(size, end - index * size))
