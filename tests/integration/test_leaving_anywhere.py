# A client that leaves at any await of its call, or just as what is awaited has come: nothing of the call stays behind.
# And a configuration that is read again there: the call ends by the edition that it began with.

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from litestar import Litestar
from msgspec.structs import replace
from sqlalchemy import text

from gateway.accounts.schemas import LimitsInput
from gateway.calls import early_leaves
from gateway.calls.journaling import OpenCalls
from gateway.core.background import Background
from gateway.core.parts import Parts
from gateway.core.settings import Retries, Safety
from gateway.idempotency.store import IdempotencyStore
from gateway.inference.edition import Editions
from gateway.inference.limiter import TargetLimiter
from gateway.moderation.moderator import Moderator
from gateway.overload.body_memory import BodyRoom
from gateway.run.app import create_app
from gateway.storage.books import Books
from gateway.storage.database import Database
from protocol.serving.leaving import LEAVING
from protocol.serving.off_loop import HEAVY
from tests.support.house import TEAM, make_team, model, settings_for
from tests.support.scripted_upstream import ScriptedUpstream

LIMITS = LimitsInput(requests_per_minute=10**6, concurrent_requests=100, usd_per_day=Decimal(100))
MOST_AWAITS = 60  # more than a call has
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 6}
LONG: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "a " * HEAVY}]}  # by way of Litestar

# The model that is asked, the body, and how its upstream answers.
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": ("small", ASK, ""),
    "queued": ("small", ASK, ""),
    "without room": ("small", ASK, ""),
    "long body": ("large", LONG, ""),
    "retried": ("small", ASK, "500"),
    "spare": ("first", ASK, "500"),
    "refuses a field": ("small", {**ASK, "max_completion_tokens": 6}, "unknown=max_completion_tokens"),
    "cut": ("small", ASK, "cut"),
}
# Calls of several attempts go without a content policy: beside its check they would run in a task of their own, and of
# that the call awaits the end alone.
UNCHECKED = {"retried", "spare", "refuses a field"}


# Streamed, with an Idempotency-Key, late (see ``_At``): in a commit each call goes one way or two, and all in a soak. A
# call with a key is not ended by its client's leaving, so those that wait at a place of their own go without one.
WAYS = list(product((False, True), repeat=3))
AT_ONCE = {
    "plain": [(False, True, True)],
    "queued": [(False, False, True), (True, False, False)],
    "without room": [(True, False, True)],
    "long body": [(False, False, False)],
    "retried": [(True, False, True)],
    "spare": [(False, False, False)],
    "refuses a field": [(True, True, False)],
    "cut": [(True, False, False)],
}
LEAVES = [
    *(pytest.param(name, ways, id=f"{name}, some ways") for name, ways in AT_ONCE.items()),
    *(pytest.param(name, WAYS, id=f"{name}, all ways", marks=pytest.mark.soak) for name in CALLS),
]


class _At:
    """Awaits ``work``, and calls ``act`` at its await number ``place``: ``late``, when what that awaits has come and
    ``work`` does not know it yet."""

    def __init__(self, work: Coroutine[Any, Any, None], place: int, act: Callable[[], None], *, late: bool) -> None:
        self.awaits = 0
        self._work, self._place, self._act, self._late = work, place, act, late

    def __await__(self) -> Generator[Any, Any, None]:
        go_on, value = self._work.send, None
        while True:
            try:
                awaited = go_on(value)
            except StopIteration:
                return
            self.awaits += 1
            if self.awaits == self._place:
                if self._late and awaited is not None:
                    awaited.add_done_callback(lambda _: self._act())
                else:
                    asyncio.get_running_loop().call_soon(self._act)
            try:
                go_on, value = self._work.send, (yield awaited)
            except BaseException as exc:
                go_on, value = self._work.throw, exc  # type: ignore[assignment]


