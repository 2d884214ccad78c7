# One prompt's blocks on their way here: asked for, given room by the step loop, brought chunk by chunk, each block
# checked against its checksum before it is written.

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Sequence
from typing import Any

from gpu_backend.kv_transfer.leases import LEASE
from gpu_backend.kv_transfer.memory import SharedMemory
from gpu_backend.kv_transfer.nixl import NixlAgent, NixlMemory
from gpu_backend.kv_transfer.seam import BlockFormat, BlockStore, Described, Ended, TransferEvent
from gpu_backend.kv_transfer.wire import Link, Refused, checksum
from gpu_backend.step.transfer import RemoteBlocks

HEARTBEAT = LEASE / 3  # seconds between words to an engine whose blocks wait for room here

Connect = Callable[[RemoteBlocks, Callable[[socket.socket], None]], Link]


class GivenUp(Exception):
    """The step loop has no use for the blocks any more."""


class Pull:
    """Runs in a thread of its own; ``give_room`` and ``give_up`` are called by the step loop."""

    def __init__(
        self,
        ticket: int,
        remote: RemoteBlocks,
        salt: bytes,
        hashes: Sequence[bytes],
        *,
        shares_memory: bool = True,
        nixl: NixlAgent | None = None,
    ) -> None:
        self.ticket = ticket
        self._shares_memory, self._nixl = shares_memory, nixl
        self._remote = remote
        self._salt = salt
        self._hashes = hashes
        self._room: queue.SimpleQueue[tuple[Sequence[int], Any] | None] = queue.SimpleQueue()
        self._connection: socket.socket | None = None
        self._is_given_up = False
        self._num_done = self._num_shared = 0

    def give_room(self, blocks: Sequence[int], after: Any) -> None:
        """Say where the blocks go, and after which mark."""
        self._room.put((blocks, after))

    def give_up(self) -> None:
        """End soon; what is being written still is."""
        self._is_given_up = True
        self._room.put(None)
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def run(self, connect: Connect, store: BlockStore, tell: Callable[[TransferEvent], None]) -> None:
        """Bring the blocks, or as many as come; ``Ended`` is told last, whatever happens."""
        problem = None
        try:
            self._look()
            link = connect(self._remote, self._note)
            try:
                self._bring(link, store, tell)
            finally:
                link.close()
        except GivenUp:
            problem = "given up"
        except Exception as exc:  # of the network or of the device: either way the rest is computed
            problem = "given up" if self._is_given_up else f"{type(exc).__name__}: {exc}"
        tell(Ended(self.ticket, self._num_done, problem, self._num_shared))

    def _note(self, connection: socket.socket) -> None:
        self._connection = connection
        self._look()

    def _look(self) -> None:
        if self._is_given_up:
            raise GivenUp

    def _bring(self, link: Link, store: BlockStore, tell: Callable[[TransferEvent], None]) -> None:
        described = self._ask(link, "describe")[0]
        theirs = described["format"]
        other = BlockFormat(theirs["fingerprint"], theirs["dtype"], tuple(theirs["shape"]), theirs["block_bytes"])
        if problem := store.format.differs(other):
            self._ask(link, "release")
            raise Refused(problem)
        held = {key: index for index, key in enumerate(map(bytes.fromhex, described["hashes"]))}
        # Theirs are a prompt's from its beginning; of ours the first may be here already.
        first = held.get(self._hashes[0], 0)
        count = 0
        while count < len(self._hashes) and held.get(self._hashes[count]) == first + count:
            count += 1
        if count:
            tell(Described(self.ticket, count))
            blocks, after = self._wait_for_room(link)
            self._bring_into(link, store, blocks[:count], after, first, max(1, int(described["chunk"])))
        self._ask(link, "release")

    def _wait_for_room(self, link: Link) -> tuple[Sequence[int], Any]:
        while True:
            with contextlib.suppress(queue.Empty):
                if (room := self._room.get(timeout=HEARTBEAT)) is None:
                    raise GivenUp
                return room
            self._ask(link, "renew")

    def _bring_into(
        self, link: Link, store: BlockStore, blocks: Sequence[int], after: Any, first: int, most: int
    ) -> None:
        size = store.format.block_bytes
        with contextlib.ExitStack() as stack:
            memory = self._memory(link, min(most, len(blocks)) * size)
            if memory is not None:
                stack.callback(memory.close)
            for start in range(0, len(blocks), most):
                chosen = blocks[start : start + most]
                self._bring_chunk(link, store, chosen, after, first, memory)

    def _memory(self, link: Link, size: int) -> SharedMemory | NixlMemory | None:
        if self._nixl is not None and self._nixl.is_well:
            return NixlMemory(self._nixl, size)
        if self._shares_memory and link.is_on_one_machine:
            with contextlib.suppress(OSError, AttributeError):  # the system has none
                return SharedMemory(size)
        return None

    def _bring_chunk(
        self,
        link: Link,
        store: BlockStore,
        chosen: Sequence[int],
        after: Any,
        first: int,
        memory: SharedMemory | NixlMemory | None,
    ) -> None:
        """Bring the next blocks: through memory, if the other engine finds it, else over the connection."""
        size, place = store.format.block_bytes, self._num_done
        found = {} if memory is None else {memory.name: memory.where}
        length = len(chosen) * size
        answer, data = self._ask(link, "pull", length, start=first + place, count=len(chosen), **found)
        is_shared = memory is not None and answer.get("in_memory") == length
        if memory is not None and is_shared:
            data = memory.read(length, answer.get("there", {}), self._look)
        if len(data) != length:
            raise Refused("it sent less than was asked for")
        sums = answer["checksums"]
        good = 0
        while good < len(chosen):
            key, part = self._hashes[place + good], data[good * size : (good + 1) * size]
            if checksum(key, part).hex() != sums[good]:
                break
            good += 1
        self._look()
        if good:
            store.write(chosen[:good], data[: good * size], after)
        self._num_done += good
        self._num_shared += good * is_shared
        if good < len(chosen):
            self._ask(link, "release")
            raise Refused("the checksum of a block does not match")

    def _ask(self, link: Link, op: str, most_data: int = 0, **more: Any) -> tuple[dict[str, Any], memoryview]:
        self._look()
        told: dict[str, Any] = {"op": op, "lease": self._remote.lease, "salt": self._salt.hex()}
        link.send({**told, "engine_id": self._remote.engine_id, **more})
        answer, data = link.receive(most_data)
        if problem := answer.get("problem"):
            raise Refused(f"{problem}"[:200])
        return answer, data
