# A team that spends most of its budget hears of it: gateway, ledger, worker, outbox and a real receiver.

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from gateway.accounts.schemas import LimitsInput, TeamPatch
from gateway.accounts.teams import update_team
from gateway.storage.audit_log import Act
from gateway.storage.database import Database
from tests.support.config_text import write_config
from tests.support.house import PEPPER, House, make_team
from tests.support.receiver import Receiver, receiving

TOLLGATE = Path(sys.executable).with_name("tollgate")
CAP = Decimal("0.0016")  # a call is held at less than a fifth of it
ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """The team's own server."""
    async with receiving() as receiver:
        yield receiver


@pytest.fixture
def worker(house: House, tmp_path: Path) -> Iterator[None]:
    """A worker of the house whose callbacks may reach this machine."""
    path = write_config(tmp_path / "tollgate.yaml", house.settings.database_url, house.settings.redis_url)
    text = path.read_text().replace("key_pepper: pepper of all the tests\n", f"key_pepper: {PEPPER}\n")
    path.write_text(text + "callbacks: {allow: [127.0.0.0/8]}\n")
    command = [str(TOLLGATE), "work", "--config", str(path)]
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    yield
    process.terminate()  # killed, it would stay an owner of the house that does not answer
    process.wait(30)


async def set_webhook(house: House, team_id: str, url: str) -> None:
    """Set a URL that the house itself would refuse: it leads to this machine."""
    database = Database(house.settings.database_url)
    async with database.begin() as connection:
        await update_team(connection, team_id, TeamPatch(webhook_url=url), Act("tests"))
    await database.close()


@pytest.mark.usefixtures("worker")
async def test_a_team_hears_once_that_its_budget_is_nearly_spent(house: House, receiver: Receiver) -> None:
    """Calls that come to 80 % of the day's dollars bring one signed event, which the stock client reads."""
    team_id = "team-with-a-budget"
    team_key = await make_team(house.settings, team_id, LimitsInput(usd_per_day=CAP))
    await set_webhook(house, team_id, receiver.url())
    admin = httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {house.admin_key}"}, timeout=30)
    team = httpx.AsyncClient(base_url=house.url, headers={"authorization": f"Bearer {team_key}"}, timeout=30)
    async with admin, team:
        secret = (await admin.post(f"/admin/teams/{team_id}/webhook-secrets")).json()["secret"]
        spent = Decimal(0)
        while spent < CAP * 80 / 100:
            answer = await team.post("/v1/chat/completions", json=ASK)
            assert answer.status_code == 200, answer.text
            spent += Decimal(answer.json()["usage"]["cost_usd"])
        async with asyncio.timeout(60):
            while not receiver.deliveries:
                await asyncio.sleep(0.05)
            while True:
                callbacks = (await admin.get("/admin/callbacks", params={"team_id": team_id})).json()["data"]
                if callbacks[0]["state"] == "delivered":
                    break
                await asyncio.sleep(0.05)

    (delivery,) = receiver.deliveries
    with OpenAI(api_key="none", webhook_secret=secret) as client:
        event = client.webhooks.unwrap(delivery.body, delivery.headers)
    data = event.to_dict()["data"]
    assert isinstance(data, dict)
    assert (event.type, data["team_id"], data["limit"]) == ("budget.threshold_reached", team_id, "usd_per_day")
    assert (data["threshold"], data["cap"]) == (80, float(CAP))
    assert [callback["id"] for callback in callbacks] == [event.id]
    assert secret not in str(callbacks) and callbacks[0]["url"] == receiver.url("/…")
