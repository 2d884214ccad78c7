# How the scripted upstream sends an answer: regularly, or with the fault that the script names.

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from tests.support.openai_answers import Answer
from tests.support.upstream_http import HttpConnection
from tests.support.upstream_scripts import Fault, Script

DONE = b"data: [DONE]\n\n"
BIG = 10 * 1024 * 1024  # bytes
ERROR_FRAME = {"error": {"message": "The server had an error.", "type": "server_error", "param": None, "code": None}}
HTML = b"<html><body><h1>502 Bad Gateway</h1></body></html>"


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


async def play_whole(
    connection: HttpConnection, headers: Mapping[str, str], body: dict[str, Any], script: Script
) -> None:
    """Send an answer that is not streamed."""
    fault = script.fault
    if fault in (Fault.ERROR_FRAME, Fault.ERROR_FIRST):
        body = ERROR_FRAME
    for choice in body.get("choices", ()):
        if fault is Fault.NO_FINISH:
            choice["finish_reason"] = None
        elif fault is Fault.BIG_CHUNK:
            choice |= {"message": {**choice.get("message", {}), "content": "x" * BIG}, "text": "x" * BIG}
            choice.pop("text" if "delta" in body["object"] or "chat" in body["object"] else "message")
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
        case Fault.CUT | Fault.NO_DONE | Fault.MALFORMED:
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
    answer: Answer,
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
    connection: HttpConnection, answer: Answer, script: Script, count_token: Callable[[], None]
) -> AsyncIterator[bytes]:
    fault = script.fault
    if fault is Fault.ERROR_FIRST:
        yield _data(ERROR_FRAME)
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
                async for event in _break(connection, fault, chunk):
                    yield event
            tokens += 1
            count_token()
        elif tokens and fault is Fault.NO_FINISH and chunk["choices"]:
            continue
        elif tokens and tokens <= script.after:  # a fault that was to come after the last token comes now
            async for event in _break(connection, fault, chunk):
                yield event
        elif not tokens and fault is Fault.ROLE_ONLY:
            yield _data(chunk)
            await asyncio.Event().wait()
        yield _data(chunk)
    if fault is not Fault.NO_DONE:
        yield DONE


async def _break(connection: HttpConnection, fault: Fault | None, chunk: dict[str, Any]) -> AsyncIterator[bytes]:
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
            yield _data(chunk)[:40] + b"\n\n"
        case Fault.ERROR_FRAME:
            yield _data(ERROR_FRAME)
            connection.finish()
            raise Ended
        case Fault.BIG_CHUNK:
            for choice in chunk["choices"]:
                if choice.get("delta"):
                    choice["delta"] = {"content": "x" * BIG}
                elif "text" in choice:
                    choice["text"] = "x" * BIG


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


def _data(value: object) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
