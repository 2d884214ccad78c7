# A replica of our own engine that dies in mid-stream at any byte: it passes on what a well one answers, as far as it is
# told to, and then breaks in the way it is told to.

from __future__ import annotations

import asyncio
import threading
from typing import Self

import httpx

from tests.support.upstream_http import HttpConnection, HttpRequest

ERROR = b'\n\ndata: {"error":{"message":"The engine died.","type":"server_error","param":null,"code":null}}\n\n'
WAYS = ("reset", "drop", "end", "error")  # and "hang"


class CutReplica:
    """Stands before the engine at ``well`` on a port of its own. ``heard`` is the last answer, whole.

    Answers to POST end after ``cut`` bytes, ``how`` tells in which way; ``cut`` None passes on all of them.
    """

    def __init__(self, well: str) -> None:
        self.cut: int | None = None
        self.how = "reset"
        self.heard = b""
        self.url = ""
        self._well = well
        self._connections: set[HttpConnection] = set()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with httpx.AsyncClient(base_url=self._well) as self._client:
            server = await self._loop.create_server(
                lambda: HttpConnection(self._answer, self._connections), "127.0.0.1", 0
            )
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._is_ready.set()
            await self._stop.wait()
            server.close()
            for connection in list(self._connections):
                connection.drop()

    async def _answer(self, request: HttpRequest, connection: HttpConnection) -> None:
        headers = {name: value for name, value in request.headers.items() if name.startswith(("x-", "content-type"))}
        answer = await self._client.request(request.method, request.path, content=request.body, headers=headers)
        connection.start(answer.status_code, {"content-type": answer.headers["content-type"]})
        if request.method != "POST" or self.cut is None:
            self.heard = answer.content if request.method == "POST" else self.heard
            connection.write(answer.content)
            connection.finish()
            return
        if self.cut:
            connection.write(answer.content[: self.cut])
        await asyncio.sleep(0.01)  # or a reset would overtake the bytes
        match self.how:
            case "reset":
                connection.reset()
            case "drop":
                connection.drop()
            case "hang":
                await asyncio.Event().wait()
            case "error":
                connection.write(ERROR)
                connection.finish()
            case "end":
                connection.finish()
