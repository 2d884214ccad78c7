# The keys and values of running decodes once more, each sequence's side by side: plain torch multiplies them as they
# lie, where it would otherwise gather all their blocks in each layer of each step.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from gpu_backend.engine.upload import integers
from gpu_backend.kernels.quantized_kv import KvScales, load_kv

CPU = torch.device("cpu")
GROWTH = 64  # tokens that every copy has room for when it is made
TOKENS_PADDED = 1024  # in a part: multiplying them costs about as much as another part's calls
LEFT_SHARE = 0.5  # of the copies: so many may have been left since they were made

Decode = tuple[int, int, tuple[int, ...]]  # its id, its tokens, its block table


class Rooms:
    """Memory for copies: of each layer ``tokens`` tokens' keys and values, taken when they are first needed."""

    def __init__(self, tokens: int, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self._layers: dict[int, Tensor] = {}

    def of(self, kv_cache: Tensor) -> Tensor:
        """Return that of one layer's cache, as (2, tokens, kv_heads, head_dim)."""
        room = self._layers.get(kv_cache.data_ptr())
        if room is None:
            room = kv_cache.new_empty((2, self.tokens, *kv_cache.shape[3:]), dtype=self.dtype)
            self._layers[kv_cache.data_ptr()] = room
        return room


@dataclass(slots=True, eq=False)
class Part:
    """Sequences whose copies are multiplied in one call, each at its place.

    In each layer's room their copies are (places, width, kv_heads, head_dim), from token ``offset`` on.
    """

    owners: list[int]
    tokens: list[int]  # of each when the copies were made
    rooms: Rooms
    offset: int
    width: int  # tokens that each place has room for
    tables: Tensor  # (places × blocks,) as they were when the copies were made
    ends: Tensor  # (places,): where this step's tokens lie, counted from ``offset``
    mask: Tensor | None  # (places, 1, 1, width): 0 where there is a token, else -inf; None: all are as long
    longest: int  # tokens of the longest, those of this step included
    age: int = 0  # tokens that each has got since
    layers: dict[int, Tensor] = field(default_factory=dict)  # the copies, (2, places, width, kv_heads, head_dim)
    rows: slice = field(default_factory=lambda: slice(0))  # of the step's tokens: the places' queries
    slots: Tensor | None = None  # (places,): where this step's keys and values are in the cache

    def grow(self) -> None:
        """Go on to the next step."""
        self.age += 1
        self.longest += 1
        self.ends += 1
        if self.mask is not None:
            self.mask.view(-1).index_fill_(0, self.ends, 0)

    def leave(self, place: int) -> None:
        """Let the last one take a place that its owner has left."""
        last = len(self.owners) - 1
        for column in (self.owners, self.tokens):
            column[place] = column[last]
            column.pop()
        for copies in self.layers.values():
            copies[:, place] = copies[:, last]
        self.ends[place] = self.ends[last] - (last - place) * self.width
        self.ends = self.ends[:last]
        if self.mask is not None:
            self.mask[place] = self.mask[last]
            self.mask = self.mask[:last]
        self.longest = max(self.tokens, default=0) + self.age

    def keys_and_values(self, kv_cache: Tensor, kv_scales: KvScales | None) -> tuple[Tensor, Tensor]:
        """Return a layer's, (places, tokens, kv_heads, head_dim) each; the step's own are in ``kv_cache`` already."""
        count, shape = len(self.owners), kv_cache.shape[2:]
        raw = kv_cache if kv_scales is None else kv_cache.view(torch.uint8)
        copies = self.layers.get(kv_cache.data_ptr())
        if copies is None:
            room = self.rooms.of(kv_cache)[:, self.offset : self.offset + count * self.width]
            copies = self.layers[kv_cache.data_ptr()] = room.view(2, count, self.width, *shape[1:])
            blocks = self._load(raw.index_select(0, self.tables), kv_scales).view(count, -1, *shape)[:, : self.width]
            for some, its in zip(copies, blocks.unbind(2), strict=True):
                some[:, : its.shape[1]] = its
                some[:, its.shape[1] :] = 0  # what is not a number stays so behind a mask
        else:
            assert self.slots is not None, "nobody said where this step's keys and values are"
            new = self._load(raw.view(-1, *shape).index_select(0, self.slots), kv_scales)
            for some, its in zip(copies, new.unbind(1), strict=True):
                some.flatten(0, 1).index_copy_(0, self.ends, its)
        key, value = copies[:, :count, : self.longest]
        return key, value

    def _load(self, stored: Tensor, kv_scales: KvScales | None) -> Tensor:
        return stored if kv_scales is None else load_kv(stored, kv_scales, self.rooms.dtype)


class SideBySide:
    """Keeps the copies from step to step, for at most ``most_tokens`` tokens, room to grow included.

    A copy holds for a sequence that computes one token right after the one it computed in the step before. In all other
    cases (it was preempted, it had guesses, a step failed) it does not. Copies are made for all decodes at once: when
    as many had to be read from their blocks since the last time, when too many places were left, or when one copy has
    grown to its room's end.
    """

    def __init__(self, most_tokens: int, null_block: int, block_size: int, dtype: torch.dtype) -> None:
        self.parts: list[Part] = []
        self.rooms = Rooms(most_tokens, dtype)
        self._null_block = null_block
        self._block_size = block_size
        self._order: list[int] = []
        self._owners: list[int] = []  # of the step before
        self._next: list[int] = []  # where each of them goes on if it just decodes; -1 if it did not
        self._num_made = 0
        self._num_read = 0  # decodes that had no copy, since the copies were made
        self._is_full = False

    def arrange(
        self,
        owners: list[int],
        starts: list[int],
        query_lens: list[int],
        block_tables: list[tuple[int, ...]],
    ) -> list[int]:
        """Return the indices of the sequences that have copies, in the order in which ``parts`` have their rows.

        ``owners`` are ids that never come again.
        """
        num_decodes = query_lens.count(1)
        same = owners == self._owners and starts == self._next and num_decodes == len(owners)
        if same and (self._is_full or len(self._order) == num_decodes) and self._grow():
            self._next = [start + 1 for start in starts]
            return self._order
        before = dict(zip(self._owners, self._next, strict=True))
        rows = zip(owners, starts, query_lens, strict=True)
        decodes = {
            owner: index
            for index, (owner, start, count) in enumerate(rows)
            if count == 1 and before.get(owner) == start
        }
        self._owners = owners
        self._next = [start + 1 if count == 1 else -1 for start, count in zip(starts, query_lens, strict=True)]
        self._let_go(decodes)
        num_copied = sum(len(part.owners) for part in self.parts)
        few = num_copied < LEFT_SHARE * self._num_made
        self._num_read += 0 if self._is_full else len(decodes) - num_copied
        if few or (decodes and self._num_read >= len(decodes)) or not self._grow():
            by_length = sorted(decodes.items(), key=lambda one: starts[one[1]])
            self._make([(owner, starts[index] + 1, block_tables[index]) for owner, index in by_length])
        self._order = []
        for part in self.parts:
            part.rows = slice(len(self._order), len(self._order) + len(part.owners))
            self._order += [decodes[owner] for owner in part.owners]
        return self._order

    def _let_go(self, decodes: dict[int, int]) -> None:
        """Drop the copies of all others."""
        for part in self.parts:
            for place in range(len(part.owners) - 1, -1, -1):
                if part.owners[place] not in decodes:
                    part.leave(place)
        self.parts = [part for part in self.parts if part.owners]

    def _grow(self) -> bool:
        """Go on to the next token in all copies, if all have room for it."""
        if any(part.longest == part.width for part in self.parts):
            return False
        for part in self.parts:
            part.grow()
        return True

    def _make(self, decodes: Sequence[Decode]) -> None:
        """Begin anew with copies of these, the shortest first."""
        self.parts = []
        self._is_full = False
        offset = 0
        for some in _cut(decodes):
            width = some[-1][1] + GROWTH
            fitting = some[: (self.rooms.tokens - offset) // width]
            self._is_full = len(fitting) < len(some)
            if fitting:
                self.parts.append(self._part(fitting, offset, width))
            if self._is_full:
                break
            offset += len(some) * width
        self._num_made = sum(len(part.owners) for part in self.parts)
        self._num_read = 0

    def _part(self, decodes: Sequence[Decode], offset: int, width: int) -> Part:
        owners, tokens, tables = map(list, zip(*decodes, strict=True))
        blocks = -(-tokens[-1] // self._block_size)
        padded = chain.from_iterable([(*table, *(self._null_block,) * (blocks - len(table))) for table in tables])
        lens = integers(tokens, CPU)
        ends = torch.arange(len(tokens)) * width + lens - 1
        mask = None
        if tokens[0] < tokens[-1]:
            mask = torch.zeros(len(tokens), 1, 1, width, dtype=self.rooms.dtype)
            mask.masked_fill_(torch.arange(width) >= lens[:, None, None, None], -torch.inf)
        place = (self.rooms, offset, width)
        return Part(owners, tokens, *place, integers(list(padded), CPU), ends, mask, longest=tokens[-1])


def _cut(decodes: Sequence[Decode]) -> Iterator[list[Decode]]:
    """Cut sequences, the shortest first, into parts that are not padded too much."""
    part: list[Decode] = []
    tokens = 0
    for one in decodes:
        if len(part) * one[1] - tokens > TOKENS_PADDED:
            yield part
            part, tokens = [], 0
        part.append(one)
        tokens += one[1]
    if part:
        yield part
