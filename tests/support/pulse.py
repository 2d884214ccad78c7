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
ended, wanted, asking, waits, slow = threading.Event(), threading.Event(), threading.Lock(), [0.0], [1.0]

def ask():
    while wanted.wait() and not ended.is_set():
        with asking:
            began = time.monotonic()
            connection = http.client.HTTPConnection(host, timeout=60)
            try:
                connection.request("GET", "/" + path)
                is_well = connection.getresponse().status == 200
            except OSError:
                is_well = False
            connection.close()
            waits.append(time.monotonic() - began if is_well else 60.0)
        time.sleep(0.05)

def work():
    while wanted.wait() and not ended.is_set():
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
    if line == "begin\\n":
        waits[:], slow[:] = [0.0], [1.0]
        wanted.set()
    else:
        wanted.clear()
        with asking:
            print(json.dumps([max(waits), max(slow)]), flush=True)
ended.set()
wanted.set()
"""


@dataclass
class Pulse:
    """Asks between ``begin`` and ``worst``."""

    process: subprocess.Popen[str]

    def begin(self) -> None:
        """Ask from now on."""
        self._say("begin")

    def worst(self) -> tuple[float, float]:
        """Return the longest wait in seconds, and how many times as long work took as alone; ask no more."""
        self._say("worst")
        assert self.process.stdout is not None
        waited, slowness = json.loads(self.process.stdout.readline())
        return waited, slowness

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def pulse_of(url: str) -> Iterator[Pulse]:
    """Ask for a page, whenever a test wants to know."""
    command = [sys.executable, "-c", ASKING, url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Pulse(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)
