# Stored chats: chat completions that were asked with ``store: true``. They are rows beside stored responses, sealed,
# kept and counted like them; what a list looks for stands in what is sealed.

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import msgspec
import structlog
from msgspec import Raw, Struct
from sqlalchemy import text

from billing.core.errors import RateLimited
from gateway.core.errors import StoredResponseUnreadable
from gateway.storage.encryption import Unsealable
from gateway.stored_responses.store import HEAVY, ResponseStore, can_be_id
from gateway.stored_responses.turns import StoredChat, unseal
from protocol.errors import BadRequest, NotFound, invalid_value
from protocol.serving.off_loop import in_parallel

READ_AT_ONCE = 4 * 1024 * 1024  # bytes of chats in JSON that a list has in hand, beside those that it tells
MOST_READS = 50  # of a list that looks for few among many, each of at most 200 chats,
MOST_IN_VAIN = 1_000  # and of one that has found none
PAUSE = 0.02  # seconds, where its team has used up what it may ask of what is stored
MOST_WAITING = 4  # lists of a team that do so at once
MOST_TOLD = 16 * 1024 * 1024  # bytes of a page: it ends before it has as many as were asked for

log = structlog.get_logger(__name__)


class _Model(Struct):
    model: str


class ChatStore:
    """The stored chats of all teams."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses
        self._waiting: Counter[str] = Counter()  # lists, by their team

    async def find(self, team_id: str, chat_id: str) -> StoredChat:
        """Return a chat of a team's. Raises NotFound, StoredResponseUnreadable."""
        rows = await self._responses.rows(FIND, team_id, id=chat_id) if can_be_id(chat_id) else []
        if not rows:
            _refuse(chat_id)
        return await in_parallel(rows[0].bytes, HEAVY, partial(self._opened, team_id, rows[0]))

    async def update(self, team_id: str, chat_id: str, metadata: dict[str, str]) -> StoredChat:
        """Give a chat other metadata. Raises NotFound, StoredResponseUnreadable."""
        chat = msgspec.structs.replace(await self.find(team_id, chat_id), metadata=metadata)
        sealed = await self._responses.sealed(team_id, chat_id, msgspec.json.encode(chat))
        if not await self._responses.rows(UPDATE, team_id, id=chat_id, sealed=sealed):
            _refuse(chat_id)
        return chat

    async def delete(self, team_id: str, chat_id: str) -> None:
        """Delete a chat for ever. Raises NotFound."""
        if not can_be_id(chat_id) or not await self._responses.rows(DELETE, team_id, id=chat_id):
            _refuse(chat_id)

    async def page(
        self,
        team_id: str,
        takes: Callable[[StoredChat], bool],
        note: Callable[[], object],
        *,
        limit: int,
        after: str | None,
        is_rising: bool,
    ) -> tuple[dict[str, StoredChat], bool]:
        """Return the chats that a list ``takes``, by their ids, the oldest first or the latest, and whether there are
        more; ``note`` is told of each read, and a few lists of a team wait until it lets them. Raises
        BadRequest, StoredResponseUnreadable, and what ``note`` does."""
        place: Any = None
        if after is not None:
            rows = await self._responses.rows(FIND, team_id, id=after) if can_be_id(after) else []
            if not rows:
                raise invalid_value("after", "is the id of a stored chat completion")
            place = rows[0]
        found, told = dict[str, StoredChat](), 0
        statement = PAGE_UP if is_rising else PAGE_DOWN
        for read in range(MOST_IN_VAIN):
            if found and read >= MOST_READS:
                return found, True
            await self._turn(team_id, note)
            values = {"at": place and place.created_at, "id": place and place.id, "most": READ_AT_ONCE}
            if not (rows := await self._responses.rows(statement, team_id, **values)):
                return found, False
            size = sum(row.bytes for row in rows)
            for row, chat in await in_parallel(size, HEAVY, partial(self._fitting, team_id, rows, takes)):
                if len(found) == limit or (found and told + row.bytes > MOST_TOLD):
                    return found, True
                found[row.id] = chat
                told += row.bytes
            place = rows[-1]
        if not found:
            words = "None of the stored chat completions that were looked at is as asked; there are more"
            raise BadRequest(f"{words}. Go on with after={place.id}.", param="after")
        return found, True

    async def _turn(self, team_id: str, note: Callable[[], object]) -> None:
        try:
            note()
            return
        except RateLimited:  # however many lists a team asks for, few of them have pages in memory and look at clocks
            if self._waiting[team_id] >= MOST_WAITING:
                raise
        self._waiting[team_id] += 1
        try:
            while True:
                await asyncio.sleep(PAUSE)
                with suppress(RateLimited):
                    note()
                    return
        finally:
            self._waiting[team_id] -= 1
            if not self._waiting[team_id]:
                del self._waiting[team_id]

    def _fitting(
        self, team_id: str, rows: list[Any], takes: Callable[[StoredChat], bool]
    ) -> list[tuple[Any, StoredChat]]:
        chats = [(row, self._opened(team_id, row)) for row in rows]
        return [each for each in chats if takes(each[1])]

    def _opened(self, team_id: str, row: Any) -> StoredChat:
        try:
            return unseal(self._responses.sealer, team_id, row.id, row.sealed, StoredChat)
        except (Unsealable, zlib.error, msgspec.MsgspecError) as exc:
            log.error("stored_chat_unreadable", team_id=team_id, chat_id=row.id, error=repr(exc))
            words = f"The stored chat completion '{row.id}' cannot be read any more. Delete it."
            raise StoredResponseUnreadable(words) from exc


