# `tollgate batch`: submit a file, watch it, list, cancel, read what came out; for a team over HTTP, or on a
# deployment's own machine for any of its teams.

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import asdict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.batch.intake import Intake
from gateway.batch.shapes import LARGEST_FILE, LONGEST_LINE, OPEN
from gateway.commands.command_line import read_settings
from gateway.commands.local_batches import LocalBatches
from gateway.dialects.chat import ENDPOINT as CHAT
from gateway.dialects.table import FOR_BATCHES
from gateway.remote.remote_batches import RemoteBatches
from gateway.terminal.options import Place, Where, with_options
from gateway.terminal.printing import Format, fail, printable, say, show
from gateway.terminal.remote_gateway import remote_gateway

POLL = 0.5  # seconds between looks at a batch
FIRST_FAILURES = 5  # that are shown at the end of a wait,
LONGEST_SHOWN = 300  # characters of each
NOT_COMPLETED, SOME_FAILED = 1, 2  # exit statuses of a wait
SHOWN = ("status", "total", "completed", "failed", "cost_usd", "estimated_completion", "expires_at")
LISTED = ("batch_id", "team_id", "created_at", "status", "model", "total", "completed", "failed", "cost_usd")

View = dict[str, Any]

command = typer.Typer(no_args_is_help=True, help="Submit batches, watch them and read their results.")


@contextmanager
def _batches(where: Place) -> Iterator[LocalBatches | RemoteBatches]:
    """Give the batches that are meant; a fault inside of the block ends the command."""
    if where.is_elsewhere:
        with remote_gateway(where.url, where.key) as gateway:
            yield RemoteBatches(gateway)
    else:
        yield LocalBatches(read_settings(where.config))


