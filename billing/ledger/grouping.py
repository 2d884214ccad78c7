# What the lines of a statement may be for.

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

LONGEST_BY_CALL = 31  # days that are added up call by call


class GroupBy(StrEnum):
    """What the lines of a statement are for."""

    MODEL = "model"
    KEY = "key"
    TIER = "tier"
    DAY = "day"
    MONTH = "month"
    USER = "user"  # as callers tag their calls
    TEAM = "team"  # of a statement of the whole deployment


class Tag(Struct, frozen=True):
    """One line for each value that callers gave to ``key`` in their calls' metadata."""

    key: str

    def __str__(self) -> str:
        return f"metadata:{self.key}"


Group = GroupBy | Tag


def reads_calls(group_by: tuple[Group, ...]) -> bool:
    """Tell whether such a statement adds up the calls one by one, and not the daily sums."""
    return any(group is GroupBy.USER or isinstance(group, Tag) for group in group_by)
