# One conversation: what its client says goes to the upstream as it was understood, what the upstream says goes to the
# client as it came. Either side waits for the other, and what is said is judged, held and booked on the way.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec
import structlog
from msgspec import UNSET, Struct

from billing.core.errors import RateLimited
from billing.core.money import to_text
from gateway.core.errors import Unavailable
from gateway.realtime.client_events import (
    ClientEvent,
    ResponseCreate,
    SessionUpdate,
    encode_event,
    read_event,
    sound_in,
    texts_in,
)
from gateway.realtime.seen import G711_BYTES, PCM_BYTES
from gateway.realtime.server_events import CREATED, DONE, ERROR, SAID, SPOKEN, Head, fault_in, read_head, response_in
from gateway.realtime.turns import Turns
from gateway.upstreams.socket import SocketClosed, UpstreamSocket
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure
from protocol.errors import BadRequest, ServiceError
from protocol.serving.off_loop import off_loop

LONGEST = 3600.0  # seconds that a conversation may last, as OpenAI has it
HELD_FOR = 300.0  # seconds that a hold may stand ahead: then the key, its team, limits and day are looked at anew
REFUSED, EXPIRED = "refused", "expired"  # outcomes of what runs where the next may not, or the hour is over
NORMAL, POLICY, BROKEN, RESTART, LATER = 1000, 1008, 1011, 1012, 1013  # why a connection is closed

log = structlog.get_logger()


class Ending(Struct, frozen=True):
    """Why a conversation ends, and what its client is told of it."""

    code: int
    reason: str  # at most 123 bytes, as the protocol has it
    error: ServiceError | None = None
    is_left: bool = False  # by its client
    outcome: str = "abandoned"  # of responses that ran

    @property
    def owes_prompt(self) -> bool:
        """Whether a response of which nothing was seen is owed all the same: its upstream did not break it off."""
        return self.is_left or self.outcome in (REFUSED, EXPIRED)


class ClientSide(Protocol):
    """The connection of a client."""

    async def receive(self) -> bytes | None:
        """Return what it says next, ``None`` once it has left. Raises BadRequest for what is no text."""

    async def say(self, data: bytes) -> None:
        """Send a message; wait while it has too much unread."""

    async def close(self, code: int, reason: str) -> None:
        """Close it."""


class Names(Struct, frozen=True):
    """What the model is called, by the client and there, and the longest answer that is held for."""

    asked: str
    upstream: str
    most_output: int


Judge = Callable[[ClientEvent], Awaitable[None]]


