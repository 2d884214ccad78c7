# A balance that differs from what it is made of is made anew, under its lock: drawn from its leases, corrected from the
# corrections, the cap from the row that has the limit. What is healed is an error all the same, and told as one.

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection


class Healed(Struct, frozen=True):
    """A balance that was made anew."""

    scope: str
    unit: str
    period: str
    before: dict[str, int | None]  # cap, drawn and corrected
    after: dict[str, int | None]


async def heal_balance(connection: AsyncConnection, scope: str, unit: str, period: str) -> Healed | None:
    """Make a balance anew; ``None``: it was as it should be.

    The limit's row is locked before the balance, as when a limit is changed. A process that draws changes lease and
    balance in one transaction, under the balance's lock: what the second statement sees of leases is what the balance
    has.
    """
    key = {"scope": scope, "unit": unit, "period": period}
    await connection.execute(MAKE, key)
    before = (await connection.execute(LOCK, key)).one()._asdict()
    after = (await connection.execute(MAKE_ANEW, key)).one()._asdict()
    return None if before == after else Healed(scope, unit, period, before, after)


MAKE = text("""
    INSERT INTO balances (scope, unit, period, cap) SELECT :scope, :unit, :period, cap_of(:scope, :unit, :period)
    ON CONFLICT DO NOTHING
""")
LOCK = text("""
    SELECT cap, drawn, corrected FROM balances WHERE scope = :scope AND unit = :unit AND period = :period
    FOR NO KEY UPDATE
""")
MAKE_ANEW = text("""
    WITH span AS (
        SELECT CAST(rpad(:period, 10, '-01') AS date) AS first,
               CASE length(:period) WHEN 7 THEN interval '1 month' ELSE interval '1 day' END AS long
    )
    UPDATE balances
    SET cap = cap_of(scope, unit, period),
        drawn = (
            SELECT coalesce(sum(granted - returned), 0) FROM leases, span
            WHERE leases.scope = :scope AND leases.unit = :unit AND day >= first AND day < first + long
        ),
        corrected = (
            SELECT coalesce(sum(CASE :unit WHEN 'tokens' THEN input_tokens + output_tokens ELSE cost_nanousd END), 0)
            FROM corrections, span
            WHERE (:scope = 'team:' || team_id OR :scope = 'key:' || key_id) AND day >= first AND day < first + long
        )
    WHERE scope = :scope AND unit = :unit AND period = :period
    RETURNING cap, drawn, corrected
""")
