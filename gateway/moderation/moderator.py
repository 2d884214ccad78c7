# The content policy in the path of an answer. Rules look at a request before anything leaves; the classifier and an
# outside checker judge it beside the call, and the first token waits for their verdict; answers pass a watch of their
# own. A team without a policy pays for two comparisons.

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

import structlog

from billing.core.errors import RateLimited
from gateway.calls.call import Call
from gateway.core.errors import ContentPolicyViolation, ContentUnchecked
from gateway.core.settings import Safety, TeamSafety
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import FAILED, OutsideChecker
from gateway.moderation.classifier.classifier import Classifier
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.encoder_reader import Reader
from gateway.moderation.policy_events import PolicyEvents
from gateway.moderation.reading.encoder import is_installed
from gateway.moderation.redaction import redacted_call
from gateway.moderation.rules.policy import Policy, Stage, policy_of
from gateway.moderation.text_reader import TextReader
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from protocol.errors import UnsupportedParameter
from protocol.inference import NativeRequest, Request
from protocol.serving.off_loop import off_loop
from router.prompt_size.bounds import is_spoken

# Of a call by its endpoint; of others "messages".
PARAMS = {
    "embeddings": "input",
    "rerank": "documents",
    "images": "prompt",
    "images.edits": "prompt",
    "speech": "input",
    "transcriptions": "prompt",
    "translations": "prompt",
    "realtime": "item",
    "responses": "input",
    "responses.compact": "input",
    "completions": "prompt",
}

UNCHECKED_ANSWER = "The content of this answer could not be checked. Try again later."

log = structlog.get_logger()


class Moderator:
    """Keeps the content policy of one process, for all editions of its services; ``follow`` changes the policy."""

    def __init__(
        self,
        deployment: Safety,
        classifier: Classifier,
        events: PolicyEvents,
        abuse: AbuseWatch,
        checker: OutsideChecker,
        metrics: Metrics,
    ) -> None:
        self.reader = TextReader(classifier)
        self._encoder = Reader(metrics)
        self.checker = checker
        self.metrics = metrics
        self.leaving = 0  # calls that are looked at and have not been sent yet
        self._events = events
        self._abuse = abuse
        self._behind: set[asyncio.Task[None]] = set()  # what is looked at now, waited for or not
        self.follow(deployment)

    def follow(self, deployment: Safety) -> None:
        """Go by another policy of the deployment from now on."""
        self._deployment = deployment
        self._is_off = deployment.input == "off" == deployment.output
        self._policies: dict[TeamSafety | None, Policy] = {}
        self.reader.follow(deployment.deny)
        reads = is_installed() if deployment.reader is None else deployment.reader == "safety"
        self.reader.encoder = self._encoder if reads else None
        self._abuse.follow(deployment.abuse)
        self.checker.follow(deployment.checker)

    def start(self) -> None:
        """Start what reads input, where a policy of the deployment asks for it: the first call need not wait for it."""
        if self.reader.encoder is not None and self._deployment.input != "off":
            self.reader.encoder.start()

    async def close(self) -> None:
        """End what reads input."""
        await self._encoder.close()

    def policy(self, team: TeamSafety | None) -> Policy:
        """Return what holds for a team."""
        policy = self._policies.get(team)
        if policy is None:
            policy = self._policies[team] = policy_of(self._deployment, team)
        return policy

    def refuse_paused(self, call: Call) -> None:
        """Raise RateLimited while the call's key is paused for what it tried before."""
        if self._abuse.paused and (wait := self._abuse.pause_of(call.caller.key_id)) > 0:
            counter_of(self.metrics.safety_refused, "paused").inc()
            raise RateLimited(
                "Too many requests under this key broke the content policy. Try again later.",
                headers={"retry-after": str(wait)},
            )

    def policy_for(self, call: Call) -> Policy | None:
        """Return what holds for a call, or ``None`` where neither deployment nor team has a policy."""
        team = call.caller.team.safety
        return None if self._is_off and team is None else self.policy(team)

    async def redacted(self, call: Call) -> Call:
        """Return a call without what its policy takes out of requests; the same where that is nothing. Raises
        UnsupportedParameter for an answer from which nothing could be taken."""
        policy = self.policy_for(call)
        if policy is not None and is_spoken(call.request) and policy.redacted_groups("output"):
            words = "The content policy takes personal data out of answers, which cannot be done with what is spoken."
            raise UnsupportedParameter(f"{words} Ask for 'text' alone.", param="modalities")
        if policy is None or not (groups := policy.redacted_groups("input")):
            return call
        cleared, found = await off_loop(call.size, partial(redacted_call, call, groups))
        self.note_redacted(call, "input", found)
        return cleared

    def note_redacted(self, call: Call, stage: Stage, found: list[Finding]) -> None:
        """Tell what was taken out of a request or an answer, if anything was."""
        if found:
            self._note(call, stage, "redacted", found)

    async def may_leave(self, team: TeamSafety | None, request: Request, native: NativeRequest | None) -> bool:
        """Whether the rules let a request out that asks for no answer."""
        policy = self.policy(team)
        if policy.input == "off":
            return True
        return not policy.blocked_and_flagged("input", await self.reader.find_by_form(request, native=native))[0]

    def apply(self, call: Call, policy: Policy, stage: Stage, findings: Iterable[Finding]) -> None:
        """Note what was found. Raises ContentPolicyViolation when it is blocked, ContentUnchecked where nothing else
        than the checker's failure stands against it."""
        blocked, flagged = policy.blocked_and_flagged(stage, findings)
        if flagged:
            self._note(call, stage, "flagged", flagged)
        if blocked:
            self._note(call, stage, "blocked", blocked)
            if blocked == [FAILED]:  # not the caller's doing: a key that meets it has tried nothing
                raise ContentUnchecked() if stage == "input" else ContentPolicyViolation(UNCHECKED_ANSWER)
            self._count(call)
            what = "request" if stage == "input" else "answer"
            names = ", ".join(sorted({finding.name for finding in blocked}))
            param = PARAMS.get(call.endpoint, "messages") if stage == "input" else None
            raise ContentPolicyViolation(f"The content policy forbids this {what}: {names}.", param=param)

    def keep(self, looking: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to look at something, to the end, whether or not a call waits for it."""
        task = asyncio.create_task(looking)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)
        return task

    def note_refusal(self, call: Call) -> None:
        """Count an answer that its model, or its upstream, refused: a key that keeps asking for such is probing."""
        counter_of(self.metrics.safety_refused, "by_model").inc()
        self._count(call)

    def note_filtered(self, call: Call) -> None:
        """Count a call that its upstream's own content filter refused, where its team has a policy."""
        if (policy := self.policy_for(call)) is not None and not policy.input == "off" == policy.output:
            self.note_refusal(call)

    def _count(self, call: Call) -> None:
        if not call.is_internal:
            tell = partial(self._events.note, call, "safety.key_paused", {})
            self._abuse.count(call.caller.key_id, call.caller.team.id, tell)

    def _note(self, call: Call, stage: Stage, outcome: str, findings: list[Finding]) -> None:
        scores = {finding.name: round(finding.score, 3) for finding in findings}
        for name in scores:
            counter_of(self.metrics.safety_findings, stage, outcome, name).inc()
        self._events.note(call, f"safety.{stage}_{outcome}", scores)
        log.info("content_policy", request_id=call.request_id, team=call.caller.team.id, stage=stage, outcome=outcome)
