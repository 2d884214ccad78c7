# The clients of a house of faults: many at a time, streamed and plain, patient and leaving, of several teams. Each
# notes what it saw of every call, so that the books can be held against it.

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import aiohttp

BOUND = 70.0  # seconds within which every call has ended, in one way or another
THINKING = 0.2  # seconds at most between the calls of one client
KEYED = 0.1  # of the calls have an Idempotency-Key, and are made twice
# How often each is asked. Of "several" three replies, which are as many requests upstream; "kept" by the cache, so that
# some answers cost nothing; "stored" as a response.
MODELS = {
    "steady": 10,
    "lengthy": 2,
    "silent": 3,
    "torn": 2,
    "cut": 2,
    "broken": 1,
    "several": 3,
    "kept": 3,
    "stored": 3,
}
REPLIES = 3
STATUSES = {"overloaded": 503, "rate_limit_exceeded": 429, "insufficient_quota": 429}  # that refusals have, by code
QUESTIONS = 3  # that are asked again and again of "kept"


class Seen(StrEnum):
    """How a call ended, as its client saw it."""

    ANSWERED = "answered"  # the whole body, or [DONE]
    INTERRUPTED = "interrupted"  # a stream that ended with an error chunk
    FAILED = "failed"  # 502 or 504: an upstream was asked in vain; or that alone in a stream, after comments
    REFUSED = "refused"  # any other status but 200; or that alone in a stream
    LEFT = "left"  # the client had enough
    LOST = "lost"  # the connection broke, or there was none
    MUTE = "mute"  # a regular end without [DONE] and without an error: never
    HUNG = "hung"  # no end within the bound: never


@dataclass
class Member:
    """A team's key, and what its clients may expect."""

    team_id: str
    key_id: str
    key: str
    is_limited: bool
    share: int  # how many of the clients' calls are its


@dataclass
class Attempt:
    """One call, and what came of it. Times are monotonic seconds."""

    id: str  # our x-client-request-id, which its row carries
    member: Member
    gateway: int
    model: str
    streams: bool
    is_faulty: bool
    leaves_after: int | None  # lines of a stream
    question: str
    idempotency_key: str | None
    started: float
    ended: float = 0.0
    status: int | None = None
    request_id: str | None = None
    tokens: int = 0  # pieces of text that arrived
    usage: dict[str, Any] | None = None
    error: str = ""
    seen: Seen = Seen.HUNG
    response_id: str | None = None  # of a response that is said to be stored
    starved: float = 0.0  # seconds that its gateway waited for a processor


