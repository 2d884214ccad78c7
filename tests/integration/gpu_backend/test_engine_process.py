# The engine in its own process: what comes first, what happens when either side goes, and what it costs while idle.

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_backend.engine.process import EngineProcess
from gpu_backend.step.config import EngineConfig, engine_config
from gpu_backend.step.messages import (
    Abort,
    Drain,
    Drained,
    Embed,
    Embedding,
    Event,
    FinishReason,
    Generate,
    LoadReport,
    NewTokens,
    Ready,
)
from gpu_backend.step.sampling_params import SamplingParams
from tests.support.engine import answer_all, greedy, model_loop
from tests.support.tiny_heads import write_eagle_head
from tests.support.tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel())


@pytest.fixture(scope="module")
def config(folder: Path) -> EngineConfig:
    """One thread, on the CPU, with host memory for KV blocks, and a head that drafts; what its steps take is not
    measured."""
    settings: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 8, "measures_step_cost": False}
    head = write_eagle_head(folder / "head", TinyModel(), eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    settings |= {"host_kv_bytes": 200_000, "speculative_method": "eagle3", "speculative_model": str(head)}
    return engine_config(model=str(folder), device="cpu", **settings)


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[EngineProcess]:
    """A running engine; its ``Ready`` has been read."""
    process = EngineProcess.start(config)
    assert isinstance(process.receive()[0], Ready)
    yield process
    process.stop()
    assert not process.is_alive()


def receive_until(engine: EngineProcess, done: Callable[[Event], bool]) -> list[Event]:
    """Collect events up to and including the one that ``done`` knows."""
    events: list[Event] = []
    while not any(map(done, events)):
        events += engine.receive()
    return events


def finished(request_id: str) -> Callable[[Event], bool]:
    """Return whether an event is the last of that request's reply."""
    return lambda event: (
        isinstance(event, NewTokens) and event.request_id == request_id and event.finish_reason is not None
    )


def likeliest(events: Iterable[NewTokens]) -> list[int]:
    """Return the likeliest token at each place."""
    return [place.top[0][0] for event in events for place in event.logprobs if place is not None]


def test_tokens_come_through_the_pipe(engine: EngineProcess, folder: Path) -> None:
    """The process says what the loop says, with log-probabilities, timings and embeddings intact."""
    prompt = tuple(range(40))
    command = Generate("a", prompt, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2))
    engine.send(Embed("e", prompt))
    engine.send(command)

    events = receive_until(engine, finished("a"))

    expected = answer_all(model_loop(folder), [command, Embed("e", prompt)])
    tokens = [event for event in events if isinstance(event, NewTokens)]
    (embedding,) = [event for event in events if isinstance(event, Embedding)]
    assert [token for event in tokens for token in event.token_ids] == expected["a", 0].token_ids
    assert likeliest(tokens) == likeliest(expected["a", 0].events)
    assert tokens[-1].timings is not None
    assert embedding.vector == pytest.approx(expected["e", 0].vector, abs=1e-5)


def test_abort_through_the_pipe_ends_the_reply(engine: EngineProcess) -> None:
    """A long reply stops soon after the abort, and the load report shows its blocks free."""
    ends: list[FinishReason | None] = []
    while FinishReason.ABORT not in ends and len(ends) < 5:  # it takes but a blink: we may have stood still for that
        engine.send(greedy("long", range(20), 450))
        receive_until(engine, lambda event: isinstance(event, NewTokens) and event.request_id == "long")
        engine.send(Abort("long"))
        events = receive_until(engine, finished("long"))
        ends += [event.finish_reason for event in filter(finished("long"), events) if isinstance(event, NewTokens)]
    report = receive_until(engine, lambda event: isinstance(event, LoadReport) and event.running == 0)[-1]

    assert ends[-1] is FinishReason.ABORT
    assert isinstance(report, LoadReport)
    assert report.free_blocks == report.total_blocks


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_group_leave_the_engine_to_its_parent(engine: EngineProcess, name: signal.Signals) -> None:
    """Ctrl-C or a service manager's stop must not cut replies that the parent still wants to finish."""
    os.kill(engine.pid, name)

    engine.send(greedy(name.name, range(20), 3))

    assert sum(len(e.token_ids) for e in receive_until(engine, finished(name.name)) if isinstance(e, NewTokens)) == 3


def test_idle_engine_reports_once_a_second_and_costs_nothing(engine: EngineProcess) -> None:
    """Without work the process sleeps: a heartbeat a second, and next to no CPU time."""
    receive_until(engine, lambda event: isinstance(event, LoadReport))
    process = psutil.Process(engine.pid)
    before, started = process.cpu_times(), time.monotonic()

    reports = [event for _ in range(4) for event in engine.receive()]

    elapsed, after = time.monotonic() - started, process.cpu_times()
    assert all(isinstance(event, LoadReport) for event in reports)
    assert 1.5 < elapsed < 20  # the first ones may have waited for us
    assert (after.user - before.user) + (after.system - before.system) < 0.1


def test_draining_process_says_when_it_is_empty_and_its_death_is_noticed(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``Drained`` comes after the last token of what was running; a killed process ends in ``EOFError``.

    As it started it measured what its steps take, since nothing says otherwise.
    """
    engine = EngineProcess.start(engine_config(model=str(folder), device="cpu", num_threads=1, max_num_seqs=8))
    engine.send(greedy("runs", range(20), 30))
    engine.send(Drain())

    events = receive_until(engine, lambda event: isinstance(event, Drained))
    os.kill(engine.pid, signal.SIGKILL)

    assert isinstance(events[0], Ready)
    assert any(map(finished("runs"), events))
    cost = json.loads(capfd.readouterr().err.partition("a step costs ")[2].splitlines()[0])
    assert cost.keys() == {"fixed", "weights", "token", "context", "pair", "launching"} and any(cost.values())
    with pytest.raises(EOFError):
        while True:
            engine.receive()


def test_checkpoint_that_cannot_be_loaded_ends_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One clear line goes to stderr, and the pipe closes."""
    engine = EngineProcess.start(engine_config(model=str(tmp_path), device="cpu"))

    with pytest.raises(EOFError):
        engine.receive()

    engine.stop()
    assert capfd.readouterr().err.splitlines() == [
        f"gpu_backend: cannot load {tmp_path}: {tmp_path}/config.json does not exist; "
        "a Hugging Face checkpoint folder is needed"
    ]


PARENT = """
import sys, time
from gpu_backend.step.config import engine_config
from gpu_backend.engine.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess.start(engine_config(sys.argv[1], device="cpu", num_threads=1, measures_step_cost=False))
    if sys.argv[2] == "ready":
        engine.receive()
    print(engine.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("moment", ["ready", "loading"])
def test_engine_dies_with_its_parent(folder: Path, moment: str) -> None:
    """When the parent is killed, the engine goes too, at whatever stage it is."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder), moment], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    parent.kill()
    parent.wait()

    child.wait(timeout=5)
    parent.stdout.close()
