# The counters of several owners against a plain model, through everything that Redis and the owners can go through.

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from billing.epochs import EPOCH_KEY, Epoch, read_epoch
from billing.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from billing.ids import day_of
from billing.quota_verbs import month_of
from billing.quotas import Quotas
from billing.records import CHARGED, Status, UsageRecord
from billing.scope_state import ScopeState
from billing.store_errors import STORES_AWAY
from protocol.usage import Usage
from tests.support.clock import SetClock
from tests.support.model_owners import SHORTLY, DictJournal, DictStore, ModelOwner, Way

TEAM = "team_a"
LIMITS = {
    "team": Limits(
        requests_per_minute=30,
        tokens_per_minute=4000,
        concurrent_requests=12,
        tokens_per_day=9000,
        nanousd_per_day=90_000,
        nanousd_per_month=120_000,
    ),
    "key:a": Limits(requests_per_minute=20, concurrent_requests=8, nanousd_per_day=50_000),
    "key:b": Limits(tokens_per_minute=3000, tokens_per_day=6000),
}
OWNERS = 3
NOTHING = Settlement(Usage(), 0)
PICK = st.integers(0, 10**6)


@dataclass
class Call:
    """What the model knows of a call."""

    request: HoldRequest
    is_checked: bool  # held by Redis in books that had room for it
    record: UsageRecord | None = None  # how it ended

    def excess(self, kind: str) -> int:
        """Return by how much the call may be over a cap: what no hold had made sure of."""
        held = self.request.tokens if kind == "tokens" else self.request.cost_nanousd
        if self.record is None:
            return 0 if self.is_checked else held
        if self.record.status not in CHARGED:
            return 0 if self.is_checked else held  # its hold may still be there
        settled = self.record.input_tokens if kind == "tokens" else self.record.cost_nanousd
        return max(0, settled - held) if self.is_checked else max(settled, held)


