# Prometheus metrics of a gateway. With several worker processes prometheus-client's multiprocess mode adds them up.

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from billing.auditor import Auditor
from billing.flusher import Flusher
from billing.quotas import Quotas
from billing.records import UsageRecord
from billing.restore import Restorer
from billing.sweep import Sweeper
from gateway.answering.call import Call
from gateway.answering.hooks import ReplyHook
from gateway.overload.turns import Room
from gateway.resilience.breaker import State
from gateway.resilience.breakers import Breakers
from gateway.resilience.retry import RetryBudgets
from router.targets import Target

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
OVERHEAD = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
SCORES = tuple(edge / 20 for edge in range(1, 20))
STATES = (State.CLOSED, State.HALF_OPEN, State.OPEN)  # as tollgate_breaker_state counts them
REFRESH = 5.0  # seconds between looks at what others count


class Metrics(ReplyHook):
    """Every metric of the gateway, which also count replies."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("tollgate_http_requests_total", "Answers by path and status", "path", "status")
        self.request_seconds = self._histogram(
            "tollgate_http_request_seconds", "Whole time of a request", SECONDS, "path"
        )
        self.calls = self._counter(
            "tollgate_calls_total", "Calls that reached an upstream", "team", "model", "endpoint", "status", "reason"
        )
        self.route_score = self._histogram(
            "tollgate_route_score", "Chance that a small model suffices, of calls to auto routes", SCORES, "reason"
        )
        self.tokens = self._counter("tollgate_tokens_total", "Tokens charged", "team", "model", "kind")
        self.cost = self._counter("tollgate_cost_nanousd_total", "Charged, in billionths of a dollar", "team", "model")
        self.attempts = self._counter("tollgate_attempts_total", "Tries at targets", "target", "outcome")
        self.first_token = self._histogram("tollgate_first_token_seconds", "Until the first token", SECONDS, "model")
        self.overhead = self._histogram(
            "tollgate_overhead_seconds", "Time until the first token that was ours, not the upstream's", OVERHEAD
        )
        self.in_flight = self._gauge_of_all("tollgate_calls_in_flight", "Calls being answered")
        self.journal_backlog = self._gauge_of_all(
            "tollgate_journal_backlog", "Closed calls that are not in Postgres yet"
        )
        self.quotas_standalone = self._gauge_of_worst(
            "tollgate_quotas_standalone",
            "1 while Redis is away and limits are this gateway's share of the last remainder",
        )
        self.hold_exceeded = self._counter("tollgate_hold_exceeded_total", "Calls billed above their hold")
        self.books_differ = self._gauge_of_worst(
            "tollgate_books_differ", "Figures of the ledger that a book does not share, by the last audit", "book"
        )
        self.books_audited = self._gauge_of_worst(
            "tollgate_books_audited_timestamp_seconds", "When the books were last compared; 0: not yet"
        )
        self.journals_damaged = self._counter(
            "tollgate_journals_damaged_total", "Journal files with places that could not be read, kept for people"
        )
        self.journals_lost = self._counter(
            "tollgate_journals_lost_total", "Journals not heard of for an hour: days closed without them"
        )
        self.holds_swept = self._counter("tollgate_holds_swept_total", "Holds freed because nobody renewed them")
        self.rebuilds = self._counter("tollgate_rebuilds_total", "Times that this process built Redis's counters anew")
        self.redis_refusals = self._counter(
            "tollgate_redis_refusals_total", "Quota commands that Redis refused: its counters lack them"
        )
        self.idempotent = self._counter(
            "tollgate_idempotent_calls_total", "Calls with an Idempotency-Key, by what became of them", "outcome"
        )
        self.continuations = self._counter(
            "tollgate_continuations_total", "Replies of our own engine that broke in mid-stream", "model", "outcome"
        )
        self.safety_findings = self._counter(
            "tollgate_safety_findings_total",
            "What the content policy found, by where and by what became of it",
            *("stage", "outcome", "finding"),
        )
        self.safety_refused = self._counter(
            "tollgate_safety_refused_total", "Calls of paused keys, and answers that models refused to give", "reason"
        )
        self.safety_checker = self._counter(
            "tollgate_safety_checker_calls_total", "Questions to the outside checker, by how they ended", "outcome"
        )
        self.safety_wait = self._histogram(
            "tollgate_safety_wait_seconds", "A first token's wait for the verdict on its request", OVERHEAD
        )
        self.breaker_state = self._gauge_of_worst(
            "tollgate_breaker_state",
            "Whether a target is asked: 0 closed, 1 half open, 2 open",
            "provider",
            "endpoint",
            "model",
        )
        self.breaker_transitions = self._counter(
            "tollgate_breaker_transitions_total",
            "Breakers that a gateway opened or closed",
            *("provider", "endpoint", "model", "state"),
        )
        self.keys_aside = self._gauge_of_worst(
            "tollgate_keys_set_aside",
            "Keys of a provider that are not used because it refuses them, or their account is used up",
            "provider",
            "reason",
        )
        self.retries = self._counter(
            "tollgate_retries_total", "Attempts beyond a call's first, by the provider tried first", "provider"
        )
        self.retries_refused = self._counter(
            "tollgate_retry_budget_refused_total", "Attempts that the retry budget did not allow", "provider"
        )
        self.queue_wait = self._histogram(
            "tollgate_queue_wait_seconds", "Waited for a turn, by how it ended", SECONDS, "model", "tier", "outcome"
        )
        self.shed = self._counter(
            "tollgate_shed_total", "Calls refused because every target was busy", "model", "tier", "reason"
        )
        self.queue_depth = self._gauge_of_all(
            "tollgate_queue_depth", "Calls waiting for a slot of a target; one may wait for several", "target", "tier"
        )
        self.slots = self._gauge_of_all("tollgate_slots", "Slots of a target whose slots are counted", "target")
        self.slots_held = self._gauge_of_all("tollgate_slots_held", "Those that calls hold", "target")
        self.config_reloads = self._counter(
            "tollgate_config_reloads_total", "Times that the configuration was read again", "outcome"
        )
        self.config_loaded = Gauge(
            "tollgate_config_loaded_timestamp_seconds",
            "When the configuration was read that is gone by; of several workers the oldest",
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        for outcome in ("ok", "refused"):
            counter_of(self.config_reloads, outcome)
        self._counted: list[tuple[Counter, Callable[[], int]]] = []
        self._refresh_books: Callable[[], None] = lambda: None
        self._refresh_breakers: Callable[[], None] = lambda: None
        self._refresh_rooms: Callable[[], None] = lambda: None

    def follow_books(
        self, quotas: Quotas, restorer: Restorer, sweeper: Sweeper, flusher: Flusher, auditor: Auditor
    ) -> None:
        """Show from now on what those who keep the books count themselves."""

        def refresh() -> None:
            self.quotas_standalone.set(quotas.is_standalone)
            self.journal_backlog.set(flusher.backlog)
            self.books_differ.labels("statements").set(auditor.found.statements)
            self.books_differ.labels("counters").set(auditor.found.counters)
            self.books_audited.set(auditor.found.at)

        self._refresh_books = refresh
        self._counted = [
            (self.hold_exceeded, _rise(lambda: quotas.exceeded)),
            (self.redis_refusals, _rise(lambda: quotas.refused)),
            (self.rebuilds, _rise(lambda: restorer.rebuilt)),
            (self.holds_swept, _rise(lambda: sweeper.freed)),
            (self.journals_lost, _rise(lambda: sweeper.lost)),
            (self.journals_damaged, _rise(lambda: flusher.damaged)),
        ]

    def follow_breakers(self, breakers: Breakers, budgets: RetryBudgets) -> None:
        """Show from now on who is asked, and how often calls tried again."""
        risen, shown = Rises(), set[tuple[str, str, str]]()

        def refresh() -> None:
            states = dict(breakers.states())
            for target in shown - states.keys():  # the configuration has lost it
                self.breaker_state.labels(*target).set(0)
            shown.update(states)
            for target, state in states.items():
                self.breaker_state.labels(*target).set(STATES.index(state))
            for moved, times in list(breakers.transitions.items()):
                risen.follow(self.breaker_transitions, moved, times)
            for key, keys in breakers.count_refused_keys().items():
                self.keys_aside.labels(*key).set(keys)
            for provider, budget in budgets.all().items():
                risen.follow(self.retries, (provider,), budget.spent)
                risen.follow(self.retries_refused, (provider,), budget.refused)

        self._refresh_breakers = refresh

    def follow_rooms(self, rooms: Callable[[], Iterable[Room]]) -> None:
        """Show from now on how full targets are, and how many calls wait for them."""

        shown = set[str]()

        def refresh() -> None:
            counted = list(rooms())
            for gone in shown - {room.name for room in counted}:  # the configuration has lost it
                for gauge in (self.slots.labels(gone), self.slots_held.labels(gone)):
                    gauge.set(0)
                self.queue_depth.labels(gone, "interactive").set(0)
                self.queue_depth.labels(gone, "batch").set(0)
            shown.update(room.name for room in counted)
            for room in counted:
                self.slots.labels(room.name).set(math.inf if room.limit is None else room.limit)
                self.slots_held.labels(room.name).set(len(room.held))
                self.queue_depth.labels(room.name, "interactive").set(len(room.interactive.tickets))
                self.queue_depth.labels(room.name, "batch").set(len(room.batch.tickets))

        self._refresh_rooms = refresh

    async def run(self) -> None:
        """Refresh every few seconds, so that a scrape that another worker process answers sees this one's too."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH)

    def refresh(self) -> None:
        """Take over what is counted elsewhere."""
        self._refresh_books()
        self._refresh_breakers()
        self._refresh_rooms()
        for counter, rise in self._counted:
            counter.inc(rise())

    def count_reload(self, is_ok: bool, now: float) -> None:
        """Count a reload; ``now`` in unix seconds."""
        counter_of(self.config_reloads, "ok" if is_ok else "refused").inc()
        if is_ok:
            self.config_loaded.set(now)

    def watch(self, call: Call, target: Target) -> ReplyHook:
        """Watch a reply: all of them alike, and only how they end."""
        return self

    def close(self, record: UsageRecord) -> None:
        """Count a reply that has ended."""
        team, model = record.team_id, record.model_used
        counter_of(self.calls, team, model, record.endpoint, record.status.value, record.route_reason).inc()
        if record.complexity is not None and record.route_reason.startswith("auto_"):
            histogram_of(self.route_score, record.route_reason).observe(record.complexity)
        counter_of(self.tokens, team, model, "input").inc(record.input_tokens)
        counter_of(self.tokens, team, model, "output").inc(record.output_tokens)
        counter_of(self.cost, team, model).inc(record.cost_nanousd)
        for attempt in record.attempts:
            counter_of(self.attempts, attempt.target, attempt.outcome).inc()
        if record.first_token_ms is not None:
            histogram_of(self.first_token, model).observe(record.first_token_ms / 1000)
            waited = sum(attempt.ms for attempt in record.attempts) + (record.queue_ms or 0.0)
            ours = record.first_token_ms - waited
            if ours >= 0:  # else a part of the waiting came later: the reply was continued elsewhere
                self.overhead.observe(ours / 1000)

    def render(self) -> bytes:
        """Return everything in Prometheus' text format, of all worker processes together."""
        self.refresh()
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(name, words, labels, registry=self.registry)

    def _histogram(self, name: str, words: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, words, labels, buckets=buckets, registry=self.registry)

    def _gauge_of_all(self, name: str, words: str, *labels: str) -> Gauge:
        """Return a gauge that shows the sum over all worker processes."""
        return Gauge(name, words, labels, registry=self.registry, multiprocess_mode="livesum")

    def _gauge_of_worst(self, name: str, words: str, *labels: str) -> Gauge:
        """Return a gauge that shows the largest of all worker processes."""
        return Gauge(name, words, labels, registry=self.registry, multiprocess_mode="livemax")


# ``labels()`` checks and locks anew each time; the same few combinations come with every call.


@lru_cache(10_000)
def counter_of(metric: Counter, *labels: str) -> Counter:
    """Return the counter of one combination of labels."""
    return metric.labels(*labels)


@lru_cache(10_000)
def histogram_of(metric: Histogram, *labels: str) -> Histogram:
    """Return the histogram of one combination of labels."""
    return metric.labels(*labels)


def _rise(count: Callable[[], int]) -> Callable[[], int]:
    """Return a function that tells how much ``count`` has risen since it was last asked."""
    seen = 0

    def rise() -> int:
        nonlocal seen
        before, seen = seen, count()
        return seen - before

    return rise


class Rises:
    """Counters with labels that follow counts kept elsewhere."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Counter, tuple[str, ...]], int] = {}

    def follow(self, counter: Counter, labels: tuple[str, ...], count: int) -> None:
        """Add to the counter what ``count`` has risen since it was last told."""
        counter_of(counter, *labels).inc(count - self._seen.get((counter, labels), 0))
        self._seen[counter, labels] = count
