# The seam by which blocks of the KV cache leave an engine and come into one. The step loop calls it, and never waits.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gpu_backend.step.transfer import RemoteBlocks


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a block is made of. Blocks of two engines are exchanged only if all of it is equal."""

    fingerprint: str  # of the model's weights and configuration, and of how its numbers are rounded
    dtype: str  # of a number as it is kept
    shape: tuple[int, ...]  # of one block: (layers, block_size, 2, kv_heads, head_dim)
    block_bytes: int

    def differs(self, other: BlockFormat) -> str | None:
        """Say in what another engine's blocks are different; None if they are alike."""
        if other.shape[1:2] != self.shape[1:2]:
            return f"its blocks have {other.shape[1:2]} tokens, and these {self.shape[1:2]}"
        if (other.dtype, other.shape, other.block_bytes) != (self.dtype, self.shape, self.block_bytes):
            return f"its blocks are {other.dtype} of {other.shape}, and these {self.dtype} of {self.shape}"
        if other.fingerprint != self.fingerprint:
            return "it has another model, another version of it, or another way of rounding"
        return None


class BlockStore(Protocol):
    """The numbers of an engine's blocks. ``read`` and ``write`` wait, in threads of their own."""

    format: BlockFormat

    def mark(self) -> Any:
        """Note what was launched so far, without waiting for it."""

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return the bytes of blocks, one after the other. What is in them must be computed."""

    def write(self, blocks: Sequence[int], data: memoryview, after: Any) -> None:
        """Put bytes into blocks once all before the mark ``after`` is computed; they are there when it returns."""


@dataclass(frozen=True, slots=True)
class Described:
    """The other engine holds the first ``num_blocks`` of those that were asked for."""

    ticket: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more is written for a ticket. Its first ``num_blocks`` blocks came, and their checksums hold."""

    ticket: int
    num_blocks: int
    problem: str | None = None
    num_shared: int = 0  # of these, that came through shared memory


@dataclass(frozen=True, slots=True)
class Freed:
    """A lease has ended, and nothing reads its blocks any more."""

    lease: str


TransferEvent = Described | Ended | Freed


class KvTransfer(ABC):
    """Holds blocks for other engines under leases, and brings blocks of other engines here, each by a ticket.

    Bringing takes two steps: ``describe`` asks what is there, and ``pull`` says where it goes. Nothing waits here but
    ``poll``, if it is told to.
    """

    @abstractmethod
    def register(
        self, lease: str, salt: bytes, blocks: Sequence[tuple[int, bytes]], cached_tokens: int = 0
    ) -> RemoteBlocks:
        """Let other engines read computed blocks, by their hashes, if they know the salt; return where they are.

        They must stay as they are until the lease is ``Freed``. ``cached_tokens`` of their prompt were here before.
        """

    @abstractmethod
    def describe(self, ticket: int, remote: RemoteBlocks, salt: bytes, hashes: Sequence[bytes]) -> None:
        """Ask another engine for the blocks of these hashes: ``Described`` answers, or ``Ended``."""

    @abstractmethod
    def pull(self, ticket: int, blocks: Sequence[int]) -> None:
        """Bring what was described into these blocks, after all that was launched; ``Ended`` says how far it came."""

    @abstractmethod
    def poll(self, patience: float = 0.0) -> list[TransferEvent]:
        """Return what happened since the last time; wait at most so many seconds for the first of it."""

    @abstractmethod
    def has_news(self) -> bool:
        """Whether ``poll`` would return anything."""

    @abstractmethod
    def release(self, name: str | int) -> None:
        """End a lease, or give a ticket up: ``Freed`` or ``Ended`` comes as soon as its blocks are touched no more."""

    @abstractmethod
    def close(self) -> None:
        """Serve no more, bring no more."""
