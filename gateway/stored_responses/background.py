# Responses that run in the background: one runs in the gateway that was asked, in a task of its own.
#
# Its row is there before it runs, its claim is kept alive as that of a call with an Idempotency-Key, and its answer,
# the last events and its usage record are stored in one transaction. Who ends it otherwise takes its claim away first,
# so that it has one end: a cancelled one owes what was used by then; if its gateway dies, nothing is owed.
# Streams are read from Postgres only, by the client that asked too: what one heard, it can hear again.

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import structlog
from msgspec import Raw
from msgspec.structs import replace

from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from gateway.calls.call import Call
from gateway.calls.hooks import Ending, KeepEnding
from gateway.core.background import Background
from gateway.core.errors import CallTakenOver, StorageFull, TooManyInBackground, Unavailable
from gateway.dialects.endpoint import ReplyFacts
from gateway.dialects.responses import own_items
from gateway.idempotency.stored_answers import Claim, Place
from gateway.stored_responses.background_store import NUMBER, BackgroundStore, place_of
from gateway.stored_responses.event_log import EventLog
from gateway.stored_responses.event_watch import EventWatch
from gateway.stored_responses.memory import ResponseMemory
from gateway.stored_responses.turns import Turn
from protocol.errors import BadRequest, Overloaded, ServiceError
from protocol.events import Event
from protocol.responses import ResponsesRequest
from protocol.serving.deadlines import running_timeout
from protocol.serving.leaving import Client
from protocol.sse import encode_event

MOST_OF_TEAM = 100  # that run at once
MOST_LISTENERS = 200  # of a team, at one process: each reads from Postgres
BEGIN_WITHIN = 5.0  # seconds for Postgres to store that one begins
REFUSED_WITHIN = 1.0  # seconds in which what refuses a call is told as an error; later, by its response
END_WITHIN = 0.8  # seconds for a gateway that closes to say that one has ended
STORE_EVERY = 0.25  # seconds between stores of what a stream said
LOOK_EVERY = 2.0  # seconds between looks whether one that says nothing was cancelled, or its gateway is dead
OPEN = ("queued", "in_progress")

log = structlog.get_logger(__name__)


class Run(Client):
    """A response that runs here: the client for whom it does is its caller, who leaves by cancelling it."""

    def __init__(self, call: Call, claim: Claim, events: EventLog) -> None:
        super().__init__()
        request = call.native
        assert isinstance(request, ResponsesRequest)
        self.call, self.claim, self.events = call, claim, events
        self.items = own_items(request)
        self.settled = asyncio.Event()  # that it may run, or may not
        self.is_admitted = self.is_answered = False
        self.is_awaited = True  # by the request that asked for it
        self.refusal: ServiceError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._is_ending = False

    def note_admitted(self) -> None:
        """What it may cost is held."""
        self.is_admitted = True
        self.settled.set()

    def begin(self) -> None:
        """Note that this task runs it."""
        self._task = asyncio.current_task()

    def begin_ending(self) -> None:
        """Note that its end is being stored: nothing breaks that off."""
        self._is_ending = True

    def leave(self) -> None:
        """End it as its caller wants it, if it has not come to its end: what was used by now is owed."""
        self.has_left = True
        self.break_off()

    def break_off(self) -> None:
        """End it, if it has not come to its end."""
        if self._task is not None and not self._is_ending:
            self._task.cancel()

    def turn(self, response: dict[str, Any]) -> Turn:
        """Return what its row holds with ``response``."""
        return Turn(self.items, Raw(msgspec.json.encode(response)))


# Runs a response's call, writes what it says as events, and has the end of the reply kept.
Work = Callable[[Run, KeepEnding[ReplyFacts]], Awaitable[None]]


