# What lies below /v1/chat/completions: stored chats, listed, read, given other metadata and deleted, and the messages
# that they were asked with.

from __future__ import annotations

from functools import partial

from litestar import Response, delete, get, post
from litestar.params import FromPath
from msgspec import Struct

from gateway.accounts.guards import team_guard
from gateway.dialects.chat import ENDPOINT
from gateway.dialects.checks import check_tags
from gateway.http.exchange import (
    OF_METADATA,
    AnyRequest,
    answer,
    caller_of,
    metadata_of,
    openai_page,
    part_of,
    read_body,
    read_order,
    read_query,
)
from gateway.http.routes.stored.counting import counted_team
from gateway.stored_responses.chats import ChatStore, messages_of, model_of, told
from gateway.stored_responses.turns import StoredChat
from protocol.decoding import decode
from protocol.errors import invalid_value
from protocol.serving.off_loop import off_loop

ONE = ENDPOINT.path + "/{completion_id:str}"
USUAL_PAGE, LONGEST_PAGE = 20, 100
OLDEST_FIRST = {"order": "asc"}  # where a list is asked for in no order


class ChatChange(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored chat is told about."""

    metadata: dict[str, str] | None


@get(
    ENDPOINT.path,
    guards=[team_guard],
    summary="List stored chat completions",
    query=("after", "limit", OF_METADATA, "model", "order"),
)
async def list_chats(request: AnyRequest) -> Response[bytes]:
    """List chat completions that were asked with ``store: true``, the oldest first unless ``order`` is desc; those of a
    ``model`` or with some metadata alone (``metadata[KEY]=VALUE``)."""
    query, limit = read_query(request, USUAL_PAGE, LONGEST_PAGE)
    tags, model = metadata_of(query).items(), query.get("model")

    def takes(chat: StoredChat) -> bool:
        return tags <= chat.metadata.items() and model in (None, model_of(chat))

    after, is_rising = query.get("after"), read_order(OLDEST_FIRST | query)
    note = partial(counted_team, request, ENDPOINT.name)
    page = part_of(request, ChatStore).page
    found, has_more = await page(caller_of(request).team.id, takes, note, limit=limit, after=after, is_rising=is_rising)
    ids: list[str | None] = [*found] if found else [None]
    shown = {"object": "list", "data": [told(chat) for chat in found.values()], "first_id": ids[0], "last_id": ids[-1]}
    return answer(shown | {"has_more": has_more})


@get(ONE, guards=[team_guard], summary="Read a stored chat completion")
async def get_chat(request: AnyRequest, completion_id: FromPath[str]) -> Response[bytes]:
    """Read a chat completion as it was answered, with its metadata."""
    return answer(told(await part_of(request, ChatStore).find(counted_team(request, ENDPOINT.name), completion_id)))


@post(ONE, guards=[team_guard], status_code=200, summary="Change a stored chat completion", takes=ChatChange)
async def update_chat(request: AnyRequest, completion_id: FromPath[str]) -> Response[bytes]:
    """Give a chat completion other metadata."""
    team_id = counted_team(request, ENDPOINT.name)
    change, _ = await read_body(request, partial(decode, type=ChatChange))
    check_tags(change)
    return answer(told(await part_of(request, ChatStore).update(team_id, completion_id, change.metadata or {})))


@delete(ONE, guards=[team_guard], status_code=200, summary="Delete a stored chat completion")
async def delete_chat(request: AnyRequest, completion_id: FromPath[str]) -> Response[bytes]:
    """Delete a chat completion with its messages, for ever."""
    await part_of(request, ChatStore).delete(counted_team(request, ENDPOINT.name), completion_id)
    return answer({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})


@get(
    ONE + "/messages",
    guards=[team_guard],
    summary="List the messages of a stored chat completion",
    query=("after", "limit", "order"),
)
async def get_messages(request: AnyRequest, completion_id: FromPath[str]) -> Response[bytes]:
    """List the messages that a chat completion was asked with, in their order unless ``order`` is desc."""
    query, limit = read_query(request, USUAL_PAGE, LONGEST_PAGE)
    is_rising, after = read_order(OLDEST_FIRST | query), query.get("after")
    chat = await part_of(request, ChatStore).find(counted_team(request, ENDPOINT.name), completion_id)
    messages = await off_loop(len(chat.messages), partial(messages_of, completion_id, chat))
    if not is_rising:
        messages.reverse()
    if after is not None:
        places = [place for place, message in enumerate(messages) if message["id"] == after]
        if not places:
            raise invalid_value("after", "is the id of a message of this list")
        messages = messages[places[0] + 1 :]
    return openai_page(messages[: limit + 1], limit)
