# Runs one item of a batch as the endpoint would: the same checks, quotas, routes and accounting, at tier batch. The
# answer is stored and billed in one transaction, before the accounting closes; a failed store costs the team nothing.

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

from billing.core.ids import moment_of
from billing.core.records import UsageRecord
from gateway.accounts.teams import find_caller_of_key
from gateway.batch.at_providers.lines import ProviderLines
from gateway.batch.at_providers.sender import LineSender
from gateway.batch.at_providers.store import SentLine
from gateway.batch.claims import SUSPECT_AFTER, ClaimedItem
from gateway.batch.finishing import ItemResult, failed_result
from gateway.batch.results import error_of, response_of
from gateway.calls.call import Call
from gateway.calls.hooks import Ending, KeepEnding
from gateway.calls.unanswered import AllLimited
from gateway.core.clock import Clock
from gateway.core.errors import CallTakenOver, ContentPolicyViolation, ContentUnchecked, TeamSuspended
from gateway.core.principals import Caller
from gateway.dialects.endpoint import ReplyWriter
from gateway.dialects.options import options_of, routing_options
from gateway.dialects.table import BY_NAME, FOR_BATCHES
from gateway.inference.answer import Inference
from gateway.inference.recalibrations import Recalibrations
from gateway.inference.reply import Reply
from gateway.storage.database import Database
from gateway.upstreams.wire.errors import UpstreamBusy, UpstreamFull, UpstreamTimeout
from protocol.errors import BadRequest, InvalidKey, Overloaded, ServiceError
from protocol.serving.off_loop import off_loop
from router.catalog.targets import Target, Tier

MOST_TRIES = 6  # of an upstream, before its failure is what the line says
LONGEST_PAUSE = 60.0  # seconds between two tries
UNCHECKED_PAUSE = 15.0  # seconds, while the external checker fails
BELIEVED = 2.0  # seconds for which what was read of a caller holds
MOST_ALONE = 3  # losses of an item that ran alone

CONGESTED = (AllLimited, UpstreamBusy, UpstreamFull, UpstreamTimeout, Overloaded)

# Stores how an item ended; False when another worker has it now.
Store = Callable[[ItemResult], Awaitable[bool]]

log = structlog.get_logger(__name__)


class RetryLater(Struct, frozen=True):
    """The item cannot run now: try again in so many seconds."""

    seconds: float
    is_congestion: bool  # something is too busy, and fewer at once would help
    is_try: bool  # an upstream received it


class ItemRunner(Struct, eq=False):
    """Runs items of batches under one edition of the configuration. ``sender`` puts those that it can into batches of
    their providers."""

    _inference: Inference
    _recalibrations: Recalibrations
    _clock: Clock
    _lines: ProviderLines
    _sender: LineSender | None = None

    async def run(self, caller: Caller, claim: ClaimedItem, store: Store) -> ItemResult | RetryLater | None:
        """Run an item. Its answer is stored through ``store``; an ItemResult that is returned has yet to be.

        None: it was stored, it lies with its provider, or another worker has it.
        """
        request_id, call = self._clock.new_id(), None
        try:
            call, writer = await self.read(caller, claim, request_id)
            if self._sender is not None and self._sender.may_send(claim):
                sent = await self._sender.send(self._lines, call, claim)
                if sent is not None:
                    return sent if isinstance(sent, ItemResult) else None
            await self._answer(call, writer, claim, store)
        except CallTakenOver:
            log.warning("batch_item_taken_over", batch_id=claim.batch_id, position=claim.position)
        except ServiceError as exc:
            ended = _wait_or_end(exc, claim, request_id)
            is_own = call is not None and self._lines.goes_by_own_key(call)
            if isinstance(ended, RetryLater) and is_own:
                return replace(ended, is_congestion=False)  # other teams' requests may be well
            return ended
        except Exception:
            log.exception("batch_item_failed", batch_id=claim.batch_id, position=claim.position)
            return _wait_or_end(ServiceError("The gateway failed in an unexpected way."), claim, request_id)
        return None

    async def book(self, caller: Caller, line: SentLine, target: Target, body: bytes, store: Store, owner: str) -> bool:
        """Store what a provider answered to a line in its batch, as the answer of an ordinary call is; return whether
        that could be read. ``owner``: the name of the reservation that it spends."""
        try:
            call, writer = await self.read(caller, line.claim, line.request_id)
            call = replace(call, **_begun(line.request_id, self._clock))
            keep = _keeper(call, writer, line.claim, store)
            route = line.sent.route(call.request.model, target)
            hold = line.sent.hold(line.request_id, caller, target, owner)
            await _collect(await self._lines.open(call, route, hold, body, line.sent.dropped, keep))
        except CallTakenOver:
            log.warning("batch_item_taken_over", batch_id=line.claim.batch_id, position=line.claim.position)
        except ServiceError as exc:
            told = {"batch_id": line.claim.batch_id, "position": line.claim.position, "error": exc.message}
            log.warning("provider_batch_answer_unreadable", **told)
            return False
        return True

    async def read(self, caller: Caller, claim: ClaimedItem, request_id: str) -> tuple[Call, ReplyWriter]:
        """Return the call that an item makes, and how its answer is written. Raises BadRequest and its kin."""
        endpoint = FOR_BATCHES[claim.endpoint]
        asked = await off_loop(len(claim.body), lambda: endpoint.read(claim.body))
        options, extensions = options_of(asked, caller, endpoint.name, {}, "batch")
        if getattr(asked.request, "stream", None):
            raise BadRequest("A request of a batch cannot be streamed. Leave 'stream' out.", param="stream")
        if getattr(asked.native, "background", None):
            raise BadRequest("A request of a batch runs behind it anyway. Leave 'background' out.", param="background")
        if asked.goes_on:
            words = "A request of a batch cannot go on from stored or sealed items. Send those of the turns before."
            raise BadRequest(words, param="input")
        is_stored = getattr(asked.native or asked.request, "store", None)  # which no line is
        call = Call(
            request_id=request_id,
            caller=caller,
            endpoint=endpoint.name,
            request=asked.request,
            native=asked.native,
            shown=asked.shown,
            routing=routing_options(self._recalibrations, caller, options, Tier.BATCH, extensions),
            priority=options.priority,
            extra=asked.extra | ({"store": True} if is_stored else {}),
            understood=extensions.understood,
            cache=options.cache or caller.cache,
            unread=asked.unread,
            size=len(claim.body),
            client_request_id=claim.name,
            is_batch_item=True,
            is_internal=claim.is_internal,
            created_at=self._clock.now(),
            started=self._clock.monotonic(),
        )
        return call, endpoint.writer_of(call)

    async def _answer(self, call: Call, writer: ReplyWriter, claim: ClaimedItem, store: Store) -> None:
        await _collect(await self._inference.answer(call, keep_ending=_keeper(call, writer, claim, store)))


