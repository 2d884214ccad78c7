# What the front reads of a checkpoint, and what the command line becomes.

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_backend.__main__ import main, read_settings
from gpu_backend.server.checkpoint.checkpoint import SamplingDefaults, load_checkpoint
from gpu_backend.step.config import engine_config
from tests.support.front import END, write_small_files


def test_a_checkpoint_is_read_from_its_small_files(tmp_path: Path) -> None:
    """Tokenizer, template, ends and sizes; a model without recommendations has OpenAI's defaults."""
    checkpoint = load_checkpoint(write_small_files(tmp_path))

    assert checkpoint.chat is not None
    assert (checkpoint.eos_token_ids, checkpoint.vocab_size, checkpoint.hidden_size) == ({END}, 260, 2)
    assert checkpoint.defaults == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)


def test_every_end_token_counts_wherever_it_is_named(tmp_path: Path) -> None:
    """config.json, generation_config.json (one id or several) and the tokenizer may each know another one."""
    folder = write_small_files(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 4], "temperature": 0.6, "top_k": 20})
    )
    checkpoint = load_checkpoint(folder)

    assert checkpoint.eos_token_ids == {END, 3, 4}
    assert checkpoint.defaults == SamplingDefaults(temperature=0.6, top_k=20)


def test_the_fingerprint_follows_the_model(tmp_path: Path) -> None:
    """Two starts of one model agree; another template is another model to a client that compares replies."""
    one = load_checkpoint(write_small_files(tmp_path / "a"))
    same = load_checkpoint(write_small_files(tmp_path / "b"))
    other = load_checkpoint(write_small_files(tmp_path / "c", chat_template="{{ messages[0].content }}"))

    assert one.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    """The operator who starts the engine reads which file it is."""
    folder = write_small_files(tmp_path)
    (folder / missing).unlink()

    with pytest.raises(FileNotFoundError, match=missing.replace(".", r"\.")):
        load_checkpoint(folder)


def test_a_config_without_its_sizes_is_refused(tmp_path: Path) -> None:
    """A folder of something else entirely is found at the start."""
    folder = write_small_files(tmp_path)
    (folder / "config.json").write_text("{}")

    with pytest.raises(ValueError, match="vocab_size"):
        load_checkpoint(folder)


def test_sizes_of_a_model_that_sees_are_its_texts(tmp_path: Path) -> None:
    """They stand in an object of their own."""
    folder = write_small_files(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": config}))

    assert load_checkpoint(folder).vocab_size == config["vocab_size"]


def test_flags_reach_the_engine_and_the_front() -> None:
    """Each flag has one home; what is not said keeps the default of that home."""
    flags = "--model /models/small --port 9000 --dtype float32 --max-num-seqs 8 --max-model-len 512 --max-waiting 9"
    settings = read_settings(flags.split(), {})

    assert settings.engine == engine_config(
        model="/models/small", dtype="float32", max_num_seqs=8, max_model_len=512
    )  # fmt: skip
    assert (settings.served_model_name, settings.port, settings.max_waiting) == ("small", 9000, 9)
    assert settings.instance_id.endswith(":9000")
    assert settings.api_key is None


def test_the_secret_may_come_from_the_environment() -> None:
    """A flag wins over the environment; an empty secret is none."""
    secret = {"TOLLGATE_ENGINE_SECRET": "from-the-environment"}

    assert read_settings(["--model", "m", "--host", "0.0.0.0"], secret).api_key == "from-the-environment"
    assert read_settings(["--model", "m", "--api-key", "from-flag"], secret).api_key == "from-flag"
    assert read_settings(["--model", "m"], {"TOLLGATE_ENGINE_SECRET": ""}).api_key is None
    assert "from-the-environment" not in repr(read_settings(["--model", "m"], secret))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu-0"])
def test_strangers_are_not_let_in_without_a_secret(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond loopback a secret is demanded before anything starts."""
    with pytest.raises(SystemExit):
        main(["--model", "m", "--host", host])

    assert "TOLLGATE_ENGINE_SECRET" in capsys.readouterr().err


def test_a_secret_that_can_be_drafted_is_for_loopback_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Other machines may try as often as they like; what is wrong is said without the secret."""
    short = {"TOLLGATE_ENGINE_SECRET": "short-canary"}

    with pytest.raises(SystemExit):
        read_settings(["--model", "m", "--host", "10.0.0.5"], short)
    said = capsys.readouterr().err

    assert "of 12 characters" in said and "openssl rand -hex 32" in said
    assert "canary" not in said
    assert read_settings(["--model", "m"], short).api_key == "short-canary"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("port", "65536"),
        ("port", "-1"),
        ("kv-offloading-size", "nan"),
        ("kv-offloading-size", "inf"),
        ("kv-offloading-size", "-1"),
        ("drain-seconds", "nan"),
        ("drain-seconds", "-1"),
        ("max-waiting", "0"),
    ],
)
def test_flags_that_make_no_sense_are_named(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what would be right, before anything starts."""
    with pytest.raises(SystemExit):
        main(["--model", "m", f"--{flag}", value])

    assert f"{flag.replace('-', '_')} is {value}" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.0.1"])
def test_loopback_needs_no_secret(host: str) -> None:
    """A laptop's engine is for the laptop."""
    assert read_settings(["--model", "m", "--host", host], {}).host == host
