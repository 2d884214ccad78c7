# Whose turn it is: tenants share by weight within a derived bound, batch work yields and never starves.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.scheduling import fairness
from gpu_backend.scheduling.fairness import PROMPT_TOKEN, REPLY_TOKEN
from gpu_backend.simulate.replica import Replica
from gpu_backend.simulate.traces import TraceRequest
from gpu_backend.step.config import engine_config
from gpu_backend.step.cost import StepCost
from gpu_backend.step.plan import StepPlan, StepResult

TENTH = StepCost(fixed=0.1, weights=0.0, token=0.0, context=0.0, pair=0.0)  # every step takes a tenth of a second


@dataclass
class Ledger:
    """Measures service from the outside: what the runner was asked to compute, by tenant, and who waits meanwhile."""

    replica: Replica
    service: dict[str, float] = field(default_factory=dict)  # weighted
    worst_gap: float = 0.0  # over all intervals in which both of a pair had requests waiting
    _seen: dict[int, TraceRequest] = field(default_factory=dict)
    _spans: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def run(self, seconds: float = float("inf")) -> None:
        """Step with an eye on every pair of tenants."""
        runner, until = self.replica.runner, self.replica.runner.now + seconds
        original = runner.run

        def watched(plan: StepPlan) -> StepResult:
            for step in plan.sequences:
                if step.sequence_id not in self._seen:
                    sequence = self.replica.loop.scheduler.running.by_id.get(step.sequence_id)
                    assert sequence is not None
                    request = self._seen[step.sequence_id] = self.replica.outcomes[sequence.request.request_id].request
                    self._book(request, PROMPT_TOKEN * (request.prompt_tokens - step.start))
                if step.samples:
                    self._book(self._seen[step.sequence_id], REPLY_TOKEN)
            self._compare()
            return original(plan)

        runner.run = watched  # type: ignore[method-assign]
        while self.replica.loop.has_work() and runner.now < until:
            self.replica._take(self.replica.loop.step())
            self.replica.loop.scheduler.check()
        runner.run = original  # type: ignore[method-assign]

    def _book(self, request: TraceRequest, service: float) -> None:
        self.service[request.tenant] = self.service.get(request.tenant, 0.0) + service / request.weight

    def _compare(self) -> None:
        waiting = {s.tenant for s in self.replica.loop.scheduler.admission if not s.tenancy.place}
        for pair in combinations(sorted(self.service), 2):
            if not waiting.issuperset(pair):
                self._spans.pop(pair, None)
                continue
            difference = self.service[pair[0]] - self.service[pair[1]]
            low, high = self._spans.get(pair, (difference, difference))
            self._spans[pair] = low, high = min(low, difference), max(high, difference)
            self.worst_gap = max(self.worst_gap, high - low)


def replica(num_blocks: int = 400, **changes: float | None) -> Replica:
    fields: dict[str, float | None] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "block_size": 4, **changes}
    return Replica(engine_config(model="", **fields), TENTH, num_blocks)  # type: ignore[arg-type]


def submit(target: Replica, requests: Iterable[TraceRequest], max_tokens: int = 1) -> None:
    for request in requests:
        target.submit(len(target.outcomes), request, max_tokens)


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    """The other's request goes next, however many wait before it."""
    target = replica(max_num_seqs=1)
    submit(target, [TraceRequest(0.0, 8, 5, tenant="flood")] * 50)
    Ledger(target).run(1.0)

    submit(target, [TraceRequest(1.0, 8, 5, tenant="calm")])
    Ledger(target).run()

    calm = target.outcomes["50"]
    assert calm.first_token is not None and calm.first_token < 2.0
    assert target.runner.now > 20


def test_service_follows_the_weights() -> None:
    """With weights 3 and 1, three times the tokens are served while both wait."""
    target = replica(max_num_seqs=3)
    for _ in range(200):
        submit(target, [TraceRequest(0.0, 8, 5, tenant="heavy", weight=3.0), TraceRequest(0.0, 8, 5, tenant="light")])
    ledger = Ledger(target)

    ledger.run(30)

    assert {s.tenant for s in target.loop.scheduler.admission} == {"heavy", "light"}
    assert ledger.service["heavy"] == pytest.approx(ledger.service["light"], rel=0.1)  # each over its weight


def test_a_weight_that_changes_breaks_no_bound() -> None:
    """A reply is charged over the weight that its request came with: a later request of another weight changes nothing
    of what was promised to it."""
    target = replica(max_num_seqs=2)
    submit(target, [TraceRequest(0.0, 8, 200, tenant="falls", weight=4.0)] * 2, 200)
    Ledger(target).run(1.0)
    for tenant, weight in (("falls", 0.5), ("steady", 4.0)):
        submit(target, [TraceRequest(1.0, 8, 4, tenant=tenant, weight=weight)] * 20, 4)
    Ledger(target).run()  # after each step it is checked that no counter is beyond the bound
    served = target.loop.scheduler.admission.queues["interactive"].counters()

    assert served["falls"] == pytest.approx(2 * (8 + 400) / 4 + 20 * (8 + 8) / 0.5, rel=0.1)


def test_idle_time_is_not_owed() -> None:
    """Whoever comes back after a pause shares from then on; it does not catch up on what it never asked for."""
    target = replica(max_num_seqs=1)
    submit(target, [TraceRequest(0.0, 8, 5, tenant="steady")] * 300)
    submit(target, [TraceRequest(0.0, 8, 5, tenant="pauses")])
    Ledger(target).run(50.0)
    ledger = Ledger(target)

    submit(target, [TraceRequest(50.0, 8, 5, tenant="pauses")] * 100)
    ledger.run(20.0)

    assert ledger.service["steady"] == pytest.approx(ledger.service["pauses"], rel=0.15)


