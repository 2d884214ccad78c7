# Blocks over TCP, by NIXL, or through shared memory where both engines are on one machine: this engine serves those
# that it holds, and brings those of others, in threads beside the step loop.

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from gpu_backend.kv_transfer.leases import LEASE, BlockLeases
from gpu_backend.kv_transfer.memory import open_memory, write_all
from gpu_backend.kv_transfer.nixl import NixlAgent, NixlMemory
from gpu_backend.kv_transfer.pulling import Pull
from gpu_backend.kv_transfer.seam import BlockStore, Freed, KvTransfer, TransferEvent
from gpu_backend.kv_transfer.wire import Link, Refused, checksum
from gpu_backend.step.transfer import RemoteBlocks

PATIENCE = 5.0  # seconds that a message may take
MOST_CONNECTIONS = 32  # of engines that read here; more are closed at once
MOST_PULLS = 8  # that bring blocks at the same time; more wait
CHUNK = 4 * 1024 * 1024  # bytes that are on their way at once, but for one block that is larger


class TcpTransfer(KvTransfer):
    """Serves at ``host`` and ``port`` (0: any free one) for engines that know ``secret``, and reads from such.

    At most ``MOST_CONNECTIONS`` and ``MOST_PULLS`` chunks are in memory. Without a secret all is on this machine.
    """

    def __init__(
        self,
        store: BlockStore,
        host: str,
        port: int,
        secret: str = "",
        clock: Callable[[], float] = time.monotonic,
        lease_seconds: float = LEASE,
        *,
        shares_memory: bool = True,
        nixl: bool = False,
    ) -> None:
        """Listen at once. Raises ``ValueError`` where that cannot be. ``shares_memory``: whether blocks of engines on
        this machine come through memory that both have, where that is to be had. ``nixl``: whether they come by NIXL
        instead, from engines that have it."""
        if not secret and not is_loopback(host):
            raise ValueError(f"KV blocks are not served at {host}, where other machines are, without a secret")
        self.engine_id = secrets.token_hex(8)  # another one after every start
        self._store = store
        self._shares_memory = shares_memory
        self._nixl = NixlAgent() if nixl else None
        self._key = secret.encode()
        self._leases = BlockLeases(clock, lease_seconds)
        self._events: queue.SimpleQueue[TransferEvent] = queue.SimpleQueue()
        self._pulls: dict[int, Pull] = {}
        self._pullers = ThreadPoolExecutor(MOST_PULLS, "kv-pull")
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._served: set[socket.socket] = set()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listening = socket.create_server((host, port), family=family)
        except OSError as exc:
            raise ValueError(f"KV blocks cannot be served at {host}:{port}: {exc}") from exc
        self._host, self._port = host, self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-serve", daemon=True).start()

    def register(
        self, lease: str, salt: bytes, blocks: Sequence[tuple[int, bytes]], cached_tokens: int = 0
    ) -> RemoteBlocks:
        """Begin a lease."""
        self._leases.add(lease, salt, tuple(blocks))
        return RemoteBlocks(self.engine_id, lease, self._host, self._port, cached_tokens)

    def describe(self, ticket: int, remote: RemoteBlocks, salt: bytes, hashes: Sequence[bytes]) -> None:
        """Ask in a thread."""
        pull = self._pulls[ticket] = Pull(
            ticket, remote, salt, hashes, shares_memory=self._shares_memory, nixl=self._nixl
        )
        self._pullers.submit(self._run, pull)

    def pull(self, ticket: int, blocks: Sequence[int]) -> None:
        """Go on in the thread that asked."""
        if (pull := self._pulls.get(ticket)) is not None:  # else it has ended
            pull.give_room(blocks, self._store.mark())

    def poll(self, patience: float = 0.0) -> list[TransferEvent]:
        """Gather what the threads said, and the leases that are over."""
        events: list[TransferEvent] = [Freed(name) for name in self._leases.take_free()]
        with contextlib.suppress(queue.Empty):
            if not events and patience:
                events.append(self._events.get(timeout=patience))
            while True:
                events.append(self._events.get_nowait())
        return events

    def has_news(self) -> bool:
        """Whether a thread said something, or a lease is over."""
        return not self._events.empty() or self._leases.has_free()

    def release(self, name: str | int) -> None:
        """End a lease or a pull."""
        if isinstance(name, str):
            self._leases.end(name)
        elif (pull := self._pulls.get(name)) is not None:
            pull.give_up()

    def close(self) -> None:
        """Close all sockets; their threads end."""
        _shut(self._listening)
        for connection in list(self._served):
            _shut(connection)
        for pull in list(self._pulls.values()):
            pull.give_up()
        self._pullers.shutdown(cancel_futures=True)

    def _run(self, pull: Pull) -> None:
        """Bring one ticket's blocks, or some of them; whatever goes wrong is told, and computed here."""
        pull.run(self._connect, self._store, self._events.put)
        self._pulls.pop(pull.ticket, None)

    def _connect(self, remote: RemoteBlocks, note: Callable[[socket.socket], None]) -> Link:
        if not self._key and not is_loopback(remote.host):
            raise Refused("it is on another machine, and this engine has no secret to know it by")
        connection = socket.create_connection((remote.host, remote.port), timeout=PATIENCE)
        try:
            note(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Link(connection, self._key, asks=True, patience=PATIENCE)
        except BaseException:
            connection.close()
            raise

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._listening.fileno() < 0:
                    return
                time.sleep(0.1)  # no descriptor is left; some will be
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            self._served.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="kv-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one engine until it goes, or says nothing for as long as a lease lasts."""
        try:
            with (
                connection,
                contextlib.ExitStack() as stack,
                contextlib.suppress(OSError, Refused, ValueError, TypeError, KeyError),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link = Link(connection, self._key, asks=False, patience=PATIENCE)
                asked, _ = link.receive()
                name, salt = str(asked["lease"]), bytes.fromhex(asked["salt"])
                if asked["engine_id"] != self.engine_id:
                    link.send({"problem": "it was started again"})
                    return
                memory, read = None, None
                while True:
                    if memory is None and "memory" in asked and (memory := open_memory(asked["memory"])) is not None:
                        stack.callback(os.close, memory)
                    if read is None and "nixl" in asked and self._nixl is not None:
                        read = NixlMemory(self._nixl, self._most_blocks * self._store.format.block_bytes)
                        stack.callback(read.close)
                    with self._leases.reading(name, salt) as lease:
                        answer, data = self._answer(asked, lease.blocks) if lease else ({"problem": "no lease"}, b"")
                    if memory is not None and data and write_all(memory, data):
                        answer, data = {**answer, "in_memory": len(data)}, b""
                    elif read is not None and data:
                        answer, data = {**answer, "in_memory": len(data), "there": read.put(data)}, b""
                    link.send(answer, data)
                    if asked["op"] == "release":
                        self._leases.end(name)
                        return
                    asked, _ = link.receive(patience=LEASE)
        finally:
            self._served.discard(connection)
            self._places.release()

    def _answer(self, asked: dict[str, Any], blocks: Sequence[tuple[int, bytes]]) -> tuple[dict[str, Any], Any]:
        match asked["op"]:
            case "describe":
                described = {"block_ids": [block for block, _ in blocks], "hashes": [key.hex() for _, key in blocks]}
                return {**described, "format": asdict(self._store.format), "chunk": self._most_blocks}, b""
            case "pull":
                start, count = int(asked["start"]), int(asked["count"])
                chosen = blocks[start : start + count]
                if not 0 < count <= self._most_blocks or start < 0 or len(chosen) < count:
                    raise Refused("it asks for blocks that are not there")
                data = self._store.read([block for block, _ in chosen])
                size = self._store.format.block_bytes
                parts = [data[i * size : (i + 1) * size] for i in range(count)]
                sums = [checksum(key, part).hex() for (_, key), part in zip(chosen, parts, strict=True)]
                return {"checksums": sums}, data
            case "renew" | "release":
                return {}, b""
        raise Refused("it asks for something unknown")

    @property
    def _most_blocks(self) -> int:
        return max(1, CHUNK // self._store.format.block_bytes)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _shut(connection: socket.socket) -> None:
    """Close a socket that a thread waits for."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
