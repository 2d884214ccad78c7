# Which days a report is asked for, and what its lines are for.

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, timedelta

from msgspec import Struct

from billing.ledger.statement_queries import LONGEST_BY_CALL, Group, GroupBy, Tag, reads_calls
from gateway.core.clock import read_day
from protocol.errors import invalid_param, invalid_value, missing_param

LONGEST_PERIOD = 1100  # days
LONGEST_TAG = 64  # characters of a key of metadata
MOST_GROUPS = 3
MOST_GROUPS_OF_ALL, LONGEST_OF_ALL = 2, 31  # groups and days of all teams: a line for each team and day
OF_ALL = (GroupBy.TEAM, GroupBy.COST_CENTRE)  # groups that a report of all teams has, and none of one
OFFERED = (*OF_ALL, GroupBy.MODEL, GroupBy.KEY, GroupBy.TIER, GroupBy.DAY, GroupBy.MONTH, GroupBy.USER)


class Period(Struct, frozen=True, kw_only=True):
    """What is asked for: whole UTC days, both ends included."""

    first: date
    last: date
    group_by: tuple[Group, ...] = ()

    @property
    def is_plain_day(self) -> bool:
        """Tell whether it is one day's sum and nothing more."""
        return not self.group_by and self.first == self.last

    @property
    def is_of_all(self) -> bool:
        """Tell whether its lines are for teams, or for their cost centres."""
        return any(group in OF_ALL for group in self.group_by)

    @property
    def days(self) -> int:
        """How many days it has."""
        return (self.last - self.first).days + 1


def read_period(said: Mapping[str, str], today: date) -> Period:
    """Return the period that ``date``, ``from``, ``to`` and ``group_by`` mean. Raises BadRequest.

    Nothing said: today. ``from`` alone: until today. Several days without ``group_by``: day by day.
    """
    group_by = read_groups(said["group_by"]) if "group_by" in said else ()
    first, last = read_span(said, today)
    if "from" in said and not group_by:
        group_by = (GroupBy.DAY,)
    asked = Period(first=first, last=last, group_by=group_by)
    if reads_calls(group_by) and asked.days > LONGEST_BY_CALL:
        words = f"By user or metadata, a period is at most {LONGEST_BY_CALL} days long: it is added up call by call."
        raise invalid_param("from", words)
    return asked


def check_of_all(asked: Period) -> None:
    """Refuse what would have too many lines of all teams. Raises BadRequest."""
    if len(asked.group_by) > MOST_GROUPS_OF_ALL:
        raise invalid_value("group_by", f"names up to {MOST_GROUPS_OF_ALL} groups where it is of all teams")
    if GroupBy.DAY in asked.group_by and asked.days > LONGEST_OF_ALL:
        raise invalid_param("from", f"Of all teams day by day, a period is at most {LONGEST_OF_ALL} days long.")


def read_span(said: Mapping[str, str], today: date) -> tuple[date, date]:
    """Return the first and the last day that ``date``, or ``from`` and ``to``, mean. Raises BadRequest."""
    if "date" in said:
        if "from" in said or "to" in said:
            raise invalid_param("date", "Send 'date', or 'from' and 'to', not both.")
        day = read_day(said["date"], "date")
        return day, day
    if "from" not in said:
        if "to" in said:
            raise missing_param("from", "'to' needs a 'from'.")
        return today, today
    first = read_day(said["from"], "from")
    last = read_day(said["to"], "to") if "to" in said else today
    if last < first:
        raise invalid_param("to", f"The period ends ({last}) before it begins ({first}).")
    if last - first >= timedelta(days=LONGEST_PERIOD):
        raise invalid_param("from", f"A period is at most {LONGEST_PERIOD} days long.")
    return first, last


def read_groups(said: str) -> tuple[Group, ...]:
    """Return the groups that ``model,metadata:project`` names. Raises BadRequest."""
    groups = tuple(_group(name) for name in said.split(","))
    if len(set(groups)) < len(groups) or len(groups) > MOST_GROUPS:
        raise invalid_value("group_by", f"names up to {MOST_GROUPS} different groups")
    return groups


def _group(said: str) -> Group:
    key = said.removeprefix("metadata:")
    if key != said:
        if 1 <= len(key) <= LONGEST_TAG:
            return Tag(key)
        raise invalid_value(
            "group_by", f"names a key of metadata by 1 to {LONGEST_TAG} characters, as in metadata:project"
        )
    if said in OFFERED:
        return GroupBy(said)
    raise invalid_value("group_by", f"is one of {', '.join(OFFERED)}, metadata:KEY, or several with commas between")
