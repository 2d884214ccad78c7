# How far a batch is, as its team sees it: when it will be done, and a warning when that is too late.

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from gateway.batch.store import Batch
from gateway.batch.views import batch_view, openai_view

BEGUN = datetime(2026, 4, 5, 12, tzinfo=UTC)
EMPTY: dict[str, Any] = dict.fromkeys(Batch.__struct_fields__)
RUNNING = Batch(
    **EMPTY
    | {
        "id": "batch_1",
        "team_id": "t",
        "key_id": "k",
        "endpoint": "/v1/chat/completions",
        "status": "in_progress",
        "priority": "normal",
        "completion_window": "24h",
        "total": 1000,
        "completed": 0,
        "failed": 0,
        "input_tokens": 0,
        "output_tokens": 0,
        "cost_nanousd": 0,
        "tries": 0,
        "created_at": BEGUN,
        "in_progress_at": BEGUN,
        "estimated_completion": BEGUN + timedelta(hours=5),
        "expires_at": BEGUN + timedelta(hours=24),
    }
)


def at(hours: float) -> float:
    """Return a moment after the batch began."""
    return BEGUN.timestamp() + 3600 * hours


def test_the_estimate_holds_until_a_batch_has_a_rate_of_its_own() -> None:
    """A tenth in an hour makes ten hours."""
    assert batch_view(RUNNING, at(1))["estimated_completion"] == "2026-04-05T17:00:00Z"
    assert (
        batch_view(replace(RUNNING, completed=90, failed=10), at(1))["estimated_completion"] == "2026-04-05T22:00:00Z"
    )
    ended = replace(RUNNING, status="completed", completed=1000, completed_at=BEGUN + timedelta(hours=2))
    assert batch_view(ended, at(9))["estimated_completion"] == "2026-04-05T14:00:00Z"


def test_a_batch_that_is_too_slow_is_warned_of() -> None:
    """By the estimate when it is submitted, by its own rate later; never once it has ended."""
    late = replace(RUNNING, estimated_completion=BEGUN + timedelta(hours=25))

    assert "not done before it expires" in batch_view(late, at(0))["warning"]
    assert "warning" not in batch_view(replace(late, completed=500), at(1))
    assert "warning" in batch_view(replace(RUNNING, completed=40), at(1))
    assert "warning" not in batch_view(replace(late, status="expired", expired_at=BEGUN), at(0))


def test_openai_sees_whole_seconds_and_no_word_of_ours() -> None:
    """Its package knows these fields."""
    view = openai_view(replace(RUNNING, input_tokens=30, output_tokens=4))
    faulty = openai_view(replace(RUNNING, errors=[{"line": 1}]))

    assert (view["created_at"], view["object"], "warning" in view) == (int(at(0)), "batch", False)
    assert (view["usage"]["total_tokens"], view["errors"]) == (34, None)
    assert faulty["errors"] == {"object": "list", "data": [{"line": 1}]}
