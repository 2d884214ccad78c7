# What may watch a reply, and change what its client gets.

from __future__ import annotations

from collections.abc import Callable, Sequence

from billing.core.records import UsageRecord
from gateway.calls.call import Call
from protocol.events import Delta
from protocol.inference import WholeReply
from router.catalog.targets import Target


class ReplyHook:
    """Watches one reply, from its first event (when it is made) to its close. Each method may be left out."""

    def delta(self, delta: Delta) -> Sequence[Delta]:
        """Return what the client gets in place of ``delta``; nothing withholds it.

        What was withheld can go out with a later delta: the one with a finish reason comes, or ``rest`` is called.
        Raises ContentPolicyViolation to end the reply here: a stream with the finish reason ``content_filter``, a whole
        answer with that error. What was used is owed, and the usage record's status is ``blocked``.
        """
        return (delta,)

    def rest(self) -> Sequence[Delta]:
        """The upstream broke in mid-stream: return what was withheld and may go out. Raises as ``delta`` does."""
        return ()

    async def whole(self, whole: WholeReply) -> None:
        """Look at a reply that came whole, in place of its deltas. Raises ContentPolicyViolation as ``delta`` does."""

    def close(self, record: UsageRecord) -> None:
        """The journal knows how the call ended; the last bytes have not left yet."""


# Called when an upstream has given its first token, or its whole reply; nothing has gone to the client yet.
HookMaker = Callable[[Call, Target], ReplyHook]
