# Long prompts of a model of our own are computed by replicas that do nothing else, and the replica that replies is told
# where. Each replica is an engine's own front, with a script for its engine.

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import pytest

from gateway.core.settings import Prefill, ProviderSettings, Timeouts
from gpu_backend.step.messages import Abort, Command, Event, FinishReason, Generate, NewTokens
from gpu_backend.step.transfer import HeldBlocks, RemoteBlocks
from router.catalog.targets import Endpoint
from tests.support.databases import Databases
from tests.support.fake_engine import TIMINGS, FakeEngine, speaking
from tests.support.front import END, IMAGE, SEEING_TEMPLATE, VISION, running_front, token_ids, write_small_files
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for

LONG, SHORT = "What is a toll gate? " * 20, "What?"
WHERE = RemoteBlocks("prefiller", "lease", "10.0.0.7", 14579, cached_tokens=32)


def holding(command: Command) -> list[tuple[Event, ...]]:
    """Compute a prompt and one token of the reply, and hold its blocks."""
    answers = speaking(token_ids("H"))(command)
    if not (isinstance(command, Generate) and command.holds_blocks):
        return answers
    ((event,),) = answers
    assert isinstance(event, NewTokens)
    return [(replace(event, held=HeldBlocks(WHERE, (3, 4))),)]


def failing(command: Command) -> list[tuple[Event, ...]]:
    """Compute nothing."""
    assert isinstance(command, Generate | Abort)
    return [(NewTokens(command.request_id, 0, (), finish_reason=FinishReason.ERROR, error="no device"),)]


@dataclass(frozen=True)
class Scene:
    """A house, the engine that replies, and the one that computes prompts."""

    house: House
    decoder: FakeEngine
    prefiller: FakeEngine

    def ask(self, said: Any, path: str = "/v1/chat/completions", **more: Any) -> Any:
        """Ask; return the text that came."""
        prompt: dict[str, Any] = (
            {"prompt": said} if path == "/v1/completions" else {"messages": [{"role": "user", "content": said}]}
        )
        with self.house.client() as client:
            answer = client.post(path, json={"model": "tiny", "max_tokens": 9, **prompt, **more})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    def commands(self, engine: FakeEngine) -> list[Generate]:
        """Return what an engine was asked, and forget it."""
        asked = [command for command in engine.process.commands if isinstance(command, Generate)]
        engine.process.commands.clear()
        return asked


@pytest.fixture(scope="module")
def scene(databases: Databases, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("prefill")
    checkpoint = write_small_files(folder / "tiny", SEEING_TEMPLATE, VISION)
    decoder, prefiller = (FakeEngine(max_model_len=1024) for _ in range(2))
    with ExitStack() as stack:
        database_url = stack.enter_context(databases.lend())
        urls = [
            stack.enter_context(running_front(checkpoint, engine, kv_transfer_address="127.0.0.1:0"))
            for engine in (decoder, prefiller)
        ]
        own = ProviderSettings(
            name="own",
            format="openai",
            self_hosted=True,
            endpoints=(Endpoint("here", urls[0] + "/v1"),),
            timeouts=Timeouts(connect=10.0, first_token=20.0, between_tokens=20.0, total=30.0),
            breaker=NEVER_OPENS,
            prefill=Prefill(provider="prompts", tokens=50),
        )
        prompts = ProviderSettings(
            name="prompts", format="openai", self_hosted=True, endpoints=(Endpoint("here", urls[1] + "/v1"),)
        )
        providers = {"own": own, "prompts": prompts}
        more = {"providers": providers, "models": {"tiny": model("tiny", "own")}, "auto": {}, "aliases": {}}
        settings = settings_for(database_url, redis_url, "", folder / "data", **more)
        yield Scene(stack.enter_context(running_house(settings)), decoder, prefiller)


@pytest.fixture(autouse=True)
def scripts(scene: Scene) -> None:
    """Both engines are well, and were asked nothing."""
    scene.decoder.script, scene.prefiller.script = speaking([*token_ids("Hello"), END]), holding
    scene.decoder.process.commands.clear()
    scene.prefiller.process.commands.clear()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_long_prompt_is_computed_elsewhere(path: str, scene: Scene) -> None:
    """One token of the same prompt for the same team is asked there; the whole reply, with what was answered, here."""
    assert scene.ask(LONG, path, n=1, stop=["x"], top_k=3, min_tokens=2) == "Hello"

    (prefill,), (decode,) = scene.commands(scene.prefiller), scene.commands(scene.decoder)
    assert (prefill.sampling.max_tokens, prefill.holds_blocks, prefill.remote) == (1, True, None)
    assert (decode.sampling.max_tokens, decode.holds_blocks, decode.remote) == (9, False, WHERE)
    assert prefill.prompt_token_ids == decode.prompt_token_ids
    assert prefill.tenant == decode.tenant != ""


def test_the_row_of_a_call_tells_who_computed_its_prompt(scene: Scene) -> None:
    """And what the device there took; the tokens are the reply's own, each once."""
    with scene.house.client() as client:
        body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": LONG}]}
        row = scene.house.record_of(client.post("/v1/chat/completions", json=body))

    (attempt,) = row["attempts"]
    prefill = attempt["prefill"]
    assert attempt["target"].startswith("own/here/") and attempt["outcome"] == "ok"
    assert prefill["target"].startswith("prompts/here/") and prefill["ms"] > 0
    assert prefill["gpu_seconds"] == TIMINGS.gpu_seconds
    assert row["output_tokens"] == 6


def test_pictures_go_wherever_their_prompt_goes(scene: Scene) -> None:
    """Through the gateway to both replicas, which name the blocks of the picture alike."""
    images = pytest.importorskip("PIL.Image")
    written = BytesIO()
    images.new("RGB", (24, 16), "red").save(written, "PNG")
    url = f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
    said = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": url}}]

    assert scene.ask(said) == "Hello"

    (prefill,), (decode,) = scene.commands(scene.prefiller), scene.commands(scene.decoder)
    (picture,) = decode.pictures
    assert prefill.pictures == (picture,)
    assert picture.pixels == bytes((255, 0, 0)) * 24 * 16
    assert decode.prompt_token_ids.count(IMAGE) == 3 * 2
    assert prefill.prompt_token_ids == decode.prompt_token_ids


def test_a_short_prompt_is_computed_where_its_reply_is_made(scene: Scene) -> None:
    """Below the threshold nothing else is asked."""
    assert scene.ask(SHORT) == "Hello"

    assert scene.commands(scene.prefiller) == []
    assert [command.remote for command in scene.commands(scene.decoder)] == [None]


def test_what_a_client_says_of_blocks_goes_nowhere(scene: Scene) -> None:
    """No caller of the gateway has an engine connect somewhere, or hold blocks."""
    said = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "10.0.0.1"}

    scene.ask(SHORT, kv_transfer_params={**said, "remote_port": 22})
    scene.ask(SHORT, kv_transfer_params={"do_remote_decode": True})

    assert [(c.remote, c.holds_blocks) for c in scene.commands(scene.decoder)] == [(None, False)] * 2


def test_a_prefiller_that_fails_costs_no_answer(scene: Scene) -> None:
    """The replica that replies computes the prompt, and others do not try."""
    scene.prefiller.script = failing
    assert scene.ask(LONG + "Well?") == "Hello"
    assert [command.remote for command in scene.commands(scene.decoder)] == [None]
    asked = len(scene.commands(scene.prefiller))
    scene.prefiller.script = holding
    assert scene.ask(LONG + "And now?") == "Hello"

    assert asked == 1
    assert scene.commands(scene.prefiller) == []  # it is left alone for some seconds
