# Bytes by NIXL, where it is installed: who holds blocks puts some into memory that is registered, and who brings them
# reads it by whatever both machines have (RDMA, shared memory, TCP). What is said about them goes over the connection.

from __future__ import annotations

import ctypes
import mmap
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpu_backend.kv_transfer.wire import Refused

LOOKS_EVERY = 0.0005  # seconds
PATIENCE = 5.0  # seconds that a read may take
MOST_LATE = 16  # reads that did not end in time, and whose memory is kept: beyond these blocks come over the connection
MOST_PEERS = 64  # other engines that are known; of more, those that were read longest ago are forgotten

Read = tuple[str | None, Any]  # from whom, and the library's handle; None: it did not come to that
NO_READ: Read = (None, None)


class NixlAgent:
    """One engine's. Its methods are called by many threads; the library's agent by one at a time."""

    def __init__(self) -> None:
        """Raises ``ValueError`` where NIXL is not installed, or does not start."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            self.agent = nixl_agent(f"tollgate-{secrets.token_hex(8)}", nixl_agent_config(True, False, 0))
        except ImportError as exc:
            raise ValueError("KV blocks by NIXL need it: pip install 'tollgate[nixl]'") from exc
        except Exception as exc:  # of the library, which has no family of errors
            raise ValueError(f"NIXL does not start: {exc}") from exc
        self.lock = threading.Lock()
        self._late: dict[NixlMemory, Read] = {}  # into which a read that nothing waits for may still write
        self._peers: dict[str, int] = {}  # reads that go on, by agent; the one that was met last is last

    @property
    def is_well(self) -> bool:
        """Whether reads end: where too many never do, as those of an engine that hangs, no more should begin."""
        with self.lock:
            for memory, read in list(self._late.items()):
                if self.state_of(read[1]) != "PROC":
                    del self._late[memory]
                    self.end(memory, read)
            return len(self._late) < MOST_LATE

    def leave(self, memory: NixlMemory, read: Read) -> None:
        """Wait for a read no longer."""
        self._late[memory] = read

    def meet(self, metadata: bytes) -> str:
        """Return the name of the agent that says this, from which a read begins; one of before may be forgotten."""
        peer = self.agent.add_remote_agent(metadata)
        self._peers[peer] = self._peers.pop(peer, 0) + 1
        idle = [name for name, reads in self._peers.items() if not reads]
        for name in idle[: max(0, len(self._peers) - MOST_PEERS)]:
            del self._peers[name]
            with suppress(Exception):  # of the library, as below
                self.agent.remove_remote_agent(name)
        return peer

    def state_of(self, transfer: Any) -> str:
        """Return how a read goes. The lock is held here and below."""
        try:
            return str(self.agent.check_xfer_state(transfer))
        except Exception as exc:
            return f"{exc}"

    def end(self, memory: NixlMemory, read: Read = NO_READ) -> None:
        """Give back what a read and memory took, unless something may still be written there."""
        peer, transfer = read
        if peer is not None:
            self._peers[peer] -= 1
        with suppress(Exception):  # of the library: there is nothing else to be done about it
            if transfer is not None:
                self.agent.release_xfer_handle(transfer)
            if memory.is_closed and memory not in self._late:
                self.agent.deregister_memory(memory.registered)


class NixlMemory:
    """Memory of this process that other agents may read, and that what is read from theirs comes into."""

    name, where = "nixl", True  # how another engine is asked to put bytes where they can be read

    def __init__(self, agent: NixlAgent, size: int) -> None:
        """Raises ``Refused`` where there is none."""
        self._agent = agent
        self.is_closed = False
        self._bytes = memoryview(pages := mmap.mmap(-1, size))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        with agent.lock, refusing("registers no memory"):
            self.registered = agent.agent.register_memory([(self._address, size, 0, "")], "DRAM")

    def put(self, data: memoryview | bytes) -> dict[str, Any]:
        """Let bytes be read until others are put there; return where."""
        self._bytes[: len(data)] = data
        with self._agent.lock:
            return {"agent": b64encode(self._agent.agent.get_agent_metadata()).decode(), "address": self._address}

    def read(self, length: int, there: Mapping[str, Any], look: Callable[[], None]) -> memoryview:
        """Return bytes of another agent's memory. ``look`` raises where it is to end at once.

        Raises ``Refused`` where they do not come.
        """
        own, until, state = self._agent.agent, time.monotonic() + PATIENCE, "ERR"
        peer = transfer = None
        try:
            with self._agent.lock, refusing("reads nothing"):
                peer = self._agent.meet(b64decode(there["agent"]))
                ends = [[(place, length, 0)] for place in (self._address, int(there["address"]))]
                transfer = own.initialize_xfer("READ", *(own.get_xfer_descs(end, "DRAM") for end in ends), peer)
                own.transfer(transfer)
                state = self._agent.state_of(transfer)
            while state == "PROC":
                look()
                if time.monotonic() > until:
                    raise Refused("NIXL takes too long")
                time.sleep(LOOKS_EVERY)
                with self._agent.lock:
                    state = self._agent.state_of(transfer)
        finally:
            with self._agent.lock:
                if state == "PROC":
                    self._agent.leave(self, (peer, transfer))
                else:
                    self._agent.end(self, (peer, transfer))
        if state != "DONE":
            raise Refused(f"NIXL reads nothing: {state}")
        return self._bytes[:length]

    def close(self) -> None:
        """Let it be read no more."""
        with self._agent.lock:
            self.is_closed = True
            self._agent.end(self)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Let what the library raises be a refusal: the blocks are computed."""
    try:
        yield
    except Exception as exc:
        raise Refused(f"NIXL {what}: {exc}") from exc
