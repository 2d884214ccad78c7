# Which running decodes have contiguous copies of their keys and values, from step to step: when copies are made, grow
# and are left.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from gpu_backend.kernels.layout.kv_copies import KvBuffers, Part
from gpu_backend.kernels.layout.upload import integers

CPU = torch.device("cpu")
GROWTH = 64  # tokens that every copy has room for when it is made
TOKENS_PADDED = 1024  # in a part: multiplying them costs about as much as another part's calls
LEFT_SHARE = 0.5  # of the copies: so many may have been left since they were made

Decode = tuple[int, int, tuple[int, ...]]  # its id, its tokens, its block table


class ContiguousKv:
    """Keeps the copies from step to step, for at most ``most_tokens`` tokens, room to grow included.

    A copy holds for a sequence that computes one token right after the one it computed in the step before. In all other
    cases (it was preempted, it had drafts, a step failed) it does not. Copies are made for all decodes at once: when
    as many had to be read from their blocks since the last time, when too many places were left, or when one copy has
    grown to its room's end.
    """

    def __init__(self, most_tokens: int, null_block: int, block_size: int) -> None:
        self.parts: list[Part] = []
        self.rooms = KvBuffers(most_tokens)
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
            self.rooms.go_on()
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
        self.rooms.follow(self.parts)
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
        if any(part.end == part.width for part in self.parts):
            return False
        for part in self.parts:
            part.end += 1
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
        end, size = tokens[-1], self._block_size
        blocks = -(-end // size)
        padded = chain.from_iterable([(*table, *(self._null_block,) * (blocks - len(table))) for table in tables])
        pads = [end - count for count in tokens]
        positions = torch.arange(end) - integers(pads, CPU)[:, None]
        is_pad = positions < 0
        positions.clamp_(min=0)
        slots = integers(list(padded), CPU).view(len(tokens), blocks).gather(1, positions // size)
        slots.mul_(size).add_(positions % size).masked_fill_(is_pad, self._null_block * size)
        mask = None
        if pads[0]:
            mask = torch.zeros(len(tokens), 1, width)
            mask[:, 0, :end].masked_fill_(is_pad, -torch.inf)
        return Part(owners, pads, self.rooms, offset, width, slots.flatten(), mask, end)


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
