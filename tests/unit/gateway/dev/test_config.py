# What `tollgate dev` writes for its processes: the demo, a file upon it, as YAML that reads back the same.

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.file import load_settings
from gateway.config.tree import ConfigFaults, Fault, Node, Scalar, Section, read_tree, tree_of
from gateway.dev.config import StackSecrets, joined, read_config_file, stack_config, text_at, to_yaml
from gateway.dev.greeting import Ready, welcome

KNOWN = StackSecrets("tgadmin-x-of-the-house", "pepper of the house here", engine_secret="secret of the engine")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with the one thing that is read of it."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    return tmp_path


def house(checkpoint: Path, file: Section | None) -> Section:
    """Return the whole configuration of a house with this file."""
    stores = {"database_url": "postgresql://u:p@127.0.0.1:2/t", "redis_url": "redis://:p@127.0.0.1:3/0"}
    settings = stack_config(checkpoint, "http://127.0.0.1:1", stores, KNOWN, file)
    return joined(settings, file, checkpoint / "data")


def test_the_house_without_a_file_is_a_whole_configuration(checkpoint: Path, tmp_path: Path) -> None:
    """The file that is written loads, and has the demo model with its price and its context."""
    path = tmp_path / "tollgate.yaml"
    path.write_text(to_yaml(house(checkpoint, None)))
    settings = load_settings(path, {})
    model = settings.models["tollgate-demo"]

    assert settings.admin_keys == ("tgadmin-x-of-the-house",)
    assert settings.data_dir == checkpoint / "data"
    assert settings.providers[model.provider].self_hosted
    assert settings.providers[model.provider].api_keys == ("secret of the engine",)
    assert (model.price.input, model.price.output, model.context) == (50_000_000, 100_000_000, 1024)
    assert settings.auto["auto"].small == settings.auto["auto"].large == ("tollgate-demo",)


def test_providers_whose_keys_are_set_are_offered(checkpoint: Path, tmp_path: Path) -> None:
    """With all their models that have a price, and no key in the file; a shell without the key reads the file too."""
    path, env = tmp_path / "tollgate.yaml", {"ANTHROPIC_API_KEY": "sk-ant-secret", "GROQ_API_KEY": ""}
    stores = {"database_url": "postgresql://u:p@127.0.0.1:2/t", "redis_url": "redis://:p@127.0.0.1:3/0"}
    path.write_text(to_yaml(joined(stack_config(checkpoint, "http://h:1", stores, KNOWN, None, env), None, tmp_path)))
    with_key, without = load_settings(path, env), load_settings(path, {})

    assert "sk-ant" not in path.read_text()
    assert (list(with_key.providers), with_key.providers["anthropic"].api_keys) == (
        ["own", "anthropic"],
        ("sk-ant-secret",),
    )
    assert "anthropic/claude-haiku-4-5" in with_key.models
    assert list(without.models) == ["tollgate-demo"]


def test_a_provider_without_known_prices_is_not_offered(checkpoint: Path) -> None:
    """Its key may be set for something else, as Hugging Face's is: the stack starts without it."""
    env = {"HF_TOKEN": "hf-one", "CEREBRAS_API_KEY": "csk-one"}

    assert [*stack_config(checkpoint, "http://h:1", {}, KNOWN, None, env)["providers"]] == ["own", "cerebras"]


def test_a_greeting_names_few_models(tmp_path: Path) -> None:
    """Ours, and of a provider with hundreds how many."""
    models = ["tollgate-demo", "auto", *(f"openai/m{number}" for number in range(80)), "groq/x"]
    ready = Ready(
        url="http://h",
        team_id="t",
        team_key="k",
        admin_key="a",
        models=models,
        database_url="",
        redis_url="",
        engine_url="",
        pids={},
    )

    assert "models     tollgate-demo, auto, openai/… (80), groq/… (1)\n" in welcome(ready, tmp_path)


