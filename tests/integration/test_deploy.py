# What compose.yaml closes: capabilities, file systems, ports, and what the proxy shows the world.

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.dev.embedded.postgres import QUIET
from gateway.run.processes import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_do_no_more_than_it_must(name: str) -> None:
    """No capability but those it names, none to be gained, nothing written but its volumes; no root but the proxy's."""
    service = SERVICES[name]
    writes = {"prometheus"}  # Compose writes its secrets into the container
    capabilities = {"proxy": ["NET_BIND_SERVICE"]}

    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == capabilities.get(name, [])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name not in writes)
    assert not service.get("privileged")
    if "build" not in service and name not in ("proxy", "prometheus"):  # the Dockerfile and their images say whom
        assert service["user"] in ("postgres", "valkey")


def test_only_the_proxy_is_open_to_the_world() -> None:
    """Anything else that is published is published on the loopback address."""
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    outside = {name: [port for port in ports if not port.startswith("127.0.0.1:")] for name, ports in published.items()}

    assert outside == {"proxy": ["80:80", "443:443", "443:443/udp"], "prometheus": []}


def test_prometheus_holds_no_key_of_an_administrator() -> None:
    """It reads the gateway with a key that opens the metrics alone."""
    assert SERVICES["prometheus"]["secrets"] == ["metrics_key", "engine_secret"]
    assert [each["environment"] for each in COMPOSE["secrets"].values()] == ["TOLLGATE_METRICS_KEY", "ENGINE_SECRET"]
    assert "admin" not in (ROOT / "deploy" / "prometheus.yml").read_text()


def test_the_script_of_the_roles_runs_apart() -> None:
    """The image of Postgres runs what may be executed, and would read another script into its own shell."""
    mounted = "./deploy/roles.sh:/docker-entrypoint-initdb.d/roles.sh:ro"

    assert mounted in SERVICES["postgres"]["volumes"]
    assert os.access(ROOT / "deploy" / "roles.sh", os.X_OK)


def test_postgres_logs_no_more_than_the_embedded_one() -> None:
    """What was said in a refused statement is in neither log."""
    command = ["postgres", *(word for name, value in QUIET.items() for word in ("-c", f"{name}={value}"))]

    assert SERVICES["postgres"]["command"] == command


class Gateway(BaseHTTPRequestHandler):
    """Answers everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[str]:
    """Where something answers in a gateway's place."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


HIDDEN = (
    *("/admin", "/admin/teams", "/ADMIN/teams", "/%61dmin/teams", "//admin/teams", "/v1/../admin/teams"),
    *("/console", "/console/", "/console/app.js"),
)


@pytest.mark.skipif(shutil.which("caddy") is None, reason="SKIPPED: no Caddy here to run deploy/Caddyfile")
@pytest.mark.parametrize(("operators", "status"), [("10.0.0.0/8", 404), ("10.0.0.0/8 127.0.0.1/32", 200)])
def test_the_proxy_shows_the_world_the_api_alone(gateway: str, tmp_path: Path, operators: str, status: int) -> None:
    """Console and administration are there for OPERATORS and on the loopback port; the metrics nowhere."""
    public, local = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    written = (ROOT / "deploy" / "Caddyfile").read_text()
    config = tmp_path / "Caddyfile"
    config.write_text(
        written.replace("gateway:8000", gateway)
        .replace("\n:8080 {", f"\n{local} {{")
        .replace("grace_period 90s", "admin off")
    )
    env = {**os.environ, "SITE": public, "OPERATORS": operators, "HOME": str(tmp_path)}
    proxy = subprocess.Popen(
        ["caddy", "run", "--config", config, "--adapter", "caddyfile"], env=env, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: answers(local))
        at_public, at_local = ({path: raw_get(url, path) for path in HIDDEN} for url in (public, local))

        assert at_public == dict.fromkeys(HIDDEN, status)
        assert at_local == dict.fromkeys(HIDDEN, 200)
        assert (raw_get(public, "/v1/models"), raw_get(public, "/health/ready")) == (200, 200)
        assert (raw_get(public, "/metrics"), raw_get(local, "/metrics")) == (404, 404)
    finally:
        proxy.terminate()
        proxy.wait(10)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def raw_get(url: str, path: str) -> int:
    """Ask for a path as it is written: a client's library would make it plain first."""
    done = httpx.Client(transport=httpx.HTTPTransport()).send(
        httpx.Request("GET", httpx.URL(url).copy_with(raw_path=path.encode()))
    )
    return done.status_code


def test_the_caddyfile_hides_what_is_for_administrators() -> None:
    """As written: both paths whole and with all below them, but for OPERATORS, and nobody by default."""
    text = (ROOT / "deploy" / "Caddyfile").read_text()
    site = text.split("{$SITE} {")[1].split("\n}")[0]

    assert re.search(r"path /admin /admin/\* /console /console/\*\n\s+not remote_ip \{\$OPERATORS\}", site)
    assert "respond @administration 404" in site
    assert SERVICES["proxy"]["environment"]["OPERATORS"] == "${OPERATORS:-127.0.0.1/32}"


DOCKER = """\
#!/bin/sh
case "$4" in
    prom/*) echo "no such host" >&2; exit 1;;
    *) printf 'sha256:%s\\n' "$(printf %s "$4" | sha256sum | cut -d' ' -f1)";;
esac
"""


def copied_pin(folder: Path) -> list[str | Path]:
    """Return the command that pins what was copied into ``folder``."""
    (folder / "deploy").mkdir()
    for name in ("compose.yaml", "Dockerfile", "deploy/pin.py"):
        shutil.copy(ROOT / name, folder / name)
    return [sys.executable, folder / "deploy" / "pin.py"]


def test_images_are_pinned_where_a_registry_answers(tmp_path: Path) -> None:
    """Each to its digest, once; what no registry answers for stays as it is and is named."""
    command = copied_pin(tmp_path)
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    first, second = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    services = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"]
    images = {name: service["image"] for name, service in services.items() if "build" not in service}

    assert {name for name, image in images.items() if re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image)} == {
        *("proxy", "postgres", "redis"),
    }
    assert images["prometheus"] == SERVICES["prometheus"]["image"]
    assert re.search(r"(?m)^ARG PYTHON=python:[\w.-]+@sha256:[0-9a-f]{64}$", (tmp_path / "Dockerfile").read_text())
    assert first.stdout == second.stdout
    assert f"SKIPPED: {images['prometheus']}" in first.stdout and "no such host" in first.stdout


def test_pinning_without_docker_changes_nothing(tmp_path: Path) -> None:
    """It says SKIPPED and why."""
    env, command = {**os.environ, "PATH": str(tmp_path)}, copied_pin(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout.count("SKIPPED") == 5
    assert all((tmp_path / name).read_bytes() == (ROOT / name).read_bytes() for name in ("compose.yaml", "Dockerfile"))
