# One engine step: the scheduler picks sequences and gives them room, the runner computes, the sequences accept what
# they were given, finished ones leave, and the tokens go out as events. On a device that works by itself a step is
# launched before the results of the one before are read, so that it never waits for the host.

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, count

from gpu_backend.engine.output_processor import OutputProcessor
from gpu_backend.engine.requests import find_problem, make_sequences, refusal
from gpu_backend.engine.transfers import Transfers
from gpu_backend.kv_cache.block_log import BlockLog
from gpu_backend.kv_cache.block_tables import shared_hashes
from gpu_backend.kv_cache.blocks import BlockManager
from gpu_backend.kv_transfer.seam import KvTransfer
from gpu_backend.lora.loading import AdapterLoader
from gpu_backend.scheduling.arrival import refuse_on_arrival
from gpu_backend.scheduling.grammar_queue import GrammarQueue
from gpu_backend.scheduling.load import LoadMeter
from gpu_backend.scheduling.running import SwapChoice
from gpu_backend.scheduling.scheduler import Scheduler
from gpu_backend.speculation.planner import make_speculator
from gpu_backend.step.block_events import BlockEvent
from gpu_backend.step.config import EngineConfig
from gpu_backend.step.limits import Limits
from gpu_backend.step.messages import (
    Abort,
    AdapterLoaded,
    Command,
    Drain,
    Drained,
    Embed,
    Event,
    FinishReason,
    Generate,
    LoadAdapter,
    LoadModel,
    LoadReport,
    NewTokens,
    Sleep,
    SleepAnswer,
    UnloadAdapter,
    WakeUp,
)
from gpu_backend.step.plan import DeviceLost, Launched, StepPlan, StepRunner
from gpu_backend.step.sequence import Sequence

PATIENCE = 0.005  # seconds that an idle loop waits for a grammar, or for another engine
FAILURES_IN_A_ROW = 3  # steps that may raise before the device is given up


@dataclass(frozen=True, slots=True)
class _Due:
    """A step whose result is to be read."""

    plan: StepPlan
    step: Launched
    planned: float  # clock readings
    launched: float


