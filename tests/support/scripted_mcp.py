# An MCP server that does what a test says, however wrong: plain HTTP by hand, and every request kept.

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in ("find", "close", "purge")]


@dataclass(frozen=True)
class Heard:
    """One request as it came."""

    headers: Mapping[str, str]  # names in lower case
    body: dict[str, Any]


Act = Callable[["Stage", Heard], object]


class Stage(BaseHTTPRequestHandler):
    """Where a script acts."""

    protocol_version = "HTTP/1.1"
    server: ScriptedMcp

    def do_POST(self) -> None:
        """Answer as the script says, else as a good server would."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        heard = Heard({name.lower(): value for name, value in self.headers.items()}, body)
        self.server.heard.append(heard)
        try:
            (self.server.act or well)(self, heard)
        except OSError:  # the gateway has had enough
            self.close_connection = True

    def do_DELETE(self) -> None:
        """End a session."""
        self.server.heard.append(Heard({name.lower(): value for name, value in self.headers.items()}, {}))
        self.say(200 if self.headers["mcp-session-id"] == "session-1" else 404, b"")

    def say(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        """Answer whole."""
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, *events: object, ends: bool = True) -> None:
        """Begin, or go on with, a stream of events; texts go out as they are."""
        if not hasattr(self, "_streams"):
            self._streams = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
        for event in events:
            text = event if isinstance(event, str) else f"event: message\ndata: {json.dumps(event)}\n\n"
            self.wfile.write(text.encode())
            self.wfile.flush()
        self.close_connection = ends

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class ScriptedMcp(ThreadingHTTPServer):
    """The server, on a port of its own, from the beginning of the block to its end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Stage)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/mcp"
        self.act: Act | None = None
        self.heard: list[Heard] = []
        self.may_go_on = threading.Event()  # for scripts that wait

    def __enter__(self) -> ScriptedMcp:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        self.shutdown()
        self.server_close()

    def forget(self) -> None:
        """Be good again, and remember nothing."""
        self.may_go_on.set()
        self.act, self.heard, self.may_go_on = None, [], threading.Event()


def well(stage: Stage, heard: Heard) -> None:
    """Answer as the protocol has it."""
    method, ident = heard.body["method"], heard.body.get("id")
    if ident is None:
        stage.say(202, b"")
        return
    results: dict[str, dict[str, Any]] = {
        "initialize": {
            "protocolVersion": heard.body["params"].get("protocolVersion"),
            "capabilities": {"tools": {"listChanged": True}, "resources": {}, "logging": {}},
            "serverInfo": {"name": "scripted", "version": "1"},
        },
        "server/discover": {
            "resultType": "complete",
            "supportedVersions": ["2027-01-01", "2026-07-28"],
            "capabilities": {"tools": {}, "prompts": {}},
            "cacheScope": "public",
            "ttlMs": 5,
        },
        "tools/list": {"resultType": "complete", "tools": TOOLS, "cacheScope": "public", "ttlMs": 5},
        "tools/call": {"resultType": "complete", "content": [{"type": "text", "text": "done"}], "big": 2**70},
        "ping": {},
    }
    said = json.dumps({"jsonrpc": "2.0", "id": ident, "result": results[method]}).encode()
    stage.say(200, said, **({"mcp_session_id": "session-1"} if method == "initialize" else {}))
