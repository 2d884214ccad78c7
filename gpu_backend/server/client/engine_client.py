# The engine's process as the HTTP front sees it: calls go out, events come back to the calls that wait for them, and a
# process that died is replaced by one that goes on with its work. The event loop owns the state; one thread reads
# events, another writes commands.

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from queue import SimpleQueue
from typing import Protocol

from gpu_backend.engine.process import EngineProcess
from gpu_backend.server.client.adapter_names import AdapterNames
from gpu_backend.server.client.call_recovery import DIED, CallRecovery
from gpu_backend.server.client.engine_call import EngineCall
from gpu_backend.server.client.sleep_switch import SleepSwitch
from gpu_backend.step.block_events import AllBlocksCleared, BlockEvent
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.messages import (
    Abort,
    AdapterLoaded,
    BlocksChanged,
    Command,
    Drain,
    Drained,
    Embed,
    Embedding,
    Event,
    Generate,
    LoadModel,
    LoadReport,
    NewTokens,
    Ready,
    Refused,
    SleepAnswer,
)
from protocol.errors import Overloaded

log = logging.getLogger("gpu_backend")

RESTARTS = 3  # within RESTART_WINDOW; the next death is final
RESTART_WINDOW = 60.0  # seconds
RESTART_PAUSE = 1.0  # seconds more before each further one; the first comes at once
STOP_WITHIN = 2.0  # seconds
RESUMES_WITHIN = 30.0  # seconds after a death; calls wait no longer for the next process
MOST_PICTURE_BYTES = 2**30  # of pixels of open calls: they lie here and in the process


class EngineState(StrEnum):
    """Whether the engine takes requests."""

    STARTING = "starting"  # the weights are being loaded, for the first time or again
    ACTIVE = "active"  # steps can run
    SLEEPING = "sleeping"  # what runs is finished, then the device's memory given back until it is woken
    DRAINING = "draining"  # what runs is finished, nothing else is taken
    FAILED = "failed"  # it died too often, or could not start at all


class Process(Protocol):
    """What is asked of ``gpu_backend.engine.process.EngineProcess``."""

    def send(self, command: Command) -> None: ...

    def receive(self) -> tuple[Event, ...]: ...

    def stop(self, timeout: float = 5.0) -> None: ...


