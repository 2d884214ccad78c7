# `tollgate teams`, `keys`, `batch`, `usage` and `config` as an admin types them, on a real Postgres.

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template
from typing import Any

import asyncpg
import pytest
from click.testing import Result
from typer.testing import CliRunner

import gateway.cli
from gateway.config.file import load_settings
from gateway.core.version import VERSION
from tests.support.servers import database_of_its_own

ROOT = Path(__file__).parents[2]
CONFIG = """\
database_url: {database_url}
redis_url: redis://127.0.0.1:1
admin_keys: [tgadmin-of-the-tests]
key_pepper: pepper of all the tests
providers: {{own: {{format: openai, self_hosted: true, endpoints: [{{region: here, base_url: "http://gpu/v1"}}]}}}}
models: {{small: {{provider: own, price: {{input: 1, output: 2}}}}}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[Path]:
    """Give the configuration of a house whose database is ready."""
    file = tmp_path_factory.mktemp("house") / "tollgate.yaml"
    with database_of_its_own(postgres_url) as database_url:
        file.write_text(CONFIG.format(database_url=database_url))
        yield file


@pytest.fixture(autouse=True)
def house(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every command find that house, and print without cutting lines."""
    monkeypatch.setenv("TOLLGATE_CONFIG", str(config))
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    """Put the admin commands in place, as main() does."""
    if not any(group.name == "teams" for group in gateway.cli.app.registered_groups):
        gateway.cli.add_commands()


def tollgate(*words: str, exits: int = 0) -> Result:
    result = CliRunner().invoke(gateway.cli.app, list(words))
    assert result.exit_code == exits, result.output
    return result


def as_json(*words: str) -> Any:
    return json.loads(tollgate(*words, "--format", "json").stdout)


def test_team_is_made_changed_and_shown() -> None:
    """What `create` and `set` say is what `show` shows; `none` takes a limit away."""
    tollgate("teams", "create", "lookup", "--name", "Search", "--usd-per-day", "12.50", "--requests-per-minute", "60")
    tollgate("teams", "set", "lookup", "--usd-per-day", "none", "--models", "small", "--weight", "2")

    team = as_json("teams", "show", "lookup")

    assert (team["id"], team["name"], team["weight"]) == ("lookup", "Search", 2.0)
    assert team["allowed_models"] == ["small"]
    assert (team["limits"]["usd_per_day"], team["limits"]["requests_per_minute"]) == (None, 60)


def test_a_team_has_limits_for_one_model_each() -> None:
    """What is not named stays; a model without any limit left is not shown."""
    tollgate("teams", "create", "by-model", "--model-limit", "small:usd_per_day=0.5")
    more = ("--model-limit", "small:tokens_per_day=1_000", "--model-limit", "small:usd_per_month=7")
    tollgate("teams", "set", "by-model", *more)
    limits = as_json("teams", "show", "by-model")["model_limits"]
    shown = tollgate("teams", "show", "by-model", "--format", "csv").stdout
    taken = (f"small:{name}=none" for name in ("tokens_per_day", "usd_per_day", "usd_per_month"))
    tollgate("teams", "set", "by-model", *(word for one in taken for word in ("--model-limit", one)))

    assert limits == {"small": {"tokens_per_day": 1000, "usd_per_day": 0.5, "usd_per_month": 7}}
    assert "small:tokens_per_day=1000 small:usd_per_day=0.50 small:usd_per_month=7.00," in shown  # as options take them
    assert as_json("teams", "show", "by-model")["model_limits"] == {}


def test_a_team_has_limits_for_end_users_and_tags() -> None:
    """What is not named stays; a name's own limits go with `=default`; the audit log and scopes hold no name."""
    tollgate("teams", "create", "by-user", "--user-limit", "*:usd_per_day=2", "--user-limit", "a:nn:usd_per_day=10")
    tollgate("teams", "set", "by-user", "--tag-limit", "agent=research:usd_per_month=50", "--without-user", "count")
    tollgate("teams", "set", "by-user", "--user-limit", "bob:usd_per_day=none", "--tag-limit", "agent=*:usd_per_day=1")
    team = as_json("teams", "show", "by-user")
    tollgate("teams", "set", "by-user", "--user-limit", "a:nn=default", "--user-limit", "*:usd_per_day=none")
    left = as_json("teams", "show", "by-user")["user_limits"]

    users = {name: limits["usd_per_day"] for name, limits in team["user_limits"].items()}
    assert (users, team["calls_without_user"]) == ({"*": 2, "a:nn": 10, "bob": None}, "count")
    tags = {name: (limits["usd_per_day"], limits["usd_per_month"]) for name, limits in team["tag_limits"].items()}
    assert tags == {"agent=*": (1, None), "agent=research": (None, 50)}
    assert list(left) == ["bob"] and "hash_key" not in team


