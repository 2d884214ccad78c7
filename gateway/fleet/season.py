# How many calls are to be expected, by the hours of the days and weeks before. Pure.

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

HOUR = 3600.0  # seconds
DAY, WEEK = 24, 168  # hours
WEEKS, DAYS = 4, 3  # that are looked at
MOST_TREND = 2.0  # that the last day may be above the same day a week ago, or below

Hours = Mapping[int, float]  # calls by hour, counted from the epoch; an hour that is missing had none


def expected_rate(hours: Hours, begin: float, end: float) -> float:
    """Return the highest calls a second that are to be expected between two moments (unix seconds).

    The same hour of the weeks before counts, times what the last day was beside that day a week ago; until a week is
    known, that of the days before. Between the middles of hours it is interpolated. 0 where nothing is known.
    """
    moments = [begin, end, *(hour * HOUR + HOUR / 2 for hour in range(int(begin // HOUR), int(end // HOUR) + 1))]
    return max(_rate_at(hours, moment) for moment in moments if begin <= moment <= end)


def _rate_at(hours: Hours, moment: float) -> float:
    place = moment / HOUR - 0.5
    hour, part = int(place // 1), place % 1
    return ((1 - part) * _calls_in(hours, hour) + part * _calls_in(hours, hour + 1)) / HOUR


def _calls_in(hours: Hours, hour: int) -> float:
    if not hours:
        return 0.0
    first = min(hours)
    weeks = [hours.get(each, 0.0) for each in range(hour - WEEK, hour - WEEK * WEEKS - 1, -WEEK) if each >= first]
    if weeks:
        today = sum(hours.get(each, 0.0) for each in range(hour - DAY - 1, hour - 1))  # the last hour is not over
        then = sum(hours.get(each, 0.0) for each in range(hour - DAY - 1 - WEEK, hour - 1 - WEEK))
        trend = today / then if then and hour - DAY - 1 - WEEK >= first else 1.0
        return median(weeks) * min(max(trend, 1 / MOST_TREND), MOST_TREND)
    days = [hours.get(each, 0.0) for each in range(hour - DAY, hour - DAY * DAYS - 1, -DAY) if each >= first]
    return median(days) if days else 0.0
