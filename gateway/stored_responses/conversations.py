# Conversations of the Responses API: items that a team keeps here. A response that names one is asked after its items,
# and adds its own input and output at its end, all of them or none: two that run at once stand one after the other.

from __future__ import annotations

import uuid
import zlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn, TypeVar

import msgspec
import structlog
from msgspec import Raw, Struct
from msgspec.structs import replace
from sqlalchemy import TextClause, text

from gateway.core.errors import StorageFull, StoredResponseUnreadable
from gateway.storage.encryption import Unsealable
from gateway.stored_responses.store import HEAVY, ResponseStore, can_be_id
from gateway.stored_responses.turns import LARGEST, read_item, seal, unseal
from protocol.chat import MOST_MESSAGES
from protocol.errors import NotFound, invalid_value
from protocol.responses import InputItem
from protocol.serving.off_loop import in_parallel

T = TypeVar("T")
Told = tuple[str, Raw]  # an item's id, and the item

log = structlog.get_logger(__name__)


class Conversation(Struct, frozen=True):
    """What is kept of one beside its items."""

    id: str
    metadata: dict[str, str]
    created_at: datetime
    bytes: int  # of its items in JSON


class ConversationStore:
    """The conversations of all teams. They are kept for as long as responses are, from their last use on."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses

    async def create(self, team_id: str, metadata: dict[str, str]) -> Conversation:
        """Begin a conversation."""
        made = Conversation(f"conv_{uuid.uuid4().hex}", metadata, self._responses.clock.moment(), 0)
        await self._run(CREATE, team_id, made.id, sealed=self._sealed(team_id, made))
        return made

    async def update(self, team_id: str, conversation_id: str, metadata: dict[str, str]) -> Conversation:
        """Give a conversation other metadata. Raises NotFound."""
        found = replace(await self.find(team_id, conversation_id), metadata=metadata)
        await self._run(UPDATE, team_id, conversation_id, sealed=self._sealed(team_id, found))
        return found

    async def find(self, team_id: str, conversation_id: str) -> Conversation:
        """Return a conversation of a team's. Raises NotFound, StoredResponseUnreadable."""
        rows = await self._run(FIND, team_id, conversation_id) if can_be_id(conversation_id) else []
        if not rows:
            _refuse(conversation_id)
        metadata = self._opened(team_id, rows[0].id, rows[0].sealed, dict[str, str])
        return Conversation(rows[0].id, metadata, rows[0].created_at, rows[0].bytes)

    async def delete(self, team_id: str, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises NotFound."""
        if not can_be_id(conversation_id) or not await self._run(DELETE, team_id, conversation_id):
            _refuse(conversation_id)

    async def items(self, team_id: str, conversation_id: str) -> tuple[InputItem, ...]:
        """Return all items of a conversation as a request would say them. Raises NotFound, StoredResponseUnreadable."""
        found = await self.find(team_id, conversation_id)
        if found.bytes < HEAVY:
            return await self._read(team_id, found)
        async with self._responses.room.taken(team_id, found.bytes):
            return await self._read(team_id, found)

    async def page(
        self, team_id: str, conversation_id: str, *, limit: int, after: str | None, is_rising: bool
    ) -> list[Told]:
        """Return some items as they are told, in their order or the latest first. Raises NotFound, BadRequest."""
        found = await self.find(team_id, conversation_id)
        place = None
        if after is not None:
            places = await self._run(PLACE, team_id, conversation_id, item=after) if can_be_id(after) else []
            if not places:
                raise invalid_value("after", "is the id of an item of this conversation")
            place = places[0].position
        statement = PAGE_UP if is_rising else PAGE_DOWN
        values = {"after": place, "limit": limit}
        if found.bytes < HEAVY:
            return await self._told(team_id, conversation_id, await self._run(statement, team_id, found.id, **values))
        async with self._responses.room.taken(team_id, found.bytes):
            return await self._told(team_id, conversation_id, await self._run(statement, team_id, found.id, **values))

    async def item(self, team_id: str, conversation_id: str, item_id: str) -> Raw:
        """Return one item as it is told. Raises NotFound."""
        rows = await self._run(ITEM, team_id, conversation_id, item=item_id) if can_be_id(item_id) else []
        if not rows:
            _refuse_item(item_id)
        ((_, told),) = await self._told(team_id, conversation_id, rows)
        return told

    async def delete_item(self, team_id: str, conversation_id: str, item_id: str) -> None:
        """Delete one item. Raises NotFound."""
        if not can_be_id(item_id) or not await self._run(DELETE_ITEM, team_id, conversation_id, item=item_id):
            _refuse_item(item_id)

    async def add(self, team_id: str, conversation_id: str, told: Sequence[dict[str, Any]]) -> int:
        """Add items at the end, all of them; return their bytes. Raises NotFound; StorageFull for more than a
        conversation may hold."""
        if not told:
            return 0
        plain = [msgspec.json.encode(item) for item in told]
        size = sum(map(len, plain))

        def sealed() -> list[bytes]:
            labels = (f"{conversation_id}\n{item['id']}" for item in told)
            return [seal(self._responses.sealer, team_id, *pair) for pair in zip(labels, plain, strict=True)]

        values = {
            "ids": [item["id"] for item in told],
            "sealed": await in_parallel(size, HEAVY, sealed),
            "sizes": [len(each) for each in plain],
            "size": size,
            "count": len(told),
            "most": LARGEST,
            "most_items": MOST_MESSAGES,
        }
        if not await self._run(ADD, team_id, conversation_id, **values):
            await self.find(team_id, conversation_id)
            raise StorageFull(
                f"A conversation holds at most {MOST_MESSAGES} items and {LARGEST // 2**20} MiB. Begin another."
            )
        return size

    async def _read(self, team_id: str, found: Conversation) -> tuple[InputItem, ...]:
        rows = await self._run(PAGE_UP, team_id, found.id, after=None, limit=MOST_MESSAGES)

        def opened() -> tuple[InputItem, ...]:
            return tuple(read_item(self._opened(team_id, f"{found.id}\n{row.id}", row.sealed, Raw)) for row in rows)

        return await in_parallel(found.bytes, HEAVY, opened)

    async def _told(self, team_id: str, conversation_id: str, rows: list[Any]) -> list[Told]:
        """Return items as JSON, which nothing here has to read."""

        def opened() -> list[Told]:
            return [(row.id, self._opened(team_id, f"{conversation_id}\n{row.id}", row.sealed, Raw)) for row in rows]

        return await in_parallel(sum(row.size for row in rows), HEAVY, opened)

    async def _run(self, statement: TextClause, team_id: str, conversation_id: str, **values: Any) -> list[Any]:
        return await self._responses.rows(statement, team_id, id=conversation_id, **values)

    def _sealed(self, team_id: str, one: Conversation) -> bytes:
        return seal(self._responses.sealer, team_id, one.id, msgspec.json.encode(one.metadata))

    def _opened(self, team_id: str, label: str, sealed: bytes, kind: type[T]) -> T:
        try:
            return unseal(self._responses.sealer, team_id, label, sealed, kind)
        except (Unsealable, zlib.error, msgspec.MsgspecError) as exc:
            conversation_id = label.partition("\n")[0]
            log.error("conversation_unreadable", team_id=team_id, conversation_id=conversation_id, error=repr(exc))
            words = f"The conversation '{conversation_id}' cannot be read any more. Send its items in 'input'."
            raise StoredResponseUnreadable(words) from exc


def _refuse(conversation_id: str) -> NoReturn:
    raise NotFound(
        f"Conversation with id '{conversation_id[:80]}' not found: it was not made here, is past its time, was deleted "
        "or is another team's."
    )


def _refuse_item(item_id: str) -> NoReturn:
    raise NotFound(f"Item with id '{item_id[:80]}' not found in this conversation.")


CREATE = text("""
    INSERT INTO conversations (id, team_id, sealed, touched_at, created_at)
    VALUES (:id, :team_id, :sealed, :now, :now) RETURNING 1
""")
UPDATE = text("""
    UPDATE conversations SET sealed = :sealed, touched_at = :now WHERE id = :id AND team_id = :team_id RETURNING 1
""")
FIND = text("""
    SELECT id, sealed, created_at, bytes FROM conversations
    WHERE id = :id AND team_id = :team_id AND touched_at > :since
""")
DELETE = text("DELETE FROM conversations WHERE id = :id AND team_id = :team_id AND touched_at > :since RETURNING 1")
# An addition waits for the row, so that the items of one stand together.
ADD = text("""
    WITH kept AS (
        UPDATE conversations
        SET items = items + CAST(:count AS bigint), bytes = bytes + CAST(:size AS bigint),
            last_position = last_position + CAST(:count AS bigint), touched_at = CAST(:now AS timestamptz)
        WHERE id = :id AND team_id = :team_id AND touched_at > :since
          AND items + CAST(:count AS bigint) <= CAST(:most_items AS bigint)
          AND bytes + CAST(:size AS bigint) <= CAST(:most AS bigint)
        RETURNING id, last_position - CAST(:count AS bigint) AS before
    )
    INSERT INTO conversation_items (conversation_id, position, id, sealed, size)
    SELECT kept.id, kept.before + new.place, new.id, new.sealed, new.size
    FROM kept, unnest(CAST(:ids AS text[]), CAST(:sealed AS bytea[]), CAST(:sizes AS bigint[]))
        WITH ORDINALITY AS new (id, sealed, size, place)
    RETURNING 1
""")
OF_TEAM = "EXISTS (SELECT FROM conversations WHERE id = :id AND team_id = :team_id AND touched_at > :since)"
PLACE = text("SELECT position FROM conversation_items WHERE conversation_id = :id AND id = :item")
PAGE_UP, PAGE_DOWN = (
    text(f"""
        SELECT id, sealed, size FROM conversation_items
        WHERE conversation_id = :id AND {OF_TEAM}
          AND (CAST(:after AS bigint) IS NULL OR position {beyond} CAST(:after AS bigint))
        ORDER BY position {order} LIMIT :limit
    """)  # noqa: S608  (all of it is ours)
    for beyond, order in ((">", "ASC"), ("<", "DESC"))
)
ITEM = text(f"""
    SELECT id, sealed, size FROM conversation_items WHERE conversation_id = :id AND id = :item AND {OF_TEAM}
""")  # noqa: S608  (all of it is ours)
DELETE_ITEM = text(f"""
    WITH gone AS (
        DELETE FROM conversation_items WHERE conversation_id = :id AND id = :item AND {OF_TEAM} RETURNING size
    )
    UPDATE conversations SET items = items - 1, bytes = bytes - gone.size, touched_at = :now
    FROM gone WHERE conversations.id = :id RETURNING 1
""")  # noqa: S608  (all of it is ours)
