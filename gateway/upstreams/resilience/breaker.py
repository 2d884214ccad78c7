# One breaker's rules: when a target counts as broken, when it is tried again, and when it is trusted again.
# No I/O and no clock: time is an argument, in seconds of any clock that counts on. breakers.py shares what is decided.
#
#              enough of the latest requests failed
#     CLOSED ──────────────────────────────────────▶ OPEN ◀──┐
#        ▲                                             │     │ a probe fails
#        │  `probes` probes were answered     open_for │     │
#        └───────────────────────────────── HALF_OPEN ◀┴─────┘

from __future__ import annotations

import math
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from gateway.core.settings import BreakerPolicy
from gateway.upstreams.resilience.window import NO_TALLY, RECENT, Tallies, Tally, Window


class State(StrEnum):
    """Whether a target is asked."""

    CLOSED = "closed"  # as usual
    OPEN = "open"  # not at all
    HALF_OPEN = "half_open"  # by a few probes at a time


class Verdict(StrEnum):
    """What one attempt says of its target."""

    GOOD = "good"  # it answered, be it that the request is at fault
    BAD = "bad"  # it failed
    NOTHING = "nothing"  # it was not its doing: the client left, a limit, our deadline


class Condition(Struct, frozen=True, kw_only=True):
    """What all gateways agree on about one breaker. The higher generation wins."""

    generation: int = 0
    is_open: bool = False
    is_forced: bool = False  # by hand: stays until it is reset
    is_by_hand: bool = False  # forced or reset by a person: no process overrules that
    opened_at: float = 0.0
    retry_at: float = 0.0  # from when probes are let through
    reason: str = ""