class _Gateway:
    """A gateway that is called as its server calls it, without a socket."""

    def __init__(self, app: Any, parts: Parts, key: str) -> None:
        self.parts = parts
        self._app = app
        self._key = key

    async def ask(
        self,
        body: dict[str, Any],
        place: int,
        act: Callable[[], None] | None = None,
        *,
        late: bool = False,
        **more: str,
    ) -> tuple[int, list[dict[str, Any]]]:
        """Call; at the await number ``place`` the client leaves, or ``act`` is called. Return how many awaits there
        were, and what was sent."""
        raw, sent = json.dumps(body).encode(), list[dict[str, Any]]()
        headers = {"host": "x", "authorization": f"Bearer {self._key}", "content-length": str(len(raw)), **more}
        leave: list[Callable[[], None] | None] = [None]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "extensions": {LEAVING: lambda told: leave.__setitem__(0, told)},
        }

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        def client_leaves() -> None:
            if leave[0] is not None:
                leave[0]()

        running = _At(self._app(scope, receive, send), place, act or client_leaves, late=late)
        await running
        return running.awaits, sent

    def close_for_a_moment(self) -> None:
        """Have calls wait for a slot."""
        limiter = self.parts.get(TargetLimiter)
        for pool in limiter.slot_pools():
            limiter.resize(pool, 0)
            asyncio.get_running_loop().call_later(0.02, limiter.resize, pool, 1)

    async def left_behind(self) -> dict[str, int]:
        """Return what calls have not given back, once nothing of them runs behind their clients."""
        found: dict[str, int] = {}
        for turn in range(500):
            found = {name: count for name, count in self._kept().items() if count}
            if not found:
                break
            await asyncio.sleep(0.001 if turn < 10 else 0.01)
        return found

    async def open_claims(self) -> int:
        """Return how many Idempotency-Keys stand for a call that runs."""
        query = text("SELECT count(*) FROM idempotency WHERE status IS NULL")
        async with self.parts.get(Database).begin() as connection:
            return (await connection.execute(query)).scalar_one()

    def _kept(self) -> dict[str, int]:
        get, quotas = self.parts.get, self.parts.get(Books).quotas
        limiter = get(TargetLimiter)
        return {
            "accounts": len(get(OpenCalls)),
            "holds": len(quotas.leases.holding.calls),
            "counted against rates": len(quotas.rates._counted),
            "waits for room": sum(map(len, quotas.leases.callers.waiting.values())),
            "slots": sum(len(pool.held) for pool in limiter.slot_pools()),
            "queued": sum(limiter._queues.waiting.values()),
            "open in the journal": len(get(Books).journal._open),
            "looked at": get(Moderator).leaving,
            "leases of keys": len(get(IdempotencyStore)._owned),
            "memory for bodies": get(BodyRoom)._held_by_all,
            "tasks": len(get(Background)._tasks),
            "connections of the pool": get(Database).engine.pool.checkedout(),  # type: ignore[attr-defined]
        }


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world."""
    with ScriptedUpstream(models=("small", "large", "first")) as upstream:
        yield upstream


@pytest.fixture
async def gateway(
    upstream: ScriptedUpstream,
    database_url: str,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> AsyncIterator[_Gateway]:
    """A gateway whose targets have one slot each, and which lets its one key leave early; for most calls with a content
    policy."""
    monkeypatch.setattr(early_leaves, "FREE", 10**6)
    loop = asyncio.get_running_loop()
    report = loop.get_exception_handler()
    assert report is not None

    def report_others(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "connection_lost() call" not in repr(context.get("exception")):  # asyncpg's, where it was still connecting
            report(loop, context)

    loop.set_exception_handler(report_others)
    settings = settings_for(database_url, redis_url, upstream.url, tmp_path)
    provider = replace(settings.providers["upstream"], concurrency=1, retries=Retries(attempts=2))
    settings = replace(
        settings,
        providers={"upstream": provider},
        models={name: model(name, context=10**6) for name in ("small", "large", "first")},
        fallbacks={"first": ("small",)},
        safety=Safety() if name in UNCHECKED else Safety(input="block", output="block"),
    )
    app = create_app(settings)
    litestar: Litestar = app._app._app
    async with litestar.lifespan():
        yield _Gateway(app, litestar.state.parts, await make_team(settings, TEAM, LIMITS))
    loop.set_exception_handler(report)


@pytest.mark.parametrize(("name", "ways"), LEAVES)
async def test_a_client_that_leaves_anywhere_leaves_nothing_behind(
    gateway: _Gateway, upstream: ScriptedUpstream, name: str, ways: Sequence[tuple[bool, bool, bool]]
) -> None:
    """Whole or streamed, with an Idempotency-Key or without: hold, slot, journal entry, claim and memory are given
    back."""
    asked, body, script = CALLS[name]
    await gateway.ask({"model": asked, **ASK}, 0)  # the key is known from here on: the first await is the call's own
    for stream, keyed, late in ways:
        place = awaits = 0
        while place <= awaits < MOST_AWAITS:
            place += 1
            upstream.forget()
            if script:
                upstream.script(script, model=asked)
            if name == "queued":
                gateway.close_for_a_moment()
            if name == "without room":
                gateway.parts.get(Books).quotas.leases.return_idle()
            more = {"idempotency-key": f"{stream}-{late}-{place}"} if keyed else {}
            awaits, _ = await gateway.ask({"model": asked, "stream": stream, **body}, place, late=late, **more)

            assert await gateway.left_behind() == {}, f"left at {place}: {stream=} {keyed=} {late=}"
        assert 3 < awaits < place
    assert await gateway.open_claims() == 0


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("plain", "retried")), "spare"]
)
async def test_a_call_ends_by_the_edition_that_it_began_with(
    gateway: _Gateway, upstream: ScriptedUpstream, name: str
) -> None:
    """The configuration may lose the call's model and provider at any await: once it has a route it is answered as if
    nothing were."""
    asked, body, script = CALLS[name]
    editions = gateway.parts.get(Editions)
    first = editions.current.settings
    other = replace(
        first,
        providers={"other": replace(first.providers["upstream"], name="other")},
        models={"other": model("other", "other")},
        auto={},
        fallbacks={},
        aliases={},
    )
    for stream in (False, True):
        place, awaits, statuses = 0, 0, []
        while place <= awaits < MOST_AWAITS:
            place += 1
            upstream.forget()
            if script:
                upstream.script(script, model=asked)
            body = {**body, "model": asked, "stream": stream}
            awaits, sent = await gateway.ask(body, place, lambda: editions.change(other))
            editions.change(first)
            statuses.append(sent[0]["status"])

            assert await gateway.left_behind() == {}, f"reloaded at {place}: {stream=}"
        answered = 502 if name == "retried" else 200
        assert statuses[-1] == answered and set(statuses) <= {404, answered}, "unknown, or all goes as it began"
        assert sorted(statuses, key=lambda status: status == answered) == statuses
