# A small balancer of real connections, with the quirks of nginx and Caddy: it takes turns among the gateways that are
# ready, looks at /health/ready, and tries another gateway only where a connection was refused, never where a request
# may have been read. Half of the requests go over connections that it keeps, half over new ones. What it could not
# hand through whole, it notes.

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Self

import aiohttp
from aiohttp import web

LOOK_EVERY = 0.2  # seconds between looks at a gateway's health
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "host", "content-length"})


class Balancer:
    """Listens on a loopback port, in a thread and event loop of its own, until the block ends."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.url = ""
        self.broken: list[str] = []  # requests that reached a gateway and were not answered whole
        self.refused = 0  # connections; their requests went elsewhere
        self.running: Counter[str] = Counter()  # requests, by gateway
        self.is_ready = dict.fromkeys(urls, True)
        self._turn = 0
        self._numbers = count()
        self._has_started = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="balancer", daemon=True)
        self._thread.start()
        assert self._has_started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(20)

    async def _run(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout(total=120)
        ) as self._session:
            runner = web.ServerRunner(web.Server(self._forward))
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert runner.addresses
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            looking = [asyncio.create_task(self._look_at(url)) for url in self.is_ready]
            self._has_started.set()
            await self._is_over.wait()
            for task in looking:
                task.cancel()
            await runner.cleanup()

    async def _look_at(self, url: str) -> None:
        fresh = {"connection": "close"}  # a connection of its own each time, as balancers have it
        while True:
            try:
                patience = aiohttp.ClientTimeout(total=5)
                async with self._session.get(f"{url}/health/ready", headers=fresh, timeout=patience) as answer:
                    self.is_ready[url] = answer.status == 200
            except (aiohttp.ClientError, TimeoutError):
                self.is_ready[url] = False
            await asyncio.sleep(LOOK_EVERY)

    def _in_turn(self) -> Iterator[str]:
        self._turn += 1
        urls = [url for url, is_ready in self.is_ready.items() if is_ready] or [*self.is_ready]
        for place in range(len(urls)):
            yield urls[(self._turn + place) % len(urls)]

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        for url in self._in_turn():
            self.running[url] += 1
            try:
                return await self._ask(url, request, body)
            except aiohttp.ClientConnectorError:
                self.refused += 1
                self.is_ready[url] = False
            except (aiohttp.ClientError, TimeoutError) as exc:
                self.broken.append(f"{request.method} {url}{request.path}: {exc!r}")
                return web.Response(status=502)
            finally:
                self.running[url] -= 1
        self.broken.append(f"{request.method} {request.path}: every gateway refused the connection")
        return web.Response(status=502)

    async def _ask(self, url: str, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if next(self._numbers) % 2:
            headers["connection"] = "close"
        async with self._session.request(request.method, url + request.path, headers=headers, data=body) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response
