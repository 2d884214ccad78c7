# Batches of a deployment on its own machine, in Postgres directly: what `tollgate batch` asks where a configuration
# is at hand. remote_batches.py answers the same over HTTP.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Any

import typer
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.team_keys import list_keys
from gateway.accounts.teams import check_team, get_team, named, some_teams
from gateway.batch.file_store import CHUNK, add_chunk, begin_file, end_file
from gateway.batch.limits import check_queue, check_storage, lock_limits
from gateway.batch.results import ENDED, ERRORS, read_results
from gateway.batch.retention import check_retained
from gateway.batch.store import Batch, cancel_batch, find_batch, list_batches, make_batch
from gateway.batch.views import batch_view
from gateway.commands.command_line import cli_actor, open_database, run
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.egress.destinations import Guard
from protocol.errors import BadRequest, NotFound

View = dict[str, Any]


class LocalBatches:
    """The batches of all teams of one deployment. Its methods end the command where they cannot."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def submit(self, file: Path, team: str | None, endpoint: str, priority: str, callback_url: str | None) -> View:
        """Store a file's requests as a batch of ``team``, or of the only team."""
        if callback_url is not None:
            try:
                callback_url = asyncio.run(Guard(self._settings.callbacks_allow).check(callback_url, "callback_url"))
            except BadRequest as exc:
                raise typer.BadParameter(exc.message) from exc

        size_of_file = file.stat().st_size

        async def act(connection: AsyncConnection) -> Batch:
            team_id, key_id = await _whose(connection, team)
            file_id, size = await self._store(connection, team_id, file, size_of_file)
            return await make_batch(
                connection,
                Clock(),
                team_id=team_id,
                key_id=key_id,
                endpoint=endpoint,
                priority=priority,
                callback_url=callback_url,
                input_file_id=file_id,
                input_bytes=size,
            )

        return batch_view(run(self._settings, act))

    def show(self, batch_id: str) -> View:
        """Return a batch."""
        return batch_view(run(self._settings, lambda connection: find_batch(connection, batch_id)))

    def list(self, team: str | None, status: str | None, limit: int) -> list[View]:
        """Return batches, newest first."""

        async def act(connection: AsyncConnection) -> Sequence[Batch]:
            await check_team(connection, team)
            return await list_batches(connection, team, after=None, limit=limit, status=status)

        return [{"team_id": batch.team_id, **batch_view(batch)} for batch in run(self._settings, act)]

    def cancel(self, batch_id: str) -> View:
        """Start nothing more of a batch."""

        async def act(connection: AsyncConnection) -> Batch:
            batch, keep = await find_batch(connection, batch_id), self._settings.retention.batch_files
            return await cancel_batch(connection, Clock(), batch.team_id, batch_id, keep, cli_actor())

        return batch_view(run(self._settings, act))

    def results(self, batch_id: str, failed: bool) -> Generator[bytes, None, None]:
        """Yield what came out so far, some JSON Lines at a time; ``failed``: only what failed or expired."""

        async def check(connection: AsyncConnection) -> None:
            batch = await find_batch(connection, batch_id)
            await check_retained(connection, Clock(), batch, self._settings.retention.batch_files)

        run(self._settings, check)
        with asyncio.Runner() as runner:
            pages = self._pages(batch_id, ERRORS if failed else ENDED)
            try:
                while (page := runner.run(_next(pages))) is not None:
                    yield page
            finally:
                runner.run(pages.aclose())

    async def _pages(self, batch_id: str, statuses: Sequence[str]) -> AsyncGenerator[bytes, None]:
        async with open_database(self._settings) as database:
            async for page in read_results(database, batch_id, statuses):
                yield page

    async def _store(self, connection: AsyncConnection, team_id: str, file: Path, size: int) -> tuple[str, int]:
        """Store the requests' file, where the team has room for it; return its id and the bytes that were read."""
        limits = self._settings.batch
        await check_queue(connection, limits, team_id, size)
        await check_storage(connection, limits, team_id, size)
        file_id, size = await begin_file(connection, team_id, file.name, "batch"), 0
        with file.open("rb") as contents:
            for position, chunk in enumerate(iter(lambda: contents.read(CHUNK), b"")):
                await add_chunk(connection, file_id, position, chunk)
                size += len(chunk)
        await lock_limits(connection, team_id)
        await check_queue(connection, limits, team_id, size)
        await check_storage(connection, limits, team_id, 0)  # it is among them now
        await end_file(connection, file_id, size, self._settings.retention.batch_files)
        return file_id, size


async def _next(pages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pages, None)


async def _whose(connection: AsyncConnection, team: str | None) -> tuple[str, str]:
    """Return the team and the key that a batch runs under: the team's newest that works. Raises NotFound."""
    if team is None:
        names = await some_teams(connection)
        if not names:
            raise BadRequest("No team yet.")
        if len(names) > 1:
            raise typer.BadParameter(f"There are several teams: say whose batch it is with --team, of {named(names)}.")
        team = names[0]
    await get_team(connection, team)
    keys = await list_keys(connection, team_id=team, after=None, limit=1000)
    live = [key for key in keys if key.status(Clock().moment()) == "active"]
    if not live:
        raise NotFound(f"The team '{team}' has no key that works: its limits are those of a key.")
    return team, max(live, key=lambda key: key.created_at).key_id
