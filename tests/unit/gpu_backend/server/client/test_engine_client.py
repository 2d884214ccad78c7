# The engine's process as the front sees it: who gets which event, who is told when it dies, and when it comes back.

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from gpu_backend.server.client.engine_call import EngineCall
from gpu_backend.server.client.engine_client import RESTARTS, EngineClient, EngineState
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.client.sleep_switch import SleepSwitch
from gpu_backend.step.block_events import AllBlocksCleared, BlockEvent, BlockRemoved
from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import (
    Abort,
    BlocksChanged,
    Command,
    Drain,
    FinishReason,
    Generate,
    LoadModel,
    LoadReport,
    NewTokens,
    Ready,
    Refused,
    Sleep,
    SleepAnswer,
    WakeUp,
)
from gpu_backend.step.sampling_params import SamplingParams
from protocol.errors import Overloaded
from tests.support.fake_engine import READY, FakeEngine, FakeProcess, speaking

SAMPLING = SamplingParams(max_tokens=4)


def generate(request_id: str, n: int = 1) -> Generate:
    return Generate(request_id, (1, 2), SAMPLING, n=n)


@contextlib.asynccontextmanager
async def running(engine: FakeEngine, **settings: object) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine_config(model="m"), start_process=engine.start, **settings)  # type: ignore[arg-type]
    await client.open()
    if engine.is_ready:
        await until(lambda: client.state is EngineState.ACTIVE)
    yield client
    await client.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.002)


async def all_tokens(call: EngineCall) -> list[int]:
    tokens: list[int] = []
    while not call.is_finished:
        tokens += [token for event in await call.events() if isinstance(event, NewTokens) for token in event.token_ids]
    return tokens


async def test_each_call_gets_its_own_events() -> None:
    """Events of many requests come in one message; each call sees its own, in order."""
    async with running(FakeEngine(speaking([5, 6, 7]))) as client:
        one, two = client.call([generate("a")]), client.call([generate("b", n=2)])

        assert await all_tokens(one) == [5, 6, 7]
        assert sorted(await all_tokens(two)) == [5, 5, 6, 6, 7, 7]


async def test_closing_a_call_aborts_what_still_runs() -> None:
    """A client that leaves costs the engine one step at most; a call that ended costs nothing."""
    engine = FakeEngine()
    async with running(engine) as client:
        client.call([generate("a")]).close()
        abort = await asyncio.to_thread(engine.process.wait_for, lambda c: isinstance(c, Abort))
        engine.script = speaking([5])
        finished = client.call([generate("b")])
        await all_tokens(finished)
        finished.close()

        assert abort == Abort("a")
        assert client.num_waiting == 0
        assert [c for c in engine.process.commands if isinstance(c, Abort)] == [Abort("a")]


async def test_a_refusal_ends_the_whole_call() -> None:
    """What the engine refuses becomes a 503 with its reason; the call's other prompts are given up."""
    engine = FakeEngine()
    async with running(engine) as client:
        call = client.call([generate("a"), generate("b")])
        engine.process.say(Refused("a", "This engine would take about 900 ms.", 1.2))

        with pytest.raises(Overloaded, match="about 900 ms") as refused:
            await call.events()
        abort = await asyncio.to_thread(engine.process.wait_for, lambda c: isinstance(c, Abort))

        assert refused.value.headers == {"retry-after": "2"}
        assert abort == Abort("b")
        assert client.num_waiting == 0


async def test_events_for_unknown_requests_are_ignored() -> None:
    """The engine may have said something before it heard of the abort."""
    engine = FakeEngine()
    async with running(engine) as client:
        engine.process.say(NewTokens("gone", 0, (5,)))
        engine.script = speaking([5])

        assert await all_tokens(client.call([generate("a")])) == [5]


