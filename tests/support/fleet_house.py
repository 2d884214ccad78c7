# A fleet of real processes that can be hurt: two gateways, two controllers of one pool, its replicas, Postgres and
# Valkey; and callers who come when they come, whatever becomes of the calls before theirs.

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import httpx

import migrations
from gateway.config.file import load_settings
from gateway.dev.embedded import EmbeddedValkey
from gateway.placing.local import _name_at, _own_processes
from gateway.placing.placer import revision_of
from gateway.run.processes import free_port
from tests.support.audits import lasting_differences
from tests.support.fault_service import Service
from tests.support.forked_services import MARK, fork_service
from tests.support.front import write_small_files
from tests.support.house import make_team
from tests.support.paced_replica import KV_TRUTH
from tests.support.redis_proxy import RedisProxy
from tests.support.temporary_stores import temporary_postgres, temporary_valkey
from tests.support.waiting import until

TARGET = 3  # replicas
TOKENS = 12  # of each answer
WITHIN = 300.0  # seconds for what takes a few on a quiet machine
KV_EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
ADMIN_KEY = "tgadmin-" + "f" * 43
CONFIG = """\
database_url: {database_url}
redis_url: {redis_url}
data_dir: {data_dir}
admin_keys: [{admin_key}]
key_pepper: pepper of the fleet of tests
drain: 5s
lame_duck: 0s
providers:
  own:
    format: openai
    self_hosted: true
    api_keys: [{engine_secret}]
    timeouts: {{connect: 2s, first_token: 5s, between_tokens: 3s, total: 60s}}
models:
  tiny: {{provider: own, context: 4096, max_output: 64, price: {{input: 1, output: 2}}}}
fleet:
  secrets: [{fleet_secret}]
  pools:
    own:
      scaling: {{min: {target}, max: {target}}}
      engine: {{model: {model}, gpus: 0, arguments: [--served-model-name, tiny, --kv-events-config, '{kv_events}']}}
      rollout: {{healthy_within: 2m, canary: 1s, stand: 1s, drain: 20s}}
"""


@dataclass
class Call:
    """One call as its client saw it. Times are monotonic seconds."""

    id: str  # our x-client-request-id, which its row carries
    began: float
    ended: float = 0.0
    status: int = 0
    fault: str = "no end"  # "": it was answered whole


