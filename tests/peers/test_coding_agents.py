# The coding agents that people point at a gateway, as their makers ship them (npm install them into PEERS/clis, as a
# skipped test says): each runs a task with a tool through us, set up as docs/clients.md says.

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from gateway.http.websocket.session import ResponseSession
from tests.support.house import House, anthropic_provider, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

CLIS = Path(os.environ.get("PEERS", ".")) / "clis" / "node_modules" / ".bin"
WORDS = "The gate opens at dawn."
LARGE: dict[str, Any] = {"context": 200_000, "max_output": 64_000}
CODEX = """\
model = "MODEL"
model_provider = "tollgate"
web_search = "WEB"
[model_providers.tollgate]
name = "Tollgate"
base_url = "URL/v1"
env_key = "TOLLGATE_KEY"
wire_api = "responses"
"""
begin = ResponseSession.begin
PAGE = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 99 99] >>"
OBJECTS = (b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>", PAGE)

pytestmark = pytest.mark.peers


def cli(name: str) -> str:
    """Return the path of a command, or skip."""
    if not (CLIS / name).exists():
        packages = "@openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.330 @qwen-code/qwen-code@0.24.4"
        packages += " opencode-ai@1.18.33 @mariozechner/pi-coding-agent@0.73.1"
        pytest.skip(f"SKIPPED: no {CLIS / name}; npm install {packages} into PEERS/clis")
    return str((CLIS / name).absolute())


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(models=("small", "claude", "gpt-5-codex")) as upstream:
        yield upstream
    assert upstream.violations == []


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        own = replace(settings.providers["upstream"], name="own", responses=True)
        claude = model("claude", "anthropic", **LARGE)
        price = replace(claude.price, web_search=to_nano("0.01"), cache_write_1h=to_nano(2))
        models = {"claude": replace(claude, price=price), "small": model("small", **LARGE)}
        models["gpt-5-codex"] = model("gpt-5-codex", "own", **(LARGE | {"price": replace(price, cache_write_1h=None)}))
        providers = settings.providers | {"anthropic": anthropic_provider(upstream.root_url), "own": own}
        with running_house(replace(settings, providers=providers, models=models)) as house:
            yield house


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to work in, with something to read."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "toll.txt").write_text(WORDS)
    (folder / "toll.pdf").write_bytes(pdf())
    return folder


def pdf() -> bytes:
    """Return an empty page."""
    body, places = b"%PDF-1.4\n", list[int]()
    for number, what in enumerate(OBJECTS, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, what)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(places) + 1)
    end = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(places) + 1, len(body))
    return body + head + table + end


def run(folder: Path, *command: str, **environment: str) -> list[dict[str, Any]]:
    """Run a command at home nowhere; return the events that it printed."""
    env = {"HOME": str(folder.parent), "PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def claude(house: House, folder: Path, task: str) -> list[dict[str, Any]]:
    command = [cli("claude"), "-p", task, "--output-format", "stream-json", "--verbose", "--max-turns", "4"]
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
    return run(
        folder,
        *command,
        "--allowedTools",
        "Read",
        ANTHROPIC_BASE_URL=house.url,
        ANTHROPIC_AUTH_TOKEN=house.team_key,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **dict.fromkeys(names, "claude"),
    )


def refused(house: House) -> list[dict[str, Any]]:
    """Return the team's calls that were refused."""
    with house.client() as client:
        listed = client.get("/v1/calls?limit=200").raise_for_status().json()["data"]
    return [call for call in listed if call["status"] == "refused"]


@pytest.mark.parametrize("name", ["toll.txt", "toll.pdf"])
def test_claude_code_reads_a_file(house: House, upstream: ScriptedUpstream, folder: Path, name: str) -> None:
    """By its own tool, thinking: what it read goes back to the model, a PDF as a document."""
    upstream.forget()
    upstream.script("tokens=5,thinking=Let me look.")
    path = json.dumps({"file_path": str(folder / name)})
    events = claude(house, folder, f"Use Read {path}")
    end = events[-1]
    read = json.dumps([seen.body for seen in upstream.requests])

    assert (end["type"], end["is_error"], end["subtype"]) == ("result", False, "success")
    assert end["num_turns"] == 2 and len(end["result"].split()) >= 4
    assert (WORDS if name.endswith("txt") else '"media_type": "application/pdf"') in read
    assert '"signature": "scripted-' in read  # its thinking went back
    assert refused(house) == []


def opencode(house: House, folder: Path, task: str) -> list[dict[str, Any]]:
    options = {"baseURL": f"{house.url}/v1", "apiKey": house.team_key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"small": {"name": "small"}}}
    settings = {"model": "tollgate/small", "small_model": "tollgate/small", "provider": {"tollgate": provider}}
    (folder / "opencode.json").write_text(json.dumps(settings | {"autoupdate": False, "share": "disabled"}))
    return run(folder, cli("opencode"), "run", "--format", "json", task, OPENCODE_DISABLE_MODELS_FETCH="1")


