# What a client was told, in whichever dialect, and what the books say of it.

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import httpx
from sqlalchemy import text

from gateway.commands.audit import run_audit
from gateway.core.settings import Settings
from gateway.storage.database import Database
from tests.support.waiting import until


class Told:
    """A stream as its reader has it: the text, why it ended, whether it was whole, or with which error it broke off."""

    def __init__(self, request_id: str, lines: Iterable[str]) -> None:
        self.request_id = request_id
        said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        self.is_whole = said[-1] == "[DONE]" or '"message_stop"' in said[-1]
        self.events = [json.loads(line) for line in said if line != "[DONE]"]
        self.error = next((event["error"] for event in self.events if "error" in event), None)
        self.text = "".join(map(text_of, self.events))
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        self.logprobs = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        self.reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        self.reasons += [event["delta"]["stop_reason"] for event in self.events if event.get("type") == "message_delta"]


def lines_of(answer: httpx.Response) -> Iterator[str]:
    """Yield a stream's lines as they come. They end in a line feed alone; httpx's end at U+0085 and U+2028 too."""
    rest = b""
    for piece in answer.iter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in whole)


def text_of(event: dict[str, Any]) -> str:
    """Return the words of one event."""
    if "delta" in event:  # Anthropic's
        return str(event["delta"].get("text", ""))
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in event.get("choices", ()))


def rows_of(settings: Settings, request_ids: Sequence[str]) -> list[Any]:
    """Return the ledger's rows of calls in the order of the calls; there is one of each, and the books agree."""
    query = text("SELECT * FROM usage_records WHERE request_id = ANY(CAST(:ids AS uuid[]))")

    async def read() -> list[Any]:
        database = Database(settings.database_url)
        try:
            async with database.begin() as connection:
                return list((await connection.execute(query, {"ids": request_ids})).all())
        finally:
            await database.close()

    until(lambda: len(asyncio.run(read())) >= len(request_ids))
    rows = asyncio.run(read())
    by_id = {str(row.request_id): row for row in rows}
    assert (len(rows), by_id.keys()) == (len(request_ids), set(request_ids))
    assert run_audit(settings, None) == 0
    return [by_id[request_id] for request_id in request_ids]