async def test_a_new_process_has_nothing_cached() -> None:
    """Who follows the prefix cache is told what it gains and loses, and that each process begins with nothing."""
    engine, told = FakeEngine(), list[BlockEvent]()
    removed = BlockRemoved([7], "GPU")
    async with running(engine, on_blocks=told.extend) as client:
        engine.process.say(BlocksChanged((removed,)))
        engine.process.die()
        await until(lambda: client.restarts == 1 and client.state is EngineState.ACTIVE)

    assert told == [AllBlocksCleared(), removed, AllBlocksCleared()]


async def test_too_many_waiting_requests_are_refused() -> None:
    """The queue is bounded: beyond it an honest 503 says when to come back."""
    async with running(FakeEngine(), max_waiting=2) as client:
        first = client.call([generate("a"), generate("b")])
        with pytest.raises(Overloaded) as caught:
            client.call([generate("c")])
        first.close()
        client.call([generate("c")])

        assert (caught.value.status, caught.value.code) == (503, "overloaded")
        assert caught.value.headers["retry-after"] == "1"


async def test_nothing_is_taken_before_the_engine_is_ready() -> None:
    """While the weights are loaded, requests are sent elsewhere."""
    async with running(FakeEngine(is_ready=False)) as client:
        with pytest.raises(Overloaded, match="loading"):
            client.call([generate("a")])


async def test_a_draining_engine_finishes_and_takes_nothing() -> None:
    """What runs goes on; what comes is refused; the engine is told once."""
    engine = FakeEngine()
    async with running(engine) as client:
        running_call = client.call([generate("a")])
        client.drain()
        client.drain()
        with pytest.raises(Overloaded, match="draining"):
            client.call([generate("b")])
        engine.process.say(NewTokens("a", 0, (5,), finish_reason=FinishReason.LENGTH))

        assert await all_tokens(running_call) == [5]
        assert client.state is EngineState.DRAINING
        await until(lambda: Drain() in engine.process.commands)  # commands go out in a thread of their own
        assert engine.process.commands.count(Drain()) == 1


async def test_a_dead_process_is_replaced_and_who_goes_on_elsewhere_hears_of_it() -> None:
    """At once, and the next request meets a new process."""
    engine = FakeEngine()
    async with running(engine) as client:
        call = client.call([generate("a")], fails_over=True)
        first = engine.process
        first.die()
        with pytest.raises(EngineFailed, match="died"):
            await call.events()
        await until(lambda: len(engine.processes) == 2 and client.state is EngineState.ACTIVE)
        engine.script = speaking([9])

        assert await all_tokens(client.call([generate("b")])) == [9]
        assert client.restarts == 1
        await until(lambda: first.is_stopped)


async def test_busy_time_of_dead_processes_still_counts() -> None:
    """The counters belong to the start of the server: a new process goes on where the dead one had come to."""
    engine = FakeEngine()
    now = 100.0
    async with running(engine, clock=lambda: now) as client:
        engine.process.say(LoadReport(0, 0, 8, 8, 0.0, 0.0, 0.0, 0.0, gpu_busy_seconds=7.0))
        await until(lambda: client.load is not None)
        now = 130.0
        engine.process.die()
        await until(lambda: len(engine.processes) == 2 and client.state is EngineState.ACTIVE)
        at_restart = client.busy_seconds
        engine.process.say(LoadReport(0, 0, 8, 8, 0.0, 0.0, 0.0, 0.0, gpu_busy_seconds=2.0))
        await until(lambda: client.load is not None)

        assert (at_restart, client.busy_seconds, client.uptime_seconds) == (7.0, 9.0, 30.0)