class EngineLoop:
    """Takes commands and makes events, one step at a time. It knows neither pipes nor devices.

    ``vocab_size`` and ``eos_token_ids`` are the model's; no sequence grows beyond ``max_model_len`` tokens, which must
    fit into ``num_blocks``.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        num_blocks: int,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarQueue | None = None,
        adapters: AdapterLoader | None = None,
        transfer: KvTransfer | None = None,
    ) -> None:
        steps, prefixes, block_size = config.steps, config.prefixes, config.cache.block_size
        assert limits.max_model_len <= num_blocks * block_size
        longest = -(-limits.max_model_len // block_size)
        self.blocks = BlockManager(
            num_blocks,
            block_size,
            # Whatever is protected, the longest sequence alone must find room.
            num_protected=min(int(prefixes.protected_cache_share * num_blocks), num_blocks - longest),
            shared=shared_hashes(prefixes.shared_prefixes if prefixes.prefix_caching else (), block_size),
            clock=clock,
            num_host_blocks=limits.num_host_blocks,
            log=BlockLog(block_size) if config.kv_events.publishes else None,
        )
        swapping = SwapChoice(steps.step_cost or limits.assumed_cost, steps.step_cost is not None, limits.copy_seconds)
        speculator = make_speculator(config, limits)
        self.scheduler = Scheduler(config, self.blocks, clock, speculator, swapping, runner.keeps_states)
        self.runner = runner
        self._steps = steps
        self._limits = limits
        self._clock = clock
        self._meter = LoadMeter(clock())
        self._output_processor = OutputProcessor(config, self.scheduler, self._meter, clock)
        self._ids = count(1)
        # Replies of requests that are in no queue yet: they wait for a grammar, or for blocks of another engine.
        self._pending: dict[str, list[Sequence]] = {}
        self._grammars = GrammarQueue(None) if grammars is None else grammars
        self._adapters = adapters
        self._transfers: Transfers | None = None
        if transfer is not None:
            self._transfers = Transfers(transfer, self.scheduler, clock, config.transfer.kv_pull_seconds)
            self._output_processor.hold = self._transfers.hold
        self._draining = False
        self._drained = False
        self._is_asleep = False
        self._to_sleep: Sleep | None = None  # once nothing runs any more
        self._failures = 0
        self._overlaps = runner.is_asynchronous if steps.async_scheduling is None else steps.async_scheduling
        if self.scheduler.speculator is not None and self._overlaps:
            self.scheduler.speculator.most_ahead = runner.most_ahead
        self._due: _Due | None = None

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        is_waiting = bool(self._grammars) or bool(self._adapters)
        is_waiting = is_waiting or (self._transfers is not None and self._transfers.has_work())
        return bool(self.scheduler.replies) or self._due is not None or is_waiting

    def load(self) -> LoadReport:
        """Describe the engine's state."""
        report = self._meter.report(self.scheduler, self.blocks, self._clock())
        if self._transfers is not None:
            report.counters.update(self._transfers.counters())
        return report

    def take_block_events(self) -> list[BlockEvent]:
        """Return what the prefix cache gained and lost since the last time."""
        return [] if self.blocks.log is None else self.blocks.log.take()

    def handle(self, command: Command) -> list[Event]:
        """Take a command; what can be said about it at once comes back."""
        match command:
            case Generate() | Embed():
                return self._take(command)
            case Abort(request_id, reply_index):
                leaving = self.scheduler.replies.of(request_id, reply_index)
                aborted = [self._output_processor.finish(sequence, FinishReason.ABORT) for sequence in leaving]
                return [*aborted, *self._abort_pending(request_id, reply_index), *self._rest_if_empty()]
            case LoadAdapter(adapter):
                assert self._adapters is not None, "an engine without room for adapters is asked for none"
                self._adapters.let_go(self._used_adapters)  # one may have been unloaded just before
                return [*self._adapters.begin(adapter)]
            case UnloadAdapter(number):
                assert self._adapters is not None, "an engine without room for adapters has none"
                self._adapters.unload(number)
                return []
            case Drain():
                self._draining = True
                return self._rest_if_empty()
            case Sleep():
                self._to_sleep = command
                if self._transfers is not None:
                    self._transfers.end_leases()
                return self._rest_if_empty()
            case WakeUp(number):
                return [SleepAnswer(number, self._wake_up())]
            case LoadModel():
                return []  # it ends this loop

    def close(self) -> None:
        """Exchange no blocks any more: threads that do would outlive the loop."""
        if self._transfers is not None:
            self._transfers.close()

    def step(self) -> list[Event]:
        """Schedule, run, accept; return what to tell whom. Raises if the runner fails for good, or repeatedly."""
        started = self._clock()
        self._take_pulled()
        answers = [*self._take_compiled(), *self._move_adapters()]
        return [*answers, *self._compute(started), *self._rest_if_empty()]

    def _compute(self, started: float) -> list[Event]:
        events: list[Event] = []
        plan = self.scheduler.schedule(may_preempt=self._due is None)
        if plan is None:
            events += self._settle()
            plan = self.scheduler.schedule()
            assert plan is not None, "a sequence may be preempted when no result is due"
        launched = self._clock()
        failure: Exception | None = None
        step: Launched | None = None
        try:
            step = self.runner.launch(plan) if plan.sequences or plan.copies else None
        except Exception as error:
            failure = error
        if self._transfers is not None:
            self._transfers.begin_pulls()
            if self.scheduler.admission.lacks_room and not self.scheduler.running:
                self._transfers.end_oldest_lease()
        # While the device computes, the tokens of the step before reach their callers and their grammars.
        events += self._settle()
        if step is not None:
            self._due = _Due(plan, step, started, launched)
            try:
                step.sample()
            except Exception as error:
                failure = error
        if failure is not None:
            self._due = None
            return [*events, *self._survive(plan, failure, launched)]
        return events if self._overlaps and plan.may_be_followed else [*events, *self._settle()]

    def _settle(self) -> list[Event]:
        """Read the result that is due, if one is."""
        due, self._due = self._due, None
        if due is None:
            return []
        try:
            result = due.step.result()
        except Exception as error:
            return self._survive(due.plan, error, due.launched)
        self._failures = 0
        return self._output_processor.accept(due.plan, result, due.planned)

    def _take(self, command: Generate | Embed) -> list[Event]:
        if self._draining:
            return refusal(command, "the engine is draining; send this to another replica")
        if self._is_asleep:
            return refusal(command, "the engine sleeps; wake it, or send this to another replica")
        if command.request_id in self._pending or self.scheduler.replies.of(command.request_id):
            return refusal(command, f"request id {command.request_id!r} is already in use")
        if problem := find_problem(command, self._limits):
            return refusal(command, problem)
        if command.adapter is not None and (self._adapters is None or command.adapter not in self._adapters):
            return refusal(command, f"the adapter {command.adapter.name} is not loaded any more")
        if refused := refuse_on_arrival(command, self.scheduler, self._steps):
            return [refused]
        replies = make_sequences(command, self._limits, self._ids, self._clock(), self._meter.steps)
        self._pending[command.request_id] = replies
        if isinstance(command, Generate) and self._transfers is not None and self._transfers.add(command, replies):
            return []
        self._let_wait(command, replies)
        return []

    def _let_wait(self, command: Generate | Embed, replies: list[Sequence]) -> None:
        """Let a request wait for its grammar, if it has one, and then for its turn."""
        if isinstance(command, Generate) and command.sampling.grammar is not None:
            self._grammars.add(command, replies)
        else:
            self._queue(command, replies)

    def _queue(self, command: Generate | Embed, replies: list[Sequence]) -> None:
        del self._pending[command.request_id]
        self.scheduler.add(replies)

    def _abort_pending(self, request_id: str, reply_index: int | None) -> list[Event]:
        """Let a request go that is in no queue yet, or one of its replies; return their last events."""
        replies = self._pending.get(request_id, [])
        leaving = [reply for reply in replies if reply_index in (None, reply.reply_index)]
        for reply in leaving:
            replies.remove(reply)
        if not replies:
            self._pending.pop(request_id, None)
        return [NewTokens(request_id, reply.reply_index, (), finish_reason=FinishReason.ABORT) for reply in leaving]

    def _take_pulled(self) -> None:
        """Queue the requests whose blocks came from another engine, or will not; without other work, wait a moment."""
        if self._transfers is None or not self._transfers.has_work():
            return
        is_idle = self._due is None and not self.scheduler.running
        is_idle = is_idle and (not self.scheduler.replies or self.scheduler.admission.lacks_room)
        for command, replies in self._transfers.advance(PATIENCE if is_idle else 0.0):
            self._let_wait(command, replies)

    def _move_adapters(self) -> list[AdapterLoaded]:
        """Load and unload what is to be, between two steps; without other work, wait a moment for one."""
        if not self._adapters:
            return []
        self._adapters.let_go(self._used_adapters)
        return self._adapters.advance(PATIENCE if not self.scheduler.replies else 0.0)

    def _used_adapters(self) -> set[int]:
        replies = chain(self.scheduler.replies, *self._pending.values())
        return {reply.request.adapter.number for reply in replies if reply.request.adapter is not None}

    def _take_compiled(self) -> list[Event]:
        """Queue the requests whose grammars are compiled; without other work, wait a moment for one."""
        answers: list[Event] = []
        for command, replies, problem in self._grammars.compiled(PATIENCE if not self.scheduler.replies else 0.0):
            if problem is not None:
                del self._pending[command.request_id]
                answers += refusal(command, problem, is_bad_grammar=True)
                continue
            self._queue(command, replies)
            if command.resume_token_ids and (constraint := replies[0].constraint) and constraint.is_complete:
                answers.append(self._output_processor.finish(replies[0], FinishReason.STOP))
        return answers

    def _survive(self, plan: StepPlan, error: Exception, launched: float) -> list[Event]:
        """Fail the sequences of a step that raised, and go on; a device that keeps failing is given up."""
        if isinstance(error, DeviceLost):
            raise error
        events = self._output_processor.fail(plan, error, self._clock() - launched)
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            raise RuntimeError(f"{self._failures} steps in a row failed") from error
        return events

    def _rest_if_empty(self) -> list[Event]:
        """Say that the engine is drained, or let it sleep, if that was asked and there is nothing left to do."""
        if self.has_work():
            return []
        events: list[Event] = []
        if self._draining and not self._drained:
            self._drained = True
            events.append(Drained())
        if self._to_sleep is not None and not self.blocks.num_in_use:
            events.append(SleepAnswer(self._to_sleep.number, self._sleep()))
            self._to_sleep = None
        return events

    def _sleep(self) -> str | None:
        """Give the device's memory back; return what kept the runner from it."""
        if not self._is_asleep:
            self.blocks.clear()
            try:
                self.runner.sleep()
            except Exception as error:
                return f"its memory cannot be given back: {error}"
            self._is_asleep = True
        return None

    def _wake_up(self) -> str | None:
        """Take the device's memory again; return what kept the runner from it."""
        self._to_sleep = None
        if self._is_asleep:
            try:
                self.runner.wake_up()
            except Exception as error:
                return f"its memory cannot be had again: {error}"
            self._is_asleep = False
        return None
