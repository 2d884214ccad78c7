# Reads tollgate.yaml again when SIGHUP says so. What it says takes the place of what it said for every call that begins
# from then on; a call that runs keeps its edition to its end. A faulty file changes nothing.

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from msgspec import structs

from gateway.config.tree import ConfigFaults
from gateway.core.clock import Clock
from gateway.core.settings import Settings
from gateway.inference.edition import Editions
from gateway.telemetry.metrics import Metrics

# What is open, locked or derived since the start: another value needs a restart.
UNTIL_RESTART = (
    *("database_url", "database_direct_url", "redis_url", "data_dir", "admin_keys", "metrics_keys", "key_pepper"),
    *("other_key_peppers", "journal_fsync", "tracing", "cors_origins", "drain", "lame_duck"),
    *("sign_in", "jwt_auth"),
)

Read = Callable[[], Settings]  # raises ConfigFaults

log = structlog.get_logger()


class Reloader:
    """Reloads the configuration of one process, from ``begin`` on."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parts: tuple[Editions, Metrics, Clock] | None = None
        self._one_at_a_time = asyncio.Lock()

    def begin(self, editions: Editions, metrics: Metrics, clock: Clock) -> None:
        """Have a process follow what is read."""
        self._parts = editions, metrics, clock

    async def reload(self) -> bool:
        """Go by what the file says now, and return whether it may be gone by."""
        async with self._one_at_a_time:
            assert self._parts is not None
            editions, metrics, clock = self._parts
            known = editions.said
            settings = await read_again(self._read, known)
            metrics.count_reload(settings is not None, clock.now())
            if settings is None:
                return False
            editions.change(settings)
            changes = {"models": differences(known.models, settings.models)}
            changes["providers"] = differences(known.providers, settings.providers)
            log.info("config_reloaded", **changes)
            return True


async def read_again(read: Read, known: Settings) -> Settings | None:
    """Return what ``read`` says now, but for what needs a restart; ``None`` if it is refused. The log says why."""
    try:
        found = await asyncio.to_thread(read)
    except ConfigFaults as exc:
        log.error("config_refused", faults=list(exc.lines()), kept="the configuration that was read before")
        return None
    except Exception:
        log.exception("config_refused", kept="the configuration that was read before")
        return None
    differing = [name for name in UNTIL_RESTART if getattr(found, name) != getattr(known, name)]
    if differing:
        log.warning("config_needs_restart", settings=differing, kept="their values until then")
    return structs.replace(found, **{name: getattr(known, name) for name in differing})


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names that are new, gone, or stand for something else; for the log."""
    return {
        "added": sorted(after.keys() - before.keys()),
        "removed": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
    }
