# What the commands for admins share: which deployment is meant, one transaction in it, faults in words, and tables for
# terminals or JSON and CSV for programs.

from __future__ import annotations

import asyncio
import csv
import getpass
import os
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
import typer
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.store_errors import POSTGRES_AWAY
from gateway.accounts.schemas import LimitsInput
from gateway.accounts.serializers import to_json
from gateway.config.file import ConfigFaults, load_settings
from gateway.config.paths import CONFIG_VARIABLE, find_config
from gateway.core.settings import Settings
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from gateway.storage.schema import is_without_schema
from protocol.errors import ServiceError

WIDTH_OF_A_PIPE = 160  # characters of a table that goes to no terminal
UNFOLDED = 28  # characters of a text that stay in one line: a Tollgate id does
NO_LIMIT = ("none", "off", "unlimited")

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")

T = TypeVar("T")


class Format(StrEnum):
    """How a command prints."""

    TABLE = "table"  # for terminals
    JSON = "json"  # as over HTTP
    CSV = "csv"


Count = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or none")]
Usd = Annotated[str | None, typer.Option(metavar="USD", help="Dollars, or none")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to print")]


def read_settings(config: Path | None) -> Settings:
    """Return the settings of the deployment that is meant, or print every fault and exit 1."""
    path = find_config(config)
    if config is None and CONFIG_VARIABLE not in os.environ and not path.exists():
        fail(f"which deployment? Give --config, set ${CONFIG_VARIABLE}, or run `tollgate dev` in this folder")
    try:
        return load_settings(path)
    except ConfigFaults as exc:
        fail(str(exc))


def run(settings: Settings, act: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    """Run ``act`` in one transaction and return its result, or say what went wrong and exit 1."""
    try:
        return asyncio.run(_in_transaction(settings, act))
    except ServiceError as exc:
        fail(exc.message)
    except POSTGRES_AWAY as exc:
        reason = str(getattr(exc, "orig", None) or exc).splitlines() or [type(exc).__name__]
        remedy = "; run `tollgate migrate` first" if is_without_schema(exc) else ""
        fail(f"the database did not do it: {reason[0]}{remedy}")


async def _in_transaction(settings: Settings, act: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    async with open_database(settings) as database, database.begin() as connection:
        return await act(connection)


def open_database(settings: Settings, application_name: str = "tollgate cli") -> Database:
    """Return a way to Postgres for one command."""
    url, direct_url = settings.database_url, settings.database_direct_url
    return Database(url, direct_url=direct_url, pool_size=1, application_name=application_name)


def cli_actor() -> Act:
    """Return the user of this machine, for the audit log."""
    try:
        return Act(f"cli:{getpass.getuser()}")
    except (KeyError, OSError):  # a container's user may have no name
        return Act(f"cli:{os.getuid()}")


def read_limits(options: Mapping[str, Any]) -> LimitsInput:
    """Return the limits among a command's options: those not given stay as they are, `none` for no limit."""
    values: dict[str, Any] = {}
    for name in LimitsInput.__struct_fields__:
        said = options[name]
        if said is None:
            continue
        try:
            words = said.replace("_", "").lower()
            number = Decimal(words) if name.startswith("usd_") else int(words)
            values[name] = number
        except (ValueError, InvalidOperation):
            if said.lower() not in NO_LIMIT:
                fail(f"--{name.replace('_', '-')}: expected a number or none, found {said!r}")
            values[name] = None
    return LimitsInput(**values)


def fail(words: str) -> NoReturn:
    """Say what is wrong and exit 1."""
    print(words, file=sys.stderr)  # noqa: T201
    raise typer.Exit(1)


def say(words: str) -> None:
    """Print a line."""
    print(words)  # noqa: T201


def show(format: Format, whole: object, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print ``rows`` as a table or CSV with ``columns``, or ``whole`` as JSON."""
    match format:
        case Format.JSON:
            say(msgspec.json.format(to_json(whole)).decode())
        case Format.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([_text(row.get(column)) for column in columns] for row in rows)
        case Format.TABLE:
            from rich.box import SIMPLE_HEAD
            from rich.console import Console
            from rich.table import Table

            table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
            for column in columns:
                cells = [_short(_text(row.get(column))) for row in rows]
                is_count = _is_count(column, rows)
                side: Literal["left", "right"] = "right" if is_count else "left"
                least = max((len(cell) for cell in cells), default=0)  # headings may fold, numbers and ids must not
                least = least if is_count else min(least, UNFOLDED)
                table.add_column(column.replace("_", " "), justify=side, overflow="fold", min_width=least)
            for row in rows:
                table.add_row(*(_short(_text(row.get(column))) for column in columns))
            width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH_OF_A_PIPE
            Console(markup=False, highlight=False, width=width).print(table)


def _short(words: str) -> str:
    """Return a moment to the minute, and anything else as it is."""
    return f"{words[:10]} {words[11:16]}" if _MOMENT.fullmatch(words) else words


def _is_count(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(not isinstance(value, str | bool | list | dict) for value in values)


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(map(str, value))
        case dict():
            return " ".join(f"{name}={_text(each)}" for name, each in value.items() if each is not None)
        case _:
            return f"{value:f}" if isinstance(value, Decimal) else str(value)
