# What an engine answers to itself before gateways hear of it.

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.client.announcer import FleetSettings
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.front import Front, build_front
from gpu_backend.server.settings import FrontSettings
from gpu_backend.server.warm_up import read_warm_up, warm_up
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import Generate
from gpu_backend.step.sequence import FinishReason
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import token_ids

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


def test_prompts_are_a_list_of_texts() -> None:
    """Anything else is told, before the model is loaded; so are prompts of an engine that no gateway finds."""
    assert read_warm_up('["a", "b"]') == ("a", "b")
    with pytest.raises(ValueError, match="is no JSON list of prompts"):
        read_warm_up('{"a": 1}')
    with pytest.raises(ValueError, match="says nothing without fleet_pool"):
        FrontSettings(engine_config(model="m"), "tiny", "front-1", warm_up=("hi",))
