# Rates against a plain list of calls: with Redis up no sixty seconds ever hold more than a cap, in any number of
# processes, and no call is refused for longer than a quarter of a second while the list has room for it.

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from billing.core.holds import HoldRequest, Leg, Limits, RefusedHold, Scope
from billing.quotas.rates import RENEW, TELL, RateLimits
from tests.support.clock import SetClock

TEAM = "team_a"
LIMITS = {
    "team": Limits(requests_per_minute=60, tokens_per_minute=5000, concurrent_requests=16),
    "a": Limits(requests_per_minute=40, concurrent_requests=9),
    "b": Limits(tokens_per_minute=2500),
    "c": Limits(requests_per_minute=3),
}
MINUTE = 60.0
BUCKET = 0.25  # a call may count so much longer than a minute


@dataclass
class Call:
    """A call that was admitted."""

    request: HoldRequest
    owner: RateLimits
    at: float
    tokens: int
    is_running: bool = True
    never_ran: bool = False


class Minutes(RuleBasedStateMachine):
    """Calls one by one and in crowds, settlements, releases, dead processes and passing time, in any order."""

    redis_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = SetClock()
        self.redis: Redis = Redis.from_url(self.redis_url)
        self.runner.run(self.redis.flushall())
        self.started = 0
        self.owners = [self.new_owner() for _ in range(3)]
        self.calls: list[Call] = []
        self.died_at = -MINUTE  # what a dead process had drawn is free when its minute is over

    def new_owner(self) -> RateLimits:
        """Start a process."""
        self.started += 1
        rates = RateLimits(self.redis, self.clock, owner=f"o{self.started}", uses_server_time=False, deadline=10.0)
        rates.owners = 3
        return rates

    def teardown(self) -> None:
        """Close what was opened."""
        for owner in self.owners:
            self.runner.run(owner.close())
        self.runner.run(self.redis.aclose())
        self.runner.close()

    @rule(who=st.integers(0, 2), key=st.sampled_from("abc"), tokens=st.integers(0, 600), many=st.integers(1, 25))
    def call(self, who: int, key: str, tokens: int, many: int) -> None:
        """So many calls at once in one process, each of which is admitted, or refused for a reason."""
        outcomes = self.runner.run(self.ask_all(self.owners[who], key, tokens, many))
        if any(outcome is not None for outcome in outcomes):
            self.check_refusal(self.owners[who], key, tokens)

    @rule(
        who=st.integers(0, 2),
        key=st.sampled_from("abc"),
        tokens=st.integers(0, 50),
        many=st.integers(2, 40),
        ends=st.booleans(),
    )
    def stream(self, who: int, key: str, tokens: int, many: int, ends: bool) -> None:
        """Calls one after the other, a hundredth of a second apart: the kind that slices are for."""
        for _ in range(many):
            self.clock.move(0.01)
            [outcome] = self.runner.run(self.ask_all(self.owners[who], key, tokens, 1))
            if ends and outcome is None:
                self.end([len(self.calls) - 1], 1.0, True)

    @precondition(lambda self: self.clock.time - self.died_at > MINUTE + 2 * BUCKET)
    @rule(who=st.integers(0, 2), key=st.sampled_from("ab"))
    def fill(self, who: int, key: str) -> None:
        """A quarter of a second after anything, one process gets all the room that there is: no slice idles longer."""
        self.clock.move(TELL)
        self.tell()
        room = sum(self.fits(key, more, 0, MINUTE + BUCKET) for more in range(1, 61))
        tokens = 0
        while room and self.fits(key, 1, tokens + 100, MINUTE + BUCKET):
            tokens += 100
        outcomes = self.runner.run(self.ask_all(self.owners[who], key, tokens, 1)) if room else []
        outcomes += self.runner.run(self.ask_all(self.owners[who], key, 0, room - 1)) if room > 1 else []
        assert all(outcome is None for outcome in outcomes), f"refused although there was room: {outcomes}"

    @precondition(lambda self: self.calls)
    @rule(picks=st.lists(st.integers(0, 10**6), max_size=8), share=st.floats(0, 1.2), ran=st.booleans())
    def end(self, picks: list[int], share: float, ran: bool) -> None:
        """Calls end, or never ran. What is said of one twice counts once."""
        for pick in picks:
            call = self.calls[pick % len(self.calls)]
            used = int(call.request.tokens * share)
            call.owner.settle(call.request, used) if ran else call.owner.release(call.request)
            if call.is_running:
                call.is_running = False
                call.tokens, call.never_ran = (used, False) if ran else (0, True)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.2, 0.21, 0.249, 0.3, 1.0, 5.0, 29.0, 59.7, 60.0, 60.3, 130.0]))
    def move(self, seconds: float) -> None:
        """Time passes; what is due is told at its end, or seconds late: a process may be busy."""
        while seconds > RENEW:
            self.clock.move(RENEW)
            self.tell()
            seconds -= RENEW
        self.clock.move(seconds)
        self.tell()

    @precondition(lambda self: self.calls)
    @rule(pick=st.integers(0, 10**6), edge=st.sampled_from([-0.3, -0.05, 0.01, 0.2, 0.26]))
    def leave(self, pick: int, edge: float) -> None:
        """The minute of a call is about to end, or has just ended, and another like it comes."""
        recent = [call for call in self.calls if call.at + MINUTE + edge > self.clock.time]
        if recent:
            like = recent[pick % len(recent)]
            self.move(like.at + MINUTE + edge - self.clock.time)
            self.call(pick % 3, like.request.scopes[1].id, like.request.tokens, 1)

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        """A process dies with its calls, and tells nothing; another takes its place."""
        dead = self.owners[who]
        dead.is_away = True  # so that closing tells nothing
        self.runner.run(dead.close())
        self.owners[who] = self.new_owner()
        for call in self.calls:
            if call.owner is dead:
                call.is_running = False
        self.died_at = self.clock.time

    def tell(self) -> None:
        """Let all processes tell what is due."""
        for owner in self.owners:
            self.runner.run(owner.tell())

    async def ask_all(self, owner: RateLimits, key: str, tokens: int, many: int) -> list[RefusedHold | None]:
        """Ask for so many calls at once, and check that none passes a cap."""
        scopes = (Scope("team", TEAM, LIMITS["team"]), Scope("key", key, LIMITS[key]))

        async def ask() -> RefusedHold | None:
            request = HoldRequest(
                request_id=self.clock.new_id(),
                team_id=TEAM,
                scopes=scopes,
                legs=(Leg("x", tokens, 0),),
            )
            if not owner.take(request) and (refused := await owner.ask(request)) is not None:
                return refused
            self.calls.append(Call(request, owner, self.clock.time, tokens))
            return None

        outcomes = await asyncio.gather(*(ask() for _ in range(many)))
        assert not owner.is_away
        if None in outcomes:
            assert self.fits(key, 0, 0, MINUTE), f"a cap of {key} or its team is passed"
        return outcomes

    def check_refusal(self, owner: RateLimits, key: str, tokens: int) -> None:
        """A quarter of a second after a refusal a call is admitted if the list had room for it all the time."""
        had_room = self.fits(key, 1, tokens, MINUTE + BUCKET)
        self.clock.move(TELL)
        self.tell()
        if had_room and self.clock.time - self.died_at > MINUTE + 2 * BUCKET:
            [outcome] = self.runner.run(self.ask_all(owner, key, tokens, 1))
            assert outcome is None, f"refused although there was room: {outcome}"

    def fits(self, key: str, requests: int, tokens: int, minute: float) -> bool:
        """Whether all limits hold with so many requests and tokens more."""
        for name in ("team", key):
            counted = [call for call in self.calls if name == "team" or call.request.scopes[1].id == key]
            recent = [call for call in counted if call.at > self.clock.time - minute and not call.never_ran]
            limits = LIMITS[name]
            for cap, used in (
                (limits.requests_per_minute, len(recent) + requests),
                (limits.tokens_per_minute, sum(call.tokens for call in recent) + tokens),
                (limits.concurrent_requests, sum(call.is_running for call in counted) + requests),
            ):
                if cap is not None and used > cap:
                    return False
        return True


def test_rates_keep_their_rules(redis_url: str) -> None:
    """No order of events breaks a rule."""
    Minutes.redis_url = redis_url
    run_state_machine_as_test(
        Minutes,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
