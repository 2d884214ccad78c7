# Requests made up from our own OpenAPI document by schemathesis (`pip install schemathesis==4.32.5` into
# PEERS/schemathesis), with a team's key and an admin's: none is answered by a 500, every answer is as described.

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

SCHEMATHESIS = Path(os.environ.get("PEERS", ".")).absolute() / "schemathesis" / "bin" / "schemathesis"
# Streams without an end, and what would take the key away that all others are asked with.
LEFT_OUT = "/live$|^/v1/team/key/rotate$|^/metrics$"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
EXAMPLES = 20  # of an operation

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(1800),  # every operation: three minutes on a quiet machine
    pytest.mark.skipif(not SCHEMATHESIS.exists(), reason=f"SKIPPED: no {SCHEMATHESIS}"),
]


@pytest.mark.parametrize("whose", ["admin", "team"])
def test_any_request_gets_an_answer_as_described(
    house: House, upstream: ScriptedUpstream, whose: str, tmp_path: Path
) -> None:
    """Whatever is sent, also what no client would send."""
    key, paths = (house.admin_key, "^/admin/") if whose == "admin" else (house.team_key, "^/(v1|mcp|health)/")
    command = [str(SCHEMATHESIS), "run", house.url + "/openapi.json", "-H", f"authorization: Bearer {key}"]
    command += ["--include-path-regex", paths, "--exclude-path-regex", LEFT_OUT, "--checks", CHECKS, "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", f"{EXAMPLES}", "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    upstream.forget()

    assert ran.returncode == 0, ran.stdout
