# The seam that later rooms build on: what a Reply lets out when, what its hooks may do, and how often its books close.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from billing.core.holds import Hold, HoldRequest, Settlement
from billing.core.records import Status, UsageRecord
from billing.journal.journal import Journal
from billing.ledger.price_editions import edition_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.answering import Answering
from gateway.calls.call import Call, record_for
from gateway.calls.hooks import Ending, HookMaker, KeepEnding, ReplyHook
from gateway.core.background import Background
from gateway.core.errors import ContentPolicyViolation
from gateway.core.principals import Caller, Team
from gateway.core.settings import ProviderSettings, QueueSettings
from gateway.inference.attempt import AttemptContext, AttemptLog
from gateway.inference.failover import FailoverStream
from gateway.inference.limiter import TargetLimiter
from gateway.inference.reply import Reply
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.pace import Pace
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.registry import ProviderRegistry
from gateway.upstreams.resilience.retry import Deadline
from gateway.upstreams.resilience.retry_budget import RetryBudgets
from gateway.upstreams.wire.errors import UpstreamError, UpstreamFailure, UpstreamFiltered, UpstreamTimeout
from protocol.chat import ChatRequest, Message
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from router import RoutingOptions
from router.catalog.targets import Endpoint, Route, Target
from tests.support.clock import SetClock
from tests.support.house import model

TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
TIMED = b'data: {"choices":[{"index":%d,"delta":{"content":"a"},"finish_reason":null,"gpu_seconds":%b}]}\n\n'
FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}}\n\n'
DONE = b"data: [DONE]\n\n"


class Upstream:
    """A response whose pieces are at hand."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = list(pieces)
        self.falls_silent = False  # after the last piece,
        self.breaks_with: UpstreamFailure | None = None  # or breaks
        self.is_closed = False
        self.on_wait: Callable[[], object] = lambda: None  # as time passes

    async def next_piece(self, patience: float) -> bytes | None:
        """Return the next piece; it never takes long, but by ``on_wait``."""
        self.on_wait()
        if not self.pieces and self.falls_silent:
            await asyncio.Event().wait()
        if not self.pieces and self.breaks_with is not None:
            raise self.breaks_with
        return self.pieces.pop(0) if self.pieces else None

    def close(self) -> None:
        """Remember it."""
        self.is_closed = True


class Books:
    """Quotas that write down what they are told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def settle(self, hold: Hold, used: Settlement) -> None:
        """Remember the charge."""
        self.told.append(("settle", used.cost_nanousd))

    def release(self, hold: Hold) -> None:
        """Remember that nothing was charged."""
        self.told.append(("release", 0))


class Noted:
    """A dispatcher that asks no other upstream."""

    def note_broken(self, context: AttemptContext, answering: Answering, failure: UpstreamFailure) -> None:
        """Put down how the answer ended."""
        context.log.broke(failure.outcome)


