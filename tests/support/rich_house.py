# A house in the middle of a busy month, for those who look at the console: teams and providers, calls of two months,
# refused, failed and blocked ones, open breakers, batches, replicas, a rollout, corrections, and limits nearly used.

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from redis import Redis
from sqlalchemy import update

from billing.core.money import to_nano
from billing.core.records import Attempt, Status, UsageRecord
from billing.ledger.instance_samples import SECOND, Look, book_look
from billing.ledger.ledger import insert_records
from gateway.core.clock import Clock
from gateway.core.settings import Fleet, Pool, ProviderSettings
from gateway.fleet.rollouts import Rolling, rollout_key
from gateway.storage.database import Database
from gateway.storage.tables import batches
from gateway.webhooks.budget_alerts import BudgetAlerts
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.house import (
    House,
    anthropic_provider,
    gemini_provider,
    mcp_servers,
    model,
    running_house,
    settings_for,
)
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

DAY = 86_400
DAYS, CALLS = 62, 14  # days; calls of a team on each
# Teams: [id, name, limits, what its calls cost beside another's]
TEAMS: list[tuple[str, str, dict[str, float], float]] = [
    ("search", "Search and ranking", {"usd_per_day": 40, "usd_per_month": 900}, 1.0),
    ("support", "Customer support, first line, all regions", {"usd_per_month": 400, "tokens_per_day": 5_000_000}, 0.7),
    ("data-science", "Data science", {"usd_per_day": 7}, 0.4),
    ("legal", "Legal", {"usd_per_day": 5, "requests_per_minute": 60}, 0.2),
    ("mobile", "Mobile apps", {}, 0.15),
    (
        "a-team-whose-id-is-as-long-as-an-id-may-be-which-is-64-letters-x",
        "a-team-whose-name-has-no-space" * 3,
        {},
        0.05,
    ),
]
REPLICAS = {"gpu-0": (0.75, 5, 3, 0.62), "gpu-1": (0.97, 32, 41, 0.71), "gpu-2": (0.02, 0, 0, 0.0)}
ROLLING = Rolling(state="standing", revision="0a1b", kept="0c2d", share=0.1, since=time.time() - 300, due_at=None)
ROLES = ("viewer", "finance", "operator", "team-admin", "admin")
TEXT = "What does the warranty cover after two years?"


