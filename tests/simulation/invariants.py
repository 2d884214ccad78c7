# What must hold, by the numbers of the design: after every statement for what it touched, at every admitted call, and
# for everything once the world is healed and at rest.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from billing.core.records import Status
from billing.quotas.lease_store import NANOUSD, TOKENS, Need
from billing.quotas.standing import GIVE_UP_AFTER, LONGEST_PACE
from billing.upkeep.owner import EVERY
from tests.simulation.sql_model import (
    MISSED,
    RECOVERY,
    BalanceRow,
    Key,
    Lease,
    LeaseKey,
    SqlModel,
    day_in,
    spent_by,
)

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

NOTHING = Lease()
HELD_UP = 2 * GIVE_UP_AFTER + EVERY + 0.1  # seconds by which an unheard answer delays a return, and another one a beat
IDLE_FOR = 0.25 + EVERY + 0.15  # seconds; the last part for statements, each up to 60 ms, and between two looks
HEARD_FOR = LONGEST_PACE + 0.3  # seconds, of an owner that has heard the bell: the last part as before

Idle = tuple[str, Key, str]  # an owner's lease, and the tight balance that it is drawn from


class Broken(AssertionError):
    """An invariant does not hold; ``number`` is the design's."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"invariant {number}: {what}")
        self.number = number


def changes(model: SqlModel) -> tuple[dict[LeaseKey, Lease], dict[Key, BalanceRow | None]]:
    """Return what the last statement touched, as it was before."""
    leases: dict[LeaseKey, Lease] = {}
    balances: dict[Key, BalanceRow | None] = {}
    for table, key, old in model.touched:
        if table is model.leases:
            leases.setdefault(key, old or NOTHING)
        elif table is model.balances:
            balances.setdefault(key, old)
    return leases, balances


def check_statement(model: SqlModel, verb: str) -> None:
    """(1), (4), (6): the books of what the last statement touched."""
    leases, balances = changes(model)
    if not leases and not balances:
        return
    drawn: dict[Key, int] = defaultdict(int)
    for key, before in leases.items():
        after = model.leases[key]
        owner, scope, unit, day = key
        change = after.granted - after.returned - before.granted + before.returned
        if change:
            for balance in model.keys_of(scope, unit, day):
                drawn[balance] += change
        if after.granted < before.granted or after.returned < before.returned or after.spent < before.spent:
            raise Broken(2, f"{verb} took something back of {key}: {before} {after}")
        if after.granted < after.returned + after.spent:
            raise Broken(4, f"{verb} left more spent than drawn of {key}: {after}")
        row = model.owners.get(owner)
        if row is not None and row.ended_at is not None and after.granted != after.returned + after.spent:
            raise Broken(6, f"{verb} left room with {key}, which has ended: {after}")
    for balance in drawn.keys() | balances.keys():
        before_row, after_row = balances.get(balance, model.balances.get(balance)), model.balances.get(balance)
        if after_row is None:
            raise Broken(1, f"{verb} drew on {balance}, which is not there")
        was = before_row.drawn if before_row is not None else 0
        if after_row.drawn - was != drawn.get(balance, 0):
            raise Broken(1, f"{verb} moved {balance} by {after_row.drawn - was}, its leases by {drawn.get(balance, 0)}")
        passes = after_row.cap is not None and after_row.drawn + after_row.corrected > after_row.cap
        if verb == "take" and after_row.drawn > was and passes:
            raise Broken(1, f"a grant passed the cap of {balance}: {after_row}")


def check_grant(model: SqlModel, owner: str, needs: list[Need], amounts: list[int], day: str, share: float) -> None:
    """(6), (8): who gets something, and how much beyond its need; before it is drawn."""
    row = model.owners.get(owner)
    if row is None or row.ended_at is not None:
        raise Broken(6, f"a grant to {owner}, which has ended")
    for need, amount in zip(needs, amounts, strict=True):
        if amount < need.need:
            raise Broken(1, f"a grant of less than was needed: {need} {amount}")
        caps = [model.balances[key] for key in model.keys_of(need.scope, need.unit, day)]
        for balance in caps:
            if balance.cap is not None and amount > max(0, need.need, share * balance.left):
                raise Broken(8, f"a grant of {amount} for {need} of {balance}, by a share of {share}")


def check_recovery(model: SqlModel, found_at: float | None, moment: float) -> None:
    """(10): nothing is granted once a failover is found until every owner seen before has told its leases again."""
    found_at = max((one for one in (found_at, model.failovers.get(1)) if one is not None), default=None)
    if found_at is None or moment >= found_at + RECOVERY:
        return
    for name, row in model.owners.items():
        is_awaited = row.ended_at is None and row.started_at < found_at and row.seen_at > found_at - MISSED
        if is_awaited and (row.set_again_at or 0) < found_at:
            raise Broken(10, f"a grant before {name} has told its leases again")


def check_opening(had: bool, clock: float, moment: float) -> None:
    """(9): an owner whose clock differs by more than two seconds opens no new day."""
    if not had and abs(clock - moment) > 2:
        raise Broken(9, f"a day was opened by a clock that is off by {clock - moment:.1f} s")


def check_again(model: SqlModel, verb: str) -> None:
    """(2): a statement that was said before changes nothing but beats."""
    if verb == "take":
        return
    for table, key, old in model.touched:
        if table is not model.owners and table[key] != old:
            raise Broken(2, f"{verb}, said twice, changed {key} from {old} to {table[key]}")


def check_room(process: Process, room: Any) -> None:
    """(3): what the database knows as drawn covers what is used and held."""
    lease = process.world.model.leases.get((process.name, room.scope, room.unit, room.day), NOTHING)
    inside = room.used + room.held - process.excess.get(room, 0)
    if inside > max(0, lease.granted - lease.returned):
        raise Broken(
            3,
            f"{process.name} uses {room.used} and holds {room.held} of {room.scope} {room.unit} {room.day}"
            f" ({room.granted} - {room.returned}), and the database gave {lease}",
        )


def check_idle(world: World, idle: dict[Idle, tuple[float, int]]) -> dict[Idle, tuple[float, int]]:
    """(7): What an owner that answers does not use of a tight balance comes back. ``idle``: since when each lease has
    had something unused and given nothing back, and what it had given back by then; returns the same for now."""
    model, now, found = world.model, world.loop.elapsed, dict[Idle, tuple[float, int]]()
    tight: dict[str, list[Key]] = defaultdict(list)
    for key, balance in model.balances.items():
        if balance.tight_since is not None and balance.cap is not None:
            tight[key[0]].append(key)
    for process in world.living() if tight else ():
        for room in rooms_of(process):
            if room.scope in tight:
                lease = model.leases.get((process.name, room.scope, room.unit, room.day), NOTHING)
                # After a failover rows come before their lease is set again and draw by force: the next ask reads that.
                granted = min(lease.granted, room.granted) if model.server else lease.granted
                if granted - lease.returned <= max(room.used + room.held, lease.spent):
                    continue
                for key in set(tight[room.scope]).intersection(model.keys_of(room.scope, room.unit, room.day)):
                    which = process.name, key, room.day
                    since, returned = idle.get(which, (now, lease.returned))
                    if lease.returned > returned or not world.answers(process, since - HELD_UP):
                        since = now
                    found[which] = since, lease.returned
                    is_heard = process.bells.get(room.scope, 0.0) >= (model.balances[key].tight_since or 0.0)
                    if now - since > (HEARD_FOR if is_heard else IDLE_FOR):
                        raise Broken(7, f"{which} has been idle for {now - since:.2f} s: {lease}, {room.used} used")
    return found


def check_rows(world: World) -> None:
    """(4): every call that was opened has one row, with what it used; and books and rollups are those of the rows."""
    model = world.model
    if missing := world.opened.keys() - model.rows.keys():
        raise Broken(4, f"{len(missing)} calls have no row: {sorted(missing)[:3]}")
    if more := model.rows.keys() - world.opened.keys():
        raise Broken(4, f"{len(more)} rows of no call: {sorted(more)[:3]}")
    sums: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    spent: dict[LeaseKey, int] = defaultdict(int)
    for request_id, row in model.rows.items():
        if (closed := world.closed.get(request_id)) is not None and closed != row:
            raise Broken(4, f"the row is not the close: {row} {closed}")
        tokens, nanousd = world.reached.get(request_id, (0, 0))
        broke_off = Status.INTERRUPTED if tokens else Status.FAILED, tokens, nanousd
        if closed is None and (row.status, row.output_tokens, row.cost_nanousd) != broke_off:
            raise Broken(4, f"the row of a call that broke off at {broke_off}: {row}")
        day = day_in(request_id)
        total = sums[row.team_id, day, row.key_id, row.status.value]
        total[0] += 1
        total[1] += row.input_tokens + row.output_tokens
        total[2] += row.cost_nanousd
        for key, amount in spent_by(row, day):
            spent[key] += amount
    rollups: dict[Any, list[int]] = defaultdict(lambda: [0, 0, 0])
    for (team, day, _, of_key, status), counts in model.daily.items():
        for at, count in enumerate(counts):
            rollups[team, day, of_key, status][at] += count
    if rollups != sums:
        raise Broken(4, f"rollups are not the sums of the rows: {dict(rollups)} {dict(sums)}")
    for key in spent.keys() | model.leases.keys():
        if model.leases.get(key, NOTHING).spent != spent.get(key, 0):
            raise Broken(4, f"{key} has spent {model.leases.get(key)}, its rows {spent.get(key, 0)}")


def check_books(model: SqlModel) -> None:
    """(1), (5): balances are the sums of their leases and corrections."""
    drawn: dict[Key, int] = defaultdict(int)
    for (_, scope, unit, day), lease in model.leases.items():
        for key in model.keys_of(scope, unit, day):
            drawn[key] += lease.granted - lease.returned
    corrected: dict[Key, int] = defaultdict(int)
    for scopes, day, tokens, nanousd in model.corrections.values():
        for scope in scopes:
            for unit, amount in ((TOKENS, tokens), (NANOUSD, nanousd)):
                for key in model.keys_of(scope, unit, day):
                    corrected[key] += amount
    for key in model.balances.keys() | drawn.keys() | corrected.keys():
        balance = model.balances.get(key, BalanceRow(None))
        if balance.drawn != drawn.get(key, 0):
            raise Broken(1, f"{key} has {balance.drawn} drawn, its leases {drawn.get(key, 0)}")
        if balance.corrected != corrected.get(key, 0):
            raise Broken(5, f"{key} has {balance.corrected} corrected, its corrections {corrected.get(key, 0)}")


def check_rest(world: World) -> None:
    """(3), (4), (6), (10): nothing is held, open or waiting, and those that ended have nothing but what they spent."""
    model = world.model
    check_books(model)
    check_rows(world)
    for process in world.living():
        if process.leases.holding.calls:
            raise Broken(3, f"{process.name} still holds {len(process.leases.holding.calls)} calls")
        for room in rooms_of(process):
            if room.held:
                raise Broken(3, f"{room.held} held of {room.scope} by no call")
            check_room(process, room)
        if process.journal.backlog or process.journal.oldest is not None:
            raise Broken(4, f"{process.name} has calls that are not in the ledger")
        if process.is_unsure:
            raise Broken(10, f"{process.name} has not told its leases again after a failover")
    for name, row in model.owners.items():
        is_living = any(process.name == name for process in world.living())
        if row.started_at > world.died.get(name, row.started_at) and not any(
            owner == name for owner, *_ in model.leases
        ):
            continue  # its first statement was executed after its death: it has nothing, and is lost after an hour
        if (row.ended_at is None) != is_living:
            raise Broken(6, f"{name} has {'not ' * (row.ended_at is None)}ended")
    for (owner, *_), lease in model.leases.items():
        ended = owner in model.owners and model.owners[owner].ended_at is not None
        if ended and lease.granted - lease.returned != lease.spent:
            raise Broken(6, f"{owner} has ended with {lease}")


def rooms_of(process: Process) -> Iterator[Any]:
    """Yield all rooms of a process."""
    yield from process.leases.rooms
