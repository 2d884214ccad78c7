# Reports as CSV, after RFC 4180, for spreadsheets too: a text that a spreadsheet would take for a formula comes with an
# apostrophe in front (OWASP, "CSV Injection"). Numbers are never touched, nor are texts that are plain numbers.

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # wide ones too: Excel folds them

PLAIN_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def csv_of(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a heading and one record for each row; what a row lacks or has as null is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([as_text(column) for column in columns])
    writer.writerows([as_text(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def as_text(value: object) -> str:
    """Return a cell: exact decimals without exponents, and no text that could run as a formula."""
    if value is None:
        return ""
    if isinstance(value, str):
        is_formula = value.startswith(FORMULA_STARTS) and PLAIN_NUMBER.fullmatch(value) is None
        return f"'{value}" if is_formula else value
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:f}" if isinstance(value, Decimal) else str(value)
