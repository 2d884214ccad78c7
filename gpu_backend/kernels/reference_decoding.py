# What goes before and after the model in a step of decodes, in plain torch: drafts are made, every row's inputs come
# from the device state, and what was drawn goes back there.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_backend.kernels.layout.decode_rows import FROM_STATE, HEADER, LONGEST, SHORTEST, DecodeRows, StateTensors


def propose_drafts(inputs: Tensor, state: StateTensors, width: int) -> None:
    """Draft what follows each place's text: what followed its end's longest match in it, of equal ones the last.

    A match that reaches into the text's end is taken for the beginning of a repetition; without a match of at least
    SHORTEST tokens the last one stands for every draft. ``inputs`` as in ``place_decodes``.
    """
    row, start, count = inputs[:, :3].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    last = inputs.gather(1, (HEADER + width - count)[:, None])[:, 0]
    last = torch.where(last == FROM_STATE, state.last_tokens[row], last)
    window = state.texts.shape[1]
    state.texts[row, start % window] = last.int()
    places = torch.arange(window)
    where = start[:, None] + 1 - window + places
    text = torch.where(where >= 0, state.texts[row[:, None], where % window], -1)
    length, alive = torch.zeros_like(where), where >= 0
    for back in range(1, min(LONGEST, window - 1) + 1):
        before = F.pad(text, (back, 0), value=-1)[:, :window]
        alive = alive & (before >= 0) & (before == text[:, window - back, None])
        length += alive
    best = torch.where(length >= SHORTEST, length * window + places, -1).amax(1, keepdim=True)
    first = torch.where(best >= 0, best % window, window - 1)
    ahead = first + torch.arange(state.drafts.shape[1]) % (window - first)
    state.drafts[row] = text.gather(1, ahead).long()


def place_decodes(inputs: Tensor, state: StateTensors, rows: DecodeRows, block_size: int) -> None:
    """Fill ``rows`` with what a step of decodes computes.

    ``inputs`` (places, HEADER + width) say of each place its row of the device state, where its tokens start, how many
    there are and how many of these are no drafts, which block of its table is new (none: -1) and what it is, and the
    tokens, behind as many as it lacks of ``width``. ``FROM_STATE`` in place of a start or a token stands for what the
    device state has. Rows that a place does not use lie before its own, and write to the spare block.
    """
    row, start, count, _, fresh_at, fresh = inputs[:, :HEADER].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    end, width = start + count, rows.width
    has_fresh = fresh_at >= 0
    state.block_tables[row[has_fresh], fresh_at[has_fresh]] = fresh[has_fresh].int()
    rows.block_tables.copy_(state.block_tables.index_select(0, row))
    given = inputs[:, HEADER:]
    behind = torch.arange(width) - (width - count)[:, None]  # the last token known
    drafts = state.drafts[row[:, None], (behind - 1).clamp(0, state.drafts.shape[1] - 1)]
    known = torch.where(behind > 0, drafts, state.last_tokens[row, None])
    rows.token_ids.copy_(torch.where(given == FROM_STATE, known, given).flatten())
    positions = end[:, None] - width + torch.arange(width)
    is_used = positions >= start[:, None]
    index = torch.where(is_used, positions // block_size, 0)
    blocks = torch.where(is_used, rows.block_tables.gather(1, index).long(), state.spare_block)
    rows.positions.copy_(positions.flatten())
    rows.slots.copy_((blocks * block_size + positions % block_size).flatten())
    rows.context_lens.copy_(end)
    sampling, of_row = rows.sampling, row.repeat_interleave(width)
    shares, numbers = state.shares[of_row], state.numbers[of_row]
    for column, kept in enumerate((sampling.temperature, sampling.top_p, sampling.min_p)):
        kept.copy_(shares[:, column])
    for column, kept in enumerate((sampling.seed, sampling.reply, sampling.top_k)):
        kept.copy_(numbers[:, column])
    sampling.position.copy_(rows.positions + 1)


def accept_draws(inputs: Tensor, state: StateTensors, rows: DecodeRows, tokens: Tensor, usable: Tensor) -> None:
    """Record what was drawn for ``rows``: drafts count while each is the token drawn before it, and one token more.

    The device state gets the last token that counts, its position, and the text; ``rows.drawn`` all ``tokens`` (rows,),
    whether their logits were numbers, how many count, and where the step began.
    """
    row, start, count, known = inputs[:, :4].unbind(1)
    start = torch.where(start == FROM_STATE, state.starts[row], start)
    width, tokens = rows.width, tokens.view(len(inputs), rows.width)
    last = width - count + known - 1  # column of the last token that is no draft
    columns = torch.arange(1, width)
    fails = (columns > last[:, None]) & (rows.token_ids.view(-1, width)[:, 1:] != tokens[:, :-1])
    end = torch.where(fails, columns, width).amin(1) if width > 1 else count
    gained = end - last
    state.last_tokens[row] = tokens.gather(1, end[:, None] - 1)[:, 0]
    state.starts[row] = start + known - 1 + gained
    if (window := state.texts.shape[1]) > 1:
        behind = torch.arange(width) - (width - count)[:, None]
        kept = (behind >= known[:, None] - 1) & (behind < (known - 1 + gained)[:, None])
        where = (start[:, None] + 1 + behind) % window
        state.texts[row[:, None].expand_as(where)[kept], where[kept]] = tokens[kept].int()
    rows.drawn.copy_(torch.cat((tokens, usable.view(-1, width), gained[:, None], start[:, None]), 1))
