# A registry of model versions: what an entry says is what the engine serves, and what is wrong in it is told with what
# would be right.

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_backend.__main__ import main, read_settings
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.checkpoint.model_registry import find_version
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import ModelNotFound
from gpu_backend.server.front import build_front
from gpu_backend.step.config import engine_config
from tests.support.front import write_small_files

TWO = """
models:
  llama:
    "1": {source: ./first}
    "2":
      source: s3://weights/llama/2
      tokenizer: ./words
      dtype: bfloat16
      quantization: fp8
      kv_cache_dtype: fp8
      tensor_parallel_size: 2
      pipeline_parallel_size: 3
      max_model_len: 4096
  small: {"2026-11": {source: owner/small}}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(text)
    return file


def test_entry_is_what_the_engine_serves(tmp_path: Path) -> None:
    """Source, tokenizer, precision, parallel layout and length, as if all flags were given."""
    registry = str(write(tmp_path, TWO))
    settings = read_settings(["--registry", registry, "--model", "llama@2"], {})

    engine = settings.engine
    assert (engine.checkpoint.model, engine.checkpoint.tokenizer) == ("s3://weights/llama/2", str(tmp_path / "words"))
    assert (engine.checkpoint.quantization, engine.checkpoint.max_model_len) == ("fp8", 4096)
    assert (engine.device.dtype, engine.cache.kv_cache_dtype) == ("bfloat16", "fp8")
    assert (engine.device.tensor_parallel_size, engine.device.pipeline_parallel_size) == (2, 3)
    assert settings.names == ("llama", "llama@2")
    other = read_settings(["--registry", registry, "--model", "llama@1"], {})
    assert (other.engine.checkpoint.model, other.engine.checkpoint.tokenizer, other.version) == (
        str(tmp_path / "first"),
        None,
        "1",
    )


def test_flags_go_before_the_entry(tmp_path: Path) -> None:
    """The operator who starts an engine may say otherwise for once."""
    arguments = ["--registry", str(write(tmp_path, TWO)), "--model", "llama@2", "--dtype", "float32"]
    settings = read_settings([*arguments, "--served-model-name", "mine"], {})

    assert (settings.engine.device.dtype, settings.engine.checkpoint.quantization) == ("float32", "fp8")
    assert settings.names == ("mine", "mine@2")
    shares = TWO.replace("dtype: bfloat16", "enable_expert_parallel: true")
    arguments = ["--registry", str(write(tmp_path, shares)), "--model", "llama@2"]
    for flags, is_shared in (([], True), (["--no-enable-expert-parallel"], False)):
        assert read_settings([*arguments, *flags], {}).engine.device.enable_expert_parallel is is_shared


def test_name_is_enough_for_the_only_version(tmp_path: Path) -> None:
    found = find_version(write(tmp_path, TWO), "small")

    assert (found.version, found.source, dict(found.flags)) == ("2026-11", "owner/small", {})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("lama@2", "models.yaml has no model lama; did you mean llama?"),
        ("zzz", "models.yaml has no model zzz; it has llama, small"),
        ("llama", "several versions of llama; ask for llama@1 or llama@2"),
        ("llama@3", "no version 3 of llama; ask for llama@1 or llama@2"),
    ],
)
def test_what_is_not_in_the_file_is_told_with_what_is(asked: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_version(write(tmp_path, TWO), asked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: {a: {1: {source: x}}}", "models.a.1: names and versions are texts without '@'; put 1 in quotes"),
        ("models: {a: {v@1: {source: x}}}", "put 'v@1' in quotes"),
        ("models: {a: {v: {}}}", "models.a.v: Object missing required field `source`; an entry has a source, and any"),
        ("models: {a: {v: {source: x, dtyp: y}}}", "unknown field `dtyp`; an entry has a source, and any of source, t"),
        ("models: {a: {v: {source: x, max_model_len: long}}}", "Expected `int | null`, got `str` - at `$.max_model_l"),
        ("models: {a: {v: {source: x}, v: {source: y}}}", "'v' is there twice; leave one out"),
        ("models: {a: {v: {source: x, sha256: abc  model.safetensors}}}", "models.a.v.sha256: 'abc  model.safetensor"),
        ("models: {a: {}}", "models.a must hold versions, each with a source"),
        ("- a", "must hold 'models:', and under it NAME: {VERSION: {source: …}}"),
        ("models: {", "is no YAML"),
        ("? [a]\n: b", "is no YAML"),
    ],
)
def test_faults_of_the_file_say_what_would_be_right(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_version(write(tmp_path, text), "a@v")


def test_what_an_engine_cannot_do_is_refused_as_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, and the words of the setting."""
    file = write(tmp_path, "models: {a: {v: {source: x, quantization: int3}}}")
    with pytest.raises(SystemExit, match="2"):
        read_settings(["--registry", str(file), "--model", "a"], {})

    assert "quantization is 'int3'; it is one of fp8, int8, w8a8, int4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (("config.json", "model.safetensors"), r"model.safetensors has the SHA-256 digest [0-9a-f]{64}, not [0-9a-f]"),
        (("config.json",), r"model.safetensors has no SHA-256 digest, though others have; give those of all weights"),
        (("config.json", "model.safetensors", "missing"), r"first has no missing"),
    ],
)
def test_folder_that_is_not_what_its_digests_say_is_not_served(
    listed: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is one whose weights have no digest beside files that have one."""
    folder = write_small_files(tmp_path / "first")
    (folder / "model.safetensors").write_bytes(b"weights")
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()} *./{n}" for n in listed if n != "missing"]
    lines += [f"{'0' * 64}  missing"] * ("missing" in listed)
    (folder / "model.safetensors").write_bytes(b"Weights")
    text = f"models: {{llama: {{v: {{source: ./first, sha256: {json.dumps(chr(10).join(lines))}}}}}}}"

    assert main(["--registry", str(write(tmp_path, text)), "--model", "llama", "--port", "0"]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_another_version_is_not_found(tmp_path: Path) -> None:
    """A gateway that names the version never gets another one's words."""
    settings = replace(
        read_settings(["--registry", str(write(tmp_path, TWO)), "--model", "llama@1"], {}),
        engine=engine_config(str(write_small_files(tmp_path / "first"))),
    )
    front = build_front(settings, load_checkpoint(settings.engine.checkpoint.folder), EngineClient(settings.engine, 1))

    for name in ("llama", "llama@1"):
        front.check_model(name)
    with pytest.raises(ModelNotFound, match="'llama@2' is not served here, but 'llama@1' is"):
        front.check_model("llama@2")


def test_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    """Words, template and all; one with more tokens than the model knows is refused."""
    model, words = write_small_files(tmp_path / "m"), write_small_files(tmp_path / "w", chat_template="{{ 1 }}")
    (model / "tokenizer.json").unlink()

    checkpoint = load_checkpoint(model, words)
    assert checkpoint.codec.vocab_size == 257
    assert checkpoint.chat is not None
    assert checkpoint.chat.render([]) == "1"

    (model / "config.json").write_text('{"vocab_size": 256, "hidden_size": 2}')
    with pytest.raises(ValueError, match=r"has 257 tokens, more than the 256 that the model of .* knows"):
        load_checkpoint(model, words)
