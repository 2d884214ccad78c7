# A house of real processes that can be hurt: `tollgate serve` and `tollgate work` on one configuration and one data
# directory, an embedded Postgres and Valkey with known pids, and the scripted upstream before it.

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

import migrations
from gateway.dev.embedded import EmbeddedPostgres, EmbeddedServer, EmbeddedValkey
from gateway.run.processes import descendants_of, free_port, wait_until_gone
from tests.support.fault_load import Attempt
from tests.support.fault_service import Run, Service
from tests.support.forked_services import MARK, fork_service
from tests.support.postgres_proxy import PostgresProxy, postgres_proxy
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import as_service
from tests.support.standby import Standby
from tests.support.temporary_stores import temporary_postgres, temporary_valkey

ADMIN_KEY = "tgadmin-" + "f" * 43
RIGHT_AFTER = 0.5  # seconds in which a gateway may not have noticed yet that a client left

# What each model's upstream does, and its prices in nano-dollars per million tokens: input, cached input, output. The
# odd digits make a token cost a fraction of a nano-dollar, so that the cost of every call must be rounded.
MODELS = {
    "steady": ("tokens=8,pace=0.02,cached_tokens=2", (2_500_000_300, 1_250_000_700, 10_000_000_900)),
    "lengthy": ("tokens=40,pace=0.025", (400_000_100, 400_000_100, 800_000_300)),
    "silent": ("no-usage,tokens=6,pace=0.02", (3_000_000_700, 3_000_000_700, 15_000_000_100)),
    "torn": ("reset,tokens=8,after=3,pace=0.02", (1_000_000_100, 1_000_000_100, 2_000_000_100)),
    "cut": ("cut,tokens=8,after=4,pace=0.01", (1_000_000_100, 1_000_000_100, 2_000_000_100)),
    "instant": ("tokens=1", (1_000_000_100, 1_000_000_100, 2_000_000_100)),
    "several": ("tokens=6,pace=0.03", (3_000_000_100, 300_000_700, 15_000_000_900)),  # replies, a request for each
    "kept": ("tokens=6,pace=0.01", (2_000_000_700, 2_000_000_700, 4_000_000_100)),
    "stored": ("tokens=6,pace=0.02,cached_tokens=2", (2_000_000_300, 1_000_000_100, 8_000_000_700)),
    "broken": ("503", (1_000_000_100, 1_000_000_100, 2_000_000_100)),
}

OPENAIS = "provider: upstream, upstream_model: 'gpt-4o"
ANTHROPICS = "provider: anthropic, upstream_model: 'claude-sonnet-4-5"