@command.command("submit")
@with_options
def submit(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON Lines: custom_id, method, url, body")],
    *,
    team: Annotated[str | None, typer.Option(help="Whose batch; default: the only team, or the key's")] = None,
    endpoint: Annotated[str, typer.Option(help="What every line calls")] = CHAT.path,
    priority: Annotated[str, typer.Option(metavar="low|normal|high")] = "normal",
    callback_url: Annotated[str | None, typer.Option(help="Where to tell of the end")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch it to its end")] = False,
    where: Place,
) -> None:
    """Submit a file of requests and print the batch's id; nothing is submitted where a line has a fault.

    With --wait, counts and cost come at the end, and the exit status is 0 when every request was answered, 2 when the
    batch completed and some requests failed, 1 when it did not complete.
    """
    if endpoint not in FOR_BATCHES:
        raise typer.BadParameter(f"--endpoint is one of {', '.join(FOR_BATCHES)}")
    if priority not in ("low", "normal", "high"):
        raise typer.BadParameter("--priority is low, normal or high")
    if file.stat().st_size > LARGEST_FILE:
        raise typer.BadParameter(f"{file} is longer than {LARGEST_FILE // 2**20} MiB: submit it in parts")
    if faults := _faults_of(file, endpoint):
        _tell_faults(faults)
        fail("nothing was submitted: a batch runs whole, or not at all")
    with _batches(where) as batches:
        batch = batches.submit(file, team, endpoint, priority, callback_url)
        say(batch["batch_id"])
        if wait:
            raise typer.Exit(_tell_end(batches, _watch(batches, batch)))


@command.command("status")
@with_options
def status(batch_id: str, where: Where) -> None:
    """Show how far a batch is, what it cost so far and when it will be done."""
    with _batches(where) as batches:
        _show(batches.show(batch_id), where.format)


@command.command("list")
@with_options
def list_some(
    *,
    team: Annotated[str | None, typer.Option(help="Of this team alone; default: all that may be seen")] = None,
    state: Annotated[str | None, typer.Option("--status", help="Such as in_progress or completed")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the newest")] = 20,
    where: Where,
) -> None:
    """List batches, newest first."""
    with _batches(where) as batches:
        found = batches.list(team, state, limit)
    rows = [{**view, **view["request_counts"], **view["usage"]} for view in found]
    show(where.format, {"object": "list", "data": found}, LISTED, rows, "Batches, newest first (UTC)")


@command.command("cancel")
@with_options
def cancel(batch_id: str, where: Where) -> None:
    """Start nothing more of a batch; what runs comes to its end, and is kept and charged."""
    with _batches(where) as batches:
        _show(batches.cancel(batch_id), where.format)


@command.command("results")
@with_options
def results(
    batch_id: str,
    *,
    failed: Annotated[bool, typer.Option("--failed", help="Only what failed or expired")] = False,
    where: Place,
) -> None:
    """Write what came out so far to standard output, as JSON Lines in the order of the input."""
    with _batches(where) as batches:
        for page in batches.results(batch_id, failed):
            sys.stdout.buffer.write(page)
    sys.stdout.buffer.flush()


def _show(view: View, format: Format) -> None:
    row = {**view, **view["request_counts"], **view["usage"]}
    show(format, view, SHOWN, [row], f"Batch {view['batch_id']}")


def _watch(batches: LocalBatches | RemoteBatches, batch: View) -> View:
    """Show a batch's progress until it has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(batch["status"], total=None)
        while batch["status"] in OPEN:
            time.sleep(POLL)
            batch = batches.show(batch["batch_id"])
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(bar, description=batch["status"], total=counts["total"] or None, completed=done)
    return batch


def _faults_of(file: Path, endpoint: str) -> list[View]:
    """Return the first of what is wrong with a file's lines, as a worker would find it."""
    intake = Intake(endpoint)
    with file.open("rb") as lines:
        for line in lines:
            if intake.is_full:
                break
            if len(line) > LONGEST_LINE + 1:
                intake.too_long()
            else:
                intake.line(line)
    intake.end()
    return [asdict(fault) for fault in intake.faults]


def _tell_faults(faults: Sequence[View]) -> None:
    for fault in faults:
        where = "" if fault["line"] is None else f"line {fault['line']}: "
        sys.stderr.write(f"{where}{printable(fault['message'])}\n")


def _tell_end(batches: LocalBatches | RemoteBatches, batch: View) -> int:
    """Say on standard error how a batch ended, with its first failures, and return the exit status."""
    _tell_faults(batch["errors"] or ())
    batch_id, counts = batch["batch_id"], batch["request_counts"]
    if counts["failed"] and (failures := _first_failures(batches, batch_id)):
        shown = "\n".join(failures)
        sys.stderr.write(f"{shown}\nAll that failed: tollgate batch results {batch_id} --failed\n")
    told = [f"{counts['completed']} of {counts['total']} requests answered", f"{counts['failed']} failed"]
    told.append(f"{counts['total'] - counts['completed'] - counts['failed']} not done")
    sys.stderr.write(f"{batch['status']}: {', '.join(told)}; {batch['usage']['cost_usd']:f} USD\n")
    if batch["status"] != "completed":
        return NOT_COMPLETED
    return SOME_FAILED if counts["failed"] else 0


def _first_failures(batches: LocalBatches | RemoteBatches, batch_id: str) -> list[str]:
    """Return the first failed requests of a batch, each with why it failed, on one line."""
    content = b""
    with closing(batches.results(batch_id, failed=True)) as pages:
        for page in pages:
            content += page
            if content.count(b"\n") >= FIRST_FAILURES:
                break
    return [_failure(msgspec.json.decode(line)) for line in content.split(b"\n")[:FIRST_FAILURES] if line]


def _failure(line: dict[str, Any]) -> str:
    answered = line["response"]
    error = answered["body"]["error"] if answered else line["error"]
    status = f"{answered['status_code']} " if answered else ""
    words = f"{line['custom_id']}: {status}{error.get('code') or error['type']}: {error['message']}"[:LONGEST_SHOWN]
    return printable(words)  # they may be an upstream's
