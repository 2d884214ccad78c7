# What dead processes leave in the journal, and how their calls ended.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from billing.edges import Clock
from billing.records import Status, UsageRecord
from billing.segments import SUFFIX, UNLOCKED, Kind, Segment
from protocol.usage import Usage


def adopt(directory: Path, clock: Clock) -> Iterator[UsageRecord]:
    """Yield the calls of dead processes as the ledger should have them, and free each segment after its last call.

    An interrupted call comes at its last progress: ``INTERRUPTED`` if it had any output, else ``FAILED`` at no cost.
    """
    for segment in seize_segments(directory, clock.now()):
        for _, record in settle_segment(segment):
            yield record
        segment.free()


def seize_segments(directory: Path, now: float) -> Iterator[Segment]:
    """Yield the segments in ``directory`` whose owners are dead, locked for us."""
    for path in directory.glob(f"*{UNLOCKED}"):
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > 60:  # its maker died while making it; nothing is in it
                path.unlink()
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        segment = Segment.seize(path)
        if segment is not None:
            yield segment


def settle_segment(segment: Segment) -> list[tuple[int | None, UsageRecord]]:
    """Close, in the file, every call that its owner left open; return each call's close and its place.

    The place is ``None`` where the disk had no room for a close: the record is in our hands alone.
    """
    opened: dict[str, UsageRecord] = {}
    closed: dict[str, tuple[int | None, UsageRecord]] = {}
    for place, kind, body in segment.replay():
        match kind:
            case Kind.OPENED:
                record = _decode_record(body)
                opened[record.request_id] = record
            case Kind.PROGRESS:
                progress = _decode_progress(body)
                if progress.request_id in opened:
                    opened[progress.request_id] = at_progress(opened[progress.request_id], progress)
            case Kind.CLOSED:
                record = _decode_record(body)
                opened.pop(record.request_id, None)
                closed[record.request_id] = (place, record)
            case Kind.DROPPED:
                opened.pop(_decode_id(body), None)
    for record in opened.values():
        ended = interrupted(record)
        try:
            place = segment.append(Kind.CLOSED, _encode_record(ended))
        except OSError:
            closed[record.request_id] = (None, ended)
        else:
            closed[record.request_id] = (place, ended)
    return list(closed.values())


def at_progress(record: UsageRecord, progress: Progress) -> UsageRecord:
    """Return ``record`` with what the call had used by then."""
    usage = progress.usage
    return msgspec.structs.replace(
        record,
        input_tokens=usage.input_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        cost_nanousd=progress.cost_nanousd,
    )


def interrupted(record: UsageRecord) -> UsageRecord:
    """Return how a call ended whose process died."""
    if record.output_tokens > 0:
        return msgspec.structs.replace(record, status=Status.INTERRUPTED)
    return msgspec.structs.replace(record, status=Status.FAILED, cost_nanousd=0, gpu_cost_nanousd=0)


class Progress(Struct, frozen=True, array_like=True):
    """How far a call has come."""

    request_id: str
    usage: Usage
    cost_nanousd: int


_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(UsageRecord).decode
_decode_progress = msgspec.msgpack.Decoder(Progress).decode
_decode_id = msgspec.msgpack.Decoder(str).decode
