# Cuts a step's sequences into groups of similar shape, so that attention in plain torch takes a few padded calls
# instead of one call per sequence. Done once per step, used by every layer.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch
from torch import Tensor

from gpu_backend.kernels.layout.scoring import first_seen
from gpu_backend.kernels.layout.upload import integers

# A group may be padded by a quarter, or by about as much work as another call costs.
WASTE_SHARE = 0.25
DECODES_WASTE_SHARE = 1.0  # with one query each nothing but the mask is padded
WASTE_ALLOWED = 64  # query rows × blocks


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences whose attention is computed in one call, padded to the longest of them.

    Their query rows are ``rows`` of the step, in order. With ``padded_rows`` (sequences × longest query) they must be
    spread to that shape first, since their queries differ in length; padding repeats a sequence's first row.
    """

    rows: slice
    num_sequences: int
    padded_rows: Tensor | None
    unpadded: Tensor | None  # where the rows lie in the padded shape, flattened
    block_tables: Tensor  # (sequences × blocks,), padded with the null block
    widths: tuple[int, ...]  # blocks of each sequence, without that padding
    mask: Tensor  # (sequences, 1, longest query, blocks × block size): 0 where a query may look, else -inf
    window_mask: Tensor | None  # the same for layers in which a query looks back only so far


class Grouping:
    """Makes the groups of each step. ``null_block`` is one that holds zeros for ever; it pads the block tables.

    ``window`` is how far back a query looks in layers that have one, as ``first_seen`` says; 0: none has.
    ``batch_invariant`` groups nothing: each query has a call of its own.
    """

    def __init__(
        self,
        block_size: int,
        null_block: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        window: int = 0,
        batch_invariant: bool = False,
    ) -> None:
        self.block_size = block_size
        self._null_block = null_block
        self._device = device
        self._batch_invariant = batch_invariant
        # The mask of position p is the window of this row that begins p + 1 before the first -inf.
        self._reach = -(-max_model_len // block_size) * block_size
        self._stair = torch.zeros(2 * self._reach, device=device, dtype=dtype)
        self._stair[self._reach :] = -torch.inf
        # With a window, the zeros end as far from the row's beginning, but begin only a window before that.
        self._window_stair = self._stair.clone() if window > 0 else None
        if self._window_stair is not None:
            self._window_stair[: max(0, self._reach - window)] = -torch.inf
        self._window = window

    def groups(
        self,
        query_lens: Sequence[int],
        positions: Tensor,
        block_tables: Sequence[Sequence[int]],
        ends: Tensor | None = None,
    ) -> tuple[AttentionGroup, ...]:
        """Group sequences in their given order, which ``by_shape`` makes a good one.

        ``positions`` (tokens,) are those of all the step's queries; a block table covers its sequence up to the last of
        them. ``ends`` (tokens,): before which position the keys end that each sees; None: behind its own.
        """
        groups, row, first = [], 0, 0
        if self._batch_invariant:
            assert ends is None, "each query is computed by itself, before those that it would look ahead to"
            block_tables = self._cut(positions.tolist(), query_lens, block_tables)
            return tuple(self._group(row, (1,), positions, (table,)) for row, table in enumerate(block_tables))
        for last in _group_ends(query_lens, block_tables):
            groups.append(self._group(row, query_lens[first:last], positions, block_tables[first:last], ends))
            row, first = groups[-1].rows.stop, last
        return tuple(groups)

    def _cut(
        self, positions: list[int], query_lens: Sequence[int], block_tables: Sequence[Sequence[int]]
    ) -> list[Sequence[int]]:
        """Return the blocks that each query sees."""
        repeated = (table for table, count in zip(block_tables, query_lens, strict=True) for _ in range(count))
        return [table[: p // self.block_size + 1] for table, p in zip(repeated, positions, strict=True)]

    def _group(
        self,
        first_row: int,
        query_lens: Sequence[int],
        positions: Tensor,
        block_tables: Sequence[Sequence[int]],
        ends: Tensor | None = None,
    ) -> AttentionGroup:
        count, longest = len(query_lens), max(query_lens)
        num_blocks = max(map(len, block_tables))
        padding = [(self._null_block,) * (num_blocks - len(table)) for table in block_tables]
        tables = list(chain.from_iterable(chain.from_iterable(zip(block_tables, padding, strict=True))))
        rows = slice(first_row, first_row + sum(query_lens))
        positions = positions[rows]
        last = positions if ends is None else ends[rows].long() - 1  # that each sees
        padded_rows = unpadded = None
        if min(query_lens) < longest:
            padded_rows, unpadded = self._padding(query_lens, longest)
            positions, last = (each.index_select(0, padded_rows) for each in (positions, last))
        width = num_blocks * self.block_size
        mask = _mask(self._stair, self._reach - 1 - last, count, width)
        window_mask = None
        if self._window_stair is not None and ends is None:
            window_mask = _mask(self._window_stair, self._reach - 1 - positions, count, width)
        elif self._window:
            first = first_seen(positions, self._window).view(count, 1, -1, 1)
            window_mask = mask.masked_fill(torch.arange(width, device=self._device) < first, -torch.inf)
        return AttentionGroup(
            rows=rows,
            num_sequences=count,
            padded_rows=padded_rows,
            unpadded=unpadded,
            block_tables=integers(tables, self._device),
            widths=tuple(map(len, block_tables)),
            mask=mask,
            window_mask=window_mask,
        )

    def _padding(self, query_lens: Sequence[int], longest: int) -> tuple[Tensor, Tensor]:
        """Return which row stands at each place of the padded shape, and where each row stands."""
        padded_rows: list[int] = []
        unpadded: list[int] = []
        row = 0
        for index, query_len in enumerate(query_lens):
            padded_rows += range(row, row + query_len)
            padded_rows += (row,) * (longest - query_len)
            unpadded += range(index * longest, index * longest + query_len)
            row += query_len
        return integers(padded_rows, self._device), integers(unpadded, self._device)


def _mask(stair: Tensor, rows: Tensor, count: int, width: int) -> Tensor:
    return stair.unfold(0, width, 1).index_select(0, rows).view(count, 1, -1, width)


def by_shape(query_lens: Sequence[int], context_lens: Sequence[int]) -> list[int]:
    """Return the order of sequences in which neighbours are of similar shape: short queries first."""
    shapes = list(zip(query_lens, context_lens, strict=True))
    return sorted(range(len(shapes)), key=shapes.__getitem__)


def _group_ends(query_lens: Sequence[int], block_tables: Sequence[Sequence[int]]) -> list[int]:
    """Return where each group ends. Work is counted in query rows × blocks."""
    ends = []
    longest, most, count, work, end = 0, 0, 0, 0, 0
    for (query_len, blocks), alike in groupby(zip(query_lens, map(len, block_tables), strict=True)):
        more = len(list(alike))
        own = more * query_len * blocks
        padded = (count + more) * max(longest, query_len) * max(most, blocks)
        mixed = longest == 1 and query_len > 1  # sequences with one query each have a cheaper path
        share = DECODES_WASTE_SHARE if query_len == 1 else WASTE_SHARE
        if count and (mixed or padded - work - own > max(WASTE_ALLOWED, share * (work + own))):
            ends.append(end)
            longest, most, count, work = 0, 0, 0, 0
        longest, most, count, work = max(longest, query_len), max(most, blocks), count + more, work + own
        end += more
    return [*ends, end] if end else []