def test_a_key_is_for_endpoints() -> None:
    """A name that is none is told with those that there are; `all` takes the bound away."""
    tollgate("teams", "create", "embedding")
    key_id = as_json("keys", "create", "--team", "embedding", "--endpoints", "embeddings,responses")["key_id"]
    wrong = tollgate("keys", "set", key_id, "--endpoints", "chat", exits=1).stderr
    bound = as_json("keys", "set", key_id, "--name", "one")["allowed_endpoints"]

    assert "chat.completions, " in wrong and bound == ["embeddings", "responses"]
    assert as_json("keys", "set", key_id, "--endpoints", "all")["allowed_endpoints"] is None


def test_a_team_keeps_the_safety_that_is_not_named() -> None:
    """Levels are set one by one; `none` takes one away. What is set is shown, contents as well."""
    tollgate("teams", "create", "strict", "--safety-input", "block", "--safety-level", "contacts=redact")
    tollgate(
        "teams", "set", "strict", "--safety-output", "flag", "--safety-level", "harm=flag", "--safety-redacts", "both"
    )
    tollgate("teams", "set", "strict", "--contents-days", "3")
    before = as_json("teams", "show", "strict")["safety"]
    shown = tollgate("teams", "show", "strict", "--format", "csv").stdout
    tollgate("teams", "set", "strict", "--safety-input", "none", "--safety-level", "contacts=none")
    tollgate("teams", "set", "strict", "--safety-redacts", "none")
    wrong = tollgate("teams", "set", "strict", "--safety-redacts", "all", exits=2).stderr

    assert "input=block output=flag levels:harm=flag levels:contacts=redact redacts=both,keep_days=3" in shown
    assert before.pop("redacts") == "both" and "input, output, both or none" in wrong
    assert before == {"input": "block", "output": "flag", "levels": {"contacts": "redact", "harm": "flag"}}
    after = as_json("teams", "show", "strict")["safety"]
    assert after == {"input": None, "output": "flag", "levels": {"harm": "flag"}, "redacts": None}


def test_team_can_be_suspended_and_let_in_again() -> None:
    """`--suspend` shuts a team out, `--resume` lets it in."""
    tollgate("teams", "create", "paused")

    tollgate("teams", "set", "paused", "--suspend")
    suspended = as_json("teams", "show", "paused")["suspended"]
    tollgate("teams", "set", "paused", "--resume")

    assert suspended is True
    assert as_json("teams", "show", "paused")["suspended"] is False


def test_team_has_a_webhook() -> None:
    """`--webhook-url` says where its events go, `none` that they go nowhere; other options leave it as it is."""
    shown = []
    tollgate("teams", "create", "told", "--webhook-url", "https://93.184.216.34:443/hook")
    for words in (("--weight", "2"), ("--webhook-url", "https://93.184.216.34/other"), ("--webhook-url", "none")):
        shown.append(as_json("teams", "show", "told")["webhook_url"])
        tollgate("teams", "set", "told", *words)
    shown.append(as_json("teams", "show", "told")["webhook_url"])

    first, other = "https://93.184.216.34/hook", "https://93.184.216.34/other"
    assert shown == [first, first, other, None]


def test_key_is_printed_once() -> None:
    """`create` prints the key, in words and as JSON; `list` never does."""
    tollgate("teams", "create", "keys")

    words = tollgate("keys", "create", "--team", "keys", "--name", "ci", "--expires", "90d").stdout
    made = as_json("keys", "create", "--team", "keys")
    listed = tollgate("keys", "list", "--team", "keys").stdout

    found = re.search(r"tg-[A-Za-z0-9_-]{43}", words)
    assert found
    assert re.fullmatch(r"tg-[A-Za-z0-9_-]{43}", made["key"])
    assert made["key"] not in listed
    assert found.group() not in listed
    assert made["prefix"] in listed


