# The keys and values of running decodes once more, each sequence's contiguous, keys turned: plain torch multiplies
# them where they lie, and gathers no blocks in each layer of each step.

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpu_backend.kernels.layout.quantized_kv import KvScales, load_kv


class KvBuffers:
    """Memory for copies: of each layer ``tokens`` tokens' keys, then their values, in float32, taken when needed."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._layers: dict[int, Tensor] = {}
        self._parts: list[Part] = []
        self._slots: Tensor | None = None
        # Where a step's own numbers go, (places of all parts, 2, kv_heads · head_dim), if it is known; the next step's
        # go one key, and one token's values, further.
        self._columns: Tensor | None = None
        self._shift = torch.ones(2, 1, dtype=torch.long)
        self._written: set[int] = set()  # layers that have this step's

    def of(self, kv_cache: Tensor) -> Tensor:
        """Return that of one layer's cache, as (2, tokens, kv_heads · head_dim): to be cut into parts."""
        room = self._layers.get(kv_cache.data_ptr())
        if room is None:
            shape = (2, self.tokens, kv_cache.shape[3] * kv_cache.shape[4])
            room = self._layers[kv_cache.data_ptr()] = kv_cache.new_empty(shape, dtype=torch.float32)
        return room

    def follow(self, parts: list[Part]) -> None:
        """Take note of a step's parts."""
        self._parts, self._columns = parts, None

    def go_on(self) -> None:
        """Take note of a step whose parts are those of the step before, with a column more each."""
        if self._columns is not None:
            self._columns += self._shift

    def begin_step(self, slots: Tensor) -> None:
        """Take note of where the cache has this step's keys and values of all parts' places, in their order."""
        self._slots = slots
        self._written.clear()

    def write(self, kv_cache: Tensor, kv_scales: KvScales | None) -> None:
        """Put a layer's keys and values of this step where they belong: one call for all parts."""
        layer, (kv_heads, head_dim) = kv_cache.data_ptr(), kv_cache.shape[3:]
        if layer in self._written:
            return
        self._written.add(layer)
        assert self._slots is not None, "where this step's keys and values lie is not known"
        if self._columns is None:
            self._shift[1] = head_dim
            self._columns = torch.cat([part.columns(kv_heads, head_dim, self._shift) for part in self._parts])
        new = load_slots(kv_cache, kv_scales, self._slots)
        self.of(kv_cache).view(-1).scatter_(0, self._columns.view(-1), new.view(-1))


@dataclass(slots=True, eq=False)
class Part:
    """Sequences whose copies are multiplied in one call, each at its place.

    A copy is ``width`` columns, of which a token takes one; all places have their last token in the same column, so
    that the shorter ones begin later. In each layer's room a part lies from token ``offset`` on, keys as (places ·
    kv_heads, head_dim, width) and values as (places · kv_heads, width, head_dim): as products read them fastest.
    """

    owners: list[int]
    pads: list[int]  # columns before the first token of each
    rooms: KvBuffers
    offset: int
    width: int
    slots: Tensor  # (places × columns,) where the cache has what is in the columns that are in use when it is made
    mask: Tensor | None  # (places, 1, width): 0 where there is a token or will be, else -inf; None: there are no pads
    end: int  # columns in use, that of this step's token included
    start: int = 0  # columns in which no sequence has a token any more
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the copies
    first: Tensor | None = None  # where in a room the first columns' numbers are, (places when made, 2, …)
    rows: slice = field(default_factory=lambda: slice(0))  # of the step's tokens: the places' queries

    def leave(self, place: int) -> None:
        """Let the last one take a place that its owner has left."""
        last = len(self.owners) - 1
        for column in (self.owners, self.pads):
            column[place] = column[last]
            column.pop()
        self.start = min(self.pads, default=0)
        for layer, both in self.layers.items():
            for copies in both:
                of_place = copies.view(last + 1, -1)
                of_place[place] = of_place[last]
            keys, values = both
            rows = len(keys) // (last + 1) * last
            self.layers[layer] = keys[:rows], values[:rows]
        if self.mask is not None:
            self.mask[place] = self.mask[last]
            self.mask = self.mask[:last]

    def keys_and_values(self, kv_cache: Tensor, kv_scales: KvScales | None) -> tuple[Tensor, Tensor]:
        """Return a layer's, (places · kv_heads, head_dim, columns) and the same with the last two changed about.

        The step's own are in ``kv_cache`` already.
        """
        copies = self.layers.get(kv_cache.data_ptr())
        if copies is None:
            copies = self.layers[kv_cache.data_ptr()] = self._load(kv_cache, kv_scales)
        else:
            self.rooms.write(kv_cache, kv_scales)
        (keys, values), count = copies, self.end - self.start
        return keys.narrow(2, self.start, count), values.narrow(1, self.start, count)

    def columns(self, kv_heads: int, head_dim: int, shift: Tensor) -> Tensor:
        """Return where in a room the last columns' numbers are, (places, 2, kv_heads · head_dim)."""
        count = len(self.owners)
        if self.first is None:
            size = kv_heads * head_dim
            keys = torch.arange(count * size).mul_(self.width)
            values = (torch.arange(count * kv_heads) * (self.width * head_dim))[:, None] + torch.arange(head_dim)
            values += self.rooms.tokens * size
            self.first = torch.stack([keys.view(count, size), values.view(count, size)], 1) + self.offset * size
        return self.first[:count].add(shift, alpha=self.end - 1)

    def _load(self, kv_cache: Tensor, kv_scales: KvScales | None) -> tuple[Tensor, Tensor]:
        count, (kv_heads, head_dim) = len(self.owners), kv_cache.shape[3:]
        room = self.rooms.of(kv_cache)[:, self.offset : self.offset + count * self.width]
        keys = room[0].view(count, kv_heads, head_dim, self.width)
        values = room[1].view(count, kv_heads, self.width, head_dim)
        stored = load_slots(kv_cache, kv_scales, self.slots).view(count, self.end, 2, kv_heads, head_dim)
        keys[..., : self.end] = stored[:, :, 0].permute(0, 2, 3, 1)
        values[:, :, : self.end] = stored[:, :, 1].transpose(1, 2)
        return keys.flatten(0, 1), values.flatten(0, 1)


def load_slots(kv_cache: Tensor, kv_scales: KvScales | None, slots: Tensor) -> Tensor:
    """Return what a layer's cache has in these slots, (slots, 2, kv_heads, head_dim), in float32."""
    raw = kv_cache if kv_scales is None else kv_cache.view(torch.uint8)
    stored = raw.view(-1, *kv_cache.shape[2:]).index_select(0, slots)
    return stored.float() if kv_scales is None else load_kv(stored, kv_scales, torch.float32)
