# What `tollgate doctor` finds: one line for each thing that it looked at, and what to do where that is not well.

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """How a thing is."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not always
    FAULT = "fault"  # calls fail, or are not counted


class Finding(Struct, frozen=True):
    """One thing that was looked at. ``remedy``: what to do, where it is not well."""

    part: str
    state: State
    words: str
    remedy: str = ""

    def line(self) -> str:
        """Return it as people read it."""
        return f"{self.state:8} {self.part:22} {self.words}" + (f"; {self.remedy}" if self.remedy else "")


def ok(part: str, words: str) -> Finding:
    """Return that a thing is well."""
    return Finding(part, State.OK, words)


def warning(part: str, words: str, remedy: str) -> Finding:
    """Return that a thing works, and will not always."""
    return Finding(part, State.WARNING, words, remedy)


def fault(part: str, words: str, remedy: str) -> Finding:
    """Return that a thing does not work."""
    return Finding(part, State.FAULT, words, remedy)
