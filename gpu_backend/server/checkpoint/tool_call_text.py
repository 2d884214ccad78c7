# The JSON of one tool call, read as it comes, so that its arguments are told before it ends.

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto


class CallState(Enum):
    START = auto()  # before the brace
    KEY = auto()  # before a key, or the end of the object
    IN_KEY = auto()
    COLON = auto()  # before the colon
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    NEXT = auto()  # after a value
    DONE = auto()
    BAD = auto()  # no call


class CallText:
    """The JSON of one call, as it comes: its name, and what its arguments have gained."""

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.state = CallState.START
        self._names = names
        self._text: list[str] = []  # characters, as are those below: texts would be copied with each
        self._fresh: list[str] = []
        self._part: list[str] = []  # of the key or the value that is being read
        self._key = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._has_arguments = False

    def feed(self, character: str) -> None:
        """Take in the next character; nothing must follow the states DONE and BAD."""
        self._text.append(character)
        match self.state:
            case CallState.IN_KEY:
                self._part.append(character)
                if self._ends_string(character):
                    self._key, self.state = "".join(self._part), CallState.COLON
            case CallState.IN_VALUE:
                self._read_value(character)
            case _ if character in " \t\r\n":
                pass
            case CallState.START:
                self.state = CallState.KEY if character == "{" else CallState.BAD
            case CallState.KEY if character == '"':
                self._part, self.state, self._in_string = ['"'], CallState.IN_KEY, True
            case CallState.COLON if character == ":":
                self.state = CallState.VALUE
            case CallState.VALUE if character not in ",}]:":
                self._part, self._depth, self._in_string, self.state = [], 0, False, CallState.IN_VALUE
                self._read_value(character)
            case CallState.NEXT if character == ",":
                self.state = CallState.KEY
            case CallState.NEXT if character == "}":
                self._end()
            case _:
                self.state = CallState.BAD

    @property
    def text(self) -> str:
        """All that was fed."""
        return "".join(self._text)

    def take_fresh(self) -> str:
        """Return what the arguments have gained since this was last asked."""
        fresh = "".join(self._fresh)
        self._fresh.clear()
        return fresh

    @property
    def _is_argument(self) -> bool:
        return self._key in ('"arguments"', '"parameters"')

    def _read_value(self, character: str) -> None:
        if self._in_string:
            self._take(character)
            if self._ends_string(character) and not self._depth:
                self._end_value()
        elif character == '"':
            self._in_string = True
            self._take(character)
        elif character in "{[":
            self._depth += 1
            self._take(character)
        elif character in "}]" and self._depth:
            self._depth -= 1
            self._take(character)
            if not self._depth:
                self._end_value()
        elif not self._depth and character in ",} \t\r\n":  # the end of a number or a word
            self._end_value()
            if self.state is CallState.NEXT:
                self._text.pop()
                self.feed(character)
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        self._part.append(character)
        if self._is_argument and self._part[0] == "{":
            self._fresh.append(character)

    def _end_value(self) -> None:
        self.state = CallState.NEXT
        if self._key != '"name"' and not self._is_argument:
            return
        said = "".join(self._part)
        try:
            value = json.loads(said)
        except (ValueError, RecursionError):
            self.state = CallState.BAD
            return
        if self._key == '"name"':
            if self.name is not None or not isinstance(value, str) or value not in self._names:
                self.state = CallState.BAD
            else:
                self.name = value
        elif self._has_arguments:
            self.state = CallState.BAD
        else:
            self._has_arguments = True
            if isinstance(value, str):  # some models write the JSON text as a string
                self._fresh.append(value)
            elif not isinstance(value, dict):
                self._fresh.append("{}" if value is None else said)

    def _end(self) -> None:
        if self.name is None:
            self.state = CallState.BAD
            return
        if not self._has_arguments:
            self._fresh.append("{}")
        self.state = CallState.DONE

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
        return not self._in_string