class Scene:
    """A reply on a real journal, with everything around it at hand."""

    def __init__(
        self,
        folder: Path,
        *pieces: bytes,
        hooks: tuple[HookMaker, ...] = (),
        gpu_hour: int | None = None,
        is_ours: bool = False,
        first: Target | None = None,
        keep_ending: KeepEnding[Reply] | None = None,
        is_batch_item: bool = False,
        owes_parts: bool = True,
        is_lost: bool = False,
    ) -> None:
        self.clock = SetClock()
        self.journal = Journal.open(folder, clock=self.clock)
        self.books = Books()
        self.upstream = Upstream(*pieces)
        self.background = Background()
        request = ChatRequest(model="small", messages=(Message(role="user", content="hi"),), stream=True)
        call = Call(
            request_id=self.clock.new_id(),
            caller=Caller(team=Team(id="a", name="A"), key_id="k"),
            endpoint="chat.completions",
            request=request,
            routing=RoutingOptions(),
            is_batch_item=is_batch_item,
            may_be_lost=lambda: is_lost,
            created_at=self.clock.now(),
            started=self.clock.monotonic(),
        )
        spec = model("small", gpu_hour_nanousd=gpu_hour)
        target = Target(spec, Endpoint("here", "http://upstream"))
        route = Route("small", (target,) if first is None else (first, target), "named")
        holding = HoldRequest(request_id=call.request_id, team_id="a", scopes=(), legs=())
        self.account = CallAccounting(Hold(request=holding), self.journal, cast(Any, self.books), owes_parts=owes_parts)
        self.account.open(record_for(call, self.account.hold, route, route.targets[0], Status.FAILED))
        provider = ProviderSettings(
            name="upstream",
            format="openai",
            endpoints=(target.endpoint,),
            self_hosted=is_ours,
            concurrency=1,
        )
        registry = ProviderRegistry({"upstream": provider})
        self.limiter = TargetLimiter(registry, [target], cast(Any, None), QueueSettings(), self.clock, Metrics())
        events = OpenAIFormat().open_events(request)
        begun = events.feed(self.upstream.pieces.pop(0))
        let_go = partial(self.limiter.release, self.limiter.take(call, target))
        answering = Answering(target, provider, begun, events, cast(Any, self.upstream), let_go=let_go)
        self.paces: list[Pace | None] = []
        closer: Any = SimpleNamespace(
            note_filtered=lambda call: None,
            settle=CallAccounting.settle,
            count=lambda record, pace: self.paces.append(pace),
        )
        log = AttemptLog()
        log.add(target, "ok", 0.3)
        context = AttemptContext(call, route, log, Deadline(60.0), RetryBudgets().of(provider))
        source = FailoverStream(cast(Any, Noted()), context, answering, self.clock, Metrics())
        made = [make(call, target) for make in hooks]
        self.reply = Reply(context, self.account, source, made, closer, self.clock, keep_ending)

    async def finish(self) -> None:
        """Close the reply and wait for what goes on behind it."""
        self.reply.close()
        await self.background.drain(1)
        assert all(not room.held for room in self.limiter.slot_pools())


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for a journal."""
    yield tmp_path / "journal"


def texts_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_the_finish_waits_for_the_journal(folder: Path) -> None:
    """A finish reason leaves only with the end, after the close is in the journal; text before it leaves at once."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b" + FINISH, USAGE, DONE)
        let_out: list[tuple[bool, list[Event]]] = []
        async for events in scene.reply.pieces():
            let_out.append((scene.account.is_closed, events))
        await scene.finish()

        assert [(closed, texts_of(events)) for closed, events in let_out] == [(False, "a"), (False, "b"), (True, "")]
        last = let_out[-1][1]
        assert isinstance(last[0], Delta) and last[0].finish_reason == "stop"
        assert isinstance(last[1], UsageReport) and last[1].usage.output_tokens == 2
        assert isinstance(last[2], ReplyEnd)
        assert scene.journal.backlog == 1

    asyncio.run(scene())


def test_hooks_see_every_word(folder: Path) -> None:
    """A reply that a hook may change never goes past it."""

    async def scene() -> None:
        seen: list[str] = []

        class Watcher(ReplyHook):
            def delta(self, delta: Delta) -> tuple[Delta, ...]:
                seen.append(delta.text)
                return (delta,)

        scene = Scene(folder, TEXT % b"a", TEXT % b"b", FINISH, DONE, hooks=(lambda call, target: Watcher(),))
        async for _ in scene.reply.pieces():
            pass
        await scene.finish()

        assert seen == ["a", "b", ""]

    asyncio.run(scene())


