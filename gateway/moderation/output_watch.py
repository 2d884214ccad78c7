# Watches one answer in windows that overlap. Where findings are blocked, the answer is delayed by one window, so that
# no passage up to half a window long is out before it was seen whole, be it interrupted by half a window of others.

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from gateway.calls.call import Call
from gateway.calls.hooks import NO_HOOK, ReplyHook
from gateway.moderation.classifier.classifier import evened, findings_of
from gateway.moderation.classifier.features import PASSAGE, passages
from gateway.moderation.classifier.plain import plain, visible
from gateway.moderation.moderator import Moderator
from gateway.moderation.rules.policy import CATEGORIES, Policy
from gateway.moderation.texts import is_refused, said_by, texts_of_reply, tools_given
from protocol.chat import FinishReason
from protocol.events import Delta
from protocol.inference import WholeReply
from router.catalog.targets import Target

WINDOW = PASSAGE  # characters
STEP = PASSAGE // 2  # between the ends of two windows
SHARED = WINDOW - STEP  # characters that two windows share

JUDGED = tuple(name for name in CATEGORIES if name not in ("attack", "harm", "illicit", "illicit/violent"))
GROUPS = ("secrets", "personal_data", "deny")  # an address in an answer is nothing to look at


def output_watch_of(moderator: Moderator, call: Call, target: Target) -> ReplyHook:
    """Return what watches the answer to a call, whichever target gives it."""
    policy = moderator.policy_for(call)
    return NO_HOOK if policy is None or policy.output == "off" else OutputWatch(moderator, call, policy)


