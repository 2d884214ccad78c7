# The compliance suite of Open Responses (`git clone https://github.com/openresponses/openresponses` into PEERS, and
# `npm install bun zod@3 ws` into PEERS/openresponses): over HTTP, in streams, over a WebSocket; translated and native.

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.house import House, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

SUITE = Path(os.environ.get("PEERS", ".")).absolute() / "openresponses"
BUN = SUITE / "node_modules" / "@oven" / "bun-linux-x64" / "bin" / "bun"

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(
        not BUN.exists(),
        reason=f"SKIPPED: no {BUN}; clone openresponses/openresponses into PEERS, npm install bun zod@3 ws there",
    ),
]


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(models=("small", "gpt-5")) as upstream:
        yield upstream
    assert all("call_openresponses_missing" in one for one in upstream.violations)  # that is meant to fail


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    """A gateway with a model that is spoken to in chats, and one that is native."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        own = replace(settings.providers["upstream"], name="own", responses=True)
        models = {"small": model("small"), "native": model("native", "own", upstream_model="gpt-5")}
        with running_house(
            replace(settings, providers=settings.providers | {"own": own}, models=models, auto={}, aliases={})
        ) as house:
            yield house


@pytest.mark.parametrize("name", ["small", "native"])
def test_the_suite_passes(house: House, upstream: ScriptedUpstream, name: str) -> None:
    """Every test of it, none expected to fail."""
    upstream.forget()
    upstream.script("calls=true")
    command = [str(BUN), "run", "bin/compliance-test.ts", "--json"]
    command += ["--base-url", f"{house.url}/v1", "--api-key", house.team_key, "--model", name]
    done = subprocess.run(command, cwd=SUITE, capture_output=True, text=True, timeout=300, check=False)
    results = json.loads(done.stdout)["results"]

    assert [(one["id"], one["errors"]) for one in results if one["status"] != "passed"] == []
    assert len(results) >= 17
