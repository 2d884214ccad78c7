# A worker's part in shadow traffic: asks the other models as batches, compares what they say, has a judge decide
# where one is configured, and forgets the texts.

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from billing.core.money import to_nano, to_text
from billing.core.store_errors import told_if_away
from gateway.core.clock import Clock
from gateway.core.errors import ContentPolicyViolation
from gateway.inference.edition import Editions
from gateway.inference.recalibrations import (
    Recalibration,
    keep_recalibration,
    learned_scores,
    learns,
    recalibrating,
    recalibrations,
)
from gateway.shadow.judging import are_same, judge_request, verdict_of
from gateway.shadow.store import (
    AT_ONCE,
    Asked,
    Found,
    ask_waiting,
    comparisons_of,
    ended_calls,
    keep_found,
    purge_shadow_calls,
)
from gateway.storage.database import Database
from protocol.chat import ChatRequest
from protocol.decoding import decode_with_extra
from router.catalog.catalog import AutoRoute, Catalog
from router.learning import own_scores
from router.recalibration import recalibrated

COMPARE_EVERY = 10.0  # seconds
ASK_EVERY = 600.0  # seconds: what waits meanwhile goes into one batch

log = structlog.get_logger(__name__)


class Comparer:
    """Asks and compares until it is cancelled. Any number may: each takes calls that no other has locked. ``scores``:
    the version of the classifier whose scores are judged."""

    def __init__(self, editions: Editions, database: Database, clock: Clock, scores: str) -> None:
        self._editions = editions
        self._database = database
        self._clock = clock
        self._scores = scores

    async def run(self) -> None:
        """Ask and compare, for ever."""
        asked = float("-inf")
        while True:
            with told_if_away(log, "shadow_calls_wait"):
                if (now := self._clock.monotonic()) - asked > ASK_EVERY:
                    await self.ask()
                    await self.recalibrate()
                    asked = now
                await self.compare()
            await asyncio.sleep(COMPARE_EVERY)

    async def ask(self) -> None:
        """Put what waits into batches, and drop what is too old."""
        async with self._database.begin() as connection:
            await purge_shadow_calls(connection, self._clock, self._editions.current.settings.retention.usage)
        sent = AT_ONCE
        while sent == AT_ONCE:
            async with self._database.begin() as connection:
                sent = await ask_waiting(connection, self._clock)

    async def recalibrate(self) -> None:
        """Work out the thresholds of teams that go by their own comparisons, and store those that change."""
        routes = {name: route for name, route in self._editions.current.catalog.auto.items() if recalibrating(route)}
        if not routes:
            return
        async with self._database.begin() as connection:
            known = {(one.team_id, one.route): one for one in await recalibrations(connection)}
            for name, route in routes.items():
                for team_id in sorted(recalibrating(route)):
                    before = known.get((team_id, name))
                    now = before.applied if before is not None and before.quality == route.quality else None
                    comparisons = await comparisons_of(connection, team_id, name, route, self._scores)
                    applied = recalibrated(comparisons, route.quality, now)
                    if applied is None:
                        continue
                    own = None
                    if learns(route, team_id):
                        own = await asyncio.to_thread(own_scores, comparisons, self._scores)
                    if applied == now and own == await learned_scores(connection, team_id, name):
                        continue
                    found = Recalibration(
                        team_id=team_id,
                        route=name,
                        quality=route.quality,
                        applied=applied,
                        has_learned=own is not None,
                        changed_at=self._clock.moment(),
                    )
                    await keep_recalibration(connection, found, len(comparisons), own)
                    moved = {"before": now, "applied": applied, "has_learned": own is not None}
                    log.info("route_recalibrated", team_id=team_id, route=name, **moved)

    async def compare(self) -> None:
        """Compare what was answered."""
        async with self._database.begin() as connection:
            ended = await ended_calls(connection)
            await keep_found(connection, self._clock, [found_of(one, self._editions.current.catalog) for one in ended])


class _BatchAnswer(Struct, frozen=True):
    status_code: int
    body: dict[str, Any]


def found_of(asked: Asked, catalog: Catalog) -> Found:
    """Return what the answer to a shadow call's question says. Pure."""
    answer = None if asked.response is None else msgspec.json.decode(asked.response, type=_BatchAnswer)
    route = catalog.auto.get(asked.route)
    if answer is None or answer.status_code != 200:
        # Of what was asked in vain only what the policy blocked is owed; how much, the ledger knows: at most the rest.
        is_owed = answer is not None and answer.body["error"]["code"] == ContentPolicyViolation.code
        return _dropped(asked, "not_answered", asked.reserved_nanousd - asked.asked_nanousd if is_owed else 0)
    cost = to_nano(str(answer.body["usage"]["cost_usd"]))
    if route is None or route.shadow is None:
        return _dropped(asked, "switched_off", cost)
    text = answer.body["choices"][0]["message"].get("content")
    if asked.status == "judging":
        return _judged(asked, text or "", cost)
    return _compared(asked, route, answer.body["model_used"], text, cost)


def _compared(asked: Asked, route: AutoRoute, model: str, text: str | None, cost: int) -> Found:
    assert route.shadow is not None
    if model not in (route.small if asked.is_explored else route.large):
        return _dropped(asked, "not_small" if asked.is_explored else "not_large", cost)
    if not text:
        return _dropped(asked, "no_text", cost)
    answer = asked.answer.decode()
    small, large = (text, answer) if asked.is_explored else (answer, text)
    is_same = are_same(small, large)
    if is_same or route.shadow.judge is None:
        return Found(request_id=asked.request_id, status="compared", model=model, suffices=is_same, asked_nanousd=cost)
    request, _ = decode_with_extra(asked.body, ChatRequest)
    judge = judge_request(route.shadow.judge, request, small, large, small_first=_small_first(asked))
    # What is left of the reserve is the most that the judge may cost, whichever it is by now.
    left = max(0, asked.reserved_nanousd - cost)
    body = {**msgspec.to_builtins(judge), "max_cost_usd": to_text(left)}
    return Found(
        request_id=asked.request_id, status="to_judge", body=msgspec.json.encode(body), model=model, asked_nanousd=cost
    )


def _judged(asked: Asked, answer: str, cost: int) -> Found:
    suffices = verdict_of(answer, small_first=_small_first(asked))
    if suffices is None:
        return _dropped(asked, "unclear", cost)
    return Found(request_id=asked.request_id, status="compared", suffices=suffices, judge_nanousd=cost)


def _dropped(asked: Asked, reason: str, cost: int) -> Found:
    other, judge = (0, cost) if asked.status == "judging" else (cost, 0)
    return Found(request_id=asked.request_id, status="dropped", reason=reason, asked_nanousd=other, judge_nanousd=judge)


def _small_first(asked: Asked) -> bool:
    return asked.request_id.int % 2 == 0  # the dice at the end of a UUIDv7
