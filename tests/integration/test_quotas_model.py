# Quotas against a plain model of their rules: after any sequence of calls the books are the model's, to the unit.

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec.structs import replace
from redis.asyncio import Redis

from billing.holds import Hold, HoldRequest, Leg, LimitName, Limits, RefusedHold, Scope, Settlement
from billing.ids import day_of
from billing.quota_verbs import LEASE, month_of
from billing.quotas import Quotas
from protocol.usage import Usage
from tests.support.clock import SetClock

TEAM = "team_a"
LIMITS = {
    "team": Limits(
        requests_per_minute=12,
        tokens_per_minute=900,
        concurrent_requests=6,
        tokens_per_day=3000,
        nanousd_per_day=30_000,
        nanousd_per_month=45_000,
    ),
    "key:a": Limits(requests_per_minute=8, concurrent_requests=4, nanousd_per_day=16_000),
    "key:b": Limits(tokens_per_minute=500, tokens_per_day=1500),
}


PER_MINUTE = {LimitName.REQUESTS_PER_MINUTE, LimitName.TOKENS_PER_MINUTE}


@dataclass
class Account:
    """What the model knows of one scope."""

    window: dict[str, tuple[int, int]] = field(default_factory=dict)  # request id -> second, tokens
    tokens: Counter[int] = field(default_factory=Counter)  # settled, by day
    cost: Counter[int] = field(default_factory=Counter)
    month_cost: Counter[int] = field(default_factory=Counter)
    late: int = 0  # nano-dollars booked for calls whose hold had been freed: the cap could not know of them


