# Calls to MCP servers: held, sent, booked. Calling a tool is a call like any other: one hold, one row of the ledger,
# its endpoint `mcp`, its price that of one request. Everything else counts as a request, and costs nothing.
#
# The order is that of every call: hold, opened, sent, closed, bytes to the client, settled. A process that dies before
# the close owes nothing, and its client has no answer; after the close the row is booked once, by its request id.

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from billing.core.holds import HoldRequest, Leg
from billing.core.records import Attempt, Status, UsageRecord, bounded_cost
from billing.ledger.price_editions import edition_of
from gateway.calls.accounting import CallAccounting
from gateway.calls.call import scopes_of
from gateway.calls.rate_limits import rate_limit_headers
from gateway.core.clock import Clock
from gateway.core.principals import Caller
from gateway.core.settings import McpServer
from gateway.inference.admission import Admission
from gateway.mcp.exchange import Answer, Notify, Sent, end_session, exchange
from gateway.mcp.grants import Grant
from gateway.mcp.messages import CALL, tool_of
from gateway.mcp.results import checked
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.resilience.breaker import Breaker, State, Verdict
from gateway.upstreams.resilience.retry import verdict_of
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.errors import Overloaded
from protocol.serving.leaving import Client

T = TypeVar("T")


class McpCall(Struct, frozen=True, kw_only=True):
    """One message of a known caller to a server."""

    request_id: str
    caller: Caller
    grant: Grant
    sent: Sent
    client_request_id: str | None = None


