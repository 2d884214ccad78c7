# What is counted of targets: whether they are asked, with which keys, how often again, and how full they are.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sized

from gateway.overload.slots import SlotPool
from gateway.telemetry.meters import ALL, WORST, Meters, Rises, counter, levels, make_rows
from gateway.upstreams.resilience.breaker import State
from gateway.upstreams.resilience.breakers import Breakers
from gateway.upstreams.resilience.retry_budget import RetryBudgets

STATES = (State.CLOSED, State.HALF_OPEN, State.OPEN)  # as tollgate_breaker_state counts them

NOTHING_TOLD: Mapping[str, Sized] = {}


class TargetMetrics:
    """Metrics of targets and their providers. They show nothing before ``follow``."""

    breaker_state = levels(
        "tollgate_breaker_state",
        "Whether a target is asked: 0 closed, 1 half open, 2 open",
        "provider endpoint model",
        of=WORST,
    )
    breaker_transitions = counter(
        "tollgate_breaker_transitions_total",
        "Breakers that a gateway opened or closed",
        "provider endpoint model state",
    )
    keys_aside = levels(
        "tollgate_keys_set_aside",
        "Keys of a provider that are not used because it refuses them, or their account is used up",
        "provider reason",
        of=WORST,
    )
    retries = counter(
        "tollgate_retries_total", "Attempts beyond a call's first, by the provider tried first", "provider"
    )
    retries_refused = counter(
        "tollgate_retry_budget_refused_total", "Attempts that the retry budget did not allow", "provider"
    )
    queue_depth = levels(
        "tollgate_queue_depth", "Calls waiting for a slot of a target; one may wait for several", "target tier", of=ALL
    )
    slots = levels("tollgate_slots", "Slots of a target whose slots are counted", "target", of=ALL)
    slots_held = levels("tollgate_slots_held", "Those that calls hold", "target", of=ALL)
    kv_marks = levels(
        "tollgate_kv_marks", "Beginnings of prompts that a replica has cached, as it tells", "endpoint", of=WORST
    )
    replica_lateness = levels(
        "tollgate_replica_lateness",
        "Times as late as its peers' that the first tokens of a replica come, which is sent less for it",
        "endpoint",
        of=WORST,
    )
    replicas = levels(
        "tollgate_fleet_replicas", "Replicas that announce themselves, by state or as refused", "pool state", of=WORST
    )
    fleet_target = levels("tollgate_fleet_target", "Replicas that a pool should have, by its scaling", "pool", of=WORST)

    rollout = levels(
        "tollgate_fleet_rollout",
        "What a pool's rollout is at: 1 of standing, replacing, rolled_back, stuck",
        "pool state",
        of=WORST,
    )
    rollout_share = levels(
        "tollgate_fleet_rollout_share", "Conversations that the new version of a pool answers, of 1", "pool", of=WORST
    )

    def __init__(self, meters: Meters) -> None:
        make_rows(self, meters)
        self._rises = Rises()
        self._followed: tuple[Breakers, RetryBudgets, Callable[[], Iterable[SlotPool]]] | None = None
        self._cached = NOTHING_TOLD
        self._slow: Callable[[], Mapping[str, float]] = dict
        self._count_replicas: Callable[[], Mapping[tuple[str, str], int]] = dict
        self._targets: Callable[[], Mapping[str, int]] = dict
        self._count_rollouts: Callable[[], Mapping[str, tuple[str, float]]] = dict

    def follow(
        self,
        breakers: Breakers,
        budgets: RetryBudgets,
        pools: Callable[[], Iterable[SlotPool]],
        cached: Mapping[str, Sized] = NOTHING_TOLD,
        slow: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Show from now on who is asked, how often calls tried again, how many wait, what is known to be cached at each
        address, and which are slow."""
        self._followed, self._cached, self._slow = (breakers, budgets, pools), cached, slow

    def follow_fleet(
        self,
        count: Callable[[], Mapping[tuple[str, str], int]],
        targets: Callable[[], Mapping[str, int]],
        rollouts: Callable[[], Mapping[str, tuple[str, float]]],
    ) -> None:
        """Show from now on how many replicas announce themselves, by pool and state, how many there should be, and what
        each pool's rollout is at, with the share of conversations that it has."""
        self._count_replicas, self._targets, self._count_rollouts = count, targets, rollouts

    def refresh(self) -> None:
        """Take over what they have counted by now. What the configuration has lost shows 0."""
        if self._followed is None:
            return
        breakers, budgets, pools = self._followed
        self.breaker_state.show((target, STATES.index(state)) for target, state in breakers.states())
        for moved, times in list(breakers.transitions.items()):
            self._rises.follow(self.breaker_transitions, times, *moved)
        self.keys_aside.show(breakers.count_refused_keys().items())
        for provider, budget in budgets.all().items():
            self._rises.follow(self.retries, budget.spent, provider)
            self._rises.follow(self.retries_refused, budget.refused, provider)
        counted = list(pools())
        self.slots.show(((pool.name,), math.inf if pool.limit is None else pool.limit) for pool in counted)
        self.slots_held.show(((pool.name,), len(pool.held)) for pool in counted)
        waiting = {}
        for pool in counted:
            waiting[pool.name, "interactive"] = len(pool.interactive.calls)
            waiting[pool.name, "batch"] = len(pool.batch.calls)
        self.queue_depth.show(waiting.items())
        self.replicas.show(self._count_replicas().items())
        self.fleet_target.show(((pool,), target) for pool, target in self._targets().items())
        rollouts = self._count_rollouts().items()
        self.rollout.show(((pool, state), 1) for pool, (state, _) in rollouts)
        self.rollout_share.show(((pool,), share) for pool, (_, share) in rollouts)
        self.kv_marks.show(((address,), len(marks)) for address, marks in list(self._cached.items()))
        self.replica_lateness.show(((address,), times) for address, times in self._slow().items())
