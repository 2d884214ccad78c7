# Watches one answer in windows that overlap. Where findings are blocked, the answer is held back by one window, so that
# no passage up to half a window long is out before it was seen whole.

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from gateway.answering.call import Call
from gateway.answering.hooks import ReplyHook
from gateway.providers.base import WholeReply
from gateway.safety.classifier import findings_of
from gateway.safety.guard import Guard
from gateway.safety.plain import plain
from gateway.safety.policy import CATEGORIES, Policy
from gateway.safety.texts import texts_of_reply
from protocol.chat import FinishReason
from protocol.events import Delta
from router.targets import Target

WINDOW = 400  # characters
STEP = 200  # between the ends of two windows; what they share is as long

JUDGED = tuple(name for name in CATEGORIES if name not in ("attack", "harm", "illicit", "illicit/violent"))
GROUPS = ("secrets", "personal_data", "deny")  # an address in an answer is nothing to look at


def output_watch_of(guard: Guard, call: Call, target: Target) -> ReplyHook:
    """Return what watches the answer to a call, whichever target gives it."""
    policy = guard.policy_for(call)
    return NOBODY if policy is None or policy.output == "off" else OutputWatch(guard, call, policy)


class OutputWatch(ReplyHook):
    """Looks at an answer as it passes."""

    def __init__(self, guard: Guard, call: Call, policy: Policy) -> None:
        self._guard = guard
        self._call = call
        self._policy = policy
        self._may_block = policy.output == "block" or "block" in policy.levels.values()
        self._choices: dict[int, _Choice] = {}
        self._noted: set[str] = set()  # findings that were told of: once for an answer

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Return what may go out now. Raises ContentPolicyViolation."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice()
        choice.take(delta)
        is_end = delta.finish_reason is not None
        for window in choice.full_windows(is_end=is_end):
            self._look(window)
        if is_end and (delta.finish_reason is FinishReason.CONTENT_FILTER or choice.has_refused):
            self._guard.note_refusal(self._call)
        passed = choice.release(everything=is_end)
        return passed if self._may_block else (delta,)

    def whole(self, whole: WholeReply) -> None:
        """Look at a whole reply. Raises ContentPolicyViolation."""
        for text in texts_of_reply(whole):
            for start in range(0, max(1, len(text) - STEP), STEP):
                self._look(text[start : start + WINDOW])

    def _look(self, window: str) -> None:
        guard = self._guard
        found = [finding for finding in guard.rule_findings(window) if finding.group in GROUPS]
        found += findings_of(guard.logits(" ".join(plain(window).lower().split())), JUDGED)
        fresh = [finding for finding in found if finding.name not in self._noted]
        if fresh:
            self._noted.update(finding.name for finding in fresh)
            guard.apply(self._call, self._policy, "output", fresh)


class _Choice:
    """One reply's text so far: what was not yet looked at, and the deltas that wait for it."""

    __slots__ = ("_held", "_looked", "_said", "_tail", "has_refused")

    def __init__(self) -> None:
        self.has_refused = False
        self._tail = ""  # the last characters said, as many as the next window needs
        self._said = 0  # characters
        self._looked = 0  # characters up to the end of the last window
        self._held: deque[tuple[int, Delta]] = deque()  # with where each ends

    def take(self, delta: Delta) -> None:
        text = delta.reasoning + delta.text + delta.refusal
        if delta.tool_calls:
            text += "".join(call.arguments for call in delta.tool_calls)
        self.has_refused = self.has_refused or bool(delta.refusal)
        self._tail += text
        self._said += len(text)
        self._held.append((self._said, delta))

    def full_windows(self, *, is_end: bool) -> Iterator[str]:
        """Yield the windows that are full and not looked at yet; at the end of the reply what is left as well."""
        place = len(self._tail) - (self._said - self._looked)  # in the tail, of what was not looked at
        while (fresh := self._said - self._looked) >= STEP or (is_end and fresh):
            step = min(STEP, fresh)
            place += step
            self._looked += step
            yield self._tail[max(0, place - WINDOW) : place]
        self._tail = self._tail[max(0, place - (WINDOW - STEP)) :]

    def release(self, *, everything: bool) -> list[Delta]:
        """Return the deltas that every window they can be in has passed."""
        out: list[Delta] = []
        while self._held and (everything or self._held[0][0] <= self._looked - (WINDOW - STEP)):
            out.append(self._held.popleft()[1])
        return out


class _Nobody(ReplyHook):
    """Watches nothing."""


NOBODY = _Nobody()
