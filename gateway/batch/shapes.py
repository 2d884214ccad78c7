# What batches are made of: their limits, one request of many, and how callers submit them.

from __future__ import annotations

from typing import Literal

from msgspec import Raw, Struct

from gateway.dialects.chat import ENDPOINT as CHAT
from protocol.errors import Unshown

MOST_REQUESTS = 50_000  # in one batch
LARGEST_FILE = 200 * 1024 * 1024  # bytes
LONGEST_LINE = 32 * 1024 * 1024  # bytes: what the endpoints take themselves
LONGEST_CUSTOM_ID = 512  # characters
LONGEST_MODEL = 256  # characters
MOST_LINES = 4 * MOST_REQUESTS  # of a file, empty ones included
WINDOWS = {"24h": 86400.0}  # completion_window, in seconds

Priority = Literal["low", "normal", "high"]

OPEN = ("validating", "in_progress", "finalizing", "cancelling")  # a batch that has not ended


class Item(Struct, frozen=True):
    """One request of a batch, as it is stored."""

    custom_id: str
    body: bytes  # JSON


class Fault(Struct, frozen=True, kw_only=True):
    """What is wrong with one line of the input. OpenAI's shape."""

    code: str
    line: int | None  # from 1
    message: str
    param: str | None = None


class InputLine(Struct, frozen=True):
    """A line of an input file, OpenAI's shape."""

    custom_id: str
    method: str
    url: str
    body: Raw


class NewBatch(Unshown, Struct, frozen=True):
    """``POST /v1/batch``: requests are ``{"custom_id", "body"}`` or bare bodies."""

    requests: list[Raw]
    endpoint: str = CHAT.path
    callback_url: str | None = None
    priority: Priority = "normal"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class NewOpenAIBatch(Unshown, Struct, frozen=True):
    """``POST /v1/batches``, OpenAI's shape."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    priority: Priority = "normal"  # our extension, as is the next
    callback_url: str | None = None
