# What people say to a model, and what it says to them, stands nowhere but where it must: secrets are sent through every
# route, whole, streamed, replayed, refused and broken, and then looked for in everything that the house writes.

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from gateway.config.file import load_settings
from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.http.routes import HANDLERS
from gateway.run.process import open_process
from gateway.run.worker import comparer_of
from tests.support.fault_house import ADMIN_KEY, FaultHouse, running_fault_house
from tests.support.upstream_scripts import Script
from tests.support.waiting import until, until_found

# Each is found by a rule, so that the whole way of a finding is walked too.
SAID = "AKIAQ7X2M5N3CANARYQZ"
ANSWERED = "ghp_CaNaRy0123456789CaNaRy0123456789CaNa"
PASSWORD = "tg-" + "CaNaRy-key" * 4 + "xyz"  # of nobody
CANARIES = (SAID, ANSWERED, PASSWORD)

# What a batch said, and the file of what it was to do, are kept until their retention ends: there they must be found.
KEPT = {("batch_items", "response"), ("file_chunks", "data")}

SHADOW_CALLS = 3  # calls of `auto` that a small model answers: one without an Idempotency-Key twice, one with

# Models that do everything, a share of whose answers is asked of another too, and a policy that looks at everything.
SETTINGS = """\
  able: {provider: upstream, upstream_model: gpt-4o, context: 4000, max_output: 64, price: {input: 1, output: 2},
         abilities: [chat, completions, embeddings, rerank, images, speech, transcription, realtime, tools]}
  claude: {provider: anthropic, upstream_model: 'gpt-4o:tokens=3', context: 4000, max_output: 64,
           price: {input: 1, output: 2}}
  judge: {provider: upstream, upstream_model: 'gpt-4o:tokens=2', context: 90000, max_output: 300,
          price: {input: 1, output: 2}}
routes:
  auto: {small: [able], large: [claude], quality: 0, held_back: {share: 1, usd_per_day: 9, judge: judge}}
safety:
  input: flag
  output: flag
  checker: {url: 'http://127.0.0.1:9/v1/moderations', deadline: 200ms}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHouse]:
    """A house that looks at everything and lets it pass."""
    with running_fault_house(tmp_path_factory.mktemp("house"), SETTINGS, gateways=1) as house:
        yield house


def test_what_was_said_stands_nowhere_but_in_batches(house: FaultHouse) -> None:
    """Logs, tables, metrics, journals, Redis and the audit log: none has a canary or a secret, all have the call."""
    key = next(iter(house.make_team("canary", {}, [{}]).values()))
    said = Routes()
    hooks = {"request": [said.note]}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=house.gateways[0].url, headers=headers, timeout=30, event_hooks=hooks) as client:
        request_id = say_everywhere(house, client)
        said.check(client.get("/openapi.json").json())
        knock_everywhere(client)
    asyncio.run(compare(house))
    metrics = [house.ask_admin(gateway, "/metrics").text for gateway in house.gateways]

    def audit_log() -> str:
        return house.ask_admin(house.gateways[0], "/admin/audit-log", limit="1000").text

    for kind in ("aws_key", "github_token"):  # outcomes are written behind the calls
        until(lambda kind=kind: kind in audit_log())
    admin = audit_log()
    tables = asyncio.run(read_tables(house.postgres.url))
    logs = [house.postgres.log, house.redis.log, *(service.log for service in house.services)]
    written = {
        str(path): path.read_bytes() for folder in (house.data_dir, redis_folder(house)) for path in files_in(folder)
    }
    written |= {str(path): path.read_bytes() for path in logs}
    written |= {f"metrics {number}": text.encode() for number, text in enumerate(metrics)}
    written["the audit log"] = admin.encode()
    keys = (*CANARIES, key, *secrets_of(house))

    configured = {where for where in written if where.endswith("valkey.conf")}  # with the password it asks for
    looked_at = [(where, text) for where, text in written.items() if where not in configured]

    found = [(where, name) for where, text in looked_at for name in keys if name.encode() in text]
    assert found == []
    assert {where for where, text in tables.items() if any(name.encode() in text for name in keys)} == KEPT
    # The search would have found them: the calls themselves are in all of these.
    assert request_id.encode() in tables["usage_records", "request_id"]
    assert any(b"content_policy" in path.read_bytes() for path in logs)
    assert 'finding="aws_key"' in metrics[0] and 'outcome="failed"' in metrics[0]
    assert any("journal" in where for where in written)


def secrets_of(house: FaultHouse) -> set[str]:
    """Return the house's own secrets: keys of admins and providers, the pepper, passwords of its databases."""
    settings = load_settings(house.config)
    passwords = {urlsplit(url).password or "" for url in (settings.database_url, settings.redis_url)}
    keys = {key for provider in settings.providers.values() for key in provider.api_keys}
    secrets = {*settings.admin_keys, settings.key_pepper, *passwords, *keys}
    assert len(secrets) >= 5 and all(len(secret) >= 8 for secret in secrets), secrets
    return secrets


