# A Ray cluster of two machines on this one: a head, whose GCS keeps what it knows on disk, and a machine with room for
# replicas, which waits for a head that is away.

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from gateway.run.processes import free_port
from tests.support.waiting import until

WITHIN = 120.0  # seconds for a start
# Two machines have two addresses. A driver that says none belongs to the head's raylet, and Ray sends what it starts to
# that one, until it has found out that it is dead.
HEAD_HOST, MACHINE_HOST = "127.0.0.2", "127.0.0.1"
# Processes with a niceness of 15, as Ray's workers are by itself, get nothing of a machine that does much else.
SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "1", "RAY_gcs_rpc_server_reconnect_timeout_s": "600"}


class RayCluster:
    """Started by ``running_cluster``."""

    def __init__(self, folder: Path, environment: dict[str, str], cpus: int) -> None:
        self._folder, self._environment = folder, {**environment, **SETTINGS}
        host, port = HEAD_HOST, free_port()
        self.address = f"{host}:{port}"
        words = ("--node-ip-address", host, "--port", str(port))
        self._head = self._start("--head", *words, "--num-cpus=0", name="head")
        until(self._answers, within=WITHIN)
        self._machines = dict[str, subprocess.Popen[bytes]]()
        self.add_machine(MACHINE_HOST, cpus)

    @property
    def environment(self) -> dict[str, str]:
        """What a driver needs to know."""
        return {**SETTINGS, "RAY_ADDRESS": self.address}

    def add_machine(self, host: str, cpus: int) -> None:
        """Let another machine join: a raylet at an address of its own. Two that start at once take the same ports."""
        words = ("--address", self.address, "--node-ip-address", host, f"--num-cpus={cpus}")
        self._machines[host] = self._start(*words, name=host)
        until(lambda: "block forever" in (self._folder / f"{host}.log").read_text(), within=WITHIN)

    def processes_of(self, host: str) -> set[int]:
        """Return what runs on a machine: its raylet, actors and engines."""
        return {one.pid for one in _tree(self._machines[host])}

    def kill_machine(self, host: str) -> None:
        """End all of its processes at once."""
        for one in _tree(machine := self._machines.pop(host)):
            with suppress(psutil.NoSuchProcess):
                one.kill()
        machine.wait()

    def kill_head(self) -> None:
        """End all of its processes at once."""
        there = _tree(self._head)
        (gcs,) = (one for one in there if one.name() == "gcs_server")
        self._gcs = gcs.cmdline(), gcs.environ()
        for one in there:
            one.kill()
        self._head.wait()

    def bring_head_back(self) -> None:
        """Start its GCS again; `ray start --head` would take the other machine's raylet, which is here, for a head."""
        command, environment = self._gcs
        self._head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._answers, within=WITHIN)

    def end(self) -> None:
        """Leave no process."""
        for each in (*self._machines.values(), self._head):
            for one in _tree(each):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            each.wait()

    def _start(self, *words: str, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *words]
        command += ["--object-store-memory=80000000"]
        if name == "head":
            command += ["--include-dashboard=false", f"--temp-dir={self._folder}"]
        kept = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._folder / "gcs")}
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**self._environment, **kept})

    def _answers(self) -> bool:
        host, port = self.address.split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), 1):
            time.sleep(1.0)  # it answers a little before a machine can join
            return True
        return False


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    return []


@contextmanager
def running_cluster(folder: Path, environment: dict[str, str], cpus: int = 6) -> Iterator[RayCluster]:
    """Run a cluster until the end of the block. ``folder``: its path is short, for sockets lie there. ``cpus``: of its
    first machine."""
    cluster = RayCluster(folder, environment, cpus)
    try:
        yield cluster
    finally:
        cluster.end()
