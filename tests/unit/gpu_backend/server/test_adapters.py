# Adapters at the front: models of their own by name, and their coming and going where the operator allows it.

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from gpu_backend.__main__ import read_settings
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.messages import (
    AdapterLoaded,
    Command,
    Embed,
    Event,
    Generate,
    LoadAdapter,
    LoadReport,
    UnloadAdapter,
)
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, running_front
from tests.support.waiting import until

SQL = Adapter(1, "sql", "/adapters/sql")


def answering(command: Command) -> list[tuple[Event, ...]]:
    if isinstance(command, LoadAdapter):
        problem = None if command.adapter.folder == "/adapters/good" else "it is none"
        return [(AdapterLoaded(command.adapter.number, problem),)]
    return speaking([5, 6])(command)


def test_an_adapter_is_a_model_by_its_name(folder: Path) -> None:
    """Whose parent is the model; requests of every kind name it; metrics tell which are in use."""
    engine = FakeEngine(answering)
    with running_front(folder, engine, lora_modules=(SQL,)) as url, httpx.Client(base_url=url) as http:
        listed = http.get("/v1/models").json()["data"]
        one = http.get("/v1/models/sql").json()
        chat = http.post("/v1/chat/completions", json={**CHAT, "model": "sql"}).json()
        http.post("/v1/completions", json={"model": "sql", "prompt": "hi"})
        http.post("/v1/embeddings", json={"model": "sql", "input": "hi"})
        http.post("/v1/chat/completions", json=CHAT)
        unknown = http.post("/v1/chat/completions", json={**CHAT, "model": "sql2"})
        forbidden = http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/adapters/good"})
        engine.process.say(LoadReport(0, 1, 8, 8, 0, 0, 0, 0, running_adapters=("a", "sql"), waiting_adapters=("b",)))
        until(lambda: 'running_lora_adapters="a,sql"' in http.get("/metrics").text)
        metrics = http.get("/metrics").text
    asked = [command.adapter for command in engine.process.commands if isinstance(command, Generate | Embed)]

    assert [(model["id"], model["parent"], model["root"]) for model in listed] == [
        ("tiny", None, "tiny"), ("sql", "tiny", "/adapters/sql")
    ]  # fmt: skip
    assert one == listed[1] and chat["model"] == "sql"
    assert asked == [SQL, SQL, SQL, None]
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert (forbidden.status_code, "--allow-runtime-lora-updating" in forbidden.text) == (404, True)
    assert 'max_lora="1",model_name="tiny",running_lora_adapters="a,sql",waiting_lora_adapters="b"' in metrics


def test_adapters_are_loaded_and_unloaded(folder: Path) -> None:
    """As vLLM has it; the next process of the engine begins with those that are there, and none gets a number twice."""
    engine = FakeEngine(answering)
    with (
        running_front(folder, engine, lora_modules=(SQL,), allow_runtime_lora_updating=True, max_loras=3) as url,
        httpx.Client(base_url=url) as http,
    ):

        def ask(verb: str, **body: str) -> tuple[int, str]:
            answer = http.post(f"/v1/{verb}_lora_adapter", json={f"lora_{name}": said for name, said in body.items()})
            told = answer.text if answer.is_success else answer.json()["error"]["message"]
            return answer.status_code, told

        assert ask("load", name="a") == (400, "Both 'lora_name' and 'lora_path' must be provided.")
        assert ask("load", name="tiny", path="/adapters/good")[0] == 400
        for name in ("a" * 201, "a\nb", "\0"):  # for which gateways would not read what the engine says of itself
            assert "is no name of an adapter" in ask("load", name=name, path="/adapters/good")[1]
        assert ask("load", name="a", path="/bad") == (400, "The lora adapter 'a' cannot be loaded: it is none.")
        assert ask("load", name="a", path="/adapters/good") == (200, "Success: LoRA adapter 'a' added successfully.")
        assert "already been loaded" in ask("load", name="a", path="/adapters/good")[1]
        assert ask("unload", name="sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert ask("unload", name="sql") == (404, "The lora adapter 'sql' cannot be found.")
        assert ask("unload") == (400, "'lora_name' needs to be provided to unload a LoRA adapter.")
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "a"]
        assert http.post("/v1/chat/completions", json={**CHAT, "model": "sql"}).status_code == 404
        commands = engine.process.commands
        engine.process.die()
        until(lambda: len(engine.processes) == 2 and http.get("/health").status_code == 200)
    loaded = Adapter(3, "a", "/adapters/good", came_later=True)

    assert [command for command in commands if isinstance(command, UnloadAdapter)] == [UnloadAdapter(1)]
    assert LoadAdapter(loaded) in commands
    assert engine.configs[-1].lora.lora_modules == (loaded,)


def test_the_flags_are_vllms(folder: Path) -> None:
    """Names and paths, or JSON; room for as many as there are if nothing else is said."""
    model, named = ["--model", str(folder), "--served-model-name", "tiny"], '{"name": "b", "path": "/b"}'
    lora = read_settings([*model, "--lora-modules", "a=/a", named, "--max-lora-rank", "32"], {}).engine.lora

    assert lora.lora_modules == (Adapter(1, "a", "/a"), Adapter(2, "b", "/b"))
    assert (lora.num_slots, lora.max_lora_rank) == (2, 32)
    assert read_settings(model, {}).engine.lora.num_slots == 0
    assert read_settings([*model, "--allow-runtime-lora-updating"], {}).engine.lora.num_slots == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lora-modules", "a"], "an adapter is NAME=PATH"),
        (["--lora-modules", '{"name": "a", "pth": "/a"}'], "pth is unknown"),
        (["--lora-modules", "a=/a", "a=/b"], "a twice"),
        (["--lora-modules", f"{'a' * 201}=/a"], "is no name of an adapter"),
        (["--lora-modules", "a=/a", "b=/b", "--max-loras", "1"], "max_loras is 1"),
        (["--lora-modules", "tiny=/a"], "what the model itself is called"),
        (["--lora-modules", "a=/a", "--tensor-parallel-size", "2"], "computed by one process"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    folder: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what would be right."""
    with pytest.raises(SystemExit):
        read_settings(["--model", str(folder), "--served-model-name", "tiny", *flags], {})

    assert said in capsys.readouterr().err