@dataclass
class OpenLoad:
    """Calls that begin at random, so many a second, every second one a stream."""

    urls: list[str]
    key: str
    rate: float
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call until the end of the block, and wait until all calls have ended."""
        self._is_over = False
        thread = threading.Thread(target=lambda: asyncio.run(self._call_all()), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over = True
            thread.join(WITHIN)
            assert not thread.is_alive(), "the calls do not end"

    def wait_for(self, count: int) -> None:
        """Wait until so many more calls have been answered."""
        before = self.answered()
        until(lambda: self.answered() >= before + count, within=WITHIN)

    def answered(self) -> int:
        """Return how many calls were answered whole."""
        return sum(not call.fault for call in self.calls)

    def lost(self) -> list[Call]:
        """Return the calls that were not."""
        return [call for call in self.calls if call.fault]

    def silence(self) -> float:
        """Return the longest time in seconds in which no call was answered whole."""
        ends = sorted(call.ended for call in self.calls if not call.fault)
        return max((late - early for early, late in itertools.pairwise(ends)), default=0.0)

    async def _call_all(self) -> None:
        dice, number, running = random.Random(1), 0, set[asyncio.Task[None]]()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            while not self._is_over:
                running = {each for each in running if not each.done()}
                number += 1
                running.add(asyncio.create_task(self._call(session, number)))
                await asyncio.sleep(dice.expovariate(self.rate))
            await asyncio.gather(*running)

    async def _call(self, session: aiohttp.ClientSession, number: int) -> None:
        call = Call(secrets.token_hex(8), time.monotonic())
        self.calls.append(call)
        asks = [{"role": "user", "content": f"Tell me of river {number % 100}. ".ljust(600, "~")}]
        body = {"model": "tiny", "messages": asks, "max_tokens": TOKENS, "stream": number % 2 == 0}
        headers = {"authorization": f"Bearer {self.key}", "x-client-request-id": call.id}
        url = self.urls[number // 2 % len(self.urls)] + "/v1/chat/completions"
        try:
            async with session.post(url, json=body, headers=headers) as answer:
                call.status = answer.status
                call.fault = await _fault_of(answer, bool(body["stream"]))
        except (aiohttp.ClientError, OSError) as exc:
            call.fault = repr(exc)
        call.ended = time.monotonic()


async def _fault_of(answer: aiohttp.ClientResponse, streams: bool) -> str:
    if answer.status != 200:
        return (await answer.text())[:300]
    if not streams:
        return "" if (await answer.json())["usage"]["completion_tokens"] == TOKENS else "not whole"
    said = [line[6:] async for line in answer.content if line.startswith(b"data: ")]
    if said[-1:] != [b"[DONE]\n"]:
        return f"ended with {said[-1:]}"
    text = "".join(one["delta"].get("content") or "" for each in said[:-1] for one in json.loads(each)["choices"])
    return "" if len(text) == TOKENS else f"{len(text)} letters"


class FleetHouse:
    """The processes of one fleet, and the ways to hurt them."""

    def __init__(self, folder: Path, database_url: str, redis: EmbeddedValkey, way: RedisProxy, placing: str) -> None:
        self.folder, self.database_url, self.redis, self.way = folder, database_url, redis, way
        self.placing = placing
        self.data_dir = folder / "data"
        facts = {"database_url": database_url, "data_dir": self.data_dir, "admin_key": ADMIN_KEY, "target": TARGET}
        facts["kv_events"] = json.dumps(KV_EVENTS)
        facts |= {"engine_secret": secrets.token_hex(16), "fleet_secret": secrets.token_hex(16)}
        facts["model"] = write_small_files(folder / "tiny")
        self.config, self.controllers_config = folder / "tollgate.yaml", folder / "controller.yaml"
        self.config.write_text(CONFIG.format(**facts, redis_url=redis.url))
        self.controllers_config.write_text(CONFIG.format(**facts, redis_url=way.url))  # as its replicas have it
        settings = load_settings(self.config, os.environ)
        assert settings.fleet is not None
        engine = settings.fleet.pools["own"].engine
        assert engine is not None
        self._prefix = f"own.{revision_of(engine)}."
        self.key = asyncio.run(make_team(settings, "callers"))
        env = {**os.environ, MARK: secrets.token_hex(8)}
        self.gateways = []
        for number in range(2):
            port, log = free_port(), folder / f"gateway-{number}.log"
            words = ["serve", "--config", str(self.config), "--port", str(port)]
            service = Service(f"gateway {number}", words, log, env, f"http://127.0.0.1:{port}", fork_service)
            self.gateways.append(service)
        self.controllers: list[subprocess.Popen[bytes]] = []
        self.counts: list[int] = []  # of replicas, five times a second

    def control(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a controller."""
        words = [sys.executable, "-m", "tests.support.fleet_controller", str(self.controllers_config), self.placing]
        with self._log(len(self.controllers)).open("ab") as log:
            env = {**os.environ, **(environment or {})}
            self.controllers.append(subprocess.Popen(words, stdout=log, stderr=log, env=env))
        return self.controllers[-1]

    def _log(self, number: int) -> Path:
        return self.folder / f"controller-{number}.log"

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return what controllers logged of an event, in the order of time."""
        lines = [line for number in range(len(self.controllers)) for line in self._log(number).read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return sorted((one for one in found if one["event"] == event), key=lambda one: str(one["timestamp"]))

    def acting(self) -> subprocess.Popen[bytes]:
        """Return the controller whose turn it is, by what they said last."""
        pid = int(str(self.told("fleet_controller_acts")[-1]["owner"]).split(":")[1])
        return next(one for one in self.controllers if one.pid == pid)

    def replicas(self) -> dict[str, int]:
        """Return the replicas that run on this machine, and their processes."""
        found = ((_name_at(pid), pid) for pid in _own_processes())
        return {name: pid for name, pid in found if name is not None and name.startswith(self._prefix)}

    def asked(self, gateway: int = 0) -> set[str]:
        """Return the names of the replicas that a gateway asks."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        page = httpx.get(self.gateways[gateway].url + "/admin/instances", headers=headers, timeout=20).json()
        return {one["instance_id"].rpartition("-")[0] for one in page["instances"] if one["takes_calls"]}

    def marks_that_are_right(self) -> dict[str, int] | None:
        """Return how many beginnings of prompts each replica has cached, if both gateways know it of all."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        page = httpx.get(self.gateways[0].url + "/admin/instances", headers=headers, timeout=20).json()
        names = {one["base_url"]: one["instance_id"].rpartition("-")[0] for one in page["instances"]}
        truth = {url: int((self.folder / f"{KV_TRUTH}-{name}").read_text() or -1) for url, name in names.items()}
        for gateway in self.gateways:
            said = httpx.get(gateway.url + "/metrics", headers=headers, timeout=20).text
            told = re.findall(r'^tollgate_kv_marks\{endpoint="(.*?)"\} (\S+)$', said, re.M)
            if {url: round(float(count)) for url, count in told} != truth:
                return None
        return truth

    def settled(self, *, but: Collection[str] = ()) -> set[str]:
        """Wait until both gateways ask as many replicas as there should be, and no others are there."""

        def look() -> set[str]:
            found = set(self.replicas())
            is_so = len(found) == TARGET and not found & {*but} and self.asked(0) == self.asked(1) == found
            return found if is_so else set()

        return until(look, within=WITHIN)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the replicas inside of the block."""
        over = threading.Event()

        def go_on() -> None:
            while not over.wait(0.2):
                self.counts.append(len(self.replicas()))

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def complaints(self, calls: Collection[Call]) -> list[str]:
        """Hold the books against what callers saw: one row for each call that was begun, none for one that was refused,
        and all books agree."""
        found = [str(one) for one in lasting_differences(self.database_url, within=WITHIN)]
        rows = asyncio.run(self._rows())
        for call in calls:
            booked = rows.pop(call.id, [])
            statuses = [status for status, _ in booked]
            if not call.fault:
                is_right = booked == [("answered", TOKENS)]
            elif call.status == 200:
                is_right = statuses == ["interrupted"]
            else:
                is_right = statuses == (["failed"] if call.status in (502, 504) else [])
            if not is_right:
                found.append(f"its rows are {booked}: {call}")
        return found + [f"rows of no call: {rest}" for rest in rows.values()]

    async def _rows(self) -> dict[str, list[tuple[str, int]]]:
        connection = await asyncpg.connect(self.database_url)
        try:
            found: dict[str, list[tuple[str, int]]] = {}
            for row in await connection.fetch("SELECT client_request_id, status, output_tokens FROM usage_records"):
                found.setdefault(row["client_request_id"], []).append((row["status"], row["output_tokens"]))
            return found
        finally:
            await connection.close()

    def logs(self) -> str:
        """Return what the controllers said."""
        return "".join(self._log(number).read_text() for number in range(len(self.controllers)))