async def test_a_process_that_keeps_dying_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last restart another process must decide: the front says that it failed."""
    monkeypatch.setattr("gpu_backend.server.client.engine_client.RESTART_PAUSE", 0.0)
    engine, failures = FakeEngine(), []
    async with running(engine, on_failed=lambda: failures.append(1)) as client:
        for deaths in range(1, RESTARTS + 2):
            await until(lambda: client.state is EngineState.ACTIVE and client.restarts == deaths - 1)  # noqa: B023
            engine.process.die()
        await until(lambda: client.state is EngineState.FAILED)

        assert failures == [1]
        assert len(engine.processes) == RESTARTS + 1
        with pytest.raises(Overloaded, match="failed"):
            client.call([generate("a")])


async def test_a_process_that_never_became_ready_is_not_tried_again() -> None:
    """A missing weight is missing the second time too."""
    engine, failures = FakeEngine(is_ready=False), []
    async with running(engine, on_failed=lambda: failures.append(1)) as client:
        engine.process.die()
        await until(lambda: client.state is EngineState.FAILED)

        assert failures == [1]
        assert len(engine.processes) == 1


async def test_the_engine_takes_no_requests_until_it_is_woken() -> None:
    """Both calls return when the process has said that it is done; a process that starts meanwhile is told, too."""
    engine = FakeEngine()
    async with running(engine) as client:
        asleep = asyncio.create_task(client.sleep())
        await asyncio.to_thread(engine.process.wait_for, lambda c: c == Sleep(1))
        with pytest.raises(Overloaded, match="sleeps"):
            client.call([generate("a")])
        early = asleep.done()
        engine.process.die()
        await until(lambda: len(engine.processes) == 2)
        await asyncio.to_thread(engine.process.wait_for, lambda c: c == Sleep(2))
        engine.process.say(SleepAnswer(2))
        await asleep
        state = client.state
        woken = asyncio.create_task(client.wake_up())
        await asyncio.to_thread(engine.process.wait_for, lambda c: c == WakeUp(3))
        engine.process.say(SleepAnswer(3))
        await woken
        engine.script = speaking([5])

        assert not early and state is EngineState.SLEEPING
        assert await all_tokens(client.call([generate("b")])) == [5]


async def test_an_engine_that_cannot_sleep_or_wake_says_so() -> None:
    """It stays as it is. One whose process dies while it is woken is awake: the next one has its memory."""
    engine = FakeEngine()
    async with running(engine) as client:
        engine.script = lambda c: [(SleepAnswer(c.number, "no room"),)] if isinstance(c, Sleep | WakeUp) else []
        with pytest.raises(Overloaded, match="cannot sleep: no room"):
            await client.sleep()
        states = [client.state]
        engine.script = lambda c: [(SleepAnswer(c.number),)] if isinstance(c, Sleep) else []
        await client.sleep()
        engine.script = lambda c: [(SleepAnswer(c.number, "no room"),)] if isinstance(c, WakeUp) else []
        with pytest.raises(Overloaded, match="cannot wake up: no room"):
            await client.wake_up()
        states.append(client.state)
        engine.script = lambda c: []
        woken = asyncio.create_task(client.wake_up())
        await asyncio.to_thread(engine.process.wait_for, lambda c: c == WakeUp(4))
        engine.process.die()
        await woken

        assert [*states, client.state] == [EngineState.ACTIVE, EngineState.SLEEPING, EngineState.ACTIVE]


async def test_a_process_that_sleeps_takes_another_model_or_the_one_before_comes_back() -> None:
    """One that is awake takes none; where it dies of the new one, the next process has the model of before."""
    engine = FakeEngine(lambda c: [(SleepAnswer(c.number),)] if isinstance(c, Sleep) else [])
    other, broken = engine_config(model="other"), engine_config(model="broken")
    async with running(engine) as client:
        with pytest.raises(Overloaded, match="does not sleep"):
            await client.load_model(other)
        await client.sleep()
        refused = asyncio.create_task(client.load_model(broken))
        await asyncio.to_thread(engine.process.wait_for, lambda c: isinstance(c, LoadModel))
        states = [client.state]
        engine.process.die()
        with pytest.raises(Overloaded, match="cannot be loaded"):
            await refused
        await until(lambda: client.state is EngineState.ACTIVE)
        await client.sleep()
        taken = asyncio.create_task(client.load_model(other))
        await asyncio.to_thread(engine.process.wait_for, lambda c: c == LoadModel(other))
        engine.process.say(READY)
        await taken
        states.append(client.state)
        engine.process.die()
        await until(lambda: len(engine.configs) == 3)

    assert states == [EngineState.STARTING, EngineState.ACTIVE]
    assert [each.checkpoint.model for each in engine.configs] == ["m", "m", "other"]


async def test_a_process_that_starts_again_asleep_is_told_of_no_other_model() -> None:
    """It has not heard of it, so that it is ready says nothing of another."""
    engine = FakeEngine(lambda c: [(SleepAnswer(c.number),)] if isinstance(c, Sleep) else [])
    async with running(engine) as client:
        await client.sleep()
        engine.is_ready = False
        engine.process.die()
        await until(lambda: client.restarts == 1)
        taken = asyncio.create_task(client.load_model(engine_config(model="other")))
        await until(lambda: len(engine.processes) == 2)
        engine.process.say(READY)
        with pytest.raises(Overloaded, match="does not sleep yet"):
            await taken

        assert client.state is EngineState.SLEEPING


async def test_another_model_is_counted_from_its_own_beginning() -> None:
    """It is another instance, from when it is loaded: what was booked of the one before is not booked again."""
    engine, now = FakeEngine(lambda c: [(SleepAnswer(c.number),)] if isinstance(c, Sleep) else []), [0.0]
    async with running(engine, clock=lambda: now[0]) as client:
        engine.process.say(LoadReport(0, 0, 8, 8, 0.0, 0.0, 0.0, 0.0, gpu_busy_seconds=3.5))
        await until(lambda: client.load is not None)
        await client.sleep()
        now[0] = 100.0
        taken = asyncio.create_task(client.load_model(engine_config(model="other")))
        await asyncio.to_thread(engine.process.wait_for, lambda c: isinstance(c, LoadModel))
        before = client.uptime_seconds, client.busy_seconds
        now[0] = 102.0
        engine.process.say(READY)
        await taken
        now[0] = 103.0

        assert before == (100.0, 3.5)
        assert (client.uptime_seconds, client.busy_seconds) == (3.0, 0.0)


async def test_all_who_ask_for_a_sleep_hear_that_there_is_none() -> None:
    """Also those whose command another took the place of; a process that is told twice leaves the engine as it is."""
    sent: list[Sleep | WakeUp] = []
    switch = SleepSwitch(sent.append)
    asked = [asyncio.create_task(switch.turn(is_on=True)) for _ in range(2)]
    await asyncio.sleep(0)
    switch.begin_anew()
    for command in sent[1:]:
        switch.answer(SleepAnswer(command.number, "no room"))
    told = await asyncio.gather(*asked, return_exceptions=True)

    assert [str(each) for each in told] == ["The engine cannot sleep: no room."] * 2
    assert not switch.is_on and not switch.is_waiting


async def test_the_last_load_report_is_kept() -> None:
    """Operators and routers read it; a restart forgets it."""
    engine = FakeEngine()
    async with running(engine) as client:
        report = LoadReport(1, 2, 3, 4, 0.5, 6.0, 7.0, 0.25)
        engine.process.say(report)
        await until(lambda: client.load is not None)

        assert client.load == report
        assert client.ready == READY


async def test_a_slow_pipe_does_not_hold_up_the_event_loop() -> None:
    """Commands are written by a thread: a full pipe blocks that, not the streams of others."""

    class Stuck(FakeProcess):
        def send(self, command: Command) -> None:
            released.wait(5)
            super().send(command)

    released = threading.Event()
    engine = FakeEngine(speaking([1]))
    engine.start = lambda config: engine.processes.append(Stuck(engine.script)) or engine.process  # type: ignore[func-returns-value,method-assign]
    async with running(engine) as client:
        call = client.call([generate("a")])
        await asyncio.sleep(0)  # the loop is free
        released.set()

        assert await all_tokens(call) == [1]


async def test_ready_changes_with_the_process() -> None:
    """A restarted engine may have another context length; the newest counts."""
    engine = FakeEngine()
    async with running(engine) as client:
        newer = Ready(total_blocks=4, block_size=16, max_model_len=32, device="cpu", dtype="float32")
        engine.process.say(newer)
        await until(lambda: client.ready == newer)

        assert client.state is EngineState.ACTIVE
