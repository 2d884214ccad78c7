# Prices as rows name them. A row says by which edition of a price its cost was reckoned, and the database keeps what
# that edition says: so the cost can be reckoned again, long after the configuration has another price.

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.core.edges import fetch_within
from billing.core.ids import least_id
from billing.core.prices import Price, cost_of, kept_an_hour, picture_prices
from billing.core.records import CHARGED, MOST_TOKENS, TOKENS, UsageRecord, bounded_cost
from protocol.usage import Usage

SAMPLE = 2000  # rows whose cost one audit reckons again: all of a small day, others of a large one each time
DAY = 86_400.0  # seconds


@lru_cache(maxsize=4096)
def edition_of(price: Price) -> str:
    """Return the name of what a price says: equal prices have one name, in every process."""
    return hashlib.blake2b(msgspec.json.encode(price), digest_size=8).hexdigest()


class PriceEditions:
    """The prices that one process reckons by, and which of them the database has been told."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._prices: dict[str, Price] = {}
        self._told: set[str] = set()
        self.add(prices)

    def add(self, prices: Iterable[Price]) -> None:
        """Know more of them: those of a configuration that was just loaded. Calls may still run by the others."""
        all_of = ((price, kept_an_hour(price), *picture_prices(price)) for price in prices)
        self._prices |= {edition_of(one): one for each in all_of for one in each}

    def forget(self) -> None:
        """Tell all of them again: the database may have forgotten some."""
        self._told.clear()

    async def tell(self, connection: AsyncConnection, records: Sequence[UsageRecord]) -> set[str]:
        """Write down what the editions say that these records name; for ``note`` once that is committed."""
        untold = {record.price for record in records} & self._prices.keys() - self._told
        for edition in sorted(untold):
            price = msgspec.json.encode(self._prices[edition]).decode()
            await connection.execute(TELL, {"edition": edition, "price": price})
        return untold

    def note(self, told: set[str]) -> None:
        """Take note of what was committed."""
        self._told |= told


async def tell_price(connection: AsyncConnection, price: Price) -> None:
    """Write down what the edition of a price says, for rows that no journal brings."""
    told = {"edition": edition_of(price), "price": msgspec.json.encode(price).decode()}
    await connection.execute(TELL, told)


async def compare_costs(
    connection: AsyncConnection, day: date, within: float = 10.0
) -> tuple[int, list[dict[str, Any]]]:
    """Reckon again what calls of a day cost, ``SAMPLE`` of them from a random moment on.

    Returns how many, and those that do not cost what their tokens cost by the price that they name: where, what
    quantity, expected and found (nano-dollars). Rows whose edition the database was never told are left out: where none
    of millions was, each is looked at, for up to ``within`` seconds.
    """
    begins = datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
    first, start, last = (least_id(begins + moment) for moment in (0.0, random.uniform(0, DAY), DAY))
    rows: list[Any] = []
    for since, until in ((start, last), (first, start)):
        values = {"day": day, "since": since, "until": until, "charged": list(CHARGED), "most": SAMPLE - len(rows)}
        rows += await fetch_within(connection, ROWS, values, within)
    prices: dict[str, Price] = {}
    differences: list[dict[str, Any]] = []
    for row in rows:
        if row["edition"] not in prices:
            prices[row["edition"]] = msgspec.json.decode(row["price"], type=Price)
        usage = Usage(**{name: row[name] for name in TOKENS}, **(row["units"] or {}))
        is_batch, made_at = row["tier"] == "batch", row["made_at"]
        reckoned = bounded_cost(cost_of(usage, prices[row["edition"]], batch=is_batch, at=made_at))
        if reckoned != row["cost_nanousd"]:
            call = {"where": str(row["request_id"]), "quantity": "cost_nanousd"}
            differences.append(call | {"expected": reckoned, "found": row["cost_nanousd"]})
    return len(rows), differences


TELL = text(
    "INSERT INTO price_editions (edition, price) VALUES (:edition, CAST(:price AS json)) ON CONFLICT DO NOTHING"
)
# A count at its bound was cut: what it cost was reckoned by the whole of it.
ROWS = text(f"""
    SELECT request_id, edition, CAST(told.price AS text) AS price, tier, {", ".join(TOKENS)}, units, cost_nanousd,
           CAST(extract(epoch FROM created_at) AS double precision) AS made_at
    FROM usage_records AS row JOIN price_editions AS told ON told.edition = row.price
    WHERE day = :day AND request_id >= :since AND request_id < :until AND status = ANY (:charged)
      AND greatest(input_tokens, output_tokens) < {MOST_TOKENS}
    ORDER BY request_id
    LIMIT :most
""")  # noqa: S608  (a constant of this file)
