# `tollgate doctor` on real stores and the scripted upstream: it finds nothing where nothing is wrong, and each thing
# that is; with --live it tells a provider that lies by what it lies about, and spends no more than it may.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

import gateway.cli
from tests.support.identity_provider import listening
from tests.support.recordings import read_recorded, recorded_in
from tests.support.scripted_upstream import ScriptedUpstream

KEY = "sk-upstream"
NOT_HERE = "http://127.0.0.1:1/keys"
CONFIG = """\
database_url: {database_url}
redis_url: {redis_url}
data_dir: {data_dir}
admin_keys: [tgadmin-of-the-tests-4c1f09a27be8]
key_pepper: pepper-of-the-tests-4c1f09a27be8
providers:
  openai: {{format: openai, api_keys: [{key}], endpoints: [{{region: us, base_url: "{upstream}/v1"}}]}}
  anthropic: {{format: anthropic, api_keys: [{key}], endpoints: [{{region: us, base_url: "{upstream}"}}]}}
  gemini: {{format: gemini, api_keys: [{key}], endpoints: [{{region: us, base_url: "{upstream}/v1beta"}}]}}
  bedrock: {{format: bedrock, api_keys: [{key}], endpoints: [{{region: us-east-1, base_url: "{upstream}"}}]}}
models:
  titan: {{provider: bedrock, price: {{input: 1, output: 2}}, abilities: [chat, tools]}}
  gpt: {{provider: openai, upstream_model: gpt-4o, price: {{input: 1, output: 2}}, abilities: [{all}, json]}}
  claude: {{provider: anthropic, price: {{input: 1, output: 2}}, abilities: [{all}]}}
  gemini: {{provider: gemini, upstream_model: gemini-3-flash, price: {{input: 1, output: 2}}, abilities: [{all}]}}
"""


