# `tollgate calls --follow`: what comes between two looks is shown, however much it is.

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from gateway.commands import calls as commands
from gateway.commands.calls import as_line, new_calls
from gateway.terminal.printing import Format
from gateway.terminal.remote_gateway import GatewayFault


class Listed:
    """A list of calls, newest first, in pages of ``limit``."""

    def __init__(self, *ids: int) -> None:
        self.ids = sorted(ids, reverse=True)
        self.pages = 0

    def page(self, said: Mapping[str, str]) -> Any:
        self.pages += 1
        below = [each for each in self.ids if each < int(said.get("after", 10**9))]
        shown = below[: int(said["limit"])]
        after = str(shown[-1]) if len(below) > len(shown) else None
        return {"data": [{"request_id": str(each)} for each in shown], "next": after}


def ids(calls: list[dict[str, Any]]) -> list[int]:
    return [int(call["request_id"]) for call in calls]


def test_a_burst_longer_than_a_page_is_shown_whole() -> None:
    """Page by page, each call once, newest first."""
    listed, seen = Listed(*range(10)), {str(each) for each in range(4)}

    assert ids(new_calls(listed.page, {"limit": "2"}, seen)) == [9, 8, 7, 6, 5, 4]
    assert ids(new_calls(listed.page, {"limit": "2"}, seen)) == []
    assert listed.pages == 5  # up to the first page without a new one


def test_a_call_that_ends_late_is_shown_by_a_thorough_look() -> None:
    """It is listed by when it began, below others that were shown before."""
    listed, seen = Listed(*range(10)), {str(each) for each in range(10) if each != 1}

    assert ids(new_calls(listed.page, {"limit": "2"}, seen)) == []
    assert ids(new_calls(listed.page, {"limit": "2"}, seen, is_thorough=True)) == [1]


def test_what_is_older_than_the_first_page_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the last minute's calls, which are looked through for what ends late."""
    listed, pauses = Listed(*range(10, 20)), iter(range(2))

    def pause(_: float) -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt
        listed.ids.insert(0, 20 + len(listed.ids))

    monkeypatch.setattr(commands.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        commands._show(listed.page, {"limit": "2"}, follow=True, format=Format.TABLE)

    heading, *shown = capsys.readouterr().out.splitlines()
    assert heading.split("\t") == [*commands.COLUMNS]
    assert [line.split("\t")[1] for line in shown] == ["18", "19", "30", "31"]


def test_an_outage_is_said_once_and_loses_no_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it comes between two pages; what does not pass ends it."""
    listed, asked = Listed(1), iter(range(20))

    def page(said: Mapping[str, str]) -> Any:
        match next(asked):
            case 1:
                listed.ids[:0] = [4, 3, 2]
            case 2 | 3 | 4:
                raise GatewayFault("It is away.", may_pass=True)
            case 9:
                raise GatewayFault("The key was revoked.")
        return listed.page(said | {"limit": "2"})

    monkeypatch.setattr(commands.time, "sleep", lambda _: None)
    with pytest.raises(GatewayFault, match="revoked"):
        commands._show(page, {"limit": "2"}, follow=True, format=Format.TABLE)

    told = capsys.readouterr()
    assert told.err == "It is away. Calls go on here once it answers.\n"
    assert [line.split("\t")[1] for line in told.out.splitlines()[1:]] == ["1", "2", "3", "4"]


def test_a_line_of_a_call_has_its_cost_in_full() -> None:
    """As a table has it; with JSON it is all that is known."""
    call = {"request_id": "1", "cost_usd": Decimal("0.00000045"), "status": None}

    assert "\t0.00000045\t" in as_line(call, Format.TABLE) and "0.00000045" in as_line(call, Format.CSV)
    assert msgspec.json.decode(as_line(call, Format.JSON)) == {**call, "cost_usd": 0.00000045}
