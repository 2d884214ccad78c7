# Tool calls out of a reply's text, while it comes. Whatever the pieces, the same content, calls and arguments come out:
# the text is read character by character, and nothing is said that a later character could take back.

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto


class ToolStyle(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, among text; Qwen's too
    LLAMA = "llama"  # {"name": …, "parameters": {…}}, several apart by ";", and no text beside them


OPEN, CLOSE = "<tool_call>", "</tool_call>"  # Hermes


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What a reply's call number ``index`` gained; ``id`` and ``name`` come with its first piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Said:
    """What a stretch of text adds to the message."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def join_said(first: Said, second: Said) -> Said:
    """Return both as one."""
    return Said(first.content + second.content, first.calls + second.calls)


class ToolCallReader:
    """Reads one reply. What looks like a call of no tool in ``names`` is content, as are calls that are no JSON.

    Blanks around calls belong to nobody; a call that the reply's end cuts off keeps the arguments that it had.
    """

    def __init__(
        self, style: ToolStyle, names: Collection[str], new_id: Callable[[], str], most: int | None = None
    ) -> None:
        self._opener = OPEN if style is ToolStyle.HERMES else "{"
        self._is_llama = style is ToolStyle.LLAMA
        self._names = names
        self._new_id = new_id
        self._most = most  # calls; what follows them is not told
        self._held = ""  # blanks, and what may become an opener or a closer
        self._is_plain = False  # Llama's: this reply is no call, or none any more
        self._call: _CallText | None = None
        self._is_after_call = False
        self._told: str | None = None  # id of the call that is being told
        self.num_calls = 0

    def feed(self, text: str) -> Said:
        """Take in text; return what is certain by now."""
        said = Said()
        for character in text:
            if self._call is None and self.num_calls == self._most:
                break
            if self._call is None:
                self._read_text(character, said)
            else:
                self._read_call(self._call, character, said)
        return said

    def finish(self) -> Said:
        """Return what was kept back: the reply has ended."""
        said = Said()
        if self._call is not None and not self._told:
            said.content = self._held + self._opener_of_call() + self._call.text
        elif self._call is None and (self._held.strip() or not self.num_calls):
            said.content = self._held
        self._held, self._call = "", None
        return said

    def _read_text(self, character: str, said: Said) -> None:
        self._held += character
        while self._held and not self._may_open(self._held.lstrip(self._blanks)):
            self._is_plain = self._is_llama
            self._is_after_call = False
            said.content += self._held[0]
            self._held = self._held[1:]
        word = self._held.lstrip(self._blanks)
        if self._is_after_call and word == CLOSE:
            self._held, self._is_after_call = "", False
        elif word == self._opener and not self._is_plain:
            self._held = self._held[: -len(word)]
            self._call = _CallText(self._names)
            if self._is_llama:
                self._call.feed("{")

    @property
    def _blanks(self) -> str:
        return " \t\r\n;" if self._is_after_call and self._is_llama else " \t\r\n"

    def _may_open(self, word: str) -> bool:
        """Whether ``word`` could still become an opener, or the closer of the call before."""
        if not word:
            return not self._is_plain
        closes = self._is_after_call and not self._is_llama and CLOSE.startswith(word)
        return closes or (not self._is_plain and self._opener.startswith(word))

    def _read_call(self, call: _CallText, character: str, said: Said) -> None:
        call.feed(character)
        if call.name is not None and self._told is None and call.state is not _State.BAD:
            self._told, self._held = self._new_id(), ""
            said.calls.append(CallDelta(self.num_calls, "", self._told, call.name))
            self.num_calls += 1
        if self._told is not None and call.fresh:
            self._tell(call.fresh, said)
            call.fresh = ""
        if call.state is _State.DONE or (call.state is _State.BAD and self._told is not None):
            self._call, self._told, self._is_after_call = None, None, True
        elif call.state is _State.BAD:
            again = self._held + self._opener_of_call() + call.text
            self._call, self._held, self._is_plain = None, "", self._is_llama
            said.content += again[: -1 if again.endswith("<") else None]
            if again.endswith("<"):
                self._read_text("<", said)

    def _tell(self, arguments: str, said: Said) -> None:
        index = self.num_calls - 1
        if said.calls and said.calls[-1].index == index:
            last = said.calls.pop()
            said.calls.append(CallDelta(index, last.arguments + arguments, last.id, last.name))
        else:
            said.calls.append(CallDelta(index, arguments))

    def _opener_of_call(self) -> str:
        return "" if self._is_llama else self._opener


class _State(Enum):
    START = auto()  # before the brace
    KEY = auto()  # before a key, or the end of the object
    IN_KEY = auto()
    COLON = auto()  # before the colon
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    NEXT = auto()  # after a value
    DONE = auto()
    BAD = auto()  # no call


class _CallText:
    """The JSON of one call, as it comes: its name, and what its arguments have gained (``fresh``)."""

    def __init__(self, names: Collection[str]) -> None:
        self.text = ""
        self.name: str | None = None
        self.fresh = ""
        self.state = _State.START
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
            case _State.IN_KEY:
                self._key += character
                if self._ends_string(character):
                    self.state = _State.COLON
            case _State.IN_VALUE:
                self._read_value(character)
            case _ if character in " \t\r\n":
                pass
            case _State.START:
                self.state = _State.KEY if character == "{" else _State.BAD
            case _State.KEY if character == '"':
                self._key, self.state, self._in_string = '"', _State.IN_KEY, True
            case _State.COLON if character == ":":
                self.state = _State.VALUE
            case _State.VALUE if character not in ",}]:":
                self._value, self._depth, self._in_string, self.state = "", 0, False, _State.IN_VALUE
                self._read_value(character)
            case _State.NEXT if character == ",":
                self.state = _State.KEY
            case _State.NEXT if character == "}":
                self._end()
            case _:
                self.state = _State.BAD

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
            if self.state is _State.NEXT:
                self.text = self.text[:-1]
                self.feed(character)
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        self._value += character
        if self._is_argument and self._value[0] == "{":
            self.fresh += character

    def _end_value(self) -> None:
        self.state = _State.NEXT
        if self._key != '"name"' and not self._is_argument:
            return
        try:
            value = json.loads(self._value)
        except ValueError:
            self.state = _State.BAD
            return
        if self._key == '"name"':
            if self.name is not None or not isinstance(value, str) or value not in self._names:
                self.state = _State.BAD
            else:
                self.name = value
        elif self._has_arguments:
            self.state = _State.BAD
        else:
            self._has_arguments = True
            if isinstance(value, str):  # some models write the JSON text as a string
                self.fresh += value
            elif not isinstance(value, dict):
                self.fresh += "{}" if value is None else self._value

    def _end(self) -> None:
        if self.name is None:
            self.state = _State.BAD
            return
        if not self._has_arguments:
            self.fresh += "{}"
        self.state = _State.DONE

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
        return not self._in_string
