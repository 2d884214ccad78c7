# What may watch a reply, and change what its client gets; and what keeps how it ends.

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from billing.core.records import UsageRecord
from gateway.calls.call import Call
from gateway.core.errors import ContentPolicyViolation
from protocol.events import Delta, Event
from protocol.inference import WholeReply
from protocol.usage import Usage
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

    async def released(self, *, is_over: bool) -> Sequence[Delta]:
        """Return what ``delta`` withheld until something was known of it; asked after each delta, and at the end, when
        all of it goes out (``is_over``). May wait, and raises as ``delta`` does."""
        return ()

    def rest(self) -> Sequence[Delta]:
        """The upstream broke in mid-stream: return what was withheld and may go out. Raises as ``delta`` does."""
        return ()

    async def whole(self, whole: WholeReply) -> WholeReply:
        """Return what the client gets in place of a reply that came whole, without deltas. Raises
        ContentPolicyViolation as ``delta`` does."""
        return whole

    def close(self, record: UsageRecord) -> None:
        """The journal knows how the call ended; the last bytes have not left yet."""


NO_HOOK = ReplyHook()  # where there is nothing to watch

# Called when an upstream has given its first token, or its whole reply; nothing has gone to the client yet.
HookMaker = Callable[[Call, Target], ReplyHook]

# How a whole reply ends: the last events of a stream, all of it, or (an item of a batch) why it may not go out.
Ending = list[Event] | tuple[WholeReply, Usage] | ContentPolicyViolation

# Keeps an ending while the reply's ``record`` is known and its account is still open. What it raises breaks the reply.
R = TypeVar("R")  # the reply, as the one who keeps its ending knows it
KeepEnding = Callable[[R, Ending], Awaitable[None]]
