# What the prefix cache gained and lost, written down as it happens, for the routers that are told of it.

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from gpu_backend.step.adapter import Adapter
from gpu_backend.step.block_events import BlockEvent, BlockRemoved, BlockStored, Medium

MOST_MARKS = 16  # of one block


@dataclass(slots=True)
class _Described:
    """What a block's hash stands for."""

    parent: bytes | None
    tokens: array[int]
    owner: str | None  # of a block whose parent is not this owner's too
    adapter: Adapter | None
    media: set[Medium] = field(default_factory=set)
    marks: list[int] = field(default_factory=list)  # of prompts' beginnings that end in it


class BlockLog:
    """Gathers events until ``take``. Blocks in a row are one event; a block is described before it is added."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[bytes, _Described] = {}
        self._loose: set[bytes] = set()  # described, and perhaps nowhere: a block that moves is removed and added
        self._marked: set[int] = set()  # marks of known blocks
        self._events: list[BlockEvent] = []
        self._last: bytes | None = None  # which the last event stored at its end

    def describe(
        self,
        key: bytes,
        parent: bytes | None,
        tokens: SequenceOf[int],
        owner: str | None,
        adapter: Adapter | None = None,
    ) -> None:
        """Say what a key that may be added stands for: its own tokens, the key before it, and by which adapter."""
        if key not in self._known:
            self._known[key] = _Described(parent, array("q", tokens), owner, adapter)
            self._loose.add(key)

    def mark(self, key: bytes, marks: Iterable[int]) -> None:
        """Note of a block that is described which beginnings of prompts, by their marks, end in it.

        A mark stays with its block for as long as that is known. Prompts may begin alike up to this block and go on
        differently: those that find it marked enough are not noted.
        """
        what = self._known.get(key)
        if what is None:
            return
        fresh = [mark for mark in marks if mark not in self._marked][: MOST_MARKS - len(what.marks)]
        if not fresh:
            return
        what.marks += fresh
        self._marked.update(fresh)
        for medium in what.media:
            told = [(mark, number_of(key)) for mark in fresh]
            self._events.append(BlockStored([], None, [], self._block_size, medium, [], prompt_marks=told))
            self._last = None

    def add(self, key: bytes, medium: Medium) -> None:
        """Note that a described block can be found."""
        what = self._known[key]
        what.media.add(medium)
        last = self._events[-1] if self._events else None
        if not (isinstance(last, BlockStored) and last.medium == medium and what.parent == self._last is not None):
            parent = None if what.parent is None else number_of(what.parent)
            last = BlockStored([], parent, [], self._block_size, medium, [])
            if what.adapter is not None:
                last.lora_id, last.lora_name = what.adapter.number, what.adapter.name
            self._events.append(last)
        last.block_hashes.append(number_of(key))
        last.token_ids += what.tokens
        last.extra_keys.append(None if what.owner is None else (what.owner,))
        last.prompt_marks += [(mark, number_of(key)) for mark in what.marks]
        self._last = key

    def remove(self, key: bytes, medium: Medium) -> None:
        """Note that a block can be found no more."""
        what = self._known[key]
        what.media.discard(medium)
        self._loose.add(key)
        last = self._events[-1] if self._events else None
        if not (isinstance(last, BlockRemoved) and last.medium == medium):
            last = BlockRemoved([], medium)
            self._events.append(last)
        last.block_hashes.append(number_of(key))
        self._last = None

    def take(self) -> list[BlockEvent]:
        """Return the events since the last time, in their order."""
        for key in self._loose:
            if not self._known[key].media:
                self._marked.difference_update(self._known.pop(key).marks)
        self._loose.clear()
        events, self._events, self._last = self._events, [], None
        return events


def number_of(key: bytes) -> int:
    """Return a block's hash as routers know it: the first 64 bits of ours, without a sign."""
    return int.from_bytes(key[:8], "big")
