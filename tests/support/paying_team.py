# A team of a running house, with what its answers said that they used: the other side of every report.

from __future__ import annotations

import asyncio
import time
import uuid
from decimal import Decimal
from typing import Any

import httpx

from billing.core.records import Status
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock
from gateway.storage.database import Database
from tests.support.factories import make_record
from tests.support.house import House
from tests.support.waiting import until


class PayingTeam:
    """A fresh team with a key, and what its answers said that they used."""

    def __init__(self, house: House, **limits: float) -> None:
        self.house = house
        self.id = f"team-{uuid.uuid4().hex[:12]}"
        with house.client(house.admin_key) as admin:
            admin.post("/admin/teams", json={"id": self.id, "limits": limits}).raise_for_status()
            made = admin.post("/admin/keys", json={"team_id": self.id}).raise_for_status().json()
        self.key, self.key_id = made["key"], made["key_id"]
        self.said: list[dict[str, Any]] = []

    def ask(self, model: str = "small", **more: Any) -> None:
        """Make one call and remember its usage."""
        body = {"model": model, "messages": [{"role": "user", "content": f"hello from {self.id}"}], **more}
        with self.house.client(self.key) as client:
            self.said.append(client.post("/v1/chat/completions", json=body).raise_for_status().json()["usage"])

    def usage(self, key: str | None = None, **query: str) -> httpx.Response:
        """Ask for the report, as the team unless a key says otherwise."""
        with self.house.client(key or self.key) as client:
            return client.get("/v1/usage", params=query)

    def settled(self) -> dict[str, Any]:
        """Return today's report once every call shows in it."""
        until(lambda: self.usage().raise_for_status().json()["requests"] >= len(self.said))
        return self.usage().json()  # type: ignore[no-any-return]

    def book(self, clock: Clock | None = None, **fields: Any) -> str:
        """Put a row into the books that no call made, of ``clock``'s moment; return its request id."""
        clock = clock or Clock()
        if fields.get("status") is Status.FAILED:
            free = ("cost_nanousd", "input_tokens", "cached_input_tokens", "output_tokens")
            fields |= dict.fromkeys(free, 0)
        record = make_record(clock.new_id(), team_id=self.id, key_id=self.key_id, **fields)

        async def insert() -> None:
            database = Database(self.house.settings.database_url, pool_size=1)
            async with database.begin() as connection:
                await insert_records(connection, [record], today=clock.today())
            await database.close()

        asyncio.run(insert())
        return record.request_id

    @property
    def cost(self) -> Decimal:
        """What the answers said that they cost."""
        return sum((Decimal(usage["cost_usd"]) for usage in self.said), Decimal(0))

    def correct(self, **said: Any) -> httpx.Response:
        """Book a correction of today, as an admin."""
        with self.house.client(self.house.admin_key) as admin:
            usual = {"team_id": self.id, "date": today(), "cost_usd": "-1", "reason": "a test"}
            return admin.post("/admin/corrections", json=usual | said)


def today() -> str:
    """Return the UTC day."""
    return time.strftime("%Y-%m-%d", time.gmtime())