def _keeper(call: Call, writer: ReplyWriter, claim: ClaimedItem, store: Store) -> KeepEnding[Reply]:
    """Return what stores how an item's reply ends."""

    async def keep(reply: Reply, ending: Ending) -> None:
        record: UsageRecord = reply.record
        if isinstance(ending, ContentPolicyViolation):
            told = BY_NAME[call.endpoint].errors.body(ending, call.request_id)
            response = response_of(ending.status, call.request_id, msgspec.json.encode(told))
        else:
            assert isinstance(ending, tuple)
            dropped = BY_NAME[call.endpoint].names_of(reply.dropped)
            response = response_of(200, call.request_id, writer.whole(reply, *ending), dropped)
        ended = ItemResult(
            claim=claim,
            status="failed" if isinstance(ending, ContentPolicyViolation) else "completed",
            request_id=call.request_id,
            response=response,
            record=record,
            input_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            cost_nanousd=record.cost_nanousd,
        )
        is_stored = await store(ended)
        if not is_stored:
            raise CallTakenOver("Another worker runs this request now.")

    return keep


async def _collect(reply: Reply) -> None:
    try:
        await reply.collect()
    except ContentPolicyViolation:
        pass  # stored and paid by its keeper, as an answer is
    finally:
        reply.close()


def _begun(request_id: str, clock: Clock) -> dict[str, float]:
    """Return when a call began, by its id: unix seconds, and those of this process's monotonic clock."""
    created_at = moment_of(request_id) / 1000
    return {"created_at": created_at, "started": clock.monotonic() - max(0.0, clock.now() - created_at)}


class Senders:
    """Callers of batches, by key, as they are while a batch runs: one whose key is revoked or whose team is suspended
    sends no more."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._known: dict[str, tuple[float, Caller | None]] = {}  # by key, and when they were read

    async def find(self, key_id: str) -> Caller:
        """Return the caller of a key. Raises InvalidKey or TeamSuspended where it may send nothing any more."""
        caller = await self._look_up(key_id)
        if caller is None or (caller.expires_at is not None and caller.expires_at <= self._clock.now()):
            raise InvalidKey("The key that sent this batch is revoked or expired.")
        if caller.team.is_suspended:
            raise TeamSuspended(f"The team '{caller.team.id}' is suspended. Ask an admin of this gateway.")
        return caller

    async def _look_up(self, key_id: str) -> Caller | None:
        now = self._clock.monotonic()
        read_at, caller = self._known.get(key_id, (float("-inf"), None))
        if now - read_at > BELIEVED:
            async with self._database.begin() as connection:
                caller = await find_caller_of_key(connection, key_id)
            self._known[key_id] = (now, caller)
        return caller


def result_if_given_up(claim: ClaimedItem, clock: Clock) -> ItemResult | None:
    """Return the end of an item that crashed too many workers; None: it may run."""
    if claim.losses < SUSPECT_AFTER + MOST_ALONE:
        return None
    message = (
        f"{claim.losses} workers died while they ran this request, the last {MOST_ALONE} of them while they ran "
        "nothing else. It is not tried again. Look for what is unusual in it."
    )
    return ItemResult(claim=claim, status="failed", request_id=clock.new_id(), error=error_of("worker_lost", message))


def _wait_or_end(error: ServiceError, claim: ClaimedItem, request_id: str) -> ItemResult | RetryLater:
    """Decide what an error means: later, or never. A rate limit delays a request, a spent budget fails it."""
    is_final = error.headers.get("x-should-retry") == "false" or (error.status < 500 and error.status != 429)
    was_upstream = error.status in (500, 502, 504)
    if not is_final and not (was_upstream and claim.tries >= MOST_TRIES):
        pause = min(LONGEST_PAUSE, 2.0 ** min(claim.tries, 6))
        told = float(error.headers.get("retry-after", 0) or 0)
        if isinstance(error, ContentUnchecked):
            told = max(told, UNCHECKED_PAUSE)
        seconds = max(told, pause * random.uniform(0.5, 1.0))
        return RetryLater(seconds, is_congestion=isinstance(error, CONGESTED), is_try=was_upstream)
    return failed_result(claim, request_id, error, is_upstreams_fault=was_upstream)
