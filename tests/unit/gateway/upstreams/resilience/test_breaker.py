# One breaker's rules, without a clock: when it opens, whom it lets through, when it closes.

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.settings import BreakerPolicy
from gateway.upstreams.resilience.breaker import Breaker, Condition, State, Verdict
from gateway.upstreams.resilience.window import Tally, Window

POLICY = BreakerPolicy(window=30.0, min_requests=10, failure_ratio=0.5, open_for=15.0, probes=2)


def fail(breaker: Breaker, now: float, times: int = 1, team: str = "a", *, small: bool = True) -> None:
    for _ in range(times):
        breaker.count_bad(breaker.generation, now, team, small)


def succeed(breaker: Breaker, now: float, times: int = 1) -> None:
    for _ in range(times):
        breaker.count_good(breaker.generation, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(POLICY)
    fail(breaker, now, POLICY.min_requests)
    assert breaker.state(now) is State.OPEN
    return breaker


def test_it_opens_at_the_last_failure_that_makes_enough() -> None:
    """Fewer than min_requests open nothing; the one that fills the number does."""
    breaker = Breaker(POLICY)
    fail(breaker, 0.0, POLICY.min_requests - 1)
    before = breaker.state(0.0)
    fail(breaker, 0.0)

    assert (before, breaker.state(0.0)) == (State.CLOSED, State.OPEN)
    assert "10 of 10" in breaker.condition.reason


@pytest.mark.parametrize(("good", "state"), [(11, State.CLOSED), (10, State.OPEN)])
def test_the_ratio_is_over_the_window(good: int, state: State) -> None:
    """At exactly the ratio it opens, a hair below it does not; failures spread over the window count alike."""
    breaker = Breaker(POLICY)
    for second in range(good):
        succeed(breaker, second * 1.0)
    for second in range(10):
        fail(breaker, 12.0 + second * 1.5)

    assert breaker.state(28.0) is state


@pytest.mark.parametrize(("lasted", "least"), [(0.0, 5), (3.0, 5), (100.0, 10)])
def test_answers_that_break_count_as_failures_and_nothing_else(lasted: float, least: int) -> None:
    """Ten began and were counted as good: half of them open it when they break, or all ten much later."""
    breaker = Breaker(POLICY)
    for call in range(10):
        succeed(breaker, call * 0.01)
    broken, now = 0, lasted + 0.1
    while breaker.state(now) is State.CLOSED:
        breaker.take_good_back(breaker.generation, broken * 0.01)
        fail(breaker, now)
        broken += 1

    assert broken == least
    assert f"{least} of 10" in breaker.condition.reason


def test_an_outage_shows_within_a_second_of_a_busy_target() -> None:
    """Half a minute of health does not keep a target that has begun to fail every call."""
    breaker = Breaker(POLICY)
    for step in range(3000):
        succeed(breaker, step / 100)
    now = 30.0
    while breaker.state(now) is State.CLOSED:
        now += 0.01
        fail(breaker, now)

    assert now - 30.0 <= 1.0


def test_a_short_span_opens_only_for_an_outage() -> None:
    """Half of one second's calls may fail by chance while the window is well."""
    breaker = Breaker(POLICY)
    for second in range(25):
        succeed(breaker, second, 4)
    for step in range(6):
        fail(breaker, 25.0 + step / 100)
        succeed(breaker, 25.0 + step / 100)

    assert breaker.state(25.1) is State.CLOSED


@pytest.mark.parametrize(("every", "state"), [(3.4, State.CLOSED), (3.0, State.OPEN)])
def test_failures_at_the_windows_border_are_forgotten(every: float, state: State) -> None:
    """A target that fails slowly for ever is judged by its last window alone: nine failures fit it, ten open."""
    breaker = Breaker(POLICY)
    for step in range(1000):
        fail(breaker, step * every)
        if breaker.condition.is_open:
            break

    assert breaker.state(step * every) is state
    assert breaker.tallies(step * every + 30.1)[-1] == Tally()


def test_one_teams_large_prompts_never_open() -> None:
    """Whatever one team's giant prompts meet, the target stays open to the others."""
    breaker = Breaker(POLICY)
    for step in range(500):
        fail(breaker, step / 50, team="giant", small=False)
        succeed(breaker, step / 50) if step % 20 == 0 else None

    assert breaker.state(10.0) is State.CLOSED


def test_large_prompts_of_two_teams_open() -> None:
    """When two teams see it fail, it is the target."""
    breaker = Breaker(POLICY)
    for step in range(5):
        fail(breaker, step / 10, team="one", small=False)
        fail(breaker, step / 10, team="two", small=False)

    assert breaker.state(0.5) is State.OPEN


def test_one_teams_small_prompts_open() -> None:
    """A failure at the reference size speaks for every team's calls."""
    breaker = opened()

    assert breaker.state(0.0) is State.OPEN


def test_probes_are_bounded_and_enough_of_them_close() -> None:
    """Half open lets `probes` through at a time; that many answers close it, and nothing is held against it."""
    breaker = opened()
    generation = breaker.generation
    during = breaker.may_probe(14.9)
    assert breaker.state(15.0) is State.HALF_OPEN
    allowed = [breaker.may_probe(15.0)]
    breaker.begin_probe()
    allowed.append(breaker.may_probe(15.0))
    breaker.begin_probe()
    allowed.append(breaker.may_probe(15.0))
    breaker.end_probe(generation, Verdict.GOOD, 16.0)
    half = breaker.state(16.0)
    breaker.end_probe(generation, Verdict.GOOD, 16.0)

    assert (during, allowed) == (False, [True, True, False])
    assert (half, breaker.state(16.0)) == (State.HALF_OPEN, State.CLOSED)
    assert breaker.tallies(16.0)[-1].failures == 0


def test_a_failing_probe_opens_for_as_long_again() -> None:
    """The target is left alone for open_for, counted from the probe's failure."""
    breaker = opened()
    breaker.begin_probe()
    breaker.end_probe(breaker.generation, Verdict.BAD, 17.0)

    assert (breaker.state(31.9), breaker.state(32.0)) == (State.OPEN, State.HALF_OPEN)


def test_another_process_at_the_address_is_probed_at_once() -> None:
    """What failed before says nothing of it; but what a person opened stays open."""
    breaker, forced = opened(), opened()
    forced.force_open(1.0, "by hand")
    before = breaker.generation
    for each in (breaker, forced):
        each.let_probes_through(2.0)

    assert (breaker.state(2.0), forced.state(2.0)) == (State.HALF_OPEN, State.OPEN)
    assert breaker.generation > before and breaker.is_news  # the other gateways hear of it
    assert breaker.transitions == 1  # it is no other trouble


def test_a_probe_that_says_nothing_changes_nothing() -> None:
    """A client that leaves, or one team's giant prompt, neither closes nor opens; the place is free again."""
    breaker = opened()
    for verdict in (Verdict.NOTHING, Verdict.BAD):
        breaker.begin_probe()
        breaker.end_probe(breaker.generation, verdict, 16.0, "giant", is_small=False)

    assert breaker.state(16.0) is State.HALF_OPEN
    assert breaker.may_probe(16.0)


def test_what_began_before_a_move_does_not_count_after_it() -> None:
    """Slow failures of a past outage come in when the breaker has closed again: they are of another generation."""
    breaker = opened()
    before = breaker.generation - 1
    for _ in range(2):
        breaker.begin_probe()
        breaker.end_probe(breaker.generation, Verdict.GOOD, 16.0)
    for _ in range(50):
        breaker.count_bad(before, 17.0, "a", True)

    assert breaker.state(17.0) is State.CLOSED


def test_forced_open_stays_until_it_is_reset() -> None:
    """No time passes that lets a probe through, and no probe that was out closes it."""
    breaker = opened()
    generation = breaker.generation
    breaker.begin_probe()
    breaker.force_open(20.0, "by hand")
    breaker.end_probe(generation, Verdict.GOOD, 21.0)
    breaker.learn_good_probes(generation, 5)
    later = breaker.state(1e9), breaker.may_probe(1e9), breaker.retry_in(1e9)
    breaker.reset("mended")

    assert later == (State.OPEN, False, math.inf)
    assert breaker.state(1e9) is State.CLOSED


def test_the_newer_condition_wins_and_what_is_forced_beats_what_is_not() -> None:
    """Gateways that were apart agree again; a process's own moves never overrule a person's."""
    breaker = opened()
    assert not breaker.adopt(Condition(generation=0))
    assert breaker.is_news  # the others are told
    took = breaker.adopt(Condition(generation=7, reason="reset", is_by_hand=True))
    fail(breaker, 1.0, 10)
    forced = breaker.adopt(Condition(generation=5, is_open=True, is_forced=True, is_by_hand=True))

    assert took and forced
    assert breaker.retry_in(1e9) == math.inf


def test_other_gateways_counts_join_in() -> None:
    """What each of two gateways sees is too little; together it is enough."""
    breaker = Breaker(POLICY)
    fail(breaker, 0.0, 5)
    breaker.others = (Tally(5, 5), Tally(5, 5), Tally(5, 5))
    breaker.judge(0.0)

    assert breaker.state(0.0) is State.OPEN


tallies = st.builds(
    Tally,
    requests=st.just(1000),
    small=st.integers(0, 50),
    large=st.dictionaries(st.sampled_from("abc"), st.integers(1, 50)),
)


@given(tallies)
def test_a_team_alone_weighs_nothing_and_the_rest_weigh_in_full(tally: Tally) -> None:
    """No failure counts twice; without the team with most large failures the rest counts in full."""
    requests, failures = tally.weighed()
    dominant = max(tally.large.values(), default=0)
    rest = tally.failures - dominant

    assert failures == min(tally.failures, 2 * rest) if dominant > rest else failures == tally.failures
    assert tally.requests - requests == tally.failures - failures >= 0
    assert failures > 0 or tally.small == 0


@given(st.lists(st.tuples(st.floats(-5, 20), st.booleans()), max_size=200))
def test_a_window_holds_what_a_plain_list_holds(moves: list[tuple[float, bool]]) -> None:
    """Time may stand still, leap, or go back: nothing inside is lost, nothing is kept a bucket too long."""
    window, plain, now = Window(30.0), [], 100.0
    for step, is_good in moves:
        now += step
        window.add_good(now) if is_good else window.add_bad(now, "a", True)
        plain.append((now, is_good))
        window.check()
    latest = max((at for at, _ in plain), default=now)
    counted = window.tallies(latest)[-1]

    assert counted.requests <= len(plain)
    assert counted.failures <= sum(not good for _, good in plain)
    if all(step >= 0 for step, _ in moves):
        assert sum(at > latest - 29.75 for at, _ in plain) <= counted.requests
        assert counted.requests <= sum(at > latest - 30.25 for at, _ in plain)
    assert window.tallies(latest + 61)[-1] == Tally()


class BreakerRules(RuleBasedStateMachine):
    """Any sequence of calls, hands and hours: the rules hold after every move."""

    @initialize(probes=st.integers(1, 3), least=st.integers(1, 6), ratio=st.sampled_from([0.2, 0.5, 1.0]))
    def begin(self, probes: int, least: int, ratio: float) -> None:
        """Begin with any policy."""
        self.policy = BreakerPolicy(window=10.0, min_requests=least, failure_ratio=ratio, open_for=5.0, probes=probes)
        self.breaker = Breaker(self.policy)
        self.now = 0.0
        self.out: list[int] = []

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.9, 5.0, 30.0, -2.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass; now and then it goes back a little."""
        self.now += seconds

    @rule(good=st.booleans(), small=st.booleans(), team=st.sampled_from("ab"), late=st.booleans())
    def call(self, good: bool, small: bool, team: str, late: bool) -> None:
        """A call ends that began just now, or one generation ago."""
        before, generation = self.breaker.condition, self.breaker.generation - late
        if good:
            self.breaker.count_good(generation, self.now)
        elif before.is_open is False:
            self.breaker.count_bad(generation, self.now, team, small)
        if late or good:
            assert self.breaker.condition is before

    @rule(
        ago=st.sampled_from([0.0, 0.3, 4.0, 60.0]), small=st.booleans(), team=st.sampled_from("ab"), late=st.booleans()
    )
    def break_off(self, ago: float, small: bool, team: str, late: bool) -> None:
        """An answer that began a while ago breaks."""
        before, generation = self.breaker.condition, self.breaker.generation - late
        self.breaker.take_good_back(generation, self.now - ago)
        if before.is_open is False:
            self.breaker.count_bad(generation, self.now, team, small)
        if late:
            assert self.breaker.condition is before

    @precondition(lambda self: self.breaker.may_probe(self.now))
    @rule()
    def probe(self) -> None:
        """A probe begins, where one may."""
        assert self.breaker.state(self.now) is State.HALF_OPEN
        self.breaker.begin_probe()
        self.out.append(self.breaker.generation)

    @precondition(lambda self: self.out)
    @rule(verdict=st.sampled_from(Verdict), small=st.booleans(), team=st.sampled_from("ab"))
    def end_probe(self, verdict: Verdict, small: bool, team: str) -> None:
        """A probe ends, perhaps one from long ago."""
        generation, before = self.out.pop(0), self.breaker.condition
        self.breaker.end_probe(generation, verdict, self.now, team, small)
        if generation != before.generation or before.is_forced or verdict is Verdict.NOTHING:
            assert self.breaker.condition is before
        if self.breaker.condition is not before:
            assert self.breaker.condition.is_open == (verdict is Verdict.BAD)

    @rule()
    def force_open(self) -> None:
        """A person opens it."""
        self.breaker.force_open(self.now, "by hand")

    @rule()
    def reset(self) -> None:
        """A person resets it."""
        self.breaker.reset("by hand")
        assert self.breaker.state(self.now) is State.CLOSED

    @invariant()
    def books_are_right(self) -> None:
        """The breaker's own check, and the bound on probes."""
        if not hasattr(self, "breaker"):
            return
        self.breaker.check()
        assert self.breaker.probes_out <= self.policy.probes
        if self.breaker.condition.is_forced:
            assert self.breaker.state(self.now) is State.OPEN


TestBreakerRules = BreakerRules.TestCase
