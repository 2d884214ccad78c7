# The money of one conversation. A hold stands ahead for the next response, which the upstream may begin by itself once
# it has heard enough; each response is booked when it ends, as a call of its own, and the next hold opened then.
#
# A response is `ahead` (held), `asked` (the journal knows it, and the upstream is told), `running` (the upstream has
# begun it), and ended: closed in the journal before its end is passed on, and settled after.

from __future__ import annotations

from collections.abc import Awaitable, Callable

from msgspec import Struct
from msgspec.structs import replace

from billing.core.errors import JournalFull
from billing.core.holds import Settlement
from billing.core.prices import cost_of
from billing.core.records import CHARGED, OWN_KEY, Attempt, Status, UsageRecord, units_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.call import Call, record_for
from gateway.core.clock import Clock
from gateway.inference.admission import Admission
from gateway.inference.call_closer import CallCloser
from gateway.realtime.seen import Context, Said
from gateway.realtime.server_events import COMPLETED, Response
from protocol.errors import BadRequest, ServiceError
from protocol.usage import Usage
from router.catalog.targets import Route, Target

Renew = Callable[[], Awaitable[Call]]
MOST_AT_ONCE = 8  # responses of one conversation that run, or are asked for


class Turn:
    """One response: the call that it is, on the route that it was held for, and what it has said."""

    def __init__(self, call: Call, account: CallAccounting, route: Route) -> None:
        self.call = call
        self.account = account
        self.route = route
        self.began = 0.0  # monotonic seconds
        self.first: float | None = None  # when it said something first
        self.said = Said()


class Books(Struct, frozen=True, eq=False):
    """What the calls of a conversation are held and booked by."""

    admission: Admission
    closer: CallCloser
    clock: Clock
    refused: Callable[[ServiceError], None]  # hears why one is not held


