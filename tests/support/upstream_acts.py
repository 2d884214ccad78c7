# How the scripted upstream sends an answer: regularly, or with the fault that the script names.

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from tests.support.upstream_http import HttpConnection
from tests.support.upstream_scripts import Fault, Script

BIG = 10 * 1024 * 1024  # bytes
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


class Playable(Protocol):
    """An answer in some dialect: its events, and what the dialect has for the faults."""

    error_frame: dict[str, Any]
    done: bytes  # the terminal marker, if there is one

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the events before the terminal marker, and for each whether it carries a token."""

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return an event as bytes."""

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether an event says why the reply ended."""

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of an event's token."""

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out why a body's reply ended."""


class Ended(Exception):
    """The fault was played; nothing more is sent."""


def send_json(connection: HttpConnection, status: int, headers: Mapping[str, str], body: object) -> None:
    """Send a whole JSON answer."""
    data = encode(body)
    connection.start(status, {"content-type": "application/json", **headers}, len(data))
    connection.write(data)


def encode(value: object) -> bytes:
    """Return JSON as OpenAI writes it: no spaces, characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def spoil(answer: Playable, script: Script) -> dict[str, Any]:
    """Return the body of an answer with the fault that lies in its words."""
    body = answer.whole()
    match script.fault:
        case Fault.ERROR_FRAME | Fault.ERROR_FIRST:
            return answer.error_frame
        case Fault.NO_FINISH:
            answer.take_finish(body)
        case Fault.BIG_CHUNK:
            answer.swell_whole(body, "x" * BIG)
    return body


async def play_pieces(
    connection: HttpConnection, headers: Mapping[str, str], pieces: list[bytes], script: Script
) -> None:
    """Send bytes as they are made; a fault comes after as many pieces as the script says."""
    kind = "text/event-stream" if pieces[0].startswith(b"data:") else "application/octet-stream"
    connection.start(200, {"content-type": kind, **headers})
    for place, piece in enumerate(pieces):
        if script.fault is not None and place == script.after:
            await asyncio.sleep(0.01)
            if script.fault is Fault.HANG:
                await asyncio.Event().wait()
            if script.fault is Fault.RESET:
                connection.reset()
                return
        connection.write(piece)
        await asyncio.sleep(script.pace)
    connection.finish()


async def play_whole(
    connection: HttpConnection, headers: Mapping[str, str], body: dict[str, Any], script: Script
) -> None:
    """Send an answer that is not streamed."""
    fault = script.fault
    data = HTML if fault is Fault.NOT_JSON else encode(body)
    head = {"content-type": "text/html" if fault is Fault.NOT_JSON else "application/json", **headers}
    half = data[: len(data) // 2]
    match fault:
        case Fault.HANG | Fault.ROLE_ONLY | Fault.PINGS_ONLY:
            connection.start(200, head, len(data))
            connection.write(half)
            await asyncio.Event().wait()
        case Fault.RESET | Fault.BROKEN:
            connection.start(200, head, len(data))
            connection.write(half)
            await asyncio.sleep(0.01)  # or the reset would overtake the bytes
            connection.reset() if fault is Fault.RESET else connection.drop()
        case Fault.CUT | Fault.MALFORMED:
            connection.start(200, head, len(half))
            connection.write(half)
        case Fault.DRIP:
            connection.start(200, head, len(data))
            for place in range(len(data)):
                connection.write(data[place : place + 1])
                await asyncio.sleep(0)
        case _:
            connection.start(200, head, len(data))
            connection.write(data)
            await connection.drain()


async def play_stream(
    connection: HttpConnection,
    headers: Mapping[str, str],
    answer: Playable,
    script: Script,
    count_token: Callable[[], None],
) -> None:
    """Send an answer as server-sent events, each a chunk of HTTP of its own."""
    connection.start(200, {"content-type": "text/event-stream; charset=utf-8", **headers})
    try:
        async for event in _events(connection, answer, script, count_token):
            await _write(connection, event, script)
        connection.finish()
    except Ended:
        pass


async def _events(
    connection: HttpConnection, answer: Playable, script: Script, count_token: Callable[[], None]
) -> AsyncIterator[bytes]:
    fault = script.fault
    if fault is Fault.ERROR_FIRST:
        yield answer.event(answer.error_frame)
        return
    if fault is Fault.NOT_JSON:
        yield HTML
        return
    if fault is Fault.PINGS_ONLY:
        for number in itertools.count():
            yield b": ping %d\n\n" % number
            await asyncio.sleep(0.02)
    tokens = 0
    for chunk, has_token in answer.chunks():
        if has_token:
            await asyncio.sleep(script.pace if tokens else script.first_token)
            if tokens == script.after:
                async for event in _break(connection, fault, answer, chunk):
                    yield event
            tokens += 1
            count_token()
        elif tokens and fault is Fault.NO_FINISH and answer.is_finish(chunk):
            continue
        elif tokens and tokens <= script.after:  # a fault that was to come after the last token comes now
            async for event in _break(connection, fault, answer, chunk):
                yield event
        elif not tokens and fault is Fault.ROLE_ONLY:
            yield answer.event(chunk)
            await asyncio.Event().wait()
        yield answer.event(chunk)
    match fault:
        case Fault.NO_DONE:
            return
        case Fault.LATE_END:
            await asyncio.Event().wait()
        case Fault.LOST_END:
            await asyncio.sleep(0.01)  # or the reset would overtake the bytes
            connection.reset()
            raise Ended
    if answer.done:
        yield answer.done


async def _break(
    connection: HttpConnection, fault: Fault | None, answer: Playable, chunk: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Play a fault of mid-stream; ``chunk`` is the one that does not come any more."""
    match fault:
        case Fault.HANG:
            await asyncio.Event().wait()
        case Fault.RESET | Fault.BROKEN:
            await asyncio.sleep(0.01)  # or the reset would overtake the bytes
            connection.reset() if fault is Fault.RESET else connection.drop()
            raise Ended
        case Fault.CUT:
            connection.finish()
            raise Ended
        case Fault.MALFORMED:
            yield answer.event(chunk)[:40] + b"\n\n"
        case Fault.ERROR_FRAME:
            yield answer.event(answer.error_frame)
            connection.finish()
            raise Ended
        case Fault.BIG_CHUNK:
            answer.swell(chunk, "x" * BIG)


async def _write(connection: HttpConnection, event: bytes, script: Script) -> None:
    pieces: Iterable[bytes] = [event]
    if script.fault is Fault.DRIP:
        pieces = (event[place : place + 1] for place in range(len(event)))
    elif script.fault is Fault.BIG_CHUNK and len(event) > BIG:
        pieces = (event[place : place + 65536] for place in range(0, len(event), 65536))
    for piece in pieces:
        connection.write(piece)
        await connection.drain()
        if script.fault is Fault.DRIP:
            await asyncio.sleep(0)
