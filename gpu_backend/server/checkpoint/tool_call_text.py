# The JSON of one tool call, read as it comes, so that its arguments are told before it ends.

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from typing import Any

BLANKS = " \t\r\n"
NAME, ARGUMENTS = '"name"', ('"arguments"', '"parameters"')


class CallText:
    """The JSON of one call, as it comes: its name, and what its arguments have gained."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.is_done = False
        self.is_bad = False  # it is no call
        self._names = names
        self._text: list[str] = []  # characters, as are the fresh ones: texts would be copied with each
        self._fresh: list[str] = []
        self._reader = self._read()
        next(self._reader)

    def feed(self, character: str) -> None:
        """Take in the next character; nothing must follow once it is done or bad."""
        self._text.append(character)
        try:
            self._reader.send(character)
        except StopIteration as end:
            self.is_done, self.is_bad = end.value, not end.value

    @property
    def text(self) -> str:
        """All that was fed."""
        return "".join(self._text)

    def take_fresh(self) -> str:
        """Return what the arguments have gained since this was last asked."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    def _read(self) -> Generator[None, str, bool]:
        """Read the object, each character when it is sent; return whether it is a call."""
        if (yield from _past_blanks()) != "{":
            return False
        has_arguments, behind = False, ","
        while behind == ",":
            if (yield from _past_blanks()) != '"':
                return False
            key, _ = yield from self._value('"', tells=False)
            if (yield from _past_blanks()) != ":" or (first := (yield from _past_blanks())) in ",}]:":
                return False
            said, behind = yield from self._value(first, tells=key in ARGUMENTS and first == "{")
            if key == NAME or key in ARGUMENTS:
                try:
                    value = json.loads(said)
                except (ValueError, RecursionError):
                    return False
                if key == NAME and (self.name is not None or not isinstance(value, str) or value not in self._names):
                    return False
                if key == NAME:
                    self.name = value
                elif has_arguments:
                    return False
                else:
                    has_arguments = True
                    self._fresh.append(_told_late(value, said))
            behind = behind or (yield from _past_blanks())
        if behind != "}" or self.name is None:
            return False
        if not has_arguments:
            self._fresh.append("{}")
        return True

    def _value(self, character: str, *, tells: bool) -> Generator[None, str, tuple[str, str]]:
        """Read a value from its first character on; return it, and what ended it, if that is not its own."""
        part: list[str] = []
        depth, is_quoted, is_escaped = 0, False, False
        while True:
            if not (is_quoted or depth) and character in ",}" + BLANKS:  # the end of a number or a word
                return "".join(part), character.strip()
            part.append(character)
            if tells:
                self._fresh.append(character)
            was_inside = depth > 0
            if is_escaped:
                is_escaped = False
            elif is_quoted:
                is_escaped, is_quoted = character == "\\", character != '"'
            elif character == '"':
                is_quoted = True
            elif character in "{[":
                depth += 1
            elif character in "}]" and depth:
                depth -= 1
            if not (is_quoted or depth) and (was_inside or character == '"'):
                return "".join(part), ""
            character = yield


def _past_blanks() -> Generator[None, str, str]:
    """Wait for a character that is no blank."""
    while (character := (yield)) in BLANKS:
        pass
    return character


def _told_late(arguments: Any, said: str) -> str:
    """Return what is told of arguments once they have ended: an object was told as it came."""
    if isinstance(arguments, dict):
        return ""
    if isinstance(arguments, str):  # some models write the JSON text as a string
        return arguments
    return "{}" if arguments is None else said
