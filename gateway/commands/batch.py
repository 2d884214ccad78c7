# `tollgate batch`: submit a file, watch it, read what came out; in Postgres directly, for a team.

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.team_keys import list_keys
from gateway.accounts.teams import get_team
from gateway.batch.file_store import CHUNK, add_chunk, begin_file, end_file
from gateway.batch.limits import check_queue, check_storage, lock_limits
from gateway.batch.results import ENDED, ERRORS, read_results
from gateway.batch.retention import check_retained
from gateway.batch.shapes import LARGEST_FILE
from gateway.batch.store import Batch, get_batch, make_batch
from gateway.batch.views import batch_view
from gateway.commands.command_line import Format, FormatOption, open_database, read_settings, run, say, show
from gateway.config.paths import ConfigOption
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.dialects.chat import ENDPOINT as CHAT
from gateway.dialects.table import FOR_BATCHES
from gateway.egress.destinations import Guard
from gateway.storage.tables import batches, teams
from protocol.errors import BadRequest, NotFound

POLL = 0.5  # seconds between looks at a batch
FIRST_FAILURES = 5  # that are shown at the end of a wait,
LONGEST_LINE = 300  # characters of each
NOT_COMPLETED, SOME_FAILED = 1, 3  # exit statuses of a wait; 2 is a command line that makes no sense
SHOWN = ("status", "total", "completed", "failed", "cost_usd", "estimated_completion", "expires_at")

command = typer.Typer(no_args_is_help=True, help="Submit batches, watch them and read their results.")


@command.command("submit")
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON Lines: custom_id, method, url, body")],
    team: Annotated[str | None, typer.Option(help="Whose batch; default: the only team")] = None,
    endpoint: Annotated[str, typer.Option(help="What every line calls")] = CHAT.path,
    priority: Annotated[str, typer.Option(metavar="low|normal|high")] = "normal",
    callback_url: Annotated[str | None, typer.Option(help="Where to tell of the end")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it to its end")] = False,
    config: ConfigOption = None,
) -> None:
    """Submit a file of requests and print the batch's id.

    With --wait, the exit status is 0 when every request was answered, 3 when the batch completed and some requests
    failed, 1 when it did not complete.
    """
    settings = read_settings(config)
    if endpoint not in FOR_BATCHES:
        raise typer.BadParameter(f"--endpoint is one of {', '.join(FOR_BATCHES)}")
    if priority not in ("low", "normal", "high"):
        raise typer.BadParameter("--priority is low, normal or high")
    if file.stat().st_size > LARGEST_FILE:
        raise typer.BadParameter(f"{file} is longer than {LARGEST_FILE // 2**20} MiB: submit it in parts")
    if callback_url is not None:
        try:
            callback_url = asyncio.run(Guard(settings.callbacks_allow).check(callback_url, "callback_url"))
        except BadRequest as exc:
            raise typer.BadParameter(exc.message) from exc

    async def act(connection: AsyncConnection) -> Batch:
        team_id, key_id = await _whose(connection, team)
        size = file.stat().st_size
        await check_queue(connection, settings.batch, team_id, size)
        await check_storage(connection, settings.batch, team_id, size)
        file_id, size = await begin_file(connection, team_id, file.name, "batch"), 0
        with file.open("rb") as contents:
            for position, chunk in enumerate(iter(lambda: contents.read(CHUNK), b"")):
                await add_chunk(connection, file_id, position, chunk)
                size += len(chunk)
        await lock_limits(connection, team_id)
        await check_queue(connection, settings.batch, team_id, size)
        await check_storage(connection, settings.batch, team_id, 0)  # it is among them now
        await end_file(connection, file_id, size, settings.retention.batch_files)
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

    batch = run(settings, act)
    say(batch.id)
    if wait:
        raise typer.Exit(_tell_end(settings, _watch(settings, batch)))


