# The memory of the Responses API: a request that goes on from stored turns is completed with them before it becomes a
# call, and a response is stored once it is whole, before its last bytes leave. A paid answer is never lost to a store
# that is away: it is given, and says that it was not stored.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import structlog
from msgspec import Raw
from msgspec.structs import replace

from billing.core.records import Status
from billing.core.store_errors import POSTGRES_AWAY, told_if_away
from gateway.calls.call import Call
from gateway.calls.hooks import Ending
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.dialects.chat import ChatWriter, Kept
from gateway.dialects.endpoint import Asked, ReplyFacts, ReplyWriter
from gateway.dialects.responses import RESEND, as_chat_after, own_items
from gateway.dialects.responses_writer import CompactionWriter, ResponsesWriter
from gateway.stored_responses.local_turns import OWN_FIELDS, ConnectionTurns
from gateway.stored_responses.store import Chain, ResponseStore
from gateway.stored_responses.turns import LARGEST, StoredChat, Turn, told_items_of
from protocol.chat import MOST_MESSAGES, ChatReply, ChatRequest
from protocol.errors import BadRequest, Overloaded, invalid_param
from protocol.events import UsageReport
from protocol.responses import Compaction, InputItem, ResponsesRequest, response_of_item
from protocol.serving.off_loop import off_loop

READ_WITHIN = 5.0  # seconds for Postgres to give the turns before
STORE_WITHIN = 2.0  # seconds that an answer waits to be stored
AWAY_FOR = 2.0  # seconds after it did not, in which no other answer waits for it
SUM_WITHIN = 1.0  # seconds that it waits for the first sum of its team's bytes
SUMMED_EVERY = 60.0  # seconds for which a sum is believed, what is stored here added
FORGOTTEN_AFTER = 3600.0  # seconds after which that of a team that stores nothing is asked anew

GONE_ON_FROM = ("completed", "incomplete")  # statuses of responses

T = TypeVar("T")
Items = tuple[InputItem, ...]

# Has a response stored before its end is written.
BeforeEnd = Callable[[ReplyFacts, Ending], Awaitable[None]]

log = structlog.get_logger(__name__)


class Conversations(Protocol):
    """What a response needs of the conversation that it names."""

    async def items(self, team_id: str, conversation_id: str) -> Items:
        """Return its items. Raises NotFound, StoredResponseUnreadable."""

    async def add(self, team_id: str, conversation_id: str, told: Sequence[dict[str, Any]]) -> int:
        """Add items at its end, all of them; return their bytes. Raises NotFound, StorageFull."""


class Summaries(Protocol):
    """What makes items of compacted conversations, and reads them."""

    def seal(self, team_id: str, summary: str) -> str:
        """Return the ``encrypted_content`` of a summary."""

    def opened(self, team_id: str, items: Items, where: str) -> Items:
        """Return items with each summary as what a user says. Raises BadRequest."""

    async def refuse_empty(self, reply: ReplyFacts, ending: Ending) -> None:
        """Raise UpstreamError for an answer without a summary."""


