# What a query for series may ask for, without a database.

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.reports.series import MOST_POINTS, read_series_query
from protocol.errors import BadRequest

NOW = datetime(2026, 4, 5, 18, 30, 12, tzinfo=UTC)


def test_whole_steps_cover_what_is_asked() -> None:
    """The first begins at its border before 'from', the last ends at its border after 'to'."""
    found = read_series_query({"metric": "requests"}, NOW, "t", for_admin=False)
    days = read_series_query(
        {"metric": "requests", "step": "day", "from": "2026-04-01T10:00:00Z", "to": "2026-04-03"},
        *(NOW, None),
        for_admin=True,
    )

    assert (found.since, found.until, found.points) == (
        datetime(2026, 4, 4, 19, tzinfo=UTC),
        datetime(2026, 4, 5, 19, tzinfo=UTC),
        24,
    )
    assert (days.since, days.until) == (datetime(2026, 4, 1, tzinfo=UTC), datetime(2026, 4, 4, tzinfo=UTC))
    assert (found.chosen, days.chosen) == ({"team": "t"}, {})


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({}, "metric"),
        ({"metric": "dollars"}, "metric"),
        ({"metric": "gpu_cost_usd"}, "metric"),
        ({"metric": "requests,requests"}, "metric"),
        ({"metric": "requests,errors,blocked,refused,cached,tokens,cost_usd"}, "metric"),
        ({"metric": ""}, "metric"),
        ({"by": "user"}, "by"),
        ({"step": "week"}, "step"),
        ({"status": "odd"}, "status"),
        ({"percentile": "0.5"}, "percentile"),
        ({"percentile": "100"}, "percentile"),
        ({"percentile": "nan"}, "percentile"),
        ({"top": "51"}, "top"),
        ({"top": "1.5"}, "top"),
        ({"top": "x"}, "top"),
        ({"from": "then"}, "from"),
        ({"from": "2026-04-05", "to": "2026-04-04"}, "to"),
        ({"from": "2026-01-01"}, "from"),
        ({"step": "day", "from": "2020-01-01"}, "from"),
        ({"step": "minute", "from": "2026-04-04T00:00:00Z"}, "from"),
        ({"step": "minute", "from": "2026-04-02", "to": "2026-04-02"}, "from"),
        ({"compare": "after"}, "compare"),
        (
            {"step": "minute", "from": "2026-04-03T19:00:00Z", "to": "2026-04-03T20:00:00Z", "compare": "before"},
            "compare",
        ),
    ],
)
def test_what_is_wrong_is_named(said: dict[str, str], param: str) -> None:
    """As a 400 that says what would be right."""
    with pytest.raises(BadRequest) as refused:
        read_series_query({"metric": "requests"} | said if said else {}, NOW, "t", for_admin=False)

    assert refused.value.param == param


def test_points_are_bounded() -> None:
    """At the most there is, it is answered."""
    asked = {"metric": "requests", "step": "hour", "from": "2026-02-02T07:00:00Z", "to": "2026-04-05T18:30:00Z"}

    assert read_series_query(asked, NOW, "t", for_admin=False).points == MOST_POINTS