class FaultHouse:
    """The processes of one house, by name, and the ways to hurt them."""

    def __init__(
        self,
        folder: Path,
        postgres: EmbeddedPostgres,
        way: PostgresProxy,
        redis: EmbeddedValkey,
        upstream_url: str,
        more: str,
        gateways: int,
        workers: int,
        run: Run,
    ) -> None:
        self.data_dir = folder / "data"
        self.postgres = postgres
        self.standbys: list[Standby] = []
        self.way = way  # which the services take to Postgres
        self.redis = redis
        self.mark = secrets.token_hex(8)  # in the environment of every service
        self.config = folder / "tollgate.yaml"
        self.config.write_text(config_text(way.url, redis.url, self.data_dir, upstream_url) + more)
        env = {**os.environ, MARK: self.mark}
        self.upstream: ScriptedUpstream | None = None
        self.gateways = []
        for number in range(gateways):
            port = free_port()
            words = ["serve", "--config", str(self.config), "--port", str(port)]
            log = folder / f"gateway-{number}.log"
            url = f"http://127.0.0.1:{port}"
            self.gateways.append(Service(f"gateway {number}", words, log, env, url, run))
        work = ["work", "--config", str(self.config)]
        self.workers = [Service(f"worker {n}", work, folder / f"worker-{n}.log", env, run=run) for n in range(workers)]
        self._read: dict[Path, int] = {}  # bytes of each log that were looked at

    @property
    def services(self) -> list[Service]:
        """Everything that is ours."""
        return [*self.gateways, *self.workers]

    @property
    def worker(self) -> Service:
        """The first of those that work on batches."""
        return self.workers[0]

    def make_team(self, team_id: str, team_limits: dict[str, Any], keys_limits: list[dict[str, Any]]) -> dict[str, str]:
        """Create a team with a key for each of ``keys_limits``, as an admin does; return the keys by their ids."""
        admin = {"authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=self.gateways[0].url, headers=admin, timeout=20) as client:
            client.post("/admin/teams", json={"id": team_id, "limits": team_limits}).raise_for_status()
            made = [
                client.post("/admin/keys", json={"team_id": team_id, "limits": limits}).raise_for_status().json()
                for limits in keys_limits
            ]
        return {one["key_id"]: one["key"] for one in made}

    def ask_admin(self, gateway: Service, path: str, **params: str) -> httpx.Response:
        """GET a page of ``gateway`` as an admin."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return httpx.get(gateway.url + path, params=params, headers=headers, timeout=20).raise_for_status()

    def kill_server(self, server: EmbeddedServer) -> None:
        """End Postgres or Redis with SIGKILL, and wait until it has let go of everything."""
        assert server.pid is not None
        pids = [server.pid, *descendants_of(server.pid)]
        os.kill(server.pid, signal.SIGKILL)
        for pid in pids[1:]:
            wait_until_gone(pid, 10.0)

    def add_standby(self) -> Standby:
        """Start a replica of Postgres."""
        standby = Standby(self.postgres)
        self.standbys.append(standby)
        standby.start()
        return standby

    def turn_to(self, standby: Standby) -> None:
        """Let a replica that was promoted be the Postgres of all services."""
        self.postgres = standby
        self.way.turn_to(standby.url)

    def forget_redis(self) -> None:
        """Take the data of a dead Redis away."""
        shutil.rmtree(self.redis.data_dir / self.redis.name / "appendonlydir")

    def flush_redis(self) -> None:
        """Wipe Redis while it runs."""
        client = Redis.from_url(self.redis.url, socket_timeout=5)
        client.flushall()
        client.close()

    def was_killed_under(self, attempt: Attempt) -> bool:
        """Whether the attempt's gateway was killed while it ran or right after, or was not there yet."""
        downtimes = self.gateways[attempt.gateway].downtimes
        return any(killed < attempt.ended + RIGHT_AFTER and attempt.started < back for killed, back in downtimes)

    def processor_wait(self, gateway: int) -> float:
        """Return the seconds that a gateway has waited for a processor so far."""
        service = self.gateways[gateway]
        try:
            stat = Path(f"/proc/{service.pid}/schedstat").read_text() if service.is_running else "0 0"
        except OSError:  # it was killed meanwhile
            return 0.0
        return int(stat.split()[1]) / 1e9

    def new_log_lines(self) -> list[str]:
        """Return what the services have logged since this was last asked."""
        found = []
        for service in self.services:
            with service.log.open("rb") as log:
                log.seek(self._read.get(service.log, 0))
                text = log.read()
                self._read[service.log] = log.tell()
            found += [f"{service.name}: {line[:3000]}" for line in text.decode(errors="replace").splitlines()]
        return found

    def left_running(self, within: float) -> list[str]:
        """Return the command lines of services that still run after at most ``within`` seconds."""
        deadline = time.monotonic() + within
        while (left := list(self._marked())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _marked(self) -> Iterator[str]:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue


# What no log may say, whatever dies: errors that nobody expected, and money that went astray.
ILL_WORDS = (
    *("Traceback", "loop_failed", "background_work_failed", "chore_ended", "reply_failed", "progress_not_noted"),
    *("books_differ", "journal_unreadable", "journal_close_unreadable", "journal_close_in_memory"),
    *("ledger_record_rejected", "redis_refused", "hold_exceeded"),
)


@contextmanager
def running_fault_house(
    folder: Path, more: str = "", gateways: int = 2, workers: int = 1, run: Run = fork_service
) -> Iterator[FaultHouse]:
    """Run a house in ``folder`` until the end of the block; nothing of it outlives the block. ``more``: models
    of its own, and other settings. ``run``: of its services."""
    with ExitStack() as stack:
        upstream = stack.enter_context(ScriptedUpstream(models=("gpt-4o", "claude-sonnet-4-5")))
        postgres = stack.enter_context(temporary_postgres())
        redis = stack.enter_context(temporary_valkey())
        service_url = as_service(postgres.url)  # who answers calls owns no table, as in compose.yaml
        migrations.upgrade(postgres.url)
        way = stack.enter_context(postgres_proxy(service_url))
        house = FaultHouse(folder, postgres, way, redis, upstream.url, more, gateways, workers, run)
        house.upstream = upstream
        stack.callback(lambda: [standby.remove() for standby in house.standbys])
        for service in house.services:
            stack.callback(service.end, 15.0)
        for service in house.services:
            service.launch()
        for service in house.services:
            service.wait_until_ready()
        yield house
        assert upstream.violations == []


def config_text(database_url: str, redis_url: str, data_dir: Path, upstream_url: str) -> str:
    """Return the house's tollgate.yaml."""
    models = "\n".join(
        f"  {name}: {{{ANTHROPICS if name == 'several' else OPENAIS}:{script}', context: 4000, max_output: 64, "
        f"price: {{input: {dollars(prices[0])}, cached_input: {dollars(prices[1])}, output: {dollars(prices[2])}}}"
        f"{', batch_discount: 0.5' if name == 'steady' else ''}}}"
        for name, (script, prices) in MODELS.items()
    )
    return f"""\
database_url: {database_url}
redis_url: {redis_url}
data_dir: {data_dir}
admin_keys: [{ADMIN_KEY}]
key_pepper: pepper of the faults
drain: 5s
callbacks: {{allow: [127.0.0.0/8]}}
lame_duck: 0s
providers:
  upstream:
    format: openai
    api_keys: [sk-upstream]
    endpoints: [{{region: here, base_url: '{upstream_url}'}}]
    timeouts: {{connect: 5s, first_token: 10s, between_tokens: 10s, total: 25s}}
    breaker: {{min_requests: 1000000}}  # parts of the load are meant to fail upstream, each call of them
  anthropic:
    format: anthropic
    api_keys: [sk-upstream]
    endpoints: [{{region: here, base_url: '{upstream_url.removesuffix("/v1")}'}}]
models:
{models}
"""


def dollars(nano: int) -> str:
    """Return nano-dollars as the configuration has them."""
    return f"{nano // 10**9}.{nano % 10**9:09}"
