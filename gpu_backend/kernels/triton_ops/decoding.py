# What goes before and after the model in a step of decodes, in Triton: one launch drafts, one makes every row's inputs
# from the device state, one says which of the drawn tokens count and puts them back.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gpu_backend.kernels.layout.decode_rows import FROM_STATE, HEADER, LONGEST, SHORTEST, DecodeRows, StateTensors

BLOCKS_AT_ONCE = 256
PLACES_AT_ONCE = 1024  # of a text, where a draft may begin
TABLE = tl.constexpr(FROM_STATE)
FIRST = tl.constexpr(HEADER)


def propose_drafts(inputs: Tensor, state: StateTensors, width: int) -> None:
    """Draft what follows each place's text; ``reference_decoding.propose_drafts`` says how."""
    most, window = state.drafts.shape[1], state.texts.shape[1]
    propose_drafts_kernel[(len(inputs),)](
        inputs, state.last_tokens, state.starts, state.texts, state.drafts, inputs.stride(0),
        WIDTH=width, WIDTH_PADDED=triton.next_power_of_2(width), MOST=most,
        MOST_PADDED=triton.next_power_of_2(most), WINDOW=window, AT_ONCE=min(window, PLACES_AT_ONCE),
        SHORTEST=SHORTEST, LONGEST=min(LONGEST, window - 1), num_warps=4,
    )  # fmt: skip


