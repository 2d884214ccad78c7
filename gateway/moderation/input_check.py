# The check of one call's input: rules first, while its hold is waited for, then the classifier and an outside checker
# beside the call.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

from gateway.calls.call import Call
from gateway.core.errors import ContentPolicyViolation, ContentUnchecked
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.moderator import Moderator
from gateway.moderation.rules.policy import Policy
from gateway.moderation.texts import judged_texts, texts_of, told_texts
from protocol.errors import TooLarge

HEAD_START = 0.005  # seconds that the classifier leaves to calls on their way out; no model answers as fast
TURNS = 8  # of the event loop that the rules leave at the most, one for each call on its way out
MOST_TEXT = 8 * 1024 * 1024  # characters: twice a million tokens of English, and half a minute of looking
HEAD_STARTS = 4  # that it leaves at the most, while others are on their way out


class Open(Protocol):
    """What was begun for a call, and must be closed when it will not be used."""

    def close(self) -> None: ...


Answer = TypeVar("Answer", bound=Open)


def input_check_of(moderator: Moderator, call: Call) -> InputCheck[Any] | None:
    """Return the check of a call's input, or ``None`` where no policy asks for one.

    It has begun, and has to be stopped. Raises TooLarge for more text than is looked at.
    """
    policy = moderator.policy_for(call)
    if policy is None or policy.input == "off":
        return None
    if (
        call.size > MOST_TEXT
        and sum(map(len, texts_of(call.request, call.extra, call.as_message or call.shown))) > MOST_TEXT
    ):
        raise TooLarge(f"The content policy reads at most {MOST_TEXT:,} characters of a request. Send it in parts.")
    return InputCheck(moderator, call, policy)


class InputCheck(Generic[Answer]):
    """Runs once, beside one call. The rules begin as soon as something else is waited for."""

    def __init__(self, moderator: Moderator, call: Call, policy: Policy) -> None:
        self.violation: ContentPolicyViolation | ContentUnchecked | None = None  # the verdict, once the answer is there
        self.answered: Answer | None = None  # what was sent for, whatever came of the check
        self._moderator = moderator
        self._call = call
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._leash: asyncio.Timeout | None = None  # on the call while it waits for its upstream
        self._timer: asyncio.TimerHandle | None = None  # until the classifier begins
        self._rings = 0
        self._asking: asyncio.Task[list[Finding]] | None = None  # the outside checker
        self._judging: asyncio.Task[None] | None = None
        self._is_leaving = True
        moderator.leaving += 1
        self._looking = asyncio.create_task(self._look(after=min(moderator.leaving, TURNS)))

    def stop(self) -> None:
        """Look no further. After the call was answered, or was not, there is nothing to stop."""
        self._looking.cancel()
        self._has_left()

    async def send_and_judge(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Apply the rules, then ``send`` the call and judge it meanwhile; return its answer once the verdict is there.

        Raises ContentPolicyViolation when the rules forbid the call; or, as ContentUnchecked, when the verdict comes
        before the answer: then the upstream is left. When it comes after, it is in ``violation``, and the answer is the
        caller's to close. Nothing waits for a verdict that can forbid nothing.
        """
        self._apply(await self._looking)
        if self._call.is_batch_item:
            await self._judge_first()
            self.answered = await send()
            return self.answered
        self._loop.call_soon(self._has_left)  # when ``send`` has written
        self._timer = self._loop.call_later(HEAD_START, self._ring)
        self._ask()
        try:
            async with asyncio.timeout(None) as self._leash:
                self.answered = await send()
        except BaseException as exc:
            self._give_up()
            if isinstance(exc, TimeoutError) and self.violation is not None:
                raise self.violation from None
            raise
        finally:
            self._leash = None
        if self._policy.may_block("input"):
            await self._hold_until_judged(self.answered)
        return self.answered

    async def _judge_first(self) -> None:
        """Judge before anything is sent: no client waits for a line's first token, and what is not sent costs nothing.
        Raises the verdict."""
        self._ask()
        await self._judge()
        if self.violation is not None:
            raise self.violation

    async def _hold_until_judged(self, answering: Answer) -> None:
        """Have an answer that is here wait for its verdict; close it where its client does not."""
        answered = perf_counter()
        try:
            await self._begin()
        except BaseException:
            self._give_up()
            answering.close()
            raise
        self._moderator.metrics.safety_wait.observe(perf_counter() - answered)

    async def _look(self, after: int) -> list[Finding]:
        """Look by the rules after so many turns of the event loop: of a crowd one call in each, and what has come
        meanwhile, holds above all, goes first."""
        for _ in range(after):
            await asyncio.sleep(0)
        native = self._call.as_message or self._call.shown
        return await self._moderator.reader.find_by_form(self._call.request, self._call.extra, native)

    def _ask(self) -> None:
        if self._moderator.checker.judges("input") and (texts := judged_texts(self._call.request)):
            self._asking = asyncio.create_task(self._moderator.checker.check(texts))

    def _ring(self) -> None:
        """Let the classifier begin, unless others are on their way out: calls that come together are all sent first."""
        self._rings += 1
        if self._moderator.leaving and self._rings < HEAD_STARTS:
            self._timer = self._loop.call_later(HEAD_START, self._ring)
        else:
            self._begin()

    def _begin(self) -> asyncio.Task[None]:
        """Judge, if that has not begun."""
        if self._judging is None:
            assert self._timer is not None
            self._timer.cancel()
            self._judging = self._moderator.keep(self._judge())
        return self._judging

    async def _judge(self) -> None:
        try:
            found = await self._moderator.reader.judge(judged_texts(self._call.request))
            found += await self._moderator.reader.judge_told(told_texts(self._call.request))
            if self._asking is not None:
                found += await self._asking
            self._apply(found)
        except (ContentPolicyViolation, ContentUnchecked) as exc:
            self.violation = exc
            if self._leash is not None:
                self._leash.reschedule(self._loop.time())
        finally:
            if self._asking is not None:
                self._asking.cancel()

    def _give_up(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        for task in (self._judging, self._asking):
            if task is not None:
                task.cancel()

    def _has_left(self) -> None:
        if self._is_leaving:
            self._is_leaving = False
            self._moderator.leaving -= 1

    def _apply(self, findings: Iterable[Finding]) -> None:
        self._moderator.apply(self._call, self._policy, "input", findings)
