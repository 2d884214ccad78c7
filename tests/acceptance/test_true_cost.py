# What self-hosted answers really cost: a gateway in front of two real engines, calls of every kind, an engine that goes
# away, and books that come out at instance-hours x price. And which of the two a conversation goes back to.

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from openai import OpenAI
from sqlalchemy import text

from billing.ledger.instances import InstanceCost, idle_costs
from gateway.calls.call import OPENING
from gateway.core.clock import Clock
from gateway.core.settings import ProviderSettings
from gateway.fleet.instances import InstanceWatcher
from gateway.run.processes import free_port
from gateway.storage.database import Database
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.registry import ProviderRegistry
from router.catalog.targets import Endpoint, Target
from router.replicas import by_beginning
from tests.support.engine_server import EngineServer, start_engine_server
from tests.support.gpu_time import price_of_time
from tests.support.house import House, model, running_house, serving, settings_for
from tests.support.leaving import ask_and_leave
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.waiting import until

PRICE = 3_500_000_000  # nano-dollars an hour
ASK: Any = [{"role": "user", "content": "What does a toll gate cost?"}]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    """Two replicas of one model."""
    shape = TinyModel(max_position=4096)
    checkpoint = write_tiny_model(tmp_path_factory.mktemp("tiny"), shape, with_tokenizer=True)
    servers = [start_engine_server(checkpoint, "--kv-events-config", telling()) for _ in range(2)]
    try:
        for server in servers:
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


def telling() -> str:
    """Return the setting with which a replica tells what it has cached."""
    endpoint, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    return json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replays})


@pytest.fixture
def own_house(engines: list[EngineServer], tmp_path: Path, postgres_url: str) -> Iterator[House]:
    """A gateway in front of those that live: the second takes what the first does not."""
    alive = [server for server in engines if server.process.poll() is None]
    endpoints = tuple(Endpoint("local", server.url + "/v1") for server in alive)
    own = ProviderSettings(name="own", format="openai", self_hosted=True, endpoints=endpoints)
    llama = model("llama", provider="own", upstream_model="tiny", max_output=4000, gpu_hour_nanousd=PRICE)
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(
            database_url,
            valkey.url,
            "",
            tmp_path / "house",
            providers={"own": own},
            models={"llama": llama},
            auto={},
            aliases={},
        )
        with running_house(settings) as house:
            yield house


def test_who_leaves_a_plain_call_pays_what_was_produced(own_house: House, engines: list[EngineServer]) -> None:
    """Our engine streams to the gateway, so that is known; the engine is free again, and its time is on the books."""
    asked = {"model": "llama", "messages": ASK, "max_tokens": 3000, "ignore_eos": True}
    ask_and_leave(own_house, "/v1/chat/completions", asked, lambda: max(map(blocks_in_use, engines)) > 8)
    until(lambda: all(engine.load()["running"] == 0 for engine in engines) and len(rows(own_house)) == 1)
    (row,) = rows(own_house)

    assert row.status == "interrupted"
    assert 0 < row.output_tokens < 3000
    assert row.cost_nanousd > 0 and row.gpu_cost_nanousd > 0


def test_a_conversation_goes_back_to_its_blocks_after_a_restart(own_house: House, tmp_path: Path) -> None:
    """A gateway that has just started learns from the replicas what they have, and sends second turns there: also where
    the addresses are called otherwise, by which rendezvous alone would find other homes."""
    own = own_house.settings.providers["own"]
    renamed = replace(own, endpoints=tuple(at_localhost(one) for one in own.endpoints))
    new_homes = [Target(own_house.settings.models["llama"], one) for one in renamed.endpoints]
    moved: list[tuple[str, str]] = []  # what was said, and the port of the replica that answered
    for number in count():
        said = f"Road {number}. " + "How many toll gates stand on this long road, and who keeps them at night? " * 20
        _, port = say(own_house, said)
        opening = f"{own_house.team_id}\n\n{said[:OPENING]}"
        if not by_beginning(new_homes, opening, [0, 0])[0].endpoint.base_url.endswith(f":{port}/v1"):
            moved.append((said, port))
        if len(moved) == 3:
            break
    settings = replace(own_house.settings, providers={"own": renamed}, data_dir=tmp_path / "restarted")
    with serving(settings) as url:
        house = House(url, own_house.team_id, own_house.team_key, own_house.admin_key, settings)
        until(lambda: sum(marks_known(house).values()) > 0 and marks_known(house) == marks_known(own_house))
        second = [(say(house, said, "So be it.", "And by day?"), port) for said, port in moved]

    assert [(cached > 1000, port) for (cached, port), _ in second] == [(True, port) for _, port in second]


def at_localhost(endpoint: Endpoint) -> Endpoint:
    return Endpoint(endpoint.region, endpoint.base_url.replace("127.0.0.1", "localhost"))


