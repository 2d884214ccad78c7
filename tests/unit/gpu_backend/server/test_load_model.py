# Another model for an engine that sleeps: what was read for the one before is not asked of it.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from gpu_backend.server.app import create_app
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.checkpoint.model_cache import ModelCache
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.front import build_front
from gpu_backend.server.settings import FrontSettings
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import Command, Embed, Event, Generate, LoadModel, Sleep, SleepAnswer
from tests.support.fake_engine import READY, FakeEngine, speaking
from tests.support.front import CHAT, write_small_files
from tests.support.tiny_model import TinyModel

EMBEDDING = {"model": "tiny", "input": "hi"}


def script(command: Command) -> list[tuple[Event, ...]]:
    """Sleep, load and answer."""
    match command:
        case Sleep(number):
            return [(SleepAnswer(number),)]
        case LoadModel():
            return [(READY,)]
    return speaking([70, 71])(command)


async def test_a_copied_model_is_in_use_as_long_as_it_is_served(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the one before may go, and one that could not be loaded. A folder is called as at a start: by its own
    name, whatever leads to it."""
    storage = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setenv("TOLLGATE_MODELS", str(tmp_path / "copies"))
    here = write_small_files(tmp_path / "named", config=TinyModel().config())
    small = {file.name: file.read_bytes() for file in here.iterdir()} | {"model.safetensors": b""}
    for name in ("first", "second", "broken"):
        for file, content in ({**small, "config.json": b"{}"} if name == "broken" else small).items():
            storage.pipe_file(f"/models/{name}/{file}", content)
    (tmp_path / "newest").symlink_to(here)
    engine = FakeEngine(script)
    own = engine_config(model=str(folder))
    client = EngineClient(own, start_process=engine.start)
    settings = FrontSettings(own, "tiny", "front-1", allow_model_loading=True)
    app = create_app(front := build_front(settings, load_checkpoint(folder), client))
    app.state.front, app.state.announcer = front, None
    names, statuses = list[str](), list[int]()

    await client.open()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        for model in ("memory://models/first", "memory://models/second", "memory://models/broken", tmp_path / "newest"):
            await http.post("/sleep")
            statuses.append((await http.post("/load_model", json={"model": str(model)})).status_code)
            names.append((await http.get("/v1/models")).json()["data"][0]["id"])
            if model == "memory://models/broken":
                ModelCache(tmp_path / "copies", limit=1).make_room(0)
                left = [each.name[:-13] for each in (tmp_path / "copies").glob("[a-z]*")]
    await client.close()
    storage.store.clear()

    assert (statuses, names) == ([200, 200, 400, 200], ["first", "second", "second", "named"])
    assert left == ["second"]


async def test_what_was_read_for_the_model_before_is_not_asked_of_the_next(folder: Path, tmp_path: Path) -> None:
    """A request whose body comes while the engine takes another model has that one's name and tokens: it is refused. A
    model that the engine does not know is refused before the one that is there goes."""
    engine = FakeEngine(script)
    own = engine_config(model=str(folder))
    client = EngineClient(own, start_process=engine.start)
    front = build_front(
        FrontSettings(own, "tiny", "front-1", allow_model_loading=True), load_checkpoint(folder), client
    )
    app = create_app(front)
    app.state.front, app.state.announcer = front, None
    arrived, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def slowly(body: dict[str, Any]) -> AsyncIterator[bytes]:
        arrived.release()
        await may_end.wait()
        yield msgspec.json.encode(body)

    async def load(name: str, config: dict[str, Any]) -> httpx.Response:
        other = write_small_files(tmp_path / name, config=TinyModel().config() | config)
        return await http.post("/load_model", json={"model": str(other), "served_model_name": name})

    await client.open()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        while (await http.get("/health")).status_code != 200:
            await asyncio.sleep(0.01)
        asked = [
            asyncio.create_task(http.post(path, content=slowly(body)))
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/embeddings", EMBEDDING))
        ]
        for _ in asked:
            await arrived.acquire()
        await http.post("/sleep")
        unknown = await load("unknown", {"architectures": ["MambaForCausalLM"]})
        commands = [*engine.process.commands]
        loaded = await load("other", {})
        may_end.set()
        late = await asyncio.gather(*asked)
        answered = await http.post("/v1/chat/completions", json=CHAT | {"model": "other"})
    await client.close()

    assert not [each for each in commands if isinstance(each, LoadModel)]
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "model")
    assert (loaded.status_code, answered.status_code) == (200, 200)
    assert [(each.status_code, each.json()["error"]["code"]) for each in late] == [(503, "overloaded")] * 2
    assert len([each for each in engine.process.commands if isinstance(each, Generate | Embed)]) == 1
