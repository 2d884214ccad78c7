# Calls of a model with several replicas of our own engine: shared between them, and a conversation stays where what was
# said is cached. Each replica is an engine's own front, with a script for its engine.

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.core.settings import ProviderSettings, Timeouts
from gpu_backend.step.messages import Command, Event, Generate, LoadReport
from router.catalog.targets import Endpoint
from tests.support.audits import lasting_differences
from tests.support.fake_engine import FakeEngine, silent, speaking
from tests.support.front import running_front, write_small_files
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.waiting import until

REPLICAS, CROWD = 3, 24
TOKENS = [70, 71, 72]
LATE = 2.5  # seconds


@dataclass(frozen=True)
class Scene:
    """A house, and the engines behind its model."""

    house: House
    engines: list[FakeEngine]

    def ask(self, *said: str, **headers: str) -> None:
        """Say the next thing of a conversation."""
        turns = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
        with self.house.client() as client:
            body = {"model": "tiny", "messages": turns, "max_tokens": 3}
            names = {f"x-{name}".replace("_", "-"): value for name, value in headers.items()}
            answer = client.post("/v1/chat/completions", json=body, headers=names)
        assert answer.status_code == 200, answer.text

    def available(self) -> list[bool]:
        """Return whether each replica can be given a call, as /v1/route shows them, in the order of a route."""
        with self.house.client() as client:
            ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
            targets = client.post("/v1/route", json=ask).raise_for_status().json()["targets"]
        return [target["is_available"] for target in targets]

    def asked(self) -> list[int]:
        """Return how often each engine was asked."""
        return [sum(isinstance(each, Generate) for each in engine.process.commands) for engine in self.engines]


def crowded(waiting: int) -> LoadReport:
    """Return what an engine says that others have sent so many calls more than it runs."""
    return LoadReport(
        queue_depth=waiting,
        running=256,
        free_blocks=0,
        total_blocks=8,
        kv_utilization=1.0,
        tokens_per_second=0.0,
        requests_per_second=0.0,
        prefix_hit_rate=0.0,
    )


@pytest.fixture
def scene(request: pytest.FixtureRequest, database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A house before some replicas in one place. The first of them starts with what the test's parameter says."""
    checkpoint = write_small_files(tmp_path / "tiny")
    engines = [FakeEngine(speaking(TOKENS), max_model_len=512) for _ in range(REPLICAS)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running_front(checkpoint, engine)) for engine in engines]
        if (load := getattr(request, "param", None)) is not None:
            engines[0].process.say(load)
            until(lambda: httpx.get(urls[0] + "/load").json()["queue_depth"] == load.queue_depth)
        own = ProviderSettings(
            name="own",
            format="openai",
            self_hosted=True,
            endpoints=tuple(Endpoint("here", url + "/v1") for url in urls),
            timeouts=Timeouts(connect=10.0, first_token=20.0, between_tokens=20.0, total=30.0),
            breaker=NEVER_OPENS,
        )
        more = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}, "auto": {}, "aliases": {}}
        settings = settings_for(database_url, redis_url, "", tmp_path / "data", **more)
        yield Scene(stack.enter_context(running_house(settings)), engines)


def test_a_crowd_is_shared(scene: Scene) -> None:
    """No replica has more than a quarter beyond its part while others have less to do."""
    for engine in scene.engines:
        engine.script = silent
    with ThreadPoolExecutor(CROWD) as crowd:
        calls = [crowd.submit(scene.ask, f"Which river flows through city {number}?") for number in range(CROWD)]
        until(lambda: sum(scene.asked()) == CROWD)
        shared = scene.asked()
        for engine in scene.engines:
            for command in engine.process.commands:
                for events in speaking(TOKENS)(command):
                    engine.process.say(*events)
        for call in calls:
            call.result()

    assert max(shared) <= CROWD / REPLICAS * 1.25, shared


