# `tollgate audit`: do ledger, statements and counters say the same?

from __future__ import annotations

import asyncio
from datetime import date, timedelta

import msgspec

from billing.audit import Difference, audit
from billing.cut_off import CutOff, owners_cut_off
from billing.quotas import Quotas
from billing.store_errors import STORES_AWAY
from gateway.clock import Clock
from gateway.command_line import Format, fail, say, show
from gateway.database import Database
from gateway.redis_client import open_redis
from gateway.settings import Settings

COLUMNS = Difference.__struct_fields__

PATIENCE = 2.0  # seconds for any call to Redis: an audit is in no hurry


def run_audit(settings: Settings, day: date | None) -> int:
    """Compare the books of ``day``, else of today and yesterday (UTC); print where they differ and return 1.

    Owners that are cut off from a store are told beside: what they did last cannot be compared yet.
    """
    today = Clock().today()
    days = [day] if day is not None else [today - timedelta(days=1), today]
    try:
        differences, cut_off = asyncio.run(_audit(settings, days))
    except STORES_AWAY as exc:
        fail(f"the books cannot be compared now: {str(exc).splitlines()[0] if str(exc) else repr(exc)}")
    if cut_off:
        owners = [msgspec.structs.asdict(one) for one in cut_off]
        show(Format.TABLE, cut_off, CutOff.__struct_fields__, owners, "Whose last calls cannot be compared yet")
    if not differences:
        say(f"the books of {' and '.join(map(str, days))} agree{', as far as they can be compared' if cut_off else ''}")
        return 0
    rows = [{name: getattr(one, name) for name in COLUMNS} for one in differences]
    show(Format.TABLE, msgspec.to_builtins(differences), COLUMNS, rows, "Where the books differ")
    return 1


async def _audit(settings: Settings, days: list[date]) -> tuple[list[Difference], list[CutOff]]:
    database = Database(settings.database_url, pool_size=1, application_name="tollgate audit")
    redis = open_redis(settings.redis_url, timeout=PATIENCE)
    try:
        quotas = Quotas(redis, Clock(), deadline=PATIENCE)
        differences = [one for day in days for one in await audit(database, quotas, day)]
        return differences, await owners_cut_off(database)
    finally:
        await redis.aclose()
        await database.close()
