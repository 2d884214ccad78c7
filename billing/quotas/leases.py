# What this process has drawn of budgets, and the calls that it holds inside. Holding and settling is arithmetic: a call
# waits for the database only where its process has no room for it (ask).
#
# Escrow (O'Neil, "The Escrow Transactional Method", 1986) with cumulative leases: ``granted`` comes in only as the
# database tells it, ``returned`` is ours to say and leaves the room before the database is told, and what is used or
# held never asks the database.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice

import structlog
from msgspec import Struct
from msgspec.structs import replace

from billing.core.deadlines import running_timeout
from billing.core.edges import Clock
from billing.core.holds import OF_VALUES, HoldRequest, LimitName, RefusedHold, Scope, headroom_of
from billing.core.ids import EPOCH, day_of
from billing.core.store_errors import POSTGRES_AWAY
from billing.quotas.lease_store import MOST_VALUES, NANOUSD, TOKENS, Balance, LeaseRow, LeaseStore, Need, Taken, Told

ASK_WITHIN = 2.0  # seconds that a caller waits for the database
GIVE_UP_AFTER = 4.0  # seconds that a statement has: one that is given up costs its connection, and so the database more
NOON = 43_200.0  # seconds of a day
WAIT_FOR_ROOM = 0.25  # seconds that a caller waits for room which other owners hold unused
DONE_WITHIN = 60.0  # seconds after which a statement that was given up is over, if it was executed at all
LOOK_AGAIN = 1.0  # seconds until the first look at what it has drawn; each further one after twice as long
ROOM_IS_THERE = 2.0  # seconds more, for room that came back while the answer was written, or is on its way
LEAST_ASKS = 3  # for the same
ASK_AGAIN = 0.05  # seconds between asks for what was refused
TIGHT_LATELY = 1.0  # seconds since a balance became tight, in which others give back what they do not use
GIVE_BACK_AFTER = 0.02  # seconds after which what a settled call left of a tight balance goes back
HORIZON = 3600.0  # seconds of recent spending that a lease is made for
RECENT = 60.0  # seconds that "recent" looks back
MOST_RETURNS = 500  # leases told in one statement
TOMORROW_AT_ONCE = 5  # scopes, each second: what was used in the last hour is done long before midnight
MOST_LOOKS = 1000  # scopes that one turn looks at: a millisecond; with more of them each has its turn less often
OWNER_APART = 0.00025  # seconds between asks for each living owner: two hundred ask for one balance every 50 ms
ANSWERS_APART = 4  # times what the last answer took: a database that is slow is asked less often
LONGEST_PACE = 0.25  # seconds

NO_LEASE = LeaseRow("", "", 0, 0, 0)

log = structlog.get_logger(__name__)


class Room:
    """One lease of this process: of a scope, a unit and a day. Whole tokens or nano-dollars."""

    __slots__ = (
        "day",
        "granted",
        "held",
        "hold",
        "is_recalled",
        "is_tight",
        "rate",
        "returned",
        "scope",
        "told",
        "unit",
        "used",
        "was",
    )

    def __init__(self, scope: str, unit: str, day: str) -> None:
        self.scope, self.unit, self.day = scope, unit, day
        self.granted = 0  # by the database, as last read
        self.returned = 0  # of these; cumulative, like all the next
        self.told = 0  # of these, what the database has acknowledged
        self.used = 0  # by calls of this process that have ended
        self.held = 0  # by calls that run
        self.hold = 0  # the largest of late
        self.rate = 0.0  # used a second, of late
        self.was = 0  # used by the last turn
        self.is_tight = False  # nothing is kept that is not used
        self.is_recalled = False  # the bell rang since we asked last: an answer may be older than that

    @property
    def free(self) -> int:
        """What calls may still hold; below zero where they were billed for more than was held."""
        return self.granted - self.returned - self.used - self.held

    @property
    def size(self) -> int:
        """What is worth having free. Calls that begin together and run long have used nothing yet: by what they hold, a
        thousand of them ask ten times."""
        return max(int(self.rate * HORIZON), 4 * self.hold, self.held)

    def give_back(self, keep: int) -> bool:
        """Return what is free beyond ``keep``; whether the database has something to hear."""
        self.returned += max(0, self.free - keep)
        return self.returned > self.told