class Relay:
    """Carries one conversation. ``judge`` raises what forbids an event; ``new_id`` names events that have no name;
    ``broke`` hears how the upstream broke it off."""

    def __init__(
        self,
        socket: UpstreamSocket,
        turns: Turns,
        names: Names,
        judge: Judge,
        new_id: Callable[[], str],
        broke: Callable[[UpstreamFailure], None],
    ) -> None:
        self._socket, self._turns, self._names = socket, turns, names
        self._judge, self._new_id, self._broke = judge, new_id, broke
        self._client: ClientSide
        self._money = asyncio.Lock()  # one response begins or ends at a time
        self._ends = asyncio.get_running_loop().create_future()  # when the gateway does, and no response runs
        self._is_draining = False
        self._unbooked: bytes | None = None  # what the upstream said last, until it is booked

    def drain(self) -> None:
        """End as soon as no response runs: the gateway ends."""
        self._is_draining = True
        self._look()

    def close(self, ending: Ending | None = None) -> None:
        """Book what still runs, let go of what is held, and close the upstream's side."""
        ending = ending or Ending(NORMAL, "")
        self._turns.break_off(ending.outcome, owes_prompt=ending.owes_prompt)
        self._socket.close(NORMAL, "")

    async def run(self, client: ClientSide) -> None:
        """Carry messages until either side ends it, or the gateway does."""
        self._client = client
        ending = Ending(RESTART, "The gateway is closing.", outcome="broken_off")
        tasks = [asyncio.ensure_future(one) for one in (self._from_upstream(), self._from_client(), self._held_anew())]
        try:
            done, _ = await asyncio.wait([*tasks, self._ends], timeout=LONGEST, return_when=asyncio.FIRST_COMPLETED)
            ending = self._ending_of(done)
            await _stopped(tasks)
            await self._hear_out()
        finally:
            await _stopped(tasks)
            self.close(ending)
            if ending.error is not None:
                await self._tell(ending.error)
            if not ending.is_left:
                await client.close(ending.code, ending.reason)

    def _ending_of(self, done: set[asyncio.Future[Ending]]) -> Ending:
        if not done:
            words = f"Your session hit the maximum duration of {LONGEST / 60:g} minutes."
            return Ending(NORMAL, "session_expired", BadRequest(words, code="session_expired"), outcome=EXPIRED)
        first = next((one for one in done if one is self._ends), next(iter(done)))
        try:
            return first.result()
        except ServiceError as exc:  # a hold that is refused, or nonsense of the upstream
            code = LATER if isinstance(exc, RateLimited) or exc.status >= 500 else POLICY
            code = BROKEN if isinstance(exc, UpstreamFailure) else code
            return Ending(code, exc.code or "error", exc, outcome=getattr(exc, "outcome", REFUSED))
        except Exception:
            log.exception("conversation_failed")
            return Ending(BROKEN, "server_error", ServiceError("The conversation broke off inside the gateway."))

    async def _from_client(self) -> Ending:
        while True:
            message = None
            try:
                message = await self._client.receive()
                if message is None:
                    return Ending(NORMAL, "", is_left=True)
                names = self._names
                read = partial(read_event, message, names.asked, names.upstream, names.most_output)
                event = await off_loop(len(message), read)
                await self._judge(event)
                if isinstance(event, ResponseCreate):
                    event = await self._ask(event)
            except ServiceError as exc:
                await self._tell(exc, _event_id_in(message) if message else None)
                continue
            self._hear(event, len(message))
            try:
                await self._socket.send(encode_event(event))
            except SocketClosed:  # the other side tells why, once it has passed on all that came before
                await asyncio.get_running_loop().create_future()

    async def _ask(self, event: ResponseCreate) -> ResponseCreate:
        """Return what asks for a response that is held for. Raises what refuses it."""
        async with self._money:
            if self._is_draining:
                raise Unavailable("The gateway is closing: open another connection.")
            if self._turns.are_full:
                raise BadRequest("Too many responses run in this conversation.", code="too_many_responses")
            named = event if event.event_id else msgspec.structs.replace(event, event_id=f"event_{self._new_id()}")
            is_apart = event.response is not UNSET and event.response.conversation == "none"
            await self._turns.ask(str(named.event_id), is_apart=is_apart)
            return named

    def _hear(self, event: ClientEvent, size: int) -> None:
        """Note how long the conversation becomes."""
        context = self._turns.context
        context.read(sum(len(text.encode()) for _, text in texts_in(event)))
        context.hear(sound_in(event))
        if isinstance(event, SessionUpdate) and event.session.audio:
            audio = event.session.audio
            for side, name in ((audio.input, "heard_bytes"), (audio.output, "spoken_bytes")):
                if side and side.format:
                    setattr(context, name, PCM_BYTES if side.format.type == "audio/pcm" else G711_BYTES)

    async def _from_upstream(self) -> Ending:
        while True:
            try:
                message = self._unbooked = await self._socket.receive()
            except SocketClosed as exc:
                return self._closed_by_upstream(exc)
            head: Head = await off_loop(len(message), partial(read_head, message))
            if head.type == DONE:
                await self._end_response(message, head)
                continue
            await self._note(head)
            self._unbooked = None
            await self._client.say(message)

    async def _note(self, head: Head) -> None:
        """Note what an event says of responses that begin or go on. Raises what refuses another hold."""
        if head.type == CREATED:
            async with self._money:
                await self._turns.begin(response_in(head).id)
        elif head.type == ERROR:
            async with self._money:
                if self._turns.refused(fault_in(head).event_id) and not self._turns.is_over:
                    await self._turns.hold_ahead()
            self._look()
        elif head.delta and head.type in SAID:
            self._turns.see(head.response_id, words=len(bytes(head.delta)) - 2)
        elif head.delta and head.type == SPOKEN:
            self._turns.see(head.response_id, sound=len(bytes(head.delta)) - 2)

    async def _hear_out(self) -> None:
        """Close the upstream's side, and book what it began by itself before it heard of that."""
        self._turns.is_over = True
        unbooked, said = self._unbooked, await self._socket.said_last()
        try:
            for message in said if unbooked is None else (unbooked, *said):
                head = read_head(message)
                if head.type != DONE:
                    await self._note(head)
                elif (turn := self._turns.end(response_in(head))) is not None:
                    self._turns.settle(turn)
        except ServiceError as exc:  # nonsense of the upstream, or a journal that is full
            log.warning("conversation_not_heard_out", code=exc.code)

    async def _end_response(self, message: bytes, head: Head) -> None:
        """Book a response, pass its end on with what it cost, and hold the next. Raises what refuses that."""
        async with self._money:
            turn = self._turns.end(response_in(head))
            self._unbooked = None
            if turn is not None:
                assert turn.account.record is not None
                told = {"request_id": turn.call.request_id, "cost_usd": to_text(turn.account.record.cost_nanousd)}
                message = msgspec.json.encode(told)[:-1] + b"," + message.lstrip()[1:]
            try:
                await self._client.say(message)
            finally:
                if turn is not None:
                    self._turns.settle(turn)
            if not self._is_draining:
                await self._turns.hold_ahead()
        self._look()

    async def _held_anew(self) -> Ending:
        """See to it that no hold stands ahead for long. Raises what refuses another."""
        while True:
            await asyncio.sleep(HELD_FOR)
            async with self._money:
                if not self._is_draining:
                    await self._turns.hold_anew()

    def _closed_by_upstream(self, closed: SocketClosed) -> Ending:
        if closed.code == NORMAL and not self._turns.are_busy:
            return Ending(NORMAL, closed.reason)
        failure = UpstreamError("The upstream closed the connection.", outcome="reset")
        if self._turns.are_busy:
            self._broke(failure)
        return Ending(BROKEN, "upstream_error", failure, outcome="reset")

    def _look(self) -> None:
        if self._is_draining and not self._turns.are_busy and not self._ends.done():
            told = Unavailable("The gateway is closing: open another connection.")
            self._ends.set_result(Ending(RESTART, "The gateway is closing: connect again.", told))

    async def _tell(self, error: ServiceError, event_id: str | None = None) -> None:
        """Say what is wrong, as the API tells errors."""
        told = error.body()["error"]
        assert isinstance(told, dict)
        body = {"type": ERROR, "event_id": f"event_{self._new_id()}", "error": told | {"event_id": event_id}}
        await self._client.say(msgspec.json.encode(body))


async def _stopped(tasks: list[asyncio.Task[Ending]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Named(Struct, frozen=True):
    event_id: str | None = None


def _event_id_in(message: bytes) -> str | None:
    try:
        return msgspec.json.decode(message, type=_Named).event_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