def pi(house: House, folder: Path, task: str) -> list[dict[str, Any]]:
    known = {"id": "small", "name": "small", "contextWindow": 128_000, "maxTokens": 4096, "input": ["text"]}
    known |= {"reasoning": False, "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0)}
    provider = {"baseUrl": f"{house.url}/v1", "apiKey": house.team_key, "api": "openai-completions", "models": [known]}
    (folder.parent / ".pi" / "agent").mkdir(parents=True)
    (folder.parent / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"tollgate": provider}}))
    command = (cli("pi"), "--provider", "tollgate", "--model", "small", "--mode", "json", "-p", task)
    return run(folder, *command, PI_OFFLINE="1")


def qwen(house: House, folder: Path, task: str) -> list[dict[str, Any]]:
    where = {"OPENAI_BASE_URL": f"{house.url}/v1", "OPENAI_API_KEY": house.team_key, "OPENAI_MODEL": "small"}
    command = (cli("qwen"), "--auth-type", "openai", "-y", "--output-format", "stream-json", "-p", task)
    return run(folder, *command, **where)


@pytest.mark.parametrize(
    ("agent", "tool", "field"), [(opencode, "read", "filePath"), (pi, "read", "path"), (qwen, "read_file", "file_path")]
)
def test_an_agent_in_chats_reads_a_file(
    house: House, upstream: ScriptedUpstream, folder: Path, agent: Any, tool: str, field: str
) -> None:
    """By its own tool: what it read goes back to the model, whose words end the task."""
    upstream.forget()
    upstream.script("text=It opens early.")
    events = agent(house, folder, f"Use {tool} " + json.dumps({field: str(folder / "toll.txt")}))
    sent = [each for request in upstream.requests for each in (request.body or {})["messages"]]

    assert "It opens early." in json.dumps(events)
    assert any(each["role"] == "tool" and WORDS in json.dumps(each["content"]) for each in sent)
    assert refused(house) == []


@pytest.mark.parametrize("name", ["small", "gpt-5-codex"])
@pytest.mark.parametrize("over", ["http", "a websocket"])
def test_codex_runs_a_command(
    house: House,
    upstream: ScriptedUpstream,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    over: str,
    name: str,
) -> None:
    """By its own tool, over the Responses API: what it printed goes back to the model, where that is native with what
    it thought."""
    upstream.forget()
    is_native = name != "small"
    upstream.script("tokens=5,thinking=Let me look." if is_native else "tokens=5")
    begun: list[Any] = []
    monkeypatch.setattr(ResponseSession, "begin", lambda session, caller: begun.append(begin(session, caller)))
    (tmp_path / ".codex").mkdir()
    config = (
        CODEX.replace("URL", house.url).replace("MODEL", name).replace("WEB", "live" if is_native else "disabled")
        + f"supports_websockets = {str(over != 'http').lower()}\n"
    )
    (tmp_path / ".codex" / "config.toml").write_text(config)
    task = 'Use exec_command {"cmd": "cat toll.txt"}'
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    events = run(folder, cli("codex"), "exec", *flags, task, TOLLGATE_KEY=house.team_key)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (ran,) = (item for item in items if item["type"] == "command_execution")
    said = [item["text"] for item in items if item["type"] == "agent_message"]

    assert (ran["exit_code"], ran["aggregated_output"]) == (0, WORDS)
    assert said and events[-1]["type"] == "turn.completed"
    sent = (upstream.requests[-1].body or {})["input" if is_native else "messages"]
    assert WORDS in json.dumps(sent[-1])
    assert is_native == any(tool["type"] == "web_search" for tool in (upstream.requests[-1].body or {})["tools"])
    assert is_native == any(item.get("encrypted_content", "").startswith("sealed-rs_up") for item in sent)
    assert bool(begun) == (over != "http")
    assert refused(house) == []
