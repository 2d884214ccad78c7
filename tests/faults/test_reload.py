# SIGHUP: models, routes and prices change under a running gateway, and no call notices that was there before.

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from signal import SIGHUP
from typing import Any

import httpx
import pytest

from gateway.config.file import load_settings
from gateway.run.processes import descendants_of, free_port
from tests.support.fault_service import Service
from tests.support.house import make_team
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.waiting import until

ADMIN_KEY = "tgadmin-" + "r" * 43
TOKENS, PACE = 20, 0.1
SLOW = f"tokens={TOKENS},pace={PACE}"
LOADED = "tollgate_config_loaded_timestamp_seconds"
KEPT, REFUSED = (f'tollgate_config_reloads_total{{outcome="{outcome}"}}' for outcome in ("ok", "refused"))
PROMPT = [{"role": "user", "content": "Slowly."}]


class Reloadable:
    """A gateway whose file can be written anew."""

    def __init__(self, service: Service, config: Path, key: str) -> None:
        self.service, self.config = service, config
        self.lines_before = 0
        self.client = httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {key}"}, timeout=30)
        self.admin = httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)

    def reload(self, text: str) -> dict[str, Any]:
        """Write the file and send SIGHUP; return the line that says what came of it."""
        self.config.write_text(text)
        told = len(self.log_lines("config_reloaded", "config_refused"))
        os.kill(self.service.pid, SIGHUP)
        return until(lambda: self.log_lines("config_reloaded", "config_refused")[told:])[-1]

    def begin(self, text: str) -> None:
        """Forget what an earlier test made of it."""
        self.reload(text)
        self.lines_before = len(self.service.log.read_text().splitlines())

    def log_lines(self, *events: str) -> list[dict[str, Any]]:
        """Return what was logged of these events in this test."""
        told = self.service.log.read_text().splitlines()[self.lines_before :]
        lines = (json.loads(line) for line in told if line.startswith("{"))
        return [line for line in lines if line["event"] in events]

    def models(self) -> list[str]:
        """Return what the team may ask for."""
        return [model["id"] for model in self.client.get("/v1/models").json()["data"]]

    def ask(self, model: str = "small") -> dict[str, Any]:
        """Make a plain call and return the answer."""
        body = {"model": model, "messages": PROMPT, "max_tokens": 50}
        return dict(self.client.post("/v1/chat/completions", json=body).raise_for_status().json())

    def stream(self) -> list[dict[str, Any]]:
        """Make a streamed call and return its chunks; the last is the one with the usage."""
        body = {"model": "small", "messages": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        lines: list[str] = []
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines += [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metric(self, name: str) -> float:
        """Return a figure of /metrics."""
        lines = self.admin.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world, which answers slowly."""
    with ScriptedUpstream() as upstream:
        upstream.script(SLOW)
        yield upstream


@pytest.fixture(scope="module")
def stores(postgres_url: str, redis_url: str) -> Iterator[tuple[str, str]]:
    """The URLs of a Postgres and a Redis for all gateways of this file."""
    with database_of_its_own(postgres_url) as database_url:
        yield database_url, redis_url


@contextmanager
def serving(stores: tuple[str, str], folder: Path, workers: int) -> Iterator[Reloadable]:
    """Run a gateway with one model, `small`, whose upstream is away."""
    config = folder / "tollgate.yaml"
    config.write_text(text_of(*stores, "http://127.0.0.1:9/v1"))
    key = asyncio.run(make_team(load_settings(config), f"team_{workers}"))
    port = free_port()
    words = ["serve", "--config", str(config), "--port", str(port), "--workers", str(workers)]
    service = Service("gateway", words, folder / "log", {**os.environ}, f"http://127.0.0.1:{port}")
    service.start()
    try:
        yield Reloadable(service, config, key)
    finally:
        service.end()


@pytest.fixture(scope="module")
def alone(stores: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reloadable]:
    """One process, for test after test."""
    with serving(stores, tmp_path_factory.mktemp("alone"), workers=1) as gateway:
        yield gateway


@pytest.fixture
def gateway(alone: Reloadable, text: Callable[..., str]) -> Reloadable:
    """That process in front of this test's upstream."""
    alone.begin(text())
    return alone


@pytest.fixture
def two(stores: tuple[str, str], text: Callable[..., str], tmp_path: Path) -> Iterator[Reloadable]:
    """A gateway of two workers."""
    with serving(stores, tmp_path, workers=2) as gateway:
        yield gateway


def text_of(database_url: str, redis_url: str, upstream_url: str, **changes: str) -> str:
    """Return a tollgate.yaml; ``changes`` take the place of its values."""
    values = {
        "drain": "2s",
        "endpoint": upstream_url,
        "key": "sk-upstream",
        "timeouts": "{}",
        "price": "{input: 1, output: 2}",
        "upstream_model": "gpt-4o-mini",
        "more": "",
    } | changes
    return f"""\
database_url: {database_url}
redis_url: {redis_url}
data_dir: data
admin_keys: [{ADMIN_KEY}]
key_pepper: pepper of the reloads
drain: {values["drain"]}
lame_duck: 0s
providers:
  upstream:
    format: openai
    api_keys: [{values["key"]}]
    endpoints: [{{region: here, base_url: '{values["endpoint"]}'}}]
    timeouts: {values["timeouts"]}
models:
  small:
    {{provider: upstream, upstream_model: {values["upstream_model"]}, price: {values["price"]}, context: 1000}}
{values["more"]}
"""


@pytest.fixture
def text(stores: tuple[str, str], upstream: ScriptedUpstream) -> Callable[..., str]:
    """Make the gateway's file, with changes."""
    return lambda **changes: text_of(*stores, changes.pop("endpoint", upstream.url), **changes)


def test_a_running_call_keeps_what_it_began_with(
    gateway: Reloadable, upstream: ScriptedUpstream, text: Callable[..., str]
) -> None:
    """A stream over the reload ends at the old price and the old upstream; the next call has the new ones."""
    with ScriptedUpstream() as elsewhere, ThreadPoolExecutor() as clients:
        elsewhere.script("tokens=20")
        stream = clients.submit(gateway.stream)
        until(lambda: upstream.requests and upstream.requests[0].tokens_sent > 3)
        line = gateway.reload(
            text(
                endpoint=elsewhere.url,
                upstream_model="gpt-4o",
                price="{input: 10, output: 20}",
                more="  large: {provider: upstream, upstream_model: gpt-4o, price: {input: 3, output: 4}}\n"
                "aliases: {house: large}\n"
                "routes: {auto: {small: [small], large: [large]}}",
            )
        )
        names = gateway.models()
        after = gateway.ask()
        by_alias = gateway.ask("house")
        before = stream.result(30)[-1]

    assert line["models"] == {"added": ["large"], "removed": [], "changed": ["small"]}
    assert names == ["small", "large", "auto", "house"]
    assert cost_at(before["usage"], 1, 2) and before["usage"]["completion_tokens"] == TOKENS
    assert cost_at(after["usage"], 10, 20)
    assert cost_at(by_alias["usage"], 3, 4) and by_alias["model_used"] == "large"
    assert [seen.body and seen.body["model"] for seen in upstream.requests] == ["gpt-4o-mini"]
    assert [seen.body and seen.body["model"] for seen in elsewhere.requests] == ["gpt-4o", "gpt-4o"]


def cost_at(usage: dict[str, Any], price_in: int, price_out: int) -> bool:
    owed = Decimal(usage["prompt_tokens"] * price_in + usage["completion_tokens"] * price_out) / 10**6
    return Decimal(usage["cost_usd"]) == owed


def test_a_faulty_file_changes_nothing(gateway: Reloadable, text: Callable[..., str]) -> None:
    """Every fault is logged with its file, line and key, a missing variable too; the gateway goes on as before."""
    good, refused, kept = (gateway.metric(name) for name in (LOADED, REFUSED, KEPT))
    faulty = text(key="${NO_SUCH_VARIABLE}", price="{input: -1, output: 2}", more="aliases: {house: nobody}")
    line = gateway.reload(faulty)
    missing = gateway.reload("providers: {")

    said = "\n".join(line["faults"])
    assert f"{gateway.config}:11: providers.upstream.api_keys[0]" in said and "NO_SUCH_VARIABLE" in said
    assert f"{gateway.config}:16: models.small.price.input" in said
    assert f"{gateway.config}:17: aliases.house" in said
    assert missing["event"] == "config_refused"
    assert gateway.models() == ["small"] and cost_at(gateway.ask()["usage"], 1, 2)
    assert gateway.metric(REFUSED) == refused + 2
    assert gateway.metric(LOADED) == good

    assert gateway.reload(text(price="{input: 7, output: 7}"))["event"] == "config_reloaded"
    assert cost_at(gateway.ask()["usage"], 7, 7)
    assert gateway.metric(KEPT) == kept + 1
    assert gateway.metric(LOADED) > good


def test_what_needs_a_restart_is_named_and_kept(gateway: Reloadable, text: Callable[..., str]) -> None:
    """Another admin key, Redis and drain do not count until then; the rest of the file does, at once."""
    changed = text(drain="9s", price="{input: 5, output: 5}").replace(ADMIN_KEY, "tgadmin-another-8d63")
    line = gateway.reload(changed)
    (named,) = gateway.log_lines("config_needs_restart")

    assert line["event"] == "config_reloaded"
    assert named["settings"] == ["admin_keys", "drain"]
    assert "tgadmin-another-8d63" not in gateway.service.log.read_text()
    assert gateway.admin.get("/admin/teams").status_code == 200
    assert cost_at(gateway.ask()["usage"], 5, 5)


def test_keys_endpoints_timeouts_and_breakers_follow(
    gateway: Reloadable, upstream: ScriptedUpstream, text: Callable[..., str]
) -> None:
    """The next call has the new key, and loses patience when the file says so; what is gone is watched no more."""
    gateway.reload(text(key="sk-other", timeouts="{first_token: 500ms}"))
    upstream.script("hang-before-headers")
    silent = gateway.client.post("/v1/chat/completions", json={"model": "small", "messages": PROMPT, "stream": True})
    gateway.reload(text(endpoint="http://127.0.0.1:9/v1"))
    (breaker,) = gateway.admin.get("/admin/breakers").json()["breakers"]
    unreachable = gateway.client.post("/v1/chat/completions", json={"model": "small", "messages": PROMPT})

    assert silent.status_code == 504
    assert [seen.api_key for seen in upstream.requests] == ["sk-other"]
    assert breaker["endpoint"] == "here http://127.0.0.1:9/v1"
    assert unreachable.status_code == 502


def test_a_signal_during_the_start_is_heard(gateway: Reloadable, text: Callable[..., str]) -> None:
    """Whoever changes the file while a gateway starts neither kills it nor is missed."""
    assert gateway.service.end() == 0
    gateway.service.launch()
    until(lambda: is_held(gateway.service.pid, SIGHUP))
    gateway.config.write_text(text(price="{input: 9, output: 9}"))
    os.kill(gateway.service.pid, SIGHUP)
    gateway.service.wait_until_ready()
    until(lambda: gateway.log_lines("config_reloaded"))

    assert cost_at(gateway.ask()["usage"], 9, 9)


def is_held(pid: int, number: int) -> bool:
    """Whether a process blocks a signal (proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigBlk:")[2].split()[0], 16) >> (number - 1) & 1)


def test_every_worker_reloads(two: Reloadable, text: Callable[..., str]) -> None:
    """The parent passes SIGHUP on; afterwards no worker knows the old price."""
    until(lambda: len(descendants_of(two.service.pid)) == len(two.log_lines("owner_listed")) == 2)
    two.reload(text(more="  large: {provider: upstream, upstream_model: gpt-4o, price: {input: 3, output: 4}}"))
    until(lambda: len(two.log_lines("config_reloaded")) >= 2)
    seen = set()
    for _ in range(20):
        answer = httpx.get(f"{two.service.url}/v1/models", headers=two.client.headers, timeout=10)
        seen.add(tuple(model["id"] for model in answer.json()["data"]))

    assert seen == {("small", "large")}
    assert two.metric(KEPT) == 2


@pytest.mark.timeout(240)
def test_twenty_reloads_under_load_drop_nothing_and_leak_nothing(
    gateway: Reloadable, upstream: ScriptedUpstream, text: Callable[..., str]
) -> None:
    """Models, keys and endpoints come and go under eight clients: every answer is whole, and no descriptor stays."""
    upstream.script("tokens=5,pace=0.02")
    files = [
        text(more=f"  model-{number}: {{provider: upstream, upstream_model: gpt-4o, price: {{input: 3, output: 4}}}}")
        for number in range(20)
    ]
    with ScriptedUpstream() as elsewhere, ThreadPoolExecutor() as clients:
        elsewhere.script("tokens=5,pace=0.02")
        moved = [each.replace(upstream.url, elsewhere.url) if n % 2 else each for n, each in enumerate(files)]
        list(clients.map(lambda _: gateway.ask(), range(8)))
        before = open_files(gateway.service.pid)
        is_over = False

        def be_client(number: int) -> int:
            calls = 0
            while not is_over:
                calls += 1
                if (number + calls) % 2:
                    assert gateway.ask()["usage"]["completion_tokens"] == 5
                else:
                    assert gateway.stream()[-1]["usage"]["completion_tokens"] == 5
            return calls

        running = [clients.submit(be_client, number) for number in range(8)]
        for each in moved:
            assert gateway.reload(each)["event"] == "config_reloaded"
        is_over = True
        calls = sum(each.result(60) for each in running)
        both = (len(upstream.requests), len(elsewhere.requests))
    until(lambda: open_files(gateway.service.pid) <= before + 10)  # connections to two upstreams in place of one

    assert calls > 16 and min(both) > 0
    assert gateway.models() == ["small", "model-19"]
    assert gateway.log_lines("loop_failed", "background_work_failed", "reply_failed", "unexpected_error") == []


def open_files(pid: int) -> int:
    return len([*Path(f"/proc/{pid}/fd").iterdir()])