class Breaker:
    """One target's breaker as this process knows it, with what the other gateways counted."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self.policy = policy
        self.condition = Condition()
        self.is_news = False  # whether the others have yet to hear of the condition
        self.transitions = 0  # made here
        self.window = Window(policy.window)
        self.others: Tallies = ()
        self.probes_out = 0
        self._probes_good = 0
        self._probes_bad = NO_TALLY
        self._no_probe_until = -math.inf

    def follow(self, policy: BreakerPolicy) -> None:
        """Go by another policy. With another window, what was counted is forgotten."""
        if policy.window != self.policy.window:
            self.window = Window(policy.window)
        self.policy = policy

    @property
    def generation(self) -> int:
        """Which condition this is; what was begun under another one tells nothing of this one."""
        return self.condition.generation

    def state(self, now: float) -> State:
        """Return the state at a moment."""
        condition = self.condition
        if not condition.is_open:
            return State.CLOSED
        return State.OPEN if condition.is_forced or now < condition.retry_at else State.HALF_OPEN

    def retry_in(self, now: float) -> float:
        """Return the seconds until the target may be tried again: 0 when it may now, infinite when a person decides."""
        condition = self.condition
        if not condition.is_open:
            return 0.0
        return math.inf if condition.is_forced else max(0.0, condition.retry_at - now)

    def may_probe(self, now: float) -> bool:
        """Whether a probe may begin here: the target is half open and, for all we know, there is room for one."""
        return (
            self.state(now) is State.HALF_OPEN and self.probes_out < self.policy.probes and now >= self._no_probe_until
        )

    def turns_away(self, now: float) -> bool:
        """Whether no call may go to the target now, not even as a probe."""
        return self.condition.is_open and not self.may_probe(now)

    def begin_probe(self) -> None:
        """Count a probe that begins."""
        self.probes_out += 1

    def refuse_probes(self, until: float) -> None:
        """Begin no probe before ``until``: the other gateways have them all."""
        self._no_probe_until = until

    def count_good(self, generation: int, now: float) -> None:
        """Count an answer to what was asked under ``generation``."""
        if generation == self.condition.generation:
            self.window.add_good(now)

    def take_good_back(self, generation: int, then: float) -> None:
        """Count no more an answer that was counted ``then``."""
        if generation == self.condition.generation:
            self.window.take_good_back(then)

    def count_bad(self, generation: int, now: float, team: str, is_small: bool) -> None:
        """Count a failure, and open when that makes enough of them."""
        if generation == self.condition.generation:
            self.window.add_bad(now, team, is_small)
            self.judge(now)

    def end_probe(self, generation: int, verdict: Verdict, now: float, team: str = "", is_small: bool = True) -> None:
        """Judge by a probe's end."""
        self.probes_out = max(0, self.probes_out - 1)
        if generation != self.condition.generation or not self.condition.is_open or self.condition.is_forced:
            return
        if verdict is Verdict.GOOD:
            self._probes_good += 1
            self.learn_good_probes(generation, self._probes_good)
        elif verdict is Verdict.BAD:
            self._probes_bad += Tally(1, 1) if is_small else Tally(1, 0, {team: 1})
            if self._probes_bad.weighed()[1]:
                self._open(now, "a probe failed")

    def learn_good_probes(self, generation: int, answered: int) -> None:
        """Close when enough probes were answered, of all gateways."""
        is_current = generation == self.condition.generation and self.condition.is_open and not self.condition.is_forced
        if is_current and answered >= self.policy.probes:
            self._close("probes were answered")

    def judge(self, now: float) -> None:
        """Open when enough failed lately, here and elsewhere."""
        if self.condition.is_open:
            return
        policy = self.policy
        tallies = self.tallies(now)
        for span, tally in zip((*RECENT, policy.window), tallies, strict=True):
            requests, failures = tally.weighed()
            # A short span must be worse than a whole window to tell an outage from bad luck.
            ratio = policy.failure_ratio if tally is tallies[-1] else (1 + policy.failure_ratio) / 2
            if failures and requests >= policy.min_requests and failures >= ratio * requests:
                self._open(now, f"{tally.failures} of {tally.requests} requests failed within {span:g} s")
                return

    def tallies(self, now: float) -> Tallies:
        """Return what was counted here and elsewhere."""
        own = self.window.tallies(now)
        return tuple(map(Tally.__add__, own, self.others)) if self.others else own

    def force_open(self, now: float, reason: str) -> None:
        """Open by hand, until it is reset."""
        self._move(replace(self.condition, is_open=True, is_forced=True, is_by_hand=True, opened_at=now, reason=reason))

    def let_probes_through(self, now: float) -> None:
        """Be half open from now on, where it is open by what was counted."""
        if self.state(now) is State.OPEN and not self.condition.is_forced:
            self._agree_on(replace(self.condition, retry_at=now))

    def reset(self, reason: str) -> None:
        """Close by hand and forget what was counted."""
        self._close(reason, is_by_hand=True)

    def adopt(self, condition: Condition) -> bool:
        """Take over what the gateways agree on; return whether that is something new."""
        known = self.condition
        same = condition.is_open == known.is_open and condition.is_forced == known.is_forced
        if condition.generation == known.generation and same:
            return False
        if condition.generation < known.generation and not (condition.is_forced and not known.is_by_hand):
            self.is_news = True  # they have lost it
            return False
        self.is_news = False
        self.condition = condition
        self._begin_anew()
        return True

    def check(self) -> None:
        """Assert what always holds; tests call it after every move."""
        assert self.probes_out >= 0 and self._probes_good >= 0
        assert not self.condition.is_forced or self.condition.is_open
        self.window.check()

    def _open(self, now: float, reason: str) -> None:
        opened = Condition(is_open=True, opened_at=now, retry_at=now + self.policy.open_for, reason=reason)
        self._move(replace(opened, generation=self.condition.generation))

    def _close(self, reason: str, *, is_by_hand: bool = False) -> None:
        self._move(Condition(generation=self.condition.generation, reason=reason, is_by_hand=is_by_hand))

    def _move(self, condition: Condition) -> None:
        self.transitions += 1
        self._agree_on(condition)

    def _agree_on(self, condition: Condition) -> None:
        self.condition = replace(condition, generation=condition.generation + 1)
        self.is_news = True
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.window.clear()
        self.others = ()
        self._probes_good, self._probes_bad = 0, NO_TALLY
        self._no_probe_until = -math.inf
