# What a worker shows Prometheus on its own port: what each process of the deployment counts, and what waits for
# workers.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import structlog
import uvicorn
from msgspec import Struct
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import text
from uvicorn.server import ServerState

from billing.core.store_errors import told_if_away
from gateway.batch.estimate import read_backlog
from gateway.http.http_protocol import HttpProtocol
from gateway.storage.database import Database
from gateway.telemetry.metrics import Metrics
from protocol.serving.deadlines import running_timeout
from protocol.serving.listening import open_socket

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
LOOK_WITHIN = 2.0  # seconds; after it the scrape goes without what Postgres knows

CALLBACKS = text("""
    SELECT count(*) FILTER (WHERE tries = 0) AS new, count(*) FILTER (WHERE tries > 0) AS failed
    FROM callbacks WHERE delivered_at IS NULL AND given_up_at IS NULL
""")

log = structlog.get_logger(__name__)


class WorkMetrics(Struct, eq=False):
    """Everything that a worker shows. ``running``: batch requests that run in this process; ``budgets``: the share of
    each team's budgets that is used, by team and limit."""

    _metrics: Metrics
    _database: Database
    _running: Callable[[], int]
    _budgets: Callable[[], Mapping[tuple[str, str], float]]

    @asynccontextmanager
    async def served_at(self, address: tuple[str, int] | None) -> AsyncIterator[None]:
        """Answer scrapes of ``address``, if one is given. Raises OSError when the port is taken."""
        if address is None:
            yield
            return
        config = uvicorn.Config(
            self.answer,
            ws="none",
            interface="asgi3",
            lifespan="off",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            server_header=False,
        )
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        with open_socket(*address) as listener:
            server = await loop.create_server(lambda: HttpProtocol(config, state, {}), sock=listener)
            log.info("metrics_served", host=address[0], port=listener.getsockname()[1])
            try:
                yield
            finally:
                server.close()
                if state.tasks:
                    await asyncio.wait(state.tasks, timeout=LOOK_WITHIN)
                for connection in list(state.connections):
                    connection.transport.abort()

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer any request with all metrics, as an ASGI app."""
        registry = CollectorRegistry()
        with told_if_away(log, "metrics_incomplete"):
            async with running_timeout(LOOK_WITHIN):
                registry.register(_Looked(await self._look()))
        body = generate_latest(registry) + self._metrics.render()
        headers = [(b"content-type", CONTENT_TYPE), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _look(self) -> list[Metric]:
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
            "Requests of running batches that have not ended, in the whole deployment",
            labels=["priority"],
        )
        callbacks = GaugeMetricFamily(
            "tollgate_callbacks_waiting", "Callbacks still to be delivered, in the whole deployment", labels=["state"]
        )
        async with self._database.begin() as connection:
            backlog, _ = await read_backlog(connection)
            open_callbacks = (await connection.execute(CALLBACKS)).mappings().one()
        for priority, count in backlog.items():
            waiting.add_metric([priority], count)
        for state, count in open_callbacks.items():
            callbacks.add_metric([state], count)
        return [running, budgets, waiting, callbacks]


class _Looked(Collector):
    """Metrics that were looked up."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
