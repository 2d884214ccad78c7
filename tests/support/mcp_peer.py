# Both ends of the official SDK of the Model Context Protocol, run by a Python that has it: `serve PORT stateless`, a
# server of three tools; and `use URL KEY auto`, a client that lists and calls them and prints what it saw. Of the
# SDK's own dependencies one stands in the way of ours (multipart), so it is in no environment of the project. It reads
# the annotations of tools as types, so they are not put off here.

import asyncio
import json
import sys
from typing import Any

import httpx2
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.mcpserver import Context, MCPServer
from mcp.shared.exceptions import MCPError

CREDENTIAL = "mcp-credential-of-the-tests"

server = MCPServer("tolls")


@server.tool()
def toll(axles: int) -> str:
    """Say what a wagon pays."""
    return f"{axles * 2} coins"


@server.tool()
async def walk(steps: int, context: Context) -> str:
    """Tell of each step."""
    for step in range(steps):
        await context.report_progress(step + 1, steps)
    return "there"


@server.tool()
def open_gate() -> str:
    """Open the gate."""
    return "open"


def serve(port: int, is_stateless: bool) -> None:
    """Serve the tools to those who have the credential."""
    app = server.streamable_http_app(stateless_http=is_stateless)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        said = dict(scope.get("headers", ())).get(b"authorization", b"").decode()
        if scope["type"] == "http" and said != f"Bearer {CREDENTIAL}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    uvicorn.run(guarded, host="127.0.0.1", port=port, log_level="error")


async def use(url: str, key: str, mode: Any) -> dict[str, Any]:
    """List and call the tools; return what came of it."""
    told: list[float] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append(progress)

    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http:
        async with Client(streamable_http_client(url, http_client=http), mode=mode) as client:
            tools = [tool.name for tool in (await client.list_tools()).tools]
            answers: list[Any] = [
                await client.call_tool("toll", {"axles": 3}),
                await client.call_tool("walk", {"steps": 3}, progress_callback=note),
            ]
            try:
                await client.call_tool("open_gate", {})
                refusal = ""
            except MCPError as exc:
                refusal = str(exc)
            texts = [answer.content[0].text for answer in answers]
            seen = {"tools": tools, "texts": texts, "progress": told, "refusal": refusal}
            return {**seen, "version": client.protocol_version}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3] == "stateless")
    else:
        print(json.dumps(asyncio.run(use(*sys.argv[2:]))))