class Turns:
    """The responses of one conversation with a target. ``renew`` returns the call that the next one is, as its caller
    may ask it now, or raises what refuses it."""

    def __init__(self, call: Call, account: CallAccounting, route: Route, books: Books, renew: Renew) -> None:
        self.context = Context()
        self.call = call  # the latest: its caller as that was looked at last
        self.ahead: Turn | None = Turn(call, account, route)
        self.is_over = False  # nothing more is held; what the upstream has begun until it hears of that is owed
        self._route, self._books, self._renew = route, books, renew
        self._asked: dict[str, Turn] = {}  # by the id of the event that asks
        self._running: dict[str, Turn] = {}  # by the upstream's id

    def go_by(self, target: Target) -> None:
        """Hold and book the responses that follow for the target as it is configured now."""
        self._route = replace(self._route, targets=(target,))

    @property
    def are_busy(self) -> bool:
        """Whether a response runs or is asked for."""
        return bool(self._asked or self._running)

    @property
    def are_full(self) -> bool:
        """Whether no more may run."""
        return len(self._asked) + len(self._running) >= MOST_AT_ONCE

    async def hold_ahead(self) -> None:
        """Hold the next response, unless it is. Raises what refuses it."""
        if self.ahead is None:
            self.ahead = await self._hold()

    async def hold_anew(self) -> None:
        """Hold the next response for its caller as that is now. Raises what refuses it."""
        if self.ahead is not None:
            self.settle(self.ahead)
            self.ahead = None
            await self.hold_ahead()

    async def ask(self, event_id: str, *, is_apart: bool) -> None:
        """Note that a response is about to be asked for. One that stands apart from the conversation has a hold of its
        own: the upstream may begin another meanwhile. Raises what refuses it."""
        if event_id in self._asked:
            raise BadRequest("A response was asked for by this 'event_id'.", param="event_id", code="duplicate_event")
        turn = None if is_apart else self.ahead
        turn = turn or await self._hold()
        self._open(turn)
        self._asked[event_id] = turn

    def refused(self, event_id: str | None) -> bool:
        """Book the response that the upstream does not make; whether there was one."""
        turn = self._asked.pop(event_id or "", None)
        if turn is not None:
            self._close(turn, Status.FAILED, Usage(), "refused")
            self.settle(turn)
        return turn is not None

    async def begin(self, response_id: str) -> None:
        """Note that the upstream has begun a response, by itself or as it was asked. Raises what refuses it."""
        if response_id in self._running:
            return
        if self._asked:
            turn = self._asked.pop(next(iter(self._asked)))
        else:
            turn = self.ahead or (self._owed() if self.is_over else await self._hold())
            self._open(turn)
        self._running[response_id] = turn

    def see(self, response_id: str | None, *, words: int = 0, sound: int = 0) -> None:
        """Note so many bytes of a response; of sound in base64."""
        if (turn := self._running.get(response_id or "")) is not None:
            turn.first = self._books.clock.monotonic() if turn.first is None else turn.first
            turn.said.words += words
            turn.said.sound += sound

    def end(self, response: Response) -> Turn | None:
        """Book a response that has ended; ``None`` where none of it began. Then ``settle`` it."""
        turn = self._running.pop(response.id, None)
        if turn is None:
            return None
        used = response.counted
        status = Status.ANSWERED if response.status in COMPLETED else Status.INTERRUPTED
        if response.status == "failed" and turn.first is None:
            status = Status.FAILED
        elif used is not None:
            self.context.counted(used)
        outcome = "ok" if response.status in COMPLETED else str(response.status)[:40]
        self._close(turn, status, used or self._seen(turn), outcome)
        return turn

    def settle(self, turn: Turn) -> None:
        """Let go of what was held."""
        self._books.admission.settle(turn.account)

    def break_off(self, outcome: str, *, owes_prompt: bool) -> None:
        """Book what still runs: what was seen of it is owed; where nothing was, its prompt, if ``owes_prompt``."""
        for turn in (*self._asked.values(), *self._running.values()):
            owes = owes_prompt or turn.first is not None
            self._close(turn, Status.INTERRUPTED if owes else Status.FAILED, self._seen(turn), outcome)
            self.settle(turn)
        self._asked, self._running = {}, {}
        if self.ahead is not None:
            self.settle(self.ahead)
            self.ahead = None

    async def _hold(self) -> Turn:
        try:
            asked = await self._renew()
            self.call, account = await self._books.admission.admit(asked, self._route)
        except ServiceError as exc:
            self._books.refused(exc)
            raise
        return Turn(self.call, account, self._route)

    def _owed(self) -> Turn:
        clock = self._books.clock
        call = replace(self.call, request_id=clock.new_id(), created_at=clock.now(), started=clock.monotonic())
        return Turn(call, self._books.admission.owe(call, self._route), self._route)

    def _open(self, turn: Turn) -> None:
        """Enter a response into the journal, and let go of what is held ahead no more. Raises JournalFull."""
        turn.began = self._books.clock.monotonic()
        try:
            turn.account.open(self._record(turn, Status.FAILED))
        except JournalFull:
            if turn is not self.ahead:
                self.settle(turn)
            raise
        if turn is self.ahead:
            self.ahead = None
        turn.account.follow(lambda: self._so_far(turn), lambda: None)

    def _so_far(self, turn: Turn) -> Settlement:
        if turn.first is None:
            return Settlement(Usage(), 0)
        used = self._seen(turn)
        return Settlement(used, self._cost(turn, used))

    def _seen(self, turn: Turn) -> Usage:
        return self.context.usage(turn.said, turn.route.targets[0].model)

    def _close(self, turn: Turn, status: Status, used: Usage, outcome: str) -> None:
        clock = self._books.clock.monotonic()
        first = None if turn.first is None else round((turn.first - turn.began) * 1000, 3)
        total = round((clock - turn.began) * 1000, 3)
        is_owed = status in CHARGED
        target = turn.route.targets[0]
        key = None if target.own is None else OWN_KEY
        used = used if is_owed else Usage()
        record = replace(
            self._record(turn, status),
            input_tokens=used.input_tokens,
            cached_input_tokens=used.cached_input_tokens,
            output_tokens=used.output_tokens,
            units=units_of(used),
            cost_nanousd=self._cost(turn, used) if is_owed else 0,
            first_token_ms=first,
            total_ms=total,
            attempts=(Attempt(target.key, outcome, total if first is None else first, key),),
        )
        turn.account.close(record)
        self._books.closer.note(turn.call, record)

    def _cost(self, turn: Turn, used: Usage) -> int:
        return cost_of(used, turn.route.targets[0].model.price, at=turn.call.created_at)

    def _record(self, turn: Turn, status: Status) -> UsageRecord:
        return record_for(turn.call, turn.account.hold, turn.route, turn.route.targets[0], status)
