# Two engines that exchange KV blocks, in one process: loops over counting runners or real models, with a wire between
# them that can be cut, stopped, or made to lie.

from __future__ import annotations

import contextlib
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpu_backend.engine.loop import EngineLoop
from gpu_backend.kv_transfer.seam import BlockFormat, BlockStore
from gpu_backend.kv_transfer.tcp import TcpTransfer
from gpu_backend.step.messages import Generate
from gpu_backend.step.transfer import RemoteBlocks
from tests.support.engine import Answer, CountingRunner, collect, counting_loop

SECRET = "a secret of all engines of a test"
BLOCK = 4  # tokens


@dataclass
class HandClock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the reading."""
        return self.now


class CountingStore:
    """The bytes of a ``CountingRunner``'s blocks: their tokens."""

    def __init__(self, runner: CountingRunner, block_size: int = BLOCK, fingerprint: str = "counting") -> None:
        self.format = BlockFormat(fingerprint, "int64", (1, block_size), 8 * block_size)
        self.num_read = self.num_written = 0  # blocks
        self._runner = runner
        self._size = block_size

    def mark(self) -> None:
        """All that was launched is computed."""

    def read(self, blocks: Sequence[int]) -> memoryview:
        """Return their tokens."""
        self.num_read += len(blocks)
        slots = [block * self._size + i for block in blocks for i in range(self._size)]
        return memoryview(array("q", [self._runner.slots[slot] for slot in slots])).cast("B")

    def write(self, blocks: Sequence[int], data: memoryview, after: object) -> None:
        """Write tokens."""
        self.num_written += len(blocks)
        tokens = iter(data.cast("q"))
        for block in blocks:
            for i in range(self._size):
                self._runner.slots[block * self._size + i] = next(tokens)


@dataclass
class Engine:
    """A loop that exchanges blocks, and what it is made of."""

    loop: EngineLoop
    runner: CountingRunner
    store: CountingStore
    transfer: TcpTransfer
    clock: HandClock

    @property
    def counters(self) -> dict[str, float]:
        """What the load report counts."""
        return self.loop.load().counters


@contextlib.contextmanager
def counting_engine(
    num_blocks: int = 64,
    secret: str = SECRET,
    fingerprint: str = "counting",
    *,
    shares_memory: bool = True,
    nixl: bool = False,
    **settings: Any,
) -> Iterator[Engine]:
    """Run a loop over a counting runner that exchanges blocks."""
    runner = CountingRunner(BLOCK)
    store = CountingStore(runner, BLOCK, fingerprint)
    clock = HandClock()
    transfer = TcpTransfer(store, "127.0.0.1", 0, secret, clock, shares_memory=shares_memory, nixl=nixl)
    loop, _ = counting_loop(num_blocks, runner=runner, transfer=transfer, clock=clock, block_size=BLOCK, **settings)
    try:
        yield Engine(loop, runner, store, transfer, clock)
    finally:
        transfer.close()


def exchanging(stack: contextlib.ExitStack) -> Callable[[BlockStore], TcpTransfer]:
    """Return what lets a loop over a real model exchange blocks, until the stack is left."""

    def exchange(store: BlockStore) -> TcpTransfer:
        transfer = TcpTransfer(store, "127.0.0.1", 0, SECRET)
        stack.callback(transfer.close)
        return transfer

    return exchange


def end_leases(loop: EngineLoop) -> None:
    """Take back all that is held for other engines."""
    if loop._transfers is not None:
        while loop.scheduler.tables.apart:
            loop._transfers.end_oldest_lease()
            loop._transfers.advance(0.0)


def prefill(loop: EngineLoop, command: Generate) -> RemoteBlocks:
    """Compute a prompt and its first token; return where its blocks are held."""
    first = replace(
        command,
        sampling=replace(command.sampling, max_tokens=1, min_tokens=0, grammar=None, prompt_logprobs=None),
        n=1,
        resume_token_ids=(),
        holds_blocks=True,
    )
    answers: dict[tuple[str, int], Answer] = {}
    collect(answers, loop.handle(first))
    while loop.scheduler.replies:
        collect(answers, loop.step())
        loop.scheduler.check()
    held = answers[command.request_id, 0].events[-1].held
    assert held is not None
    return held.where


def decode(
    loop: EngineLoop, commands: Sequence[Generate], answers: dict[tuple[str, int], Answer] | None = None
) -> dict[tuple[str, int], Answer]:
    """Answer commands to their ends, however long what they wait for takes, and give all blocks back."""
    answers = {} if answers is None else answers
    for command in commands:
        collect(answers, loop.handle(command))
    until(lambda: not loop.has_work(), lambda: step(loop, answers))
    return answers


def step(loop: EngineLoop, answers: dict[tuple[str, int], Answer]) -> None:
    """Step once, and check the books."""
    collect(answers, loop.step())
    loop.scheduler.check()


def until(is_reached: Callable[[], bool], act: Callable[[], object] = lambda: time.sleep(0.002)) -> None:
    """Act until something is reached, for a minute at most."""
    end = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < end, "it is not reached"
        act()


class Wire:
    """Passes bytes between engines until ``most`` of the answering side have passed; then it is cut or goes silent.

    The byte of number ``spoilt`` is changed.
    """

    def __init__(
        self, remote: RemoteBlocks, most: int | None = None, spoilt: int = -1, *, goes_silent: bool = False
    ) -> None:
        self.passed = 0  # bytes of the answering side
        self._goal = remote.host, remote.port
        self._most = most
        self._spoilt = spoilt
        self._goes_silent = goes_silent
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.remote = replace(remote, port=self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing more pass."""
        for one in [self._listening, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.create_connection(self._goal)
                self._open += [here, there]
                threading.Thread(target=self._pass, args=(here, there), daemon=True).start()
                threading.Thread(target=self._pass_answers, args=(there, here), daemon=True).start()

    def _pass(self, source: socket.socket, goal: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                goal.sendall(data)
            goal.shutdown(socket.SHUT_WR)

    def _pass_answers(self, source: socket.socket, goal: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if 0 <= (at := self._spoilt - self.passed) < len(data):
                    data[at] ^= 1
                before = self.passed  # counted before they are sent: who has them may look
                if self._most is not None and before + len(data) > self._most:
                    self.passed = self._most
                    goal.sendall(data[: self._most - before])
                    if not self._goes_silent:
                        self.cut()
                    return
                self.passed += len(data)
                goal.sendall(data)
            goal.shutdown(socket.SHUT_WR)
