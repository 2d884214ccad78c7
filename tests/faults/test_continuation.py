# A replica of our own engine is killed or frozen while it speaks to a crowd, at a token drawn by a seed: every reply
# goes on at the other replica, to the letter, in each dialect, sampled and not; and the books have each call once.

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.core.settings import ProviderSettings, Timeouts
from gateway.run.processes import free_port
from router.catalog.targets import Endpoint
from tests.support.engine_server import EngineServer, start_engine_server
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.told import Told, lines_of, rows_of, text_of

TOKENS = 500  # of a reply: long enough that its replica dies before its end, however far its readers are behind
ASK = [{"role": "user", "content": "What does a toll gate cost?"}]
ENDS = {"replica": "reset", "engine": "error_frame", "frozen": "timeout"}  # how the gateway sees who dies
CASES = [(whom, seed) for whom in ENDS for seed in range(1, 21)]
Question = tuple[str, dict[str, Any]]  # a dialect's path, and a body for it


class Replicas:
    """Two replicas of one model. The gateway shares calls between them; the one that has more of them dies."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._ports = free_port(), free_port()
        self.servers = [self._start(at) for at in range(2)]
        self.victim = 0  # who died last

    def _start(self, at: int) -> EngineServer:
        return start_engine_server(self._checkpoint, port=self._ports[at])

    def kill(self, whom: str) -> None:
        """Kill the busier replica, or only its engine's process behind the front; or freeze it, connections open."""
        running = [server.load()["running"] for server in self.servers]
        self.victim = running.index(max(running))
        server = self.servers[self.victim]
        match whom:
            case "engine":
                server.engine().kill()
            case "frozen":
                server.process.send_signal(signal.SIGSTOP)
            case _:
                server.process.kill()
                server.process.wait()

    def wait_until_ready(self) -> None:
        """Wake what is frozen, start what is dead, and wait for both."""
        for at, server in enumerate(self.servers):
            server.process.send_signal(signal.SIGCONT)
            if server.process.poll() is not None:
                self.servers[at] = self._start(at)
        for server in self.servers:
            server.wait_until_ready()

    def stop(self) -> None:
        for server in self.servers:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    shape = TinyModel(max_position=4096)
    replicas = Replicas(write_tiny_model(tmp_path_factory.mktemp("tiny"), shape, with_tokenizer=True))
    try:
        replicas.wait_until_ready()
        yield replicas
    finally:
        replicas.stop()


@pytest.fixture(scope="module")
def house(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    """A gateway in front of them."""
    urls = [server.url for server in replicas.servers]
    providers = {
        name: ProviderSettings(
            name=name,
            format="openai",
            self_hosted=True,
            endpoints=tuple(Endpoint(f"r{at}", url + "/v1") for at, url in enumerate(urls)),
            timeouts=Timeouts(connect=2.0, first_token=60.0, between_tokens=silent, total=300.0),
            breaker=NEVER_OPENS,
        )
        for name, silent in (("patient", 60.0), ("brisk", 8.0))  # a replica says every second that it lives
    }
    models = {
        name: model(name, provider=name, upstream_model="tiny", max_output=2000, gpu_hour_nanousd=3_600_000_000)
        for name in providers
    }
    facts: dict[str, Any] = {"providers": providers, "models": models, "auto": {}, "aliases": {}}
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, "", tmp_path_factory.mktemp("house"), **facts)
        with running_house(settings) as house:
            yield house


