# Secrets that are none, variables that were meant, and addresses at which no service lives: refused with the line, and
# with what would be right.

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.config.file import ConfigFaults, Fault, load_settings
from gateway.config.weakness import why_weak
from gateway.core.keys import new_admin_key
from gateway.dev.config import StackSecrets

GOOD = "4c1f09a27be85d6377aa10"
FILE = """\
database_url: postgresql://house:pass@db/tollgate
redis_url: redis://cache:6379/0
admin_keys: ["tgadmin-4c1f09a27be85d63"]
key_pepper: 8b1d64f0c2a9735e1188
providers:
  lan: {format: openai, api_keys: [k], endpoints: [{region: lan, base_url: "http://10.0.0.7/v1"}]}
models:
  m: {provider: lan, price: {input: 1, output: 1}}
"""
ADMIN_KEY, PEPPER, API_KEYS = '"tgadmin-4c1f09a27be85d63"', "8b1d64f0c2a9735e1188", "api_keys: [k]"


def faults_of(folder: Path, text: str) -> tuple[Fault, ...]:
    file = folder / "tollgate.yaml"
    file.write_text(text)
    try:
        load_settings(file, {})
    except ConfigFaults as refusal:
        return refusal.faults
    return ()


def test_the_file_itself_is_without_fault(tmp_path: Path) -> None:
    """What the tests below change is what they see refused."""
    assert faults_of(tmp_path, FILE) == ()


WEAK = {
    "1": "20 are the least",
    "tgadmin-4c1f09a27b": "20 are the least",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa": "different characters",
    "abababababababababababab": "different characters",
    "tgadmin-changeme-changeme": "of an example",
    "please-CHANGE-ME-before-you-start": "of an example",
    "your-secret-goes-here-0123": "of an example",
    "my-super-long-password-1": "of an example",
    "tgadmin-1234567890-abcdef": "of an example",
}


@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize(("strong", "path"), [(ADMIN_KEY, "admin_keys[0]"), (PEPPER, "key_pepper")])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, weak: str, strong: str, path: str) -> None:
    """Short, uniform and exemplary ones, with what makes a better one, and without showing the secret."""
    faults = faults_of(tmp_path, FILE.replace(strong, f'"{weak}"'))

    (fault,) = (fault for fault in faults if fault.path == path)
    assert fault.line == (3 if strong == ADMIN_KEY else 4)
    assert WEAK[weak] in fault.message and "openssl rand -hex 32" in fault.message
    assert len(weak) < 10 or weak not in fault.message


def test_what_the_house_makes_and_recommends_is_strong(tmp_path: Path) -> None:
    """`tollgate dev`'s own secrets, fresh admin keys and `openssl rand -hex 32`."""
    made = StackSecrets.load(tmp_path / "secrets.json")
    ours = [made.admin_key, made.key_pepper, *(new_admin_key() for _ in range(200))]

    assert [secret for secret in (*ours, *(secrets.token_hex(32) for _ in range(200))) if why_weak(secret)] == []


def test_a_weak_pepper_can_be_replaced(tmp_path: Path) -> None:
    """As one of those that were, it opens what it sealed until all keys have moved."""
    assert faults_of(tmp_path, FILE + "other_key_peppers: [x]\n") == ()


def test_a_key_for_the_metrics_is_no_admin_key(tmp_path: Path) -> None:
    """What Prometheus holds opens nothing else, and cannot be guessed either."""
    (same,) = faults_of(tmp_path, FILE + f"metrics_keys: [{ADMIN_KEY}]\n")
    (weak,) = faults_of(tmp_path, FILE + "metrics_keys: [x]\n")

    assert (same.line, same.path) == (9, "metrics_keys")
    assert (weak.line, weak.path) == (9, "metrics_keys[0]")


@pytest.mark.parametrize(
    ("written", "instead", "name"),
    [
        (ADMIN_KEY, "$TOLLGATE_ADMIN_KEY", "TOLLGATE_ADMIN_KEY"),
        (PEPPER, "$TOLLGATE_KEY_PEPPER", "TOLLGATE_KEY_PEPPER"),
        (PEPPER, '"$(TOLLGATE_KEY_PEPPER)"', "TOLLGATE_KEY_PEPPER"),
        (API_KEYS, 'api_keys: ["$LAN_KEY"]', "LAN_KEY"),
        ("house:pass@", "house:$PGPASS@", "PGPASS"),
        ("redis://cache:6379/0", "$REDIS_URL", "REDIS_URL"),
        ("http://10.0.0.7/v1", "http://$LAN_HOST/v1", "LAN_HOST"),
    ],
)
def test_a_variable_without_its_braces_is_refused(tmp_path: Path, written: str, instead: str, name: str) -> None:
    """Only ${NAME} is filled in; another form would be a secret that everybody can read in the file."""
    (fault,) = faults_of(tmp_path, FILE.replace(written, instead))

    assert f"${{{name}}}" in fault.message
    assert fault.line == next(n for n, line in enumerate(FILE.splitlines(), 1) if written in line)


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.1.1", "168.63.129.16", "100.100.100.200", "[fd00:ec2::254]", "[fe80::1]"),
        *("[::ffff:169.254.169.254]", "metadata.google.internal", "METADATA.google.internal."),
    ],
)
def test_no_upstream_lives_at_a_metadata_address(tmp_path: Path, host: str) -> None:
    """A gateway that asks there would carry the machine's credentials to callers."""
    (fault,) = faults_of(tmp_path, FILE.replace("10.0.0.7", host))

    assert (fault.line, fault.path) == (6, "providers.lan.endpoints[0].base_url")
    assert "metadata" in fault.message


def test_the_command_tells_all_of_them_and_fails(tmp_path: Path) -> None:
    """`tollgate config check` names each with its line and exits 1."""
    file = tmp_path / "tollgate.yaml"
    file.write_text(FILE.replace(ADMIN_KEY, '"1"').replace(PEPPER, "x").replace("10.0.0.7", "169.254.169.254"))

    done = CliRunner().invoke(app, ["config", "check", str(file)])

    assert done.exit_code == 1
    assert all(f"tollgate.yaml:{line}: " in done.output for line in (3, 4, 6))