def test_a_whole_reply_is_settled_once_at_its_price(folder: Path) -> None:
    """However often it is closed, a reply is one settlement and one record."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", FINISH + USAGE + DONE)
        async for _ in scene.reply.pieces():
            pass
        scene.reply.close()
        await scene.finish()

        assert set(scene.books.told) == {("settle", 10 * 1000 + 2 * 2000)}
        assert (scene.reply.record.status, scene.journal.backlog) == (Status.ANSWERED, 1)
        assert scene.upstream.is_closed

    asyncio.run(scene())


def test_a_reply_that_breaks_after_text_is_interrupted_and_charged(folder: Path) -> None:
    """Cut without an end: the reader hears of it, what was sent is charged by its pieces."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b")
        with pytest.raises(UpstreamError):
            async for _ in scene.reply.pieces():
                pass
        await scene.finish()

        record = scene.reply.record
        assert (record.status, record.output_tokens) == (Status.INTERRUPTED, 2)
        assert scene.books.told == [("settle", record.cost_nanousd)]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("failure", "is_lost", "status"),
    [
        (UpstreamTimeout("late", outcome="deadline"), False, Status.INTERRUPTED),
        (UpstreamTimeout("late", outcome="deadline"), True, Status.SUPERSEDED),
        (UpstreamFiltered("forbidden"), False, Status.INTERRUPTED),
        (UpstreamTimeout("silent"), False, Status.SUPERSEDED),
        (UpstreamError("reset", outcome="reset"), False, Status.SUPERSEDED),
    ],
    ids=["its deadline", "its deadline, slept through", "its content", "silence", "a reset"],
)
def test_with_an_idempotency_key_a_part_is_owed_where_the_call_ended_itself(
    folder: Path, failure: UpstreamFailure, is_lost: bool, status: Status
) -> None:
    """What an upstream breaks is asked for again and paid once; what the call brings about costs what was sent, unless
    another gateway may have run it meanwhile."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", owes_parts=False, is_lost=is_lost)
        scene.upstream.breaks_with = failure
        with pytest.raises(UpstreamFailure):
            async for _ in scene.reply.pieces():
                pass
        await scene.finish()

        record = scene.reply.record
        assert (record.status, record.output_tokens) == (status, 2)
        assert (record.cost_nanousd > 0) is (status is Status.INTERRUPTED)

    asyncio.run(scene())


def test_of_a_line_of_a_batch_no_part_is_owed(folder: Path) -> None:
    """Whatever ends it: another worker may have it by now, and an answer is paid as it is stored."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", is_batch_item=True)
        scene.upstream.breaks_with = UpstreamTimeout("late", outcome="deadline")
        with pytest.raises(UpstreamFailure):
            await scene.reply.collect()
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.cost_nanousd) == (Status.FAILED, 0)

    asyncio.run(scene())


def test_what_is_only_estimated_never_exceeds_the_hold(folder: Path) -> None:
    """An upstream that sends letter by letter and no usage: more pieces than tokens it was allowed are no tokens."""

    async def scene() -> None:
        letters = [TEXT % b"a"] * 3_000  # the model may say 1024 tokens
        scene = Scene(folder, *letters, FINISH, DONE)
        async for _ in scene.reply.pieces():
            pass
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.output_tokens) == (Status.ANSWERED, 1024)

    asyncio.run(scene())


def test_a_reply_that_was_not_read_costs_nothing(folder: Path) -> None:
    """The client left before anything was sent: the hold goes back whole, the row says failed."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", FINISH + DONE)
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.cost_nanousd) == (Status.FAILED, 0)
        assert scene.books.told == [("release", 0)]
        assert scene.upstream.is_closed

    asyncio.run(scene())


def test_a_reply_that_its_client_left_unread_costs_its_prompt(folder: Path) -> None:
    """An upstream had it, and bills it; none of its words was counted."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a")
        scene.reply.abandon()
        await scene.finish()

        record = scene.reply.record
        assert (record.status, record.output_tokens) == (Status.INTERRUPTED, 0)
        assert record.input_tokens > 0 and record.cost_nanousd > 0
        assert scene.books.told == [("settle", record.cost_nanousd)]

    asyncio.run(scene())


