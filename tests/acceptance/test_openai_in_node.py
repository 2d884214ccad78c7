# The same promises as test_openai_sdk.py, kept for OpenAI's package for Node. `make setup` installs it where npm is.

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

FOLDER = Path(__file__).parents[1] / "node"


def test_the_node_package_is_served(house: House, upstream: ScriptedUpstream) -> None:
    """Answers, streams, usage, the stream helper, responses, those in the background, a client that leaves, errors by
    class, vectors, models."""
    if (node := shutil.which("node")) is None:
        pytest.skip("SKIPPED: Node is not installed")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("SKIPPED: OpenAI's package is not in tests/node: npm install --prefix tests/node")
    upstream.forget()
    upstream.script("cut", model="large")
    command = [node, str(FOLDER / "openai_client.mjs"), house.url, house.team_key, "small", "large"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    violations = list(upstream.violations)
    upstream.forget()
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)

    assert seen["text"] and seen["text"] == seen["streamed"] == seen["helped"]
    assert (seen["usage"], seen["leftAfter"]) == (0, "chat.completion.chunk")
    assert seen["responses"][0] and seen["responses"][0] == seen["responses"][1]
    assert seen["responses"][2:] == ["completed", "response.created", "response.completed"]
    assert seen["behind"] == ["queued", 2, "response.completed", "completed", seen["responses"][0]]
    assert float(seen["cost"]) > 0 and len(seen["requestId"]) == 36
    assert seen["errors"] == {
        "broken": ["APIError", None, "upstream_error"],
        "unknown": ["NotFoundError", 404, "model_not_found"],
        "key": ["AuthenticationError", 401, "invalid_api_key"],
    }
    assert seen["vector"] > 0 and {"small", "large"} <= set(seen["models"])
    assert violations == []
