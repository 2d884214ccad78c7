# A client of the Responses API's WebSocket mode, on the `websockets` package.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

ENDS = ("response.completed", "response.incomplete", "error")


class Talk:
    """One connection."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def send(self, **asked: Any) -> None:
        """Ask for a response of the small model, unless told otherwise."""
        self.socket.send(json.dumps({"type": "response.create", "model": "small", "store": False} | asked))

    def hear(self) -> dict[str, Any]:
        """Return the next message."""
        return dict(json.loads(self.socket.recv(timeout=30)))

    def told_at_the_end(self) -> int | None:
        """Return why the gateway closed the connection, once it has."""
        with pytest.raises(ConnectionClosed) as closed:
            self.socket.recv(timeout=30)
        return None if closed.value.rcvd is None else closed.value.rcvd.code

    def hear_until(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages up to one of a kind."""
        heard = [self.hear()]
        while heard[-1]["type"] != kind:
            heard.append(self.hear())
        return heard

    def hear_all(self) -> list[dict[str, Any]]:
        """Return the messages up to the end of a response, or of what refuses it."""
        heard = [self.hear()]
        while heard[-1]["type"] not in ENDS:
            heard.append(self.hear())
        return heard

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Ask, and return the response that the last message tells, or the message where that tells of an error."""
        self.send(**asked)
        last = self.hear_all()[-1]
        return dict(last.get("response", last))


@contextmanager
def talking(
    url: str, key: str, headers: Mapping[str, str] | None = None, path: str = "/v1/responses"
) -> Iterator[Talk]:
    """Open a connection to the gateway at ``url``, until the end of the block."""
    told = {"authorization": f"Bearer {key}", **(headers or {})}
    where = url.replace("http", "ws", 1) + path
    with connect(where, additional_headers=told, proxy=None, open_timeout=30, max_size=None) as socket:
        yield Talk(socket)
