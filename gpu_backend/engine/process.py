# The engine in a process of its own, so that HTTP work never holds up a step. The parent keeps an ``EngineProcess``;
# the child runs ``main`` and dies with its parent. Between them lies one socket: pickled commands in, events out.

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_backend.engine.torch_import import import_torch
from gpu_backend.models.config.model import load_model_config
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.cost import ASSUMED_COSTS
from gpu_backend.step.messages import BlocksChanged, Command, Event, LoadModel, NewTokens, Ready

if TYPE_CHECKING:
    from gpu_backend.engine.loop import EngineLoop
    from gpu_backend.kv_transfer.seam import KvTransfer

PR_SET_PDEATHSIG = 1  # linux/prctl.h
REPORT_EVERY = 0.05  # seconds between load reports while the load changes
REPORT_AT_LEAST_EVERY = 1.0  # seconds


class EngineProcess:
    """The engine seen from the HTTP front end. Start it from a thread that lives as long as the parent process.

    The child dies with the thread that started it (Linux's parent-death signal goes by thread), and ends by itself when
    the parent's end of the socket closes.
    """

    def __init__(self, child: subprocess.Popen[bytes], connection: Connection) -> None:
        self._child = child
        self._connection = connection
        self._sending = threading.Lock()

    @classmethod
    def start(cls, config: EngineConfig) -> EngineProcess:
        """Start the child and return at once; the first event is ``Ready``, or ``receive`` raises ``EOFError``."""
        ours, theirs = Pipe(duplex=True)
        package_root = str(Path(__file__).resolve().parents[2])
        search_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        child = subprocess.Popen(
            [sys.executable, "-m", "gpu_backend.engine.process", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": search_path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.send(config)
        return cls(child, ours)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    def send(self, command: Command) -> None:
        """Hand a command over, from any thread. Raises ``OSError`` if the child is gone."""
        with self._sending:
            self._connection.send(command)

    def receive(self) -> tuple[Event, ...]:
        """Wait for the events of the next step. Raises ``EOFError`` when the child is gone."""
        try:
            return tuple(map(_unpack, self._connection.recv()))
        except OSError as error:
            raise EOFError("the engine's process is gone") from error

    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._child.poll() is None

    def stop(self, timeout: float = 5.0) -> None:
        """End the child and wait for it, at most ``timeout`` seconds. It keeps nothing that a slower end would save."""
        self._child.kill()
        self._child.wait(timeout)
        self._connection.close()


def main(descriptor: int, parent: int) -> int:
    """Run the engine in this process until the socket closes; return the exit status."""
    die_with(parent)
    # Ctrl-C and a service manager's stop go to the whole group: the parent drains first, then ends this process.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        config: EngineConfig = connection.recv()
    except (EOFError, OSError):
        return 0
    following: EngineConfig | None = config
    while following is not None:
        config, following = following, None
        try:
            loop, ready = _load(config)
        except Exception as error:
            words = f"gpu_backend: cannot load {config.checkpoint.model}: {error}"
            print(words, file=sys.stderr, flush=True)  # noqa: T201
            return 1
        with contextlib.suppress(EOFError, OSError):  # the parent is gone, and with it all waiting callers
            connection.send((_pack(ready),))
            following = _serve(connection, loop)
        loop.close()
        del loop
        gc.collect()  # what is not garbage by then stays for good
    return 0


def _serve(connection: Connection, loop: EngineLoop) -> EngineConfig:
    """Drain commands, step, send events; without work, sleep until a command comes. Return the model to load next."""
    reported, changed = -REPORT_AT_LEAST_EVERY, True
    while True:
        report_at = reported + (REPORT_EVERY if changed else REPORT_AT_LEAST_EVERY)
        patience = 0.0 if loop.has_work() else max(0.0, report_at - time.monotonic())
        events: list[Event] = []
        while connection.poll(patience):
            command = connection.recv()
            if isinstance(command, LoadModel):
                return command.config
            events += loop.handle(command)
            patience, changed = 0.0, True
        if loop.has_work():
            events += loop.step()
            changed = True
        if time.monotonic() >= report_at:
            events.append(loop.load())
            reported, changed = time.monotonic(), False
        if changes := loop.take_block_events():
            events.append(BlocksChanged(tuple(changes)))
        if events:
            connection.send(tuple(map(_pack, events)))


def _load(config: EngineConfig) -> tuple[EngineLoop, Ready]:
    """Load the model and build the loop; config.json is read before anything heavy is imported."""
    model = load_model_config(config.checkpoint.folder)
    gc.disable()  # modules stay: looking again and again which of them are garbage takes a tenth of the start
    import_torch()
    import torch

    from gpu_backend.engine.loop import EngineLoop
    from gpu_backend.execution.runner import Runner
    from gpu_backend.kv_transfer.tcp import TcpTransfer
    from gpu_backend.lora.loading import load_adapters
    from gpu_backend.scheduling.grammar_queue import GrammarQueue
    from gpu_backend.step.grammar import GrammarCompiler
    from gpu_backend.step.limits import Limits

    gc.freeze()  # nor are they looked at later, while a step waits
    gc.enable()
    if config.device.num_threads is not None:
        torch.set_num_threads(config.device.num_threads)
    compiler = GrammarCompiler(config.checkpoint.tokenizer_folder, model.vocab_size, model.eos_token_ids)
    runner = Runner(config, model)
    adapters = load_adapters(config.lora, runner.adapters, model)
    runner.warm_up()
    num_blocks = runner.max_model_len // config.cache.block_size
    if config.steps.measures_step_cost and config.steps.step_cost is None and num_blocks:
        from gpu_backend.hardware.calibration import measure_step_cost

        rows, most = config.steps.max_num_seqs, config.steps.max_num_batched_tokens
        cost = measure_step_cost(runner.run, num_blocks, config.cache.block_size, rows, most)
        config = replace(config, steps=replace(config.steps, step_cost=cost))
        print(f"gpu_backend: a step costs {json.dumps(asdict(cost))}", file=sys.stderr, flush=True)  # noqa: T201
    if config.device.num_ranks > 1:
        for rank, (layers, weights, cache) in enumerate(runner.parts_of_ranks):
            part = f"layers {layers.start} to {layers.stop - 1}, {weights:,} bytes of weights, {cache:,} of KV cache"
            told = f"rank {rank} of {config.device.num_ranks}: {part}"
            print(f"gpu_backend: {told}", file=sys.stderr, flush=True)  # noqa: T201
    limits = Limits(
        runner.max_model_len,
        model.vocab_size,
        model.eos_token_ids,
        runner.num_host_blocks,
        assumed_cost=ASSUMED_COSTS[runner.device.type],
        copy_seconds=runner.measure_copies(),
        draft_share=runner.draft_share,
    )
    transfer: KvTransfer | None = None
    if config.transfer.kv_transfer_address is not None:
        transfer = TcpTransfer(
            runner.block_store(config),
            *config.transfer.host_and_port,
            config.transfer.kv_transfer_secret,
            nixl=config.transfer.kv_transfer_by == "nixl",
        )
    loop = EngineLoop(
        config,
        runner,
        runner.num_blocks,
        limits,
        grammars=GrammarQueue(compiler),
        adapters=adapters,
        transfer=transfer,
    )
    ready = Ready(
        total_blocks=runner.num_blocks,
        block_size=runner.block_size,
        max_model_len=runner.max_model_len,
        device=str(runner.device),
        dtype=str(runner.dtype).removeprefix("torch."),
        step_cost=config.steps.step_cost,
        keeps_states=runner.keeps_states,
    )
    return loop, ready


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to end this process ``by`` a signal with its parent, and end it now if that is gone already.

    Linux has it; call it from the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        sys.exit(0)


def _pack(event: Event) -> Any:
    """Turn the most frequent event into a plain tuple, which pickles several times faster than a dataclass."""
    if type(event) is NewTokens and event.finish_reason is None and not (event.logprobs or event.prompt_scores):
        return event.request_id, event.reply_index, event.token_ids, event.cached_tokens, event.gpu_seconds
    return event


def _unpack(packed: Any) -> Event:
    if type(packed) is tuple:
        request_id, reply_index, token_ids, cached_tokens, gpu_seconds = packed
        return NewTokens(request_id, reply_index, token_ids, cached_tokens=cached_tokens, gpu_seconds=gpu_seconds)
    return packed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