@command.command("status")
def status(batch_id: str, config: ConfigOption = None, format: FormatOption = Format.TABLE) -> None:
    """Show how far a batch is, what it cost so far and when it will be done."""
    view = batch_view(run(read_settings(config), lambda connection: _find(connection, batch_id)))
    row = {**view, **view["request_counts"], **view["usage"]}
    show(format, view, SHOWN, [row], f"Batch {batch_id}")


@command.command("results")
def results(
    batch_id: str,
    failed: Annotated[bool, typer.Option("--failed", help="Only what failed or expired")] = False,
    config: ConfigOption = None,
) -> None:
    """Write what came out so far to standard output, as JSON Lines in the order of the input."""
    settings = read_settings(config)

    async def check(connection: AsyncConnection) -> None:
        batch = await _find(connection, batch_id)
        await check_retained(connection, Clock(), batch, settings.retention.batch_files)

    run(settings, check)

    async def write() -> None:
        async with open_database(settings) as database:
            async for page in read_results(database, batch_id, ERRORS if failed else ENDED):
                sys.stdout.buffer.write(page)

    asyncio.run(write())
    sys.stdout.buffer.flush()


def _watch(settings: Settings, batch: Batch) -> Batch:
    """Show a batch's progress until it has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(batch.status, total=None)
        while batch.is_open:
            time.sleep(POLL)
            batch = run(settings, partial(_find, batch_id=batch.id))
            done = batch.completed + batch.failed
            progress.update(bar, description=batch.status, total=batch.total or None, completed=done)
    return batch


def _tell_end(settings: Settings, batch: Batch) -> int:
    """Say on standard error how a batch ended, with its first failures, and return the exit status."""
    for error in batch.errors or ():
        sys.stderr.write(f"line {error['line']}: {error['message']}\n")
    failures = asyncio.run(_first_failures(settings, batch.id))
    if failures:
        shown = "\n".join(failures)
        sys.stderr.write(f"{shown}\nAll that failed: tollgate batch results {batch.id} --failed\n")
    counts = [f"{batch.completed} of {batch.total} requests answered", f"{batch.failed} failed"]
    counts.append(f"{batch.total - batch.completed - batch.failed} not done")
    sys.stderr.write(f"{batch.status}: {', '.join(counts)}\n")
    if batch.status != "completed":
        return NOT_COMPLETED
    return SOME_FAILED if batch.failed else 0


async def _first_failures(settings: Settings, batch_id: str) -> list[str]:
    """Return the first failed requests of a batch, each with why it failed, on one line."""
    async with open_database(settings) as database:
        page = await anext(read_results(database, batch_id, ERRORS), b"")
    return [_failure(msgspec.json.decode(line)) for line in page.splitlines()[:FIRST_FAILURES]]


def _failure(line: dict[str, Any]) -> str:
    answered = line["response"]
    error = answered["body"]["error"] if answered else line["error"]
    status = f"{answered['status_code']} " if answered else ""
    words = f"{line['custom_id']}: {status}{error['code']}: {error['message']}"[:LONGEST_LINE]
    return "".join(letter if letter.isprintable() else " " for letter in words)  # they may be an upstream's


async def _find(connection: AsyncConnection, batch_id: str) -> Batch:
    query = select(batches.c.team_id).where(batches.c.id == batch_id)
    team_id = (await connection.execute(query)).scalar_one_or_none()
    return await get_batch(connection, team_id or "", batch_id)


async def _whose(connection: AsyncConnection, team: str | None) -> tuple[str, str]:
    """Return the team and the key that a batch runs under: the team's newest that works. Raises NotFound."""
    if team is None:
        names = (await connection.execute(select(teams.c.id).limit(2))).scalars().all()
        if len(names) != 1:
            raise BadRequest("There are several teams: say whose batch it is with --team." if names else "No team yet.")
        team = names[0]
    await get_team(connection, team)
    keys = await list_keys(connection, team_id=team, after=None, limit=1000)
    live = [key for key in keys if key.status(Clock().moment()) == "active"]
    if not live:
        raise NotFound(f"The team '{team}' has no key that works: its limits are those of a key.")
    return team, max(live, key=lambda key: key.created_at).key_id