class House(RuleBasedStateMachine):
    """Owners that open, close, settle, flush, sleep, die, lose Redis and find it again, in any order."""

    redis_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = SetClock()
        self.redis: Redis = Redis.from_url(self.redis_url)
        self.probe = Quotas(self.redis, self.clock, uses_server_time=False, deadline=5.0)
        self.store = DictStore(self.clock, TEAM)
        self.late: list[Callable[[], Awaitable[Any]]] = []
        self.calls: dict[str, Call] = {}
        self.reaped: dict[str, str] = {}  # request id -> the epoch in which its hold was reaped
        self.orphans: list[DictJournal] = []
        self.of_dead: set[str] = set()  # requests of processes that are dead
        self.ended: list[ModelOwner] = []
        self.dump: dict[bytes, bytes] = {}
        self.epoch = ""
        self.started = 0
        self.synced = 0
        self.run(self.redis.flushall())
        self.owners = [self.new_owner() for _ in range(OWNERS)]

    def run(self, work: Awaitable[Any]) -> Any:
        """Run until it is done, and what it has started too."""

        async def to_the_end() -> Any:
            result = await work
            for _ in range(5):
                await asyncio.sleep(0)
            return result

        return self.runner.run(to_the_end())

    def new_owner(self) -> ModelOwner:
        """Start a process: it looks at the epoch before it does anything."""
        self.started += 1
        owner = ModelOwner(self.started, self.redis_url, self.clock, self.store, self.late)
        self.store.seen_at[owner.id] = self.clock.now()
        self.run(look(owner))
        if owner.restorer._joined == "*":
            owner.restorer._joined = ""
        return owner

    def teardown(self) -> None:
        """Close what was opened."""
        for owner in [*self.owners, *self.ended]:
            self.run(owner.end())
        self.run(self.redis.aclose())
        self.runner.close()

    def awake(self, number: int) -> ModelOwner | None:
        """Return an owner that runs."""
        owner = self.owners[number % len(self.owners)]
        return None if owner.is_paused else owner

    @rule(number=PICK, key=st.sampled_from("ab"), tokens=st.integers(0, 900), spent=st.integers(0, 500))
    def open(self, number: int, key: str, tokens: int, spent: int) -> None:
        """While Redis counts, a hold is given exactly when every limit has room."""
        if (owner := self.awake(number)) is None:
            return
        request = self.request(key, tokens)
        is_counting = not owner.quotas.is_standalone and owner.line.way is Way.OPEN
        is_counting = is_counting and self.marker() == owner.quotas.epoch
        full = self.full_limits(request)

        answer = self.run(owner.open(request, min(spent, tokens)))

        if is_counting and full:
            assert isinstance(answer, RefusedHold), f"{full} had no room"
            assert (answer.scope.kind, answer.limit) in full
        elif is_counting:
            assert isinstance(answer, Hold) and not answer.standalone, f"refused although there was room: {answer}"
        self.note(owner, request, answer)

    def note(self, owner: ModelOwner, request: HoldRequest, answer: Any) -> None:
        """Keep what became of an open."""
        is_held = isinstance(answer, Hold)
        if is_held:
            self.calls[request.request_id] = Call(request, is_checked=not answer.standalone)
        else:
            self.of_dead.add(request.request_id)  # if its answer was lost: nobody may ever give it back

    @rule(number=PICK, pick=PICK, share=st.floats(0, 1.3), is_charged=st.booleans(), is_said=st.booleans())
    def close(self, number: int, pick: int, share: float, is_charged: bool, is_said: bool) -> None:
        """A call ends in the journal; it may be settled at once or some time later."""
        owner = self.awake(number)
        if owner is None or not owner.journal.open:
            return
        request_id = sorted(owner.journal.open)[pick % len(owner.journal.open)]
        self.end_call(owner, request_id, share, is_charged=is_charged)
        if is_said:
            self.say(number, pick)

    def end_call(self, owner: ModelOwner, request_id: str, share: float, *, is_charged: bool) -> None:
        """Close a call."""
        call = self.calls[request_id]
        tokens, cost = int(call.request.tokens * share), int(call.request.cost_nanousd * share)
        if is_charged:
            call.record = owner.close(request_id, tokens, cost, Status.ANSWERED)
        else:
            call.record = owner.close(request_id, 0, 0, Status.FAILED)

    @rule(number=PICK, pick=PICK)
    def say(self, number: int, pick: int) -> None:
        """A closed call is settled or released."""
        if (owner := self.awake(number)) is None:
            return
        if closed := sorted(each for each, (_, epoch) in owner.holds.items() if epoch is not None):
            request_id = closed[pick % len(closed)]
            record = self.calls[request_id].record
            assert record is not None
            self.run(owner.say(request_id, record))

    @rule(number=PICK)
    def renew_all(self, number: int) -> None:
        """An owner renews its leases, as it does every five seconds."""
        if (owner := self.awake(number)) is None:
            return
        epoch, is_counting = owner.quotas.epoch, not owner.quotas.is_standalone and owner.line.way is Way.OPEN
        for request_id in list(owner.journal.open):
            hold, _ = owner.holds[request_id]
            is_held = self.run(owner.quotas.renew(hold, NOTHING))
            if is_counting and is_held and self.reaped.get(request_id) == epoch == self.marker():
                del self.reaped[request_id]
                self.calls[request_id].is_checked = True

    @rule(number=PICK, answer_is_lost=st.booleans())
    def flush(self, number: int, answer_is_lost: bool) -> None:
        """Closed calls go to the ledger."""
        if (owner := self.awake(number)) is not None and not self.store.is_away:
            self.run(owner.flusher.flush(answer_is_lost=answer_is_lost))

    @rule(number=PICK)
    def look_alone(self, number: int) -> None:
        """One owner looks at the epoch; whatever has to be done it cannot do without the others."""
        if (owner := self.awake(number)) is not None:
            self.run(look(owner))

    @rule(seed=st.integers(0, 10**6), calls=st.integers(0, 6))
    def look_together(self, seed: int, calls: int) -> None:
        """All owners that are awake look, while calls begin, end and are flushed."""
        awake = [owner for owner in self.owners if not owner.is_paused]
        self.run(self.look_and_work(awake, random.Random(seed), calls))

    async def look_and_work(self, awake: list[ModelOwner], dice: random.Random, calls: int) -> None:
        work = [self.work(dice.choice(awake), dice) for _ in range(calls if awake else 0)]
        await asyncio.gather(*(keep_looking(owner) for owner in awake), *work)

    async def work(self, owner: ModelOwner, dice: random.Random) -> None:
        """Open a call, close another, settle, flush: at some moment of a rebuild."""
        await asyncio.sleep(dice.random() / 200)
        request = self.request(dice.choice("ab"), dice.randrange(500))
        answer = await owner.open(request, 0)
        self.note(owner, request, answer)
        if isinstance(answer, Hold):
            self.calls[request.request_id].is_checked = False
        if owner.journal.open and dice.random() < 0.7:
            request_id = dice.choice(sorted(owner.journal.open))
            self.end_call(owner, request_id, dice.random(), is_charged=dice.random() < 0.8)
            await asyncio.sleep(dice.random() / 200)
            record = self.calls[request_id].record
            if dice.random() < 0.8 and record is not None and request_id in owner.holds:
                await owner.say(request_id, record)
        if dice.random() < 0.5 and not self.store.is_away:
            await owner.flusher.flush()

    @rule(number=PICK, way=st.sampled_from([Way.OPEN, Way.OPEN, Way.CUT, Way.DEAF, Way.LATE]))
    def bend(self, number: int, way: Way) -> None:
        """The way of an owner to Redis changes."""
        self.owners[number % len(self.owners)].line.way = way

    @rule()
    def deliver_late(self) -> None:
        """What a frozen Redis had in its buffers is executed now."""
        self.run(self.deliver())

    async def deliver(self) -> None:
        late, self.late[:] = list(self.late), []
        for command in late:
            await command()

    @rule()
    def wipe(self) -> None:
        """Redis loses everything."""
        self.run(self.redis.flushall())

    @rule()
    def lose_marker(self) -> None:
        """Redis loses a part."""
        self.run(self.redis.delete(f"tollgate:{{{TEAM}}}:epoch"))

    @rule()
    def take_dump(self) -> None:
        """Keep what Redis has."""
        self.dump = self.run(dump_of(self.redis))

    @precondition(lambda self: self.dump)
    @rule()
    def restore_dump(self) -> None:
        """Redis is started again, with what it had some time ago."""
        self.run(restore(self.redis, self.dump))
        for call in self.calls.values():
            call.is_checked = False

    @rule(number=PICK)
    def kill(self, number: int) -> None:
        """A process dies, and another is started."""
        place = number % len(self.owners)
        dead = self.owners[place]
        self.ended.append(dead)
        for request_id, record in dead.journal.open.items():
            self.calls[request_id].record = record
        self.of_dead |= dead.holds.keys()
        self.orphans.append(dead.journal)
        self.run(dead.end())
        self.owners[place] = self.new_owner()

    @precondition(lambda self: self.orphans)
    @rule(number=PICK)
    def adopt(self, number: int) -> None:
        """A process takes over the journal of a dead one."""
        if (owner := self.awake(number)) is not None:
            owner.journal.adopt(self.orphans.pop(0))

    @rule(number=PICK)
    def pause_or_resume(self, number: int) -> None:
        """A process is stopped, or goes on."""
        owner = self.owners[number % len(self.owners)]
        owner.is_paused = not owner.is_paused

    @rule(number=PICK)
    def sweep(self, number: int) -> None:
        """Holds whose leases have ended are freed; of these, calls that the ledger knows are settled."""
        if (owner := self.awake(number)) is not None and owner.line.way is Way.OPEN:
            self.run(self.sweep_by(owner))

    async def sweep_by(self, owner: ModelOwner) -> None:
        epoch = owner.quotas.epoch
        freed, unsettled = await owner.quotas.sweep(TEAM)
        for request_id in freed:
            self.reaped[request_id] = epoch
            if request_id in self.calls:
                self.calls[request_id].is_checked = False
        known = [self.store.rows[each] for each in unsettled if each in self.store.rows]
        await owner.quotas.book(known, epoch)

    @rule(is_away=st.booleans())
    def lose_postgres(self, is_away: bool) -> None:
        """Postgres goes, or comes back."""
        self.store.is_away = is_away

    @rule(seconds=st.sampled_from([1.0, 5.0, 5.0, 29.0, 31.0, 61.0, 28_800.0, 25 * 86_400.0]))
    def wait(self, seconds: float) -> None:
        """Time passes: leases end, days and months too. Ids are younger than the calls before them."""
        self.clock.move(seconds)

    @rule()
    def heal(self) -> None:
        """Everything works again for a while: then the books are exact, whatever happened before."""
        self.store.is_away = False
        alive = {owner.id for owner in self.owners}
        for owner in self.owners:
            owner.line.way, owner.is_paused = Way.OPEN, False
            owner.keep_still(5.0)  # however slow this machine is
        for dead in self.store.seen_at.keys() - alive:
            self.store.seen_at[dead] = min(self.store.seen_at[dead], self.clock.now() - 31)
        self.report()
        why = self.run(self.recover())
        for owner in self.owners:
            owner.keep_still(SHORTLY)

        assert not why, why
        self.books_agree()

    @rule()
    def outlive_the_dead(self) -> None:
        """A lease later nothing of the dead is held, and what they spent is settled to the last token."""
        self.heal()
        for _ in range(7):
            self.clock.move(5.0)
            self.report()
            for number in range(OWNERS):
                self.renew_all(number)
                self.sweep(number)
        self.books_agree()
        holds = {key.decode() for key in self.run(self.redis.hkeys(f"tollgate:{{{TEAM}}}:{self.epoch}:holds"))}
        assert not holds & self.of_dead

    async def recover(self) -> str:
        await self.deliver()
        while self.orphans:
            self.owners[0].journal.adopt(self.orphans.pop())
        for _ in range(20):
            for owner in self.owners:
                owner.restorer._dead_due = 0.0
            await asyncio.gather(*(keep_looking(owner) for owner in self.owners))
            for owner in self.owners:
                for request_id in [each for each, (_, epoch) in owner.holds.items() if epoch is not None]:
                    record = self.calls[request_id].record
                    assert record is not None
                    await owner.say(request_id, record)
                await owner.flusher.flush()
                await self.sweep_by(owner)
            if not (why := await self.why_not()):
                break
            self.clock.move(6)  # until the turn of a dead one has ended
            self.report()
        return why

    @invariant()
    def books_agree(self) -> None:
        """No cap is passed but by what no hold could know of; and when everybody is heard, the books are exact."""
        self.report()
        epoch = self.present()
        if epoch is None or not epoch.is_ready or self.marker() != epoch.id:
            return
        if epoch.id != self.epoch:
            self.epoch = epoch.id
            self.begin_epoch(epoch)
        is_exact = not self.run(self.why_not())
        self.synced += is_exact
        holds = {key.decode() for key in self.run(self.redis.hkeys(f"tollgate:{{{TEAM}}}:{epoch.id}:holds"))}
        day = int(self.clock.now() // 86_400)
        for name, limits in LIMITS.items():
            state: ScopeState = self.run(self.probe.usage(TEAM, key_id=name[4:] or None))
            of_scope = {key: call for key, call in self.calls.items() if name in names(call.request)}
            if is_exact:
                self.check_exact(name, state, of_scope, holds, day)
            self.check_caps(state, limits, of_scope, day)

    def check_exact(self, name: str, state: ScopeState, calls: dict[str, Call], holds: set[str], day: int) -> None:
        """The settled sums are those of all calls that ended; running calls are held.

        What a dead process never said is still held, not settled, until its lease ends.
        """
        unsaid = holds & self.of_dead
        ended = [call.record for key, call in calls.items() if key not in unsaid and call.record is not None]
        owed = [record for record in ended if record.status in CHARGED]
        today = [record for record in owed if day_of(record.request_id) == day]
        month = [record for record in owed if month_of(day_of(record.request_id)) == month_of(day)]
        settled = (sum(r.input_tokens for r in today), sum(r.cost_nanousd for r in today))
        assert (state.day_tokens, state.day_nanousd) == settled, name
        assert state.month_nanousd == sum(r.cost_nanousd for r in month), name
        live = {key for key, call in calls.items() if call.record is None and self.reaped.get(key) != self.epoch}
        assert live <= holds, "a running call is not held"
        extra = {each for each in holds - live if each in calls}
        assert extra <= self.of_dead, "a call that is over is held"
        if not (holds - self.calls.keys()):
            held = [calls[key].request for key in holds if key in calls]
            of_today = [request for request in held if day_of(request.request_id) == day]
            assert state.live == len(held), name
            assert state.day_tokens_held == sum(request.tokens for request in of_today), name
            assert state.day_nanousd_held == sum(request.cost_nanousd for request in of_today), name

    def check_caps(self, state: ScopeState, limits: Limits, calls: dict[str, Call], day: int) -> None:
        """Settled and held never pass a cap."""
        today = [call for key, call in calls.items() if day_of(key) == day]
        month = [call for key, call in calls.items() if month_of(day_of(key)) == month_of(day)]
        for limit, cap, excess in (
            (LimitName.TOKENS_PER_DAY, limits.tokens_per_day, sum(call.excess("tokens") for call in today)),
            (LimitName.USD_PER_DAY, limits.nanousd_per_day, sum(call.excess("cost") for call in today)),
            (LimitName.USD_PER_MONTH, limits.nanousd_per_month, sum(call.excess("cost") for call in month)),
        ):
            assert cap is None or sum(state.used_and_held(limit)) - excess <= cap, limit

    def begin_epoch(self, epoch: Epoch) -> None:
        """What owners know that did not put back is not in the books: others may be given that room."""
        members = {owner for owner, (is_done, _) in epoch.owners.items() if is_done}
        outside = [owner.journal for owner in self.owners if owner.id not in members] + self.orphans
        for journal in outside:
            for request_id in (*journal.open, *journal.closed):
                self.calls[request_id].is_checked = False

    def report(self) -> None:
        """Owners that run are seen in Postgres."""
        if not self.store.is_away:
            for owner in self.owners:
                if not owner.is_paused:
                    self.store.seen_at[owner.id] = self.clock.now()

    async def why_not(self) -> str:
        """Return why the books need not be exact now, "" when everybody was heard."""
        epoch = await present(self.redis)
        marker = (await self.redis.get(f"tollgate:{{{TEAM}}}:epoch") or b"").decode()
        if epoch is None or not epoch.is_ready or epoch.wanted or epoch.run_id == "old" or marker != epoch.id:
            return "the epoch is not ready"
        if self.late or self.orphans or await self.store_has_news():
            return "somebody has yet to be heard"
        for owner in self.owners:
            quotas, restorer = owner.quotas, owner.restorer
            is_member = restorer._joined == epoch.id or epoch.owners.get(owner.id, (False, 0.0))[0]
            if quotas.is_standalone or quotas.unsaid or quotas.epoch != epoch.id or not is_member:
                return f"{owner.id} is not in the epoch"
            if owner.journal.adopted or any(epoch is not None for _, epoch in owner.holds.values()):
                return f"{owner.id} has something to say"
        return ""

    async def store_has_news(self) -> bool:
        """Whether somebody died with something unsaid."""
        return any(count for owner, count in self.store.unsettled.items() if owner not in {o.id for o in self.owners})

    def present(self) -> Epoch | None:
        """Return the epoch in Redis."""
        return self.run(present(self.redis))

    def marker(self) -> str:
        """Return the epoch of the team's books."""
        return (self.run(self.redis.get(f"tollgate:{{{TEAM}}}:epoch")) or b"").decode()

    def request(self, key: str, tokens: int) -> HoldRequest:
        """Return a request for a hold."""
        scopes = (Scope("team", TEAM, LIMITS["team"]), Scope("key", key, LIMITS[f"key:{key}"]))
        legs = (Leg("a", tokens, tokens * 10),)
        now = self.clock.now()
        return HoldRequest(request_id=self.clock.new_id(), team_id=TEAM, scopes=scopes, legs=legs, valid_until=now + 5)

    def full_limits(self, request: HoldRequest) -> set[tuple[str, LimitName]]:
        """Return every limit that has no room for the request, by what Redis counts."""
        full = set()
        for scope, name in zip(request.scopes, names(request), strict=True):
            state: ScopeState = self.run(self.probe.usage(TEAM, key_id=name[4:] or None))
            tokens, cost = request.tokens, request.cost_nanousd
            wants = dict(zip(LimitName, (1, tokens, 1, tokens, cost, cost), strict=True))
            limits = scope.limits
            caps = dict(
                zip(
                    LimitName,
                    (
                        limits.requests_per_minute,
                        limits.tokens_per_minute,
                        limits.concurrent_requests,
                        limits.tokens_per_day,
                        limits.nanousd_per_day,
                        limits.nanousd_per_month,
                    ),
                    strict=True,
                )
            )
            for limit, cap in caps.items():
                used, held = state.used_and_held(limit)
                if cap is not None and max(0, used) + held + wants[limit] > cap:
                    full.add((scope.kind, limit))
        return full


async def look(owner: ModelOwner) -> None:
    """Look at the epoch, as every second; what fails is tried again."""
    with suppress(*STORES_AWAY):
        await owner.restorer.look_once()


async def keep_looking(owner: ModelOwner) -> None:
    """Look a few times: somebody may begin an epoch just after the first."""
    for _ in range(4):
        await look(owner)
        await asyncio.sleep(0.005)


async def present(redis: Redis) -> Epoch | None:
    """Return the epoch in Redis."""
    return read_epoch(await redis.hgetall(EPOCH_KEY))


async def dump_of(redis: Redis) -> dict[bytes, bytes]:
    """Return all that Redis has."""
    return {key: await redis.dump(key) async for key in redis.scan_iter()}


async def restore(redis: Redis, dump: dict[bytes, bytes]) -> None:
    """Give Redis what it had, in another server process."""
    await redis.flushall()
    for key, value in dump.items():
        await redis.restore(key, 0, value)
    if await redis.exists(EPOCH_KEY):
        await redis.hset(EPOCH_KEY, "run_id", "old")


def names(request: HoldRequest) -> list[str]:
    """Return the scopes as the script names them."""
    return ["team" if scope.kind == "team" else f"key:{scope.id}" for scope in request.scopes]


def run_house(redis_url: str, examples: int, steps: int) -> None:
    """Run the machine."""
    machine = type("HouseOnValkey", (House,), {"redis_url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes on a real server
        ),
    )


def test_the_counters_of_a_house_follow_their_rules(redis_url: str) -> None:
    """Through wipes, outages, deaths and rebuilds no cap is passed; whenever everybody is heard the sums are exact."""
    run_house(redis_url, examples=8, steps=50)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_counters_of_a_house_follow_their_rules_for_long(redis_url: str) -> None:
    """The same, thirty times as long."""
    run_house(redis_url, examples=160, steps=75)