Pair = tuple[Room, Room]  # of tokens and of money


class Held(Struct, frozen=True, eq=False):
    """What a running call holds, and where."""

    team_id: str
    rooms: tuple[Pair, ...]  # of each scope
    amounts: tuple[tuple[int, int], ...]  # tokens and nano-dollars held of each
    models: tuple[str, ...]  # whose calls alone each counts


class _Waiting(Struct, eq=False):
    request: HoldRequest
    answer: asyncio.Future[RefusedHold | None]
    until: float  # loop time
    asked: int = 0  # times


class _Look(Struct):
    next: float  # monotonic seconds
    until: float
    pause: float = LOOK_AGAIN


class Leases:
    """The leases of one process; single-threaded. Only ``hold``, ``take_tomorrow`` and ``tell`` do I/O."""

    def __init__(self, store: LeaseStore, clock: Clock, owner: str, *, share: float) -> None:
        self.owner = owner
        self.share = share  # the most of what a balance has left that lies in leases, over all owners
        self.living = 1  # owners, ourselves among them
        self.is_away = False  # the database did not answer the last time
        self.may_ask = True  # False while our clock and the database's differ, or we have ended
        self.exceeded = 0  # calls whose upstream billed more than was held
        self.on_beat: Callable[[int, int], None] = lambda sent, beat: None  # what was acknowledged before, and now
        self.acknowledged = 0  # the highest beat that we were told
        self._store = store
        self._clock = clock
        self._rooms: dict[int, dict[str, Pair]] = {}  # by day and scope
        self._looked_at: dict[tuple[int, str], float] = {}  # when; by day and scope of what is used, free or untold
        self._turned = 0.0  # seconds of all turns, by which that is told
        self._tight: dict[Room, None] = {}
        self._untold: dict[Room, None] = {}  # what was returned of them is to be told
        self._for_tomorrow: dict[str, None] = {}  # scopes used since noon, without a lease for tomorrow
        self._took = 0.0  # seconds, by the last answer to an ask
        self._heard_at = 0.0  # monotonic seconds; when the database last answered anything
        self._forgotten = -1  # the last day whose rooms were let go: what they had used is not known any more
        self._held: dict[str, Held] = {}  # by request id
        self._waiting: dict[str, deque[_Waiting]] = {}  # by team, first come, first served
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, list[HoldRequest]] = {}  # by team: whose callers left while they waited
        self._returning: asyncio.TimerHandle | None = None
        self._returned_at = 0.0  # loop time; what was free of tight balances went back then
        self._telling: asyncio.Task[None] | None = None
        self._unread: dict[tuple[int, tuple[Need, ...]], _Look] = {}  # asks that were given up
        self._late: set[asyncio.Task[None]] = set()  # asks under way whose callers were answered without them

    def try_hold(self, request: HoldRequest) -> bool:
        """Hold what the request may cost in all of its scopes, if this process has the room."""
        return not self._waiting.get(request.team_id) and self._try(request)

    async def hold(self, request: HoldRequest) -> RefusedHold | None:
        """Hold it with room that the database gives, or return why there is none. Waits a quarter of a second for room
        that others hold unused."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.create_future(), loop.time() + WAIT_FOR_ROOM)
        line = self._waiting.setdefault(request.team_id, deque())
        line.append(waiting)
        self._serve(line)
        if request.team_id not in self._asking:
            self._asking[request.team_id] = asyncio.create_task(self._ask_for(request.team_id))
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self.release(request.request_id)
            self._left.setdefault(request.team_id, []).append(request)
            if request.team_id not in self._asking:
                self._let_go_of_left(request.team_id)
            raise

    def force(self, request: HoldRequest) -> None:
        """Hold it whether there is room or not: it has no cap, and the database does not answer."""
        rooms, day = self._rooms_of(request), day_of(request.request_id)
        for scope in request.scopes:
            self._looked_at.setdefault((day, scope.name), self._turned)
        self._enter(request, rooms, request.amounts)

    def settle(self, request_id: str, tokens: int, nanousd: int, model: str = "") -> None:
        """Put what a call used in place of what it held; of limits of a model, only of the one that answered. Once,
        however often it is said."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        is_tight = is_exceeded = False
        for (of_tokens, of_money), amounts, only in zip(held.rooms, held.amounts, held.models, strict=True):
            of_tokens.held -= amounts[0]
            of_money.held -= amounts[1]
            if not only or only == model:
                of_tokens.used += tokens
                of_money.used += nanousd
                is_exceeded = is_exceeded or tokens > amounts[0] or nanousd > amounts[1]
            is_tight = is_tight or of_tokens.is_tight or of_money.is_tight
        if is_exceeded:
            self.exceeded += 1
            log.warning("hold_exceeded", request_id=request_id, cost=nanousd)
        if held.team_id in self._waiting:
            self._serve(self._waiting[held.team_id])
        if is_tight:
            self._return_soon()

    def release(self, request_id: str) -> None:
        """Give a hold back: the call cost nothing."""
        if request_id in self._held:
            self.settle(request_id, 0, 0)

    def is_held(self, request_id: str) -> bool:
        """Whether a call holds something that was not settled."""
        return request_id in self._held

    @property
    def running(self) -> int:
        """Calls that hold something."""
        return len(self._held)

    def recall(self, scopes: Iterable[str]) -> None:
        """Keep nothing unused for these scopes: their balances have become tight."""
        for scope in scopes:
            for rooms in self._rooms.values():
                for room in rooms.get(scope, ()):
                    self._tight[room] = None
                    room.is_tight = room.is_recalled = True
        self._return_tight()

    def turn(self, seconds: float, now: float | None = None) -> None:
        """Look at leases, as once a second: learn how fast they are spent, and return what is too much.

        Not at those of which nothing is used, held, free or untold: they are looked at again from their next grant on.
        ``now``: unix seconds by the database, whatever our own clock shows.
        """
        self._turned += seconds
        now = self._clock.now() if now is None else now
        today = int(now // 86_400)
        for key, last in tuple(islice(self._looked_at.items(), MOST_LOOKS)):  # those that have waited longest
            day, scope = key
            del self._looked_at[key]
            pair = self._rooms[day][scope]
            if self._look(pair, self._turned - last, day - today):
                self._looked_at[key] = self._turned
                if day == today and now % 86_400 >= NOON and any(room.rate for room in pair):
                    self._for_tomorrow[scope] = None
        for day in [day for day in self._rooms if day < today - 1]:
            self._forgotten = max(self._forgotten, day)
            rooms = self._rooms[day]
            for scope in [scope for scope in rooms if (day, scope) not in self._looked_at]:
                for room in rooms.pop(scope):
                    self._tight.pop(room, None)
            if not rooms:
                del self._rooms[day]
        self._tell_soon()

    def _look(self, pair: Pair, seconds: float, ahead: int) -> bool:
        """Look at a scope's rooms of a day, so many ahead, after so many seconds; whether to look again."""
        is_used = False
        for room in pair:
            room.rate += (max(0, room.used - room.was) / seconds - room.rate) * min(1.0, seconds / RECENT)
            room.was = room.used
            if room.rate * HORIZON < 1 or ahead < 0:
                room.rate, room.hold = 0.0, room.hold // 2
            if ahead < 0 or (ahead == 0 and room.is_tight):
                self._give_back(room, 0)
            elif ahead == 0 and room.free > 2 * room.size:
                self._give_back(room, room.size)
            is_used = is_used or bool(room.rate or room.held or room.free > 0 or room.returned > room.told)
        return is_used

    async def read_again(self) -> None:
        """Learn what asks that were not answered have drawn after all, or it stays with us, unused and unknown. Raises
        what the database raises."""
        now = self._clock.monotonic()
        for (day, needs), look in tuple(self._unread.items()):
            if now < look.next:
                continue
            is_over = now > look.until
            taken = await self._draw(day, [needs])
            pairs = [(self._rooms.get(day, {}).get(need.scope), need.unit == NANOUSD) for need in needs]
            if taken.refused is None:
                self._take_in(taken, day, [pair[unit] for pair, unit in pairs if pair is not None])
                self._return_tight()
            look.pause *= 2
            look.next = min(now + look.pause, look.until)
            if is_over:
                del self._unread[day, needs]

    async def take_tomorrow(self, most: int = TOMORROW_AT_ONCE) -> None:
        """From noon on, draw tomorrow's leases with today's, some each second: a database that is away at midnight then
        leaves room. Raises what it raises."""
        now = self._clock.now()
        today = int(now // 86_400)
        if now % 86_400 < NOON or not self.may_ask:
            return
        for scope in tuple(islice(self._for_tomorrow, most)):
            del self._for_tomorrow[scope]
            if scope in self._rooms.get(today + 1, ()):
                continue
            rooms = self._rooms.get(today, {}).get(scope, ())
            asks = [Need(scope, room.unit, 0, room.size, room.hold) for room in rooms if not room.is_tight]
            tomorrow = self._rooms_on(today + 1, scope)
            if asks:
                self._take_in(await self._draw(today + 1, [asks]), today + 1, tomorrow)
                self._return_tight()  # the bell may have rung while the answer was on its way

    def leave(self) -> None:
        """Return everything that no running call holds; nothing is held from now on."""
        self.may_ask = False
        self.return_idle()

    def return_idle(self) -> None:
        """Return everything that no running call holds, and what those leave until an answer tells what is tight."""
        for room in [room for rooms in self._rooms.values() for pair in rooms.values() for room in pair]:
            self._tight[room] = None
            room.is_tight = room.is_recalled = True
            self._give_back(room, 0)

    def forget(self) -> None:
        """Begin with nothing, as another owner: what runs is settled where it was held."""
        self._rooms, self._looked_at, self._tight, self._untold, self._unread = {}, {}, {}, {}, {}
        self._forgotten = -1
        self.acknowledged = 0

    async def set_again(self) -> None:
        """Tell a database that forgot how all leases stand by this process's figures. Raises what it raises."""
        pairs = [pair for rooms in self._rooms.values() for pair in rooms.values()]
        leased = [room for pair in pairs for room in pair if room.granted]
        said = [_told(room) for room in leased]
        beat = await self._store.set_again(self.owner, said)
        self.acknowledged = max(self.acknowledged, beat or 0)
        for room, one in zip(leased, said, strict=True):
            room.told = one.returned  # more was acknowledged, perhaps, by one that did not know of what was granted
            if room.told < room.returned:
                self._untold[room] = None

    async def tell(self) -> None:
        """Tell the database of everything returned. Raises what it raises."""
        while rooms := tuple(islice(self._untold, MOST_RETURNS)):
            said, sent = [_told(room) for room in rooms], self.acknowledged
            async with running_timeout(GIVE_UP_AFTER):
                beat = await self._store.give_back(self.owner, said)
            if beat is None:
                return
            self.heard(sent, beat)
            for room, one in zip(rooms, said, strict=True):
                room.told = max(room.told, one.returned)
                if room.told == room.returned:
                    self._untold.pop(room, None)

    def _try(self, request: HoldRequest) -> bool:
        rooms, amounts = self._rooms_of(request), request.amounts
        for (of_tokens, of_money), (tokens, nanousd) in zip(rooms, amounts, strict=True):
            if of_tokens.free < tokens or of_money.free < nanousd:
                return False
        self._enter(request, rooms, amounts)
        return True

    def _enter(self, request: HoldRequest, rooms: tuple[Pair, ...], amounts: tuple[tuple[int, int], ...]) -> None:
        if request.request_id in self._held:
            return
        for (of_tokens, of_money), (tokens, nanousd) in zip(rooms, amounts, strict=True):
            of_tokens.held += tokens
            of_money.held += nanousd
            of_tokens.hold = max(of_tokens.hold, tokens)
            of_money.hold = max(of_money.hold, nanousd)
        models = tuple([scope.model for scope in request.scopes])
        self._held[request.request_id] = Held(request.team_id, rooms, amounts, models)

    def _rooms_of(self, request: HoldRequest) -> tuple[Pair, ...]:
        day = day_of(request.request_id)
        try:
            rooms = self._rooms[day]
            return tuple([rooms[scope.name] for scope in request.scopes])
        except KeyError:
            return tuple([self._rooms_on(day, scope.name) for scope in request.scopes])

    def _rooms_on(self, day: int, scope: str) -> Pair:
        rooms = self._rooms.setdefault(day, {})
        if scope not in rooms:
            of = (EPOCH + timedelta(days=day)).isoformat()
            rooms[scope] = Room(scope, TOKENS, of), Room(scope, NANOUSD, of)
        return rooms[scope]

    async def _ask_for(self, team_id: str) -> None:
        """Ask for all callers of a team that wait, until none does."""
        line = self._waiting[team_id]
        try:
            while line:
                pause = await self._ask(line)
                self._let_go_of_left(team_id)
                if pause:  # calls that come within it share the next answer
                    await asyncio.sleep(pause)
        except BaseException as exc:
            for waiting in line:
                if not waiting.answer.done():
                    waiting.answer.set_exception(exc if isinstance(exc, Exception) else RuntimeError("leases ended"))
            raise
        finally:
            del self._waiting[team_id], self._asking[team_id]
            self._let_go_of_left(team_id)

    def _serve(self, line: deque[_Waiting]) -> None:
        """Let callers in that wait, as far as what has just become free reaches; first come, first served."""
        while line and (line[0].answer.done() or self._try(line[0].request)):
            served = line.popleft()
            if not served.answer.done():
                served.answer.set_result(None)

    async def _ask(self, line: deque[_Waiting]) -> float:
        """Ask once; return how long not to ask again, in seconds."""
        self._serve(line)
        if not line:
            return 0.0
        day = day_of(line[0].request.request_id)
        asked = [one for one in line if not one.answer.done() and day_of(one.request.request_id) == day]
        rooms = self._of(asked)
        for room in rooms:
            room.is_recalled = False
        taken, before = await self._take(asked), sum(room.granted for room in rooms)
        if taken is None or taken.refused is not None:
            for waiting in asked:
                self._end_without(waiting, taken)
            return 0.0
        self._take_in(taken, day, rooms)
        if taken.beyond:
            self._refuse_beyond(asked, taken.beyond)
        has_grown = sum(room.granted for room in rooms) > before
        now = asyncio.get_running_loop().time()
        refused = []
        for waiting in asked:
            if waiting.answer.done():
                continue
            if self._try(waiting.request):
                waiting.answer.set_result(None)
            else:
                refused.append(waiting)
        for waiting in refused:
            why, may_come = self._refusal(waiting.request, taken)
            waiting.asked += 1
            # Where the room is there it is asked for again, however late it is: this process may have been stopped.
            is_there = why is None and (waiting.until + ROOM_IS_THERE > now or waiting.asked < LEAST_ASKS)
            if may_come and (is_there or waiting.until > now):
                continue
            self._refuse(waiting, why or _unknown(waiting.request))
        tight = [room for room in rooms if room.is_tight]
        for room in tight:
            self._give_back(room, 0)
        if self._untold:
            self._tell_soon()
        if refused and not has_grown:
            return max(ASK_AGAIN, self._pace)
        return self._pace if tight else 0.0

    @property
    def _pace(self) -> float:
        """Seconds between asks for a tight balance, and between returns of what is not used of it. Many owners share
        one database, and what it cannot answer in time costs it as much as what it can."""
        return min(LONGEST_PACE, max(self.living * OWNER_APART, ANSWERS_APART * self._took))

    async def _take(self, asked: Sequence[_Waiting]) -> Taken | None:
        """Ask the database; ``None`` when it does not answer."""
        day = day_of(asked[0].request.request_id)
        if not self.may_ask or day <= self._forgotten:
            return Taken(refused="clock")
        if self.is_away:  # until the next beat is answered: each caller would wait for the deadline
            return None
        asking, began = asyncio.create_task(self._draw(day, list(self._asks(asked)))), self._clock.monotonic()
        try:
            async with running_timeout(ASK_WITHIN):
                taken = await asyncio.shield(asking)
        except POSTGRES_AWAY as exc:
            if not asking.done():
                late = asyncio.create_task(self._hear_late(asking, day))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
            self.miss(began, exc)
            return None
        except asyncio.CancelledError:
            asking.cancel()
            raise
        self.is_away = False
        return taken

    async def _hear_late(self, asking: asyncio.Task[Taken], day: int) -> None:
        """Take in what an ask brings whose callers have been answered without it."""
        try:
            taken = await asking
            rooms = [self._rooms.get(day, {}).get(row.scope) for row in taken.leases or ()]
            self._take_in(taken, day, [room for pair in rooms if pair is not None for room in pair])
            self._return_tight()
        except POSTGRES_AWAY as exc:
            log.info("ask_given_up", error=repr(exc))

    async def _draw(self, day: int, asks: Sequence[Sequence[Need]]) -> Taken:
        sent, share, text = self.acknowledged, self.share / self.living, (EPOCH + timedelta(days=day)).isoformat()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with running_timeout(GIVE_UP_AFTER):
                taken = await self._store.take(self.owner, text, asks, share)
        except (*POSTGRES_AWAY, asyncio.CancelledError):  # a beat's own deadline may end it, too
            holds = {(need.scope, need.unit): need.hold for ask in asks for need in ask}
            needs = tuple(Need(*room, need=0, want=0, hold=hold) for room, hold in holds.items())
            now = self._clock.monotonic()
            self._unread[day, needs] = _Look(now + LOOK_AGAIN, now + DONE_WITHIN)
            raise
        finally:
            self._took = loop.time() - began
        self.heard(sent, taken.beat)
        return taken

    def _asks(self, asked: Sequence[_Waiting]) -> Iterator[list[Need]]:
        """Yield what each call lacks after those before it; the first asks for as much as is worth having."""
        free: dict[Room, int] = {}
        for waiting in asked:
            request, needs = waiting.request, []
            for pair, amounts in zip(self._rooms_of(request), request.amounts, strict=True):
                for room, amount in zip(pair, amounts, strict=True):
                    is_first = room not in free
                    room.hold = max(room.hold, amount)
                    left = free.get(room, room.free)
                    need = max(0, amount - left)
                    free[room] = left + need - amount
                    want = need + (room.size if is_first and not room.is_tight else 0)
                    needs.append(Need(room.scope, room.unit, need, want, amount, room.granted == 0))
            yield needs

    def _take_in(self, taken: Taken, day: int, asked: Iterable[Room]) -> None:
        """Learn what the database says of our leases and their balances."""
        for row in taken.leases or ():
            pair = self._rooms.get(day, {}).get(row.scope)
            if pair is not None:
                room = pair[row.unit == NANOUSD]
                room.granted = max(room.granted, row.granted)
                self._looked_at.setdefault((day, row.scope), self._turned)
        tight: dict[tuple[str, str], bool] = {}
        for balance in taken.balances or ():
            key = balance.scope, balance.unit
            tight[key] = tight.get(key, False) or balance.tight_for is not None
        for room in asked:
            # Without a cap it has no balance to tell of.
            room.is_tight = room.is_recalled or tight.get((room.scope, room.unit), False)
            if room.is_tight:
                self._tight[room] = None
            else:
                self._tight.pop(room, None)

    def _refusal(self, request: HoldRequest, taken: Taken) -> tuple[RefusedHold | None, bool]:
        """Return why a request has no room, the reason that lasts longest; and whether room may come back soon.

        ``None``: none of what was told is in its way.
        """
        known = {(row.scope, row.unit): row for row in taken.leases or ()}
        found: list[RefusedHold] = []
        left: list[tuple[LimitName, int]] = []
        may_come = True
        for scope, rooms, amounts in zip(request.scopes, self._rooms_of(request), request.amounts, strict=True):
            for balance in taken.balances or ():
                if balance.scope != scope.name:
                    continue
                room = rooms[balance.unit == NANOUSD]
                limit, wanted = limit_of(balance), amounts[balance.unit == NANOUSD]
                lease = known.get((room.scope, room.unit), NO_LEASE)
                # What is on its way back counts; below zero where calls cost more than was drawn and no row says so.
                ours = room.free + max(0, room.returned - lease.returned)
                headroom = balance.cap - max(0, balance.drawn + balance.corrected) + ours
                left.append((limit, headroom))
                if wanted <= headroom:
                    continue
                unflushed = max(0, room.used - lease.spent)
                used = (balance.spent or 0) + balance.corrected + unflushed
                tight_for = balance.tight_for or 0.0
                is_moving = tight_for < TIGHT_LATELY or self._pace > ASK_AGAIN  # what is unused goes back that late
                may_come = may_come and is_moving and wanted <= headroom + (balance.unused or 0)
                found.append(refused_hold(scope, limit, balance, used, ours, wanted))
        if not found:
            return None, True
        last = max(found, key=lambda one: (one.alone_exceeds, one.is_settled))
        return replace(last, headroom=headroom_of(left)), may_come

    def _end_without(self, waiting: _Waiting, taken: Taken | None) -> None:
        """Answer a caller to whom the database gave nothing: who has no cap needs none, others cannot be let in."""
        if waiting.answer.done():
            return
        if self._try(waiting.request):
            waiting.answer.set_result(None)
        elif not any(map(_is_capped, waiting.request.scopes)) and (taken is None or taken.refused != "ended"):
            self.force(waiting.request)
            waiting.answer.set_result(None)
        else:
            self._refuse(waiting, _unknown(waiting.request))

    def _refuse(self, waiting: _Waiting, why: RefusedHold) -> None:
        waiting.answer.set_result(why)
        self._let_go(waiting.request)

    def _refuse_beyond(self, asked: Iterable[_Waiting], beyond: Collection[str]) -> None:
        """Refuse the calls of end users or tags of whom their team has too many."""
        for waiting in asked:
            scope = next((scope for scope in waiting.request.scopes if scope.name in beyond), None)
            if scope is not None and not waiting.answer.done():
                self._refuse(waiting, _too_many(scope))

    def _let_go_of_left(self, team_id: str) -> None:
        """Forget rooms that no caller waits for any more, while no answer for the team is on its way."""
        for request in self._left.pop(team_id, ()):
            self._let_go(request)

    def _let_go(self, request: HoldRequest) -> None:
        """Forget rooms of end users and tags that nothing was drawn of, or names that callers make up would fill the
        memory. Not those of which an answer is on its way."""
        names = [scope.name for scope in request.scopes if scope.name.startswith(OF_VALUES)]
        if not names or self._late:
            return
        unread = {need.scope for _, needs in self._unread for need in needs}
        day = day_of(request.request_id)
        rooms = self._rooms.get(day, {})
        for name in names:
            pair = rooms.get(name, ())
            if name not in unread and not any(room.granted or room.held or room.used for room in pair):
                rooms.pop(name, None)
                self._looked_at.pop((day, name), None)
                for room in pair:
                    self._tight.pop(room, None)
                    self._untold.pop(room, None)

    def _of(self, asked: Sequence[_Waiting]) -> set[Room]:
        return {room for one in asked for pair in self._rooms_of(one.request) for room in pair}

    def _return_soon(self) -> None:
        if self._returning is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time() + GIVE_BACK_AFTER, self._returned_at + self._pace)
            self._returning = loop.call_at(at, self._return_tight)

    def _return_tight(self) -> None:
        self._returning, self._returned_at = None, asyncio.get_running_loop().time()
        for room in self._tight:
            self._give_back(room, 0)
        self._tell_soon()

    def _give_back(self, room: Room, keep: int) -> None:
        if room.give_back(keep):
            self._untold[room] = None

    def _tell_soon(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        try:
            await self.tell()
        except POSTGRES_AWAY as exc:  # it is told with the next turn
            log.info("returns_untold", error=repr(exc))

    def miss(self, began: float, exc: BaseException) -> None:
        """Take note of a statement, begun then (monotonic seconds), that has no answer in time. The database is away if
        it has answered no other since: one scope whose row is locked, or much asked for, keeps no other from asking."""
        if self._heard_at < began:
            if not self.is_away:
                log.error("leases_unreachable", error=repr(exc))
            self.is_away = True

    def heard(self, sent: int, beat: int | None) -> None:
        """Take note of an acknowledgement. ``sent``: the highest that we knew when we asked."""
        self._heard_at = self._clock.monotonic()
        if beat:  # else it was not counted: a look alone, or beside another statement of this process
            self.acknowledged = max(self.acknowledged, beat)
            self.on_beat(sent, beat)


def _told(room: Room) -> Told:
    return Told(room.scope, room.unit, room.day, room.granted, room.returned)


def limit_of(balance: Balance) -> LimitName:
    if balance.unit == TOKENS:
        return LimitName.TOKENS_PER_DAY
    return LimitName.USD_PER_DAY if len(balance.period) == len("2026-11-22") else LimitName.USD_PER_MONTH


def _caps(scope: Scope) -> dict[LimitName, int | None]:
    limits = scope.limits
    return {
        LimitName.TOKENS_PER_DAY: limits.tokens_per_day,
        LimitName.USD_PER_DAY: limits.nanousd_per_day,
        LimitName.USD_PER_MONTH: limits.nanousd_per_month,
    }


def _is_capped(scope: Scope) -> bool:
    return any(cap is not None for cap in _caps(scope).values())


def refused_hold(scope: Scope, limit: LimitName, balance: Balance, used: int, ours: int, wanted: int) -> RefusedHold:
    is_settled, alone = max(0, used) + wanted > balance.cap, wanted > balance.cap
    return RefusedHold(
        scope=scope,
        limit=limit,
        cap=balance.cap,
        used=used,
        held=max(0, balance.drawn + balance.corrected - used - ours),
        wanted=wanted,
        retry_after=None if is_settled or alone else 1.0,
        is_settled=is_settled,
        alone_exceeds=alone,
    )


def _too_many(scope: Scope) -> RefusedHold:
    return RefusedHold(
        scope=scope, limit=LimitName.SCOPES_PER_DAY, cap=MOST_VALUES, used=MOST_VALUES, held=0, wanted=1,
        retry_after=None, is_settled=True, alone_exceeds=False,
    )  # fmt: skip


def _unknown(request: HoldRequest) -> RefusedHold:
    """Return the refusal of a call whose limits cannot be checked now."""
    scope = next(filter(_is_capped, request.scopes), request.scopes[0])
    tokens, nanousd = request.amounts[request.scopes.index(scope)]
    limit, cap = next(
        ((limit, cap) for limit, cap in _caps(scope).items() if cap is not None), (LimitName.USD_PER_DAY, 0)
    )
    wanted = tokens if limit is LimitName.TOKENS_PER_DAY else nanousd
    return RefusedHold(
        scope=scope, limit=limit, cap=cap, used=0, held=0, wanted=wanted, retry_after=1.0,
        is_settled=False, alone_exceeds=False, is_unknown=True,
    )  # fmt: skip
