# What the dead left in a journal's folder, as the ledger would have it.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from billing.core.edges import Clock
from billing.core.records import UsageRecord
from billing.journal.adoption import close_at, seize_segments, settle_segment
from billing.journal.segments import KEPT


def adopt(directory: Path, clock: Clock) -> Iterator[UsageRecord]:
    """Yield the calls of dead processes, and free each segment after its last call."""
    for segment in seize_segments(directory, clock.now()):
        without_room = settle_segment(segment)
        yield from [close_at(segment, place)[0] for place in segment.waiting.places] + without_room
        segment.free(clock.now())


def left_in(directory: Path) -> list[Path]:
    """Return the files of a journal's folder, but for those that are only kept."""
    return [path for path in directory.iterdir() if path.suffix != KEPT]
