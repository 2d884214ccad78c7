# Our own engines in two regions, and one of them dies under a load of streams, all its machines at once, or goes
# silent. The other takes over, in mid-stream as well; then the first is back. Every answer is whole and paid once.

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.core.settings import ProviderSettings, Timeouts
from gpu_backend.demo_model import CHECKPOINT
from router.catalog.targets import Endpoint
from tests.support.audits import lasting_differences
from tests.support.engine_server import EngineServer, start_engine_server
from tests.support.house import House, model, running_house, settings_for
from tests.support.told import Told, lines_of, rows_of
from tests.support.waiting import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

WITHIN = 180.0  # seconds for what takes a few on a quiet machine
PATH = "/v1/chat/completions"
QUESTIONS = 6
NEAR = (0, 1)  # of the engines; the third is far away


class Scene:
    """A house before three engines in two regions, and what its callers saw."""

    def __init__(self, house: House, engines: list[EngineServer]) -> None:
        self.house, self.engines = house, engines
        self.texts: dict[int, set[str]] = defaultdict(set)  # by question
        self.calls: list[str] = []  # request ids of whole answers
        self.lost: list[str] = []

    def ask(self, question: int) -> None:
        """Stream one reply, and note what came of it."""
        body: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
        body["messages"] = [{"role": "user", "content": f"Tell me about gate {question}."}]
        try:
            with self.house.client() as client, client.stream("POST", PATH, json=body, timeout=WITHIN) as answer:
                told = Told(answer.headers["x-request-id"], list(lines_of(answer)))
        except Exception as exc:
            self.lost.append(repr(exc))
            return
        if answer.status_code == 200 and told.is_whole and told.reasons and told.error is None:
            self.texts[question].add(told.text)
            self.calls.append(told.request_id)
        else:
            self.lost.append(f"{answer.status_code}: {told.events[-2:]}")

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Have each question asked again and again, all at once."""
        over = threading.Event()

        def go_on(question: int) -> None:
            while not over.is_set():
                self.ask(question)

        threads = [threading.Thread(target=go_on, args=(question,)) for question in range(QUESTIONS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(WITHIN)

    def wait_for_answers(self, count: int) -> None:
        """Wait until so many more calls were answered."""
        before = len(self.calls)
        until(lambda: len(self.calls) >= before + count or self.lost, within=WITHIN)

    def is_back(self) -> bool:
        """Whether the last calls were answered near by."""
        ids = self.calls[-3:]
        with self.house.client(self.house.admin_key) as admin:
            found = [admin.get(f"/admin/usage-records/{each}") for each in ids]
        return all(each.status_code == 200 and each.json()["provider_endpoint"].startswith("near") for each in found)


@pytest.fixture
def scene(databases: Any, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """The house and its engines; no process is left behind."""
    engines = [start_engine_server(CHECKPOINT) for _ in range(3)]
    try:
        for engine in engines:
            engine.wait_until_ready(WITHIN)
        regions = ["far" if place not in NEAR else "near" for place in range(3)]
        own = ProviderSettings(
            name="own",
            format="openai",
            self_hosted=True,
            endpoints=tuple(Endpoint(r, e.url + "/v1") for r, e in zip(regions, engines, strict=True)),
            timeouts=Timeouts(connect=5.0, first_token=15.0, between_tokens=8.0, total=120.0),
        )
        more: dict[str, Any] = {"providers": {"own": own}, "models": {"tiny": model("tiny", "own")}}
        with databases.lend() as url:
            settings = settings_for(url, redis_url, "", tmp_path / "house", **more, auto={}, aliases={})
            with running_house(settings) as house:
                yield Scene(house, engines)
    finally:
        for engine in engines:
            end(engine)


def end(engine: EngineServer) -> None:
    """Kill a server with its engine, as a machine that loses its power does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(engine.process.pid).children(), psutil.Process(engine.process.pid)):
            process.kill()
    engine.process.wait()


def freeze(engine: EngineServer) -> None:
    """Stop a server with its engine: connections stay, and nothing comes over them."""
    for process in (psutil.Process(engine.process.pid), engine.engine()):
        process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("how", ["dies", "goes silent"])
def test_another_region_takes_over_for_one_that_dies(how: str, scene: Scene) -> None:
    """In mid-stream: the text is what the first would have written. The calls go back once it is there again."""
    figures: dict[str, Any] = {}
    with scene.loaded():
        scene.wait_for_answers(4 * QUESTIONS)
        began, before = time.monotonic(), len(scene.calls)
        for place in NEAR:
            (end if how == "dies" else freeze)(scene.engines[place])
        scene.wait_for_answers(QUESTIONS + 1)  # one of them began after it
        figures["answers of all again, s"] = time.monotonic() - began
        scene.wait_for_answers(4 * QUESTIONS)
        away = len(scene.calls)
        for place in NEAR:
            end(scene.engines[place])
            port = int(scene.engines[place].url.rpartition(":")[2])
            scene.engines[place] = start_engine_server(CHECKPOINT, port=port)
        for place in NEAR:
            scene.engines[place].wait_until_ready(WITHIN)
        began = time.monotonic()
        until(scene.is_back, within=WITHIN)
        figures["calls back, s"] = time.monotonic() - began
    rows = rows_of(scene.house.settings, scene.calls)
    regions = [row.provider_endpoint.split()[0] for row in rows]
    meanwhile = regions[before + QUESTIONS : away]
    figures |= {"calls": len(scene.calls), "far, in all": regions.count("far")}
    print(figures)

    assert scene.lost == []
    assert {question: len(texts) for question, texts in scene.texts.items()} == dict.fromkeys(range(QUESTIONS), 1)
    assert set(regions[:before]) == {"near"} and set(meanwhile) == {"far"}
    assert [row.output_tokens for row in rows] == [60] * len(scene.calls)
    assert any(len(row.attempts) > 1 for row in rows)
    assert lasting_differences(scene.house.settings.database_url) == []
