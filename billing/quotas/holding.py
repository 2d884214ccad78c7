# The calls that this process holds inside its rooms. Holding and settling is arithmetic.

from __future__ import annotations

from collections import deque

import structlog
from msgspec import Struct

from billing.core.holds import HoldRequest, Scope
from billing.core.ids import day_of
from billing.quotas.rooms import Pair, Rooms

MOST_TOLD = 1000  # calls, and rooms of theirs, that a beat tells of

log = structlog.get_logger(__name__)


class Held(Struct, frozen=True, eq=False):
    """What a running call holds, and where."""

    team_id: str
    rooms: tuple[Pair, ...]  # of each scope
    amounts: tuple[tuple[int, int], ...]  # tokens and nano-dollars held of each
    scopes: tuple[Scope, ...]


class Holding:
    """What running calls hold, by request id."""

    def __init__(self, rooms: Rooms) -> None:
        self.calls: dict[str, Held] = {}
        self.ended = deque[Held](maxlen=MOST_TOLD)  # since the last beat: their rows may not be in the ledger yet
        self.exceeded = 0  # calls whose upstream billed more than was held
        self._rooms = rooms

    def try_hold(self, request: HoldRequest) -> bool:
        """Hold what a call may cost in all of its scopes, or nothing."""
        rooms, amounts = self._rooms.of(request), request.amounts
        for (of_tokens, of_money), (tokens, nanousd) in zip(rooms, amounts, strict=True):
            if of_tokens.free < tokens or of_money.free < nanousd:
                return False
        self.enter(request, rooms, amounts)
        return True

    def force(self, request: HoldRequest) -> None:
        """Hold it whether there is room or not: it has no cap, and the database does not answer; or it runs already."""
        rooms, day = self._rooms.of(request), day_of(request.request_id)
        for scope in request.scopes:
            self._rooms.look_at(day, scope.name)
        self.enter(request, rooms, request.amounts)

    def enter(self, request: HoldRequest, rooms: tuple[Pair, ...], amounts: tuple[tuple[int, int], ...]) -> None:
        """Count a call, once."""
        if request.request_id in self.calls:
            return
        for (of_tokens, of_money), (tokens, nanousd) in zip(rooms, amounts, strict=True):
            of_tokens.held += tokens
            of_money.held += nanousd
            if tokens > of_tokens.hold:
                of_tokens.hold = tokens
            if nanousd > of_money.hold:
                of_money.hold = nanousd
        self.calls[request.request_id] = Held(request.team_id, rooms, amounts, request.scopes)

    def settle(self, request_id: str, tokens: int, nanousd: int, model: str) -> tuple[str, bool] | None:
        """Put what a call used in place of what it held; return its team, and whether what it leaves is wanted
        elsewhere. ``None`` where it was settled before."""
        held = self.calls.pop(request_id, None)
        if held is None:
            return None
        is_tight = is_exceeded = False
        for (of_tokens, of_money), amounts, scope in zip(held.rooms, held.amounts, held.scopes, strict=True):
            of_tokens.held -= amounts[0]
            of_money.held -= amounts[1]
            if not scope.model or scope.model == model:
                of_tokens.used += tokens
                of_money.used += nanousd
                is_exceeded = is_exceeded or tokens > amounts[0] or nanousd > amounts[1]
            is_tight = is_tight or of_tokens.is_tight or of_money.is_tight
        if tokens or nanousd:
            self.ended.append(held)
        if is_exceeded:
            self.exceeded += 1
            log.warning("hold_exceeded", request_id=request_id, cost=nanousd)
        return held.team_id, is_tight
