# What a WebSocket's messages take of a process: their room until they are read, and nothing once they are.

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from gateway.core.draining import Drain
from gateway.http.websocket import protocol
from gateway.http.websocket.frames import read_create
from gateway.http.websocket.realtime import RealtimeSession
from gateway.http.websocket.session import ResponseSockets
from protocol.errors import BadRequest
from protocol.serving.leaving import LEAVING

OFFER = (
    b"GET /v1/responses HTTP/1.1\r\nhost: here\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Line(asyncio.Transport):
    """A transport whose other end says nothing by itself."""

    def write(self, data: Any) -> None:
        """Take what is written."""

    def close(self) -> None:
        """Stay open."""

    def is_closing(self) -> bool:
        """It is there until the end."""
        return False

    def pause_reading(self) -> None:
        """Read on when it is asked for."""

    def resume_reading(self) -> None:
        """Read on."""


def text_frame(size: int) -> bytes:
    return bytes(Frame(Opcode.TEXT, b"x" * size).serialize(mask=True, extensions=[]))


def test_a_message_that_waits_behind_another_keeps_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that a read message gives back is its own alone."""
    room = protocol.SharedRoom(of_a_team=4_000)
    monkeypatch.setattr(protocol, "room", room)

    async def run() -> bool:
        has_read, ends = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            scope["extensions"][protocol.SOCKET].begin("team")
            assert len((await receive())["text"]) == 1_000
            has_read.set()
            await ends.wait()

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        connection = protocol.SocketProtocol(config, ServerState(), {}, lambda: None)
        connection.connection_made(Line())
        connection.data_received(OFFER)
        await asyncio.sleep(0)
        connection.data_received(text_frame(1_000))
        await has_read.wait()
        connection.data_received(text_frame(3_000))
        connection.message_is_read()
        is_free = room.take("team", 2_000)
        ends.set()
        connection.connection_lost(None)
        return is_free

    assert not asyncio.run(run())
    assert room.take("team", 2_000)  # what was asked for above is held; of the connection there is nothing any more


def test_nothing_of_a_message_is_kept_while_it_is_answered() -> None:
    """A long text would lie beside what was read of it for as long as its answer takes."""
    text = '{"type": "response.create", "stream": true, "input": "' + "x" * 1_000 + '"}'
    messages = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": text}]
    usual, found = sys.getrefcount(text) - 1, list[int]()  # one of them is the message's

    class Connection:
        left = asyncio.Event()

        def message_is_read(self) -> None:
            """Its room is free."""

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "websocket.disconnect"}

    async def send(_: Any) -> None:
        pass

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            body, other = (await receive())["body"], object()
            found.extend((sys.getrefcount(text), sys.getrefcount(body) - sys.getrefcount(other)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    scope = {
        "type": "websocket",
        "scheme": "ws",
        "headers": [],
        "extensions": {protocol.SOCKET: Connection(), LEAVING: lambda _: None},
    }
    asyncio.run(ResponseSockets(app, Drain()).answer(scope, receive, send))

    assert found == [usual, 0]  # as often as what has one name


def test_a_message_by_voice_takes_room_until_it_has_gone_on() -> None:
    """A key may have many conversations whose upstreams take nothing; their messages are counted all the same."""
    messages = [{"type": "websocket.receive", "text": text} for text in ("one", "two")]
    given_back = 0

    class Connection:
        def message_is_read(self) -> None:
            """Count it."""
            nonlocal given_back
            given_back += 1

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "websocket.disconnect"}

    scope = {"extensions": {protocol.SOCKET: Connection()}}
    session = RealtimeSession(ResponseSockets(None, Drain()), scope, receive, None)

    async def run() -> list[tuple[bytes | None, int]]:
        return [(await session.receive(), given_back) for _ in range(3)]

    assert asyncio.run(run()) == [(b"one", 0), (b"two", 1), (None, 2)]


def test_a_message_is_read_into_texts_alone() -> None:
    """What the pipeline would refuse is not built here, where objects take twenty times their bytes."""
    with pytest.raises(BadRequest, match="must be a text"):
        read_create(b'{"type": "response.create", "previous_response_id": [[], [], []]}')
