# An upstream whose every byte on the connection is the test's own, for what no HTTP server would send by itself.

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

Play = Callable[[asyncio.StreamWriter], Coroutine[None, None, None]]
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@contextlib.asynccontextmanager
async def serving(play: Play) -> AsyncIterator[str]:
    """Answer every request by ``play``, one on each connection, which then closes; give the URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)
            await play(writer)
            await writer.drain()
        writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(answer(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
