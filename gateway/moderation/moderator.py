# The content policy in the path of an answer. Rules look at a request before anything leaves; the classifier and an
# outside checker judge it beside the call, and the first token waits for their verdict; answers pass a watch of their
# own. A team without a policy pays for two comparisons.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import structlog

from billing.core.errors import RateLimited
from gateway.calls.call import Call
from gateway.core.errors import ContentPolicyViolation, ContentUnchecked
from gateway.core.settings import Safety, TeamSafety
from gateway.moderation.abuse import AbuseWatch
from gateway.moderation.checker import FAILED, OutsideChecker
from gateway.moderation.classifier.classifier import Classifier, Floats, evened, findings_of, readings, scores_of
from gateway.moderation.classifier.features import passages
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.classifier.hidden import hidden
from gateway.moderation.classifier.plain import plain, visible
from gateway.moderation.policy_events import PolicyEvents
from gateway.moderation.rules.policy import Policy, Stage, policy_of
from gateway.moderation.rules.rules import find_by_rules, foldings, holds_phrase
from gateway.moderation.texts import ids_of, is_unreadable, texts_of
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from protocol.inference import Request
from protocol.messages import MessagesRequest

SLICE = 7_000  # characters that are looked at before others have their turn
OVERLAP = 1_000  # visible characters of a slice that the next one has again; no rule's find is longer
LEAST = 200  # characters that the shortest text counts as: to look at none takes time, too
REMEMBERED = 8192  # texts and windows whose findings are known: a conversation comes again with every turn

UNREADABLE = Finding("token_ids", "unreadable")
PHRASE = Finding("phrase", "deny")

