# What a worker shows Prometheus on its own port: what each process of the house counts, and what waits for workers.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import text

from billing.store_errors import POSTGRES_AWAY
from gateway.batch.estimate import read_backlog
from gateway.services import Services

LOOK_WITHIN = 2.0  # seconds; after it the scrape goes without what Postgres knows

CALLBACKS = text("""
    SELECT count(*) FILTER (WHERE tries = 0) AS new, count(*) FILTER (WHERE tries > 0) AS failed
    FROM callbacks WHERE delivered_at IS NULL AND given_up_at IS NULL
""")

log = structlog.get_logger(__name__)


@asynccontextmanager
async def work_metrics(
    address: tuple[str, int] | None,
    services: Services,
    running: Callable[[], int],
    budgets: Callable[[], Mapping[tuple[str, str], float]],
) -> AsyncIterator[None]:
    """Answer scrapes of ``address``, if one is given. ``running``: batch requests that run in this process;
    ``budgets``: the share of each team's budgets that is used, by team and limit.

    Raises OSError when the port is taken.
    """
    if address is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_Work(services, running, budgets, asyncio.get_running_loop()))
    host, port = address
    server, thread = start_http_server(port, host, registry)
    log.info("metrics_served", host=host, port=server.server_port)
    try:
        yield
    finally:
        await asyncio.to_thread(server.shutdown)  # it answers what it has begun, and that asks this loop
        server.server_close()
        thread.join()


class _Work(Collector):
    """Everything that a worker shows. A scrape comes in a thread; what it asks is looked up in the worker's loop."""

    def __init__(
        self,
        services: Services,
        running: Callable[[], int],
        budgets: Callable[[], Mapping[tuple[str, str], float]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._services = services
        self._running = running
        self._budgets = budgets
        self._loop = loop

    def describe(self) -> list[Metric]:
        return []  # else it would be scraped to be registered

    def collect(self) -> Iterator[Metric]:
        look = asyncio.run_coroutine_threadsafe(self._look(), self._loop)
        try:
            yield from look.result(LOOK_WITHIN)
        except POSTGRES_AWAY as exc:
            look.cancel()
            log.warning("metrics_incomplete", error=repr(exc))
        yield from self._services.metrics.registry.collect()

    async def _look(self) -> list[Metric]:
        self._services.metrics.refresh()
        running = GaugeMetricFamily("tollgate_batch_requests_running", "Batch requests that run in this worker")
        running.add_metric([], self._running())
        budgets = GaugeMetricFamily(
            "tollgate_budget_used_ratio",
            "Used of a team's dollars and tokens of its day or month, as the ledger has them",
            labels=["team", "limit"],
        )
        for scope, used in self._budgets().items():
            budgets.add_metric(scope, used)
        waiting = GaugeMetricFamily(
            "tollgate_batch_requests_left",
            "Requests of running batches that have not ended, in the whole house",
            labels=["priority"],
        )
        callbacks = GaugeMetricFamily(
            "tollgate_callbacks_waiting", "Callbacks still to be delivered, in the whole house", labels=["state"]
        )
        async with self._services.database.begin() as connection:
            backlog, _ = await read_backlog(connection)
            open_callbacks = (await connection.execute(CALLBACKS)).mappings().one()
        for priority, count in backlog.items():
            waiting.add_metric([priority], count)
        for state, count in open_callbacks.items():
            callbacks.add_metric([state], count)
        return [running, budgets, waiting, callbacks]
