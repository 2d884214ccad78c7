# What makes processes start and run faster: less for the garbage collector to look at, memory in huge pages, imports
# that no command uses left out. What each is worth: docs/experiments/calls/lone-call-milliseconds.md and
# streams-and-collector.md, docs/experiments/project/start.md.

from __future__ import annotations

import gc
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

YOUNG = 10_000  # objects made before the collector looks which of them are garbage
HUGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # asm-generic/mman-common.h; Linux 6.1
# SQLAlchemy's asyncio imports its whole mapper of objects for these two; our statements need its core alone.
SESSIONS = ("sqlalchemy.ext.asyncio.scoping", "sqlalchemy.ext.asyncio.session")


def put_off_collecting() -> None:
    """Look at nothing while thousands of modules are imported: nearly all stays. It saves a tenth of the start."""
    gc.disable()


def spare_what_stays() -> None:
    """Look from now on only at what comes later; to be called when all is imported, also if nothing was put off.

    Unspared, it is gone through again and again: a tenth of the CPU time, in pauses of up to a tenth of a second. The
    garbage that is kept with it, two thousand small objects, is not worth one more look.
    """
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    gc.enable()


def gather_memory() -> int:
    """Have the kernel put what this process has in memory now into huge pages; return how many it has made.

    None where it cannot, which costs nothing; else a page takes half a millisecond. A call touches some thousand of the
    small ones; when calls come one by one, the processor has forgotten between two of them where most of those are, and
    looking that up is a tenth of what the call waits for.
    """
    import ctypes  # a millisecond that other commands save

    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        mappings = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return 0
    return sum(madvise(place, HUGE, MADV_COLLAPSE) == 0 for line in mappings for place in places_in(line))


def places_in(mapping: str) -> range:
    """Return where huge pages lie whole in a mapping, a line as in proc(5), if it is memory of the process's own."""
    addresses, modes, _, _, inode, *name = mapping.split()
    start, end = (int(address, 16) for address in addresses.split("-"))
    if modes != "rw-p" or inode != "0" or name not in ([], ["[heap]"]):
        return range(0)
    return range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE)


def import_leanly() -> None:
    """Import structlog without rich, whose colours our lines of JSON do not have, and SQLAlchemy without its ORM.

    A gateway or worker starts in a tenth less CPU time. Call it before anything imports them; what imports the rest by
    name later gets it.
    """
    _import_without("structlog", "rich")
    if "sqlalchemy.orm" not in sys.modules:
        sys.modules.update({name: _Unused(name) for name in SESSIONS})
        import sqlalchemy.ext.asyncio  # noqa: F401


def import_redis() -> None:
    """Import redis-py without OpenTelemetry's SDK, for whose metrics nothing here asks it; as ``import_leanly``."""
    _import_without("redis.asyncio", "opentelemetry.sdk")


def _import_without(name: str, left_out: str) -> None:
    if name not in sys.modules and left_out not in sys.modules:
        sys.modules[left_out] = None  # type: ignore[assignment]  # not installed, as it sees it
        import_module(name)
        del sys.modules[left_out]


class _Unused(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})
