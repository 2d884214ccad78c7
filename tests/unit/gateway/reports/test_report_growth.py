# How the work of the report of all teams grows with their number, told by the lines of code that run, not by time.

from __future__ import annotations

import asyncio
import sys
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from billing.ledger.choices import AskedSum
from billing.ledger.statements import Line, Statement, Totals
from gateway.reports import admin_report
from gateway.reports.usage_analysis import Analysis, Choices
from protocol.usage import Usage
from tests.support.house import settings_for

DAY = date(2026, 4, 5)
MODELS = 4
OURS = ("gateway/reports", "billing/ledger")


def test_the_report_goes_through_its_lines_as_often_for_many_teams_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the teams are three times the work: no team's sums are looked for among those of all."""
    few, many = (work_of(teams, monkeypatch) for teams in (30, 90))

    assert many < 3.1 * few


def work_of(teams: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many lines of our code run to make the report of so many teams."""
    names = [f"team_{number:03}" for number in range(teams)]
    used = Totals(requests=3, input_tokens=1000, cost_nanousd=7)
    lines = [
        Line(groups=(name, f"model_{model}", tier), total=used, corrections=Totals())
        for name in names
        for model in range(MODELS)
        for tier in ("batch", "interactive")
    ]
    statement = Statement(group_by=(), lines=tuple(lines), total=used, corrections=Totals(), is_closed=True)
    facts: dict[str, Any] = {"tier": "batch", "suffices": None, "requests": 1, "usage": Usage(5), "cost_nanousd": 3}
    asked = [AskedSum(team_id=name, asked=f"route_{each}", **facts) for name in names for each in range(MODELS)]
    answers = {"period": statement, "read_choices": Choices(asked, []), "idle_costs": [], "see_one_moment": None}
    for name, answer in answers.items():
        monkeypatch.setattr(admin_report, name, answering(answer))
    settings = settings_for("postgresql://x/y", "redis://x", "http://upstream/v1", Path("/nowhere"))
    making = admin_report.admin_report(None, Analysis(None), settings.catalog(), DAY, DAY)  # type: ignore[arg-type]
    report, count = counted(making)
    assert len(report["teams"]) == teams and len(report["results"]) == teams * MODELS
    return count


def answering(answer: Any) -> Any:
    """Return a function that answers a question to Postgres."""

    async def answered(*_: Any) -> Any:
        return answer

    return answered


def counted(making: Any) -> tuple[dict[str, Any], int]:
    """Run a coroutine; return what it returns, and how many lines of our code ran."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not any(part in frame.f_code.co_filename for part in OURS):
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        report = asyncio.run(making)
    finally:
        sys.settrace(before)
    return report, count
