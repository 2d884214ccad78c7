# Batches and files as callers see them: our own shape and OpenAI's, of the same rows.

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

from gateway.accounts.serializers import cost_view, moment, shown
from gateway.batch.estimate import LEAST_SEEN
from gateway.batch.file_store import FileRecord
from gateway.batch.store import Batch


def batch_view(batch: Batch, now: float | None = None) -> dict[str, Any]:
    """Return a batch in our own shape, as it is at ``now``, in unix seconds; by default this moment."""
    due = completion_of(batch, time.time() if now is None else now)
    view: dict[str, Any] = {
        "batch_id": batch.id,
        "object": "tollgate.batch",
        **shown(batch, "status", "endpoint", "model", "priority", "created_at"),
        "estimated_completion": moment(due),
        "expires_at": moment(batch.expires_at),
        "ended_at": moment(ended_at(batch)),
        "request_counts": counts_of(batch),
        "usage": {**shown(batch, "input_tokens", "output_tokens"), **cost_view(batch.cost_nanousd)},
        **shown(batch, "callback_url", "metadata", "errors"),
    }
    if batch.is_open and due is not None and due > batch.expires_at:
        view["warning"] = (
            "At the present rate this batch is not done before it expires; what is done by then is kept. "
            "Send it with a higher priority, or in parts."
        )
    return view


def openai_view(batch: Batch) -> dict[str, Any]:
    """Return a batch in OpenAI's shape."""
    names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "object": "batch",
        **shown(batch, "id", "endpoint", "model", "input_file_id", "completion_window", "status"),
        **shown(batch, "output_file_id", "error_file_id", "metadata"),
        "errors": None if batch.errors is None else {"object": "list", "data": batch.errors},
        "created_at": _seconds(batch.created_at),
        "expires_at": _seconds(batch.expires_at),
        **{f"{name}_at": _seconds(getattr(batch, f"{name}_at")) for name in names},
        "request_counts": counts_of(batch),
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
    }


def file_view(file: FileRecord) -> dict[str, Any]:
    """Return a file in OpenAI's shape."""
    return {
        "object": "file",
        **shown(file, "id", "bytes", "filename", "purpose", "status"),
        "created_at": _seconds(file.created_at),
        "expires_at": _seconds(file.expires_at),
        "status_details": None,
    }


def counts_of(batch: Batch) -> dict[str, int]:
    """Return how far a batch is."""
    return {"total": batch.total, "completed": batch.completed, "failed": batch.failed}


def completion_of(batch: Batch, now: float) -> datetime | None:
    """Return when a batch was done, or will be: by its own rate once it has one, before that as it was estimated."""
    done, begun = batch.completed + batch.failed, batch.in_progress_at
    if batch.status != "in_progress" or begun is None or done < LEAST_SEEN:
        return ended_at(batch) or batch.estimated_completion
    since = max(now - begun.timestamp(), 0.0)
    return begun + timedelta(seconds=since * batch.total / done)


def ended_at(batch: Batch) -> datetime | None:
    """Return when a batch ended; None while it is open."""
    return batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at


def _seconds(value: datetime | None) -> int | None:
    return None if value is None else int(value.timestamp())