class EngineClient:
    """Keeps one engine process running and hands its events out.

    At most ``max_waiting`` requests wait for their first token. A process that dies is replaced at most ``RESTARTS``
    times within ``RESTART_WINDOW`` seconds, and not at all if it never became ready; then ``on_failed`` is called.
    The next process goes on with all calls, but those whose client goes on elsewhere, and what may have been the cause:
    calls that two processes died of are let in one after the other, and a third death ends its own.
    It lives on the event loop of the main thread: the child dies with the thread that started it.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_waiting: int = 4096,
        start_process: Callable[[EngineConfig], Process] = EngineProcess.start,
        on_failed: Callable[[], None] = lambda: None,
        on_blocks: Callable[[Sequence[BlockEvent]], None] = lambda events: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        self.load: LoadReport | None = None
        self.restarts = 0
        self.num_heard = 0  # times that a process said something: reports come every second, also from an idle one
        self._busy_before = 0.0  # seconds in steps of processes that died
        self._opened: float | None = None
        self.adapters = AdapterNames(config.lora, self.send)
        self._sleep = SleepSwitch(self.send)
        self._config = config
        self._max_waiting = max_waiting
        self._start_process = start_process
        self._on_failed = on_failed
        self._on_blocks = on_blocks  # what the prefix cache gains and loses; each process begins with nothing
        self._clock = clock
        self._calls: dict[str, EngineCall] = {}
        self._waiting: set[str] = set()  # request ids without a first event
        self._deaths: list[float] = []
        self._is_loading = True  # the process that runs now is not ready yet
        self._recovery = CallRecovery(self._send_all)  # what a dead process had, for the next one
        self._is_closing = False
        self.model_number = 0  # another one with each model that its process is told to take
        # Another model, whether it is there, and since when it is loaded: that is the time of the instance to come.
        self._taking: tuple[EngineConfig, asyncio.Future[bool], float] | None = None

    async def open(self) -> None:
        """Start the process. It is not ready yet when this returns."""
        self._loop = asyncio.get_running_loop()
        self._opened = self._clock()
        self._start()

    async def close(self) -> None:
        """Stop the process; calls still open fail."""
        self._is_closing = True
        self._commands.put(None)
        await asyncio.to_thread(self._process.stop, STOP_WITHIN)
        self._hold_calls()
        self._recovery.fail("The engine was stopped.")

    @property
    def num_waiting(self) -> int:
        """Requests that have no token yet."""
        return len(self._waiting)

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the engine was opened, or took its model. The device is taken from then on, also while weights
        are loaded."""
        return 0.0 if self._opened is None else self._clock() - self._opened

    @property
    def busy_seconds(self) -> float:
        """Seconds in steps since then, as far as its processes have reported them."""
        return self._busy_before + (self.load.gpu_busy_seconds if self.load is not None else 0.0)

    def call(self, commands: Sequence[Generate | Embed], *, fails_over: bool = False) -> EngineCall:
        """Hand commands to the engine. Raises ``Overloaded`` if it takes none now or too many wait already.

        ``fails_over``: if the process dies, say so at once instead of going on with the next one.
        """
        self.refuse_if_closed()
        if len(self._waiting) + len(commands) > self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} requests are waiting for this engine already. Try again later.")
        call = EngineCall(self, commands, fails_over=fails_over)
        if call.picture_bytes:
            held = sum(each.picture_bytes for each in {*self._calls.values()})
            if held + call.picture_bytes > MOST_PICTURE_BYTES:
                raise Overloaded("This engine has as many pictures as it has memory for. Try again later.")
        self._send_all(call, commands)
        return call

    def send(self, command: Command) -> None:
        """Hand one command over without waiting."""
        self._commands.put(command)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Abort requests that no caller waits for any more."""
        for request_id in request_ids:
            if (call := self._calls.pop(request_id, None)) is not None:
                self._waiting.discard(request_id)
                self.send(Abort(request_id))
                self._recovery.end_trial(call)

    async def sleep(self) -> None:
        """Take no more requests; once what runs is finished, give the device's memory back.

        Returns when that is done, or when the engine was woken meanwhile. Raises ``Overloaded`` where it cannot be.
        """
        if self.state is not EngineState.SLEEPING:
            self.refuse_if_closed()
        self.state = EngineState.SLEEPING
        await self._sleep.turn(is_on=True)

    async def wake_up(self) -> None:
        """Take requests again, as soon as the device's memory is had again. Raises ``Overloaded`` where it is not."""
        if self.state is EngineState.SLEEPING:
            await self._sleep.turn(is_on=False)
        self.refuse_if_closed()

    async def load_model(self, config: EngineConfig) -> None:
        """Have the process, which sleeps, take another model; return when it takes requests for that.

        Raises ``Overloaded`` where it does not sleep, or cannot load it: then a new process has the model of before.
        """
        if self.state is not EngineState.SLEEPING:
            raise Overloaded("The engine does not sleep: POST /sleep first, which ends what runs.", retry_after=5)
        if self._sleep.is_waiting or self._is_loading or self._calls:  # one may be handed over as another ends
            raise Overloaded("The engine does not sleep yet: it ends what runs, or starts again.", retry_after=5)
        self.state, self._is_loading = EngineState.STARTING, True
        self._sleep.is_on = False
        loaded = self._loop.create_future()
        self._taking = config, loaded, self._clock()
        self.send(LoadModel(config))
        if not await loaded:
            raise Overloaded("The model cannot be loaded, as the log says; the one before is on its way.")

    def drain(self) -> None:
        """Take no more requests; what runs is finished. There is no way back but a new process."""
        if self.state in (EngineState.ACTIVE, EngineState.SLEEPING):
            self.send(Drain())
        if self.state is not EngineState.FAILED:
            self.state = EngineState.DRAINING

    def refuse_if_closed(self) -> None:
        """Raise ``Overloaded`` unless the engine takes requests."""
        match self.state:
            case EngineState.STARTING:
                raise Overloaded("The engine is loading its model. Try again soon.")
            case EngineState.SLEEPING:
                raise Overloaded("This engine sleeps. POST /wake_up wakes it; others may be awake.", retry_after=5)
            case EngineState.DRAINING:
                raise Overloaded("This engine is draining. Send the request to another replica.", retry_after=5)
            case EngineState.FAILED:
                raise Overloaded("The engine failed and is not coming back.", retry_after=30)

    def _send_all(self, call: EngineCall, commands: Sequence[Generate | Embed]) -> None:
        for command in commands:
            self._calls[command.request_id] = call
            self._waiting.add(command.request_id)
            self.send(command)

    def _start(self) -> None:
        self._is_loading = True
        process = self._process = self._start_process(replace(self._config, lora=self.adapters.config))
        commands: SimpleQueue[Command | None] = SimpleQueue()
        self._commands = commands
        threading.Thread(target=self._read, args=(process,), name="engine-reader", daemon=True).start()
        threading.Thread(target=_write, args=(process, commands), name="engine-writer", daemon=True).start()

    def _read(self, process: Process) -> None:
        with suppress(RuntimeError):  # the event loop is closed, and so is everything else
            try:
                while True:
                    self._loop.call_soon_threadsafe(self._deliver, process.receive())
            except Exception as exc:
                if not isinstance(exc, EOFError):
                    log.exception("the engine's process sent something unreadable")
                self._loop.call_soon_threadsafe(self._lost, process)

    def _deliver(self, events: tuple[Event, ...]) -> None:
        self.num_heard += 1
        for event in events:
            match event:
                case NewTokens() | Embedding():
                    self._hand_out(event)
                case Refused():
                    self._refuse(event)
                case LoadReport():
                    self.load = event
                case Ready():
                    self.ready = event
                    if self.state is EngineState.STARTING:
                        self.state = EngineState.ACTIVE
                    log.info("the engine is ready: %s", event)
                    self._is_loading = False
                    self._end_taking(is_done=True)
                    self._on_blocks((AllBlocksCleared(),))
                    self._recovery.resume()
                    self._sleep.begin_anew()
                    self._note_awake()
                case BlocksChanged(changes):
                    self._on_blocks(changes)
                case AdapterLoaded():
                    self.adapters.answer(event)
                case SleepAnswer():
                    self._note_sleep(event)
                case Drained():
                    log.info("drained")

    def _end_taking(self, *, is_done: bool) -> None:
        """Go by the model that the process has from now on. It is another instance: its counters begin anew."""
        if self._taking is None:
            return
        (config, loaded, began), self._taking = self._taking, None
        if is_done:
            self._config, self.model_number = config, self.model_number + 1
            self._opened, self._busy_before, self.load = began, 0.0, None
        if not loaded.done():
            loaded.set_result(is_done)

    def _note_sleep(self, said: SleepAnswer) -> None:
        self._sleep.answer(said)
        log.info("the engine %s: %s", "sleeps" if self._sleep.is_on else "is awake", said.problem or "done")
        self._note_awake()

    def _note_awake(self) -> None:
        if self.state is EngineState.SLEEPING and not self._sleep.is_on and not self._sleep.is_waiting:
            self.state = EngineState.ACTIVE

    def _hand_out(self, event: NewTokens | Embedding) -> None:
        self._waiting.discard(event.request_id)
        call = self._calls.get(event.request_id)
        if call is None:
            return  # the caller has left
        call.deliver(event)
        if not call.awaits(event.request_id):
            del self._calls[event.request_id]
        self._recovery.end_trial(call)

    def _refuse(self, event: Refused) -> None:
        """Tell the caller; the other prompts of the same call are given up with this one."""
        self._waiting.discard(event.request_id)
        if call := self._calls.pop(event.request_id, None):
            self.forget([request_id for request_id, other in self._calls.items() if other is call])
            call.fail(Overloaded(event.reason, retry_after=math.ceil(event.retry_after)))
            self._recovery.end_trial(call)

    def _lost(self, process: Process) -> None:
        """The process is gone: start another that goes on with its work, if that makes sense, or tell all callers."""
        if self._is_closing or process is not self._process:
            return
        self._commands.put(None)
        self._end_taking(is_done=False)
        self._is_loading = True
        threading.Thread(target=process.stop, args=(STOP_WITHIN,), name="engine-reaper", daemon=True).start()
        self._hold_calls()
        self._deaths = [then for then in self._deaths if self._clock() - then < RESTART_WINDOW] + [self._clock()]
        if self.ready is None or len(self._deaths) > RESTARTS:
            log.error("the engine's process died (%d requests lost) and is not started again", len(self._recovery))
            self._recovery.fail(DIED)
            self.state = EngineState.FAILED
            self._sleep.fail()
            self._on_failed()
            return
        delay = (len(self._deaths) - 1) * RESTART_PAUSE
        log.error(
            "the engine's process died (%d requests wait); starting it again in %.0f s", len(self._recovery), delay
        )
        if self.state is EngineState.ACTIVE:
            self.state = EngineState.STARTING
        self._busy_before = self.busy_seconds
        self.load = None
        self.restarts += 1
        self._loop.call_later(delay, self._start_again)
        self._loop.call_later(RESUMES_WITHIN, self._give_up, self.restarts)

    def _start_again(self) -> None:
        if not self._is_closing:
            self._start()

    def _hold_calls(self) -> None:
        had = dict.fromkeys(self._calls.values())
        self._calls.clear()
        self._waiting.clear()
        self.adapters.fail()
        self._recovery.take(had)

    def _give_up(self, restarts: int) -> None:
        """Tell calls that wait for a process which takes too long."""
        if self._is_loading and self.restarts == restarts:
            self._recovery.fail(DIED)


def _write(process: Process, commands: SimpleQueue[Command | None]) -> None:
    """Send commands until None comes or the process is gone; its reader tells the rest of that story."""
    with suppress(OSError):
        while (command := commands.get()) is not None:
            process.send(command)
