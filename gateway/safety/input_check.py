# The check of one call's input: rules first, then the classifier and an outside checker beside the call.

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from time import perf_counter
from typing import Protocol, TypeVar

from gateway.answering.call import Call
from gateway.errors import ContentPolicyViolation, ContentUnchecked
from gateway.safety.findings import Finding
from gateway.safety.guard import Guard
from gateway.safety.policy import Policy
from gateway.safety.texts import judged_texts

HEAD_START = 0.005  # seconds that the classifier leaves to calls on their way out; no model answers as fast


class Open(Protocol):
    """What was begun for a call, and must be closed when nobody will have it."""

    async def close(self) -> None: ...


Answer = TypeVar("Answer", bound=Open)


def input_check_of(guard: Guard, call: Call) -> InputCheck | None:
    """Return the check of a call's input, or ``None`` where no policy asks for one."""
    policy = guard.policy_for(call)
    return None if policy is None or policy.input == "off" else InputCheck(guard, call, policy)


class InputCheck:
    """Runs once, beside one call."""

    def __init__(self, guard: Guard, call: Call, policy: Policy) -> None:
        self.violation: ContentPolicyViolation | ContentUnchecked | None = None  # the verdict, once the answer is there
        self._guard = guard
        self._call = call
        self._policy = policy
        self._leash: asyncio.Timeout | None = None  # on the call while it waits for its upstream
        self._is_due = asyncio.Event()  # its answer waits for the verdict

    async def beside(self, send: Callable[[], Awaitable[Answer]]) -> Answer:
        """Apply the rules, then ``send`` the call and judge it meanwhile; return its answer once the verdict is there.

        Raises ContentPolicyViolation when the rules forbid the call; or, as ContentUnchecked, when the verdict comes
        before the answer: then the upstream is left. When it comes after, it is in ``violation``, and the answer is the
        caller's to close.
        """
        call = self._call
        self._apply(await self._guard.find_by_form(call.request, call.extra, call.native))
        judging = asyncio.create_task(self._judge())
        if call.is_batch_item:  # nobody waits for its first token, and what is not sent costs nothing
            self._is_due.set()
            await judging
            if self.violation is not None:
                raise self.violation
            return await send()
        try:
            async with asyncio.timeout(None) as self._leash:
                answering = await send()
        except BaseException as exc:
            judging.cancel()
            if isinstance(exc, TimeoutError) and self.violation is not None:
                raise self.violation from None
            raise
        finally:
            self._leash = None
        answered = perf_counter()
        self._is_due.set()
        try:
            await judging
        except BaseException:
            await answering.close()
            raise
        self._guard.metrics.safety_wait.observe(perf_counter() - answered)
        return answering

    async def _judge(self) -> None:
        guard = self._guard
        texts = judged_texts(self._call.request)
        asking = asyncio.create_task(guard.checker.check(texts)) if guard.checker.is_on and texts else None
        try:
            with suppress(TimeoutError):  # calls that come together are all sent first
                async with asyncio.timeout(HEAD_START):
                    await self._is_due.wait()
            found = await guard.judge(texts)
            if asking is not None:
                found += await asking
            self._apply(found)
        except (ContentPolicyViolation, ContentUnchecked) as exc:
            self.violation = exc
            if self._leash is not None:
                self._leash.reschedule(asyncio.get_running_loop().time())
        finally:
            if asking is not None:
                asking.cancel()

    def _apply(self, findings: Iterable[Finding]) -> None:
        self._guard.apply(self._call, self._policy, "input", findings)
