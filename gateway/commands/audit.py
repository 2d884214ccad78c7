# `tollgate audit`: do ledger, daily sums, leases and balances say the same?

from __future__ import annotations

import asyncio
from datetime import date, timedelta

import msgspec
import typer

from billing.core.store_errors import POSTGRES_AWAY
from billing.upkeep.audit import Difference, Report, audit
from billing.upkeep.owner_list import ListedOwner, list_owners
from billing.upkeep.turns import database_moment
from gateway.commands.command_line import open_database
from gateway.core.settings import Settings
from gateway.terminal.printing import Format, counted, fail, say, show

COLUMNS = Difference.__struct_fields__


def run_audit(settings: Settings, day: date | None) -> int:
    """Compare the accounting of ``day``, else of today and yesterday (UTC); print where it differs and return 1.

    Closed calls that owners have still to carry to the ledger are printed too: no table has them yet.
    """
    try:
        days, reports, owners = asyncio.run(_audit(settings, day))
    except POSTGRES_AWAY as exc:
        fail(f"the books cannot be compared now: {str(exc).splitlines()[0] if str(exc) else repr(exc)}", 4)
    if waiting := sum(owner.backlog for owner in owners):
        whose = counted(sum(owner.backlog > 0 for owner in owners), "owner")
        say(f"not in the ledger yet: {counted(waiting, 'closed call')} of {whose}")
    differences = [one for report in reports for one in report.differences]
    books = sum(report.books for report in reports)
    if not differences:
        say(f"{books} books of {' and '.join(map(str, days))} agree")
        return 0
    rows = [{name: getattr(one, name) for name in COLUMNS} for one in differences]
    title = f"Where the books differ: {counted(len(differences), 'figure')} of {counted(books, 'book')}"
    show(Format.TABLE, msgspec.to_builtins(differences), COLUMNS, rows, title)
    return 1


async def _audit(settings: Settings, day: date | None) -> tuple[list[date], list[Report], list[ListedOwner]]:
    async with open_database(settings, "tollgate audit") as database:
        async with database.begin() as connection:
            today = (await database_moment(connection)).date()
            owners = await list_owners(connection)
        if day is not None and day > today:
            raise typer.BadParameter(f"--date is a day until today, {today} (UTC); found {day}")
        days = [day] if day is not None else [today - timedelta(days=1), today]
        return days, [await audit(database, each, today=today) for each in days], owners
