# /v1/conversations: items that a team keeps at the gateway, for responses that go on from them.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from litestar import Response, delete, get, post
from litestar.params import FromPath
from msgspec import Meta, Struct

from gateway.accounts.guards import team_guard
from gateway.core.errors import StorageFull
from gateway.dialects.checks import check_tags, require
from gateway.dialects.responses import check_items
from gateway.http.exchange import (
    AnyRequest,
    answer,
    part_of,
    read_body,
    read_order,
    read_parameters,
    read_query,
)
from gateway.http.routes.stored.counting import counted_team
from gateway.stored_responses.conversations import Conversation, ConversationStore
from gateway.stored_responses.memory import ResponseMemory
from gateway.stored_responses.store import OF_A_CONVERSATION
from gateway.stored_responses.turns import told_items_of
from protocol.decoding import decode
from protocol.errors import BadRequest
from protocol.responses import InputItem

PATH = "/v1/conversations"
ONE = PATH + "/{conversation_id:str}"
ITEMS = ONE + "/items"
INCLUDE = ("include", "include[]")  # adds nothing: all that is known is there
MOST_ADDED = 20  # items in one request
USUAL_PAGE, LONGEST_PAGE = 20, 100

Added = Annotated[tuple[InputItem, ...], Meta(max_length=MOST_ADDED)]


class NewConversation(Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversation begins with."""

    items: Added | None = None
    metadata: dict[str, str] | None = None


class ConversationChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversation is told about."""

    metadata: dict[str, str]


class NewItems(Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversation goes on with."""

    items: Added


@post(PATH, guards=[team_guard], status_code=200, summary="Begin a conversation", takes=NewConversation)
async def create_conversation(request: AnyRequest) -> Response[bytes]:
    """Keep items for responses that name the conversation, at most 20 at first."""
    team_id = counted_team(request, "responses")
    new, _ = await read_body(request, partial(decode, type=NewConversation))
    check_tags(new)
    told = _checked(new.items or ())
    store, memory = await _with_room(request, team_id)
    made = await store.create(team_id, new.metadata or {})
    memory.note_stored(team_id, OF_A_CONVERSATION + await store.add(team_id, made.id, told))
    return answer(_view(made))


@get(ONE, guards=[team_guard], summary="Read a conversation")
async def get_conversation(request: AnyRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    """Read what is kept of a conversation beside its items."""
    return answer(_view(await _store_of(request).find(counted_team(request, "responses"), conversation_id)))


@post(ONE, guards=[team_guard], status_code=200, summary="Change a conversation", takes=ConversationChange)
async def update_conversation(request: AnyRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    """Give a conversation other metadata."""
    team_id = counted_team(request, "responses")
    change, _ = await read_body(request, partial(decode, type=ConversationChange))
    check_tags(change)
    return answer(_view(await _store_of(request).update(team_id, conversation_id, change.metadata)))


@delete(ONE, guards=[team_guard], status_code=200, summary="Delete a conversation")
async def delete_conversation(request: AnyRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    """Delete a conversation with its items, for ever. Responses that were stored stay."""
    await _store_of(request).delete(counted_team(request, "responses"), conversation_id)
    return answer({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@post(ITEMS, guards=[team_guard], status_code=200, summary="Add items to a conversation", takes=NewItems, query=INCLUDE)
async def create_items(request: AnyRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    """Add at most 20 items at the end of a conversation, all of them or none."""
    team_id = counted_team(request, "responses")
    read_parameters(request, repeated=INCLUDE)
    new, _ = await read_body(request, partial(decode, type=NewItems))
    require(bool(new.items), "items", "'items' must hold at least one item.")
    told = _checked(new.items)
    store, memory = await _with_room(request, team_id)
    memory.note_stored(team_id, await store.add(team_id, conversation_id, told))
    return _page([(item["id"], item) for item in told], len(told))


@get(ITEMS, guards=[team_guard], summary="List a conversation's items", query=("after", "limit", "order", *INCLUDE))
async def get_items(request: AnyRequest, conversation_id: FromPath[str]) -> Response[bytes]:
    """List the items of a conversation, the latest first unless ``order`` is asc."""
    query, limit = read_query(request, USUAL_PAGE, LONGEST_PAGE, repeated=INCLUDE)
    place: dict[str, Any] = {"limit": limit + 1, "after": query.get("after"), "is_rising": read_order(query)}
    return _page(await _store_of(request).page(counted_team(request, "responses"), conversation_id, **place), limit)


@get(ITEMS + "/{item_id:str}", guards=[team_guard], summary="Read an item of a conversation", query=INCLUDE)
async def get_item(request: AnyRequest, conversation_id: FromPath[str], item_id: FromPath[str]) -> Response[bytes]:
    """Read one item."""
    read_parameters(request, repeated=INCLUDE)
    return answer(await _store_of(request).item(counted_team(request, "responses"), conversation_id, item_id))


@delete(ITEMS + "/{item_id:str}", guards=[team_guard], status_code=200, summary="Delete an item of a conversation")
async def delete_item(request: AnyRequest, conversation_id: FromPath[str], item_id: FromPath[str]) -> Response[bytes]:
    """Delete one item; the conversation is returned."""
    store, team_id = _store_of(request), counted_team(request, "responses")
    await store.delete_item(team_id, conversation_id, item_id)
    return answer(_view(await store.find(team_id, conversation_id)))


def _checked(items: tuple[InputItem, ...]) -> list[dict[str, Any]]:
    """Return items as they are kept. Raises BadRequest for what no model could be told."""
    check_items(items, "items")
    return told_items_of(items)


def _store_of(request: AnyRequest) -> ConversationStore:
    return part_of(request, ConversationStore)


async def _with_room(request: AnyRequest, team_id: str) -> tuple[ConversationStore, ResponseMemory]:
    """Return where a team may keep more, and what counts it. Raises BadRequest where nothing is kept, StorageFull."""
    memory = part_of(request, ResponseMemory)
    if not memory.store.retention:
        raise BadRequest("Nothing is stored at this gateway. Send the items of the turns in 'input'.")
    if not await memory.has_room(team_id):
        raise StorageFull("The team's stored responses and conversations have as many bytes as they may. Delete some.")
    return _store_of(request), memory


def _view(one: Conversation) -> dict[str, Any]:
    created = int(one.created_at.timestamp())
    return {"id": one.id, "object": "conversation", "created_at": created, "metadata": one.metadata}


def _page(told: Sequence[tuple[str, Any]], limit: int) -> Response[bytes]:
    """Return items, told with their ids, as a list of OpenAI's form; there may be one more than ``limit``."""
    page = told[:limit]
    first, last = (page[0][0], page[-1][0]) if page else (None, None)
    items, more = [item for _, item in page], len(told) > limit
    return answer({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more})
