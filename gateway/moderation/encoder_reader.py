# Asks the encoder's process for the vectors of texts. What is asked while it reads goes together in the next batch, so
# a crowd costs little more than one; a process that dies is started again, and what it had not read is judged without.

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import structlog

from gateway.moderation.reading.encoder import DIMENSIONS
from gateway.moderation.reading.process import HEADER
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from protocol.serving.deadlines import running_timeout

if TYPE_CHECKING:
    from gateway.moderation.reading.encoder import Vectors

DEADLINE = 2.0  # seconds that a text may wait for its vector
FIRST_DEADLINE = 10.0  # and the first ones, while the process starts: a second where the machine has one to spare
MOST_CHARACTERS = 16_000  # of a batch: a long document keeps others waiting for a quarter of a second
PAUSES = (0.0, 1.0, 5.0, 30.0)  # seconds before the process is started again, the more often it died

log = structlog.get_logger()


class Reader:
    """The encoder's process of one gateway process, started when it is first needed; ``close`` it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: deque[tuple[str, asyncio.Future[Vectors]]] = deque()
        self._asked = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._is_down = False
        self._has_read = False
        self.pid: int | None = None  # of the process, once it runs

    async def read(self, texts: Sequence[str]) -> list[Vectors] | None:
        """Return the vector of each text, (``DIMENSIONS``,); None where the encoder fails or is late."""
        self.start()
        if self._is_down:
            counter_of(self._metrics.safety_reader, "failed").inc(len(texts))
            return None
        loop = asyncio.get_running_loop()
        vectors: list[asyncio.Future[Vectors]] = [loop.create_future() for _ in texts]
        self._waiting.extend(zip(texts, vectors, strict=True))
        self._asked.set()
        try:
            async with running_timeout(DEADLINE if self._has_read else FIRST_DEADLINE):
                read = await asyncio.gather(*vectors)
        except (TimeoutError, EOFError, OSError) as exc:
            counter_of(self._metrics.safety_reader, "failed").inc(len(texts))
            log.warning("safety_reader_failed", error=type(exc).__name__)
            return None
        self._has_read = True
        counter_of(self._metrics.safety_reader, "read").inc(len(texts))
        return read

    def start(self) -> None:
        """Start the process, so that the first text need not wait for it."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """End the process."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _serve(self) -> None:
        """Keep a process running; what one has not answered when it dies is refused."""
        died = 0
        while True:
            try:
                await self._run()
            except (EOFError, OSError) as exc:
                log.warning("safety_reader_ended", error=type(exc).__name__)
            self._is_down = True  # what waits, and what comes until the next start, is judged without
            while batch := self._next():
                for _, future in batch:
                    future.set_exception(EOFError())
            await asyncio.sleep(PAUSES[min(died, len(PAUSES) - 1)])
            self._is_down = False
            died += 1

    async def _run(self) -> None:
        """Run one process until it dies."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.moderation.reading.process",
            stdin=PIPE,
            stdout=PIPE,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self.pid = process.pid
        try:
            await self._ask(process)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _ask(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        while True:
            while not (batch := self._next()):
                self._asked.clear()
                await self._asked.wait()
            try:
                frame = msgspec.msgpack.encode([text for text, _ in batch])
                process.stdin.write(len(frame).to_bytes(HEADER) + frame)
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(HEADER))
                vectors = np.frombuffer(await process.stdout.readexactly(size), np.float32).reshape(-1, DIMENSIONS)
            except (EOFError, OSError) as exc:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(exc)
                raise
            for (_, future), vector in zip(batch, vectors, strict=True):
                if not future.done():
                    future.set_result(vector)

    def _next(self) -> list[tuple[str, asyncio.Future[Vectors]]]:
        """Return what goes into the next batch: texts that are still waited for."""
        batch: list[tuple[str, asyncio.Future[Vectors]]] = []
        size = 0
        while self._waiting and size < MOST_CHARACTERS:
            text, future = self._waiting.popleft()
            if not future.done():
                batch.append((text.encode("utf-8", "replace").decode(), future))
                size += len(text)
        return batch
