# What a client gets of a server's result: the tools that it may use alone, and of what a server can do tools alone. A
# result that tells one caller's tools is private, whatever the server says of caching it. Pure.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from gateway.mcp.exchange import Answer
from gateway.mcp.grants import Grant
from gateway.mcp.messages import DISCOVER, INITIALIZE, LIST, VERSIONS, WITH_SESSIONS, McpMessage
from gateway.upstreams.wire.errors import UpstreamError
from protocol.decoding import NOT_JSON

TOOLS_ALONE = Raw(b'{"tools":{}}')
PRIVATE = Raw(b'"private"')


class _Named(Struct):
    name: str


def checked(answer: Answer, message: McpMessage, grant: Grant) -> Answer:
    """Return the answer to ``message`` as its caller may see it. Raises UpstreamError where the server's result is not
    what the protocol promises."""
    if answer.result is None:
        return answer
    change = {INITIALIZE: _initialized, DISCOVER: _discovered, LIST: _listed}.get(message.method)
    if change is None:
        return answer
    try:
        return replace(answer, result=change(answer.result, grant))
    except (*NOT_JSON, KeyError) as exc:
        raise UpstreamError("The MCP server's answer is not what the protocol promises.", outcome="malformed") from exc


def encoded(answer: Answer, ident: str | int) -> bytes:
    """Return an answer as the bytes of a message."""
    told: dict[str, Any] = {"jsonrpc": "2.0", "id": ident}
    return msgspec.json.encode(told | ({"result": answer.result} if answer.error is None else {"error": answer.error}))


def _initialized(result: Mapping[str, Raw], _: Grant) -> dict[str, Raw]:
    version = msgspec.json.decode(result["protocolVersion"], type=str)
    if version not in WITH_SESSIONS:
        words = f"The MCP server speaks revision {version[:20]!r}; spoken here: {', '.join(VERSIONS)}."
        raise UpstreamError(words, outcome="unsupported")
    return {**result, "capabilities": TOOLS_ALONE}


def _discovered(result: Mapping[str, Raw], _: Grant) -> dict[str, Raw]:
    theirs = msgspec.json.decode(result["supportedVersions"], type=list[str])
    spoken = Raw(msgspec.json.encode([version for version in VERSIONS if version in theirs]))
    return {**result, "supportedVersions": spoken, "capabilities": TOOLS_ALONE, "cacheScope": PRIVATE}


def _listed(result: Mapping[str, Raw], grant: Grant) -> dict[str, Raw]:
    tools = msgspec.json.decode(result["tools"], type=list[Raw])
    kept = [tool for tool in tools if grant.allows(msgspec.json.decode(tool, type=_Named).name)]
    is_stateless = "resultType" in result
    return {**result, "tools": Raw(msgspec.json.encode(kept)), **({"cacheScope": PRIVATE} if is_stateless else {})}