def test_tokens_found_in_the_cache_are_no_service() -> None:
    """A tenant whose prompts are cached gets more requests through for the same share."""
    target = replica(max_num_seqs=1)
    for number in range(100):
        submit(target, [TraceRequest(0.0, 512, 2, tenant="same", prefix=(7,))])
        submit(target, [TraceRequest(0.0, 512, 2, tenant="new", prefix=(100 + number,))])

    Ledger(target).run(20.0)
    done = [o.request.tenant for o in target.outcomes.values() if o.tokens == 2]

    assert done.count("same") > 5 * done.count("new")


def test_batch_work_yields_at_once_and_keeps_its_place() -> None:
    """An interactive request takes the slot of batch work in the next step; that goes on before later batch work."""
    target = replica(max_num_seqs=2)
    submit(target, [TraceRequest(0.0, 8, 30, tier="batch")] * 4)
    Ledger(target).run(1.0)

    arrival = target.runner.now
    submit(target, [TraceRequest(arrival, 8, 3)])
    Ledger(target).run()
    outcomes = list(target.outcomes.values())

    assert outcomes[4].first_token == pytest.approx(arrival + 0.1)
    assert [o.last_token for o in outcomes[:4]] == sorted(o.last_token for o in outcomes[:4])
    assert all(o.tokens == 30 for o in outcomes[:4])
    assert target.loop.scheduler.running.num_preempted == 1


def test_interactive_work_never_yields_to_batch_work() -> None:
    """With every slot taken by interactive replies, batch work waits and no reply is preempted."""
    target = replica(max_num_seqs=2)
    submit(target, [TraceRequest(0.0, 8, 30)] * 2 + [TraceRequest(0.0, 8, 5, tier="batch")] * 2)

    Ledger(target).run()

    assert target.loop.scheduler.running.num_preempted == 0
    assert min(target.outcomes[n].first_token or 0 for n in "23") > max(target.outcomes[n].last_token for n in "01")


def test_batch_work_never_starves() -> None:
    """Under interactive load without end, one batch request is let in each time the patience is over, and stays."""
    target = replica(max_num_seqs=2, batch_patience=2.0)
    submit(target, [TraceRequest(0.0, 8, 5, tier="batch", tenant="night")] * 3)
    submit(target, [TraceRequest(0.0, 8, 5, tenant="day")] * 400)

    Ledger(target).run(12.0)
    batch = [target.outcomes[n] for n in "012"]

    assert any(s.tier == "interactive" for s in target.loop.scheduler.admission)
    assert all(o.tokens == 5 for o in batch)
    waits = [o.first_token or 0.0 for o in batch]
    assert all(2.0 * (n + 1) <= at < 2.0 * (n + 1) + 2.0 for n, at in enumerate(waits))


def test_accounts_of_bygone_tenants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants that called once do not stay in memory for ever."""
    monkeypatch.setattr(fairness, "IDLE_ACCOUNTS", 32)
    target = replica(max_num_seqs=4)
    for number in range(100):
        submit(target, [TraceRequest(0.0, 4, 1, tenant=f"t{number}")])
        Ledger(target).run()

    assert len(target.loop.scheduler.admission.queues["interactive"].counters()) <= 32


tenants = st.lists(
    st.tuples(
        st.tuples(st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([0.5, 1.0, 4.0])),  # weights, in turns
        st.integers(1, 60),  # prompt length
        st.integers(1, 20),  # reply length
        st.integers(1, 25),  # requests
        st.booleans(),  # prompts with a common beginning
        st.integers(0, 20),  # joins after this many tenths of a second
    ),
    min_size=2,
    max_size=4,
)


workloads = st.tuples(
    tenants,
    st.integers(1, 6),
    st.integers(24, 80),
    st.integers(0, 30),
    st.sampled_from([0, 20, 200, None]),
    st.sampled_from([0.1, 0.5, 2.0]),
)


@settings(max_examples=25)
@given(workloads)
def test_service_gap_stays_within_the_derived_bound(workload: tuple[Any, ...]) -> None:
    """Whatever is asked or preempted, however short blocks are: any two tenants that wait are served alike."""
    serve(*workload)


@pytest.mark.soak
@settings(max_examples=1000)
@given(workloads)
def test_service_gap_stays_within_the_derived_bound_in_many_workloads(workload: tuple[Any, ...]) -> None:
    """A thousand more of them."""
    serve(*workload)


def serve(
    loads: list[tuple[tuple[float, float], int, int, int, bool, int]],
    max_num_seqs: int,
    num_blocks: int,
    spare: int,
    lead: int | None,
    patience: float,
) -> None:
    """Counters drift apart by no more than ``bound``, and the service over any interval by no more than twice that."""
    target = replica(
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + spare + 1,
        cached_lead=lead,
        interactive_patience=patience,
    )
    ledger = Ledger(target)
    for tenth in range(21):
        for name, (weights, prompt, reply, number, common, start) in enumerate(loads):
            for place in range(number if start == tenth else 0):
                weight, prefix = weights[place % 2], (name,) if common else ()
                request = TraceRequest(target.runner.now, prompt, reply, f"tenant {name}", weight=weight)
                submit(target, [TraceRequest(**{**_fields(request), "prefix": prefix})], reply)
        ledger.run(0.1)
    ledger.run()
    queue = target.loop.scheduler.admission.queues["interactive"]

    assert ledger.worst_gap <= 2 * queue.bound
    assert all(outcome.tokens == outcome.request.output_tokens for outcome in target.outcomes.values())


def _fields(request: TraceRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in TraceRequest.__dataclass_fields__}