@pytest.mark.parametrize("leaves", ["its client", "the gateway"])
def test_a_whole_answer_that_its_client_left_costs_what_was_produced(folder: Path, leaves: str) -> None:
    """Collected from a stream, so that is known; but a gateway that closes in the middle owes its client an answer."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", TEXT % b"c")
        scene.upstream.falls_silent = True
        collecting = asyncio.create_task(scene.reply.collect())
        await asyncio.sleep(0)
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        if leaves == "its client":
            scene.reply.abandon()
        await scene.finish()

        record = scene.reply.record
        is_owed = leaves == "its client"
        assert (record.status, record.output_tokens) == (Status.INTERRUPTED if is_owed else Status.FAILED, 3)
        assert scene.books.told == [("settle", record.cost_nanousd) if is_owed else ("release", 0)]
        assert (record.cost_nanousd > 0) is is_owed

    asyncio.run(scene())


def test_a_whole_answer_whose_gateway_dies_costs_nothing(folder: Path) -> None:
    """Nothing of it was sent, so the journal that is found says that it failed, whatever was produced until then."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b")
        scene.upstream.falls_silent = True
        collecting = asyncio.create_task(scene.reply.collect())
        await asyncio.sleep(0)
        scene.account.note_progress()
        scene.journal.close()  # the process is gone
        heir = Journal.open(folder, clock=scene.clock)
        sum(heir.adopt_each())
        [found] = heir.waiting.take(10)
        assert (found.record.status, found.record.cost_nanousd) == (Status.FAILED, 0)
        collecting.cancel()

    asyncio.run(scene())


@pytest.mark.parametrize("reads", ["a stream", "a whole answer"])
def test_a_killed_call_is_booked_at_the_target_that_answered(folder: Path, reads: str) -> None:
    """The first on the route failed and the second answers: the journal names it, and what it costs is its price, which
    the audit reckons by."""

    async def scene() -> None:
        large = model("large", provider="elsewhere")
        large = replace(large, price=replace(large.price, request=7))
        away = Target(large, Endpoint("there", "http://away"))
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", first=away, owes_parts=reads == "a stream")
        if reads == "a stream":
            async for _ in scene.reply.pieces():
                break
        scene.account.note_progress()
        scene.journal.close()  # the process is gone

        found = adopted(folder, scene.clock)
        assert (found.model_used, found.provider, found.provider_endpoint) == (
            "small",
            "upstream",
            "here http://upstream",
        )
        price = edition_of(scene.reply.target.model.price)
        assert (found.price, found.route_reason) == (price, "fallback") != (edition_of(large.price), "named")
        is_owed = reads == "a stream"
        assert found.cost_nanousd == (found.input_tokens * 1000 + 2000 if is_owed else 0)
        assert found.status is (Status.INTERRUPTED if is_owed else Status.FAILED)

    asyncio.run(scene())


def test_a_call_that_is_killed_before_a_word_names_the_target_that_answered(folder: Path) -> None:
    """The journal knows of the move before the first word goes out, and of a later one with the next progress."""

    async def scene() -> None:
        away = Target(model("large", provider="elsewhere"), Endpoint("there", "http://away"))
        scene = Scene(folder / "one", TEXT % b"a", first=away)
        scene.journal.close()
        assert adopted(folder / "one", scene.clock).provider_endpoint == "here http://upstream"

        scene = Scene(folder / "two", TEXT % b"a", TEXT % b"b")
        async for _ in scene.reply.pieces():
            break
        scene.account.note_progress()
        answering = scene.reply._source.answering
        elsewhere = replace(answering.target, endpoint=Endpoint("beside", "http://another"))
        scene.reply._source.answering = replace(answering, target=elsewhere)
        scene.account.note_progress()
        scene.journal.close()
        assert adopted(folder / "two", scene.clock).provider_endpoint == "beside http://another"

    asyncio.run(scene())


def adopted(folder: Path, clock: SetClock) -> UsageRecord:
    """Return how a dead process's one call ended, as its neighbour finds it."""
    heir = Journal.open(folder, clock=clock)
    sum(heir.adopt_each())
    [found] = heir.waiting.take(10)
    return found.record


