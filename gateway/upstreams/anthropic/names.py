# Names of tools and ids of their calls in the alphabet that Anthropic's API takes: other services take more, and a
# conversation may have begun at one of them. A name goes out in a safe form and comes back as the caller gave it.

from __future__ import annotations

import re
from typing import Any

from gateway.upstreams.wire.short_ids import digest_of

SAFE = re.compile(r"[a-zA-Z0-9_-]+")
STRANGE = re.compile(r"[^a-zA-Z0-9_-]")
LONGEST_NAME = 128  # characters
KEPT = 100  # of a name that is too long, or not safe


def safe_name(name: str) -> str:
    """Return the name of a tool as Claude takes it: the same for the same name, and another for another."""
    if len(name) <= LONGEST_NAME and SAFE.fullmatch(name):
        return name
    return f"{STRANGE.sub('_', name)[:KEPT]}_{digest_of(name)}"


def safe_id(ident: str) -> str:
    """Return the id of a call as Claude takes it."""
    return ident if SAFE.fullmatch(ident) else f"toolu_{digest_of(ident)}"


def make_names_safe(body: dict[str, Any]) -> None:
    """Change the names and ids in the body of a message's request to those that Claude takes."""
    for tool in body.get("tools") or ():
        if "name" in tool:
            tool["name"] = safe_name(tool["name"])
    if "name" in (choice := body.get("tool_choice") or {}):
        choice["name"] = safe_name(choice["name"])
    ids = _CallIds()
    for turn in body["messages"]:
        if isinstance(turn["content"], str):
            continue
        for block in turn["content"]:
            match block["type"]:
                case "tool_use":
                    block |= {"id": ids.of_call(block["id"]), "name": safe_name(block["name"])}
                case "tool_result":
                    block["tool_use_id"] = ids.of_result(block["tool_use_id"])


class _CallIds:
    """The ids of a conversation's calls, each of them once: some services number the calls of every turn anew."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._waiting: dict[str, list[str]] = {}  # for their results, by the caller's id

    def of_call(self, ident: str) -> str:
        """Return the id of a call."""
        safe = safe_id(ident)
        if safe in self._taken:
            safe = f"toolu_{digest_of(f'{len(self._taken)} {ident}')}"
        self._taken.add(safe)
        self._waiting.setdefault(ident, []).append(safe)
        return safe

    def of_result(self, ident: str) -> str:
        """Return the id of the first call of that id which has no result yet."""
        waiting = self._waiting.get(ident)
        return waiting.pop(0) if waiting else safe_id(ident)
