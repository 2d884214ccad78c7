# Looks at the counters of limited teams all the time that a load runs: settled and held together never pass a cap.

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from redis import Redis
from redis.exceptions import RedisError

EVERY = 0.03  # seconds


class CapWatch:
    """Samples Redis until the block ends, or until ``pause``: while Redis is away its counters say nothing."""

    def __init__(self, redis_url: str, caps: Mapping[str, Mapping[str, int]]) -> None:
        self.samples = 0
        self.overshoots: list[str] = []
        self._redis = Redis.from_url(redis_url, socket_timeout=0.5, socket_connect_timeout=0.5)
        self._caps = caps  # by team: "tokens", "nanousd", "live"
        self._is_over = threading.Event()
        self._is_paused = False

    def pause(self) -> None:
        """Look no more."""
        self._is_paused = True

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="cap-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(10)
        self._redis.close()

    def _run(self) -> None:
        while not self._is_over.wait(EVERY):
            if self._is_paused:
                continue
            try:
                for team, caps in self._caps.items():
                    self._look(team, caps)
                self.samples += 1
            except RedisError:
                continue

    def _look(self, team: str, caps: Mapping[str, int]) -> None:
        prefix, day = f"tollgate:{{{team}}}", int(time.time() // 86_400)
        epoch = self._redis.get(f"{prefix}:epoch")
        prefix = f"{prefix}:{epoch.decode() if isinstance(epoch, bytes) else ''}"
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(f"{prefix}:d:team:{day}")
            pipe.hget(f"{prefix}:live", "team")
            found, live = pipe.execute()
        day_sums = {name.decode(): int(value) for name, value in found.items()}
        sums = {
            "tokens": day_sums.get("t", 0) + day_sums.get("ht", 0),
            "nanousd": day_sums.get("c", 0) + day_sums.get("hc", 0),
            "live": int(live or 0),
        }
        for name, cap in caps.items():
            if sums[name] > cap and not self._is_paused:
                self.overshoots.append(f"{team}: {name} at {sums[name]}, settled and held together, over {cap}")