def model_of(chat: StoredChat) -> str:
    """Return the model that a chat was asked of."""
    return msgspec.json.decode(chat.completion, type=_Model).model


def told(chat: StoredChat) -> Raw:
    """Return a chat as its answer was told, byte for byte, with its metadata."""
    return Raw(b'%b,"metadata":%b}' % (bytes(chat.completion)[:-1], msgspec.json.encode(chat.metadata)))


def messages_of(chat_id: str, chat: StoredChat) -> list[dict[str, Any]]:
    """Return what a chat was asked with, each message with an id; parts of content stand beside the text."""
    shown: list[dict[str, Any]] = []
    for place, message in enumerate(msgspec.json.decode(chat.messages, type=list[dict[str, Raw]])):
        content = message.get("content")
        words, parts = (None, content) if bytes(content or b"")[:1] == b"[" else (content, None)
        shown.append({**message, "id": f"{chat_id}-{place}", "content": words, "content_parts": parts})
    return shown


def _refuse(chat_id: str) -> NoReturn:
    raise NotFound(
        f"Chat completion with id '{chat_id[:80]}' not found: it was not stored here ('store': true), is past its "
        "time, was deleted or is another team's."
    )


OF_CHATS = "team_id = :team_id AND created_at > :since AND id LIKE 'chatcmpl-%'"
FIND, UPDATE, DELETE = (
    text(f"{verb} {more} WHERE id = :id AND {OF_CHATS} {end}")
    for verb, more, end in (
        ("SELECT id, sealed, created_at, conversation_bytes AS bytes FROM", "stored_responses", ""),
        ("UPDATE stored_responses SET", "sealed = :sealed", "RETURNING 1"),
        ("DELETE FROM", "stored_responses", "RETURNING 1"),
    )
)
# Rows after a place, as many as have ``most`` bytes in JSON together, one at the least.
PAGE_UP, PAGE_DOWN = (
    text(f"""
        SELECT id, sealed, created_at, bytes FROM (
            SELECT id, sealed, created_at, conversation_bytes AS bytes,
                   sum(conversation_bytes) OVER (ORDER BY created_at {order}, id {order}) - conversation_bytes AS before
            FROM (
                SELECT * FROM stored_responses
                WHERE {OF_CHATS} AND (CAST(:at AS timestamptz) IS NULL
                    OR (created_at, id) {beyond} (CAST(:at AS timestamptz), CAST(:id AS text)))
                ORDER BY created_at {order}, id {order} LIMIT 200
            ) AS next
        ) AS summed
        WHERE before = 0 OR before + bytes <= :most ORDER BY created_at {order}, id {order}
    """)  # noqa: S608  (all of it is ours)
    for beyond, order in ((">", "ASC"), ("<", "DESC"))
)