@pytest.mark.parametrize("ends", ["client", "upstream"])
def test_a_reply_that_is_cut_still_cost_its_device_time(folder: Path, ends: str) -> None:
    """Our own engine tells it as it goes, each choice its own: 3 + 1 seconds of an hour at $3.60."""

    async def scene() -> None:
        scene = Scene(folder, TIMED % (0, b"2"), TIMED % (1, b"1"), TIMED % (0, b"3"), gpu_hour=3_600_000_000)
        with suppress(UpstreamError):
            heard = 0
            async for _ in scene.reply.pieces():
                heard += 1
                if ends == "client" and heard == 3:
                    break
        await scene.finish()

        assert scene.reply.record.status is Status.INTERRUPTED
        assert scene.reply.record.gpu_cost_nanousd == 4_000_000

    asyncio.run(scene())


def test_tokens_that_are_named_are_what_is_charged(folder: Path) -> None:
    """A piece of text that our own engine had kept back brings no token of its own."""

    async def scene() -> None:
        named = (b'"finish_reason":null', b'"finish_reason":null,"token_ids":[5,6,7]')
        scene = Scene(folder, TEXT.replace(*named) % b"a", TEXT % b"bc", TEXT % b"d", is_ours=True)
        async for events in scene.reply.pieces():
            if texts_of(events) == "d":
                break
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.output_tokens) == (Status.INTERRUPTED, 3)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("gpu_hour", "seconds", "cost"),
    [(3_600_000_000, b"0.0015", 1_500), (None, b"0.0015", 0), (3_600_000_000, b"1e308", 0), (1, b"-5", 0)],
)
def test_the_engines_own_count_has_the_last_word(folder: Path, gpu_hour: int | None, seconds: bytes, cost: int) -> None:
    """What its usage says is booked; without a price, or where it can be no time, nothing is."""

    async def scene() -> None:
        usage = USAGE.replace(b'"total_tokens":12', b'"total_tokens":12,"gpu_seconds":' + seconds)
        scene = Scene(folder, TIMED % (0, b"0.001"), FINISH, usage, DONE, gpu_hour=gpu_hour)
        async for _ in scene.reply.pieces():
            pass
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.gpu_cost_nanousd) == (Status.ANSWERED, cost)

    asyncio.run(scene())


def test_an_ending_is_kept_before_the_books_close(folder: Path) -> None:
    """Whoever keeps it knows the final record; the journal hears of it after, and the client last."""
    kept: list[tuple[bool, int, list[Event]]] = []

    async def keep(reply: Reply, ending: Ending) -> None:
        assert isinstance(ending, list)
        kept.append((reply.account.is_closed, reply.record.output_tokens, ending))

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", FINISH + USAGE + DONE, keep_ending=keep)
        out = [events async for events in scene.reply.pieces()]
        await scene.finish()

        assert kept == [(False, 2, out[-1])]
        assert scene.account.is_closed and scene.reply.record.status is Status.ANSWERED

    asyncio.run(scene())


def test_an_ending_that_is_not_kept_is_no_answer(folder: Path) -> None:
    """It never leaves, and the call ends as one that broke."""

    async def refuse(reply: Reply, ending: Ending) -> None:
        raise UpstreamError("not now")

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", FINISH + USAGE + DONE, keep_ending=refuse)
        out: list[Event] = []
        with pytest.raises(UpstreamError):
            async for events in scene.reply.pieces():
                out += events
        await scene.finish()

        assert not any(isinstance(event, ReplyEnd) for event in out)
        assert scene.reply.record.status is Status.INTERRUPTED

    asyncio.run(scene())


def test_an_ending_that_may_have_been_kept_is_left_to_the_process_that_finds_out(folder: Path) -> None:
    """Its process ends while Postgres does not say: no books are closed, nothing is settled, as if it were killed."""

    async def scene() -> None:
        asked = asyncio.Event()

        async def keep(reply: Reply, ending: Ending) -> None:
            asked.set()
            await asyncio.Event().wait()

        scene = Scene(folder, TEXT % b"a", FINISH + USAGE + DONE, keep_ending=keep)

        async def read() -> None:
            try:
                async for _ in scene.reply.pieces():
                    pass
            finally:
                scene.reply.close()

        reading = asyncio.create_task(read())
        await asked.wait()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await scene.finish()
        scene.journal.close()

        adopted = Journal.open(folder, clock=scene.clock)
        assert list(adopted.adopt_each()) == [1]
        assert (scene.books.told, scene.upstream.is_closed) == ([], True)

    asyncio.run(scene())


