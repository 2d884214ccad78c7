# Blocks that other engines may read, each group of them for as long as its lease lasts.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LEASE = 30.0  # seconds after the last word of an engine that reads


@dataclass(slots=True)
class BlockLease:
    """Blocks that stay as they are, with their hashes, for those who know the salt."""

    salt: bytes
    blocks: tuple[tuple[int, bytes], ...]
    until: float  # a clock reading
    num_reading: int = 0  # threads that copy from the blocks now
    has_ended: bool = False


class BlockLeases:
    """All leases of an engine. The step loop adds and frees them; threads that serve other engines read and renew."""

    def __init__(self, clock: Callable[[], float], seconds: float = LEASE) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lock = threading.Lock()
        self._by_name: dict[str, BlockLease] = {}

    def add(self, name: str, salt: bytes, blocks: tuple[tuple[int, bytes], ...]) -> None:
        """Begin a lease."""
        with self._lock:
            self._by_name[name] = BlockLease(salt, blocks, self._clock() + self._seconds)

    @contextmanager
    def reading(self, name: str, salt: bytes) -> Iterator[BlockLease | None]:
        """Give a lease that lasts, from now on as long as a new one; None if it is over, or another tenant's. What it
        holds is not freed before the block of code ends.
        """
        with self._lock:
            lease = self._by_name.get(name)
            if lease is not None and (lease.salt != salt or lease.has_ended or self._clock() >= lease.until):
                lease = None
            if lease is not None:
                lease.until = self._clock() + self._seconds
                lease.num_reading += 1
        try:
            yield lease
        finally:
            if lease is not None:
                with self._lock:
                    lease.num_reading -= 1

    def end(self, name: str) -> None:
        """Let a lease be over; nothing begins to read it from now on."""
        with self._lock:
            if (lease := self._by_name.get(name)) is not None:
                lease.has_ended = True

    def has_free(self) -> bool:
        """Whether ``take_free`` would return any."""
        with self._lock:
            return any(map(self._is_free, self._by_name.values()))

    def take_free(self) -> list[str]:
        """Take out the leases that are over and that nothing reads."""
        with self._lock:
            names = [name for name, lease in self._by_name.items() if self._is_free(lease)]
            for name in names:
                del self._by_name[name]
            return names

    def _is_free(self, lease: BlockLease) -> bool:
        return not lease.num_reading and (lease.has_ended or self._clock() >= lease.until)
