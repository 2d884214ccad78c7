# Tables of the commands on a terminal.

from __future__ import annotations

from decimal import Decimal

import pytest

from gateway.terminal.printing import Format, show

CALL = {
    "created_at": "2026-11-28T15:40:11.123Z",
    "request_id": "01a222c8-05f3-718b-ab5a-5844b585382e",
    "team_id": "team_demo",
    "status": "answered",
    "model_used": "tollgate-demo",
    "output_tokens": 42,
    "cost_usd": Decimal("0.00000045"),
    "total_ms": 2133.883,
}


@pytest.mark.parametrize("width", range(60, 180, 7))
def test_no_number_is_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int) -> None:
    """A table that does not fit is a line for each value."""
    monkeypatch.setenv("COLUMNS", str(width))

    show(Format.TABLE, CALL, list(CALL), [CALL], "Calls")

    shown = capsys.readouterr().out
    assert "0.00000045" in shown and "2133.883" in shown
    assert all(len(line) <= width for line in shown.splitlines())
