# The functions of the schema (migrations/first_functions.py) in plain Python, one statement at a time, and a ledger
# beside them. A test runs the same verbs against this and against Postgres and compares every table after each; the
# simulation runs on it.
#
# What a table holds is replaced and never changed, and each statement notes what it replaced: so a failover can forget
# the last few, and the search can go back.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from billing.core.ids import EPOCH
from billing.core.records import CHARGED, UsageRecord
from billing.quotas.lease_store import ALIVE, NANOUSD, TOKENS, Balance, Beat, LeaseRow, Need, Taken, Told

RECOVERY = 30.0  # seconds after a failover, after which grants begin again whoever is missing
MISSED = 60.0  # seconds before a failover in which an owner was seen that is waited for
ANSWERS = 5.0  # seconds since an owner was seen, in which what it does not use may come back
REMEMBERED = 400  # statements that a failover can forget, at most

Key = tuple[str, str, str]  # scope, unit, period
LeaseKey = tuple[str, str, str, str]  # owner, scope, unit, day


class OwnerRow(Struct, frozen=True):
    """A row of owners."""

    started_at: float
    seen_at: float
    watermark: float
    version: str
    beat: int = 0
    backlog: int = 0
    ended_at: float | None = None
    set_again_at: float | None = None


class BalanceRow(Struct, frozen=True):
    """A row of balances."""

    cap: int | None
    drawn: int = 0
    corrected: int = 0
    tight_since: float | None = None

    @property
    def left(self) -> int:
        """What it has left; of a capped one."""
        assert self.cap is not None
        return self.cap - max(self.drawn + self.corrected, 0)


class Lease(Struct, frozen=True):
    """A row of leases."""

    granted: int = 0
    returned: int = 0
    spent: int = 0
    overdrawn: int = 0