def say(house: House, *said: str) -> tuple[int, str]:
    """Say the next thing of a conversation; return how many tokens of it were cached, and at which port."""
    turns = [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
    with house.client() as client:
        answer = client.post("/v1/chat/completions", json={"model": "llama", "messages": turns, "max_tokens": 2})
    usage = answer.raise_for_status().json()["usage"]
    port = house.record_of(answer)["provider_endpoint"].removesuffix("/v1").rpartition(":")[2]
    return usage["prompt_tokens_details"]["cached_tokens"], port


def marks_known(house: House) -> dict[str, float]:
    """Return how many beginnings of prompts a gateway knows to be cached, by the replica's port."""
    with house.client(house.admin_key) as client:
        lines = client.get("/metrics").text.splitlines()
    known = [line.rpartition(" ") for line in lines if line.startswith("tollgate_kv_marks{")]
    return {name.removesuffix('/v1"}').rpartition(":")[2]: float(value) for name, _, value in known}


def test_calls_and_idle_time_make_instance_hours_times_the_price(own_house: House, engines: list[EngineServer]) -> None:
    """Plain, streamed, several, embedded, and left in the middle; then a replica dies, and the other goes on."""
    first, second = engines
    with OpenAI(base_url=own_house.url + "/v1", api_key=own_house.team_key, max_retries=0, timeout=60) as client:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(kind, client) for kind in (plain, streamed, left, embedded) for _ in range(3)]:
                done.result()
        until(lambda: len(rows(own_house)) == 12 and has_told_all(own_house, first))
        until(lambda: f"local {first.url}/v1" in look(own_house))
        first.process.kill()
        for kind in (plain, left):
            kind(client)
        until(lambda: len(rows(own_house)) == 14 and has_told_all(own_house, second))
    until(lambda: f"local {second.url}/v1" in look(own_house))
    booked, lines = rows(own_house), {line.endpoint: line for line in costs(own_house)}
    with own_house.client(own_house.admin_key) as admin:
        shown = {one["endpoint"]: one for one in admin.get("/admin/instances").json()["instances"]}

    hours = hours_of(own_house)
    assert lines.keys() == shown.keys() == {f"local {engine.url}/v1" for engine in engines}
    assert sum(line.cost_nanousd for line in lines.values()) == sum(price_of_time(us, 1, PRICE) for us in hours)
    for line in lines.values():
        its_calls = [row.gpu_cost_nanousd for row in booked if row.provider_endpoint == line.endpoint]
        assert line.attributed_nanousd == sum(its_calls)
        assert line.attributed_nanousd + line.idle_nanousd == line.cost_nanousd
        assert 0 < line.attributed_nanousd <= price_of_time(round(line.busy_hours * 3.6e9), 1, PRICE) + len(booked)
    assert [row.status for row in booked].count("interrupted") == 4
    assert all(row.gpu_cost_nanousd > 0 for row in booked)
    whole = [row for row in booked if row.endpoint == "chat.completions" and row.status == "answered"]
    assert all(0 < row.prefill_ms < row.total_ms and 0 < row.decode_ms < row.total_ms for row in whole)
    assert {one["status"] for one in shown.values()} == {"active"}
    assert shown[f"local {second.url}/v1"]["instance_id"] == lines[f"local {second.url}/v1"].instance_id


def plain(client: OpenAI) -> None:
    """A whole answer, of two replies; no word of what it cost us."""
    reply = client.chat.completions.create(model="llama", messages=ASK, max_tokens=20, n=2)
    assert "gpu_seconds" not in reply.to_json()


def streamed(client: OpenAI) -> None:
    """A stream to its end."""
    chunks = list(client.chat.completions.create(model="llama", messages=ASK, max_tokens=30, stream=True))
    assert not any("gpu_seconds" in chunk.to_json() for chunk in chunks)


def left(client: OpenAI) -> None:
    """A stream whose reader leaves after a few tokens."""
    with client.chat.completions.create(model="llama", messages=ASK, max_tokens=3000, stream=True) as chunks:
        for _ in range(4):
            next(chunks)


def embedded(client: OpenAI) -> None:
    """Two vectors."""
    client.embeddings.create(model="llama", input=["a toll", "a gate"])


def has_told_all(house: House, engine: EngineServer) -> bool:
    """Whether an engine has nothing to do, and its report has caught up with what it told in its answers."""
    load = engine.load()
    told = sum(row.gpu_cost_nanousd for row in rows(house) if row.provider_endpoint == f"local {engine.url}/v1")
    return load["running"] == 0 and price_of_time(round(load["busy_seconds"] * 1e6), 1, PRICE) >= told


def blocks_in_use(engine: EngineServer) -> float:
    load = engine.load()
    return load["total_blocks"] - load["free_blocks"]


def rows(house: House) -> list[Any]:
    """Return the ledger."""
    return ask(house, lambda connection: connection.execute(text("SELECT * FROM usage_records")), all)


def hours_of(house: House) -> list[int]:
    """Return the microseconds of each replica's days."""
    query = text("SELECT alive_us FROM instance_days")
    return [row.alive_us for row in ask(house, lambda connection: connection.execute(query), all)]


def costs(house: House) -> list[InstanceCost]:
    """Return what is reported, midnight or not."""
    today = date.today()
    return ask(house, lambda connection: idle_costs(connection, today - timedelta(2), today + timedelta(2)), None)


def ask(house: House, question: Callable[[Any], Any], read: Any) -> Any:
    """Ask the house's database."""

    async def in_transaction() -> Any:
        database = Database(house.settings.database_url)
        try:
            async with database.begin() as connection:
                answer = await question(connection)
                return answer.all() if read is all else answer
        finally:
            await database.close()

    return asyncio.run(in_transaction())


def look(house: House) -> set[str]:
    """Look at the replicas now, as a second gateway that has just started; return those of which that was news."""

    async def as_second_gateway() -> set[str]:
        settings, database, client = house.settings, Database(house.settings.database_url), UpstreamClient()
        edition: Any = SimpleNamespace(
            settings=settings, catalog=settings.catalog(), providers=ProviderRegistry(settings.providers)
        )
        watcher = InstanceWatcher(edition, client, database, cast(Any, None), Clock())
        try:
            return {look.endpoint for look in await watcher.look_once()}
        finally:
            await client.close()
            await database.close()

    return asyncio.run(as_second_gateway())