class McpGateway:
    """Asks MCP servers. Each has a breaker in each process."""

    ENDPOINT = "mcp"
    PATH = "/mcp/{server}"

    def __init__(self, admission: Admission, client: UpstreamClient, clock: Clock, metrics: Metrics) -> None:
        self._admission = admission
        self._client = client
        self._clock = clock
        self._metrics = metrics
        self._breakers: dict[str, Breaker] = {}

    def follow(self, servers: Mapping[str, McpServer]) -> None:
        """Go by another configuration: servers that have gone are forgotten."""
        self._breakers = {server.url: self._breaker(server) for server in servers.values()}
        for server in servers.values():
            self._breakers[server.url].follow(server.breaker)

    def standing(self, server: McpServer) -> tuple[State, float]:
        """Return a server's breaker in this process, and the seconds until it is asked again."""
        breaker, now = self._breaker(server), self._clock.monotonic()
        return breaker.state(now), breaker.retry_in(now)

    @asynccontextmanager
    async def answered(self, call: McpCall, client: Client, notify: Notify) -> AsyncIterator[Answer]:
        """Give the answer to ``call``; that of a tool is booked when it is given, and settled at the end of the block.

        ``notify`` gets what a tool's server tells before its answer. Raises what refuses the call, and UpstreamFailure.
        """
        if call.sent.message.method != CALL:
            async with self._admission.counted(call.request_id, call.caller) as hold:
                answer = await self._asked(call, partial(exchange, self._client, call.sent, _ignore))
                answer = checked(answer, call.sent.message, call.grant)
            yield replace(answer, headers=rate_limit_headers(hold))
            return
        tool = tool_of(call.sent.message)
        call.grant.check(tool)
        self._refuse_away(call.sent.server)
        account = await self._admission.admit_request(_hold_of(call, tool))
        try:
            answer = await self._call_tool(call, tool, account, client, notify)
            yield replace(answer, headers=rate_limit_headers(account.hold))
        finally:
            self._admission.settle(account)

    async def end_session(self, call: McpCall) -> None:
        """Have a server end the session that ``call`` names, which counts as a request. Raises UpstreamFailure, or what
        refuses the call."""
        async with self._admission.counted(call.request_id, call.caller):
            await self._asked(call, partial(end_session, self._client, call.sent))

    async def _call_tool(
        self, call: McpCall, tool: str, account: CallAccounting, client: Client, notify: Notify
    ) -> Answer:
        """Return a tool's answer, its account closed. A client that leaves once the server has the call owes its price:
        the tool may have run. A failure of the server costs nothing."""
        began = self._clock.monotonic()
        record = _record_of(call, tool, account, self._clock.now())
        account.open(record)
        status, outcome = Status.FAILED, "error"
        try:
            answer = await self._asked(call, partial(exchange, self._client, call.sent, notify))
            status, outcome = (Status.FAILED, "refused") if answer.result is None else (Status.ANSWERED, "ok")
            return answer
        except UpstreamFailure as exc:
            outcome = exc.outcome
            raise
        except asyncio.CancelledError:
            outcome = "abandoned"  # its client left, or we are closing
            if client.has_left and call.sent.delivery.is_whole:
                status = Status.INTERRUPTED
            raise
        finally:
            ms = round((self._clock.monotonic() - began) * 1000, 3)
            cost = 0 if status is Status.FAILED else account.hold.request.cost_nanousd
            attempts = (Attempt(call.sent.server.label, outcome, ms),)
            record = replace(record, status=status, cost_nanousd=cost, total_ms=ms, attempts=attempts)
            account.close(record)
            self._metrics.close(record)

    async def _asked(self, call: McpCall, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what ``ask`` brings of a server whose breaker lets it be asked, and have that hear how it went."""
        server = call.sent.server
        self._refuse_away(server)
        breaker, now = self._breaker(server), self._clock.monotonic()
        generation, is_probe, verdict = breaker.generation, breaker.state(now) is State.HALF_OPEN, Verdict.NOTHING
        is_alike, team_id = call.sent.message.is_alike, call.caller.team.id
        if is_probe:
            breaker.begin_probe()
        try:
            found = await ask()
            verdict = Verdict.GOOD
            return found
        except UpstreamFailure as exc:
            verdict, is_alike = verdict_of(exc), is_alike or exc.outcome == "connect"
            raise
        finally:
            now = self._clock.monotonic()
            if is_probe:
                breaker.end_probe(generation, verdict, now, team_id, is_alike)
            elif verdict is Verdict.GOOD:
                breaker.count_good(generation, now)
            elif verdict is Verdict.BAD:
                breaker.count_bad(generation, now, team_id, is_alike)

    def _refuse_away(self, server: McpServer) -> None:
        breaker, now = self._breaker(server), self._clock.monotonic()
        if breaker.turns_away(now):
            wait = max(1, math.ceil(min(breaker.retry_in(now), 60.0)))
            raise Overloaded(f"The MCP server {server.name} is away: its breaker is open. Try again in {wait} s.", wait)

    def _breaker(self, server: McpServer) -> Breaker:
        if (found := self._breakers.get(server.url)) is None:
            found = self._breakers[server.url] = Breaker(server.breaker)
        return found


async def _ignore(_: bytes) -> None:
    """Drop what a server notifies of while it answers what is no call of a tool."""


def _hold_of(call: McpCall, tool: str) -> HoldRequest:
    cost = bounded_cost(call.sent.server.price_of(tool).request)
    leg = Leg(call.sent.server.label, 0, cost, call.sent.server.label_of(tool))
    return HoldRequest(
        request_id=call.request_id,
        team_id=call.caller.team.id,
        scopes=scopes_of(call.caller, (leg,)),
        legs=(leg,),
    )


def _record_of(call: McpCall, tool: str, account: CallAccounting, now: float) -> UsageRecord:
    """Return the row of a call as it begins: a process that dies then leaves one that costs nothing."""
    server, held = call.sent.server, account.hold
    return UsageRecord(
        request_id=call.request_id,
        team_id=call.caller.team.id,
        key_id=call.caller.key_id,
        endpoint=McpGateway.ENDPOINT,
        model_asked=server.label_of(tool),
        model_used=server.label_of(tool),
        provider=server.label,
        provider_endpoint=f"mcp {server.url}",
        status=Status.FAILED,
        route_reason="named",
        client_request_id=call.client_request_id,
        created_at=now,
        owner=held.owner,
        held_tokens=held.request.tokens,
        held_nanousd=held.request.cost_nanousd,
        price=edition_of(server.price_of(tool)),
        held_models=tuple([scope.model for scope in held.request.scopes if scope.model]) or None,
    )
