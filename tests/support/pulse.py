# Asks for a page again and again from a process of its own, while a test does other things: how long it waits at most,
# and how much longer work takes at the same time because the machine is busy with others.

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ASKING = """
import http.client, json, sys, threading, time
host, path = sys.argv[1].removeprefix("http://").split("/", 1)
ended, waits, slow = threading.Event(), [0.0], [1.0]

def ask():
    while not ended.is_set():
        began = time.monotonic()
        connection = http.client.HTTPConnection(host, timeout=60)
        try:
            connection.request("GET", "/" + path)
            is_well = connection.getresponse().status == 200
        except OSError:
            is_well = False
        connection.close()
        waits.append(time.monotonic() - began if is_well else 60.0)
        time.sleep(0.02)

def work():
    while not ended.is_set():
        began, worked = time.monotonic(), time.thread_time()
        while time.thread_time() < worked + 0.02:
            pass
        took = time.monotonic() - began
        time.sleep(0.1)  # from which it comes late where everything stood still
        slow.append(max(took / 0.02, (time.monotonic() - began) / 0.12))

threads = [threading.Thread(target=each) for each in (ask, work)]
for thread in threads:
    thread.start()
for line in sys.stdin:
    print(json.dumps([max(waits), max(slow)]), flush=True)
    waits[:], slow[:] = [0.0], [1.0]
ended.set()
"""


@dataclass
class Pulse:
    """What was found since the last look."""

    process: subprocess.Popen[str]

    def worst(self) -> tuple[float, float]:
        """Return the longest wait in seconds, and how many times as long work took as alone; begin anew."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        waited, slowness = json.loads(self.process.stdout.readline())
        return waited, slowness


@contextlib.contextmanager
def pulse_of(url: str) -> Iterator[Pulse]:
    """Ask for a page until the end of the block."""
    command = [sys.executable, "-c", ASKING, url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Pulse(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
