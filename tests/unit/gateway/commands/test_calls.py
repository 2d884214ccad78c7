# `tollgate calls --follow`: what comes between two looks is shown, however much it is.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.commands.calls import new_calls


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
