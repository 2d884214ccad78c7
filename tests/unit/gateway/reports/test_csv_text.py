# Reports as CSV: exact, after RFC 4180, and harmless in a spreadsheet.

from __future__ import annotations

import csv
import io
from decimal import Decimal

import pytest

from gateway.reports.csv_text import csv_of


def cells(value: object) -> str:
    """Return a cell as a reader of the CSV sees it."""
    [row] = csv.DictReader(io.StringIO(csv_of(["cell"], [{"cell": value}]), newline=""))
    return row["cell"]


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"])
def test_a_text_is_never_a_formula(start: str) -> None:
    """Whatever begins a formula gets an apostrophe in front and is otherwise left as it is."""
    assert cells(f"{start}cmd|' /C calc'!A0") == f"'{start}cmd|' /C calc'!A0"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Decimal("-0.000000001"), "-0.000000001"),
        (Decimal("1E+3"), "1000"),
        (-5, "-5"),
        ("-0.000000001", "-0.000000001"),
        ("-1-2", "'-1-2"),
        ("-1\n", "'-1\n"),
        (None, ""),
        (True, "true"),
        ("plain", "plain"),
        ('say "a, b"\nc', 'say "a, b"\nc'),
        ("a=b", "a=b"),
    ],
)
def test_everything_else_is_shown_as_it_is(value: object, shown: str) -> None:
    """Negative money, a text of it too, is a number and no formula; quotes, commas and line ends survive."""
    assert cells(value) == shown


def test_lines_end_as_the_standard_says() -> None:
    """RFC 4180: every line, the last one too, ends in CRLF."""
    assert csv_of(["a", "b"], [{"a": 1}]) == "a,b\r\n1,\r\n"