class ResponseMemory:
    """What the calls of one process read of stored responses, and add to them."""

    def __init__(
        self,
        store: ResponseStore,
        conversations: Conversations,
        summaries: Summaries,
        clock: Clock,
        most_bytes: int,
        collector: Callable[[ChatRequest], Kept],
    ) -> None:
        self.store = store
        self._collector = collector
        self._conversations = conversations
        self._summaries = summaries
        self._clock = clock
        self._most_bytes = most_bytes  # of each team
        self._used: dict[str, tuple[float, int]] = {}  # by team: when it was summed, and bytes
        self._away_until = 0.0  # monotonic seconds
        self._under_way: set[asyncio.Task[Any]] = set()

    def follow(self, retention: float, most_bytes: int) -> None:
        """Go by other settings from now on."""
        self.store.retention, self._most_bytes = retention, most_bytes

    async def recall(
        self, team_id: str, asked: Asked, size: int, local: ConnectionTurns | None = None
    ) -> tuple[Asked, int]:
        """Return a request with the stored items that it goes on from or refers to, and its bytes with those; what is
        kept for its connection (``local``) first. Raises BadRequest where they are not there, Overloaded where Postgres
        does not answer."""
        request = asked.native
        assert isinstance(request, ResponsesRequest)
        for name in OWN_FIELDS if local is not None else ():
            asked.extra.pop(name, None)
        if request.store and not self.store.retention:
            asked = replace(asked, extra=asked.extra | {"store": True})  # told as a field that was left out
        if not asked.goes_on:
            if local is not None:
                local.note_asked(own_items(request), size)
            return asked, size
        try:
            before, own, referred = await self._within(READ_WITHIN, self._items_of(team_id, request, local))
        except POSTGRES_AWAY as exc:
            log.warning("stored_responses_unreachable", error=repr(exc))
            raise Overloaded(
                "The database does not answer, so the response that this one goes on from cannot be read. Nothing was "
                f"run. Try again, or leave it out and {RESEND}"
            ) from exc
        if len(before) + len(own) > MOST_MESSAGES:
            raise invalid_param("input", f"The conversation has more than {MOST_MESSAGES} items. Begin another.")
        size += referred + await off_loop(size, lambda: len(msgspec.json.encode(before)))
        request = replace(request, input=own)
        if local is not None:
            local.note_asked((*before, *own), size) if request.conversation is None else local.note_nothing()
        told = "conversation" if request.conversation is not None else "previous_response_id"

        def opened(request: ResponsesRequest) -> Asked:
            said = replace(request, input=self._summaries.opened(team_id, own, "input"))
            return as_chat_after(self._summaries.opened(team_id, before, told), said, asked.extra)

        whole = await off_loop(size, partial(opened, request))
        if isinstance(request, Compaction):  # what users said comes back
            request = replace(request, input=(*before, *own))
        return replace(whole, native=request, unread=asked.unread), size

    def before_end(self, call: Call, writer: ReplyWriter, local: ConnectionTurns | None = None) -> BeforeEnd | None:
        """Return what stores the response to a call, ``None`` where it is not to be stored."""
        if isinstance(writer, CompactionWriter):
            writer.seal = partial(self._summaries.seal, call.caller.team.id)
            return self._summaries.refuse_empty
        request = call.native
        assert isinstance(request, ResponsesRequest) and isinstance(writer, ResponsesWriter)
        writer.is_stored = request.store is not False and bool(self.store.retention)
        if not writer.is_stored and request.conversation is None:
            return None
        earlier = None if local is None else local.find(request.previous_response_id)
        items, previous_id = own_items(request), request.previous_response_id
        if earlier is not None and not earlier.is_stored:
            items, previous_id = (*earlier.items, *items), None  # its row is the first of its conversation

        async def store(reply: ReplyFacts, ending: Ending) -> None:
            if isinstance(ending, ContentPolicyViolation):
                return
            response = writer.settle(reply, ending)
            if request.conversation_id and not await self._add(call, request, request.conversation_id, response):
                response["conversation"], reply.dropped = None, (*reply.dropped, "conversation")
            if writer.is_stored and not await self._put(
                call, writer.response_id, previous_id, Turn(items, Raw(msgspec.json.encode(response)))
            ):
                response["store"], reply.dropped = False, (*reply.dropped, "store")

        return store

    def before_end_of_chat(self, call: Call, writer: ChatWriter) -> BeforeEnd | None:
        """Return what stores a chat, ``None`` where nothing is stored here."""
        asked = call.request
        assert isinstance(asked, ChatRequest)
        if not self.store.retention:
            return None
        kept = writer.kept = self._collector(asked) if call.streams else None

        async def store(reply: ReplyFacts, ending: Ending) -> None:
            if isinstance(ending, ContentPolicyViolation) or reply.record.status is Status.BLOCKED:
                return
            if isinstance(ending, tuple):
                whole, usage = ending
                assert isinstance(whole, ChatReply)
                whole = whole.without_sound()
            else:
                assert kept is not None
                writer.kept = None
                writer.keep(kept, ending)
                whole, usage = kept.reply(), next(event.usage for event in ending if isinstance(event, UsageReport))
            told = Raw(writer.whole(reply, whole, usage))
            chat = StoredChat(Raw(msgspec.json.encode(asked.messages)), told, asked.metadata or {})
            if not await self._put(call, writer.completion_id, None, chat):
                reply.dropped = (*reply.dropped, "store")

        return store

    async def _put(self, call: Call, row_id: str, previous_id: str | None, turn: Turn | StoredChat) -> bool:
        """Store a turn after another, or a chat; whether it is there."""
        team_id, now = call.caller.team.id, self._clock.monotonic()
        if now < self._away_until:
            return False
        try:
            stored = await self._within(STORE_WITHIN, self._put_if_room(team_id, row_id, previous_id, turn))
        except Exception as exc:  # whatever it is: the answer is there, and paid
            if isinstance(exc, POSTGRES_AWAY):
                self._away_until = self._clock.monotonic() + AWAY_FOR
            log.warning("response_not_stored", request_id=call.request_id, team_id=team_id, error=repr(exc))
            return False
        if not stored:
            log.info("response_not_stored", request_id=call.request_id, team_id=team_id, error="no room")
        return stored

    async def _add(self, call: Call, request: ResponsesRequest, conversation_id: str, response: dict[str, Any]) -> bool:
        """Add what was asked and answered to a conversation; whether it is there."""
        if response["status"] not in GONE_ON_FROM or self._clock.monotonic() < self._away_until:
            return False
        team_id = call.caller.team.id
        told = [*told_items_of(own_items(request)), *msgspec.json.decode(msgspec.json.encode(response["output"]))]
        try:
            return await self._within(STORE_WITHIN, self._add_if_room(team_id, conversation_id, told))
        except Exception as exc:  # whatever it is: the answer is there, and paid
            if isinstance(exc, POSTGRES_AWAY):
                self._away_until = self._clock.monotonic() + AWAY_FOR
            log.warning("conversation_not_gone_on", request_id=call.request_id, team_id=team_id, error=repr(exc))
            return False

    async def _add_if_room(self, team_id: str, conversation_id: str, told: Sequence[dict[str, Any]]) -> bool:
        if not await self.has_room(team_id):
            return False
        self.note_stored(team_id, await self._conversations.add(team_id, conversation_id, told))
        return True

    async def _put_if_room(self, team_id: str, row_id: str, previous_id: str | None, turn: Turn | StoredChat) -> bool:
        if not await self.has_room(team_id):
            return False
        stored = await self.store.put(team_id, row_id, previous_id, turn)
        self.note_stored(team_id, stored)
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
        """Whether a team may store more: its rows are summed once a minute, what is stored elsewhere comes later. A sum
        takes long where they are very many: a call waits for a team's first alone, and not to its end."""
        now, known = self._clock.monotonic(), self._used.get(team_id)
        if known is None or now - known[0] >= SUMMED_EVERY:
            self._used = {team: used for team, used in self._used.items() if now - used[0] < FORGOTTEN_AFTER}
            self._used[team_id] = (now, 0 if known is None else known[1])
            summing = asyncio.create_task(self._sum(team_id))
            self._under_way.add(summing)
            summing.add_done_callback(self._under_way.discard)
            if known is None:
                await asyncio.wait([summing], timeout=SUM_WITHIN)
        return self._used[team_id][1] < self._most_bytes

    async def _sum(self, team_id: str) -> None:
        """Note what a team's rows take; should Postgres not say it, what was known goes on to count."""
        with told_if_away(log, "stored_bytes_not_summed", team_id=team_id):
            used = await self.store.bytes_of(team_id)
            self._used[team_id] = (self._clock.monotonic(), used)

    def note_stored(self, team_id: str, size: int) -> None:
        """Note that a team has stored so many bytes more."""
        if (known := self._used.get(team_id)) is not None:
            self._used[team_id] = (known[0], known[1] + size)

    async def _items_of(
        self, team_id: str, request: ResponsesRequest, local: ConnectionTurns | None
    ) -> tuple[Items, Items, int]:
        """Return the items before a request, and its own with what they refer to and the bytes of that."""
        if request.conversation_id is not None:
            before = await self._conversations.items(team_id, request.conversation_id)
        elif local is not None and (turn := local.find(request.previous_response_id)) is not None:
            before = turn.items
        else:
            before = await self._before(team_id, request.previous_response_id)
        known = {} if local is None else local.items()
        return before, *await self._with_references(team_id, own_items(request), known)

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
        if chain and chain[-1][1].is_of_conversation():
            words = "is a turn of a conversation, whose items before it are known there: name that in 'conversation'"
            raise invalid_param("previous_response_id", f"Response with id '{previous_id[:80]}' {words}.")
        return tuple(item for _, turn in chain for item in (*turn.input, *turn.output()))

    async def _with_references(
        self, team_id: str, items: Items, known: Mapping[str | None, InputItem]
    ) -> tuple[Items, int]:
        """Return input with the items that it refers to in their places (``known`` by their ids, or stored), and the
        bytes of these: a few references, each often, can name more than any request may have."""
        sought = {item.id for item in items if item.type == "item_reference"}
        found = {item_id: known[item_id] for item_id in sought if item_id in known}
        sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in found.items()}
        sources = {response_of_item(item_id) for item_id in sought - found.keys()} - {None}
        for source in sorted(filter(None, sources)) if self.store.retention else ():  # one after the other in memory
            for turn in (await self.store.find(team_id, [source])).values():
                read = {item.id: item for item in turn.output() if item.id in sought}
                found |= read
                sizes |= {item_id: len(msgspec.json.encode(item)) for item_id, item in read.items()}
            _refuse_long(sum(sizes.values()))
        whole, referred = list[InputItem](), 0
        for place, item in enumerate(items):
            if item.type == "item_reference" and item.id not in found:
                words = f"Item with id '{(item.id or '')[:80]}' not found. Send the item itself in its place."
                raise invalid_param(f"input[{place}]", words)
            if item.type == "item_reference":
                referred += sizes[item.id]
            whole.append(found[item.id] if item.type == "item_reference" else item)
        _refuse_long(referred)
        return tuple(whole), referred


def _refuse_long(size: int) -> None:
    """Raise BadRequest for references to more than a conversation may have."""
    if size > LARGEST:
        words = f"The items that 'input' refers to have more than {LARGEST // 2**20} MiB together."
        raise invalid_param("input", f"{words} Refer to fewer, or begin another conversation.")


def _refuse(missing: str, *, has_begun: bool) -> NoReturn:
    turn = "A response before it" if has_begun else "Previous response"
    raise BadRequest(
        f"{turn} with id '{missing[:80]}' not found: it was not stored, is past its time, was deleted or is another "
        f"team's. Leave 'previous_response_id' out and {RESEND}",
        param="previous_response_id",
        code="previous_response_not_found",
    )
