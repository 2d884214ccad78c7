# What is counted of targets: whether they are asked, with which keys, how often again, and how full they are.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from gateway.overload.slots import SlotPool
from gateway.telemetry.meters import Levels, Meters, Rises
from gateway.upstreams.resilience.breaker import State
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.retry import RetryBudgets

STATES = (State.CLOSED, State.HALF_OPEN, State.OPEN)  # as tollgate_breaker_state counts them


class TargetMetrics:
    """Metrics of targets and their providers. They show nothing before ``follow``."""

    def __init__(self, meters: Meters) -> None:
        self._breaker_state = Levels(
            meters.gauge_of_worst(
                "tollgate_breaker_state",
                "Whether a target is asked: 0 closed, 1 half open, 2 open",
                *("provider", "endpoint", "model"),
            )
        )
        self._breaker_transitions = meters.counter(
            "tollgate_breaker_transitions_total",
            "Breakers that a gateway opened or closed",
            *("provider", "endpoint", "model", "state"),
        )
        self._keys_aside = Levels(
            meters.gauge_of_worst(
                "tollgate_keys_set_aside",
                "Keys of a provider that are not used because it refuses them, or their account is used up",
                *("provider", "reason"),
            )
        )
        self._retries = meters.counter(
            "tollgate_retries_total", "Attempts beyond a call's first, by the provider tried first", "provider"
        )
        self._retries_refused = meters.counter(
            "tollgate_retry_budget_refused_total", "Attempts that the retry budget did not allow", "provider"
        )
        self._queue_depth = Levels(
            meters.gauge_of_all(
                "tollgate_queue_depth",
                "Calls waiting for a slot of a target; one may wait for several",
                *("target", "tier"),
            )
        )
        self._slots = Levels(
            meters.gauge_of_all("tollgate_slots", "Slots of a target whose slots are counted", "target")
        )
        self._slots_held = Levels(meters.gauge_of_all("tollgate_slots_held", "Those that calls hold", "target"))
        self._rises = Rises()
        self._followed: tuple[Breakers, RetryBudgets, Callable[[], Iterable[SlotPool]]] | None = None

    def follow(self, breakers: Breakers, budgets: RetryBudgets, pools: Callable[[], Iterable[SlotPool]]) -> None:
        """Show from now on who is asked, how often calls tried again, and how many wait."""
        self._followed = breakers, budgets, pools

    def refresh(self) -> None:
        """Take over what they have counted by now. What the configuration has lost shows 0."""
        if self._followed is None:
            return
        breakers, budgets, pools = self._followed
        self._breaker_state.show((target, STATES.index(state)) for target, state in breakers.states())
        for moved, times in list(breakers.transitions.items()):
            self._rises.follow(self._breaker_transitions, times, *moved)
        self._keys_aside.show(breakers.count_refused_keys().items())
        for provider, budget in budgets.all().items():
            self._rises.follow(self._retries, budget.spent, provider)
            self._rises.follow(self._retries_refused, budget.refused, provider)
        counted = list(pools())
        self._slots.show(((pool.name,), math.inf if pool.limit is None else pool.limit) for pool in counted)
        self._slots_held.show(((pool.name,), len(pool.held)) for pool in counted)
        waiting = {}
        for pool in counted:
            waiting[pool.name, "interactive"] = len(pool.interactive.calls)
            waiting[pool.name, "batch"] = len(pool.batch.calls)
        self._queue_depth.show(waiting.items())
