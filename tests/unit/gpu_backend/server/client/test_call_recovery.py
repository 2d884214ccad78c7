# The engine's process dies, and the next one goes on with its work: what waited is asked again, replies go on where
# they were, and what makes processes die is found without taking others with it.

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from gpu_backend.server.client import engine_client
from gpu_backend.server.client.engine_call import EngineCall
from gpu_backend.server.client.engine_client import EngineClient, EngineState
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import (
    Abort,
    Command,
    Embed,
    Embedding,
    Event,
    FinishReason,
    Generate,
    LoadModel,
    NewTokens,
    Refused,
    Sleep,
    SleepAnswer,
    Timings,
)
from gpu_backend.step.sampling_params import SamplingParams
from protocol.errors import Overloaded
from tests.support.fake_engine import READY, TIMINGS, FakeEngine, silent

END = {"finish_reason": FinishReason.LENGTH, "timings": TIMINGS}
SAMPLING = SamplingParams(max_tokens=9, seed=1)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "RESTART_PAUSE", 0.0)


@contextlib.asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine_config(model="m"), start_process=engine.start)
    await client.open()
    await until(lambda: client.state is EngineState.ACTIVE)
    try:
        yield client
    finally:
        await client.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.002)


async def events_of(call: EngineCall) -> list[NewTokens | Embedding]:
    events: list[NewTokens | Embedding] = []
    async with asyncio.timeout(5):
        while not call.is_finished:
            events += await call.events()
    return events


def counting(command: Command) -> list[tuple[Event, ...]]:
    """Answer as a model that says 0, 1, 2 … 8, and goes on where a resumed reply ends; abort what is aborted."""
    if not isinstance(command, Generate):
        return silent(command) if isinstance(command, Abort) else [(Embedding("e", (1.0,), TIMINGS),)]
    events = []
    for index in range(command.first_reply, command.first_reply + command.n):
        rest = tuple(range(len(command.resume_token_ids), 9))
        events.append((NewTokens(command.request_id, index, rest[:1], cached_tokens=1, gpu_seconds=0.5),))
        last = NewTokens(command.request_id, index, rest[1:], cached_tokens=1, gpu_seconds=1.0, **END)  # type: ignore[arg-type]
        events.append((last,))
    return events


def tokens(events: list[NewTokens | Embedding], request_id: str, index: int = 0) -> list[int]:
    own = [e for e in events if isinstance(e, NewTokens) and (e.request_id, e.reply_index) == (request_id, index)]
    assert own[-1].finish_reason is not None
    return [token for event in own for token in event.token_ids]


async def test_what_waited_is_asked_again_and_replies_go_on() -> None:
    """In order, each as its client knows it; of several replies of one request, what is missing of each."""
    engine = FakeEngine()
    async with running(engine) as client:
        commands = [Generate(name, (1, 2), SAMPLING, n=n) for name, n in (("begun", 1), ("several", 3), ("queued", 2))]
        calls = [client.call([command]) for command in commands] + [client.call([Embed("e", (1,))])]
        engine.process.say(
            NewTokens("begun", 0, (0, 1), cached_tokens=7, gpu_seconds=0.25),
            NewTokens("several", 2, (0,)),
            NewTokens("several", 1, (0, 1, 2), finish_reason=FinishReason.STOP, timings=TIMINGS),
        )
        first = await calls[0].events()
        engine.script = counting
        engine.process.die()
        begun, several, queued, embedded = [await events_of(call) for call in calls]

        assert tokens([*first, *begun], "begun") == list(range(9))
        assert {e.cached_tokens for e in begun if isinstance(e, NewTokens)} == {7}
        assert [e.gpu_seconds for e in begun if isinstance(e, NewTokens)] == [0.75, 1.25]
        assert isinstance(begun[-1].timings, Timings)
        assert begun[-1].timings.gpu_seconds == TIMINGS.gpu_seconds + 0.25
        assert [tokens(several, "several", i) for i in range(3)] == [list(range(9)), [0, 1, 2], list(range(9))]
        assert [tokens(queued, "queued", i) for i in range(2)] == [list(range(9))] * 2
        assert embedded == [Embedding("e", (1.0,), TIMINGS)]
        asked = [c for c in engine.process.commands if isinstance(c, Generate)]
        assert [(c.request_id, c.n, c.first_reply, c.resume_token_ids) for c in asked] == [
            ("begun~0", 1, 0, (0, 1)),
            ("several~0", 1, 0, ()),
            ("several~2", 1, 2, (0,)),
            ("queued", 2, 0, ()),
        ]
        assert client.num_waiting == 0


async def test_a_reply_goes_on_as_often_as_it_must() -> None:
    """What a client resumed itself, a first process and a second one said is all known to the third."""
    engine = FakeEngine()
    async with running(engine) as client:
        call = client.call([Generate("a", (1,), SAMPLING, resume_token_ids=(0, 1))])
        for deaths, (name, new) in enumerate((("a", (2,)), ("a~0", (3, 4)))):
            await until(lambda: client.state is EngineState.ACTIVE and client.restarts == deaths)  # noqa: B023
            engine.process.say(NewTokens(name, 0, new, gpu_seconds=1.0))
            assert [event.request_id for event in await call.events()] == ["a"]
            engine.process.die()
        engine.script = counting
        rest = await events_of(call)

        assert tokens(rest, "a") == [5, 6, 7, 8]
        assert rest[-1].timings is not None
        assert rest[-1].timings.gpu_seconds == TIMINGS.gpu_seconds + 2.0


