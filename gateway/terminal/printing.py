# How commands print: tables for terminals, one record under another where a table would not fit, lines with tabs for
# other programs, JSON and CSV on demand. What others wrote is shown without control characters.

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from msgspec.structs import asdict

from gateway.reports.csv_text import as_text

UNFOLDED = 28  # characters of a text that stay in one line: a Tollgate id does
GAP = 3  # characters between columns

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


class Format(StrEnum):
    """How a command prints."""

    TABLE = "table"  # for people; with tabs into a pipe
    JSON = "json"  # as over HTTP
    CSV = "csv"


FormatOption = Annotated[Format, typer.Option("--format", help="How to print; a table is lines with tabs in a pipe")]


def fail(words: str, status: int = 1) -> NoReturn:
    """Say what is wrong on standard error and exit with ``status``."""
    print(printable(words, "\n"), file=sys.stderr)  # noqa: T201
    raise typer.Exit(status)


def is_for_people(format: Format) -> bool:
    """Return whether a command that prints so is read by a person: a table is lines with tabs in a pipe, one table of
    them."""
    return format is Format.TABLE and (sys.stdout.isatty() or "COLUMNS" in os.environ)


def say(words: str) -> None:
    """Print a line."""
    print(words)  # noqa: T201


def show(format: Format, whole: object, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print ``rows`` as a table or CSV with ``columns``, or ``whole`` as JSON."""
    match format:
        case Format.JSON:
            say(msgspec.json.format(msgspec.json.Encoder(decimal_format="number").encode(whole)).decode())
        case Format.CSV:
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([as_text(text_of(row.get(column))) for column in columns] for row in rows)
        case Format.TABLE if is_for_people(format):
            _show_table(columns, rows, title)
        case Format.TABLE:
            say("\t".join(columns))
            for row in rows:
                say("\t".join(printable(text_of(row.get(column))) for column in columns))


def counted(count: int, one: str) -> str:
    """Return a number of things in words: ``1 model``, ``2 models``."""
    return f"{count} {one}{'' if count == 1 else 's'}"


def printable(words: str, keep: str = "") -> str:
    """Return a text with a space for every control character but those in ``keep``: others may have written
    it, and a terminal obeys some."""
    return "".join(letter if letter.isprintable() or letter in keep else " " for letter in words)


def _show_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print a table, or, where the terminal is too narrow for it, a line for each value."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    cells = [[_short(printable(text_of(row.get(column)))) for column in columns] for row in rows]
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    counts = [_is_count(column, rows) for column in columns]
    headings = [column.replace("_", " ") for column in columns]
    longest = [max((len(row[place]) for row in cells), default=0) for place in range(len(columns))]
    widths = [  # headings may fold, numbers and ids must not
        max(length if is_count else min(length, UNFOLDED), *map(len, heading.split()))
        for length, is_count, heading in zip(longest, counts, headings, strict=True)
    ]
    spare = console.width - sum(widths) - GAP * (len(columns) - 1) - 2
    if spare < 0 and rows:
        _show_records(columns, cells, title)
        return
    for width, length, is_count, heading in zip(widths, longest, counts, headings, strict=True):
        more = max(0, min(spare, max(length, len(heading)) - width))
        spare -= more
        table.add_column(heading, justify="right" if is_count else "left", overflow="fold", width=width + more)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _show_records(columns: Sequence[str], cells: Sequence[Sequence[str]], title: str) -> None:
    say(title)
    name = max(map(len, columns))
    for row in cells:
        say("")
        for column, cell in zip(columns, row, strict=True):
            if cell:
                say(f"{column.replace('_', ' '):{name}}  {cell}")


def _short(words: str) -> str:
    """Return a moment to the minute, and anything else as it is."""
    return f"{words[:10]} {words[11:16]}" if _MOMENT.fullmatch(words) else words


def _is_count(column: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    values = [row[column] for row in rows if row.get(column) is not None]
    return bool(values) and all(not isinstance(value, str | bool | list | dict) for value in values)


def text_of(value: object) -> str:
    """Return a value as a cell has it: ``yes``, the items of a list, exact decimals, ``name=value`` of a mapping, and
    ``name:part=value`` of one within it, as options take it."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(map(text_of, value))
        case dict():
            return " ".join(_told(name, each) for name, each in value.items() if each not in (None, {}))
        case msgspec.Struct():
            return text_of(asdict(value))
        case _:
            return f"{value:f}" if isinstance(value, Decimal) else str(value)


def _told(name: str, value: object) -> str:
    if not isinstance(value, dict):
        return f"{name}={text_of(value)}"
    parts = [_told(f"{name}:{part}", each) for part, each in value.items() if each not in (None, {})]
    return " ".join(parts) or f"{name}=none"
