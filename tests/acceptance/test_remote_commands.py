# `tollgate` on another machine: what it keeps, what it asks of a gateway over HTTP, and how it prints.

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import text
from typer.testing import CliRunner

import gateway.cli
from billing.core.records import Status
from gateway.storage.database import Database
from gateway.terminal import remote_gateway
from tests.support.house import House
from tests.support.paying_team import PayingTeam
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_scripts import Script
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with no deployment on it, no login and a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TOLLGATE_CONFIG", "TOLLGATE_URL", "TOLLGATE_KEY", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    """Put every command in place, as main() does."""
    if not any(command.name == "chat" for command in gateway.cli.app.registered_commands):
        gateway.cli.add_commands()


@pytest.fixture
def team(house: House) -> PayingTeam:
    """A team that no other test uses."""
    return PayingTeam(house, usd_per_day=2)


@pytest.fixture(autouse=True)
def _forget(upstream: ScriptedUpstream) -> Iterator[None]:
    yield
    upstream.forget()


def tollgate(*words: str, exits: int = 0, said: str | None = None) -> Result:
    result = CliRunner().invoke(gateway.cli.app, list(words), input=said)
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def log_in(house: House, key: str) -> Result:
    return tollgate("login", "--url", f"{house.url}/v1/", said=f"{key}\n")


def as_json(*words: str) -> Any:
    return json.loads(tollgate(*words, "--format", "json").stdout)


def rows(result: Result) -> list[dict[str, str]]:
    """Return what a command printed into a pipe: lines with tabs, the first with the columns' names."""
    head, *lines = (line.split("\t") for line in result.stdout.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_a_login_is_kept_for_its_owner_alone_and_never_shown(house: House, team: PayingTeam, tmp_path: Path) -> None:
    """A team's key and an admin's stand side by side; commands then need neither URL nor key; `logout` forgets."""
    told = log_in(house, team.key).output + log_in(house, house.admin_key).output
    kept = tmp_path / "config" / "tollgate" / "login.json"
    mode, content = kept.stat().st_mode & 0o777, json.loads(kept.read_bytes())
    own, all_teams = rows(tollgate("limits")), tollgate("audit-log", "--limit", "1")
    tollgate("logout")

    assert (mode, content["url"]) == (0o600, house.url)
    assert (content["team_key"], content["admin_key"]) == (team.key, house.admin_key)
    assert team.key_id in told and team.key not in told and house.admin_key not in told
    assert own[0]["scope"] == f"team {team.id}" and len(rows(all_teams)) == 1
    assert not kept.exists() and "tollgate login" in tollgate("models", exits=2).stderr


def test_a_login_that_is_not_accepted_is_not_kept(house: House, tmp_path: Path) -> None:
    """A wrong key exits 3, and what is no URL 2; a file that others can read is refused."""
    assert "does not accept the key" in tollgate("login", "--url", house.url, said="tg-wrong\n", exits=3).stderr
    assert "URL of a gateway" in tollgate("login", "--url", "ftp://gate", said="tg-1\n", exits=2).stderr
    assert not (tmp_path / "config").exists()

    log_in(house, house.team_key)
    (tmp_path / "config" / "tollgate" / "login.json").chmod(0o644)

    assert "chmod 600" in tollgate("models", exits=1).stderr


def test_the_nearer_word_counts(house: House, team: PayingTeam, monkeypatch: pytest.MonkeyPatch) -> None:
    """--url and --key before the environment, that before the stack of this folder, that before the login."""
    log_in(house, house.team_key)
    Path(".tollgate").mkdir()
    secrets = {"admin_key": house.admin_key, "team_key": team.key, "port": int(house.url.rpartition(":")[2])}
    Path(".tollgate/secrets.json").write_text(json.dumps(secrets | {"key_pepper": "unused"}))

    whose = [tollgate("limits", "--format", "json").stdout]
    monkeypatch.setenv("TOLLGATE_URL", house.url)
    whose.append(tollgate("limits", "--format", "json").stdout)  # the login's key: it is of this URL
    monkeypatch.setenv("TOLLGATE_KEY", team.key)
    whose.append(tollgate("limits", "--format", "json").stdout)
    whose.append(tollgate("limits", "--url", house.url, "--key", house.team_key, "--format", "json").stdout)

    assert [json.loads(each)["id"] for each in whose] == [team.id, house.team_id, team.id, house.team_id]


async def age(house: House, key_id: str) -> None:
    """Make a key one that was last used a month ago; the one it was rotated from has ended."""
    database = Database(house.settings.database_url)
    async with database.begin() as connection:
        old = text("UPDATE api_keys SET last_used_at = now() - interval '31 days' WHERE id = :key_id")
        await connection.execute(old, {"key_id": key_id})
    await database.close()


def test_teams_and_keys_are_looked_after_from_anywhere(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an admin key, without the database: what was made works at once, what was ended ends, lists are whole; a
    deployment at hand is changed in place of a gateway that only the environment names."""
    monkeypatch.setattr(remote_gateway, "PAGE", 1)
    log_in(house, house.admin_key)
    limits = ("--usd-per-day", "1.50", "--model-limit", "small:usd_per_month=7")
    made = as_json("teams", "create", "afar", *limits)
    tollgate("teams", "set", "afar", "--usd-per-day", "none", "--weight", "2")
    first = as_json("keys", "create", "--team", "afar", "--name", "one", "--expires", "90d")
    (told,) = rows(tollgate("keys", "rotate", first["key_id"], "--overlap", "0s"))
    second = told["key"]
    admin = as_json("admin-keys", "create", "--role", "viewer", "--name", "afar")
    with house.client(first["key"]) as client:
        ended = client.get("/v1/team").status_code
    with house.client(second) as client:
        seen = client.get("/v1/team").json()
    keys, teams = rows(tollgate("keys", "list", "--team", "afar")), rows(tollgate("teams", "list"))
    shown, admin_keys = as_json("teams", "show", "afar"), rows(tollgate("admin-keys", "list"))
    again = tollgate("teams", "create", "afar", exits=1).stderr
    unsaid = tollgate("teams", "delete", "afar", exits=1).stderr
    fresh = {key["key_id"] for key in rows(tollgate("keys", "list", "--unused-days", "30"))}
    asyncio.run(age(house, told["key_id"]))
    unused = [key["key_id"] for key in rows(tollgate("keys", "list", "--unused-days", "30", "--team", "afar"))]
    is_ended = as_json("admin-keys", "revoke", admin["key_id"])["status"], as_json("keys", "revoke", keys[0]["key_id"])
    forbidden = tollgate("teams", "list", "--url", house.url, "--api-key", house.team_key, exits=3).stderr
    gone = as_json("teams", "delete", "afar", "--yes", "--reason", "no longer")
    [entry] = as_json("audit-log", "--team", "afar", "--action", "team.deleted")["data"]
    its_limits, left = tollgate("limits", "afar"), {key["team_id"] for key in rows(tollgate("keys", "list"))}
    config = tmp_path / "tollgate.yaml"
    config.write_text("nothing: true")
    monkeypatch.setenv("TOLLGATE_URL", house.url)
    monkeypatch.setenv("TOLLGATE_CONFIG", str(config))
    at_hand = tollgate("teams", "list", exits=1).stderr

    assert (made["limits"]["usd_per_day"], made["model_limits"]["small"]["usd_per_month"]) == (1.5, 7)
    assert (ended, seen["id"], seen["limits"]["usd_per_day"], shown["weight"]) == (401, "afar", None, 2)
    assert (told["replaces"], told["team_id"]) == (first["key_id"], "afar") and first["expires_at"] is not None
    assert [key["name"] for key in keys] == ["one", "one"] and {"afar", house.team_id} <= {team["id"] for team in teams}
    assert admin["key_id"] in [key["key_id"] for key in admin_keys] and "afar" in again
    assert (is_ended[0], is_ended[1]["status"]) == ("revoked", "revoked")
    assert "teams delete afar --yes" in unsaid and gone["deleted_at"] is not None and entry["reason"] == "no longer"
    assert "was deleted" in its_limits.stdout and "suspended" not in its_limits.stdout
    assert told["key_id"] not in fresh and unused == [told["key_id"]]
    assert "afar" not in left and house.team_id in left
    assert "needs an admin key" in forbidden and "nothing" in at_hand


def test_models_are_listed_with_prices(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tabs into a pipe, as a table on a wide terminal, one under another on a narrow one."""
    where = ("--url", house.url, "--key", house.team_key)
    small = next(row for row in rows(tollgate("models", *where)) if row["id"] == "small")
    monkeypatch.setenv("COLUMNS", "200")
    wide = tollgate("models", *where).stdout
    monkeypatch.setenv("COLUMNS", "40")
    narrow = tollgate("models", *where).stdout

    assert (small["owned_by"], small["input"], small["output"], small["context"]) == (
        *("upstream", "1.00", "2.00", "8192"),
    )
    assert any(line.split()[:4] == ["small", "upstream", "1.00", "2.00"] for line in wide.splitlines())
    assert ["id", "small"] in [line.split() for line in narrow.splitlines()]
    assert ["max", "output", "1024"] in [line.split() for line in narrow.splitlines()]


def test_a_question_is_answered_with_its_cost(house: House, team: PayingTeam, upstream: ScriptedUpstream) -> None:
    """The words go to standard output, which model and what it cost to standard error; a pipe may ask, too."""
    upstream.script(Script(text="Grüezi mitenand"))
    where = ("--url", house.url, "--key", team.key)
    asked, piped = tollgate("chat", "small", "Hi", *where), tollgate("chat", "small", *where, said="Hi")
    wrong = tollgate("chat", "smal", "Hi", *where, exits=1)

    assert asked.stdout == piped.stdout == "Grüezi mitenand\n"
    assert asked.stderr.startswith("small, ") and " out, $0.0000" in asked.stderr
    assert "model_not_found" in wrong.stderr and "request " in wrong.stderr


def test_a_conversation_goes_on_after_ctrl_c(house: House, team: PayingTeam, upstream: ScriptedUpstream) -> None:
    """At a terminal: an answer that is stopped ends alone, what was said is sent along, escape codes are not obeyed."""
    upstream.script(Script(text="one \x1b[31mtwo"), times=1)
    env = {**os.environ, "TOLLGATE_URL": house.url, "TOLLGATE_KEY": team.key, "TERM": "dumb"}
    main, side = pty.openpty()
    command = [sys.executable, "-m", "gateway.cli", "chat", "small", "--system", "Be short."]
    child = subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, env=env, start_new_session=True, preexec_fn=_own_terminal
    )
    os.close(side)
    seen = bytearray()

    def reads(words: str) -> None:
        give_up = time.monotonic() + 30
        while words.encode() not in seen:
            assert time.monotonic() < give_up, seen
            seen.extend(os.read(main, 4096))
        del seen[: seen.index(words.encode()) + len(words)]

    try:
        reads("small> ")
        os.write(main, b"first\n")
        reads("one  [31mtwo")
        reads("small> ")
        upstream.script(Script(tokens=500, pace=0.05), times=1)
        os.write(main, b"second\n")
        until(lambda: upstream.requests[-1].tokens_sent > 3)
        os.write(main, b"\x03")
        reads("stopped")
        reads("small> ")
        os.write(main, b"third\n")
        reads("$0.")
        os.write(main, b"/quit\n")
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()
        os.close(main)
    sent: Any = [
        [message["content"] for message in each.body["messages"]] for each in upstream.requests[-3:] if each.body
    ]
    assert sent[0] == ["Be short.", "first"] and sent[1] == ["Be short.", "first", "one \x1b[31mtwo", "second"]
    assert sent[2][:4] == sent[1] and sent[2][-1] == "third"


def _own_terminal() -> None:
    """Make the terminal on standard input this session's, so that it sends signals."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_calls_are_found_and_explained(house: House, team: PayingTeam) -> None:
    """Those of the key's team, or, with an admin key, of any; another team's call is not found."""
    own, admin = ("--url", house.url, "--api-key", team.key), ("--url", house.url, "--api-key", house.admin_key)
    tollgate("teams", "set", team.id, "--contents-days", "7", *admin)
    with house.client(team.key) as client:
        said = {"model": "small", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        request_id = client.post("/v1/chat/completions", json=said).raise_for_status().headers["x-request-id"]
        until(lambda: client.get(f"/v1/calls/{request_id}").status_code == 200)
        until(lambda: client.get(f"/v1/calls/{request_id}/contents").status_code == 200)
    listed, of_any = rows(tollgate("calls", *own)), rows(tollgate("calls", "--team", team.id, *admin))
    told = tollgate("explain", request_id, *own).stdout
    kept = json.loads(tollgate("explain", request_id, "--contents", "--url", house.url, "--key", team.key).stdout)

    assert kept["request"]["messages"][0]["content"] == "Hi" and kept["answer"]["choices"]
    assert [row["request_id"] for row in listed] == [request_id] and listed == of_any
    assert f"{'model_used':18} small" in told.splitlines() and f"{'held':18}" in told
    assert (
        "call_not_found" in tollgate("explain", request_id, "--url", house.url, "--key", house.team_key, exits=1).stderr
    )
    assert "its own team alone" in tollgate("calls", "--team", house.team_id, *own, exits=1).stderr
    unasked = tollgate("explain", team.book(status=Status.FAILED, total_ms=3.0), *own).stdout
    assert "none: the call ended before an upstream was asked" in unasked and "Attempts" not in unasked


def test_limits_breakers_replicas_and_the_audit_log_are_shown(house: House, team: PayingTeam) -> None:
    """A budget with what is used, held and left; a team's key sees no breakers and no replicas: exit 3."""
    admin = ("--url", house.url, "--key", house.admin_key)
    budget = next(row for row in rows(tollgate("limits", team.id, *admin)) if row["limit"] == "usd_per_day")
    of_ann = rows(tollgate("limits", team.id, "--of", "user", "--name", "ann", *admin))
    first, *_ = rows(tollgate("breakers", *admin))
    acts = rows(tollgate("audit-log", "--team", team.id, *admin))
    events = [json.loads(line) for line in tollgate("audit-log", "--ocsf", "0", *admin).stdout.splitlines()]

    assert (budget["value"], budget["used"], budget["left"]) == ("2.00", "0.00", "2.00")
    assert [(row["budget"], row["left"]) for row in of_ann] == [
        (budget, "") for budget in ("tokens_today", "usd_today", "usd_this_month")
    ]
    assert first["state"] == "closed" and tollgate("breakers", "--open", *admin).stdout.count("\n") >= 1
    assert tollgate("ps", *admin).stdout.startswith("instance_id\t")
    assert [act["action"] for act in acts] == ["key.created", "team.created"]
    of_team = [event["api"]["operation"] for event in events if event["unmapped"]["team_id"] == team.id]
    assert of_team == ["team.created", "key.created"]
    for name in ("ps", "breakers", "audit-log"):
        assert "needs an admin key" in tollgate(name, "--url", house.url, "--key", team.key, exits=3).stderr
    assert "`tollgate limits TEAM`" in tollgate("limits", *admin, exits=2).stderr


def test_a_team_that_there_is_not_is_an_error(house: House) -> None:
    """Of lists that choose by team, too, which were empty; it says which teams there are."""
    admin = ("--url", house.url, "--api-key", house.admin_key)
    for words in (("calls",), ("keys", "list"), ("batch", "list"), ("audit-log",)):
        given = admin if words[0] in ("calls", "keys") else ("--url", house.url, "--key", house.admin_key)
        told = tollgate(*words, "--team", "nope", *given, exits=1).stderr
        assert "no team 'nope'; there are " in told, words


def test_a_team_without_limits_has_none_to_show(house: House) -> None:
    """One line in the place of empty ones."""
    team = PayingTeam(house)
    told = tollgate("limits", team.id, "--url", house.url, "--key", house.admin_key).stdout

    assert told == f"{team.id} has no limits, and has used nothing of a day or a month.\n"


def test_batches_are_sent_listed_and_cancelled(house: House, team: PayingTeam, tmp_path: Path) -> None:
    """A team's own by its key; those of all teams by an admin's."""
    body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    own, admin = ("--url", house.url, "--key", team.key), ("--url", house.url, "--key", house.admin_key)

    batch_id = tollgate("batch", "submit", "in.jsonl", *own).stdout.strip()
    shown = json.loads(tollgate("batch", "status", batch_id, *own, "--format", "json").stdout)
    listed, of_all = rows(tollgate("batch", "list", *own)), rows(tollgate("batch", "list", "--team", team.id, *admin))
    of_any = json.loads(tollgate("batch", "status", batch_id, *admin, "--format", "json").stdout)
    cancelled = rows(tollgate("batch", "cancel", batch_id, *admin))
    for again in (own, admin):  # cancels nothing more, and the audit log tells of nothing more
        tollgate("batch", "cancel", batch_id, *again)
    acts = rows(tollgate("audit-log", "--team", team.id, "--action", "batch.cancelled", *admin))
    other = tollgate("batch", "cancel", batch_id, "--url", house.url, "--key", house.team_key, exits=1)

    assert (shown["batch_id"], shown["status"], of_any["team_id"]) == (batch_id, "validating", team.id)
    assert [act["subject"] for act in acts] == [batch_id]
    assert [row["batch_id"] for row in listed] == [batch_id] and listed == of_all
    assert cancelled[0]["status"] in ("cancelling", "cancelled") and "batch_not_found" in other.stderr
    assert tollgate("batch", "results", batch_id, *own).stdout == ""


def test_usage_is_the_same_over_http(house: House, team: PayingTeam, tmp_path: Path) -> None:
    """A team's by its key, any team's and that of all by an admin's; as CSV to the byte."""
    team.ask()
    cost = str(team.settled()["cost_usd"])
    own, admin = ("--url", house.url, "--key", team.key), ("--url", house.url, "--key", house.admin_key)
    (line,) = rows(tollgate("usage", *own))
    by_model = rows(tollgate("usage", "--team", team.id, "--group-by", "model", *admin))
    of_all = rows(tollgate("usage", *admin))
    (billed,) = [row for row in rows(tollgate("usage", "--invoice", "upstream:100", *admin)) if row["invoice_usd"]]
    written = tollgate("usage", "--format", "csv", *own).stdout_bytes

    assert (line["requests"], line["cost_usd"]) == ("1", f"{float(cost):f}".rstrip("0"))
    assert [row["model"] for row in by_model] == ["small", "total"] and by_model[0]["cost_usd"] == line["cost_usd"]
    assert (team.id, "small") in {(row["team_id"], row["model"]) for row in of_all}
    assert (billed["provider"], billed["invoice_usd"]) == ("upstream", "100.00")
    assert written == team.usage(format="csv").content
    assert "sees its own team" in tollgate("usage", "--team", house.team_id, *own, exits=3).stderr
    assert "needs a --team" in tollgate("usage", "--group-by", "model", *admin, exits=1).stderr
    assert "an admin's key" in tollgate("usage", "--invoice", "upstream:100", *own, exits=1).stderr
    assert "ask for JSON" in tollgate("usage", "--invoice", "upstream:1", "--format", "csv", *admin, exits=1).stderr


def test_a_teams_admin_handles_its_provider_keys(house: House, team: PayingTeam) -> None:
    """A key comes by a pipe and shows nowhere; what is listed, rotated and revoked has its fingerprint."""
    with house.client(house.admin_key) as admin:
        made = admin.post("/admin/admin-keys", json={"role": "team-admin", "team_id": team.id}).json()
    log_in(house, made["key"])
    first = tollgate("provider-keys", "add", team.id, "upstream", "--name", "ours", said="sk-of-the-team-1\n").output
    [listed] = as_json("provider-keys", "list", team.id)["data"]
    second = tollgate("provider-keys", "rotate", team.id, listed["id"], said="sk-of-the-team-2\n").output
    table = rows(tollgate("provider-keys", "list", team.id))
    gone = tollgate("provider-keys", "revoke", team.id, listed["id"]).output
    refused = tollgate("provider-keys", "revoke", team.id, listed["id"], exits=1).output

    assert (listed["name"], listed["provider"]) == ("ours", "upstream") and listed["fingerprint"] in first
    assert [row["fingerprint"] in second for row in table] == [True] and listed["fingerprint"] not in second
    assert "is erased" in gone and "has no provider key" in refused
    assert as_json("provider-keys", "list", team.id)["data"] == []
    assert "sk-of" not in first + second + str(table) + gone + refused
