# What `tollgate doctor` looks at on this machine: the folder of the journal, the room and the file system under it, and
# files of the journal that are in quarantine.

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from billing.journal.backlog import REJECTED
from billing.journal.segments import TOO_OLD, UNREADABLE
from gateway.core.settings import Settings
from gateway.doctor.findings import Finding, fault, ok, warning

LITTLE, TOO_LITTLE = 2 << 30, 100 << 20  # bytes free
IN_QUARANTINE = (UNREADABLE, TOO_OLD)
SLOW = 0.1  # seconds of an fsync
FLEETING = {"tmpfs", "ramfs", "overlay", "aufs"}  # file systems that end with a machine's start or with a container


def look_at_machine(settings: Settings) -> list[Finding]:
    """Return whether the journal can be written, for how long, and whether it outlives this process's container."""
    folder = settings.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        took = _write(folder)
    except OSError as exc:
        remedy = "make it writable for the user that runs gateways, or set data_dir"
        return [fault("journal", f"{folder} cannot be written: {exc.strerror}", remedy)]
    sync = f"written and synced in {1000 * took:.0f} ms"
    slow = took > SLOW and settings.journal_fsync != "never"
    found = [
        warning("journal", f"{folder}: {sync}", "every call waits for that: use a faster disk, or journal.fsync: never")
        if slow
        else ok("journal", f"{folder}: {sync}")
    ]
    free = shutil.disk_usage(folder).free
    if free < LITTLE:
        tell = fault if free < TOO_LITTLE else warning
        found.append(tell("disk", f"{free >> 20} MiB free at {folder}", "make room: without it no call is opened"))
    else:
        found.append(ok("disk", f"{free >> 30} GiB free"))
    kind = file_system_of(folder, Path("/proc/self/mountinfo").read_text() if os.name == "posix" else "")
    if kind in FLEETING:
        words = f"{folder} lies on {kind}, which does not outlive this machine's start or its container"
        found.append(warning("journal volume", words, "mount a volume there: what was answered is booked from it"))
    else:
        found.append(ok("journal volume", kind or "unknown file system"))
    kept = sorted(
        path for path in folder.glob("journal/*") if path.name == REJECTED or path.name.endswith(IN_QUARANTINE)
    )
    if kept:
        words = f"{len(kept)} files in quarantine hold calls that are not in the ledger"
        found.append(warning("quarantine", words, f"look with `tollgate journal {kept[0]}`"))
    return found


def file_system_of(folder: Path, mounts: str) -> str:
    """Return the kind of file system on which a folder lies, as /proc/self/mountinfo has it; "" if unknown."""
    path, best = str(folder.resolve()), ("", "")
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        at, kind = head.split()[4].replace("\\040", " "), tail.split()[0]
        is_under = at == "/" or path == at or path.startswith(f"{at}/")
        if is_under and len(at) >= len(best[0]):
            best = (at, kind)
    return best[1]


def _write(folder: Path) -> float:
    """Return the seconds that a small file takes to be on the disk. Raises OSError."""
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * 4096)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began
