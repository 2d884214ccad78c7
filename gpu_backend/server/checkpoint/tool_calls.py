# Tool calls out of a reply's text, while it comes. Whatever the pieces, the same content, calls and arguments come out:
# the text is read character by character, and nothing is returned that a later character could take back.

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpu_backend.server.checkpoint.tool_call_text import CallText


class ToolStyle(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, among text; Qwen's too
    HARMONY = "harmony"  # GPT-OSS': a message of its own, which ``harmony.py`` reads
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
class ParsedText:
    """What a stretch of text adds to the message."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)
    reasoning: str = ""

    def add_call(self, gained: CallDelta) -> None:
        """Add what a call gained: of the last one it is part of the same piece."""
        if self.calls and (last := self.calls[-1]).index == gained.index:
            self.calls[-1] = replace(last, arguments=last.arguments + gained.arguments)
        else:
            self.calls.append(gained)


def join_parsed(first: ParsedText, second: ParsedText) -> ParsedText:
    """Return both as one."""
    both = ParsedText(first.content + second.content, list(first.calls), first.reasoning + second.reasoning)
    for call in second.calls:
        both.add_call(call)
    return both


class ToolCallReader:
    """Reads one reply. What looks like a call of no tool in ``names`` is content, as are calls that are no JSON.

    Blanks around calls are dropped; a call that the reply's end cuts off keeps the arguments that it had.
    """

    def __init__(
        self, style: ToolStyle, names: Collection[str], new_id: Callable[[], str], most: int | None = None
    ) -> None:
        self._opener = OPEN if style is ToolStyle.HERMES else "{"
        self._is_llama = style is ToolStyle.LLAMA
        self._names = names
        self._new_id = new_id
        self._most = most  # calls; what follows them is not told
        self._blanks: list[str] = []  # not yet told, before a word or a call
        self._word = ""  # what may become an opener or a closer
        self._content: list[str] = []  # what is certain, until it is returned
        self._gained: list[_Gained] = []
        self._is_plain = False  # Llama's: this reply is no call, or none any more
        self._call: CallText | None = None
        self._is_after_call = False
        self._told: str | None = None  # id of the call that is being told
        self.num_calls = 0

    def feed(self, text: str) -> ParsedText:
        """Take in text; return what is certain by now."""
        for character in text:
            if self._call is None and self.num_calls == self._most:
                break
            if self._call is None:
                self._read_text(character)
            else:
                self._read_call(self._call, character)
        return self._certain()

    def finish(self) -> ParsedText:
        """Return what was kept back: the reply has ended."""
        if self._call is not None and not self._told:
            self._content += [*self._blanks, self._opener_of_call(), self._call.text]
        elif self._call is None and ((held := "".join([*self._blanks, self._word])).strip() or not self.num_calls):
            self._content.append(held)
        self._blanks, self._word, self._call = [], "", None
        return self._certain()

    def _certain(self) -> ParsedText:
        calls = [CallDelta(each.index, "".join(each.arguments), each.id, each.name) for each in self._gained]
        parsed = ParsedText("".join(self._content), calls)
        self._content, self._gained = [], []
        return parsed

    def _read_text(self, character: str) -> None:
        self._word += character
        self._hold_blanks()
        while self._word and not self._may_open(self._word):
            self._is_plain = self._is_llama
            self._is_after_call = False
            self._content += [*self._blanks, self._word[0]]
            self._blanks, self._word = [], self._word[1:]
            self._hold_blanks()
        if self._is_after_call and self._word == CLOSE:
            self._blanks, self._word, self._is_after_call = [], "", False
        elif self._word == self._opener and not self._is_plain:
            self._word = ""
            self._call = CallText(self._names)
            if self._is_llama:
                self._call.feed("{")

    def _hold_blanks(self) -> None:
        """Part the blanks that the word begins with from it. In plain text they are content as any other character."""
        blanks = " \t\r\n;" if self._is_after_call and self._is_llama else " \t\r\n"
        if not self._is_plain and (word := self._word.lstrip(blanks)) != self._word:
            self._blanks.append(self._word[: len(self._word) - len(word)])
            self._word = word

    def _may_open(self, word: str) -> bool:
        """Whether ``word`` could still become an opener, or the closer of the call before."""
        closes = self._is_after_call and not self._is_llama and CLOSE.startswith(word)
        return closes or (not self._is_plain and self._opener.startswith(word))

    def _read_call(self, call: CallText, character: str) -> None:
        call.feed(character)
        if call.name is not None and self._told is None and not call.is_bad:
            self._told, self._blanks = self._new_id(), []
            self._gained.append(_Gained(self.num_calls, self._told, call.name))
            self.num_calls += 1
        if self._told is not None and (fresh := call.take_fresh()):
            index = self.num_calls - 1
            if not self._gained or self._gained[-1].index != index:
                self._gained.append(_Gained(index))
            self._gained[-1].arguments.append(fresh)
        if call.is_done or (call.is_bad and self._told is not None):
            self._call, self._told, self._is_after_call = None, None, True
        elif call.is_bad:
            again = self._opener_of_call() + call.text
            self._content += [*self._blanks, again.removesuffix("<")]
            self._call, self._blanks, self._is_plain = None, [], self._is_llama
            if again.endswith("<"):
                self._read_text("<")

    def _opener_of_call(self) -> str:
        return "" if self._is_llama else self._opener


@dataclass(slots=True)
class _Gained:
    """What a call gained since it was last told."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)
