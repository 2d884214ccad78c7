# Where the sequences of a step lie in the paged KV cache, as tensors that kernels read on the device. A CUDA graph
# captures a layout once; what is written into its tensors later is what the next replay sees.

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from gpu_backend.kernels.layout.upload import upload

MAX_SPLITS = 32
INVARIANT_SPLITS = 8  # of the longest context, where replies must come out the same to the bit whatever the batch
SMALL_TILE_ROWS = 64  # queries × heads of a sequence that lie in one tile; above it, tiles are large ones
LEAST_TOKENS = 256  # of context in a split: less is not worth putting parts together
MOST_TOKENS = 8192  # of context in a split: more, and the others wait for one long sequence
PROGRAMS_PER_PROCESSOR = 3


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """Sequences of which each asks at most ``max_query_len`` queries, the last tokens of its context.

    An unused place, as in a graph captured for more sequences than there are, has no queries and context 0.
    """

    rows: slice  # of the step's tokens: where the queries of all these sequences lie, contiguous
    block_tables: Tensor  # (sequences, blocks) int32; read only up to a sequence's own length
    context_lens: Tensor  # (sequences,) int32: tokens of the sequence, its queries included
    query_starts: Tensor  # (sequences + 1,) int32: where each sequence's queries begin, counted from ``rows.start``
    max_query_len: int
    num_splits: int  # parts that a long context is cut into; a power of two
    split_tokens: int = 0  # in each part, from the context's beginning on; 0: parts are equal
    # (queries,) int32: before which position the keys end that each sees; None: behind its own.
    ends: Tensor | None = None


def choose_splits(query_rows: int, sequences: int, kv_heads: int, max_context_len: int, processors: int) -> int:
    """Return into how many parts contexts are cut: every multiprocessor has work, and none waits for a long one.

    ``query_rows`` is a sequence's most queries × heads per key head. What a graph captures is fixed then, so graphs are
    captured for contexts of several lengths: parts that are empty cost time.
    """
    programs = sequences * kv_heads * max(1, query_rows // 128)
    wanted = PROGRAMS_PER_PROCESSOR * processors // max(1, programs)
    useful = max_context_len // LEAST_TOKENS
    needed = max_context_len // MOST_TOKENS
    return 1 << max(0, min(max(min(wanted, useful), needed), MAX_SPLITS).bit_length() - 1)


def invariant_split(max_model_len: int) -> int:
    """Return how many tokens a part has if the parts must not depend on the batch: whole tiles of any kernel."""
    return max(LEAST_TOKENS, -(-max_model_len // (64 * INVARIANT_SPLITS)) * 64)


class PagedLayouts:
    """Lays the sequences of each step out; the counterpart of ``Grouping`` for a GPU.

    ``processors`` are the device's multiprocessors. With ``split_tokens``, as ``invariant_split`` gives them, the order
    of every sum follows from the position of its query alone, not from the other sequences or how a prompt is cut.
    """

    def __init__(
        self,
        block_size: int,
        heads: int,
        kv_heads: int,
        device: torch.device,
        processors: int,
        split_tokens: int = 0,
    ) -> None:
        self.block_size = block_size
        self._group = heads // kv_heads
        self._small_tile_queries = max(1, SMALL_TILE_ROWS // self._group)  # queries
        self._kv_heads = kv_heads
        self._device = device
        self._processors = processors
        self._split_tokens = split_tokens

    def groups(
        self,
        query_lens: Sequence[int],
        positions: Tensor,
        block_tables: Sequence[Sequence[int]],
        ends: Tensor | None = None,
    ) -> tuple[PagedLayout, ...]:
        """Lay out sequences that are sorted by query length: with one query each, with a few, and with many.

        ``positions`` (tokens,) are those of all the step's queries; a block table covers its sequence up to the last of
        them. ``ends`` (tokens,) int32: before which position the keys end that each sees; None: behind its own, as
        those of a sequence's only query always do.
        """
        layouts, row, first = [], 0, 0
        for most in (1, self._small_tile_queries, max(query_lens, default=0)):
            last = bisect_right(query_lens, most)
            if first < last:
                layout = self._layout(row, query_lens[first:last], positions, block_tables[first:last])
                if ends is not None and most > 1:
                    layout = replace(layout, ends=ends[layout.rows])
                layouts.append(layout)
                row, first = layout.rows.stop, last
        return tuple(layouts)

    def samples(self, both_ways: bool = False) -> Iterator[PagedLayout]:
        """Yield one-sequence layouts that between them need every kernel which any step may need; ``both_ways``: of
        queries that look ahead, too."""
        queries = {1, *(rows // self._group + 1 for rows in (16, 32, SMALL_TILE_ROWS))}
        for count in sorted(queries):
            table = torch.zeros((1, -(-count // self.block_size)), dtype=torch.int32, device=self._device)
            lens = torch.full((1,), count, dtype=torch.int32, device=self._device)
            layout = self.place(slice(0, count), table, lens, torch.cat([lens * 0, lens]), count)
            found = [layout]
            if not self._split_tokens:
                found.append(replace(layout, num_splits=1 if layout.num_splits > 1 else 2))
            yield from found
            if both_ways and count > 1:
                ends = torch.full((count,), count, dtype=torch.int32, device=self._device)
                yield from (replace(each, ends=ends) for each in found)

    def num_splits(self, max_query_len: int, sequences: int, longest: int) -> int:
        """Return into how many parts contexts of up to ``longest`` tokens are cut."""
        if self._split_tokens:
            return INVARIANT_SPLITS
        return choose_splits(max_query_len * self._group, sequences, self._kv_heads, longest, self._processors)

    def place(
        self,
        rows: slice,
        block_tables: Tensor,
        context_lens: Tensor,
        query_starts: Tensor,
        max_query_len: int,
        num_splits: int | None = None,
    ) -> PagedLayout:
        """Return a layout of tensors as ``PagedLayout`` has them; its splits are for the width of the block tables,
        unless they are given.
        """
        if num_splits is None:
            sequences, width = block_tables.shape
            num_splits = self.num_splits(max_query_len, sequences, width * self.block_size)
        return PagedLayout(
            rows, block_tables, context_lens, query_starts, max_query_len, num_splits, self._split_tokens
        )

    def _layout(
        self, first_row: int, query_lens: Sequence[int], positions: Tensor, block_tables: Sequence[Sequence[int]]
    ) -> PagedLayout:
        starts = [0, *accumulate(query_lens)]
        width = max(map(len, block_tables))
        tables = array("i")
        for table in block_tables:
            tables.extend(table)
            tables.extend((0,) * (width - len(table)))
        query_starts = upload(starts, self._device, torch.int32)
        return self.place(
            rows=slice(first_row, first_row + starts[-1]),
            block_tables=upload(torch.frombuffer(tables, dtype=torch.int32), self._device, torch.int32).view(-1, width),
            context_lens=positions.index_select(0, query_starts[1:] + (first_row - 1)).int() + 1,
            query_starts=query_starts,
            max_query_len=max(query_lens),
        )
