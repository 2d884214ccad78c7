# Records that the ledger will never take, kept where operators find them.

from __future__ import annotations

from pathlib import Path

import msgspec
import structlog

from billing.core.records import UsageRecord
from billing.journal.segments import TOO_OLD, UNREADABLE

REJECTED = "rejected.jsonl"

log = structlog.get_logger(__name__)


def put_aside(directory: Path, record: UsageRecord) -> Path | None:
    """Keep a record that the ledger will never take; return the file, or None if the disk does not take it."""
    path = directory / REJECTED
    try:
        with path.open("ab") as file:
            file.write(_line(record) + b"\n")
    except OSError as exc:
        log.error("journal_not_put_aside", request_id=record.request_id, file=str(path), error=str(exc))
        return None
    return path


def quarantined(directory: Path) -> int:
    """Return how many files are kept for operators: with damage, with calls too old for the ledger, or with records
    that it refuses."""
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:  # ``Journal.check`` says so
        return 0
    return sum(name == REJECTED or name.endswith((UNREADABLE, TOO_OLD)) for name in names)


def _line(record: UsageRecord) -> bytes:
    try:
        return msgspec.json.encode(record)
    except (ValueError, TypeError, OverflowError):  # not even JSON: as Python shows it
        return msgspec.json.encode({"request_id": ascii(record.request_id), "record": ascii(record)})
