# The process's memory in huge pages. A call touches some thousand of the small ones; when calls come one by one, the
# processor has forgotten between two of them where most of those are, and looking that up is a tenth of what the call
# waits for (docs/experiments/calls/lone-call-milliseconds.md).

from __future__ import annotations

import ctypes
from pathlib import Path

HUGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # asm-generic/mman-common.h; Linux 6.1


def gather_memory() -> int:
    """Have the kernel put what this process has in memory now into huge pages; return how many it has made.

    None where it cannot, which costs nothing; else a page takes half a millisecond.
    """
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
