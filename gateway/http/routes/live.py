# GET /admin/live: what happens in the whole deployment, as one stream of events; GET /v1/live: a team's part. A watcher
# that does not read costs a bounded memory, and after a minute its connection.

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from litestar import get
from litestar.types import ASGIApp

from billing.core.errors import RateLimited
from billing.core.store_errors import POSTGRES_AWAY
from billing.ledger.instance_samples import last_looks
from gateway.accounts.guards import reading_guard, team_guard
from gateway.batch.shapes import OPEN
from gateway.batch.store import batches_that_run
from gateway.batch.views import batch_view
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, caller_of, part_of, read_parameters, transaction
from gateway.http.routes.admin.breakers import breaker_view
from gateway.http.routes.admin.instances import REMEMBERED, instance_view
from gateway.http.stream_sender import StreamSender
from gateway.telemetry.live_events import LiveEvents, Look, Watcher, frame_of
from gateway.upstreams.resilience.breakers import Breakers
from protocol.errors import Overloaded, ServiceError, invalid_value
from protocol.serving.leaving import ended_when_client_leaves

TYPES = ("call", "refusal", "breaker", "replica", "batch")
OF_TEAMS = ("call", "refusal", "batch")
MOST_WATCHERS = 50  # of one process
FOR_ADMINS = 10  # that no team takes
MOST_OF_TEAM = 2
LOOK_EVERY = 2.0  # seconds between looks at breakers, replicas and batches
MOST_BATCHES = 200
SILENCE = 15.0  # seconds until a comment
READ_WITHIN = 60.0  # seconds in which a watcher has to take what was sent


@get("/admin/live", guards=[reading_guard], summary="Watch what happens", query=("types", "team_id"))
async def get_live(request: AnyRequest) -> ASGIApp:
    """Stream calls, refusals, breakers, replicas and batches as server-sent events, each as it changes.

    ``types``: call, refusal, breaker, replica, batch, or several with commas between; ``team_id``: of one team. An
    event ``dropped`` says how many came faster than they were read or told.
    """
    query = read_parameters(request)
    return _Live(request, query.get("team_id"), _types(query, TYPES))


@get("/v1/live", guards=[team_guard], summary="Watch a team's calls", query=("types",))
async def get_own_live(request: AnyRequest) -> ASGIApp:
    """Stream the team's calls, refusals and batches as server-sent events, each as it ends or changes."""
    team_id = caller_of(request).team.id
    types = _types(read_parameters(request), OF_TEAMS)
    live = part_of(request, LiveEvents)
    if live.watchers >= MOST_WATCHERS - FOR_ADMINS:
        raise RateLimited("This process has as many watchers already as teams may be.", headers={"retry-after": "5"})
    if live.watchers_of(team_id) >= MOST_OF_TEAM:
        raise RateLimited(f"This team watches {MOST_OF_TEAM} times already here.", headers={"retry-after": "5"})
    return _Live(request, team_id, types)


def _types(query: Mapping[str, str], offered: tuple[str, ...]) -> frozenset[str]:
    types = frozenset(query["types"].split(",")) if "types" in query else frozenset(offered)
    if not types.issubset(offered):
        raise invalid_value("types", f"is one of {', '.join(offered)}, or several with commas between")
    return types


class _Live:
    """Streams to one watcher: an ASGI app that a route returns."""

    def __init__(self, request: AnyRequest, team_id: str | None, types: frozenset[str]) -> None:
        self._request, self._team_id, self._types = request, team_id, types
        self._live = part_of(request, LiveEvents)
        if self._live.watchers >= MOST_WATCHERS:
            raise RateLimited(f"This process has {MOST_WATCHERS} watchers already.", headers={"retry-after": "5"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send what happens until the watcher leaves, does not read, or this process ends."""
        watcher = self._live.watch(self._team_id, self._types)
        sender = StreamSender(send, SILENCE)
        try:
            with ended_when_client_leaves(scope, receive):
                try:
                    await self._tell(watcher, sender)
                except ServiceError as exc:  # its key was revoked, or what it may see
                    told = frame_of({"type": "error", "code": exc.code, "message": exc.message}, "error")
                    async with asyncio.timeout(READ_WITHIN):
                        await sender.send(told, is_last=True)
        except TimeoutError:
            return  # without its end: the server closes the connection
        finally:
            self._live.leave(watcher)
            sender.close()

    async def _tell(self, watcher: Watcher, sender: StreamSender) -> None:
        await sender.begin([])
        drain, clock, looked = part_of(self._request, Drain), part_of(self._request, Clock), -LOOK_EVERY
        while not drain.has_begun:
            now = clock.monotonic()
            if now - looked >= LOOK_EVERY:
                looked = now
                await self._check_key()
                if now - watcher.look.at >= LOOK_EVERY:
                    watcher.look.at = now
                    self._live.tell_changes(watcher.look, await self._changes(watcher.look))
            happened, dropped = watcher.take()
            told = frame_of({"type": "dropped", "events": dropped}, "dropped") if dropped else b""
            if frames := told + happened:
                async with asyncio.timeout(READ_WITHIN):
                    await sender.send(frames)
            try:
                async with asyncio.timeout(LOOK_EVERY):
                    await watcher.news.wait()
            except TimeoutError:
                pass
        await sender.end()

    async def _check_key(self) -> None:
        """Let the watcher in anew. Raises as the guards of its route do, but for what passes."""
        try:
            guards: Any = self._request.route_handler.resolve_guards()
            for guard in guards:
                await guard(self._request, self._request.route_handler)
        except (Overloaded, RateLimited):
            pass  # known at the next look

    async def _changes(self, look: Look) -> list[bytes]:
        """Return breakers, replicas and batches that are not as they were last told; at first all of them."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        request, clock = self._request, part_of(self._request, Clock)
        if "breaker" in self._types:
            breakers = part_of(request, Breakers)
            for watched in breakers.all():
                view = breaker_view(breakers, clock, watched)
                facts = {
                    name: view[name] for name in ("id", "provider", "endpoint", "region", "model", "state", "reason")
                }
                found["breaker", watched.id] = facts
        open_ones = [ident for (kind, ident), (batch, _) in look.shown.items() if _is_open(kind, batch)]
        unseen: tuple[str, ...] = ()  # kinds of which this look knows nothing
        try:
            async with transaction(request) as connection:
                if "replica" in self._types:
                    now, catalog = clock.now(), edition_of(request).catalog
                    for one in await last_looks(connection, now - REMEMBERED):
                        found["replica", one.instance_id] = instance_view(one, now, catalog)
                if "batch" in self._types:
                    for batch in await batches_that_run(connection, self._team_id, open_ones, MOST_BATCHES):
                        found["batch", batch.id] = {"team_id": batch.team_id, **batch_view(batch)}
        except POSTGRES_AWAY:
            unseen = ("replica", "batch")
        for name in [name for name in look.shown if name not in found and name[0] not in unseen]:
            del look.shown[name]  # one who comes later is not told of it
        told = []
        for name, view in found.items():
            if name not in look.shown or _facts(look.shown[name][0]) != _facts(view):
                look.shown[name] = (view, frame_of({"type": name[0], **view}, name[0]))
                told.append(look.shown[name][1])
        return told


def _facts(view: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a view does not change by itself."""
    return {name: value for name, value in view.items() if name not in ("estimated_completion", "warning")}


def _is_open(kind: str, view: Mapping[str, Any]) -> bool:
    return kind == "batch" and view["status"] in OPEN