PARAMS = {"embeddings": "input", "completions": "prompt"}  # else "messages"

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
        self.checker = checker
        self.metrics = metrics
        self.leaving = 0  # calls that are looked at and have not been sent yet
        self._classifier = classifier
        self._events = events
        self._abuse = abuse
        self._pause = asyncio.Lock()  # of the checks of long texts one at a time goes on in a turn of the loop
        self._behind: set[asyncio.Task[None]] = set()  # what is looked at now, waited for or not
        self._known: dict[int, Floats] = {}  # by the window's hash: what was said is not kept
        self._found: dict[int, list[Finding]] = {}  # by rules, by the text's hash
        self._open: set[int] = set()  # hashes of texts that hide nothing: the classifier reads what the rules read
        self.follow(deployment)

    def follow(self, deployment: Safety) -> None:
        """Go by another policy of the deployment from now on."""
        self._deployment = deployment
        self._is_off = deployment.input == "off" == deployment.output
        self._policies: dict[TeamSafety | None, Policy] = {}
        self.forget()
        self._deny = frozenset(folded for phrase in deployment.deny for folded in foldings(phrase))
        # What was spelt letter by letter comes out without the spaces between its words.
        self._deny_spelt = self._deny | {phrase.replace(" ", "") for phrase in self._deny}
        self._abuse.follow(deployment.abuse)
        self.checker.follow(deployment.checker)

    def forget(self) -> None:
        """Remember no text: what was found in it went by the phrases of another policy."""
        self._found.clear()
        self._open.clear()
        self._known.clear()

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

    async def find_by_form(
        self, request: Request, extra: Mapping[str, Any] | None = None, native: MessagesRequest | None = None
    ) -> list[Finding]:
        """Return what the rules find in a request (``texts_of``), each once.

        A long text is looked at in slices, and many short ones a few at a time, with turns for others between.
        """
        found: set[Finding] = set()
        async for text in self._in_turns(texts_of(request, extra, native)):
            found.update(await self._rules_on(text))
        if ids := ids_of(request):  # some are long numbers, and no card numbers
            found.update(one for one in await self._rules_on(ids) if one.group in ("secrets", "deny"))
        if is_unreadable(request):
            found.add(UNREADABLE)
        return sorted(found)

    async def _rules_on(self, text: str) -> Iterable[Finding]:
        if len(text) <= SLICE:
            return self.rule_findings(visible(text))
        return [finding async for piece in self.slices(text) for finding in self.rule_findings(piece)]

    def rule_findings(self, text: str) -> list[Finding]:
        """Return what the rules find in a text of a few thousand characters, and in what it hides; from memory if it
        was looked at before."""
        key = _key_of(text)
        known = self._found.get(key)
        if known is None:
            shown = plain(text)
            inside = hidden(shown)
            known = [finding for one in (shown, *inside) for finding in find_by_rules(one)]
            if self._deny and (
                holds_phrase(text, self._deny) or any(holds_phrase(one, self._deny_spelt) for one in inside)
            ):
                known.append(PHRASE)
            if len(self._found) >= REMEMBERED:
                self._found.clear()
                self._open.clear()
            self._found[key] = known
            if not inside:
                self._open.add(key)
        return known

    async def may_leave(self, team: TeamSafety | None, request: Request, native: MessagesRequest) -> bool:
        """Whether the rules let a request out that asks for no answer."""
        policy = self.policy(team)
        if policy.input == "off":
            return True
        return not policy.blocked_and_flagged("input", await self.find_by_form(request, native=native))[0]

    async def judge(self, texts: Iterable[str]) -> list[Finding]:
        """Return the categories that the classifier finds in texts."""
        worst = [await self._worst_logits(text, self.logits) async for text in self._in_turns(texts)]
        return findings_of(np.max(worst, axis=0)) if worst else []

    async def judge_told(self, texts: Iterable[str]) -> list[Finding]:
        """Return whether texts that tools told hold an attack: passage by passage, for what is around dilutes it."""
        worst: list[Floats] = []
        async for text in self._in_turns(texts):
            async for piece in self.slices(text):
                for passage in passages(piece):
                    worst.append(self.logits(evened(plain(passage).lower())))
                    await asyncio.sleep(0)
        return findings_of(np.max(worst, axis=0), ("attack",)) if worst else []

    async def score(self, text: str) -> dict[str, float]:
        """Return the score of every category for a text."""
        return scores_of(await self._worst_logits(text, partial(self._classifier.logits, fully=True)))

    async def _worst_logits(self, text: str, judge: Callable[[str], Floats]) -> Floats:
        """Return the highest logits of any window of a text; others have their turn between windows."""
        worst: Floats | None = None
        async for piece in self.slices(text):
            for window in readings(piece, hides=_key_of(piece) not in self._open):
                logits = judge(window)
                if worst is None:
                    worst = logits
                else:
                    worst = np.maximum(worst, logits)
                    await asyncio.sleep(0)
        assert worst is not None
        return worst

    def logits(self, window: str) -> Floats:
        """Return the classifier's logits of a window, from memory if it was judged before."""
        key = _key_of(window)
        known = self._known.get(key)
        if known is None:
            known = self._classifier.logits(window)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = known
        return known

    def apply(self, call: Call, policy: Policy, stage: Stage, findings: Iterable[Finding]) -> None:
        """Note what was found. Raises ContentPolicyViolation when it is blocked, ContentUnchecked where nothing else
        than the checker's failure stands against it."""
        blocked, flagged = policy.blocked_and_flagged(stage, findings)
        if flagged:
            self._note(call, stage, "flagged", flagged)
        if blocked:
            self._note(call, stage, "blocked", blocked)
            if blocked == [FAILED]:
                raise ContentUnchecked()  # not the caller's doing: a key that meets it has tried nothing
            self._count(call)
            what = "request" if stage == "input" else "answer"
            names = ", ".join(sorted({finding.name for finding in blocked}))
            param = PARAMS.get(call.endpoint, "messages") if stage == "input" else None
            raise ContentPolicyViolation(f"The content policy forbids this {what}: {names}.", param=param)

    async def slices(self, text: str) -> AsyncIterator[str]:
        """Yield a text in slices that overlap, without what is not seen in it, with a turn for others between them."""
        held = ""
        for start in range(0, len(text) or 1, SLICE):
            if start:
                await self._others_turn()
            held += visible(text[start : start + SLICE])
            if len(held) >= SLICE or start + SLICE >= len(text):
                yield held
                held = held[-OVERLAP:]

    async def _in_turns(self, texts: Iterable[str]) -> AsyncIterator[str]:
        """Yield texts, with a turn for others after as many characters as a slice has."""
        looked_at = 0
        for text in texts:
            if looked_at >= SLICE:
                looked_at = 0
                await self._others_turn()
            looked_at += max(len(text), LEAST)
            yield text

    async def _others_turn(self) -> None:
        async with self._pause:
            await asyncio.sleep(0)

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


def _key_of(text: str) -> int:
    return hash((text, len(text)))  # one of another width may have the same bytes, and so the same hash