def test_key_is_rotated_and_revoked() -> None:
    """`rotate` prints a new key and says how long the old one lasts; `revoke` ends one."""
    tollgate("teams", "create", "rotating")
    old = as_json("keys", "create", "--team", "rotating")

    words = tollgate("keys", "rotate", old["key_id"], "--overlap", "2h").stdout
    revoked = tollgate("keys", "revoke", old["key_id"])
    keys = as_json("keys", "list", "--team", "rotating")["data"]

    (new,) = (key["key_id"] for key in keys if key["key_id"] != old["key_id"])
    assert f"{old['key_id']} works until" in words
    assert revoked.stderr.endswith(f" is not revoked by this: tollgate keys revoke {new}\n")
    assert sorted(key["status"] for key in keys) == ["active", "revoked"]


def test_key_is_changed() -> None:
    """`set` changes what is named, `all`, `none` and `never` take bounds away, and the rest stays."""
    tollgate("teams", "create", "changing")
    made = as_json("keys", "create", "--team", "changing", "--models", "small", "--allow-from", "10.0.0.0/8,::1")
    ends = as_json("keys", "set", made["key_id"], "--expires", "90d", "--usd-per-day", "5", "--allow-from", "all")
    last = as_json("keys", "set", made["key_id"], "--expires", "never", "--usd-per-day", "none", "--name", "web")

    assert (made["allowed_models"], made["allowed_addresses"]) == (["small"], ["10.0.0.0/8", "::1/128"])
    assert (ends["limits"]["usd_per_day"], ends["allowed_addresses"], ends["allowed_models"]) == (5, None, ["small"])
    assert ends["expires_at"]
    assert (last["limits"]["usd_per_day"], last["expires_at"], last["name"]) == (None, None, "web")


def test_lists_come_as_tables_json_and_csv() -> None:
    """The same rows, for people and for programs."""
    tollgate("teams", "create", "listed", "--usd-per-month", "0.000000001")

    table = tollgate("teams", "list").stdout
    rows = list(csv.DictReader(io.StringIO(tollgate("teams", "list", "--format", "csv").stdout)))
    listed = as_json("teams", "list")["data"]

    assert "listed" in table
    assert [row["id"] for row in rows] == [team["id"] for team in listed]
    assert next(row for row in rows if row["id"] == "listed")["limits"] == "usd_per_month=0.000000001"


def test_a_batch_is_stored_under_the_lock_of_its_teams_limits(config: Path, tmp_path: Path) -> None:
    """As over HTTP: of two batches that are submitted at once, the second is checked against the first."""
    tollgate("teams", "create", "queued")
    tollgate("keys", "create", "--team", "queued")
    file = tmp_path / "input.jsonl"
    file.write_text('{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "small"}}')

    async def waits() -> bool:
        other = await asyncpg.connect(load_settings(config).database_url)
        async with other.transaction():
            await other.execute("SELECT pg_advisory_xact_lock(hashtext('batch limits of queued'))")
            submitting = asyncio.create_task(
                asyncio.to_thread(tollgate, "batch", "submit", str(file), "--team", "queued")
            )
            while not submitting.done() and not await other.fetchval(
                "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
            ):
                await asyncio.sleep(0.02)
            is_waiting = not submitting.done()
        await submitting
        await other.close()
        return is_waiting

    assert asyncio.run(waits())
    tollgate("teams", "create", "another")
    told = tollgate("batch", "submit", str(file), exits=2).stderr
    assert "say whose batch it is with --team, of another, " in told


def test_usage_of_a_quiet_day_is_a_table_of_zeros() -> None:
    """`usage` prints the report as a table, JSON or CSV."""
    tollgate("teams", "create", "quiet")

    table = tollgate("usage", "--team", "quiet", "--date", "2026-04-05").stdout
    report = as_json("usage", "--team", "quiet", "--from", "2026-04-01", "--to", "2026-04-05")
    rows = list(csv.DictReader(io.StringIO(tollgate("usage", "--team", "quiet", "--format", "csv").stdout)))

    assert "2026-04-05" in table
    assert "cost usd" in table
    assert report["total"]["cost_usd"] == 0
    assert rows[0]["team_id"] == "quiet"