class BackgroundResponses:
    """Those that run in this process, and what any process says of others."""

    def __init__(self, memory: ResponseMemory, store: BackgroundStore, background: Background) -> None:
        self.store = store
        self._memory = memory
        self._background = background
        self._running: dict[Place, Run] = {}
        self._begun: Counter[str] = Counter()  # that run or begin here, by team
        self._listeners: Counter[str] = Counter()  # by team
        self._watch = EventWatch(store.find_news)

    @property
    def is_busy(self) -> bool:
        """Whether any runs here."""
        return bool(self._running)

    async def start(self, call: Call, events: EventLog, work: Work) -> dict[str, Any]:
        """Have a call run; return its response as it is queued. Raises BadRequest, StorageFull, TooManyInBackground,
        Overloaded when Postgres is away, and what refuses the call at once."""
        team_id = call.caller.team.id
        if not self._memory.store.retention:
            raise BadRequest("Nothing is stored at this gateway. Leave 'background' out.", param="background")
        if self._begun[team_id] >= MOST_OF_TEAM:  # those that begin now have no rows yet that could be counted
            raise TooManyInBackground(f"{MOST_OF_TEAM} responses of the team run in the background here. Wait for one.")
        claim = Claim(place_of(team_id, events.writer.response_id), b"", call.request_id)
        run = Run(replace(call, may_be_lost=partial(self.store.calls.may_be_lost, claim)), claim, events)
        queued = events.begin()
        [piece] = pieces = events.cut()
        self._begun[team_id] += 1
        has_begun = False
        try:
            async with running_timeout(BEGIN_WITHIN):
                if not await self._memory.has_room(team_id):
                    raise StorageFull("The team's stored responses have as many bytes as they may. Delete some.")
                await self.store.begin(claim, queued["previous_response_id"], run.turn(queued), piece, MOST_OF_TEAM)
            has_begun = True
        except POSTGRES_AWAY as exc:
            log.warning("background_response_not_stored", request_id=call.request_id, error=repr(exc))
            raise Overloaded("The database does not answer, so nothing can run in the background. Try again.") from exc
        finally:
            if not has_begun:
                self._note_ended(team_id)
        events.drop(pieces)
        self._running[claim.place] = run
        self._background.spawn(self._run(run, work))
        with suppress(TimeoutError):
            async with running_timeout(REFUSED_WITHIN):
                await run.settled.wait()
        run.is_awaited = False
        if run.refusal is not None:
            raise run.refusal
        return queued

    async def settled(self, team_id: str, response_id: str, turn: Turn) -> Turn:
        """Return a stored turn as it is now: one whose gateway died has failed."""
        if turn.status() not in OPEN:
            return turn
        place, response = place_of(team_id, response_id), msgspec.json.decode(turn.response)
        error = {
            "code": "server_error",
            "message": "The gateway that ran the response died. It costs nothing. Ask again.",
        }
        ended = response | {"status": "failed", "error": error}
        told = {"type": "response.failed", "response": ended, "sequence_number": int(NUMBER)}
        events = encode_event(msgspec.json.encode(told), b"response.failed")
        if await self.store.end_if_dead(place, _with(turn, ended), events):
            return _with(turn, ended)
        return await self._found(place) or turn

    async def cancel(self, team_id: str, response_id: str, turn: Turn) -> Turn:
        """End a response that runs, and return it. Raises BadRequest for one that does not run in the background."""
        response = msgspec.json.decode(turn.response)
        if not turn.ran_behind():
            words = "A response that does not run in the background cannot be cancelled: close its connection."
            raise BadRequest(words)
        place, ended = place_of(team_id, response_id), response | {"status": "cancelled"}
        was_open = response["status"] in OPEN and await self.store.cancel(place, _with(turn, ended))
        self._leave(place)
        return _with(turn, ended) if was_open else await self._found(place) or turn

    async def delete(self, team_id: str, response_id: str) -> bool:
        """Delete a response for ever, and end it should it run; whether it was there."""
        is_deleted = await self.store.delete(team_id, response_id)
        self._leave(place_of(team_id, response_id))
        return is_deleted

    def refuse_listener(self, team_id: str) -> None:
        """Raise TooManyInBackground for a team that listens as often as it may here."""
        if self._listeners[team_id] >= MOST_LISTENERS:
            raise TooManyInBackground(f"This team listens to {MOST_LISTENERS} streams already here. End one of them.")

    @contextmanager
    def listening(self, team_id: str) -> Iterator[None]:
        """Count one that listens, inside the block."""
        self._listeners[team_id] += 1
        try:
            yield
        finally:
            self._listeners[team_id] -= 1
            if not self._listeners[team_id]:
                del self._listeners[team_id]

    async def listen(self, team_id: str, response_id: str, after: int) -> AsyncIterator[bytes]:
        """Yield what the stream of a response says after an event, as it comes, until its end."""
        place = place_of(team_id, response_id)
        while True:
            try:
                heard = await self.store.hear(place, after)
            except POSTGRES_AWAY as exc:
                log.warning("background_events_not_read", team_id=team_id, error=repr(exc))
                await asyncio.sleep(LOOK_EVERY)
                continue
            for last, events in heard.pieces:
                told = events.split(b"\n\n")[:-1]
                yield b"".join(event + b"\n\n" for event in told[max(0, after + len(told) - last) :])
                after = last
            if heard.is_over:
                return
            if not heard.pieces and (turn := await self._found(place)) is not None:
                await self.settled(team_id, response_id, turn)
            await self._watch.news(place, after)

    def _note_ended(self, team_id: str) -> None:
        self._begun[team_id] -= 1
        if not self._begun[team_id]:
            del self._begun[team_id]

    def _leave(self, place: Place) -> None:
        if (run := self._running.get(place)) is not None:
            run.leave()

    async def _found(self, place: Place) -> Turn | None:
        return (await self._memory.store.find(place.team_id, [place.key])).get(place.key)

    async def _run(self, run: Run, work: Work) -> None:
        """Run a response to its end, and store how it failed, should it."""
        run.begin()
        storing = asyncio.create_task(self._store_events(run))

        async def keep(reply: ReplyFacts, ending: Ending) -> None:
            assert isinstance(ending, list)
            run.begin_ending()
            await self._keep(run, reply, ending)

        try:
            with self.store.calls.leased(run.claim, run.call.started):
                error = await self._failure_of(run, work, keep)
                storing.cancel()
                with suppress(asyncio.CancelledError):
                    await storing
                if error is not None and not run.has_left:
                    await self._fail(run, error)
        finally:
            storing.cancel()
            self._running.pop(run.claim.place, None)
            self._note_ended(run.claim.place.team_id)
            run.settled.set()

    async def _failure_of(self, run: Run, work: Work, keep: KeepEnding[ReplyFacts]) -> ServiceError | None:
        """Return why a response has no end that was stored, ``None`` where it has."""
        try:
            await work(run, keep)
        except ServiceError as exc:
            return exc
        except asyncio.CancelledError:  # its caller has, or the gateway closes
            return Unavailable("The gateway closed while the response ran. It costs nothing. Ask again.")
        except Exception:
            log.exception("unexpected_error", request_id=run.call.request_id)
            return ServiceError("The response broke off inside the gateway.")
        return None if run.is_answered else run.events.error_told

    async def _keep(self, run: Run, reply: ReplyFacts, ending: list[Event]) -> None:
        turn = run.turn(run.events.settle(reply, ending))
        run.is_answered = await self.store.finish(run.claim, turn, run.events.cut(), reply.record)
        if not run.is_answered:
            with suppress(*POSTGRES_AWAY):
                run.has_left = run.has_left or await self._is_cancelled(run)
            raise CallTakenOver("The response was cancelled, or its gateway was taken for dead.")

    async def _is_cancelled(self, run: Run) -> bool:
        """Whether the caller has ended a response that ended elsewhere."""
        found = await self._found(run.claim.place)
        return found is None or found.status() == "cancelled"

    async def _fail(self, run: Run, error: ServiceError) -> None:
        """Store that a response failed; one that its caller still waits to see queued is none."""
        place = run.claim.place
        # Should it not be stored, who reads it finds that nothing runs it.
        with told_if_away(log, "background_response_not_ended", request_id=run.call.request_id):
            async with running_timeout(END_WITHIN):
                if run.is_awaited and not run.is_admitted:
                    run.refusal = error
                    await self.store.delete(place.team_id, place.key)
                    return
                if run.events.error_told is None:
                    run.events.error(error)
                failed = run.turn(run.events.writer.unfinished("failed", error))
                await self.store.fail(run.claim, failed, run.events.cut())

    async def _store_events(self, run: Run) -> None:
        """Store what the stream says as it comes, and find out whether another gateway has ended it."""
        place, silent, was_admitted = run.claim.place, 0.0, False
        while True:
            await asyncio.sleep(STORE_EVERY)
            silent += STORE_EVERY
            pieces = run.events.cut()
            if not pieces and silent < LOOK_EVERY and was_admitted == run.is_admitted:
                continue
            try:
                if was_admitted != run.is_admitted:
                    await self.store.progress(place, run.turn(run.events.writer.unfinished("in_progress")))
                    was_admitted = True
                is_open = await (self.store.append(place, pieces) if pieces else self.store.is_open(place))
                if not is_open:
                    end = run.leave if await self._is_cancelled(run) else run.break_off
                    end()
            except Exception as exc:  # whatever it is: they are stored with the end, or later
                log.warning("background_events_not_stored", request_id=run.call.request_id, error=repr(exc))
                continue
            run.events.drop(pieces)
            silent = 0.0


def _with(turn: Turn, response: dict[str, Any]) -> Turn:
    return Turn(turn.input, Raw(msgspec.json.encode(response)))
