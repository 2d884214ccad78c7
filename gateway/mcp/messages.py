# Messages of the Model Context Protocol over HTTP: read from a client's body, held against its headers, and written for
# a server; and errors as JSON-RPC has them. Revision 2026-07-28 is stateless: each request says its version in the body
# and mirrors its method and tool in headers. Before it, `initialize` opens a session.
# https://modelcontextprotocol.io/specification/2026-07-28/basic/transports/streamable-http

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.core.errors import RpcError

STATELESS = "2026-07-28"
WITH_SESSIONS = ("2025-11-25", "2025-06-18")
VERSIONS = (STATELESS, *WITH_SESSIONS)

INITIALIZE, DISCOVER, LIST, CALL, PING = "initialize", "server/discover", "tools/list", "tools/call", "ping"
INITIALIZED = "notifications/initialized"
METHODS: Mapping[bool, tuple[str, ...]] = {  # by whether a request is of the stateless revision
    True: (DISCOVER, LIST, CALL),
    False: (INITIALIZE, PING, LIST, CALL),
}

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022

LONGEST_NAME = 256  # characters of a tool's name
SHORT = 4096  # bytes of the parameters of a message that is much the same from every caller
MOST_PARAM_HEADERS, LONGEST_PARAM = 32, 4096
PARAM = re.compile(r"mcp-param-[!#$%&'*+.^_`|~0-9a-z-]+")
VISIBLE = re.compile(r"[\x20-\x7e\t]*")
SENTINEL = re.compile(r"=\?base64\?(.*)\?=", re.DOTALL)
OF_VERSION = "io.modelcontextprotocol/protocolVersion"

Ident = str | int


class McpMessage(Struct, frozen=True):
    """One request of JSON-RPC, or a notification, which has no id. ``params`` are as they came, byte for byte."""

    jsonrpc: Literal["2.0"]
    method: str
    id: Ident | UnsetType = UNSET
    params: dict[str, Raw] = {}

    @property
    def is_alike(self) -> bool:
        """Whether every caller asks much the same by it. What its server makes of a tool's arguments, or of a cursor,
        is its caller's doing, too: that alone closes a server to no other team."""
        return self.method != CALL and "cursor" not in self.params and sum(map(len, self.params.values())) <= SHORT


def read_message(body: bytes) -> McpMessage:
    """Return the one message of a body. Raises RpcError."""
    try:
        return _decode(body)
    except msgspec.ValidationError as exc:
        right = "A body is one request or notification of JSON-RPC 2.0; answers and lists of messages are not taken"
        raise RpcError(f"{right}: {exc}", INVALID_REQUEST) from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise RpcError(f"The body is no JSON: {exc}", PARSE_ERROR, code="invalid_json") from exc


def check_version(message: McpMessage, headers: Mapping[str, str]) -> bool:
    """Return whether a message is of the stateless revision. Raises RpcError where its version is not spoken here, or
    its headers and its body do not say the same."""
    version = headers.get("mcp-protocol-version")
    if message.method == INITIALIZE and version != STATELESS:
        return False
    if version is None:
        raise RpcError("The header MCP-Protocol-Version is missing.", HEADER_MISMATCH)
    if version not in VERSIONS:
        told = {"supported": VERSIONS, "requested": version[:100]}
        raise RpcError(f"Unsupported protocol version. Spoken: {', '.join(VERSIONS)}.", UNSUPPORTED_VERSION, data=told)
    if version != STATELESS:
        return False
    if message.id is UNSET:
        return True  # the revision says nothing of the headers of notifications
    meta = _read(message.params.get("_meta"), dict[str, Raw]) or {}
    _check_equal("MCP-Protocol-Version", version, _read(meta.get(OF_VERSION), str))
    _check_equal("Mcp-Method", headers.get("mcp-method"), message.method)
    if message.method == CALL:
        _check_equal("Mcp-Name", _plain(headers.get("mcp-name")), tool_of(message))
    return True


def tool_of(message: McpMessage) -> str:
    """Return which tool is called. Raises RpcError."""
    name = _read(message.params.get("name"), str)
    if not name or len(name) > LONGEST_NAME:
        raise RpcError(
            f"'params.name' names the tool, in 1 to {LONGEST_NAME} characters.", INVALID_PARAMS, code="invalid_value"
        )
    return name


def headers_for(message: McpMessage, version: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with which a server is told of a message. Of those ``given`` by the client only the mirrored
    parameters of a tool pass, which a gateway has to pass on. Raises RpcError."""
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    if version is not None:
        headers["mcp-protocol-version"] = version
    if version != STATELESS:
        return headers
    headers["mcp-method"] = message.method
    if message.method == CALL:
        headers["mcp-name"] = _encoded(tool_of(message))
        mirrored = {name: value for name, value in given.items() if name.startswith("mcp-param-")}
        for name, value in mirrored.items():
            if not (PARAM.fullmatch(name) and VISIBLE.fullmatch(value) and len(value) <= LONGEST_PARAM):
                raise RpcError("A header Mcp-Param-… is no short line of printable ASCII.", HEADER_MISMATCH)
        if len(mirrored) > MOST_PARAM_HEADERS:
            raise RpcError(f"At most {MOST_PARAM_HEADERS} headers Mcp-Param-… are taken.", HEADER_MISMATCH)
        headers |= mirrored
    return headers


def body_for(message: McpMessage) -> bytes:
    """Return a message as a server gets it. What servers could ask of clients in a session is not spoken here, so no
    client says there that it could be asked."""
    params = message.params
    if message.method == INITIALIZE:
        params = params | {"capabilities": Raw(b"{}")}
    known = {"jsonrpc": "2.0", "method": message.method, "params": params}
    return msgspec.json.encode(known if message.id is UNSET else {**known, "id": message.id})


def _read(raw: Raw | None, kind: Any) -> Any:
    """Return what a parameter says, ``None`` where it is missing or of another kind."""
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _check_equal(header: str, said: str | None, meant: str | None) -> None:
    if said is None or said != meant:
        why = "is missing" if said is None else "does not match the body"
        raise RpcError(f"Header mismatch: {header} {why}.", HEADER_MISMATCH)


def _plain(value: str | None) -> str | None:
    """Return what a header's value stands for: text beyond plain ASCII travels in base64."""
    found = None if value is None else SENTINEL.fullmatch(value)
    if found is None:
        return value
    try:
        plain = base64.b64decode(found[1], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return plain if value == f"=?base64?{base64.b64encode(plain.encode()).decode()}?=" else ""


def _encoded(value: str) -> str:
    is_plain = VISIBLE.fullmatch(value) and "\t" not in value and value == value.strip() and not SENTINEL.match(value)
    return value if is_plain else f"=?base64?{base64.b64encode(value.encode()).decode()}?="


_decode = msgspec.json.Decoder(McpMessage).decode