@pytest.mark.soak  # single replies are in tests/acceptance/test_continuation.py
@pytest.mark.parametrize(("whom", "seed"), CASES)
def test_a_crowds_replies_go_on_elsewhere(house: House, replicas: Replicas, whom: str, seed: int) -> None:
    """What each reader gets is what it would have got from a replica that lives, and is charged as that."""
    dice = random.Random(f"{whom}:{seed}")
    replicas.wait_until_ready()
    house.reset_breakers()
    questions = questions_of(dice)
    crowd = len(questions)
    never, death = Death(replicas, whom, 0, crowd), Death(replicas, whom, dice.randint(1, 60), crowd)
    with ThreadPoolExecutor(crowd) as pool:
        alone = [ask(house, question, never) for question in questions[:3]]
        for told, (path, body) in zip(alone, questions[3:], strict=True):
            body.update(stop_in(told.text, path))
        alone += pool.map(lambda question: ask(house, question, never), questions[3:])
        together = list(pool.map(lambda question: ask(house, question, death), questions))
    rows = rows_of(house.settings, [told.request_id for told in (*alone, *together)])

    moved = [(f"r{replicas.victim}", ENDS[whom]), (f"r{1 - replicas.victim}", "ok")]
    tried = [[(each["target"].split("/")[1], each["outcome"]) for each in row.attempts] for row in rows[len(alone) :]]

    assert death.has_come.is_set()
    assert moved in tried and all(each in (moved, moved[1:]) for each in tried)
    for one, other in zip(alone, together, strict=True):
        assert (other.error, other.is_whole, other.reasons) == (None, True, one.reasons)
        assert other.text == one.text
    for one_row, row in zip(rows[: len(alone)], rows[len(alone) :], strict=True):
        assert row.status == "answered"
        assert (row.input_tokens, row.output_tokens) == (one_row.input_tokens, one_row.output_tokens)
        assert row.cost_nanousd == 1000 * (row.input_tokens + 2 * row.output_tokens) - 500 * row.cached_input_tokens


def questions_of(dice: random.Random) -> list[Question]:
    """Return six questions, two in each dialect; the second of each will have a stop string."""
    seed = dice.randrange(2**31)
    kinds: list[Question] = [
        ("chat/completions", {"messages": ASK, "temperature": 1.0, "seed": seed}),
        (
            "completions",
            {"prompt": "A toll gate", "temperature": 0.8, "seed": seed, "echo": True},
        ),
        ("messages", {"messages": ASK, "temperature": 0.0}),
    ]
    return [(path, dict(body)) for _ in range(2) for path, body in kinds]


def stop_in(text: str, path: str) -> dict[str, Any]:
    """Return a stop string that ends a reply near its end."""
    at = next(at for at in range(len(text) * 3 // 4, len(text)) if text.find(text[at : at + 3]) == at)
    return {"stop_sequences" if path == "messages" else "stop": [text[at : at + 3]]}


class Death:
    """The end of a replica: every reply of a crowd has begun, and one has grown to so many pieces."""

    def __init__(self, replicas: Replicas, whom: str, at: int, crowd: int) -> None:
        self.has_come = threading.Event()
        self.model = "brisk" if whom == "frozen" else "patient"
        self._replicas, self._whom, self._at, self._crowd = replicas, whom, at, crowd
        self._begun = 0
        self._lock = threading.Lock()

    def hear(self, pieces: int) -> None:
        """Hear how far a reply is; its pieces are counted from 1."""
        with self._lock:
            self._begun += pieces == 1
            if 0 < self._at <= pieces and self._begun == self._crowd and not self.has_come.is_set():
                self._replicas.kill(self._whom)
                self.has_come.set()


def ask(house: House, question: Question, death: Death) -> Told:
    """Ask for a stream, and tell ``death`` how it grows."""
    path, body = question
    lines, pieces = list[str](), 0
    with house.client() as client:
        asked = {"model": death.model, "stream": True, "ignore_eos": True, "max_tokens": TOKENS, **body}
        with client.stream("POST", f"/v1/{path}", json=asked, timeout=120) as answer:
            for line in lines_of(answer):
                lines.append(line)
                if line.startswith("data: {") and text_of(json.loads(line[6:])):
                    pieces += 1
                    death.hear(pieces)
    return Told(answer.headers["x-request-id"], lines)
