# The gateways Tollgate is compared with, each optional, of an environment of its own, run as one process as its own
# pages say, with what it can do without a database. DIR is where one is installed:
#
#   smg       python -m venv DIR && DIR/bin/pip install smg
#   litellm   python -m venv DIR && DIR/bin/pip install 'litellm[proxy]' httptools
#   portkey   npm install --prefix DIR @portkey-ai/gateway@1.15.2, with DIR/package.json before it (below)
#
# Portkey's gateway 1.15.2 answers every stream with a 500 on the newer @hono/node-server that npm takes; it needs
#
#   {"dependencies": {"@portkey-ai/gateway": "1.15.2"}, "overrides": {"@hono/node-server": "1.13.8"}}

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec import Struct

from benchmarks.stack import Server, run_server, wait_for_answer
from gateway.run.processes import free_port

Models = Mapping[str, str]  # our name of each model to the upstream's


class Peer(Struct, frozen=True):
    """A gateway to compare with, and where it is installed."""

    name: str
    folder: Path

    @property
    def version(self) -> str:
        """What is installed there."""
        return KINDS[self.name].version(self.folder)

    @property
    def does(self) -> str:
        """What it does with a call and what it does not, so that the comparison is taken for no more than it is."""
        return KINDS[self.name].does

    def start(self, upstream: Server, models: Models, folder: Path, core: int) -> AbstractContextManager[Server]:
        """Run it on ``core``; it answers when it is given. ``folder`` is for its files."""
        return KINDS[self.name].start(self.folder, upstream, models, folder, core)


class Kind(Struct, frozen=True):
    """How a peer is started and what it does."""

    does: str
    version: Callable[[Path], str]
    start: Callable[[Path, Server, Models, Path, int], AbstractContextManager[Server]]


def read_peer(text: str) -> Peer:
    """Return the peer that NAME=DIR means; for argparse."""
    name, _, folder = text.partition("=")
    if name not in KINDS:
        raise ArgumentTypeError(f"no peer is called {name!r}: there are {', '.join(KINDS)}")
    peer = Peer(name, Path(folder).absolute())
    try:
        peer.version  # noqa: B018  # reads the files of the installation
    except (OSError, StopIteration) as exc:
        raise ArgumentTypeError(
            f"{name} is not installed in {folder or 'an empty path'}: see benchmarks/peers.py"
        ) from exc
    return peer


@contextmanager
def start_smg(installed: Path, upstream: Server, models: Models, folder: Path, core: int) -> Iterator[Server]:
    """Run SMG's router in front of the upstream as an OpenAI-compatible worker, with a thread for each core that it may
    use: one. The key that it wants of callers is the one that it sends to the worker."""
    port, metrics = free_port(), free_port()
    command: list[str | Path] = [installed / "bin" / "smg", "launch", "--backend", "openai"]
    command += ["--worker-urls", upstream.url.removesuffix("/v1/chat/completions"), "--api-key", upstream.key]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    command += ["--log-level", "warn", "--disable-tokenizer-autoload", "--shutdown-grace-period-secs", "1"]
    with run_server(command, core, port, log=folder / "smg.log") as pid:
        server = Server("smg", f"http://127.0.0.1:{port}/v1/chat/completions", upstream.key, (pid,))
        wait_for_answer(server, next(iter(models.values())))
        yield server


@contextmanager
def start_portkey(installed: Path, upstream: Server, models: Models, folder: Path, core: int) -> Iterator[Server]:
    """Run Portkey's gateway. It has no configuration: each call says where it goes, with the provider's key."""
    port = free_port()
    script = installed / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    command = ["node", script, f"--port={port}", "--headless"]
    base = upstream.url.removesuffix("/chat/completions")
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": base}
    with run_server(command, core, port, log=folder / "portkey.log", more={"NODE_ENV": "production"}) as pid:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        server = Server("portkey", url, upstream.key, (pid,), headers=headers)
        wait_for_answer(server, next(iter(models.values())))
        yield server


@contextmanager
def start_litellm(installed: Path, upstream: Server, models: Models, folder: Path, core: int) -> Iterator[Server]:
    """Run LiteLLM's proxy with a master key and the price of each model."""
    base, key = upstream.url.removesuffix("/chat/completions"), "sk-litellm"
    price = {"input_cost_per_token": 2.5e-6, "output_cost_per_token": 1e-5}
    same = {"api_base": base, "api_key": upstream.key, **price}
    listed = [
        {"model_name": name, "litellm_params": {"model": f"openai/{theirs}", **same}} for name, theirs in models.items()
    ]
    config = folder / "litellm.yaml"
    config.write_text(json.dumps({"model_list": listed, "general_settings": {"master_key": key}}))
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    port = free_port()
    command = [installed / "bin" / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with run_server(command, core, port, log=folder / "litellm.log", more=quiet) as pid:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        server = Server("litellm", url, key, (pid,), takes_our_names=True)
        wait_for_answer(server, next(iter(models)))
        yield server


def _python_package(name: str) -> Callable[[Path], str]:
    """Return a function that reads a package's version in an environment, without running its Python."""

    def version(installed: Path) -> str:
        found = next(installed.glob(f"lib/python*/site-packages/{name}-*.dist-info"))
        return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")

    return version


def _portkey_version(installed: Path) -> str:
    package = installed / "node_modules" / "@portkey-ai" / "gateway" / "package.json"
    return str(json.loads(package.read_text(encoding="utf-8"))["version"])


KINDS = {
    "smg": Kind(
        "a router in Rust, all its threads on the one core. It checks one key, which all callers share; no limits are "
        "set. It reckons no cost and books nothing.",
        _python_package("smg"),
        start_smg,
    ),
    "portkey": Kind(
        "Node on one thread. It checks no key (the provider's comes with the call), sets no limits, reckons no cost "
        "and books nothing.",
        _portkey_version,
        start_portkey,
    ),
    "litellm": Kind(
        "one process on uvicorn, uvloop and httptools. It checks its master key and reckons the cost of each call. "
        "Without a database, as here, it has no keys of teams, no limits and no spend log.",
        _python_package("litellm"),
        start_litellm,
    ),
}
