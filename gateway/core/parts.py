# What a process is made of, by type. Built once (run/process.py) and asked for at the edges alone, by routes and by the
# commands that wire loops together; everything else takes the few parts that it needs as arguments.

from __future__ import annotations

from typing import TypeVar, cast

T = TypeVar("T")


class Parts:
    """One part of each type."""

    def __init__(self, *parts: object) -> None:
        self._parts: dict[type, object] = {type(part): part for part in parts}

    def get(self, kind: type[T]) -> T:
        """Return the part that is a ``kind``."""
        return cast(T, self._parts[kind])

    def find(self, kind: type[T]) -> T | None:
        """Return the part that is a ``kind``, or ``None`` where this process has none."""
        return cast("T | None", self._parts.get(kind))
