# What pages tell people to type: every `tollgate` line is one that the command line takes, the blocks of the pages for
# callers run as they stand, and each alert has its paragraph.

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import gateway.cli
from tests.support.forked_commands import forked_commands
from tests.support.house import House
from tests.support.paying_team import PayingTeam
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(page for page in DOCS.rglob("*.md") if "experiments" not in page.parts)]
SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r'(?:\bcode ?= ?|_Faulty\()"(\w+)"(?: if .*? else "(\w+)")?')  # of an error, or of a line in a batch
# What a line reads of the gateway: without a body, a method of its own, or an id that only its reader has.
READ = re.compile(
    r"^curl (?!.*(?:-X|-d|-F) )(?!.*/mcp/).*?(?:\$URL|\$TOLLGATE(?:_URL)?|http://127\.0\.0\.1:8000)(/[^\s\"]+)"
)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def typed(page: Path) -> Iterator[str]:
    """Yield the lines that a page tells to type, those that go on joined, without what is said of them."""
    for block in SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            yield from (part.strip() for part in re.split(r"&&|\|", re.sub(r"\s#\s.*$", "", line)))


def complaint(command: Any, words: list[str]) -> str | None:
    """Return what the command line says against some words, without doing what they say."""
    while hasattr(command, "commands"):
        name = next((word for word in words if not word.startswith("-")), None)
        if name is None:
            return None if words or command.invoke_without_command else "names no command"
        if name not in command.commands:
            return f"no command {name}"
        command, words = command.commands[name], words[words.index(name) + 1 :]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown else None


@pytest.fixture(scope="module")
def command_line() -> Any:
    """Every command, as main() has them."""
    if not any(command.name == "doctor" for command in gateway.cli.app.registered_commands):
        gateway.cli.add_commands()
    return typer.main.get_command(gateway.cli.app)


def test_every_command_of_the_pages_is_one(command_line: Any) -> None:
    """No page tells of a command or an option that is not there."""
    lines = [(page.name, line) for page in PAGES for line in typed(page) if line.startswith("tollgate ")]
    wrong = [
        f"{name}: {line}: {said}"
        for name, line in lines
        if (said := complaint(command_line, shlex.split(re.sub(r"[<>].*|…", "", line))[1:])) is not None
    ]

    assert len(lines) > 60
    assert wrong == []


def test_a_command_that_is_none_is_found(command_line: Any) -> None:
    """An unknown command, an unknown command of a group, an unknown option."""
    assert complaint(command_line, ["teems", "list"]) == "no command teems"
    assert complaint(command_line, ["batch", "lost"]) == "no command lost"
    assert complaint(command_line, ["calls", "--limits", "3"]) == "no option --limits"
    assert complaint(command_line, ["batch", "submit", "x.jsonl", "--wait"]) is None


@pytest.fixture
def shell(house: House, tmp_path: Path) -> Iterator[Any]:
    """Runs a block of a page against the house, as a team that has made a call."""
    team = PayingTeam(house)
    with house.client(team.key) as client:
        said = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
        request_id = client.post("/v1/chat/completions", json=said).raise_for_status().headers["x-request-id"]
        until(lambda: client.get(f"/v1/calls/{request_id}").status_code == 200)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "URL": house.url, "KEY": team.key}
    env |= {"ADMIN_KEY": house.admin_key, "REQUEST_ID": request_id, "TOLLGATE_URL": house.url, "TOLLGATE_KEY": team.key}

    def run(block: str) -> subprocess.CompletedProcess[str]:
        block = re.sub(r"^export URL=.*\n", "", block).replace("http://127.0.0.1:8000", house.url)
        return subprocess.run(
            ["bash", "-ec", block], env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
        )

    with forked_commands(tmp_path):
        yield run


@pytest.mark.parametrize("name", ["call-it.md"])
def test_the_commands_of_a_page_run_as_they_stand(shell: Any, name: str) -> None:
    """Each block of a page for callers ends without an error, and every answer is one."""
    for block in SHELL.findall((DOCS / name).read_text()):
        done = shell(block)
        assert done.returncode == 0, (block, done.stderr)
        assert '"error"' not in done.stdout and done.stdout, done.stdout


def test_what_pages_read_by_curl_is_answered(house: House) -> None:
    """Each path with its query that a page asks for without a body: none is unknown, and no value is refused."""
    team = PayingTeam(house)
    team.ask()
    team.settled()
    with house.client(team.key) as client, house.client(house.admin_key) as admin:
        (call,) = client.get("/v1/calls").raise_for_status().json()["data"]
        asked = {
            (re.sub(r"\$?REQUEST_ID", call["request_id"], match[1]).replace("search", team.id), "$KEY" in match.string)
            for page in PAGES
            for match in filter(None, map(READ.search, typed(page)))
        }
        answers = [(client if is_teams else admin).get(path) for path, is_teams in asked]

    assert len(answers) > 12
    assert {str(answer.url): answer.text[:300] for answer in answers if answer.status_code != 200} == {}


def test_the_python_of_the_page_for_callers_runs(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten lines in each dialect, with the URL and the key of a deployment."""
    for block in PYTHON.findall((DOCS / "call-it.md").read_text()):
        exec(compile(block, "call-it.md", "exec"), {"URL": house.url, "KEY": house.team_key})
        assert "tokens=" in capsys.readouterr().out


def test_codes_of_errors_are_those_of_the_code() -> None:
    """Each code that the gateway says is in a table with what to do, and each that a table has is one of them."""
    rows = "".join((DOCS / page).read_text() for page in ("call-it.md", "operations/admin-keys.md"))
    told = {code for row in re.findall(r"^\| \d+ \| (`.*?`) \|", rows, re.M) for code in re.findall(r"`(\w+)`", row)}
    folders = ("gateway", "protocol", "billing", "router")
    code = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    said = {name for names in CODE.findall(code) for name in names if name}

    assert len(said) > 80 and said - told == set()
    assert {name for name in told if f'"{name}"' not in code} == {"key_expired", "key_revoked"}  # of a key's status


def test_each_alert_has_its_paragraph_in_the_runbook() -> None:
    """What it means, where to look, what to do; and no paragraph is of an alert that is gone."""
    rules = [
        rule
        for group in yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    sections = re.findall(
        r"^## (\w+)\n\n(.+?)\n\n```sh\n(.+?)```\n\n(.+?)(?=\n## |\Z)",
        (DOCS / "operations" / "runbook.md").read_text(),
        re.M | re.S,
    )

    assert sorted(name for name, *_ in sections) == sorted(rule["alert"] for rule in rules if "alert" in rule)
    assert all(all(part.strip() for part in parts) for parts in sections)


def test_the_demo_of_the_readme_is_python_that_runs(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    """The snippet of the front page, with the key and the address of a deployment."""
    (block,) = PYTHON.findall((ROOT / "README.md").read_text())
    exec(block.replace("http://127.0.0.1:8000", house.url).replace("tg-…", house.team_key), {})

    assert "CompletionUsage" in capsys.readouterr().out
