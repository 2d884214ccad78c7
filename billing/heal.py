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
    """Make a balance anew; ``None``: it is as it should be, so nothing was changed.

    The limit's row is locked before the balance, as when a limit is changed. Whoever draws changes lease and balance in
    one transaction, under the balance's lock: what the second statement sees of leases is what the balance has.
    """
    key = {"scope": scope, "unit": unit, "period": period}
    await connection.execute(MAKE, key)
    before = (await connection.execute(LOCK, key)).one()._asdict()
    after = (await connection.execute(SOURCES, key)).one()._asdict()
    if before == after:
        return None
    await connection.execute(SET, key | after)
    return Healed(scope, unit, period, before, after)


MAKE = text("""
    INSERT INTO balances (scope, unit, period, cap) SELECT :scope, :unit, :period, cap_of(:scope, :unit, :period)
    ON CONFLICT DO NOTHING
""")
LOCK = text("""
    SELECT cap, drawn, corrected FROM balances WHERE scope = :scope AND unit = :unit AND period = :period
    FOR NO KEY UPDATE
""")
SOURCES = text("""
    WITH span AS (
        SELECT CAST(rpad(:period, 10, '-01') AS date) AS first,
               CASE length(:period) WHEN 7 THEN interval '1 month' ELSE interval '1 day' END AS long
    )
    SELECT cap_of(:scope, :unit, :period) AS cap,
           (SELECT CAST(coalesce(sum(granted - returned), 0) AS bigint) FROM leases, span
            WHERE scope = :scope AND unit = :unit AND day >= span.first AND day < span.first + span.long) AS drawn,
           (SELECT CAST(coalesce(sum(
                       CASE CAST(:unit AS text) WHEN 'tokens' THEN input_tokens + output_tokens ELSE cost_nanousd END
                   ), 0) AS bigint)
            FROM corrections, span
            WHERE (:scope = 'team:' || team_id OR :scope = 'key:' || key_id)
              AND day >= span.first AND day < span.first + span.long) AS corrected
""")
SET = text("""
    UPDATE balances SET cap = :cap, drawn = :drawn, corrected = :corrected
    WHERE scope = :scope AND unit = :unit AND period = :period
""")
