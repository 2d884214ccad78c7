# Memory in huge pages: which of it, and that nothing in it changes.

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gateway.run.tuning import HUGE, places_in

PROGRAM = """
import json, re
from pathlib import Path
from gateway.run.tuning import gather_memory
words = [str(number) * 20 for number in range(100_000)]  # some 15 MiB of small objects
made = gather_memory()
kib = re.search(r"AnonHugePages: +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())
print(json.dumps([made, int(kib[1]), words == [str(number) * 20 for number in range(100_000)]]))
"""


def test_memory_lies_in_huge_pages_and_is_the_same():
    """What the kernel says it has gathered shows in the process's memory, and every object is as it was."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    made, kib, is_same = json.loads(done.stdout)

    assert is_same
    if made == 0:
        pytest.skip("this kernel gathers no memory into huge pages when it is asked to (Linux 6.1 does)")
    assert kib * 1024 >= made * HUGE


@pytest.mark.parametrize("end", ["00:00 0", "00:00 0                          [heap]"])
def test_only_pages_that_lie_whole_in_a_mapping_are_gathered(end: str):
    """A mapping's ends seldom lie on the boundary of a huge page; its neighbours' memory is left alone."""
    assert list(places_in(f"7f00001ff000-7f0000801000 rw-p 00000000 {end}")) == [
        0x7F0000200000,
        0x7F0000400000,
        0x7F0000600000,
    ]
    assert not places_in(f"7f00001ff000-7f00003ff000 rw-p 00000000 {end}")


@pytest.mark.parametrize(
    "mapping",
    [
        "7f0000000000-7f0000800000 r-xp 00000000 fe:00 26933                      /usr/lib/libpython3.11.so.1.0",
        "7f0000000000-7f0000800000 rw-p 00000000 fe:00 26933                      /usr/lib/libpython3.11.so.1.0",
        "7f0000000000-7f0000800000 rw-s 00000000 00:01 1024                       /dev/shm/counters",
        "7f0000000000-7f0000800000 ---p 00000000 00:00 0",
        "7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]",
    ],
)
def test_files_stacks_and_shared_memory_are_left_alone(mapping: str):
    """Only memory that the process has for itself is gathered."""
    assert not places_in(mapping)
