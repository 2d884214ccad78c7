# Clients that a product team's programs are built with, beside the packages that test_openai_sdk, test_anthropic_sdk
# and test_openai_in_node drive: each asks for a word, a stream, a tool, an answer in a schema, and a model that is not
# there. Larger ones are in tests/peers/test_clients.py.

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import client_peers
from tests.support.house import House

FOLDER = Path(__file__).parents[1] / "node"
IN_PYTHON = ("openai_over_aiohttp", "huggingface_hub", "aisuite", "curl")
IN_NODE = ("anthropic_by_hand", "fetch", "openai_edge", "openai_fetch", "xsai")

pytestmark = pytest.mark.usefixtures("strict_upstream")


def check(heard: list[str], widths: list[Any], width: object) -> None:
    """Check what a client heard: the model's words twice, what it said after its tool, ``width``, and what failed."""
    plain, streamed, used, formed, refused = heard

    assert plain and plain == streamed
    assert used and widths == [3]
    assert json.loads(formed) == {"width": width}
    assert "no-such-model" in refused


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_client_in_python(house: House, name: str) -> None:
    """It says in Python what an answer, a stream, a tool, a schema and a refusal are."""
    if name == "curl" and shutil.which("curl") is None:
        pytest.skip("SKIPPED: curl is not installed")
    client_peers.WIDTHS.clear()
    heard = list(getattr(client_peers, name)(house.url, house.team_key, "small"))

    check(heard, client_peers.WIDTHS, 42)


def test_clients_in_node(house: House) -> None:
    """As in Python, all in one process."""
    if (node := shutil.which("node")) is None:
        pytest.skip("SKIPPED: Node is not installed")
    if not (FOLDER / "node_modules" / "@xsai").is_dir():
        pytest.skip("SKIPPED: the packages of tests/node are not there: npm install --prefix tests/node")
    command = [node, "clients.mjs", ",".join(IN_NODE), house.url, house.team_key, "small", "claude"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(IN_NODE)
    for one in lines:
        check(one["heard"], one["widths"], 0.5)
