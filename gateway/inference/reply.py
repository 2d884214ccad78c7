# An open reply: events out, usage counted, the account closed exactly once. Whatever ends it, bytes that tell the
# client "this is whole" leave only after the journal knows.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace

from billing.core.records import CHARGED, REQUESTS, Served, Status, UsageRecord, units_of
from billing.ledger.price_editions import edition_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.accumulate import Collector
from gateway.calls.call import record_for, served_by
from gateway.calls.hooks import Ending, KeepEnding, ReplyHook
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.inference.attempt import AttemptContext
from gateway.inference.call_closer import CallCloser
from gateway.inference.failover import FailoverStream
from gateway.inference.meter import Meter
from gateway.telemetry.pace import Pace
from gateway.upstreams.wire.errors import UpstreamFailure, UpstreamFiltered, UpstreamRefused
from protocol.chat import FinishReason
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.inference import WholeReply, choices_asked
from protocol.usage import Usage
from router.catalog.targets import Target


class Reply:
    """One call's reply, from its first event to its settled hold.

    Read it once: ``pieces()`` for a stream, ``collect()`` for a whole answer. Then ``close()``, always; it never waits,
    so a cancelled task can call it.
    """

    def __init__(
        self,
        context: AttemptContext,
        account: CallAccounting,
        source: FailoverStream,
        hooks: Sequence[ReplyHook],
        closer: CallCloser,
        clock: Clock,
        keep_ending: KeepEnding[Reply] | None = None,
        cache: str = "off",
    ) -> None:
        call, answering = context.call, source.answering
        self.call = call
        self.route = context.route
        self.account = account
        self.log = context.log
        self.first_token_seconds = clock.monotonic() - call.started
        self._clock = clock
        self._closer = closer
        self._keep_ending = keep_ending
        self._source = source
        self.meter = Meter(call, source, account.prompt)
        self.cache = cache  # whether its answer came from the cache: "hit", "miss" or "off"
        self.is_kept = answering.is_kept  # then nothing is used, whatever goes past
        if not self.is_kept:
            account.follow(self.meter.so_far, self._served)
        self._hooks = hooks
        self.dropped = answering.dropped  # fields of the request that change no meaning and were not passed on
        self._delta_hooks = [hook for hook in self._hooks if type(hook).delta is not ReplyHook.delta]
        self._is_guarded = any(type(hook).released is not ReplyHook.released for hook in self._delta_hooks)
        self._ended: set[int] = set()  # of a guarded reply: choices whose last delta may go out
        self._choices = choices_asked(call.request)
        self._finished: set[int] = set()  # choices that have said why they ended
        self._has_grown = True  # whether a token has come since events were last waited for
        self._was_sent = False
        is_stream = answering.whole is None and not self.is_kept and bool(self.log.attempts)
        self._pace = Pace(self.log.attempts[-1].ms / 1000) if is_stream else None
        self._is_counted = answering.usage is not None  # by its upstream
        self._failure: UpstreamFailure | None = None  # how its upstream broke it
        self._violation: ContentPolicyViolation | None = None  # why the rest may not go out
        self._kept_record: UsageRecord | None = None  # while the end is being kept, and after

    @property
    def target(self) -> Target:
        """The target that answers."""
        return self._source.answering.target

    @property
    def record(self) -> UsageRecord:
        """The final usage record. Only for a reply that has ended."""
        record = self.account.record or self._kept_record
        assert record is not None, "the reply has not ended"
        return record

    async def pieces(self) -> AsyncIterator[list[Event]]:
        """Yield the events as they arrive, those that came together in one list.

        From the event that finishes the last choice on, everything is withheld until the upstream has said that the
        reply is whole and the journal knows; then it comes with a UsageReport and a ReplyEnd. Raises UpstreamFailure
        when the upstream breaks, after what hooks withheld; what was made until then is sent and charged.
        """
        async for events in self._events():
            if type(events[-1]) is ReplyEnd:
                await self._conclude(events)
            self._was_sent = self._was_sent or any(map(_is_answer, events))
            yield events

    async def collect(self) -> tuple[WholeReply, Usage]:
        """Return the whole reply once the journal knows it.

        Raises UpstreamFailure when the upstream breaks, ContentPolicyViolation when the reply may not go out.
        """
        self.account.owe_whole_only()
        if (whole := self._source.answering.whole) is not None:
            self.meter.take_whole(whole)
            whole = await self._through_whole(whole)
        else:
            collector = Collector(self.call.request)
            async for events in self._events():
                for event in events:
                    if isinstance(event, Delta):
                        collector.add(event)
            whole = collector.reply()
        if self._violation is not None:
            await self._conclude(self._violation)
            raise self._violation
        usage = self.meter.usage()
        await self._conclude((whole, usage))
        return whole, usage

    async def _events(self) -> AsyncIterator[list[Event]]:
        held: list[Event] = []
        fresh = self._source.first
        while True:
            out, is_whole = self._pass_on(fresh, held)
            if self._is_guarded and self._violation is None:
                is_whole = await self._release(out, held, is_over=is_whole) or is_whole
            if self._has_grown and self._pace is not None:
                self._pace.grow()
            if is_whole and self._keep_ending is None:  # the account closes at once: all of it may go out together
                yield [*out, *held, UsageReport(self.meter.usage()), ReplyEnd()]
                return
            if out:
                yield out
            if is_whole:
                yield [*held, UsageReport(self.meter.usage()), ReplyEnd()]
                return
            try:
                fresh = await self._next_events()
            except UpstreamFailure as exc:
                self._failure = exc
                if isinstance(exc, UpstreamFiltered):
                    self._closer.note_filtered(self.call)
                else:
                    rest, is_forbidden = self._held_by_hooks()
                    if self._is_guarded and not is_forbidden:
                        is_forbidden = await self._release(rest, rest, is_over=True)
                    if is_forbidden:
                        yield [*rest, UsageReport(self.meter.usage()), ReplyEnd()]
                        return
                    if rest:
                        yield rest
                self._end(self._broken)
                raise

    async def _next_events(self) -> list[Event]:
        """Return what came next, and together. Raises UpstreamFailure when the reply breaks."""
        since = self._clock.monotonic()
        fresh = await self._source.next_events(has_grown=self._has_grown)
        if self._pace is not None:
            self._pace.wait(self._clock.monotonic() - since)
        self._has_grown = False
        return fresh

    def close(self) -> None:
        """Close the account if nothing else did, settle the hold, and let the upstream go."""
        try:
            if not self.account.is_closed:
                self._end(self._broken)
        finally:
            self._closer.settle(self.account)
            self._source.close()

    def abandon(self) -> None:
        """The client left by itself: it owes what was produced for it until now, sent or not. Then ``close()``."""
        self.end_unsent(Status.INTERRUPTED)

    def end_unsent(self, status: Status) -> None:
        """Nothing more of it goes out, its client having left (``INTERRUPTED``), or because it may not (``BLOCKED``):
        what was used is owed. Then ``close()``."""
        if (whole := self._source.answering.whole) is not None:
            self.meter.take_whole(whole)
        self._end(status)

    def _served(self) -> Served | None:
        """Return the target that answers, and its price, unless both are those that the call was opened with."""
        target, price = self.target, self.meter.price
        is_as_opened = target is self.route.targets[0] and price is target.model.price
        return None if is_as_opened else served_by(self.route, target, price)

    def _pass_on(self, fresh: list[Event], held: list[Event]) -> tuple[list[Event], bool]:
        """Sort events into those that may go out now and those that wait for the journal; tell whether the end came."""
        out: list[Event] = []
        into = held if len(self._finished) >= self._choices else out
        for event in fresh:
            match event:
                case Delta():
                    self.meter.take(event)
                    self._has_grown = self._has_grown or event.has_content
                    if event.finish_reason is not None:
                        self._finished.add(event.index)
                        into = held if len(self._finished) >= self._choices else out
                    if not self._delta_hooks:
                        into.append(event)
                        continue
                    try:
                        into.extend(self._through_hooks(event))
                    except ContentPolicyViolation as exc:
                        self._finished.discard(event.index)
                        held += self._withhold(exc)
                        return out, True
                case UsageReport(usage, tier):
                    self.meter.tell(usage, tier)
                    self._is_counted = True
                case ReplyEnd():
                    return out, True
        return out, False

    def _through_hooks(self, delta: Delta) -> Sequence[Delta]:
        passed: Sequence[Delta] = (delta,)
        for hook in self._delta_hooks:
            passed = [out for one in passed for out in hook.delta(one)]
        return passed

    async def _release(self, out: list[Event], held: list[Event], *, is_over: bool) -> bool:
        """Add what hooks withheld, and now know to be good, to what goes out or waits for the journal; tell whether the
        reply ends here."""
        passed: list[Delta] = []
        try:
            for hook in self._delta_hooks:
                passed = [out for one in passed for out in hook.delta(one)]
                passed += await hook.released(is_over=is_over)
        except ContentPolicyViolation as exc:
            held += self._withhold(exc)
            return True
        self._ended.update(delta.index for delta in passed if delta.finish_reason is not None)
        (held if len(self._ended) >= self._choices else out).extend(passed)
        return False

    def _held_by_hooks(self) -> tuple[list[Event], bool]:
        """Return what hooks withheld when the upstream broke, or how a reply ends whose rest may not go out."""
        rest: list[Event] = []
        try:
            for hook in self._delta_hooks:
                rest = [out for one in rest if isinstance(one, Delta) for out in hook.delta(one)]
                rest += hook.rest()
        except ContentPolicyViolation as exc:
            return list(self._withhold(exc)), True
        return rest, False

    def _withhold(self, violation: ContentPolicyViolation) -> list[Delta]:
        """End the reply here; return how its open choices end."""
        self._violation = violation
        if self._is_guarded:
            self._finished &= self._ended
        still_open = [index for index in range(self._choices) if index not in self._finished]
        return [Delta(index, finish_reason=FinishReason.CONTENT_FILTER) for index in still_open]

    async def _through_whole(self, whole: WholeReply) -> WholeReply:
        try:
            for hook in self._hooks:
                whole = await hook.whole(whole)
        except ContentPolicyViolation as exc:
            self._violation = exc
        return whole

    @property
    def _broken(self) -> Status:
        """What to call a reply that ends before it is whole."""
        if self.call.is_batch_item and self._kept_record is not None:
            return Status.SUPERSEDED  # whole, and not stored
        if not self._was_sent:
            return Status.FAILED
        return Status.INTERRUPTED if self.account.owes_parts or self._ended_itself else Status.SUPERSEDED

    @property
    def _ended_itself(self) -> bool:
        """Whether the call itself brought its end about: it took all its time, or its upstream refuses to go on."""
        failure, may_be_lost = self._failure, self.call.may_be_lost
        if failure is None or (may_be_lost is not None and may_be_lost()):
            return False
        return failure.outcome == "deadline" or isinstance(failure, UpstreamRefused)

    async def _conclude(self, ending: Ending) -> None:
        """Close the account of a whole reply; where its end is to be kept, only once it is."""
        status = Status.ANSWERED if self._violation is None else Status.BLOCKED
        # A violation is the line of a batch's item; to any other call it is an error, and of errors none is kept.
        is_error = isinstance(ending, ContentPolicyViolation) and not self.call.is_batch_item
        if self._keep_ending is not None and not is_error:
            self._kept_record = self._final_record(status)
            try:
                await self._keep_ending(self, ending)
            except asyncio.CancelledError:  # Postgres may have it, or may yet
                self.account.leave()
                raise
        self._end(status)

    def _final_record(self, status: Status) -> UsageRecord:
        """Return the row that the reply makes if it ends now."""
        usage, target = self.meter.usage(), self.target
        cost, saved = self.meter.cost_of(usage), 0
        if self.is_kept:  # what it says was used, another call has used
            saved, usage, cost = cost if status in REQUESTS else 0, Usage(), 0
        begun = self.account.opened  # most of it stays: a record made of another costs a seventh of a new one
        if begun is None or target is not self.route.targets[0]:
            begun = record_for(self.call, self.account.hold, self.route, target, status)
        return replace(
            begun,
            status=status,
            input_tokens=usage.input_tokens,
            cached_input_tokens=usage.cached_input_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            output_tokens=usage.output_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            units=units_of(usage),
            cost_nanousd=cost if status in CHARGED else 0,
            gpu_cost_nanousd=round(usage.gpu_seconds * (target.model.gpu_hour_nanousd or 0) / 3600),
            saved_nanousd=saved,
            discount_nanousd=self.meter.discount_on(usage, cost) if status in CHARGED else 0,
            price="" if self.is_kept else self._edition(begun),  # nothing was reckoned
            queue_ms=self.log.queue_ms,
            first_token_ms=round(self.first_token_seconds * 1000, 3),
            prefill_ms=usage.prefill_ms or None,
            decode_ms=usage.decode_ms or None,
            total_ms=round((self._clock.monotonic() - self.call.started) * 1000, 3),
            attempts=self.log.told,
        )

    def _edition(self, begun: UsageRecord) -> str:
        """Return what the price is called that the cost was reckoned by: nearly always as it was begun."""
        price = self.meter.price
        return begun.price if price is self.target.model.price else edition_of(price)

    def _end(self, status: Status) -> None:
        if self.account.is_closed:
            return
        is_whole = status in (Status.ANSWERED, Status.BLOCKED)
        record = (self._kept_record if is_whole else None) or self._final_record(status)
        self.account.close(record)
        if (found := self._source.answering.found) is not None and status is Status.ANSWERED and self._is_counted:
            self._closer.learn(self.call, self.target, found, record)
        if (expected := self._source.answering.expected_hit) is not None:
            self._closer.note_hit(record, expected)
        self._closer.count(record, self._pace)
        for hook in self._hooks:
            hook.close(record)


def _is_answer(event: Event) -> bool:
    """Whether an event is a part of an answer: a role alone is none."""
    return type(event) is not Delta or event.has_content