@contextmanager
def rich_house(upstream: ScriptedUpstream, mcp_url: str, folder: Path, postgres_url: str) -> Iterator[House]:
    """Run such a house; its key of a team is that of "search"."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, folder)
        own = ProviderSettings(name="own", format="openai", api_keys=("sk-own",), self_hosted=True, endpoints=())
        others = {
            each.name: each for each in (own, anthropic_provider(upstream.root_url), gemini_provider(upstream.root_url))
        }
        models = settings.models | {
            "small": replace(settings.models["small"], gpu_hour_nanousd=to_nano("3.5")),
            "claude": model("claude", "anthropic"),
            "gemini": model("gemini", "gemini", upstream_model="gemini-3-flash"),
        }
        settings = replace(
            settings,
            providers=settings.providers | others,
            models=models,
            fleet=Fleet(secrets=("a secret of the fleet 0123",), pools={"own": Pool()}),
            mcp_servers={each.name: each for each in mcp_servers(mcp_url)[:2]},
        )
        Redis.from_url(valkey.url).set(rollout_key("own"), msgspec.json.encode(ROLLING))
        with running_house(settings) as house:
            key = _make_teams(house)
            asyncio.run(_fill(database_url))
            house = replace_key(house, key)
            _make_calls(house, upstream)
            asyncio.run(_tell(database_url))
            yield house


def replace_key(house: House, key: str) -> House:
    """Return a house whose team is "search"."""
    return House(house.url, "search", key, house.admin_key, house.settings)


def keys_of(house: House) -> dict[str, str]:
    """Return a new key of each role, and of a team, whose admin is among them."""
    keys = {"team": house.team_key}
    with house.client(house.admin_key) as admin:
        for role in ROLES:
            asked = {"role": role} | ({"team_id": house.team_id} if role == "team-admin" else {})
            keys[role] = admin.post("/admin/admin-keys", json=asked).raise_for_status().json()["key"]
    return keys


def _make_teams(house: House) -> str:
    with house.client(house.admin_key) as admin:
        for name, words, limits, _ in TEAMS:
            made = {"id": name, "name": words, "limits": limits}
            admin.post("/admin/teams", json=made).raise_for_status()
        limited = {"user_limits": {"*": {"usd_per_day": 7}}, "tag_limits": {"agent=*": {"usd_per_day": 7}}}
        admin.patch(
            "/admin/teams/search", json=limited | {"model_limits": {"large": {"usd_per_month": 300}}}
        ).raise_for_status()
        admin.patch("/admin/teams/mobile", json={"suspended": True}).raise_for_status()
        return str(
            admin.post("/admin/keys", json={"team_id": "search", "name": "shop"}).raise_for_status().json()["key"]
        )


async def _fill(database_url: str) -> None:
    """Book two months of calls, and what the replicas do."""
    dice, now = random.Random(20), time.time()
    database = Database(database_url, pool_size=1)
    try:
        for ago in range(DAYS, -1, -1):
            begins = (now - ago * DAY) // DAY * DAY
            clock = SetClock(begins)
            seconds = sorted(dice.uniform(0, min(DAY, now - begins) - 1) for _ in range(CALLS * len(TEAMS)))
            records = []
            for place, second in enumerate(seconds):
                clock.time = begins + max(second, 0)
                records.append(_record(clock, dice, place))
            async with database.begin() as connection:
                await insert_records(connection, records, today=clock.today())
        async with database.begin() as connection:
            for place, (name, facts) in enumerate(REPLICAS.items()):
                await book_look(connection, _look(name, now + 3600, place, *facts))
    finally:
        await database.close()


def _record(clock: SetClock, dice: random.Random, place: int) -> UsageRecord:
    team, _, _, weight = TEAMS[place % len(TEAMS)]
    name, provider = dice.choice(
        (("small", "upstream"), ("large", "upstream"), ("claude", "anthropic"), ("gemini", "gemini"))
    )
    status = dice.choices((Status.ANSWERED, Status.FAILED, Status.BLOCKED, Status.INTERRUPTED), (40, 3, 1, 1))[0]
    first = dice.lognormvariate(6, 0.6)
    target = f"{provider}/local/https://api.example.com/v1/{name}"
    tries = [Attempt("own/local/http://gpu-0:8100/v1/small", "status_503", 80.0)] if dice.random() < 0.1 else []
    outcome = "status_500" if status is Status.FAILED else "ok"
    used = {"input_tokens": dice.randrange(200, 9000), "output_tokens": dice.randrange(20, 900)}
    if status is Status.FAILED:
        used = {}
    return make_record(
        clock.new_id(),
        team_id=team,
        key_id=f"key_{team[:8]}",
        model_asked=dice.choice(("auto", name)),
        model_used=name,
        provider=provider,
        provider_endpoint="local https://api.example.com/v1",
        status=status,
        cost_nanousd=0 if status is Status.FAILED else to_nano(f"{dice.uniform(0.05, 1.6) * weight:.6f}"),
        created_at=clock.now(),
        queue_ms=dice.uniform(0, 40),
        first_token_ms=None if status is Status.FAILED else first,
        total_ms=first + dice.uniform(200, 6000),
        attempts=(*tries, Attempt(target, outcome, first)),
        user_tag=dice.choice(("ann", "ben", "eve")),
        metadata={"agent": dice.choice(("crawler", "chat"))},
        complexity=dice.random(),
        held_tokens=9000,
        held_nanousd=to_nano(2),
        **({"input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0} | used),
    )


def _look(name: str, now: float, place: int, share: float, running: int, waiting: int, roofline: float) -> Look:
    """Return a replica that was busy for that share of its hours, at $3.50."""
    load = {"instance_id": f"own-{name}", "model_id": "small", "gpu_node_id": name, "status": "active"}
    load |= {"queue_depth": waiting, "running": running, "free_blocks": round(4000 * (1 - share)), "total_blocks": 4000}
    load |= {"kv_utilization": share, "tokens_per_second": 3100.0 * share, "requests_per_second": 2.5 * share}
    load |= {"prefix_hit_rate": 0.4, "uptime_seconds": 36_000, "busy_seconds": round(36_000 * share)}
    load |= {"roofline_share": roofline, "fairness": {"interactive": {"gap": 1200 * share, "bound": 8400}}}
    facts: dict[str, Any] = {"provider": "own", "endpoint": f"local http://{name}:8100/v1", "model": "small", "gpus": 1}
    times = {"alive_us": 36_000 * SECOND, "busy_us": round(36_000 * share) * SECOND, "seen_at": now - place}
    return Look(instance_id=f"own-{name}", gpu_hour_nanousd=to_nano("3.5"), load=load, **facts, **times)


def _make_calls(house: House, upstream: ScriptedUpstream) -> None:
    """Make what only a running gateway makes: calls that are refused or fail, batches, breakers, corrections."""
    ask = {
        "model": "small",
        "messages": [{"role": "user", "content": TEXT}],
        "user": "ann",
        "metadata": {"agent": "chat"},
    }
    with house.client() as team, house.client(house.admin_key) as admin:
        team.post("/v1/chat/completions", json=ask).raise_for_status()
        upstream.script("500", times=1)
        team.post("/v1/chat/completions", json=ask)
        for wrong in (
            {"model": "gpt-99"},
            {"temperature": 9},
            {"messages": [{"role": "user", "content": "x " * 9000}]},
        ):
            last = team.post("/v1/chat/completions", json=ask | wrong)
        until(lambda: team.get(f"/v1/calls/{last.headers['x-request-id']}").status_code == 200)
        lines = [{"custom_id": f"line {number}", "body": {**ask, "max_tokens": 16}} for number in range(40)]
        made = [
            team.post("/v1/batch", json={"requests": lines}).raise_for_status().json()["batch_id"] for _ in range(3)
        ]
        admin.post(f"/admin/batches/{made[0]}/cancel").raise_for_status()
        asyncio.run(_move_on(house.settings.database_url, made[1]))
        for of in ("claude", "gemini"):
            breakers = admin.get("/admin/breakers").json()["breakers"]
            one = next(each for each in breakers if each["model"] == of)
            admin.post(f"/admin/breakers/{one['id']}/open").raise_for_status()
        today = time.strftime("%Y-%m-%d", time.gmtime())
        for team_id, dollars in (("legal", "4.40"), ("data-science", "7.10"), ("search", "-1.25")):
            booked = {"team_id": team_id, "date": today, "cost_usd": dollars, "reason": "an invoice of the provider"}
            admin.post("/admin/corrections", json=booked).raise_for_status()


async def _move_on(database_url: str, batch_id: str) -> None:
    """Let a batch be past its half."""
    database = Database(database_url, pool_size=1)
    done = {
        "completed": 26,
        "failed": 2,
        "input_tokens": 31_200,
        "output_tokens": 4_100,
        "cost_nanousd": to_nano("0.0394"),
    }
    async with database.begin() as connection:
        await connection.execute(update(batches).where(batches.c.id == batch_id).values(**done))
    await database.close()


async def _tell(database_url: str) -> None:
    """Look at the budgets, as a worker does."""
    database = Database(database_url, pool_size=1)
    await BudgetAlerts(database, Clock()).look()
    await database.close()