class Books(RuleBasedStateMachine):
    """Opens, settles, releases, renewals, paused owners, sweeps and passing time, in any order."""

    redis_url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock = SetClock()
        self.redis: Redis = Redis.from_url(self.redis_url)
        self.quotas = Quotas(self.redis, self.clock, uses_server_time=False, deadline=5.0)
        self.accounts = {name: Account() for name in LIMITS}
        self.live: dict[str, tuple[Hold, float]] = {}  # what Redis holds, and until when
        self.known: list[Hold] = []  # every hold ever opened; owners may say anything about them at any time
        self.graves: dict[str, str] = {}
        self.runner.run(self.redis.flushall())

    def teardown(self) -> None:
        """Close what was opened."""
        self.runner.run(self.redis.aclose())
        self.runner.close()

    @rule(key=st.sampled_from("ab"), tokens=st.integers(0, 520), cost=st.integers(0, 9000))
    def open(self, key: str, tokens: int, cost: int) -> None:
        """A hold is given exactly when every limit of every scope has room for it; else the refusal tells what fits."""
        scopes = (Scope("team", TEAM, LIMITS["team"]), Scope("key", key, LIMITS[f"key:{key}"]))
        request = HoldRequest(
            request_id=self.clock.new_id(),
            team_id=TEAM,
            scopes=scopes,
            legs=(Leg("a", tokens, cost),),
            valid_until=self.clock.now() + 5,
        )
        full = self.full_limits(request)

        answer = self.runner.run(self.quotas.open(request))

        if full:
            assert isinstance(answer, RefusedHold), f"{full} had no room"
            assert (answer.scope.kind, answer.limit) in full
            left = answer.headroom
            fits = Leg("a", tokens if left.tokens is None else min(tokens, left.tokens), min(cost, left.nanousd or 0))
            request = replace(request, request_id=self.clock.new_id(), legs=(fits,))
            if self.full_limits(request):  # there are limits that no smaller request is within
                return
            answer = self.runner.run(self.quotas.open(request))
        assert isinstance(answer, Hold), f"refused although there was room: {answer}"
        self.known.append(answer)
        self.live[request.request_id] = (answer, self.clock.now() + LEASE)
        for name in names(request):
            self.accounts[name].window[request.request_id] = (int(self.clock.now()), request.tokens)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10**6), share=st.floats(0, 1))
    def settle(self, pick: int, share: float) -> None:
        """Booked once, whether the hold is there, was freed, or is settled already."""
        hold = self.known[pick % len(self.known)]
        request = hold.request
        tokens, cost = int(request.tokens * share), int(request.cost_nanousd * share)

        self.runner.run(self.quotas.settle(hold, Settlement(Usage(tokens), cost)))

        if self.graves.get(request.request_id) == "settled":
            return
        was_live = self.live.pop(request.request_id, None) is not None
        day = day_of(request.request_id)
        for name in names(request):
            account = self.accounts[name]
            if was_live and request.request_id in account.window:
                account.window[request.request_id] = (account.window[request.request_id][0], tokens)
            account.tokens[day] += tokens
            account.cost[day] += cost
            account.month_cost[month_of(day)] += cost
            account.late += 0 if was_live else cost
        self.graves[request.request_id] = "settled"

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10**6))
    def release(self, pick: int) -> None:
        """Gives everything back, unless it was settled."""
        hold = self.known[pick % len(self.known)]

        self.runner.run(self.quotas.release(hold))

        request_id = hold.request.request_id
        if self.graves.get(request_id) != "settled":
            self.graves[request_id] = "freed"
        if self.live.pop(request_id, None):
            for name in names(hold.request):
                self.accounts[name].window.pop(request_id, None)

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 10**6))
    def renew(self, pick: int) -> None:
        """A living hold lives on; a reaped one takes its room again; one that is over does not return."""
        hold = self.known[pick % len(self.known)]
        request_id = hold.request.request_id
        is_reaped = self.graves.get(request_id) == "reaped"
        has_room = not {limit for _, limit in self.full_limits(hold.request)} - PER_MINUTE

        is_alive = self.runner.run(self.quotas.renew(hold, Settlement(Usage(1), 1)))

        assert is_alive == (request_id in self.live or (is_reaped and has_room))
        if is_alive:
            self.live[request_id] = (hold, self.clock.now() + LEASE)
            self.graves.pop(request_id, None)

    @rule()
    def sweep(self) -> None:
        """Frees the holds whose lease has ended, and no others."""
        expired = {request_id for request_id, (_, until) in self.live.items() if until <= round(self.clock.now(), 3)}

        assert set(self.runner.run(self.quotas.sweep(TEAM))[0]) == expired

        for request_id in expired:
            del self.live[request_id]
            self.graves[request_id] = "reaped"

    @rule(seconds=st.floats(0, 70) | st.sampled_from([0.5, 1.0, 1.0, 29.0, 30.0, 59.0, 59.0, 60.0, 28_800.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; windows and days move on."""
        self.clock.move(round(seconds, 2))
        for account in self.accounts.values():
            account.window = {
                key: entry for key, entry in account.window.items() if entry[0] > int(self.clock.now()) - 60
            }

    @invariant()
    def books_agree(self) -> None:
        """Redis counts what the model counts, and no cap is passed."""
        day = int(self.clock.now() // 86_400)
        for name, account in self.accounts.items():
            state = self.runner.run(self.quotas.usage(TEAM, key_id=name[4:] or None))
            held = [hold.request for hold, _ in self.live.values() if name in names(hold.request)]
            today = [request for request in held if day_of(request.request_id) == day]
            month = [request for request in held if month_of(day_of(request.request_id)) == month_of(day)]
            cost, month_cost = sum(r.cost_nanousd for r in today), sum(r.cost_nanousd for r in month)

            if LIMITS[name].requests_per_minute or LIMITS[name].tokens_per_minute:
                assert state.requests_per_minute == len(account.window)
                assert state.tokens_per_minute == sum(tokens for _, tokens in account.window.values())
                running = [tokens for which, (_, tokens) in account.window.items() if which in self.live]
                assert state.minute_tokens_held == sum(running)
            assert state.live == len(held)
            assert (state.day_tokens, state.day_tokens_held) == (account.tokens[day], sum(r.tokens for r in today))
            assert (state.day_nanousd, state.day_nanousd_held) == (account.cost[day], cost)
            assert state.month_nanousd == account.month_cost[month_of(day)]
            assert state.month_nanousd_held == month_cost
            cap = LIMITS[name].nanousd_per_day
            assert cap is None or state.day_nanousd + state.day_nanousd_held - account.late <= cap

    def full_limits(self, request: HoldRequest) -> set[tuple[str, LimitName]]:
        """Return every limit that has no room for the request."""
        day = day_of(request.request_id)
        full = set()
        for scope, name in zip(request.scopes, names(request), strict=True):
            account, limits = self.accounts[name], scope.limits
            held = [hold.request for hold, _ in self.live.values() if name in names(hold.request)]
            today = [each for each in held if day_of(each.request_id) == day]
            month = [each for each in held if month_of(day_of(each.request_id)) == month_of(day)]
            after = {
                LimitName.REQUESTS_PER_MINUTE: (limits.requests_per_minute, len(account.window) + 1),
                LimitName.TOKENS_PER_MINUTE: (
                    limits.tokens_per_minute,
                    sum(tokens for _, tokens in account.window.values()) + request.tokens,
                ),
                LimitName.CONCURRENT_REQUESTS: (limits.concurrent_requests, len(held) + 1),
                LimitName.TOKENS_PER_DAY: (
                    limits.tokens_per_day,
                    account.tokens[day] + sum(each.tokens for each in today) + request.tokens,
                ),
                LimitName.USD_PER_DAY: (
                    limits.nanousd_per_day,
                    account.cost[day] + sum(each.cost_nanousd for each in today) + request.cost_nanousd,
                ),
                LimitName.USD_PER_MONTH: (
                    limits.nanousd_per_month,
                    account.month_cost[month_of(day)] + sum(each.cost_nanousd for each in month) + request.cost_nanousd,
                ),
            }
            full |= {(scope.kind, limit) for limit, (cap, total) in after.items() if cap is not None and total > cap}
        return full


def names(request: HoldRequest) -> list[str]:
    """Return the scopes as the script names them."""
    return ["team" if scope.kind == "team" else f"key:{scope.id}" for scope in request.scopes]


def test_quotas_follow_their_rules(redis_url: str) -> None:
    """Settled and held never pass a cap, and nobody is refused while every limit has room."""
    machine = type("BooksOnValkey", (Books,), {"redis_url": redis_url})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes on a real server
        ),
    )
