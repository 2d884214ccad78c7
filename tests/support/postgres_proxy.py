# The way to Postgres, on which answers to COMMIT can be lost, as when a pooler or a failover breaks the connection in
# that moment: the transaction is done, and whoever asked for it cannot know. A statement that commits at once and waits
# for the disk afterwards (billing/quotas/lease_store.py) loses the answer to that.

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import make_url

COMMIT = b"COMMIT;\0"  # as asyncpg says it
PREPARED = re.compile(rb"(__asyncpg_\w+)\0SELECT pg_logical_emit_message")


class PostgresProxy:
    """A TCP proxy on a port of its own, in a thread and event loop of its own."""

    def __init__(self, url: str) -> None:
        self.lost = 0  # answers to COMMIT
        self._target = make_url(url)
        self._words: bytes | None = None  # of the statements whose COMMIT is lost
        self._is_once = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postgres-proxy", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    @property
    def url(self) -> str:
        """The URL of Postgres by this way."""
        port = self._server.sockets[0].getsockname()[1]
        return self._target.set(host="127.0.0.1", port=port).render_as_string(hide_password=False)

    def turn_to(self, url: str) -> None:
        """Lead to another server from now on, with the same user."""
        there = make_url(url)
        self._target = self._target.set(host=there.host, port=there.port)

    def lose_commit_of(self, words: str) -> None:
        """Break the next connection that commits a statement with ``words``, which it says for the first time, as soon
        as Postgres has done it."""
        self._words, self._is_once = words.encode(), True

    def lose_commits(self) -> None:
        """Break every connection that commits, as soon as Postgres has done it, until ``mend``."""
        self._words, self._is_once = b"", False

    def mend(self) -> None:
        """Let everything through again."""
        self._words = None

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(5)

    def stop(self) -> None:
        """Break everything."""
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _break(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there = await asyncio.open_connection(self._target.host, self._target.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there}
        has_said = is_lost = False
        reaches = COMMIT  # the name of the statement that waits for the disk, once it is known

        async def ask() -> None:
            nonlocal has_said, is_lost, reaches
            while piece := await reader.read(65536):
                words = self._words
                has_said = words is not None and (has_said or words in piece)
                if prepared := PREPARED.search(piece):
                    reaches = prepared[1]
                elif has_said and (piece.endswith(COMMIT) or reaches in piece):
                    is_lost = True
                    self._words = None if self._is_once else words
                there.write(piece)
            there.close()

        async def answer() -> None:
            while piece := await there_reader.read(65536):
                if is_lost:
                    self.lost += 1
                    writer.transport.abort()
                    return
                writer.write(piece)
            writer.close()

        try:
            await asyncio.gather(ask(), answer())
        except OSError:  # one side was reset: the other must not think that it is still there, and keep its locks
            writer.transport.abort()
            there.transport.abort()
        self._writers -= {writer, there}


@contextmanager
def postgres_proxy(url: str) -> Iterator[PostgresProxy]:
    """Run a proxy in front of ``url``."""
    proxy = PostgresProxy(url)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
