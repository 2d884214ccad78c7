# The whole engine as its users start it: python -m gpu_backend, a front and an engine process behind it.

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from gateway.run.processes import free_port
from tests.support.waiting import until


@dataclass(frozen=True)
class EngineServer:
    """A running server. ``url`` is without /v1."""

    url: str
    process: subprocess.Popen[bytes]

    def engine(self) -> psutil.Process:
        """Return the engine's own process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def load(self) -> dict[str, float]:
        """Return what /load says."""
        return httpx.get(self.url + "/load").json()

    def wait_until_ready(self, within: float = 180) -> None:
        """Wait until /health is well."""
        until(self._is_ready, within)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"the server ended with status {self.process.returncode}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + "/health").status_code == 200
        return False


def start_engine_server(model: Path, *flags: str, port: int = 0, **environment: str) -> EngineServer:
    """Start a server for the model "tiny" and return at once; it measures no steps, which takes half a second."""
    port = port or free_port()
    command = [sys.executable, "-m", "gpu_backend", "--model", str(model), "--served-model-name", "tiny"]
    command += ["--port", str(port), "--device", "cpu", "--num-threads", "1", "--step-cost", "off", *flags]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    return EngineServer(f"http://127.0.0.1:{port}", process)


@contextlib.contextmanager
def running_engine_server(model: Path, *flags: str) -> Iterator[EngineServer]:
    """Run a server until the end of the block."""
    server = start_engine_server(model, *flags)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
