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
    """The JSON of one call, as it comes: its name, and what its arguments have gained (``fresh``)."""

    def __init__(self, names: Collection[str]) -> None:
        self.text = ""
        self.name: str | None = None
        self.fresh = ""
        self.state = CallState.START
        self._names = names
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._has_arguments = False

    def feed(self, character: str) -> None:
        """Take in the next character; nothing must follow the states DONE and BAD."""
        self.text += character
        match self.state:
            case CallState.IN_KEY:
                self._key += character
                if self._ends_string(character):
                    self.state = CallState.COLON
            case CallState.IN_VALUE:
                self._read_value(character)
            case _ if character in " \t\r\n":
                pass
            case CallState.START:
                self.state = CallState.KEY if character == "{" else CallState.BAD
            case CallState.KEY if character == '"':
                self._key, self.state, self._in_string = '"', CallState.IN_KEY, True
            case CallState.COLON if character == ":":
                self.state = CallState.VALUE
            case CallState.VALUE if character not in ",}]:":
                self._value, self._depth, self._in_string, self.state = "", 0, False, CallState.IN_VALUE
                self._read_value(character)
            case CallState.NEXT if character == ",":
                self.state = CallState.KEY
            case CallState.NEXT if character == "}":
                self._end()
            case _:
                self.state = CallState.BAD

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
                self.text = self.text[:-1]
                self.feed(character)
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        self._value += character
        if self._is_argument and self._value[0] == "{":
            self.fresh += character

    def _end_value(self) -> None:
        self.state = CallState.NEXT
        if self._key != '"name"' and not self._is_argument:
            return
        try:
            value = json.loads(self._value)
        except ValueError:
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
                self.fresh += value
            elif not isinstance(value, dict):
                self.fresh += "{}" if value is None else self._value

    def _end(self) -> None:
        if self.name is None:
            self.state = CallState.BAD
            return
        if not self._has_arguments:
            self.fresh += "{}"
        self.state = CallState.DONE

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
        return not self._in_string