class Routes:
    """Which routes were asked, so that none is forgotten."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def note(self, request: httpx.Request) -> None:
        if request.method == "POST":
            self._asked.add(request.url.path)

    def check(self, description: dict[str, Any]) -> None:
        """Fail unless something was sent to every route that takes what a team says."""
        takes = {path for path, verbs in description["paths"].items() if path.startswith("/v1/") and "post" in verbs}
        assert {path for path in takes if "{" not in path} - self._asked == set()


async def compare(house: FaultHouse) -> None:
    """Have what was held back asked of the large model, and judged: then nobody keeps it."""
    async with open_process(load_settings(house.config), Clock(), Drain()) as parts:
        comparer = comparer_of(parts)

        async def compared() -> list[asyncpg.Record]:
            await comparer.ask()
            await comparer.compare()
            found = await rows_of(house, "SELECT reason FROM held_back WHERE status IN ('compared', 'dropped')")
            return found if len(found) == SHADOW_CALLS else []

        found = await until_found(compared)
    assert {row["reason"] for row in found} == {"unclear"}  # asked, and judged by a model that says anything


async def rows_of(house: FaultHouse, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(house.postgres.url.replace("+asyncpg", ""))
    try:
        return list(await connection.fetch(query))
    finally:
        await connection.close()


def say_everywhere(house: FaultHouse, client: httpx.Client) -> str:
    """Send the canaries through every route, in every way that a call can go; return the id of one that went well."""
    upstream = house.upstream
    assert upstream is not None
    upstream.script(Script(text=f"It is {ANSWERED}, I think."))
    upstream.script(Script(text=f"I think: {ANSWERED}."), model="gpt-4o:tokens=3")
    talk = {"model": "able", "messages": [{"role": "user", "content": f"Keep {SAID} for me."}], "max_tokens": 48}
    tool = {"type": "function", "function": {"name": "keep", "description": f"Keeps {SAID}."}}
    call = {"id": "call_1", "type": "function", "function": {"name": "keep", "arguments": f'{{"what":"{SAID}"}}'}}
    worked = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": SAID}]
    respond = {"model": "able", "instructions": SAID, "input": f"Keep {SAID} for me.", "max_output_tokens": 48}
    called = {"type": "function_call", "call_id": "call_1", "name": "keep", "arguments": f'{{"what":"{SAID}"}}'}
    items = [{"role": "user", "content": SAID}, called]
    items.append({"type": "function_call_output", "call_id": "call_1", "output": SAID})
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", talk),
        ("/v1/chat/completions", {**talk, "stream": True}),
        ("/v1/messages", talk),
        ("/v1/messages", {**talk, "stream": True}),
        ("/v1/chat/completions", {**talk, "model": "auto"}),
        ("/v1/chat/completions", {**talk, "model": "claude", "stream": True}),
        ("/v1/messages", {**talk, "model": "claude"}),
        ("/v1/chat/completions", {**talk, "tools": [tool], "messages": [*talk["messages"], *worked]}),
        ("/v1/completions", {"model": "able", "prompt": f"Keep {SAID}", "max_tokens": 48}),
        ("/v1/completions", {"model": "able", "prompt": f"Keep {SAID}", "max_tokens": 48, "stream": True}),
        ("/v1/embeddings", {"model": "able", "input": [f"Keep {SAID}"]}),
        ("/v1/rerank", {"model": "able", "query": SAID, "documents": [f"Keep {SAID}"], "return_documents": True}),
        ("/v1/images/generations", {"model": "able", "prompt": f"Keep {SAID}"}),
        ("/v1/audio/speech", {"model": "able", "voice": "alloy", "input": f"Keep {SAID}"}),
        ("/v1/responses", respond),
        ("/v1/responses", {**respond, "stream": True}),
        ("/v1/responses/compact", {"model": "able", "instructions": SAID, "input": f"Keep {SAID} for me."}),
        (
            "/v1/responses",
            {**respond, "model": "claude", "input": items, "tools": [{"type": "function", "name": "keep"}]},
        ),
    ]
    request_id = ""
    for path, body in calls:
        for more in ({}, {"idempotency-key": str(uuid.uuid4())}):
            first, again = (client.post(path, json=body, headers=more) for _ in range(2))
            assert (first.status_code, again.status_code) == (200, 200), first.text
            assert ("idempotent-replayed" in again.headers) == bool(more)
            request_id = request_id or first.headers["x-request-id"]
    recording = {"file": (f"{SAID}.wav", SAID.encode(), "audio/wav")}
    for kind, more in product(("transcriptions", "translations"), ({}, {"idempotency-key": str(uuid.uuid4())})):
        said = {"model": "able", "prompt": f"Keep {SAID}"}
        for _ in range(2):
            answer = client.post(f"/v1/audio/{kind}", data=said, files=recording, headers=more)
            assert answer.status_code == 200, answer.text
    picture = {"image": (f"{SAID}.png", b"\x89PNG\r\n\x1a\n" + SAID.encode(), "image/png")}
    said = {"model": "able", "prompt": f"Keep {SAID}"}
    assert client.post("/v1/images/edits", data=said, files=picture).status_code == 200
    kept = {"items": [{"role": "user", "content": SAID}], "metadata": {"of": SAID}}
    assert client.post("/v1/chat/completions", json={**talk, "model": "able", "store": True}).status_code == 200
    made = client.post("/v1/conversations", json=kept).json()["id"]
    assert client.post(f"/v1/conversations/{made}/items", json={"items": kept["items"]}).status_code == 200
    assert client.post(f"/v1/conversations/{made}", json={"metadata": {"of": SAID}}).status_code == 200
    assert client.post("/v1/responses", json={**respond, "conversation": made}).status_code == 200
    page = {"session": {"type": "realtime", "model": "able", "instructions": SAID}}
    assert client.post("/v1/realtime/client_secrets", json=page).status_code == 200
    assert client.post("/v1/moderations", json={"input": f"Keep {SAID}"}).status_code == 200
    for model in ("able", "claude"):
        assert client.post("/v1/messages/count_tokens", json={**talk, "model": model}).status_code == 200
    assert client.post("/v1/responses/input_tokens", json=respond).status_code == 200
    assert client.post("/v1/route", json={**talk, "model": "auto"}).status_code == 200
    for odd in (b'{"model": "able", "messages": "' + SAID.encode(), b'{"model": "' + SAID.encode() + b'"}'):
        assert client.post("/v1/chat/completions", content=odd).status_code == 400
    client.post("/v1/chat/completions", json={**talk, "model": SAID})
    assert client.post("/v1/team/key/rotate", json={"overlap": SAID}).status_code == 400
    client.get(f"/v1/nothing?of={SAID}")
    client.get(f"/v1/models/{SAID}")
    client.get("/v1/models", headers={"authorization": f"Bearer {PASSWORD}"})
    for fault in (
        Script(status=400, type="invalid_request_error", message=f"You said {SAID}, I say {ANSWERED}."),
        Script(status=500, message=f"You said {SAID}, I say {ANSWERED}."),
    ):
        upstream.script(fault, times=1)
        answer = client.post("/v1/chat/completions", json=talk)  # after a 500 it asks again
        assert answer.status_code == (400 if fault.status == 400 else 200)
    for model in ("torn", "cut"):
        client.post("/v1/chat/completions", json={**talk, "model": model, "stream": True})
    send_batches(client, talk)
    return request_id


def knock_everywhere(client: httpx.Client) -> None:
    """Say a canary where no route expects one: in its path, its query and its body, as a team and as an admin."""
    for handler in HANDLERS:
        for path in handler.paths:
            for method in handler.http_methods - {"HEAD", "OPTIONS"}:
                knocked = re.sub(r"\{[^}]*\}", SAID, path)
                for headers in ({}, {"authorization": f"Bearer {ADMIN_KEY}"}):
                    odd = {"params": {"of": SAID, "team_id": SAID, "model": SAID}, "headers": headers}
                    body = {"json": {"never_heard_of": SAID}} if method in ("POST", "PATCH") else {}
                    answer = client.request(method, knocked, **odd, **body)  # type: ignore[arg-type]
                    assert answer.status_code < 500, (method, path, answer.text)


def send_batches(client: httpx.Client, talk: dict[str, Any]) -> None:
    """Have the same answered as a batch of ours, as one of OpenAI's, from a file, and as one of Anthropic's."""
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": talk}
    ours = client.post("/v1/batch", json={"requests": [{"custom_id": "one", "body": talk}]}).raise_for_status().json()
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).raise_for_status().json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    theirs = client.post("/v1/batches", json=wanted).raise_for_status().json()
    messages = {"requests": [{"custom_id": "one", "params": talk}]}
    third = client.post("/v1/messages/batches", json=messages).raise_for_status().json()
    until(lambda: client.get(f"/v1/messages/batches/{third['id']}").json()["ended_at"], within=60)
    assert ANSWERED in client.get(f"/v1/messages/batches/{third['id']}/results").text
    for batch in (ours["batch_id"], theirs["id"]):
        until(lambda batch=batch: client.get(f"/v1/batch/{batch}").json()["ended_at"], within=60)
        assert ANSWERED in client.get(f"/v1/batch/{batch}/results").text


async def read_tables(url: str) -> dict[tuple[str, str], bytes]:
    """Return everything that is in Postgres, by table and column."""
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    found: dict[tuple[str, str], bytes] = {}
    try:
        for table in await connection.fetch("SELECT relid::regclass::text AS name FROM pg_stat_user_tables"):
            for row in await connection.fetch(f"SELECT * FROM {table['name']}"):
                for column, value in row.items():
                    text = value if isinstance(value, bytes) else str(value).encode()
                    found[table["name"], column] = found.get((table["name"], column), b"") + text + b"\n"
    finally:
        await connection.close()
    return found


def redis_folder(house: FaultHouse) -> Path:
    """Return where Redis keeps every command that changed something."""
    return house.redis.data_dir / house.redis.name


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder."""
    yield from (path for path in folder.rglob("*") if path.is_file())