def test_a_file_lies_upon_the_house(checkpoint: Path, tmp_path: Path) -> None:
    """The demo model stays first; the file's provider of the same name does not take its engine away."""
    given_file = tmp_path / "more.yaml"
    given_file.write_text(
        "data_dir: /elsewhere\n"
        "drain: 3s\n"
        "providers: {own: {format: openai, api_keys: ['${KEY}'], endpoints: [{region: r, base_url: 'http://h:1/v1'}]}}\n"
        "models: {other: {provider: own, price: {input: 1, output: 2}}}\n"
    )
    path = tmp_path / "tollgate.yaml"
    path.write_text(to_yaml(house(checkpoint, read_config_file(given_file, {"KEY": "a: [$ {b}\"'"}))))
    settings = load_settings(path, {})

    assert list(settings.models) == ["tollgate-demo", "other"]
    assert settings.models["tollgate-demo"].provider == "tollgate-demo"
    assert settings.providers["own"].api_keys == ("a: [$ {b}\"'",)
    assert settings.drain == 3.0
    assert settings.data_dir == checkpoint / "data"


def test_the_name_of_the_demo_model_is_taken(tmp_path: Path) -> None:
    """A file's model of that name is a fault with its line."""
    path = tmp_path / "more.yaml"
    path.write_text("models:\n  tollgate-demo: {}\n")

    with pytest.raises(ConfigFaults, match=r"more\.yaml:2: models\.tollgate-demo: "):
        read_config_file(path)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """No file, and bytes that are not text: the file's name and why."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")

    with pytest.raises(ConfigFaults, match="not UTF-8"):
        read_config_file(binary)
    with pytest.raises(ConfigFaults, match="No such file"):
        read_config_file(tmp_path / "none.yaml")


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """The second start reads what the first has made, from a private file."""
    path = tmp_path / "secrets.json"
    first, second = StackSecrets.load(path), StackSecrets.load(path)

    assert first == second
    assert first.admin_key.startswith("tgadmin-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(first.engine_secret) == 43


def test_secrets_of_an_older_house_are_kept_and_joined(tmp_path: Path) -> None:
    """A house from before the engine had a secret gets one, and keeps its keys."""
    path = tmp_path / "secrets.json"
    path.write_text('{"admin_key": "tgadmin-a", "key_pepper": "p", "team_key": "tg-t", "engine_port": 7}')
    first, second = StackSecrets.load(path), StackSecrets.load(path)

    assert (first.admin_key, first.team_key, first.engine_port) == ("tgadmin-a", "tg-t", 7)
    assert first.engine_secret == second.engine_secret != ""


def test_text_at_finds_texts_only() -> None:
    """A path leads to a text, or to nothing."""
    tree = tree_of({"a": {"b": ["c", "d"]}})
    assert isinstance(tree, Section)

    assert text_at(tree, "a", "b", 1) == "d"
    assert text_at(tree, "a", "b", 2) is None
    assert text_at(tree, "a", "x") is None
    assert text_at(tree, "a") is None


texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Co", "Cn", "Zl", "Zp")), max_size=20)
safe_texts = texts.filter(lambda words: "${" not in words and "\ufeff" not in words)
trees = st.recursive(
    safe_texts | st.integers() | st.booleans() | st.floats(0, 1e9).map(lambda value: round(value, 6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(safe_texts.filter(str.strip), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(safe_texts.filter(str.strip), trees, max_size=5))
def test_what_is_written_reads_back_the_same(value: dict[str, object]) -> None:
    """Names and texts of every kind survive, and a number stays a number."""
    tree = tree_of(value)
    assert isinstance(tree, Section)
    faults: list[Fault] = []
    again = read_tree(to_yaml(tree), {}, faults)

    assert faults == []
    assert again is not None
    assert plain(again) == plain(tree)


def plain(node: Node) -> object:
    match node:
        case Section():
            return {key: plain(each) for key, each in node.entries.items()}
        case Scalar():
            return "" if node.text in ("~", "null") and not node.is_quoted else node.text
        case _:
            return [plain(each) for each in node.items]
