# Room that outlives its process: of calls that a provider answers within the day, whichever process hears of it. A
# reservation is an owner of its own (docs/architecture.md, Room by lease): what its calls hold is drawn from the
# balances at once and to the last nano-dollar, rows that name it spend it, and its end gives back what is left.

from __future__ import annotations

from billing.core.edges import Clock
from billing.core.holds import HoldRequest, RefusedHold
from billing.core.ids import date_of
from billing.quotas.lease_store import NANOUSD, TOKENS, Need, PostgresLeases
from billing.quotas.refusals import refusal
from billing.quotas.rooms import Rooms


class ReservationEnded(Exception):
    """The reservation takes no more calls."""


class Reservations:
    """Opens, fills and ends reservations. Each verb is a statement that may be repeated, but for ``hold``."""

    def __init__(self, store: PostgresLeases, clock: Clock, *, version: str = "") -> None:
        self._store = store
        self._clock = clock
        self._version = version

    async def begin(self, name: str) -> None:
        """Open a reservation. Raises POSTGRES_AWAY, as all of these do; then it may be open or not."""
        await self._store.begin(name, self._version)

    async def hold(self, name: str, request: HoldRequest) -> RefusedHold | None:
        """Hold what a call may cost against the budgets of its scopes, all or nothing; return why there is no room.

        Limits of a minute are not asked: the provider has the call when it likes. A hold whose answer was lost stays
        until the reservation ends. Raises ReservationEnded.
        """
        asks = tuple(
            Need(scope.name, unit, amount, amount, amount)
            for scope, amounts in zip(request.scopes, request.amounts, strict=True)
            for unit, amount in zip((TOKENS, NANOUSD), amounts, strict=True)
        )
        taken = await self._store.take(name, str(date_of(request.request_id)), [asks], 1.0)
        if taken.refused == "ended":
            raise ReservationEnded(name)
        if taken.refused is not None:
            raise ConnectionError(f"no room can be drawn now: {taken.refused}")
        if all(balance.spent is None for balance in taken.balances or ()):  # what is spent is told with refusals alone
            return None
        refused, _ = refusal(request, Rooms().of(request), taken, is_slow=False)
        if refused is None:
            raise ConnectionError("room came back while it was refused: ask again")
        return refused

    async def keep_alive(self, name: str) -> bool:
        """Say that a process looks after a reservation; False where it has ended."""
        return await self._store.beat(name, self._clock.now(), 0) is not None

    async def end(self, name: str) -> None:
        """Give back what its calls did not spend."""
        await self._store.end(name)