async def test_a_reply_whose_text_had_ended_is_not_made_again() -> None:
    """A stop string ended it: all that was missing is its last event."""
    engine = FakeEngine(lambda command: [])
    async with running(engine) as client:
        call = client.call([Generate("a", (1,), SAMPLING)])
        engine.process.say(NewTokens("a", 0, (0, 1), cached_tokens=3, gpu_seconds=0.5))
        await call.events()
        call.stop_reply("a", 0)
        engine.process.die()
        (last,) = await events_of(call)

        assert isinstance(last, NewTokens)
        assert (last.finish_reason, last.cached_tokens, last.gpu_seconds) == (FinishReason.ABORT, 3, 0.5)
        assert not any(isinstance(command, Generate) for command in engine.process.commands)


async def test_aborts_reach_replies_that_go_on() -> None:
    """By the name under which the new process knows them."""
    engine = FakeEngine(lambda command: [])
    async with running(engine) as client:
        call, gone = client.call([Generate("a", (1,), SAMPLING, n=2)]), client.call([Generate("gone", (1,), SAMPLING)])
        engine.process.say(NewTokens("a", 0, (0,)), NewTokens("a", 1, (0,)))
        await call.events()
        engine.process.die()
        gone.close()  # before there is a new one, or just after
        await until(lambda: client.restarts == 1 and client.state is EngineState.ACTIVE)
        call.stop_reply("a", 1)
        call.close()
        aborts = [Abort("a~1", 1), Abort("a~0"), Abort("a~1")]
        await until(lambda: [c for c in engine.process.commands if isinstance(c, Abort)][-3:] == aborts)

        assert client.num_waiting == 0


async def test_what_kills_processes_is_found_and_no_other_call_pays() -> None:
    """Two deaths make suspects; let in one after the other, the one that kills again is given up alone."""
    engine = FakeEngine()

    def deadly(command: Command) -> list[tuple[Event, ...]]:
        if isinstance(command, Generate) and command.request_id.startswith("poison"):
            engine.process.die()
            return []
        return counting(command) if len(engine.processes) > 2 else []

    async with running(engine) as client:
        innocent = [client.call([Generate(name, (1,), SAMPLING)]) for name in ("a", "b")]
        engine.script = deadly
        poison = client.call([Generate("poison", (1,), SAMPLING)])
        late = [client.call([Generate(name, (1,), SAMPLING)]) for name in ("c", "d")]

        with pytest.raises(EngineFailed, match="died while it worked on this request"):
            await events_of(poison)
        for name, call in zip("abcd", [*innocent, *late], strict=True):
            assert tokens(await events_of(call), name) == list(range(9))
        await until(lambda: client.state is EngineState.ACTIVE)
        assert client.restarts == 3


async def test_no_call_is_handed_to_another_model() -> None:
    """Of those that are let in one after the other the next comes as one ends, which may be as the engine falls asleep:
    no other model is loaded before they are refused."""
    engine, other = FakeEngine(), engine_config(model="other")

    def sleepy(command: Command) -> list[tuple[Event, ...]]:
        match command:
            case Sleep(number):
                return [(NewTokens("a", 0, (0,), **END), SleepAnswer(number))]  # type: ignore[arg-type]
            case Generate(request_id):
                return [(Refused(request_id, "it sleeps", 1.0),)]
        return [(READY,)]

    def is_back(count: int) -> bool:
        return len(engine.processes) == count and client.state is EngineState.ACTIVE

    async with running(engine) as client:
        calls = [client.call([Generate(name, (1,), SAMPLING)]) for name in ("a", "b", "c")]
        for count in (2, 3):
            engine.process.die()
            await until(partial(is_back, count))
        await until(lambda: bool(engine.process.commands))  # it has the first
        engine.script = sleepy
        await client.sleep()
        with pytest.raises(Overloaded, match="does not sleep yet"):
            await client.load_model(other)
        for call in calls[1:]:
            with pytest.raises(Overloaded, match="it sleeps"):
                await events_of(call)
        await client.load_model(other)

    assert [type(each) for each in engine.process.commands] == [Generate, Sleep, Generate, Generate, LoadModel]


async def test_no_call_waits_for_ever_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads too long leaves the client to look elsewhere."""
    monkeypatch.setattr(engine_client, "RESUMES_WITHIN", 0.02)
    engine = FakeEngine()
    async with running(engine) as client:
        call = client.call([Generate("a", (1,), SAMPLING)])
        engine.is_ready = False
        engine.process.die()

        with pytest.raises(EngineFailed, match="died"):
            await events_of(call)
        assert client.state is EngineState.STARTING