def test_a_hook_may_change_and_hold_back_and_hears_the_end(folder: Path) -> None:
    """What a hook returns goes out in place of the delta; nothing holds it back; close comes before the last bytes."""
    heard: list[UsageRecord] = []

    class Shout(ReplyHook):
        def delta(self, delta: Delta) -> Sequence[Delta]:
            if delta.text == "b":
                return ()
            return (Delta(delta.index, delta.text.upper(), finish_reason=delta.finish_reason),)

        def close(self, record: UsageRecord) -> None:
            heard.append(record)

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", TEXT % b"c", FINISH + USAGE + DONE, hooks=(lambda *_: Shout(),))
        out: list[str] = []
        async for events in scene.reply.pieces():
            out.append(texts_of(events))
            assert bool(heard) == any(isinstance(event, ReplyEnd) for event in events)
        await scene.finish()

        assert "".join(out) == "AC"
        assert heard == [scene.reply.record]

    asyncio.run(scene())


def test_a_role_whose_words_were_buffered_is_no_part_of_an_answer(folder: Path) -> None:
    """Nothing else was out when the upstream broke: the row says failed, and nobody pays."""

    class HoldBack(ReplyHook):
        def delta(self, delta: Delta) -> Sequence[Delta]:
            return () if delta.text else (delta,)

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"", TEXT % b"words", hooks=(lambda *_: HoldBack(),))
        with pytest.raises(UpstreamError):
            async for _ in scene.reply.pieces():
                pass
        await scene.finish()

        assert (scene.reply.record.status, scene.reply.record.cost_nanousd) == (Status.FAILED, 0)

    asyncio.run(scene())


class Guard(ReplyHook):
    """Withholds everything until a choice ends, or all does, and then says what it was told to."""

    def __init__(self, says: ContentPolicyViolation | None = None) -> None:
        self.says = says
        self.held: list[Delta] = []
        self.is_due = False

    def delta(self, delta: Delta) -> Sequence[Delta]:
        self.held.append(delta)
        self.is_due = self.is_due or delta.finish_reason is not None
        return ()

    async def released(self, *, is_over: bool) -> Sequence[Delta]:
        if not (self.is_due or is_over):
            return ()
        await asyncio.sleep(0)
        if self.says is not None:
            raise self.says
        passed, self.held = self.held, []
        return passed


def test_what_a_guard_releases_goes_past_the_hooks_after_it(folder: Path) -> None:
    """Its finish waits for the journal, as any does."""
    seen: list[str] = []

    class Watcher(ReplyHook):
        def delta(self, delta: Delta) -> Sequence[Delta]:
            seen.append(delta.text)
            return (delta,)

    async def scene() -> None:
        hooks: tuple[HookMaker, ...] = (lambda *_: Guard(), lambda *_: Watcher())
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", FINISH, USAGE + DONE, hooks=hooks)
        out = [(scene.account.is_closed, texts_of(events)) async for events in scene.reply.pieces()]
        await scene.finish()

        assert "".join(text for _, text in out) == "ab" == "".join(seen)
        assert [closed for closed, _ in out][-1] is True
        assert scene.reply.record.status is Status.ANSWERED

    asyncio.run(scene())


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_what_a_guard_forbids_ends_the_reply_with_nothing_of_it(folder: Path, breaks: bool) -> None:
    """Though its finish had come, or its upstream had broken: it is blocked, and what was used is owed."""

    async def scene() -> None:
        pieces = (TEXT % b"a",) if breaks else (TEXT % b"a", FINISH, USAGE + DONE)
        scene = Scene(folder, *pieces, hooks=(lambda *_: Guard(ContentPolicyViolation("No.")),))
        events = [event async for some in scene.reply.pieces() for event in some]
        await scene.finish()

        assert [(e.text, e.finish_reason) for e in events if isinstance(e, Delta)] == [("", "content_filter")]
        assert isinstance(events[-1], ReplyEnd)
        assert scene.reply.record.status is Status.BLOCKED and scene.reply.record.cost_nanousd > 0

    asyncio.run(scene())


