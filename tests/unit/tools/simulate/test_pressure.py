# More clients than the KV cache holds: what the tables of ``python -m tools.simulate.pressure`` rest on.

from __future__ import annotations

import pytest

from tools.simulate.pressure import main


def test_as_many_clients_as_requests_have_a_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    """Where each client asks once, all at the start, the goodput is that until the last answer."""
    assert main(["admission", "--load", "short", "--requests", "20"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]

    assert len(rows) == 9
    assert all(int(row.split("|")[3].replace(",", "")) > 0 for row in rows)