class SqlModel:
    """The tables and their functions. Each verb is one committed statement; times are unix seconds."""

    def __init__(self) -> None:
        self.owners: dict[str, OwnerRow] = {}
        self.balances: dict[Key, BalanceRow] = {}
        self.leases: dict[LeaseKey, Lease] = {}
        self.limits: dict[str, dict[str, int]] = {}  # by scope: what its row says of its limits
        self.closed_days: dict[str, bool] = {}
        self.failovers: dict[int, float] = {}
        self.rows: dict[str, UsageRecord] = {}
        self.daily: dict[tuple[str, ...], tuple[int, int, int]] = {}  # calls, tokens, nanousd
        self.corrections: dict[int, tuple[tuple[str, ...], str, int, int]] = {}
        self.on_notify: Callable[[str], None] = lambda scope: None
        self.on_grant: Callable[[str, list[Need], list[int], str, float], None] = lambda *grant: None
        self.server = 0.0  # when the server was started
        self._by_room: dict[tuple[str, str], dict[LeaseKey, None]] = {}
        self._undo: list[list[tuple[dict, Any, Any]]] = []

    # -- statements

    def begin(self, owner: str, version: str, moment: float) -> None:
        """List an owner."""
        self._statement()
        if owner not in self.owners:
            self._put(self.owners, owner, OwnerRow(moment, moment, moment, version))

    def beat(self, owner: str, watermark: float, backlog: int, moment: float) -> Beat | None:
        """Say that an owner lives."""
        self._statement()
        row = self.owners.get(owner)
        if row is None or row.ended_at is not None:
            return None
        row = replace(row, beat=row.beat + 1, seen_at=moment, watermark=watermark, backlog=backlog)
        living = 1 + sum(
            which != owner and other.ended_at is None and other.seen_at > moment - ALIVE
            for which, other in self.owners.items()
        )
        self._put(self.owners, owner, row)
        tight = {
            scope
            for (scope, _, _), balance in self.balances.items()
            if balance.tight_since is not None and balance.tight_since > moment - 3
        }
        return Beat(row.beat, moment, living, self.failovers.get(1), sorted(tight), self.server)

    def take_room(
        self, owner: str, day: str, asks: Sequence[Sequence[Need]], share: float, moment: float, clock: float
    ) -> Taken:
        """Draw room: for each ask all it needs or nothing."""
        self._statement()
        needs = [need for ask in asks for need in ask]
        scopes = {need.scope for need in needs}
        if not any(ask and all(self._may_fit(need, day) for need in ask) for ask in asks):
            return self._answer(owner, day, scopes, None, moment, with_sums=True)
        beat = self._touch(owner, seen_at=moment)
        if beat is None:
            return Taken(refused="ended")
        if any(closed >= day for closed in self.closed_days):
            return Taken(refused="closed", beat=beat)
        if self._is_recovering(moment):
            return Taken(refused="recovering", beat=beat)
        if abs(clock - moment) > 2 and not any(period == day for _, _, period in self.balances):
            return Taken(refused="clock", beat=beat)
        for need in needs:
            if (key := (owner, need.scope, need.unit, day)) not in self.leases:
                self._put_lease(key, Lease())
        self._make_balances((need.scope, need.unit, day) for need in needs)
        was_refused = False
        for ask in asks:
            if not ask:
                continue
            if not all(self._fits(need, day) for need in ask):
                was_refused = True
                continue
            amounts = [self._amount(need, day, share) for need in ask]
            self.on_grant(owner, list(ask), amounts, day, share)
            for need, amount in zip(ask, amounts, strict=True):
                key = owner, need.scope, need.unit, day
                lease = self.leases.get(key, Lease())
                self._put_lease(key, replace(lease, granted=lease.granted + amount))
            self._draw(((need.scope, need.unit, day), amount) for need, amount in zip(ask, amounts, strict=True))
        holds: dict[Key, int] = {}
        for need in needs:
            for balance in self.keys_of(need.scope, need.unit, day):
                holds[balance] = max(holds.get(balance, 0), need.hold)
        for balance, hold in holds.items():
            self._note_tightness(balance, hold, share, moment)
        return self._answer(owner, day, scopes, beat, moment, with_sums=was_refused)

    def give_back(self, owner: str, returns: Sequence[Told], moment: float) -> int | None:
        """Set what an owner has given back."""
        self._statement()
        beat = self._touch(owner, seen_at=moment)
        if beat is not None:
            self._tell(owner, [one for one in returns if (owner, one.scope, one.unit, one.day) in self.leases])
        return beat

    def book_spent(self, flusher: str, spent: dict[LeaseKey, int]) -> int | None:
        """Book what new rows have spent on the leases of the owners that they name; inside an insert."""
        beat = self._touch(flusher)
        over_all = []
        for key, amount in spent.items():
            lease = self.leases.get(key, Lease())
            over = max(0, lease.returned + lease.spent + amount - lease.granted)
            self._put_lease(
                key,
                Lease(lease.granted + over, lease.returned, lease.spent + amount, lease.overdrawn + over),
            )
            if over:
                over_all.append((key[1:], over))
        self._make_balances(room for room, _ in over_all)
        self._draw(over_all)
        return beat

    def set_again(self, owner: str, leases: Sequence[Told], moment: float) -> int | None:
        """Tell all leases of an owner anew, after the database forgot."""
        self._statement()
        beat = self._touch(owner, seen_at=moment, set_again_at=moment)
        if beat is not None:
            self._tell(owner, leases)
        return beat

    def found_failover(self, known: float | None, moment: float) -> float:
        """Note that the database forgot."""
        self._statement()
        found_at = self.failovers.get(1)
        if found_at is None or (known is not None and found_at <= known):
            self._put(self.failovers, 1, moment)
        return self.failovers[1]

    def end(self, owner: str, moment: float) -> bool:
        """End an owner that is wholly in the ledger."""
        self._statement()
        row = self.owners.get(owner)
        if row is None or row.ended_at is not None:
            return False
        self._put(self.owners, owner, replace(row, ended_at=moment))
        changed = []
        for key, lease in tuple(self.leases.items()):
            idle = lease.granted - lease.returned - lease.spent
            if key[0] == owner and idle > 0:
                self._put_lease(key, replace(lease, returned=lease.granted - lease.spent))
                changed.append((key[1:], -idle))
        self._draw(changed)
        return True

    def correct(self, scopes: Sequence[str], day: str, tokens: int, nanousd: int) -> None:
        """Book a signed correction of a day."""
        self._statement()
        self._put(self.corrections, len(self.corrections), (tuple(scopes), day, tokens, nanousd))
        rooms = [(scope, unit, day) for scope in scopes for unit in (TOKENS, NANOUSD)]
        self._make_balances(rooms)
        for scope, unit, _ in rooms:
            for key in self.keys_of(scope, unit, day):
                balance = self.balances[key]
                amount = tokens if unit == TOKENS else nanousd
                self._put(self.balances, key, replace(balance, corrected=balance.corrected + amount))

    def set_limits(self, scope: str, limits: dict[str, int], moment: float) -> None:
        """Change a scope's limits, and the caps of its balances with them; recall what is drawn beyond them."""
        self._statement()
        self._put(self.limits, scope, limits)
        for key, balance in tuple(self.balances.items()):
            if key[0] == scope:
                balance = replace(balance, cap=self._cap_of(*key), tight_since=None)
                if balance.cap is not None and balance.left < 0:
                    balance = replace(balance, tight_since=moment)
                    self.on_notify(scope)
                self._put(self.balances, key, balance)

    def close_day(self, day: str) -> None:
        """Close a day."""
        self._statement()
        self._put(self.closed_days, day, True)

    def insert(self, flusher: str, records: Sequence[UsageRecord], today: str) -> tuple[list[UsageRecord], int | None]:
        """Insert rows once, with their rollups and what they spend; return those that were new, and the beat."""
        self._statement()
        new, spent = [], dict[LeaseKey, int]()
        for record in records:
            if record.request_id in self.rows:
                continue
            new.append(record)
            self._put(self.rows, record.request_id, record)
            day = day_in(record.request_id)
            booked_on = today if any(closed >= day for closed in self.closed_days) else day
            tokens, nanousd = record.input_tokens + record.output_tokens, record.cost_nanousd
            key = record.team_id, day, booked_on, record.key_id, record.status.value
            calls, all_tokens, all_nanousd = self.daily.get(key, (0, 0, 0))
            self._put(self.daily, key, (calls + 1, all_tokens + tokens, all_nanousd + nanousd))
            for lease, amount in spent_by(record, day):
                spent[lease] = spent.get(lease, 0) + amount
        return new, self.book_spent(flusher, spent)

    # -- what a failover and a search do

    @property
    def touched(self) -> list[tuple[dict, Any, Any]]:
        """Where the last statement wrote, and what was there before."""
        return self._undo[-1] if self._undo else []

    def forget(self, statements: int) -> None:
        """Go back to what was before the last few statements."""
        for _ in range(min(statements, len(self._undo))):
            for table, key, old in reversed(self._undo.pop()):
                if old is None:
                    del table[key]
                else:
                    table[key] = old

    # -- inside

    def _statement(self) -> None:
        self._undo.append([])
        if len(self._undo) > 2 * REMEMBERED:
            del self._undo[:REMEMBERED]

    def _put(self, table: dict, key: Any, value: Any) -> None:
        self._undo[-1].append((table, key, table.get(key)))  # none of them holds a None
        table[key] = value

    def _put_lease(self, key: LeaseKey, lease: Lease) -> None:
        self._by_room.setdefault((key[1], key[2]), {})[key] = None
        self._put(self.leases, key, lease)

    def _touch(self, owner: str, **changes: float) -> int | None:
        row = self.owners.get(owner)
        if row is None or row.ended_at is not None:
            return None
        self._put(self.owners, owner, replace(row, beat=row.beat + 1, **changes))
        return row.beat + 1

    def _tell(self, owner: str, leases: Sequence[Told]) -> None:
        changed = []
        for one in leases:
            key = owner, one.scope, one.unit, one.day
            lease = self.leases.get(key, Lease())
            after = self._told_as(lease, one)
            self._put_lease(key, after)
            changed.append((key[1:], after.granted - after.returned - lease.granted + lease.returned))
        self._make_balances(room for room, amount in changed if amount > 0)
        self._draw(changed)

    def _told_as(self, lease: Lease, told: Told) -> Lease:
        returned = max(lease.returned, told.returned)
        return replace(lease, granted=max(lease.granted, told.granted, returned + lease.spent), returned=returned)

    def _is_recovering(self, moment: float) -> bool:
        found_at = self.failovers.get(1)
        return (
            found_at is not None
            and moment < found_at + RECOVERY
            and any(
                row.ended_at is None
                and row.seen_at > found_at - MISSED
                and row.started_at < found_at
                and (row.set_again_at is None or row.set_again_at < found_at)
                for row in self.owners.values()
            )
        )

    def keys_of(self, scope: str, unit: str, day: str) -> tuple[Key, ...]:
        """Return the balances behind a lease: of the day, and of its month for money."""
        of_day = scope, unit, day
        return (of_day, (scope, unit, day[:7])) if unit == NANOUSD else (of_day,)

    def _known(self, need: Need, day: str) -> Iterator[BalanceRow]:
        for key in self.keys_of(need.scope, need.unit, day):
            balance = self.balances.get(key)
            if balance is not None and balance.cap is not None:
                yield balance

    def _may_fit(self, need: Need, day: str) -> bool:
        return need.need <= 0 or all(
            balance.tight_since is None or need.need <= balance.left for balance in self._known(need, day)
        )

    def _fits(self, need: Need, day: str) -> bool:
        return need.need <= 0 or all(need.need <= balance.left for balance in self._known(need, day))

    def _amount(self, need: Need, day: str, share: float) -> int:
        capped = list(self._known(need, day))
        if any(balance.tight_since is not None or share * balance.left < need.hold for balance in capped):
            return max(need.need, 0)
        if not capped:
            return max(need.need, need.want, 0)
        most = math.floor(share * min(balance.left for balance in capped))
        return int(max(need.need, min(need.want, most), 0))

    def _note_tightness(self, key: Key, hold: int, share: float, moment: float) -> None:
        balance = self.balances[key]
        if balance.cap is None:
            return
        part = share * balance.left
        if balance.tight_since is not None and part >= 2 * hold:
            self._put(self.balances, key, replace(balance, tight_since=None))
        elif balance.tight_since is None and part < hold:
            self._put(self.balances, key, replace(balance, tight_since=moment))
            self.on_notify(key[0])

    def _make_balances(self, rooms: Iterable[tuple[str, str, str]]) -> None:
        for scope, unit, day in rooms:
            for key in self.keys_of(scope, unit, day):
                if key not in self.balances:
                    self._put(self.balances, key, BalanceRow(self._cap_of(*key)))

    def _cap_of(self, scope: str, unit: str, period: str) -> int | None:
        return self.limits.get(scope, {}).get(f"{unit}_per_{'month' if len(period) == 7 else 'day'}")

    def _draw(self, changes: Iterable[tuple[tuple[str, str, str], int]]) -> None:
        for (scope, unit, day), amount in changes:
            if amount:
                for key in self.keys_of(scope, unit, day):
                    balance = self.balances.get(key)
                    if balance is not None:
                        self._put(self.balances, key, replace(balance, drawn=balance.drawn + amount))

    def _answer(
        self, owner: str, day: str, scopes: set[str], beat: int | None, moment: float, *, with_sums: bool
    ) -> Taken:
        rows, balances = [], []
        for scope in sorted(scopes):
            for unit in (NANOUSD, TOKENS):
                lease = self.leases.get((owner, scope, unit, day))
                if lease is not None:
                    rows.append(LeaseRow(scope, unit, lease.granted, lease.returned, lease.spent))
                for key in self.keys_of(scope, unit, day):
                    balance = self.balances.get(key)
                    if balance is not None and balance.cap is not None:
                        use = self._use(owner, key, day, moment) if with_sums else (None, None)
                        since = balance.tight_since
                        balances.append(
                            Balance(
                                *key, balance.cap, balance.drawn, balance.corrected,
                                None if since is None else moment - since, *use,
                            )
                        )  # fmt: skip
        return Taken(beat=beat, leases=rows or None, balances=balances or None)

    def _use(self, owner: str, key: Key, day: str, moment: float) -> tuple[int, int]:
        spent = unused = 0
        scope, unit, period = key
        for which in self._by_room.get((scope, unit), ()):
            lease = self.leases.get(which)
            if lease is None or not (which[3] == day if len(period) == 10 else which[3].startswith(period)):
                continue
            spent += lease.spent
            holder = self.owners.get(which[0])
            answers = holder is not None and holder.ended_at is None and holder.seen_at > moment - ANSWERS
            if answers and which[0] != owner:
                unused += lease.granted - lease.returned - lease.spent
        return spent, unused


def spent_by(record: UsageRecord, day: str) -> Iterator[tuple[LeaseKey, int]]:
    """Yield what a row takes of which leases."""
    if record.status in CHARGED:
        scopes = [f"team:{record.team_id}", f"key:{record.key_id}"]
        if record.model_used in (record.held_models or ()):
            scopes.append(f"model:{record.team_id}/{record.model_used}")
        for scope in (*scopes, *(record.held_scopes or ())):
            for unit, amount in (
                (TOKENS, record.input_tokens + record.output_tokens),
                (NANOUSD, record.cost_nanousd),
            ):
                if amount:
                    yield (record.owner, scope, unit, day), amount


def day_in(request_id: str) -> str:
    """Return the UTC day inside an id."""
    return day_text(int(request_id[:8] + request_id[9:13], 16) // 86_400_000)


def day_text(day: int) -> str:
    """Return a day since 1970 as its date."""
    found = _DAYS.get(day)
    if found is None:
        found = _DAYS[day] = (EPOCH + timedelta(days=day)).isoformat()
    return found


def today_at(moment: float) -> date:
    """Return the UTC day of a moment."""
    return EPOCH + timedelta(days=int(moment // 86_400))


_DAYS: dict[int, str] = {}
