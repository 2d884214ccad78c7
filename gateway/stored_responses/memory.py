# The memory of the Responses API: a request that goes on from stored turns is completed with them before it becomes a
# call, and a response is stored once it is whole, before its last bytes leave. A paid answer is never lost to a store
# that is away: it is given, and says that it was not stored.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog
from msgspec import Raw
from msgspec.structs import replace

from billing.core.store_errors import POSTGRES_AWAY
from gateway.calls.call import Call
from gateway.calls.hooks import Ending
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.dialects.endpoint import Asked, ReplyFacts, ReplyWriter
from gateway.dialects.responses import RESEND, as_chat_after
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.stored_responses.store import Chain, ResponseStore
from gateway.stored_responses.turns import Turn, own_items, response_of_item
from protocol.chat import MOST_MESSAGES
from protocol.errors import BadRequest, Overloaded, invalid_param
from protocol.responses import InputItem, ResponsesRequest
from protocol.serving.off_loop import off_loop

READ_WITHIN = 5.0  # seconds for Postgres to give the turns before
STORE_WITHIN = 2.0  # seconds that an answer waits to be stored
AWAY_FOR = 2.0  # seconds after it did not, in which no other answer waits for it
SUMMED_EVERY = 60.0  # seconds for which a team's bytes are believed, those that are stored here added

GONE_ON_FROM = ("completed", "incomplete")  # statuses of responses

T = TypeVar("T")
Items = tuple[InputItem, ...]

# Has a response stored before its end is written.
BeforeEnd = Callable[[ReplyFacts, Ending], Awaitable[None]]

log = structlog.get_logger(__name__)


