# The part of our own engine's reply that another replica needs to continue it; and the events of several
# replicas as those of one reply.

from __future__ import annotations

from array import array

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from gateway.upstreams.wire.base import Resume
from protocol.completions import CompletionRequest
from protocol.decoding import NOT_JSON
from protocol.events import Delta, Event, ToolCallDelta, UsageReport
from protocol.inference import Request, choices_asked

MOST_TOKENS = 2**17  # of one reply, kept to go on from


class Progress:
    """How far one reply is, and on which replicas. Show it every event, in order."""

    def __init__(self, request: Request) -> None:
        self.tokens_made = 0
        self.is_counted = False  # its usage has come
        self._tokens = array("I")
        self._unfinished = choices_asked(request)  # replies that have not said why they ended
        self._fits = self._unfinished == 1  # the engine goes on with one reply at a time
        self._text_chars = 0  # of the reply's text, as its reader has it
        self._calls: dict[int, int] = {}  # characters of each tool call's arguments, as its reader has them
        self._retold: dict[int, int] = {}  # how many of them the current replica has still to repeat
        logprobs = getattr(request, "logprobs", None)
        self._is_scored = logprobs is not None and logprobs is not False
        self._scores = 0  # tokens whose log-probabilities its reader has: the first ones
        self._is_first = True  # no other replica has had the reply
        self._gpu_seconds = 0.0  # of the current replica
        self._gpu_seconds_before = 0.0  # of those that had the reply before it
        if isinstance(request, CompletionRequest) and request.echo:
            echoed = request.prompt[0] if isinstance(request.prompt, list) else request.prompt
            self._fits = self._fits and isinstance(echoed, str)  # the text of tokens is known to the engine alone
            self._text_chars = -len(echoed) if isinstance(echoed, str) else 0

    @property
    def is_finished(self) -> bool:
        """Whether every reply has said why it ended."""
        return self._unfinished <= 0

    def follow(self, events: list[Event]) -> list[Event]:
        """Take in events; return them as events of the whole reply, whichever replica they are of."""
        if not self._is_first:
            events = [joined for event in events if (joined := self._joined(event)) is not None]
        for event in events:
            if isinstance(event, Delta):
                self._take(event)
            elif isinstance(event, UsageReport):
                self.is_counted = True
        return events

    def resume(self) -> Resume | None:
        """Return from where another replica can go on, or ``None`` if none can, or need."""
        # A token whose text was kept back has no score yet: it is made again, and scored.
        kept = self._tokens[: self._scores] if self._is_scored else self._tokens
        is_told = self._text_chars > 0 or self._calls
        if not self._fits or (self.is_finished and self.is_counted) or (is_told and not kept):
            return None
        return Resume(tuple(kept), max(0, self._text_chars))

    def begin_again(self, resume: Resume) -> None:
        """Another replica goes on from ``resume``."""
        self._is_first = False
        self.tokens_made = len(resume.token_ids)
        del self._tokens[self.tokens_made :]
        self._retold = dict(self._calls)
        self._gpu_seconds_before += self._gpu_seconds
        self._gpu_seconds = 0.0

    def _joined(self, event: Event) -> Event | None:
        """Return what an event of a later replica adds to the reply, or ``None``: a role, or what was told before."""
        match event:
            case UsageReport(usage):
                return UsageReport(replace(usage, gpu_seconds=usage.gpu_seconds + self._gpu_seconds_before))
            case Delta():
                if self.is_finished:
                    return None
                calls = tuple(rest for call in event.tool_calls if (rest := self._untold(call)) is not None)
                seconds = event.gpu_seconds and event.gpu_seconds + self._gpu_seconds_before
                delta = replace(event, tool_calls=calls, gpu_seconds=seconds)
                says = delta.has_content or delta.token_ids or delta.logprobs is not None or delta.finish_reason
                return delta if says else None
        return event

    def _untold(self, call: ToolCallDelta) -> ToolCallDelta | None:
        """Return what a piece of a call adds: a replica that goes on tells each call anew, under an id of its own."""
        if (told := self._retold.get(call.index)) is None:
            return call
        self._retold[call.index] = max(0, told - len(call.arguments))
        return ToolCallDelta(call.index, call.arguments[told:]) if len(call.arguments) > told else None

    def _take(self, delta: Delta) -> None:
        self.tokens_made += len(delta.token_ids)
        self._text_chars += len(delta.text)
        if delta.gpu_seconds:
            self._gpu_seconds = delta.gpu_seconds - self._gpu_seconds_before
        if delta.finish_reason is not None:
            self._unfinished -= 1
        for call in delta.tool_calls:
            self._calls[call.index] = self._calls.get(call.index, 0) + len(call.arguments)
        if delta.refusal or delta.reasoning or self.tokens_made > MOST_TOKENS:
            self._fits = False
        if self._fits:
            try:
                self._tokens.extend(delta.token_ids)
            except OverflowError:  # no token's id
                self._fits = False
            if self._is_scored and delta.logprobs is not None:
                self._scores += _count_scores(delta.logprobs)


class _Scores(Struct, frozen=True):
    content: list[Raw] | None = None  # of chat
    tokens: list[Raw] | None = None  # of completions


def _count_scores(logprobs: Raw) -> int:
    try:
        scores = msgspec.json.decode(logprobs, type=_Scores)
    except NOT_JSON:
        return 0
    return len(scores.content or scores.tokens or ())
