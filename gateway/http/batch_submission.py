# A batch comes in: what its head may say, and its requests when they come with it. A file's are checked by a worker.

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Raw
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batch.estimate import estimated_completion
from gateway.batch.file_store import get_file
from gateway.batch.intake import Intake
from gateway.batch.limits import check_queue, check_storage, lock_limits
from gateway.batch.shapes import WINDOWS, NewBatch, NewOpenAIBatch
from gateway.batch.store import Batch, add_items, begin_batch, make_batch
from gateway.core.clock import Clock
from gateway.core.principals import Caller
from gateway.core.settings import Settings
from gateway.dialects.checks import check_tags
from gateway.dialects.options import check_endpoint
from gateway.dialects.table import FOR_BATCHES
from gateway.egress.destinations import Guard
from gateway.storage.database import Database
from protocol.errors import BadRequest, invalid_param, invalid_value

GROUP = 1000  # items in one COPY
AT_ONCE = 100  # requests looked at before others get their turn: 2 ms


class BatchSubmission:
    """Takes batches in."""

    def __init__(self, settings: Settings, database: Database, clock: Clock) -> None:
        self._settings = settings
        self._database = database
        self._clock = clock

    async def submit(self, caller: Caller, new: NewBatch, body_name: str | None = None) -> Batch:
        """Check and store a batch whose requests came with it; it runs from now on. Raises BadRequest, naming lines.

        ``body_name``: what each request calls its body, where none may be bare.

        Raises BatchQueueFull and StorageFull where the team has no room for it.
        """
        callback_url = await self._check_head(caller, new)
        intake = Intake(new.endpoint, body_name)
        items = []
        for place, said in enumerate(new.requests):
            if place % AT_ONCE == 0:
                await asyncio.sleep(0)  # others are served in between
            if (item := intake.request(Raw(said))) is not None:
                items.append(item)
            if intake.is_full:
                break
        intake.end()
        if intake.faults:
            first = intake.faults[0]
            if first.line is None:
                raise BadRequest(first.message, param="requests", code=first.code)
            where = f"requests[{first.line - 1}]"
            among = f", the first of {len(intake.faults)} faults" if len(intake.faults) > 1 else ""
            raise BadRequest(
                f"{first.message} (In {where}{among}.)",
                param=where if first.param is None else f"{where}.{first.param}",
                code=first.code,
            )
        limits, team_id, size = self._settings.batch, caller.team.id, sum(len(item.body) for item in items)
        async with self._database.begin() as connection:
            await check_queue(connection, limits, team_id, size)
            await check_storage(connection, limits, team_id, size)
            due = await estimated_completion(connection, self._clock, intake.count, new.priority)
            batch = await _make(connection, self._clock, caller, new, callback_url, input_bytes=size)
            for start in range(0, len(items), GROUP):
                await add_items(connection, batch.id, start, items[start : start + GROUP])
            await lock_limits(connection, team_id)
            await check_queue(connection, limits, team_id, 0)  # it is among them now
            await check_storage(connection, limits, team_id, 0)
            begun = await begin_batch(connection, self._clock, batch.id, intake.count, intake.model, due)
        assert begun is not None
        return begun

    async def submit_file(self, caller: Caller, new: NewOpenAIBatch) -> Batch:
        """Store a batch whose requests are in a file; a worker checks them.

        Raises BadRequest, NotFound and BatchQueueFull.
        """
        callback_url = await self._check_head(caller, new)
        async with self._database.begin() as connection:
            file = await get_file(connection, caller.team.id, new.input_file_id)
            if file.purpose != "batch":
                words = f"The file '{file.id}' was uploaded for '{file.purpose}'. Upload it with purpose 'batch'."
                raise invalid_param("input_file_id", words)
            await lock_limits(connection, caller.team.id)
            await check_queue(connection, self._settings.batch, caller.team.id, file.bytes)
            of_file = {"input_file_id": file.id, "input_bytes": file.bytes}
            return await _make(connection, self._clock, caller, new, callback_url, **of_file)

    async def _check_head(self, caller: Caller, new: NewBatch | NewOpenAIBatch) -> str | None:
        """Check all but the requests, and return where the callback goes, if anywhere. Raises BadRequest, and
        EndpointNotAllowed."""
        if new.endpoint not in FOR_BATCHES:
            raise invalid_value("endpoint", f"is one of {', '.join(FOR_BATCHES)}")
        check_endpoint(caller, FOR_BATCHES[new.endpoint].name)
        if new.completion_window not in WINDOWS:
            raise invalid_value("completion_window", f"is one of {', '.join(WINDOWS)}")
        check_tags(new)
        if any("\x00" in text for pair in (new.metadata or {}).items() for text in pair):
            raise invalid_value("metadata", "holds no NUL")
        if new.callback_url is None:
            return None
        return await Guard(self._settings.callbacks_allow).check(new.callback_url, "callback_url")


async def _make(
    connection: AsyncConnection,
    clock: Clock,
    caller: Caller,
    new: NewBatch | NewOpenAIBatch,
    callback_url: str | None,
    **more: Any,
) -> Batch:
    return await make_batch(
        connection,
        clock,
        team_id=caller.team.id,
        key_id=caller.key_id,
        endpoint=new.endpoint,
        window=new.completion_window,
        priority=new.priority,
        callback_url=callback_url,
        metadata=new.metadata,
        **more,
    )
