# The sign of life of a worker: a file that it touches as long as its loop turns. Apart from the worker's own code, so
# that a health check, asked every few seconds, need not import it.

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.settings import Settings

HEARTBEAT_EVERY = 5.0  # seconds
HEARTBEAT_LASTS = 30.0  # seconds after which a worker counts as stuck


def is_working(settings: Settings) -> bool:
    """Return whether a worker of this machine has shown lately that it is not stuck: for health checks."""
    try:
        return time.time() - _heartbeat_file(settings).stat().st_mtime < HEARTBEAT_LASTS
    except OSError:
        return False


async def show_life(settings: Settings) -> None:
    """Touch the file as long as the loop turns."""
    while True:
        _heartbeat_file(settings).touch()
        await asyncio.sleep(HEARTBEAT_EVERY)


def _heartbeat_file(settings: Settings) -> Path:
    return settings.data_dir / f"worker-{socket.gethostname()}.alive"
