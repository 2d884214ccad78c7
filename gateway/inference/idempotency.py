# The same Idempotency-Key gets the same answer, and pays once.
#
# A call with a key is claimed in Postgres before anything runs: one gateway runs it, every other request for the same
# waits for the answer. It runs in a task of its own, to its end, whether its client stays or leaves. What must hold,
# whatever dies when:
#
#   An answer and its usage record are stored in one transaction; then the journal is closed; then the last bytes leave.
#
# So a client that saw an end can have it again, and what can be had again is in the ledger, once: the journal's copy of
# the record finds the row there and changes nothing. A gateway that dies before the transaction leaves a call that
# costs the team nothing, because with a key only a whole answer is owed (a part that was streamed is `superseded`, or
# `failed` when a journal is adopted), and the next request runs it anew. One that dies after it leaves an answer that
# is paid. The gateway errs in the team's favour: it may pay an upstream twice, the team never does.
#
# What a call itself brings about is owed, with a key as without: a part that was streamed until the call's deadline, or
# until the upstream's content filter, is `interrupted`; unless its gateway stood still for as long as a lease, since
# another may have run the call meanwhile. An answer too long to be kept is stored as just that: its key
# never runs, and never pays, a second time.
#
# A gateway that was believed dead and was not (stopped for longer than its lease) finds at the end that its request id
# no longer stands in the row: its answer does not count, costs nothing, and its client is told to ask again.

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from billing.core.records import UsageRecord
from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from gateway.calls.call import Call
from gateway.core.background import Background
from gateway.core.clock import Clock
from gateway.core.errors import AnswerNotKept, CallTakenOver, IdempotencyKeyInUse, IdempotencyKeyReused, Unavailable
from gateway.core.settings import Settings
from gateway.idempotency.keeping import keep_until_known
from gateway.idempotency.replay_buffer import ReplayBuffer, Send
from gateway.idempotency.store import Answered, Found, IdempotencyStore, Reused, Running
from gateway.idempotency.stored_answers import LARGEST_KEPT, NOT_KEPT, Claim, Place, StoredAnswer
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from protocol.errors import Overloaded, ServiceError
from protocol.serving.deadlines import running_timeout
from protocol.serving.off_loop import off_loop

ASK_WITHIN = 5.0  # seconds for Postgres to say whether a call may run
CLIENT_WAITS = 30.0  # seconds that a client waits for its answer to be stored while Postgres is away
FIRST_LOOK, LAST_LOOK = 0.05, 0.5  # seconds between looks at a call that runs elsewhere

# Stores an answer and books its record, before its account closes.
Keep = Callable[[StoredAnswer, UsageRecord | None], Awaitable[None]]

# Runs a call to its end: says everything through Send, and hands the answer to Keep before its last bytes.
Run = Callable[[Call, Send, Keep], Awaitable[None]]

WriteError = Callable[[ServiceError], bytes]

log = structlog.get_logger()


