# Clients that people point at a gateway, in Python and in Node, each set up as docs/clients.md says: a word, the same
# as a stream, and a task with a tool, through us. `python -m tests.peers.test_clients` prints how to get them.

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.audits import lasting_differences
from tests.support.house import House, anthropic_provider, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

PEERS = Path(os.environ.get("PEERS", ".")).absolute()
SUPPORT, NODE = Path(__file__).parents[1] / "support", Path(__file__).parents[1] / "node"
WORDS = "The gate opens at dawn."
OPENED = "It is open."
WIDE = '{"width":42}'  # a tool that must be called is called with that
LARGE: dict[str, Any] = {"context": 200_000, "max_output": 64_000}
# Some look for their prices, news or telemetry where no test goes.
QUIET = {"OTEL_SDK_DISABLED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "CREWAI_DISABLE_TELEMETRY": "true"}
THREE, TWO = [WORDS] * 3, [WORDS] * 2
# By the environment in PEERS/python: what is installed there; by its functions in client_peers.py: what they hear.
PYTHON: dict[str, tuple[str, dict[str, list[str]]]] = {
    "openai": ("openai==3.51.0", {"openai": THREE, "openai_responses": THREE}),
    "anthropic": ("anthropic==2.10.0", {"anthropic": THREE}),
    "instructor": ("instructor==1.17.0 anthropic", {"instructor": [WIDE] * 4}),
    "langchain": (
        "langchain-openai langchain-anthropic langgraph",
        dict.fromkeys(("langchain_openai", "langchain_responses", "langchain_anthropic"), THREE),
    ),
    "llama-index": ("llama-index-llms-openai-like", {"llama_index_openai_like": THREE}),
    "haystack": ("haystack-ai", {"haystack": THREE}),
    "pydantic-ai": (
        "pydantic-ai-slim[openai,anthropic]==2.62.0",
        dict.fromkeys(("pydantic_ai_chat", "pydantic_ai_responses", "pydantic_ai_anthropic"), THREE),
    ),
    "openai-agents": (
        "openai-agents==0.24.0",
        dict.fromkeys(("openai_agents_responses", "openai_agents_chat"), THREE),
    ),
    "litellm": ("litellm", dict.fromkeys(("litellm_openai", "litellm_anthropic"), THREE)),
    "smolagents": ("smolagents[openai]", {"smolagents": TWO}),
    "autogen": ("autogen-ext[openai] autogen-agentchat", {"autogen": THREE}),
    "semantic-kernel": ("semantic-kernel", {"semantic_kernel": THREE}),
    "dspy": ("dspy", {"dspy": [WORDS]}),
    "outlines": ("outlines openai", {"outlines": TWO}),
    "llm": ("llm", {"llm": THREE}),
    "agno": ("agno openai", {"agno": THREE}),
    "strands": ("strands-agents[openai]", {"strands": TWO}),
    "crewai": ("crewai", {"crewai": [WORDS, WORDS, OPENED]}),
    "griptape": ("griptape", {"griptape": TWO}),
    "any-llm": ("any-llm-sdk[openai]", {"any_llm": THREE}),
    "chatlas": ("chatlas openai anthropic", {"chatlas": THREE * 3}),
    "inspect-ai": ("inspect-ai openai anthropic", {"inspect_ai": TWO * 2}),
    "together": ("together", {"together": THREE}),
    "openai-swarm": ("openai-swarm", {"swarm": THREE}),
    "shell-gpt": ("shell-gpt click", {"shell_gpt": [WORDS]}),
    "httpie": ("httpie", {"httpie": TWO}),
}
# Those whose tool is not asked for, or whose calls we make ourselves.
NO_TOOLS = {"instructor", "smolagents", "dspy", "outlines", "griptape", "shell_gpt", "httpie", "llamaindex"}
# In PEERS/node, by their functions in clients.mjs.
PACKAGES = """openai@7.55.0 @anthropic-ai/sdk@1.10.0 @openai/agents@0.20.0 ai@7.0.173 @ai-sdk/openai@4.0.118
@ai-sdk/anthropic@4.0.105 @ai-sdk/openai-compatible@3.0.92 @langchain/core @langchain/openai@1.6.0
@langchain/anthropic@1.5.11 @mastra/core@1.71.0 genkit@1.42.0 @genkit-ai/compat-oai@1.42.0 llamaindex@0.12.1
@llamaindex/openai@0.4.23 zod"""
IN_NODE = {
    "openai": "openai",
    "openai_responses": "openai",
    "anthropic": "@anthropic-ai/sdk",
    "ai_compatible": "@ai-sdk/openai-compatible",
    "ai_openai_responses": "@ai-sdk/openai",
    "ai_openai_chat": "@ai-sdk/openai",
    "ai_anthropic": "@ai-sdk/anthropic",
    "langchain_openai": "@langchain/openai",
    "langchain_anthropic": "@langchain/anthropic",
    "agents_responses": "@openai/agents",
    "agents_chat": "@openai/agents",
    "mastra": "@mastra/core",
    "genkit": "@genkit-ai/compat-oai",
    "llamaindex": "@llamaindex/openai",
}

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(models=("gpt-4o", "claude-sonnet-4-5")) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    """A gateway with the models that clients take for known ones."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        providers = settings.providers | {"anthropic": anthropic_provider(upstream.root_url)}
        models = {
            "gpt-4o": model("gpt-4o", **LARGE),
            "claude-sonnet-4-5": model("claude-sonnet-4-5", "anthropic", **LARGE),
        }
        with running_house(replace(settings, providers=providers, models=models, auto={}, aliases={})) as house:
            yield house
            assert lasting_differences(database_url) == []


def heard_by(house: House, upstream: ScriptedUpstream, folder: Path, *command: str) -> dict[str, Any]:
    """Return what a client heard, and how wide its tool was told to open; everything that it asked went well."""
    upstream.forget()
    upstream.script(f"text={WORDS}")
    env = {"HOME": str(folder), "PATH": os.environ["PATH"], **QUIET}
    done = subprocess.run(
        [*command, house.url, house.team_key],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert upstream.violations == [] and upstream.requests
    with house.client() as client:
        calls = client.get("/v1/calls?limit=200").raise_for_status().json()["data"]
    assert {call["code"] for call in calls if call["status"] == "refused"} <= {"unsupported_parameter"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, (_, asked) in PYTHON.items() for name in asked])
def test_a_client_in_python(house: House, upstream: ScriptedUpstream, tmp_path: Path, place: str, name: str) -> None:
    """It hears the model's words, whole and streamed, and its tool is called with what the model said."""
    python = PEERS / "python" / place / "bin" / "python"
    if not python.exists():
        pytest.skip(f"SKIPPED: no {python}; pip install {PYTHON[place][0]} there")
    seen = heard_by(house, upstream, tmp_path, str(python), "-P", str(SUPPORT / "client_peers.py"), name)

    assert seen["heard"] == PYTHON[place][1][name]
    assert set(seen["widths"]) == (set() if name in NO_TOOLS else {3})


@pytest.mark.parametrize("name", IN_NODE)
def test_a_client_in_node(house: House, upstream: ScriptedUpstream, tmp_path: Path, name: str) -> None:
    """As in Python."""
    modules, node = PEERS / "node" / "node_modules", which("node")
    if node is None or not (modules / IN_NODE[name]).exists():
        pytest.skip(f"SKIPPED: no {modules / IN_NODE[name]}; npm install {IN_NODE[name]} zod into PEERS/node")
    (tmp_path / "node_modules").symlink_to(modules)
    seen = heard_by(house, upstream, tmp_path, node, str(NODE / "clients.mjs"), name)

    assert seen["heard"] == (TWO if name in NO_TOOLS else THREE)
    assert set(seen["widths"]) == (set() if name in NO_TOOLS else {3})


if __name__ == "__main__":
    for place, (packages, _) in PYTHON.items():
        print(f"python3 -m venv $PEERS/python/{place} && $PEERS/python/{place}/bin/pip install {packages}")
    print(f"npm install --legacy-peer-deps --prefix $PEERS/node {' '.join(PACKAGES.split())}")
