# Has the outside checker judge an answer, so much at a time. Where what it finds is blocked, the answer is held back
# until its verdict is there; where it is flagged, nothing waits.

from __future__ import annotations

from collections.abc import Sequence

from gateway.calls.call import Call
from gateway.calls.hooks import NO_HOOK, ReplyHook
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.moderator import Moderator
from gateway.moderation.rules.policy import Policy
from gateway.moderation.texts import judged_texts, texts_of_reply
from protocol.events import Delta
from protocol.inference import WholeReply
from router.catalog.targets import Target

STEP = 1_000  # characters of one reply that are judged together
SHARED = 500  # of what was judged before that are shown again, so that no passage is cut


def output_guard_of(moderator: Moderator, call: Call, target: Target) -> ReplyHook:
    """Return what has the answer to a call judged outside, where the policy asks for it."""
    if not moderator.checker.judges("output"):
        return NO_HOOK
    policy = moderator.policy_for(call)
    return NO_HOOK if policy is None or policy.output == "off" else OutputGuard(moderator, call, policy)


class OutputGuard(ReplyHook):
    """Holds one answer until it was judged; where nothing can be blocked, judges what has passed."""

    def __init__(self, moderator: Moderator, call: Call, policy: Policy) -> None:
        self._moderator = moderator
        self._call = call
        self._policy = policy
        self._may_block = policy.may_block("output")
        self._asked = judged_texts(call.request)
        self._held: list[Delta] = []
        self._seen: dict[int, str] = {}  # the end of what was judged, by the index of its reply
        self._fresh: dict[int, str] = {}  # what was not
        self._is_due = False

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Take a delta in, and withhold it where it may be forbidden."""
        said = delta.reasoning + delta.text + delta.refusal + "".join(call.arguments for call in delta.tool_calls)
        if said:
            self._fresh[delta.index] = fresh = self._fresh.get(delta.index, "") + said
            self._is_due = self._is_due or (len(fresh) >= STEP and delta.spoken is None)  # that waits for all of it
        self._is_due = self._is_due or delta.finish_reason is not None
        if not self._may_block:
            return (delta,)
        self._held.append(delta)
        return ()

    async def released(self, *, is_over: bool) -> Sequence[Delta]:
        """Return what was withheld once it is judged: so much of it, or all that there will be. Raises
        ContentPolicyViolation."""
        if not (self._is_due or is_over):
            return ()
        self._is_due = False
        for index, fresh in self._fresh.items():
            said = self._seen.get(index, "") + fresh
            self._seen[index] = said[-SHARED:]
            if self._may_block:
                await self._judge(said)
            else:
                self._moderator.keep(self._judge(said))
        self._fresh = {}
        passed, self._held = self._held, []
        return passed

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Judge a whole reply. Raises ContentPolicyViolation."""
        if said := "\n".join(filter(None, texts_of_reply(whole))):
            if self._may_block:
                await self._judge(said)
            else:
                self._moderator.keep(self._judge(said))
        return whole

    async def _judge(self, said: str) -> None:
        found: list[Finding] = await self._moderator.checker.check(self._asked, said)
        self._moderator.apply(self._call, self._policy, "output", found)
