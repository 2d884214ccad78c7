# GPT-OSS' chat format (OpenAI's harmony): a reply is messages, each with a header that names its channel: thoughts
# ("analysis"), the answer ("final"), calls of tools ("commentary" with a recipient). Headers and ends are control
# tokens, found by their ids: what only spells one is text. Of a header one mark is left in the text, of code points
# that no text has, so that stop strings never match it; the reader tells by it what follows.

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from gpu_backend.server.checkpoint.tokens import Detokenizer, TextCodec
from gpu_backend.server.checkpoint.tool_calls import CallDelta, ParsedText

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")  # of a message, each beginning the next one's header
LAST = ("<|call|>", "<|return|>")  # of a reply
FINAL = f"{CHANNEL}final{MESSAGE}"  # a header: the answer begins at once
# Marks are of U+FDD0 … U+FDEF, which Unicode keeps free of any character; in text they become U+FFFD.
THOUGHTS, ANSWER, CALL, ARGUMENTS = "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
DIGITS = tuple(map(chr, range(0xFDE0, 0xFDF0)))  # of the name of what is called
_REPLACED = dict.fromkeys(range(0xFDD0, 0xFDF0), "\ufffd")
_PARTS = re.compile(f"[{THOUGHTS}{ANSWER}]|{CALL}[{DIGITS[0]}-{DIGITS[-1]}]*{ARGUMENTS}|[^{THOUGHTS}-{ARGUMENTS}]+")
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([!-~]+)")


def is_harmony(template: str) -> bool:
    """Whether a chat template writes this format."""
    return all(token in template for token in ("<|start|>assistant", CHANNEL, MESSAGE))


class HarmonyDetokenizer:
    """As ``Detokenizer``: turns a reply's tokens into text as they come, with a mark where a message begins.

    ``in_answer``: the prompt ends with the header ``FINAL``, else with the role of a header.
    """

    def __init__(self, codec: TextCodec, *, in_answer: bool) -> None:
        self._words = Detokenizer(codec)
        self._controls = {codec.token_id(text): text for text in (CHANNEL, MESSAGE, CONSTRAIN, *ENDS)}
        self._header: list[str] | None = None if in_answer else []  # None: within a message
        self._has_begun = in_answer  # any message

    def feed(self, token_id: int) -> str:
        """Return the text that this token completes, or the mark."""
        control = self._controls.get(token_id)
        if control is None:
            text = self._words.feed(token_id).translate(_REPLACED)
            if self._header is None:
                return text
            self._header.append(text)
            return ""
        text = self._words.finish()
        if control in ENDS:
            text, self._header = text if self._header is None else "", []
            return text
        if self._header is None:
            return text
        if control != MESSAGE:
            self._header.append(CALL if control == CHANNEL else " ")  # a mark that no header has otherwise
            return ""
        mark, self._header, self._has_begun = _mark_of("".join(self._header)), None, True
        return mark

    def finish(self) -> str:
        """Return what is left: of a reply that has no message at all, its text."""
        rest = self._words.finish()
        if self._header is not None and not self._has_begun:
            return "".join(self._header).replace(CALL, "") + rest
        return rest if self._header is None else ""


def _mark_of(header: str) -> str:
    """Return the mark of a message by its header, in which CALL stands for the control token before the channel."""
    role, _, channel = header.partition(CALL)
    if called := _RECIPIENT.search(f"{role} {channel}"):
        return CALL + "".join(DIGITS[int(digit, 16)] for digit in called[1].encode().hex()) + ARGUMENTS
    return THOUGHTS if channel.split()[:1] == ["analysis"] else ANSWER


class HarmonyReader:
    """Reads the text of one reply of a ``HarmonyDetokenizer``: thoughts, content and calls.

    A call of no tool in ``names`` is content. Messages of the same kind have an empty line between them.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str], most: int | None = None) -> None:
        self._names = names
        self._new_id = new_id
        self._most = most  # calls; what follows them is not told
        self._kind = ANSWER
        self._told: set[str] = set()  # kinds of which there was a message with words
        self._is_new = False  # the message has no words yet
        self._has_arguments = False  # the last call
        self.num_calls = 0

    def feed(self, text: str) -> ParsedText:
        """Take in text; return what it says."""
        parsed, thoughts, content = ParsedText(), list[str](), list[str]()
        for part in _PARTS.findall(text):
            if part[0] == CALL:
                self._begin_call("".join(format(ord(digit) & 15, "x") for digit in part[1:-1]), parsed)
            elif part in (THOUGHTS, ANSWER):
                self._kind, self._is_new = part, True
            elif self._kind == CALL:
                self._has_arguments = True
                parsed.add_call(CallDelta(self.num_calls - 1, part))
            else:
                gap = "\n\n" if self._is_new and self._kind in self._told else ""
                self._is_new = False
                self._told.add(self._kind)
                if self._kind == THOUGHTS:
                    thoughts.append(gap + part)
                elif self._kind == ANSWER:
                    content.append(gap + part)
        parsed.reasoning, parsed.content = "".join(thoughts), "".join(content)
        return parsed

    def finish(self) -> ParsedText:
        """Return what was left out: the arguments of a last call that has none."""
        lacks = self._kind == CALL and not self._has_arguments
        return ParsedText(calls=[CallDelta(self.num_calls - 1, "{}")] if lacks else [])

    def _begin_call(self, digits: str, parsed: ParsedText) -> None:
        name = bytes.fromhex(digits).decode()
        if name not in self._names:
            self._kind, self._is_new = ANSWER, True
        elif self.num_calls == self._most:
            self._kind = ""
        else:
            self._kind = CALL
            self._has_arguments = False
            parsed.add_call(CallDelta(self.num_calls, "", self._new_id(), name))
            self.num_calls += 1