@pytest.fixture(scope="module", autouse=True)
def commands() -> None:
    """Put every command in place, as main() does."""
    if not any(command.name == "doctor" for command in gateway.cli.app.registered_commands):
        gateway.cli.add_commands()


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world."""
    with ScriptedUpstream(models=("gpt-4o", "claude", "gemini-3-flash", "titan")) as upstream:
        yield upstream


@pytest.fixture
def config(database_url: str, redis_url: str, upstream: ScriptedUpstream, tmp_path: Path) -> Iterator[Path]:
    """A deployment in which nothing is wrong."""
    file = tmp_path / "tollgate.yaml"
    facts = {"database_url": database_url, "redis_url": redis_url, "data_dir": tmp_path / "data"}
    file.write_text(CONFIG.format(**facts, key=KEY, upstream=upstream.root_url, all="chat, tools, vision"))
    yield file
    upstream.forget()


def doctor(config: Path, *words: str, exits: int = 0) -> Result:
    result = CliRunner().invoke(gateway.cli.app, ["doctor", *words, "--config", str(config)])
    assert result.exit_code == exits, (result.output, result.exception)
    return result


def live(config: Path, *words: str, exits: int = 0) -> str:
    return doctor(config, "--live", *words, "--record", str(config.parent / "kept"), exits=exits).stdout


def test_a_deployment_that_is_well_is_told_so(config: Path) -> None:
    """A line for each part, no warning but that of a temporary folder's file system, and exit status 0."""
    told = doctor(config).stdout.splitlines()
    parts = {" ".join(line.split()[1:3]) for line in told}

    assert told[-1].endswith(" 0 faults")
    assert {"configuration", "postgres", "redis", "migrations", "disk", "owners"} <= {part.split()[0] for part in parts}
    assert {f"ok       {name:22} " for name in ("openai", "anthropic", "gemini")} <= {line[:32] for line in told}


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        (
            "database_url: postgresql",
            "database_url: 'postgresql://u:p@127.0.0.1:1/db' #",
            "postgres               does not answer",
        ),
        ("redis_url: redis", "redis_url: 'redis://127.0.0.1:1' #", "redis"),
        (f"anthropic, api_keys: [{KEY}]", "anthropic, api_keys: [wrong]", "refuses it (401); make a new key there"),
        ("data_dir: /", "data_dir: /proc/none/", "cannot be written"),
        ("format: gemini,", "format: gemini, unknown: 1,", "unknown key"),
        ("format: openai,", "format: openai, self_hosted: true,", "It answered 404"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(config: Path, right: str, wrong: str, words: str) -> None:
    """And exits 1; the rest is looked at all the same, but where the configuration itself is faulty."""
    text = config.read_text()
    assert right in text
    config.write_text(text.replace(right, wrong))

    told = doctor(config, exits=1).stdout

    (line,) = [line for line in told.splitlines() if line.startswith("fault")]
    assert words in line


def test_identity_providers_are_looked_at(config: Path) -> None:
    """One that answers, one that is another than the file says, and one whose keys are elsewhere and not there."""
    with listening() as provider:
        tokens = f"[{{issuer: {provider.issuer}/, audience: a}}, {{issuer: a, audience: a, jwks_url: {NOT_HERE}}}]"
        tokens = tokens.replace("issuer: a,", f"issuer: {NOT_HERE},")
        people = f"issuer: {provider.issuer}, client_id: a, public_url: https://gate.test, roles: {{a: admin}}"
        config.write_text(f"{config.read_text()}sign_in: {{{people}}}\njwt_auth: {tokens}\n")
        told = [line for line in doctor(config, exits=1).stdout.splitlines() if "jwt_auth" in line or "sign_in" in line]

    assert [line.split()[0] for line in sorted(told)] == ["fault", "fault", "ok"]
    assert "signs with: 1" in sorted(told)[2] and any("does not answer" in line for line in told)
    assert any("another issuer's" in line for line in told)


def test_a_database_without_tables_is_told_what_it_needs(config: Path, postgres_url: str, database_url: str) -> None:
    """`tollgate migrate` it is."""
    empty = urlsplit(postgres_url)._replace(path="/postgres").geturl()
    config.write_text(config.read_text().replace(database_url, empty))

    assert "run `tollgate migrate`" in doctor(config, exits=1).stdout


def test_honest_providers_show_what_the_formats_assume(config: Path, upstream: ScriptedUpstream) -> None:
    """Some fifteen calls each, for less than the cap; what was answered is kept without a key, and reads back."""
    for model in upstream.models:
        upstream.script("tokens=16,finish=length", model=model, times=1)  # the third call is cut at its length
        upstream.script("tokens=8", model=model, times=2)
    told = live(config)
    kept = sorted((config.parent / "kept").iterdir())

    assert "fault" not in told.replace("0 faults", ""), told
    assert sum(" bedrock: " in line for line in told.splitlines()) >= 14  # whose streams no recording's reader reads
    for name in ("openai", "anthropic", "gemini"):
        assert sum(f" {name}: " in line for line in told.splitlines()) >= 15
        (file,) = [path for path in kept if path.name.startswith(name)]
        assert KEY not in file.read_text() and "authorization" not in file.read_text().lower()
        answers = [one for one in recorded_in(file, name) if one.status < 400]
        assert len(answers) >= 10 and all(read_recorded(name, one)[1] is not None for one in answers)
        first = yaml.safe_load(file.read_text())["interactions"][0]["request"]["uri"]
        assert urlsplit(first).hostname == "127.0.0.1"


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("usage=none", "it tells no usage"),
        ("usage=wrong", "it tells no usage"),
        ("cut", "no answer (200)"),
        ("not-json", "no answer (200)"),
        ("no-finish", "no answer (200)"),
        ("500", "no answer (500)"),
        ("text={", "an answer in JSON is none"),
        ("reset-before-headers", "status page"),
    ],
)
def test_a_provider_that_lies_is_told(config: Path, upstream: ScriptedUpstream, lie: str, words: str) -> None:
    """By what it lies about, with exit status 1."""
    upstream.script(lie, model="gpt-4o")

    assert words in live(config, "openai", exits=1)


def test_no_call_is_made_that_could_cost_too_much(config: Path, upstream: ScriptedUpstream) -> None:
    """Each is weighed by the dearest that it could become, before it is made; those that do not fit are named."""
    before = len(upstream.requests)
    upstream.script("finish=length")
    told = live(config, "openai", "--most-usd", "0.002")
    nothing = live(config, "openai", "--most-usd", "0")

    assert "left out: it could cost" in told and " 0.00 USD spent" in nothing
    assert 0 < len(upstream.requests) - before <= 12  # of seventeen


def test_a_call_that_makes_no_sense_is_told(config: Path) -> None:
    """Exit status 2."""
    assert "no provider 'nobody'" in doctor(config, "--live", "nobody", exits=2).stderr
    assert "--live alone" in doctor(config, "openai", exits=2).stderr
    for most in ("lots", "-3", "nan"):
        assert "amount in dollars" in doctor(config, "--live", "--most-usd", most, exits=2).stderr
