# What dead processes leave in the journal, and how their calls ended.

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from billing.core.ids import moment_of
from billing.core.records import TOKENS, Served, Status, UsageRecord, units_of
from billing.journal.segments import SUFFIX, UNLOCKED, Kind, Segment
from protocol.usage import Usage

log = structlog.get_logger(__name__)


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


def settle_segment(segment: Segment) -> list[UsageRecord]:
    """Close, in the file, every call that its owner left open; from then on all closes in it wait to be flushed.
    Return how those calls ended for whose close the disk has no room.

    What damage leaves of a call is used: a close alone is enough, an open without its close ends at the last progress
    that can be read. Progress alone says too little; it is logged for operators.
    """
    opened, reached, closed = _sort_out(segment)
    if segment.gaps:
        log.error(
            "journal_damaged", path=str(segment.path), gaps=segment.gaps, calls=len(closed.keys() | opened.keys())
        )
    for request_id in reached.keys() - closed.keys() - opened.keys():
        log.error("journal_call_lost", path=str(segment.path), progress=msgspec.to_builtins(reached[request_id]))
    without_room = []
    ended = [_ended(body, reached.get(request_id)) for request_id, body in opened.items() if request_id not in closed]
    for record in ended:
        try:
            closed[record.request_id] = segment.append(Kind.CLOSED, _encode_record(record))
        except OSError:
            without_room.append(record)
    for request_id, place in closed.items():
        segment.waiting.add(place, moment_of(request_id))
    return without_room


def calls_in(path: Path) -> Iterator[UsageRecord]:
    """Yield how each call of a segment file ended, as far as that can be read. The file stays as it is."""
    with contextlib.closing(Segment.look(path)) as segment:
        opened, reached, closed = _sort_out(segment)
        for place in closed.values():
            yield close_at(segment, place)[0]
        for request_id, body in opened.items():
            if request_id not in closed:
                yield _ended(body, reached.get(request_id))


def closes_in(path: Path, but: Container[int] = ()) -> Iterator[UsageRecord]:
    """Yield, decoded one by one, the closes of a segment file, but for those at the places ``but``. The file stays as
    it is; nothing where it is gone, or cannot be read."""
    try:
        with contextlib.closing(Segment.look(path)) as segment:
            for place, kind, body in segment.replay():
                if kind is Kind.CLOSED and place not in but:
                    yield _decode_record(body)
    except FileNotFoundError:
        return  # a kept segment is removed when the disk is full
    except (OSError, msgspec.DecodeError) as exc:
        log.error("journal_unreadable", path=str(path), error=str(exc))


def _sort_out(segment: Segment) -> tuple[dict[str, bytes], dict[str, Progress], dict[str, int]]:
    """Return what a segment says of its calls: the opens, the last progress, and where the closes lie."""
    opened: dict[str, bytes] = {}
    reached: dict[str, Progress] = {}
    closed: dict[str, int] = {}
    for place, kind, body in segment.replay():
        match kind:
            case Kind.OPENED:
                opened[_decode_name(body).request_id] = body
            case Kind.PROGRESS:
                progress = _decode_progress(body)
                reached[progress.request_id] = progress
            case Kind.CLOSED:
                closed[_decode_name(body).request_id] = place
    return opened, reached, closed


def close_at(segment: Segment, place: int) -> tuple[UsageRecord, int]:
    """Return the record of the close at ``place``, and its bytes. ``msgspec.DecodeError`` where there is none whole."""
    found = segment.read(place)
    if found is None:
        raise msgspec.DecodeError(f"there is no whole record at {place}")
    return _decode_record(found[1]), len(found[1])


def _ended(opened: bytes, progress: Progress | None) -> UsageRecord:
    """Return how a call ended whose process died: with what it had used by its last progress."""
    record = _decode_record(opened)
    if progress is not None:
        if progress.served is not None:
            record = progress.served.named_in(record)
        used = {name: getattr(progress.usage, name) for name in TOKENS} | {"units": units_of(progress.usage)}
        record = msgspec.structs.replace(record, **used, cost_nanousd=progress.cost_nanousd)
    if record.output_tokens > 0:
        return msgspec.structs.replace(record, status=Status.INTERRUPTED)
    return msgspec.structs.replace(record, status=Status.FAILED, cost_nanousd=0, gpu_cost_nanousd=0)


class Progress(Struct, frozen=True, array_like=True):
    """How far a call has come; what it costs is at the price of the target that answers."""

    request_id: str
    usage: Usage
    cost_nanousd: int
    served: Served | None = None  # None: by the target that the call was opened with


class _Name(Struct, frozen=True):
    request_id: str


_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(UsageRecord).decode
_decode_progress = msgspec.msgpack.Decoder(Progress).decode
_decode_name = msgspec.msgpack.Decoder(_Name).decode