def test_what_a_guard_holds_of_a_reply_that_breaks_is_sent_when_it_was_judged(folder: Path) -> None:
    """What is charged was sent, as without a guard."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", hooks=(lambda *_: Guard(),))
        out: list[str] = []
        with pytest.raises(UpstreamError):
            async for events in scene.reply.pieces():
                out.append(texts_of(events))
        await scene.finish()

        assert "".join(out) == "ab" and scene.reply.record.status is Status.INTERRUPTED

    asyncio.run(scene())


class Forbid(ReplyHook):
    """Lets nothing pass that says "x"."""

    def delta(self, delta: Delta) -> Sequence[Delta]:
        if "x" in delta.text:
            raise ContentPolicyViolation("No x.")
        return (delta,)


def forbid(_call: Call, _target: Target) -> ReplyHook:
    return Forbid()


def test_a_stream_that_may_not_go_on_ends_as_filtered_and_costs_what_was_used(folder: Path) -> None:
    """The forbidden delta and all after it stay here, the end says why, and the books call it blocked."""

    async def scene() -> None:
        scene = Scene(
            folder, TEXT % b"a", TEXT % b"x" + TEXT % b"b", FINISH + USAGE + DONE, hooks=(lambda *_: Forbid(),)
        )
        out = [events async for events in scene.reply.pieces()]
        await scene.finish()

        record = scene.reply.record
        assert "".join(texts_of(events) for events in out) == "a"
        end, report, last = out[-1]
        assert isinstance(end, Delta) and end.finish_reason == "content_filter"
        assert isinstance(report, UsageReport) and report.usage.output_tokens == record.output_tokens == 2
        assert isinstance(last, ReplyEnd)
        assert record.status is Status.BLOCKED and record.cost_nanousd > 0
        assert scene.books.told == [("settle", record.cost_nanousd)]
        assert scene.upstream.is_closed and scene.journal.backlog == 1

    asyncio.run(scene())


@pytest.mark.parametrize("is_batch_item", [False, True])
def test_a_whole_answer_that_may_not_go_out_is_an_error(folder: Path, is_batch_item: bool) -> None:
    """Nothing of it is stored for an Idempotency-Key; an item of a batch stores why it has no answer, and pays once."""
    kept: list[Ending] = []

    async def keep(reply: Reply, ending: Ending) -> None:
        assert not reply.account.is_closed and reply.record.status is Status.BLOCKED
        kept.append(ending)

    async def scene() -> None:
        scene = Scene(
            folder,
            TEXT % b"a",
            TEXT % b"x",
            FINISH + USAGE + DONE,
            hooks=(forbid,),
            is_batch_item=is_batch_item,
            keep_ending=keep,
        )
        with pytest.raises(ContentPolicyViolation) as refused:
            await scene.reply.collect()
        await scene.finish()

        assert kept == ([refused.value] if is_batch_item else [])
        assert (scene.reply.record.status, scene.reply.record.output_tokens) == (Status.BLOCKED, 2)
        assert scene.books.told == [("settle", scene.reply.record.cost_nanousd)]

    asyncio.run(scene())


def test_the_pace_of_a_stream_is_what_its_upstream_took(folder: Path) -> None:
    """The attempt to its first token, then a gap for each chunk with text: neither a slow client nor the end counts."""

    async def scene() -> None:
        scene = Scene(folder, TEXT % b"a", TEXT % b"b", TEXT % b"c" + FINISH, USAGE, DONE)
        scene.upstream.on_wait = lambda: scene.clock.move(0.25)
        async for _ in scene.reply.pieces():
            scene.clock.move(30.0)
        await scene.finish()

        (pace,) = scene.paces
        assert pace is not None
        assert (pace.first, pace.total, sum(pace.chunks)) == (0.3, 0.5, 2)

    asyncio.run(scene())
