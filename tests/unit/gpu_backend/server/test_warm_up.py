# What an engine answers to itself before gateways hear of it.

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gpu_backend.server.app import create_app
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.client.announcer import FleetSettings
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.front import Front, build_front
from gpu_backend.server.settings import FrontSettings
from gpu_backend.server.warm_up import read_warm_up, warm_up
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import Generate, NewTokens
from gpu_backend.step.sequence import FinishReason
from tests.support.fake_engine import TIMINGS, FakeEngine, speaking
from tests.support.front import CHAT, token_ids
from tests.support.waiting import until_found

FLEET = FleetSettings(pool="own", redis_url="redis://127.0.0.1:1", secret="a secret of the fleet 0123")


def front_before(engine: FakeEngine, folder: Path) -> Front:
    """Return a front that is to answer two prompts first."""
    own = engine_config(model=str(folder))
    settings = FrontSettings(own, "tiny", "front-1", fleet=FLEET, warm_up=("hi", "there"))
    client = EngineClient(own, start_process=engine.start)
    return build_front(settings, load_checkpoint(folder), client)


async def test_each_prompt_is_answered(folder: Path) -> None:
    """As the model reads a first message of a user; no metric counts what no client asked."""
    engine = FakeEngine(speaking([70, 71]))
    front = front_before(engine, folder)
    await front.engine.open()
    await warm_up(front)
    await front.engine.close()
    asked = [command.prompt_token_ids for command in engine.process.commands if isinstance(command, Generate)]

    assert asked == [tuple(token_ids(f"<user>{words}<assistant>")) for words in ("hi", "there")]
    assert (front.metrics.answered, front.metrics.failed) == (0, 0)


async def test_a_prompt_without_an_answer_is_an_error(folder: Path) -> None:
    """An engine that cannot answer at all is never asked by a client."""
    front = front_before(FakeEngine(speaking([70], FinishReason.ERROR)), folder)
    await front.engine.open()
    with pytest.raises(EngineFailed):
        await warm_up(front)
    await front.engine.close()


async def test_a_heartbeat_counts_what_the_engine_failed(folder: Path) -> None:
    """Whole answers and streams that it broke off; not what a client got wrong. A rollout is judged by it."""
    engine = FakeEngine(speaking([70, 71], FinishReason.ERROR))
    front = front_before(engine, folder)
    app = create_app(front)
    app.state.front = front
    await front.engine.open()
    await warm_up(replace(front, settings=replace(front.settings, warm_up=())))
    statuses = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        for body in (CHAT, CHAT | {"model": "other"}, CHAT | {"n": 0}):
            statuses.append((await client.post("/v1/chat/completions", json=body)).status_code)
        engine.script = speaking([70, 71])
        statuses.append((await client.post("/v1/chat/completions", json=CHAT)).status_code)
        engine.script = lambda command: speaking([70, 71])(command)[:1]  # and then it breaks off
        stream = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        heard = front.engine.num_heard
        await until_found(lambda: asyncio.sleep(0, front.engine.num_heard > heard))
        await asyncio.sleep(0.05)  # its first chunk is out
        last = [each for each in engine.process.commands if isinstance(each, Generate)][-1]
        engine.process.say(NewTokens(last.request_id, 0, (), finish_reason=FinishReason.ERROR, timings=TIMINGS))
        statuses.append((await stream).status_code)
    await front.engine.close()
    said = front.announcement("http://127.0.0.1/v1", 1, 5.0)

    assert statuses == [500, 404, 400, 200, 200]
    assert (said.failed, said.answered) == (2, 1)


def test_prompts_are_a_list_of_texts() -> None:
    """Anything else is told, before the model is loaded; so are prompts of an engine that no gateway finds."""
    assert read_warm_up('["a", "b"]') == ("a", "b")
    with pytest.raises(ValueError, match="is no JSON list of prompts"):
        read_warm_up('{"a": 1}')
    with pytest.raises(ValueError, match="says nothing without fleet_pool"):
        FrontSettings(engine_config(model="m"), "tiny", "front-1", warm_up=("hi",))