class OutputWatch(ReplyHook):
    """Looks at an answer as it passes; where nothing can be blocked, right after."""

    def __init__(self, moderator: Moderator, call: Call, policy: Policy) -> None:
        self._moderator = moderator
        self._call = call
        self._policy = policy
        self._may_block = policy.may_block("output")
        self._given = tools_given(call.request)
        self._choices: dict[int, _Choice] = {}
        self._noted: set[str] = set()  # findings that were told of: once for an answer
        self._is_refused = False  # whether that was told of

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Return what may go out now. Raises ContentPolicyViolation."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice(self._given)
        windows = choice.take(delta)
        if self._may_block:
            self._look_at(windows)
        elif full := list(windows):
            asyncio.get_running_loop().call_soon(self._look_at, full)
        is_end = choice.has_ended = choice.has_ended or delta.finish_reason is not None
        if is_end and (delta.finish_reason is FinishReason.CONTENT_FILTER or choice.has_refused):
            self._note_refusal()
        passed = choice.release(everything=is_end)
        return passed if self._may_block else (delta,)

    def rest(self) -> Sequence[Delta]:
        """Return what was withheld of an answer that broke, looked at to its end. Raises ContentPolicyViolation."""
        out: list[Delta] = []
        for choice in self._choices.values():
            self._look_at(choice.rest())
            out += choice.release(everything=True)
        return out if self._may_block else ()

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Look at a whole reply; others have their turn between windows. Raises ContentPolicyViolation."""
        looking = self._look_through(whole)
        if self._may_block:
            await looking
        else:
            self._moderator.keep(looking)
        return whole

    async def _look_through(self, whole: WholeReply) -> None:
        for text in texts_of_reply(whole, self._given):
            async for piece in self._moderator.reader.slices(text):
                for window in passages(piece):
                    self._look(window)
                    await asyncio.sleep(0)
        if is_refused(whole):
            self._note_refusal()

    def _note_refusal(self) -> None:
        if not self._is_refused:
            self._is_refused = True
            self._moderator.note_refusal(self._call)

    def _look_at(self, windows: Iterable[str]) -> None:
        for window in windows:
            self._look(window)

    def _look(self, window: str) -> None:
        moderator = self._moderator
        found = [finding for finding in moderator.reader.rule_findings(window) if finding.group in GROUPS]
        found += findings_of(moderator.reader.logits(evened(plain(window).lower())), JUDGED)
        fresh = [finding for finding in found if finding.name not in self._noted]
        if fresh:
            self._noted.update(finding.name for finding in fresh)
            moderator.apply(self._call, self._policy, "output", fresh)


class _Choice:
    """One reply so far: its parts, and the deltas that wait for windows which they can be in."""

    __slots__ = ("_current", "_given", "_held", "_parts", "_said", "has_ended", "has_refused")

    def __init__(self, given: frozenset[str] = frozenset()) -> None:
        self.has_refused = self.has_ended = False
        self._given = given  # names of tools that the caller gave
        self._said = 0  # visible characters, of all parts
        self._parts: dict[object, _Part] = {}
        self._current = _Part()
        self._held: deque[tuple[Delta, tuple[tuple[_Part, int], ...]]] = deque()  # with where each ends in its parts

    def take(self, delta: Delta) -> Iterator[str]:
        """Take a delta in, and yield the windows to look at now; at the end of the reply all that is left.

        Where the reply goes on elsewhere, in the answer after the thinking or in the next call, what was said before is
        looked at; should that go on later, its last words are seen with what follows.
        """
        self.has_refused = self.has_refused or bool(delta.refusal)
        ends: list[tuple[_Part, int]] = []
        for kind, text in said_by(delta, self._given):
            part = self._parts.get(kind)
            if part is None:
                part = self._parts[kind] = _Part()
            if part is not self._current:
                yield from self._current.windows(is_over=True)
                self._current.left_at = self._said
                self._current = part
            self._said += part.add(text)
            ends.append((part, part.said))
        is_end = delta.finish_reason is not None
        yield from self._current.windows(is_over=is_end)
        self._held.append((delta, tuple(ends) or ((self._current, self._current.said),)))

    def rest(self) -> Iterator[str]:
        """Yield the windows that were not looked at, of a reply that goes on no more."""
        yield from self._current.windows(is_over=True)

    def release(self, *, everything: bool) -> list[Delta]:
        """Return the deltas that every window they can be in has passed, and those of parts left so long ago that what
        follows them there is another passage. What is said aloud waits for all of its transcript, which may come
        later."""
        out: list[Delta] = []
        while self._held and (everything or self._may_leave(*self._held[0])):
            out.append(self._held.popleft()[0])
        return out

    def _may_leave(self, delta: Delta, ends: tuple[tuple[_Part, int], ...]) -> bool:
        return delta.spoken is None and all(self._may_go(part, end) for part, end in ends)

    def _may_go(self, part: _Part, end: int) -> bool:
        return end <= part.passed or (part is not self._current and self._said - part.left_at >= SHARED)


class _Part:
    """What is one text to a reader of the reply: its words, its thinking, the name or the arguments of one call.
    Places count visible characters."""

    __slots__ = ("_looked", "_tail", "left_at", "passed", "said")

    def __init__(self) -> None:
        self.said = 0
        self.passed = 0  # up to where no window has anything with what follows
        self.left_at = 0  # what the whole choice had said when another part went on
        self._looked = 0  # up to the end of the last window
        self._tail = ""  # the last characters said, as many as the next window needs

    def add(self, text: str) -> int:
        """Take a piece in, and return its visible length."""
        text = visible(text)
        self._tail += text
        self.said += len(text)
        return len(text)

    def windows(self, *, is_over: bool) -> Iterator[str]:
        """Yield the windows that are full and not looked at yet; where the text is over what is left as well."""
        place = len(self._tail) - (self.said - self._looked)  # in the tail, of what was not looked at
        while (fresh := self.said - self._looked) >= STEP or (is_over and fresh):
            step = min(STEP, fresh)
            place += step
            self._looked += step
            yield self._tail[max(0, place - WINDOW) : place]
        self._tail = self._tail[max(0, place - SHARED) :]
        self.passed = max(self.passed, self._looked - SHARED)
