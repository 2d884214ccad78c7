# A stored turn: the items that one response was asked with and the response itself, how it is sealed into its row, and
# what the next turn takes from it.

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from gateway.core.errors import StoredResponseUnreadable
from gateway.dialects.parts.output_items import told_item
from gateway.storage.encryption import Sealer
from protocol.responses import InputItem

LARGEST = 16 * 1024 * 1024  # bytes of a turn and those before it, in JSON; a longer conversation is not stored

PREFIXES = {  # of an item's id, by its type
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
    "web_search_call": "ws",
    "file_search_call": "fs",
    "code_interpreter_call": "ci",
    "image_generation_call": "ig",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}
T = TypeVar("T")


_item = msgspec.json.Decoder(InputItem)


class Turn(Struct, frozen=True):
    """What a row holds."""

    input: tuple[InputItem, ...]  # of this turn alone
    response: Raw  # a ``response`` object

    def output(self) -> tuple[InputItem, ...]:
        """Return what was answered, as the same items sent back by a client would be read. Raises
        StoredResponseUnreadable."""
        return tuple(map(read_item, msgspec.json.decode(self.response, type=_Answered).output))

    def status(self) -> str:
        """Return the status of the response."""
        return msgspec.json.decode(self.response, type=_State).status

    def is_of_conversation(self) -> bool:
        """Whether the response was added to a conversation."""
        return msgspec.json.decode(self.response, type=_State).conversation is not None

    def ran_behind(self) -> bool:
        """Whether the response runs in the background, or did."""
        return msgspec.json.decode(self.response, type=_State).background


class StoredChat(Struct, frozen=True):
    """What a row of a chat holds."""

    messages: Raw  # as they were asked
    completion: Raw  # a ``chat.completion`` object
    metadata: dict[str, str]


class _Answered(Struct):
    output: tuple[Raw, ...]


class _State(Struct):
    status: str
    background: bool = False
    conversation: Any = None


def read_item(told: Raw) -> InputItem:
    """Return an item that was answered, with whatever status. Raises StoredResponseUnreadable for one that is none of
    those known here."""
    try:
        return _item.decode(told)
    except msgspec.ValidationError:
        fields = msgspec.json.decode(told, type=dict[str, Any])
    try:
        return replace(msgspec.convert(fields | {"status": None}, InputItem), status=fields.get("status"))
    except msgspec.ValidationError as exc:
        words = f"An item of type '{str(fields.get('type'))[:64]}' that was answered can not be sent back from here."
        raise StoredResponseUnreadable(f"{words} Send the others of its conversation in 'input'.") from exc


def seal(sealer: Sealer, team_id: str, row_id: str, plain: bytes) -> bytes:
    """Return JSON as its row has it: made small first, because sealed bytes compress no more."""
    return sealer.seal(zlib.compress(plain, 1), f"{team_id}\n{row_id}")


def unseal(sealer: Sealer, team_id: str, row_id: str, sealed: bytes, kind: type[T]) -> T:
    """Return what was sealed. Raises Unsealable, zlib.error or MsgspecError."""
    plain = zlib.decompress(sealer.unseal(sealed, f"{team_id}\n{row_id}"))
    return msgspec.json.decode(plain, type=kind)


def told_items(turns: Sequence[tuple[str, Turn]]) -> list[dict[str, Any]]:
    """Return the items that the last of a conversation's turns, told with their responses' ids, was asked with: each
    with an id, and its content in parts."""
    told: list[dict[str, Any]] = []
    for response_id, turn in turns:
        suffix = response_id.removeprefix("resp_")
        told += [told_item(item, f"in_{suffix}{place:04}") for place, item in enumerate(turn.input)]
        if response_id != turns[-1][0]:
            told += msgspec.json.decode(turn.response)["output"]
    return told


def told_items_of(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Return a request's items as a conversation keeps them, each with an id of its own."""
    return [told_item(replace(item, id=None), f"{PREFIXES[item.type]}_{uuid.uuid4().hex}") for item in items]