@contextmanager
def threaded_proxy(url: str) -> Iterator[RedisProxy]:
    """Run a proxy in front of Redis in a thread of its own."""
    loop, proxy = asyncio.new_event_loop(), RedisProxy(url)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait_for(act: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(act(), loop).result(10)

    wait_for(proxy.start)
    try:
        yield proxy
    finally:
        wait_for(proxy.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@contextmanager
def running_fleet(folder: Path, placing: str = "local", **environment: str) -> Iterator[FleetHouse]:
    """Run a fleet with one controller and settled replicas until the end of the block; nothing of it outlives it."""
    with ExitStack() as stack:
        postgres = stack.enter_context(temporary_postgres())
        redis = stack.enter_context(temporary_valkey())
        migrations.upgrade(postgres.url)
        house = FleetHouse(folder, postgres.url, redis, stack.enter_context(threaded_proxy(redis.url)), placing)
        stack.callback(_end, house)
        for gateway in house.gateways:
            stack.callback(gateway.end, 15.0)
            gateway.launch()
        house.control(environment)
        for gateway in house.gateways:
            gateway.wait_until_ready()
        yield house


def _end(house: FleetHouse) -> None:
    for controller in house.controllers:
        controller.kill()
        controller.wait()
    for pid in house.replicas().values():
        os.kill(pid, signal.SIGKILL)
    print(house.logs())


def end_politely(house: FleetHouse) -> list[int]:
    """End the controllers by SIGTERM, those that wait first; return their exit statuses."""
    acting = house.acting()
    order = sorted((one for one in house.controllers if one.poll() is None), key=lambda one: one is acting)
    statuses = []
    for one in order:
        one.send_signal(signal.SIGTERM)
        statuses.append(one.wait(60))
    return statuses
