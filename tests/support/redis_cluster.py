# A Redis Cluster of real Valkey processes on this machine: three primaries, and a replica of one of them.

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.dev.embedded.valkey import _find_valkey_binary
from gateway.run.processes import free_port

PASSWORD = "secret"
SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))  # of the three primaries
CONFIG = """\
bind 127.0.0.1
port {port}
cluster-port {bus}
requirepass {password}
masterauth {password}
save ""
cluster-enabled yes
cluster-node-timeout 60000
cluster-require-full-coverage no
repl-diskless-sync-delay 0
"""


class Cluster(NamedTuple):
    """Its URL, which names two of its servers; its processes and their ports: the primaries, then the replica."""

    url: str
    processes: list[subprocess.Popen[bytes]]
    ports: list[int]

    def server(self, number: int) -> Redis:
        """Return a client of one server."""
        return Redis(port=self.ports[number], password=PASSWORD, decode_responses=True)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Run a cluster until the end of the block."""
    with ExitStack() as stack:
        processes, ports = [], []
        for number in range(4):
            process, where = _launched(folder / str(number))
            processes.append(process)
            ports.append(where)
            stack.callback(process.wait)
            stack.callback(process.kill)
        addresses = ",".join(f"127.0.0.1:{port}" for port, _ in ports[1:3])
        cluster = Cluster(f"redis+cluster://:{PASSWORD}@{addresses}", processes, [port for port, _ in ports])
        asyncio.run(_join(cluster, ports[0]))
        yield cluster


def _launched(home: Path) -> tuple[subprocess.Popen[bytes], tuple[int, int]]:
    """Return a server that listens, and its two ports: others, where one was taken meanwhile."""
    home.mkdir(parents=True)
    while True:
        port, bus = free_port(), free_port()
        (home / "valkey.conf").write_text(CONFIG.format(port=port, bus=bus, password=PASSWORD))
        with (home / "log").open("wb") as log:
            process = subprocess.Popen([_find_valkey_binary(), "valkey.conf"], cwd=home, stdout=log, stderr=log)
        while process.poll() is None:
            if b"Ready to accept connections" in (home / "log").read_bytes():
                return process, (port, bus)
            time.sleep(0.02)


async def _join(cluster: Cluster, first: tuple[int, int]) -> None:
    """Have the servers know each other, and wait until all do."""
    async with AsyncExitStack() as clients, asyncio.timeout(60):
        servers = [await clients.enter_async_context(cluster.server(number)) for number in range(4)]
        for epoch, (server, slots) in enumerate(zip(servers[:3], SLOTS, strict=True), 1):
            await server.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
            await server.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
        for server in servers[1:]:
            await server.execute_command("CLUSTER MEET", "127.0.0.1", *first)
        whose = await servers[0].execute_command("CLUSTER MYID")
        await _until(lambda: servers[3].execute_command("CLUSTER REPLICATE", whose))

        async def is_whole() -> bool:
            for server in servers:
                told: Any = await server.execute_command("CLUSTER INFO")
                nodes: Any = await server.execute_command("CLUSTER NODES")
                if (told["cluster_state"], told["cluster_known_nodes"]) != ("ok", "4") or "slave" not in str(nodes):
                    return False
            link: Any = await servers[3].info("replication")
            return bool(link.get("master_link_status") == "up")

        await _until(is_whole)


async def _until(look: Callable[[], Awaitable[object]]) -> None:
    """Wait until a server that may not be up yet agrees."""
    while True:
        with suppress(RedisError, OSError):
            if await look():
                return
        await asyncio.sleep(0.05)