@dataclass
class Load:
    """Clients that call until the block ends. ``attempts`` is complete after that."""

    urls: Sequence[str]
    members: Sequence[Member]
    seed: str
    clients: int
    attempts: list[Attempt] = field(default_factory=list)
    waited: Callable[[int], float] = lambda _: 0.0  # seconds that a gateway has waited for a processor so far
    on_done: Callable[[Attempt], None] = lambda _: None  # called, in our thread, when a client has read [DONE]

    def __enter__(self) -> Self:
        self._is_over = False
        self._fault: BaseException | None = None
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()
        assert self._has_begun.wait(BOUND), "the clients do not begin"
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._is_over = True
        self._thread.join(2 * BOUND)
        assert not self._thread.is_alive(), "the clients do not end"
        if self._fault is not None and kind is None:
            raise self._fault

    def count(self, seen: Seen) -> int:
        """Return how many calls ended so."""
        return sum(attempt.seen is seen for attempt in self.attempts)

    def _run(self) -> None:
        try:
            asyncio.run(self._call_all())
        except BaseException as exc:
            self._fault = exc
        finally:
            self._has_begun.set()

    async def _call_all(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=False)) as session:
            for member in self.members:  # every gateway knows every key before anything happens
                for url in self.urls:
                    async with session.get(f"{url}/v1/models", headers=bearer(member)) as answer:
                        answer.raise_for_status()
            self._has_begun.set()
            await asyncio.gather(*(self._be_client(session, number) for number in range(self.clients)))

    async def _be_client(self, session: aiohttp.ClientSession, number: int) -> None:
        dice = random.Random(f"{self.seed}:{number}")
        while not self._is_over:
            attempt = self._draw(dice)
            await self._try(session, attempt)
            if attempt.idempotency_key is not None:  # once more, perhaps elsewhere: the same answer, or at last one
                again = replace(attempt, id=draw_id(dice), gateway=self._draw(dice).gateway, started=time.monotonic())
                again.status = again.request_id = again.usage = again.leaves_after = None
                again.tokens, again.seen, again.response_id = 0, Seen.HUNG, None
                await self._try(session, again)
            await asyncio.sleep(dice.uniform(0.05, THINKING) if attempt.seen is not Seen.REFUSED else THINKING)

    async def _try(self, session: aiohttp.ClientSession, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        before = self.waited(attempt.gateway)
        try:
            async with asyncio.timeout(BOUND):
                await self._call(session, attempt)
        except TimeoutError:
            attempt.seen = Seen.HUNG
        except (aiohttp.ClientError, OSError) as exc:
            attempt.seen, attempt.error = Seen.LOST, repr(exc)
        attempt.ended = time.monotonic()
        attempt.starved = self.waited(attempt.gateway) - before

    def _draw(self, dice: random.Random) -> Attempt:
        streams = dice.random() < 0.6
        leaves = streams and dice.random() < 0.25
        attempt_id = draw_id(dice)
        model = dice.choices([*MODELS], [*MODELS.values()])[0]
        return Attempt(
            id=attempt_id,
            member=dice.choices(self.members, [member.share for member in self.members])[0],
            gateway=dice.randrange(len(self.urls)),
            model=model,
            streams=streams,
            is_faulty=dice.random() < 0.08,
            leaves_after=dice.randrange(1, 11) if leaves else None,
            question=f"Say something about {dice.randrange(QUESTIONS) if model == 'kept' else attempt_id}.",
            idempotency_key=f"key of {attempt_id}" if dice.random() < KEYED else None,
            started=time.monotonic(),
        )

    async def _call(self, session: aiohttp.ClientSession, attempt: Attempt) -> None:
        is_response = attempt.model == "stored"
        asked: dict[str, Any] = (
            {"input": attempt.question, "max_output_tokens": 48}
            if is_response
            else {"messages": [{"role": "user", "content": attempt.question}], "max_tokens": 48}
        )
        usual = 0 if attempt.model == "kept" else 1
        body = asked | {
            "model": attempt.model,
            "temperature": 9 if attempt.is_faulty else usual,
            "stream": attempt.streams,
        }
        if attempt.model == "several":
            body["n"] = REPLIES
        if attempt.streams and not is_response:
            body["stream_options"] = {"include_usage": True}
        headers = bearer(attempt.member) | {"x-client-request-id": attempt.id}
        if attempt.model == "kept":
            headers["x-cache"] = "on"
        if attempt.idempotency_key is not None:
            headers["idempotency-key"] = attempt.idempotency_key
        url = self.urls[attempt.gateway] + ("/v1/responses" if is_response else "/v1/chat/completions")
        async with session.post(url, json=body, headers=headers) as answer:
            attempt.status, attempt.request_id = answer.status, answer.headers.get("x-request-id")
            if answer.status != 200:
                attempt.error = await answer.text()
                attempt.seen = Seen.FAILED if answer.status in (502, 504) else Seen.REFUSED
            elif attempt.streams:
                await self._read_stream(answer, attempt)
            elif is_response:
                note_response(attempt, await answer.json())
            else:
                whole = await answer.json()
                attempt.usage, attempt.seen = whole["usage"], Seen.ANSWERED

    async def _read_stream(self, answer: aiohttp.ClientResponse, attempt: Attempt) -> None:
        lines = 0
        attempt.seen = Seen.MUTE
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            lines += 1
            if lines == attempt.leaves_after:
                attempt.seen = Seen.LEFT
                abort(answer)
                return
            chunk = {} if line == b"data: [DONE]\n" else json.loads(line.removeprefix(b"data: "))
            if chunk.get("type") == "response.completed":
                note_response(attempt, chunk["response"])
            elif not chunk:
                attempt.seen = Seen.ANSWERED
            if attempt.seen is Seen.ANSWERED:
                self.on_done(attempt)
                if attempt.leaves_after is not None:  # it dies this moment, and does not wait for the end of the body
                    abort(answer)
                    return
            elif "error" in chunk or chunk.get("type") == "error":
                attempt.seen, attempt.error = Seen.INTERRUPTED, line.decode()
                told = chunk.get("error", chunk)
                if lines == 1:  # a comment had begun the stream, no upstream
                    attempt.seen = Seen.FAILED if "model" in told else Seen.REFUSED
                    attempt.status = STATUSES.get(told["code"], attempt.status)
            elif "type" in chunk:
                attempt.tokens += chunk["type"] == "response.output_text.delta"
            elif chunk["choices"]:
                attempt.tokens += bool(chunk["choices"][0]["delta"].get("content"))
            attempt.usage = chunk.get("usage") or attempt.usage


def note_response(attempt: Attempt, response: dict[str, Any]) -> None:
    """Note a whole response as a chat's answer: its usage by a chat's names, and its id where it says it is stored."""
    told = response["usage"]
    attempt.usage = {
        "prompt_tokens": told["input_tokens"],
        "completion_tokens": told["output_tokens"],
        "prompt_tokens_details": told["input_tokens_details"],
        "cost_usd": told["cost_usd"],
    }
    attempt.seen, attempt.response_id = Seen.ANSWERED, response["id"] if response["store"] else None


def draw_id(dice: random.Random) -> str:
    """Return a name that no other call has."""
    return str(uuid.UUID(int=dice.getrandbits(128), version=4))


def bearer(member: Member) -> dict[str, str]:
    """Return the header that shows who calls."""
    return {"authorization": f"Bearer {member.key}"}


def abort(answer: aiohttp.ClientResponse) -> None:
    """End the connection as the kernel does for a killed client: at once, with a reset."""
    connection = answer.connection
    transport = connection.transport if connection is not None else None
    if transport is not None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    answer.close()