class AnsweredOnce:
    """Answers the calls that have an Idempotency-Key."""

    def __init__(
        self, settings: Settings, store: IdempotencyStore, background: Background, clock: Clock, metrics: Metrics
    ) -> None:
        self._store = store
        self._background = background
        self._clock = clock
        self._metrics = metrics
        self._peppers = settings.key_pepper, *settings.other_key_peppers
        self._longest_call = max((each.timeouts.total for each in settings.providers.values()), default=0.0)  # seconds

    async def answer(self, call: Call, run: Run, write_error: WriteError, scope: Any, send: Send) -> None:
        """Answer a call that has an Idempotency-Key: run it, wait for the gateway that does, or replay what was stored.

        Raises IdempotencyKeyReused for another request under the same key, IdempotencyKeyInUse when the call runs for
        longer than any upstream may take, AnswerNotKept when it was answered at too great a length, Overloaded when
        Postgres is away, CallTakenOver when this gateway was slept through, and whatever ``run`` raises.
        """
        assert call.idempotency_key is not None
        place = Place(call.caller.team.id, call.endpoint, call.idempotency_key)
        digest, *others = await off_loop(call.size, lambda: [digest_of(call, pepper) for pepper in self._peppers])
        wanted = Claim(place, digest, call.request_id, tuple(others))
        found = await self._ask(wanted)
        if isinstance(found, Running):
            found, asked = await self._wait(wanted)
            call = replace(call, started=asked)  # should it be ours to run after all, its upstream has all its time
        match found:
            case Claim():
                self._count("run")
                replay = ReplayBuffer(LARGEST_KEPT)
                self._background.spawn(self._run_to_the_end(call, found, run, replay))
                await replay.play(send, write_error)
            case Answered() if found.answer == NOT_KEPT:
                self._count("not_kept")
                raise AnswerNotKept(
                    f"The answer to this call was longer than the {LARGEST_KEPT >> 20} MiB that are kept. It was given "
                    f"and charged once, as {found.request_id}. Use a new Idempotency-Key to run the call again."
                )
            case Answered():
                self._count("replayed")
                await _replay(found, scope, send)
            case Reused():
                self._count("reused")
                raise IdempotencyKeyReused(
                    "This Idempotency-Key was used for another request. Use a new key for each request that differs."
                )

    async def _ask(self, claim: Claim) -> Found:
        """Ask Postgres whether the call may run here. A client that leaves meanwhile leaves no claim behind."""
        try:
            async with running_timeout(ASK_WITHIN):
                return await self._store.claim(claim)
        except POSTGRES_AWAY as exc:
            log.warning("idempotency_store_unreachable", request_id=claim.request_id, error=repr(exc))
            raise Overloaded(
                "The database does not answer, so the Idempotency-Key cannot be honoured. Nothing was run. Try again."
            ) from exc
        except asyncio.CancelledError:
            self._background.spawn(self._release(claim))
            raise

    async def _wait(self, wanted: Claim) -> tuple[Found, float]:
        """Wait until the call is answered, or ours to run; return which, and when that was asked (monotonic seconds).
        Of all that wait for it in this process, one looks."""
        pause, lookout = FIRST_LOOK, self._store.lookout(wanted)
        try:
            async with running_timeout(self._longest_call), lookout:
                asked = self._clock.monotonic()
                if lookout.seen is not None:
                    return lookout.seen, asked
                while isinstance(found := await self._ask(wanted), Running):
                    await asyncio.sleep(pause)
                    pause, asked = min(LAST_LOOK, pause * 1.25), self._clock.monotonic()
                lookout.seen = found if isinstance(found, Answered) else None
                return found, asked
        except TimeoutError as exc:
            self._count("in_use")
            raise IdempotencyKeyInUse(
                f"A call with this Idempotency-Key has been running for {self._longest_call:g} seconds. "
                "Ask again later."
            ) from exc

    async def _run_to_the_end(self, call: Call, claim: Claim, run: Run, replay: ReplayBuffer) -> None:
        """Run a claimed call, whether or not a client listens. What it did not store is free for the next that asks,
        before its client hears of a failure.
        """
        store = self._store
        is_stored = False
        error: Exception | None = None

        async def keep(answer: StoredAnswer, record: UsageRecord | None) -> None:
            nonlocal is_stored
            is_stored = await self._keep(claim, answer, record, replay)
            if not is_stored:
                log.warning("idempotent_call_taken_over", request_id=call.request_id)
                self._count("taken_over")
                raise CallTakenOver("Another gateway runs this call now. Send it again with the same Idempotency-Key.")

        try:
            with store.leased(claim, call.started):
                await run(replace(call, may_be_lost=partial(store.may_be_lost, claim)), replay.send, keep)
        except Exception as exc:
            error = exc
            if not (replay.is_heard or isinstance(exc, ServiceError)):
                log.exception("unexpected_error", request_id=call.request_id)
        except asyncio.CancelledError:
            replay.end(Unavailable("The gateway is closing. Send the call again with the same Idempotency-Key."))
            raise
        if not is_stored:
            await self._release(claim)
        replay.end(error)

    async def _keep(self, claim: Claim, answer: StoredAnswer, record: UsageRecord | None, replay: ReplayBuffer) -> bool:
        """Store an answer; return False if the call was taken over. Raises Unavailable when Postgres refuses it.

        While Postgres is away, the client is sent away after a while: it may come back for the answer.
        """
        away = Overloaded(
            "The answer cannot be stored right now and may have been charged. Ask again with the same Idempotency-Key."
        )
        patience = asyncio.get_running_loop().call_later(CLIENT_WAITS, replay.end, away)
        try:
            return await keep_until_known(self._store, claim, answer, record)
        finally:
            patience.cancel()

    async def _release(self, claim: Claim) -> None:
        # Else the lease ends by itself.
        with told_if_away(log, "idempotency_claim_not_released", request_id=claim.request_id):
            async with running_timeout(ASK_WITHIN):
                await self._store.release(claim)

    def _count(self, outcome: str) -> None:
        counter_of(self._metrics.idempotent, outcome).inc()


def digest_of(call: Call, pepper: str) -> bytes:
    """Return a digest of everything that decides the answer: 32 bytes of HMAC-SHA-256, so that no reader of the table
    can try prompts against it. Whitespace, the order of keys, and nulls for what was not said don't matter.
    """
    asked = msgspec.to_builtins(call.native or call.request) | dict(call.extra)
    options = call.routing
    said = {
        "priority": call.priority,
        "quality": options.quality,
        "most": options.max_cost_nanousd,
        "tier": options.tier.value,
    }
    canonical = msgspec.json.encode([asked, said], order="deterministic")
    return hmac.digest(pepper.encode(), b"tollgate idempotency\0" + canonical, "sha256")


async def _replay(found: Answered, scope: Any, send: Send) -> None:
    """Send a stored answer as it was sent first: the same bytes, under the request id of the call that was paid."""
    log.info("answer_replayed", request_id=found.request_id, asked_by=scope["state"].get("request_id"))
    scope["state"]["request_id"] = found.request_id
    answer = found.answer
    headers = [*answer.headers, (b"idempotent-replayed", b"true")]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