def test_a_conversation_stays_where_it_is_cached(scene: Scene) -> None:
    """All turns of a conversation go to one replica, and conversations to all of them."""
    homes = Counter[int]()
    for number in range(36):
        said = [f"Question {number}"]
        before = scene.asked()
        for _ in range(3):
            scene.ask(*said)
            said += ["FGH", "And then?"]
        went = [after - asked for after, asked in zip(scene.asked(), before, strict=True)]
        assert sorted(went) == [0, 0, 3], went
        homes[went.index(3)] += 1

    assert len(homes) == REPLICAS


def test_a_named_session_stays_whatever_its_turns_say(scene: Scene) -> None:
    """An agent's calls have one beginning, or none in common: x-session-id says which belong together."""
    homes = set[int]()
    for session in map(str, range(24)):
        before = scene.asked()
        scene.ask("The same instructions for all.", session_id=session)
        scene.ask(f"Another beginning {session}", session_id=session)
        went = [after - asked for after, asked in zip(scene.asked(), before, strict=True)]
        assert sorted(went) == [0, 0, 2], went
        homes.add(went.index(2))

    assert len(homes) == REPLICAS


def test_a_router_in_front_chooses_the_replica(scene: Scene) -> None:
    """x-gateway-destination-endpoint names replicas in the order wanted; an address that is none of theirs is not
    asked."""
    [_, second, third] = [urlsplit(each.base_url).netloc for each in scene.house.settings.providers["own"].endpoints]
    for wanted in (f"{third},{second}", f"192.0.2.1:80, {third}"):
        for number in range(6):
            scene.ask(f"Question {number}", gateway_destination_endpoint=wanted)
    of_router = scene.asked()
    for number in range(12):
        scene.ask(f"Question {number}", gateway_destination_endpoint="192.0.2.1:80")

    assert of_router == [0, 0, 12]
    assert sum(scene.asked()) == 24 and scene.asked() != [0, 0, 24]


@pytest.mark.parametrize("scene", [crowded(200)], indirect=True)
def test_a_replica_that_others_have_filled_comes_last(scene: Scene) -> None:
    """Whose /load tells of a long queue is asked when nobody else can be, and as others again once it has gone."""
    until(lambda: scene.available() == [True, True, False])
    for number in range(12):
        scene.ask(f"Question {number}")
    while_full = scene.asked()
    scene.engines[0].process.say(crowded(0))
    until(lambda: scene.available() == [True, True, True])
    numbers = count(12)
    while scene.asked()[0] == 0:  # a third of all conversations have their home there
        scene.ask(f"Question {next(numbers)}")

    assert while_full[0] == 0 and sum(while_full) == 12


def test_a_replica_that_lies_about_its_load_is_sent_less(scene: Scene) -> None:
    """It reports an empty queue and its first tokens come late, under load: it has less than half of its part of calls,
    none is lost, and the books agree."""
    for engine in scene.engines:
        engine.script = partial(in_time, engine, LATE if engine is scene.engines[0] else 0.0)
    with ThreadPoolExecutor(60) as crowd, scene.house.client() as client:
        calls = []
        for city in range(60):
            turns = [{"role": "user", "content": f"Which river flows through city {city}?"}]
            body = {"model": "tiny", "messages": turns, "max_tokens": 3}
            calls.append(crowd.submit(client.post, "/v1/chat/completions", json=body))
            until(lambda: sum(scene.asked()) == len(calls))
            time.sleep(0.05)
            if city == 19:
                before = scene.asked()
        assert [call.result().status_code for call in calls] == [200] * 60
    with scene.house.client(scene.house.admin_key) as client:
        lines = client.get("/metrics").text.splitlines()
    slow = [line for line in lines if line.startswith("tollgate_replica_lateness{")]
    since = [after - asked for after, asked in zip(scene.asked(), before, strict=True)]

    assert sum(since) == 40 and since[0] <= 7, since
    assert len(slow) == 1 and float(slow[0].rpartition(" ")[2]) > 3
    assert lasting_differences(scene.house.settings.database_url) == []


def in_time(engine: FakeEngine, first: float, command: Command) -> list[tuple[Event, ...]]:
    """Answer with the first token after so many seconds, and the others when any replica's have come."""
    for number, events in enumerate(speaking(TOKENS)(command)):
        threading.Timer(LATE if number else first, engine.process.say, events).start()
    return []