def test_example_sets_ten_teams_up(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every team of examples/teams.sh is made as it stands there, with the example house and its models."""
    script = (ROOT / "examples" / "teams.sh").read_text().replace("\\\n", " ")
    names = dict(re.findall(r"(SMALL|LARGE|OWN)=(\S+)", script.split("set -eu")[0]))
    lines = [line for line in script.splitlines() if re.match(r"team \w+ ", line)]
    secrets = re.findall(r"\$\{(\w+)(?::-)?\}", (ROOT / "tollgate.yaml").read_text())
    for name in secrets:
        monkeypatch.setenv(name, f"of-a-test-{len(name)}-4c1f09a27be8")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("DATABASE_URL", load_settings(config).database_url)
    monkeypatch.setenv("TOLLGATE_CONFIG", str(ROOT / "tollgate.yaml"))

    for line in lines:
        tollgate("teams", "create", *shlex.split(Template(line).substitute(names))[1:])

    assert len(names) == 3
    assert len(lines) == 10
    assert {line.split()[1] for line in lines} <= {team["id"] for team in as_json("teams", "list")["data"]}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("teams", "show", "nobody"), "no team 'nobody'"),
        (("teams", "create", "Not An Id"), "lower-case"),
        (("teams", "create", "x", "--models", "smal"), "Did you mean 'small'?"),
        (("teams", "create", "x", "--model-limit", "smal:usd_per_day=1"), "Did you mean 'small'?"),
        (("teams", "create", "x", "--model-limit", "small:usd_per_day=-1"), "model_limits.small.usd_per_day"),
        (("teams", "create", "x", "--tag-limit", "research:usd_per_day=1"), "KEY=VALUE"),
        (("teams", "create", "x", "--webhook-url", "https://10.0.0.1/"), "a private address"),
        (("teams", "set", "nobody", "--webhook-url", "ftp://x"), "must begin with https://"),
        (("teams", "set", "nobody", "--weight", "1"), "no team 'nobody'"),
        (("teams", "set", "nobody", "--safety-level", "spam=block"), "is no group or category"),
        (("keys", "create", "--team", "nobody"), "no team 'nobody'"),
        (("keys", "revoke", "key_none"), "no key 'key_none'"),
        (("keys", "set", "key_none", "--name", "x"), "no key 'key_none'"),
        (("keys", "create", "--team", "x", "--models", "smal"), "Did you mean 'small'?"),
        (("keys", "rotate", "key_none", "--overlap", "long"), "duration such as 30m"),
        (("usage", "--team", "nobody"), "no team 'nobody'"),
        (("teams", "list", "--config", "/none.yaml"), "/none.yaml: cannot be read"),
    ],
)
def test_mistake_is_told_in_words(words: tuple[str, ...], says: str) -> None:
    """A mistake ends with exit code 1 and one helpful line on standard error, never with a traceback."""
    result = tollgate(*words, exits=1)

    assert says in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("teams", "create", "x", "--usd-per-day", "lots"), "expected a number or none"),
        (("teams", "create", "x", "--model-limit", "small:requests_per_minute=1"), "expected MODEL:LIMIT=N"),
        (("teams", "create", "x", "--without-user", "no"), "refuse or count"),
        (("teams", "set", "nobody", "--safety-level", "contacts=maybe"), "takes block, flag, off or none"),
        (("teams", "set", "nobody"), "nothing to change"),
        (("keys", "create", "--team", "x", "--expires", "someday"), "expected a day"),
        (("keys", "set", "key_none"), "nothing to change"),
        (("audit", "--date", "nonsense"), "--date is a UTC day such as 2026-04-05; found 'nonsense'"),
        (("audit", "--date", "9999-12-31"), "--date is a day until today, "),
        (("calls", "--limit", "many"), "expected a whole number, found 'many'"),
        (("calls", "--limit", "0"), "1 is the least, found 0"),
        (("calls", "--limit", "500"), "200 is the most, found 500"),
        (("login", "--url", "http://127.0.0.1:1"), "no key was given"),
    ],
)
def test_a_command_line_that_makes_no_sense_exits_2(words: tuple[str, ...], says: str) -> None:
    """What is wrong is seen before anything is asked, and told with what would be right."""
    result = tollgate(*words, exits=2)

    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "The batch has no request."),
        ("{}\n\nno", "line 3: This line is not valid JSON"),
        (
            '\n{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "small"}}',
            "line 2: This line is longer",
        ),
    ],
)
def test_a_batch_with_a_faulty_line_is_not_submitted(
    lines: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is told by its line, and nothing is stored."""
    monkeypatch.setattr("gateway.commands.batch.LONGEST_LINE", 50)
    (tmp_path / "in.jsonl").write_text(lines)

    refused = tollgate("batch", "submit", str(tmp_path / "in.jsonl"), "--team", "nobody", exits=1)

    assert says in refused.stderr and "nothing was submitted" in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize("words", ["teams list", "usage", "audit", "migrate", "serve", "work", "doctor", "fleet up"])
def test_no_deployment_named_exits_2(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that needs one says how to name it; exit 1 of an audit says that the accounts differ."""
    monkeypatch.delenv("TOLLGATE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    assert "which deployment? Give --config" in tollgate(*words.split(), exits=2).stderr


def test_database_that_is_away_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback when Postgres does not answer; where it is the own one of this folder's stack, what starts that."""
    file = tmp_path / "tollgate.yaml"
    file.write_text(CONFIG.format(database_url="postgresql://postgres@127.0.0.1:1/none"))

    result = tollgate("teams", "list", "--config", str(file), exits=1)

    assert result.stderr.startswith("Postgres does not answer: does it run") and "Errno" not in result.stderr

    (tmp_path / ".tollgate/postgres").mkdir(parents=True)
    file.rename(tmp_path / ".tollgate/tollgate.yaml")
    monkeypatch.delenv("TOLLGATE_CONFIG")
    monkeypatch.chdir(tmp_path)
    assert "`tollgate dev` (or `make demo`) starts it" in tollgate("calls", exits=1).stderr


def test_config_check_tells_every_fault(config: Path, tmp_path: Path) -> None:
    """`config check` exits 0 on a good file, and 1 with a line for each fault on a bad one."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(config.read_text() + "drain: 5\nqueues: {}\n")

    good = tollgate("config", "check", str(config))
    faults = tollgate("config", "check", str(bad), exits=1).stderr.splitlines()

    assert "fine" in good.stdout
    assert [fault.split(": ")[:2] for fault in faults] == [[f"{bad}:7", "drain"], [f"{bad}:8", "queues"]]


def test_a_part_of_a_file_is_checked_as_dev_reads_it(tmp_path: Path) -> None:
    """What `tollgate dev --config` takes, sections alone, is fine with --dev, and its faults are told with lines."""
    part = tmp_path / "part.yaml"
    there = "endpoints: [{region: us, base_url: https://one.example/v1}]"
    model = "provider: mine, price: {input: 1, output: 2}, context: 8000, max_output: 100, abilities: [chat]"
    provider = f"format: openai, api_keys: [sk-mine-0123456789], {there}"
    part.write_text(f"providers: {{mine: {{{provider}}}}}\nmodels: {{m: {{{model}}}}}\n")
    alone = tollgate("config", "check", str(part), exits=1)
    fine = tollgate("config", "check", "--dev", str(part))
    others = [tmp_path / "empty.yaml", tmp_path / "misspelt.yaml", tmp_path / "unfinished.yaml"]
    for file, text in zip(others, ("# nothing\n", "redisurl: redis://one\n", "redis_url: redis://one\n"), strict=True):
        file.write_text(text)
    no_part = "".join(tollgate("config", "check", str(file), exits=1).stderr for file in others)
    more = "drain: 5\nlame_duck: ${NO_SUCH}\nno: 1\n"
    part.write_text(part.read_text().replace("models: {", "models: {tollgate-demo: {}, ") + more)
    faults = tollgate("config", "check", "--dev", str(part), exits=1).stderr.splitlines()

    assert (
        "database_url" in alone.stderr
        and alone.stderr.endswith("add --dev\n")
        and "--dev" not in no_part
        and "fine: 2 models at 2 providers" in fine.stdout
    )
    told = [fault.split(": ")[1] for fault in faults]
    assert (told[0], told[-3:]) == ("models.tollgate-demo", ["drain", "lame_duck", "no"])


def test_the_version_is_told() -> None:
    """Without a deployment."""
    told = CliRunner().invoke(gateway.cli.app, ["--version"])

    assert (told.exit_code, told.stdout) == (0, f"tollgate {VERSION}\n")
