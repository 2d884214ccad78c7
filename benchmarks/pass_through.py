# The least that a gateway in Python can be: it forwards the body to the upstream and the answer back, byte for byte, on
# the same server and client libraries as Tollgate. No keys, limits or accounting: what these cost is the difference.

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import uvicorn
from httpx_aiohttp import AiohttpTransport
from litestar import Litestar, Request, Response, post
from litestar.response import Stream

UPSTREAM = sys.argv[1] if __name__ == "__main__" else ""
KEY = "sk-upstream"


@post("/v1/chat/completions", status_code=200)
async def forward(request: Request[Any, Any, Any]) -> Response[bytes] | Stream:
    """Send the body on and bring the answer back, as it comes."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    outgoing = httpx.Request("POST", f"{UPSTREAM}/chat/completions", headers=headers, content=await request.body())
    answer = await request.app.state.transport.handle_async_request(outgoing)
    kind = answer.headers["content-type"]
    if not kind.startswith("text/event-stream"):
        return Response(await answer.aread(), media_type=kind, status_code=answer.status_code)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            async for piece in answer.stream:
                yield piece
        finally:
            await answer.aclose()

    return Stream(pieces(), media_type=kind, status_code=answer.status_code)


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncIterator[None]:
    """Open one pool of connections, the same kind as the gateway's."""

    def new_session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    app.state.transport = AiohttpTransport(client=new_session)
    yield
    await app.state.transport.aclose()


if __name__ == "__main__":
    uvicorn.run(
        Litestar([forward], lifespan=[lifespan], logging_config=None),
        port=int(sys.argv[2]),
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
    )