class ResponseMemory:
    """What the calls of one process read of stored responses, and add to them."""

    def __init__(self, store: ResponseStore, clock: Clock, most_bytes: int) -> None:
        self.store = store
        self._clock = clock
        self._most_bytes = most_bytes  # of each team
        self._used: dict[str, tuple[float, int]] = {}  # by team: when it was summed, and bytes
        self._away_until = 0.0  # monotonic seconds
        self._under_way: set[asyncio.Task[Any]] = set()

    def follow(self, retention: float, most_bytes: int) -> None:
        """Go by other settings from now on."""
        self.store.retention, self._most_bytes = retention, most_bytes

    async def recall(self, team_id: str, asked: Asked, size: int) -> tuple[Asked, int]:
        """Return a request with the stored items that it goes on from or refers to, and its bytes with those. Raises
        BadRequest where they are not there, Overloaded where Postgres does not answer."""
        request = asked.native
        assert isinstance(request, ResponsesRequest)
        if request.store and not self.store.retention:
            asked = replace(asked, extra=asked.extra | {"store": True})  # told as a field that was left out
        if not asked.goes_on:
            return asked, size
        try:
            before, own = await self._within(READ_WITHIN, self._items_of(team_id, request))
        except POSTGRES_AWAY as exc:
            log.warning("stored_responses_unreachable", error=repr(exc))
            raise Overloaded(
                "The database does not answer, so the response that this one goes on from cannot be read. Nothing was "
                f"run. Try again, or leave it out and {RESEND}"
            ) from exc
        if len(before) + len(own) > MOST_MESSAGES:
            raise invalid_param("input", f"The conversation has more than {MOST_MESSAGES} items. Begin another.")
        size += await off_loop(size, lambda: len(msgspec.json.encode(before)))
        request = replace(request, input=own)
        whole = await off_loop(size, lambda: as_chat_after(before, request, asked.extra))
        return replace(whole, unread=asked.unread), size

    def before_end(self, call: Call, writer: ReplyWriter) -> BeforeEnd | None:
        """Return what stores the response to a call, ``None`` where it is not to be stored."""
        request = call.native
        assert isinstance(request, ResponsesRequest) and isinstance(writer, ResponsesWriter)
        if request.store is False or not self.store.retention:
            return None
        writer.is_stored = True

        async def store(reply: ReplyFacts, ending: Ending) -> None:
            if isinstance(ending, ContentPolicyViolation):
                return
            response = writer.settle(reply, ending)
            if not await self._put(call, request, writer.response_id, response):
                response["store"], reply.dropped = False, (*reply.dropped, "store")

        return store

    async def _put(self, call: Call, request: ResponsesRequest, response_id: str, response: dict[str, object]) -> bool:
        team_id, now = call.caller.team.id, self._clock.monotonic()
        if now < self._away_until:
            return False
        turn = Turn(own_items(request), Raw(msgspec.json.encode(response)))
        try:
            stored = await self._within(STORE_WITHIN, self._put_if_room(team_id, response_id, request, turn))
        except Exception as exc:  # whatever it is: the answer is there, and paid
            if isinstance(exc, POSTGRES_AWAY):
                self._away_until = self._clock.monotonic() + AWAY_FOR
            log.warning("response_not_stored", request_id=call.request_id, team_id=team_id, error=repr(exc))
            return False
        if not stored:
            log.info("response_not_stored", request_id=call.request_id, team_id=team_id, error="no room")
        return stored

    async def _put_if_room(self, team_id: str, response_id: str, request: ResponsesRequest, turn: Turn) -> bool:
        if not await self.has_room(team_id):
            return False
        stored = await self.store.put(team_id, response_id, request.previous_response_id, turn)
        if (known := self._used.get(team_id)) is not None:
            self._used[team_id] = (known[0], known[1] + stored)
        return stored > 0

    async def _within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. Raises TimeoutError after so many seconds, whatever its cancelling takes: the
        driver has Postgres told of that, which may not listen."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            done, _ = await asyncio.wait([task], timeout=seconds)
        finally:
            task.cancel()
        if not done:
            raise TimeoutError
        return task.result()

    async def has_room(self, team_id: str) -> bool:
        """Whether a team may store more: its rows are summed once a minute, what is stored elsewhere comes later."""
        now = self._clock.monotonic()
        summed_at, used = self._used.get(team_id, (-SUMMED_EVERY, 0))
        if now - summed_at >= SUMMED_EVERY:
            self._used = {team: known for team, known in self._used.items() if now - known[0] < SUMMED_EVERY}
            used = await self.store.bytes_of(team_id)
            self._used[team_id] = (now, used)
        return used < self._most_bytes

    async def _items_of(self, team_id: str, request: ResponsesRequest) -> tuple[Items, Items]:
        """Return the items before a request, and its own with what they refer to."""
        before = await self._before(team_id, request.previous_response_id)
        return before, await self._with_references(team_id, own_items(request))

    async def _before(self, team_id: str, previous_id: str | None) -> Items:
        """Return the items of the turns up to a response."""
        if previous_id is None:
            return ()
        chain: Chain = []
        missing: str | None = previous_id
        if self.store.retention:
            chain, missing = await self.store.conversation(team_id, previous_id)
        if missing is not None:
            _refuse(missing, has_begun=bool(chain))
        if chain and (status := chain[-1][1].status()) not in GONE_ON_FROM:
            raise BadRequest(
                f"Response with id '{previous_id[:80]}' is {status}: only one that has an answer can be gone on from.",
                param="previous_response_id",
            )
        return tuple(item for _, turn in chain for item in (*turn.input, *turn.output()))

    async def _with_references(self, team_id: str, items: Items) -> Items:
        """Return input with the items that it refers to in their places."""
        sources = {response_of_item(item.id) for item in items if item.type == "item_reference"} - {None}
        found: dict[str | None, InputItem] = {}
        if sources and self.store.retention:
            turns = await self.store.find(team_id, [source for source in sources if source is not None])
            found = {item.id: item for turn in turns.values() for item in turn.output()}
        whole = []
        for place, item in enumerate(items):
            if item.type == "item_reference" and item.id not in found:
                words = f"Item with id '{(item.id or '')[:80]}' not found. Send the item itself in its place."
                raise invalid_param(f"input[{place}]", words)
            whole.append(found[item.id] if item.type == "item_reference" else item)
        return tuple(whole)


def _refuse(missing: str, *, has_begun: bool) -> NoReturn:
    turn = "A response before it" if has_begun else "Previous response"
    raise BadRequest(
        f"{turn} with id '{missing[:80]}' not found: it was not stored, is past its time, was deleted or is another "
        f"team's. Leave 'previous_response_id' out and {RESEND}",
        param="previous_response_id",
        code="previous_response_not_found",
    )
