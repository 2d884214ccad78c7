# The official client and server of the Model Context Protocol (`pip install mcp==2.3.0 uvicorn` into PEERS/mcp), each
# a process of its own, with the gateway between.

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from gateway.core.settings import ALL_TOOLS, McpServer
from gateway.run.processes import free_port
from tests.support.audits import lasting_differences
from tests.support.house import House, running_house, settings_for
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

PYTHON = Path(os.environ.get("PEERS", ".")).absolute() / "mcp" / "bin" / "python"
PEER = str(Path(__file__).parents[1] / "support" / "mcp_peer.py")
CREDENTIAL = "mcp-credential-of-the-tests"

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"SKIPPED: no {PYTHON}; pip install mcp==2.3.0 uvicorn there"),
]


@contextlib.contextmanager
def running_server(kind: str) -> Iterator[str]:
    """Run the SDK's server, with sessions or without, and give its URL."""
    port = free_port()
    process = subprocess.Popen([str(PYTHON), PEER, "serve", str(port), kind])

    def answers() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/mcp").status_code == 401
        return process.poll() is not None

    try:
        until(answers)
        assert process.poll() is None, "the server did not start"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module", params=["stateless", "stateful"])
def house(request: Any, postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A gateway before the server."""
    with running_server(request.param) as url, database_of_its_own(postgres_url) as database:
        server = McpServer(
            name="tolls",
            url=url,
            headers={"authorization": f"Bearer {CREDENTIAL}"},
            tools=ALL_TOOLS,
            teams={"*": frozenset({"toll", "walk"})},
            price=to_nano("0.001"),
            prices={"walk": to_nano("0.01")},
        )
        with temporary_valkey() as valkey:
            settings = settings_for(database, valkey.url, "http://127.0.0.1:9/v1", tmp_path_factory.mktemp("data"))
            with running_house(replace(settings, mcp_servers={"tolls": server})) as house:
                yield house


@pytest.mark.parametrize(("mode", "version"), [("auto", "2026-07-28"), ("legacy", "2025-11-25")])
def test_the_official_client_lists_and_calls_tools(house: House, mode: str, version: str) -> None:
    """It sees the tools that the team may use, hears of their progress, and each call is booked at its price."""
    command = [str(PYTHON), PEER, "use", f"{house.url}/mcp/tolls", house.team_key, mode]
    with house.client() as client:
        before = client.get("/v1/usage").json()["cost_usd"]
        seen = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
        until(lambda: client.get("/v1/usage").json()["cost_usd"] == pytest.approx(before + 0.011))

    assert seen.pop("refusal").endswith("It may call: toll, walk.")
    assert seen == {
        "tools": ["toll", "walk"],
        "texts": ["6 coins", "there"],
        "progress": [1, 2, 3],
        "version": version,
    }
    assert lasting_differences(house.settings.database_url) == []
