# `tollgate init` writes a configuration without a fault, and secrets for its owner alone.

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

from gateway.commands.init_config import command
from gateway.config.file import load_settings
from gateway.config.presets import presets

KEYS = [name for row in presets().values() for name in row.keys]


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with nothing in it, and no provider's key in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)


def init(*words: str, exits: int = 0) -> Result:
    app = Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == exits, result.output
    return result


def test_what_is_written_starts_with_the_keys_that_are_there() -> None:
    """Models and prices come from the catalogue; the secrets are strong, not shown, and in a file of their own."""
    told = init("--provider", "openai", "--provider", "groq").output
    lines = Path("tollgate.env").read_text().splitlines()
    env = dict(line.split("=", 1) for line in lines)
    settings = load_settings(Path("tollgate.yaml"), env | {"GROQ_API_KEY": "gsk-of-the-tests"})

    assert Path("tollgate.env").stat().st_mode & 0o777 == 0o600
    assert env["TOLLGATE_ADMIN_KEY"] not in told and env["OPENAI_API_KEY"] == ""
    assert list(settings.providers) == ["groq"] and settings.models["groq/llama-3.3-70b-versatile"].price.input > 0
    assert [one.provider for one in settings.left_out] == ["openai"]


def test_providers_whose_keys_are_set_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are not copied."""
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-of-the-tests")
    init("--out", "gate.yaml")

    assert "anthropic:" in Path("gate.yaml").read_text() and "sk-ant" not in Path("gate.env").read_text()


def test_what_cannot_be_is_told() -> None:
    """Nothing to take, a provider that is none, a file that is there."""
    assert "which providers?" in init(exits=2).output
    assert "did you mean `openai`?" in init("--provider", "opnai", exits=2).output
    init("--provider", "ollama")
    assert "is there already" in init("--provider", "ollama", exits=1).output