def place_decodes(inputs: Tensor, state: StateTensors, rows: DecodeRows, block_size: int) -> None:
    """Fill ``rows`` for ``inputs`` (places, HEADER + width); ``reference_decoding.place_decodes`` says with what."""
    places, sampling = len(inputs), rows.sampling
    assert inputs.stride(1) == 1 and rows.block_tables.shape[1] == state.block_tables.shape[1]
    place_kernel[(places,)](
        inputs, state.last_tokens, state.starts, state.drafts, state.block_tables, state.shares,
        state.numbers, rows.token_ids, rows.positions, rows.slots, rows.block_tables, rows.context_lens,
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, sampling.seed, sampling.position,
        sampling.reply, inputs.stride(0), state.block_tables.stride(0), state.spare_block,
        WIDTH=rows.width, WIDTH_PADDED=triton.next_power_of_2(rows.width), BLOCK_SIZE=block_size,
        MOST=state.drafts.shape[1], BLOCKS_AT_ONCE=BLOCKS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def accept_draws(inputs: Tensor, state: StateTensors, rows: DecodeRows, tokens: Tensor, usable: Tensor) -> None:
    """Record the ``tokens`` drawn for ``rows``; ``reference_decoding.accept_draws`` says how."""
    accept_kernel[(len(inputs),)](
        inputs, state.last_tokens, state.starts, state.texts, rows.token_ids, tokens, usable, rows.drawn,
        inputs.stride(0), WIDTH=rows.width, WIDTH_PADDED=triton.next_power_of_2(rows.width),
        WINDOW=state.texts.shape[1], num_warps=1,
    )  # fmt: skip


@triton.jit
def propose_drafts_kernel(
    inputs, last_tokens, starts, texts, drafts, input_stride,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, MOST: tl.constexpr, MOST_PADDED: tl.constexpr,
    WINDOW: tl.constexpr, AT_ONCE: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """One place's drafts: what followed the longest match of its text's end, of equal ones the last."""
    own = inputs + tl.program_id(0).to(tl.int64) * input_stride
    row, start, count = _read_header(own, starts)
    columns = tl.arange(0, WIDTH_PADDED)
    given = tl.load(own + FIRST + columns, mask=columns < WIDTH, other=0)
    asks = tl.max(((columns > WIDTH - count) & (given == TABLE)).to(tl.int32), 0)
    last = tl.load(own + FIRST + WIDTH - count)
    last = tl.where(last == TABLE, tl.load(last_tokens + row), last).to(tl.int32)
    text = texts + row * WINDOW
    tl.store(text + start % WINDOW, last)
    if asks > 0:
        end = start + 1
        floor = tl.maximum(end - WINDOW, 0)
        best = tl.full([], -1, tl.int64)
        for begin in range(0, WINDOW, AT_ONCE):
            at = floor + begin + tl.arange(0, AT_ONCE)
            alive = at < end
            length = tl.zeros([AT_ONCE], dtype=tl.int64)
            for back in tl.static_range(1, LONGEST + 1):
                alive = alive & (at - back >= floor)
                there = tl.load(text + (at - back) % WINDOW, mask=alive, other=-1)
                here = last
                if back > 1:
                    here = tl.load(text + (end - back) % WINDOW, mask=end - back >= floor, other=-2)
                alive = alive & (there == here)
                length += alive.to(tl.int64)
            score = tl.where(length >= SHORTEST, length * WINDOW + (at - floor), -1)
            best = tl.maximum(best, tl.max(score, 0))
        first = tl.where(best >= 0, floor + best % WINDOW, start)
        places = tl.arange(0, MOST_PADDED)
        where = first + places % (end - first)
        draft = tl.load(text + where % WINDOW, mask=(places < MOST) & (where < start), other=0)
        draft = tl.where((best >= 0) & (where < start), draft, last)
        tl.store(drafts + row * MOST + places, draft.to(tl.int64), mask=places < MOST)


@triton.jit(do_not_specialize=["spare_block"])
def place_kernel(
    inputs, last_tokens, starts, drafts, block_tables, shares, numbers,
    token_ids, positions, slots, tables, context_lens,
    temperature, top_p, min_p, top_k, seed, position, reply,
    input_stride, table_stride, spare_block,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, MOST: tl.constexpr,
    BLOCKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """All rows of one place, and its block table as far as it is read."""
    place = tl.program_id(0).to(tl.int64)
    own = inputs + place * input_stride
    row, start, count = _read_header(own, starts)
    fresh_at = tl.load(own + 4)
    fresh = tl.load(own + 5).to(tl.int32)
    end = start + count

    columns = tl.arange(0, WIDTH_PADDED)
    held = columns < WIDTH
    out = place * WIDTH + columns
    token = tl.load(own + FIRST + columns, mask=held, other=0)
    behind = columns - (WIDTH - count)  # the last token known
    draft = tl.load(drafts + row * MOST + behind - 1, mask=held & (behind > 0) & (token == TABLE), other=0)
    known = tl.where(behind > 0, draft, tl.load(last_tokens + row))
    tl.store(token_ids + out, tl.where(token == TABLE, known, token), mask=held)

    table = block_tables + row * table_stride
    where = end - WIDTH + columns
    used = held & (where >= start)
    index = where // BLOCK_SIZE
    block = tl.load(table + index, mask=used, other=0)
    block = tl.where(index == fresh_at, fresh, block)
    block = tl.where(used, block, spare_block)
    tl.store(positions + out, where, mask=held)
    tl.store(slots + out, block.to(tl.int64) * BLOCK_SIZE + where % BLOCK_SIZE, mask=held)
    tl.store(context_lens + place, end.to(tl.int32))
    tl.store(table + fresh_at, fresh, mask=fresh_at >= 0)
    for first in range(0, (end + BLOCK_SIZE - 1) // BLOCK_SIZE, BLOCKS_AT_ONCE):
        some = first + tl.arange(0, BLOCKS_AT_ONCE)
        inside = some < table_stride
        blocks = tl.load(table + some, mask=inside, other=0)
        tl.store(tables + place * table_stride + some, tl.where(some == fresh_at, fresh, blocks), mask=inside)

    filled = tl.zeros([WIDTH_PADDED], dtype=tl.float32)
    tl.store(temperature + out, filled + tl.load(shares + row * 3), mask=held)
    tl.store(top_p + out, filled + tl.load(shares + row * 3 + 1), mask=held)
    tl.store(min_p + out, filled + tl.load(shares + row * 3 + 2), mask=held)
    number = tl.zeros([WIDTH_PADDED], dtype=tl.int64)
    tl.store(seed + out, number + tl.load(numbers + row * 3), mask=held)
    tl.store(reply + out, (number + tl.load(numbers + row * 3 + 1)).to(tl.int32), mask=held)
    tl.store(top_k + out, (number + tl.load(numbers + row * 3 + 2)).to(tl.int32), mask=held)
    tl.store(position + out, (where + 1).to(tl.int32), mask=held)


@triton.jit
def accept_kernel(
    inputs, last_tokens, starts, texts, token_ids, tokens, usable, drawn, input_stride,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One place: how many of its draws count, and the last of them."""
    place = tl.program_id(0).to(tl.int64)
    own = inputs + place * input_stride
    row, start, count = _read_header(own, starts)
    columns = tl.arange(0, WIDTH_PADDED)
    held = columns < WIDTH
    rows = place * WIDTH + columns
    token = tl.load(tokens + rows, mask=held, other=0)
    is_number = tl.load(usable + rows, mask=held, other=0)
    known = tl.load(own + 3)
    final = WIDTH - count + known - 1  # column of the last token that is no draft
    is_draft = held & (columns > final)
    draft = tl.load(token_ids + rows, mask=is_draft, other=0)
    before = tl.load(tokens + rows - 1, mask=is_draft, other=0)
    end = tl.min(tl.where(is_draft & (draft != before), columns, WIDTH), 0)
    gained = end - final
    tl.store(last_tokens + row, tl.load(tokens + place * WIDTH + end - 1))
    tl.store(starts + row, start + known - 1 + gained)
    if WINDOW > 1:
        where = start + 1 + columns - (WIDTH - count)
        kept = (columns >= final) & (columns < end)
        tl.store(texts + row * WINDOW + where % WINDOW, token.to(tl.int32), mask=kept)
    out = drawn + place * (2 * WIDTH + 2)
    tl.store(out + columns, token.to(tl.int32), mask=held)
    tl.store(out + WIDTH + columns, is_number.to(tl.int32), mask=held)
    tl.store(out + 2 * WIDTH, gained.to(tl.int32))
    tl.store(out + 2 * WIDTH + 1, start.to(tl.int32))


@triton.jit
def _read_header(own, starts):
    """Return a place's row of the device state, where its tokens start, and how many there are."""
    row = tl.load(own)
    start = tl.load(own + 1)
    count = tl.load(own + 2)
    return row, tl.where(start == TABLE, tl.load(starts + row), start), count
