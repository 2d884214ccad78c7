# Batches as their users meet them: submitted, watched, read, cancelled, in our own shape and in OpenAI's.

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import openai
import pytest

from billing.core.records import Attempt, Status
from billing.ledger.ledger import insert_records
from gateway.batch.claims import LEASE
from gateway.batch.running.backpressure import LEAST_CALLS
from gateway.storage.database import Database
from tests.support.browser import browser
from tests.support.clock import SetClock
from tests.support.factories import make_record
from tests.support.fault_house import ADMIN_KEY, FaultHouse, running_fault_house
from tests.support.forked_commands import forked_commands
from tests.support.receiver import Receiver, receiving
from tests.support.waiting import until

TEAM = "batch-team"
EXECUTABLE = Path(sys.executable).parent / "tollgate"  # as it is installed


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultHouse]:
    """Two gateways and a worker, and an hour in which people had their first token of "lengthy" after 50 ms."""
    with running_fault_house(tmp_path_factory.mktemp("house")) as house:
        asyncio.run(add_usual(house))
        yield house


async def add_usual(house: FaultHouse) -> None:
    """Add what people met a while ago."""
    assert house.upstream is not None
    clock, database = SetClock(time.time() - 400), Database(house.postgres.url)
    met = (Attempt(f"upstream/here/{house.upstream.url}/lengthy", "ok", 50),)
    seen: dict[str, Any] = {"attempts": met, "first_token_ms": 50, "total_ms": 900, "status": Status.FAILED}
    records = [make_record(clock.new_id(), **seen, cost_nanousd=0) for _ in range(LEAST_CALLS)]
    async with database.begin() as connection:
        await insert_records(connection, records, today=clock.today())
    await database.close()


@pytest.fixture(scope="module")
def key(house: FaultHouse) -> str:
    """A team's key."""
    return next(iter(house.make_team(TEAM, {}, [{}]).values()))


@pytest.fixture
def client(house: FaultHouse, key: str) -> Iterator[httpx.Client]:
    """A client of the team."""
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=house.gateways[0].url, headers=headers, timeout=30) as client:
        yield client


def chat(text: str, model: str = "instant", **more: Any) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 48, **more}


def seen(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """Return a batch as its team sees it."""
    return client.get(f"/v1/batch/{batch_id}").raise_for_status().json()


def ended(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """Wait until a batch has ended."""
    until(lambda: seen(client, batch_id)["ended_at"], within=60)
    return seen(client, batch_id)


TODAY = datetime.now(UTC).date().isoformat()
ASKED = chat("Hello?", "lengthy", stream=True)


def lines_of(text: str) -> list[dict[str, Any]]:
    """Return JSON Lines as objects."""
    return [json.loads(line) for line in text.splitlines()]


def test_a_batch_is_answered_in_order_and_paid_once(client: httpx.Client) -> None:
    """Every request has one line, in the order of the input; the counts, the tokens and the cost are theirs."""
    requests = [{"custom_id": f"q{number}", "body": chat(f"Question {number}?")} for number in range(40)]
    requests += [chat("A bare one."), {"custom_id": "hot", "body": chat("Too hot.", temperature=9)}]
    requests += [{"custom_id": "endless", "body": chat("For ever.", max_tokens=10**399)}]
    requests += [{"custom_id": "whose", "body": chat("Another's.", team_id="another")}]

    made = client.post("/v1/batch", json={"requests": requests})
    batch = ended(client, made.json()["batch_id"])
    results = lines_of(client.get(f"/v1/batch/{batch['batch_id']}/results").raise_for_status().text)

    assert made.status_code == 202 and made.json()["request_counts"]["total"] == 44
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 44, "completed": 41, "failed": 3}
    assert batch["failures"] == {"invalid_value": 2, "permission_denied": 1}
    asked = [*(f"q{number}" for number in range(40)), "41", "hot", "endless", "whose"]
    assert [line["custom_id"] for line in results] == asked
    assert {line["response"]["status_code"] for line in results[:41]} == {200}
    refused = [(line["response"]["status_code"], line["response"]["body"]["error"]["param"]) for line in results[41:]]
    assert refused == [(400, "temperature"), (400, "max_tokens"), (403, "team_id")]
    usages = [line["response"]["body"]["usage"] for line in results[:41]]
    assert batch["usage"]["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert Decimal(batch["usage"]["cost_usd_exact"]) == sum(Decimal(u["cost_usd"]) for u in usages)
    assert float(batch["usage"]["cost_usd_exact"]) == batch["usage"]["cost_usd"]


def test_the_openai_package_runs_a_batch_from_upload_to_output(house: FaultHouse, key: str, tmp_path: Path) -> None:
    """Upload, create, poll, download output and errors, list, delete: as OpenAI's own documentation does it."""
    client = openai.OpenAI(base_url=f"{house.gateways[0].url}/v1", api_key=key, max_retries=0)
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": chat(f"Number {n}")}
        for n in range(10)
    ]
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": chat("?", top_p=7)})
    path = tmp_path / "input.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))

    file = client.files.create(file=path.open("rb"), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a test"}
    )
    until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed"), within=60)
    batch = client.batches.retrieve(batch.id)

    assert batch.status == "completed" and batch.metadata == {"for": "a test"}
    assert batch.request_counts is not None and batch.request_counts.completed == 10
    assert batch.output_file_id is not None and batch.error_file_id is not None
    output = client.files.content(batch.output_file_id).text
    assert [line["custom_id"] for line in lines_of(output)] == [f"r{n}" for n in range(10)]
    assert client.files.retrieve(batch.output_file_id).bytes == len(output.encode())
    assert [line["custom_id"] for line in lines_of(client.files.content(batch.error_file_id).text)] == ["bad"]
    assert client.files.content(file.id).text == path.read_text()
    assert batch.id in [each.id for each in client.batches.list(limit=5)]
    assert {file.id, batch.output_file_id} <= {each.id for each in client.files.list()}
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)
    gone = httpx.get(f"{client.base_url}batch/{batch.id}/results", headers={"authorization": f"Bearer {key}"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (410, "results_erased")
    assert batch.error_file_id in gone.json()["error"]["message"]  # where the rest is
    another = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_body={"priority": "low"}
    )
    assert client.batches.cancel(another.id).status in ("cancelling", "cancelled", "completed")
    assert client.files.delete(file.id).deleted


@pytest.fixture
def team_of(house: FaultHouse) -> Callable[..., httpx.Client]:
    """Make a team with limits, and return its client."""

    def make(**limits: Any) -> httpx.Client:
        team_id = f"team-{uuid.uuid4().hex[:8]}"
        key = next(iter(house.make_team(team_id, limits, [{}]).values()))
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=house.gateways[1].url, headers=headers, timeout=30)

    return make


def submitted(client: httpx.Client, *texts: str, model: str = "instant", **more: Any) -> str:
    """Submit a batch and return its id."""
    body = {"requests": [chat(text, model) for text in texts], **more}
    return str(client.post("/v1/batch", json=body).raise_for_status().json()["batch_id"])


def test_responses_are_answered_in_batches(client: httpx.Client) -> None:
    """Lines for /v1/responses are read, answered and written as over HTTP; a stream has no place in one, nor has a
    background, and no line is stored or goes on from what is."""
    bodies: list[dict[str, Any]] = [{"model": "instant", "input": "Hi", "store": True}]
    bodies += [{"model": "instant", "input": "Hi", "stream": True}]
    stored = client.post("/v1/responses", json={"model": "instant", "input": "Hi"}).raise_for_status().json()
    bodies += [{"model": "instant", "input": "Hi", "previous_response_id": stored["id"]}]
    bodies += [{"model": "instant", "input": "Hi", "background": True}]
    asked = {"endpoint": "/v1/responses", "requests": bodies}
    made = client.post("/v1/batch", json=asked).raise_for_status().json()
    until(lambda: client.get(f"/v1/batch/{made['batch_id']}").json()["ended_at"], within=60)
    lines = client.get(f"/v1/batch/{made['batch_id']}/results").raise_for_status().text.splitlines()
    good, bad, after, behind = (json.loads(line)["response"] for line in lines)

    assert (good["status_code"], good["body"]["object"], good["body"]["status"]) == (200, "response", "completed")
    assert good["body"]["output"][0]["content"][0]["text"] and good["body"]["usage"]["cost_usd"]
    assert (bad["status_code"], bad["body"]["error"]["param"]) == (400, "stream")
    assert after["status_code"] == 400 and "Send those" in after["body"]["error"]["message"]
    assert (behind["status_code"], behind["body"]["error"]["param"]) == (400, "background")
    assert stored["store"] is True and good["body"]["store"] is False and "store" in good["dropped"]
    assert client.get(f"/v1/responses/{good['body']['id']}").status_code == 404


def test_another_team_finds_nothing(client: httpx.Client, team_of: Callable[..., httpx.Client]) -> None:
    """404 on every route, to the letter of what an unknown id gets."""
    batch = ended(client, submitted(client, "Secret?"))
    files = client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"]
    stranger = team_of()

    answers = [
        stranger.request(method, path)
        for method, path in (
            ("GET", f"/v1/batch/{batch['batch_id']}"),
            ("GET", f"/v1/batch/{batch['batch_id']}/results"),
            ("POST", f"/v1/batch/{batch['batch_id']}/cancel"),
            ("GET", f"/v1/batches/{batch['batch_id']}"),
            ("POST", f"/v1/batches/{batch['batch_id']}/cancel"),
            ("GET", f"/v1/files/{files[0]['id']}"),
            ("GET", f"/v1/files/{files[0]['id']}/content"),
            ("DELETE", f"/v1/files/{files[0]['id']}"),
        )
    ]

    assert [answer.status_code for answer in answers] == [404] * 8
    assert stranger.get("/v1/batch").json()["data"] == stranger.get("/v1/files").json()["data"] == []
    asked = {"input_file_id": files[0]["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert stranger.post("/v1/batches", json=asked).status_code == 404


def test_an_admin_sees_the_batches_of_all(house: FaultHouse, client: httpx.Client) -> None:
    """With whose each is; by status, page by page. A team's key does not."""
    batch = ended(client, submitted(client, "Who am I?"))

    def listed(**query: str) -> list[dict[str, Any]]:
        return house.ask_admin(house.gateways[0], "/admin/batches", **query).json()["data"]

    newest = next(each for each in listed() if each["batch_id"] == batch["batch_id"])
    team_id = newest.pop("team_id")
    assert newest | {"failures": {}} == batch  # which are told of one batch alone
    assert {each["team_id"] for each in listed(team_id=team_id)} == {team_id}
    assert {each["status"] for each in listed(status="completed")} == {"completed"}
    assert batch["batch_id"] not in [each["batch_id"] for each in listed(after=batch["batch_id"])]
    assert client.get("/admin/batches").status_code in (401, 403)
    for wrong in ({"status": "done"}, {"after": "batch_nothing"}):
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            listed(**wrong)


def test_a_spent_budget_fails_what_is_left(team_of: Callable[..., httpx.Client]) -> None:
    """Money is no reason to wait: a request beyond the cap fails with insufficient_quota."""
    client = team_of(usd_per_day=0.001)

    batch = ended(client, submitted(client, *(f"Question {n}" for n in range(20)), model="steady"))
    lines = lines_of(client.get(f"/v1/batch/{batch['batch_id']}/results").text)

    codes = [line["response"]["body"].get("error", {}).get("code") for line in lines]
    assert set(codes) == {None, "insufficient_quota"}
    assert batch["request_counts"]["completed"] == codes.count(None)
    assert 0 < batch["usage"]["cost_usd"] <= 0.001


def test_tier_batch_lowers_no_price_of_a_commercial_model(team_of: Callable[..., httpx.Client]) -> None:
    """The provider bills a batch's line and a call with `x-tier: batch` in full, and so do the books, whatever
    `batch_discount` says; the statement tells the tiers apart."""
    client, path, asked = team_of(), "/v1/chat/completions", chat("How much?", "steady")
    alone = client.post(path, json=asked).raise_for_status().json()
    live = client.post(path, json=asked, headers={"x-tier": "batch"}).raise_for_status().json()
    said = client.post(path, json={**asked, "tier": "batch"}).raise_for_status().json()
    routes = [client.post("/v1/route", json={**asked, "tier": tier}).json() for tier in ("interactive", "batch")]
    batch = ended(client, submitted(client, "How much?", model="steady"))

    costs = [round(float(answer["usage"]["cost_usd"]) * 10**9) for answer in (alone, live, said, batch)]
    assert costs[0] > 0 and len(set(costs)) == 1
    assert routes[0]["targets"] == routes[1]["targets"]
    by_tier = client.get("/v1/usage", params={"from": TODAY, "to": TODAY, "group_by": "tier"}).json()["results"]
    told = {line["tier"]: round(line["cost_usd"] * 10**9) for line in by_tier}
    assert told == {"interactive": costs[0], "batch": 3 * costs[0]}


def test_a_rate_limit_delays_and_fails_nothing(team_of: Callable[..., httpx.Client]) -> None:
    """Two at a time, though the worker would run more: all are answered."""
    client = team_of(concurrent_requests=2)

    batch = ended(client, submitted(client, *(f"Question {n}" for n in range(8))))

    assert batch["request_counts"] == {"total": 8, "completed": 8, "failed": 0}


def test_results_are_downloaded_by_a_button(house: FaultHouse, client: httpx.Client, key: str, tmp_path: Path) -> None:
    """In the console: the file that the API gives, under the batch's id, and how many lines were answered a minute."""
    batch_id = client.post("/v1/batch", json={"requests": [chat("For a file.")]}).json()["batch_id"]
    ended(client, batch_id)
    with browser() as chromium:
        page = chromium.page()
        page.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
        page.open(f"{house.gateways[0].url}/console/batches?batch={batch_id}")
        page.fill("#key", key)
        page.press("Enter")
        page.click("Download results")
        page.wait_text("a minute since it was made")
        [file] = until(lambda: list(tmp_path.glob("*.jsonl")))
        results = client.get(f"/v1/batch/{batch_id}/results").text
        until(lambda: file.read_text() == results)

    assert file.name == f"{batch_id}.jsonl" and results.count("\n") == 1


def test_a_batch_can_be_cancelled(team_of: Callable[..., httpx.Client]) -> None:
    """What was answered until then is there and paid; the rest never ran."""
    client = team_of(concurrent_requests=1)
    batch_id = submitted(client, *(f"Question {n}" for n in range(200)), model="lengthy")

    assert client.post(f"/v1/batch/{batch_id}/cancel").json()["status"] in ("cancelling", "cancelled")
    batch = ended(client, batch_id)

    lines = lines_of(client.get(f"/v1/batch/{batch_id}/results").text)
    assert batch["status"] == "cancelled"
    assert len(lines) == batch["request_counts"]["completed"] < 200


def test_a_callback_tells_of_the_end_and_verifies(house: FaultHouse, team_of: Callable[..., httpx.Client]) -> None:
    """Standard Webhooks, OpenAI's event: the stock package unwraps it."""
    client = team_of()
    team_id = client.get("/v1/team").json()["id"]
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{house.gateways[0].url}/admin/teams/{team_id}/webhook-secrets"
    secret = httpx.post(url, headers=headers).raise_for_status().json()["secret"]

    async def play() -> Receiver:
        async with receiving() as receiver:
            body = {"requests": [chat("Tell me.")], "callback_url": receiver.url()}
            batch = (await asyncio.to_thread(client.post, "/v1/batch", json=body)).raise_for_status().json()
            assert "warning" not in batch
            batch_id = str(batch["batch_id"])
            await asyncio.to_thread(ended, client, batch_id)
            async with asyncio.timeout(30):
                while not receiver.deliveries:
                    await asyncio.sleep(0.05)
            receiver.acts = [batch_id.encode()]
            return receiver

    receiver = asyncio.run(play())
    delivery = receiver.deliveries[0]
    event = openai.OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(delivery.body, delivery.headers)
    assert event.type == "batch.completed" and event.data.id == receiver.acts[0].decode()


def test_a_callback_that_nothing_signs_yet_is_told_of(client: httpx.Client) -> None:
    """The team has no webhook secret: the batch is taken, and says what its callback waits for."""
    body = {"requests": [chat("Tell me.")], "callback_url": "http://127.0.0.1:9/"}

    answer = client.post("/v1/batch", json=body)

    assert answer.status_code == 202 and "no webhook secret" in answer.json()["warning"]


def test_of_several_faults_the_first_is_told_and_how_many_there_are(client: httpx.Client) -> None:
    """A single one is told with its request alone; a batch without requests is at fault as a whole."""
    faulty, good = {"messages": []}, {"model": "m"}

    def told(*requests: dict[str, Any]) -> str:
        return str(client.post("/v1/batch", json={"requests": requests}).json()["error"]["message"])

    assert told(good, faulty).endswith(" (In requests[1].)")
    assert told(good, faulty, faulty).endswith(" (In requests[1], the first of 2 faults.)")
    assert told() == "The batch has no request."


@pytest.mark.parametrize(
    ("said", "param", "code"),
    [
        ({"requests": []}, "requests", "empty_batch"),
        ({"requests": [{"model": "m"}, 7]}, "requests[1]", "invalid_request"),
        (
            {"requests": [{"custom_id": "a", "body": {"model": "m"}}] * 2},
            "requests[1].custom_id",
            "duplicate_custom_id",
        ),
        ({"requests": [{"body": {"messages": []}}]}, "requests[0].body", "invalid_body"),
        ({"requests": [{"model": "m"}], "endpoint": "/v1/images"}, "endpoint", "invalid_value"),
        ({"requests": [{"model": "m"}], "completion_window": "1h"}, "completion_window", "invalid_value"),
        ({"requests": [{"model": "m"}], "priority": "urgent"}, "priority", "invalid_value"),
        ({"requests": [{"model": "m"}], "callback_url": "http://10.0.0.1/"}, "callback_url", None),
        ({}, "requests", "missing_required_parameter"),
        (b'{"requests":[{"model":"m"}],"endpoint":"/v1/completions","endpoint":"/v1/x"}', "endpoint", "duplicate_key"),
        (b'{"requests":[{"model":"m"}],"requests":[{"model":"n"}]}', "requests", "duplicate_key"),
        (b'{"requests":[{"body":{"model":"m"},"body":{"model":"n"}}]}', "requests[0].body", "duplicate_key"),
    ],
)
def test_a_faulty_submission_says_what_is_wrong(
    client: httpx.Client, said: dict[str, Any] | bytes, param: str, code: str | None
) -> None:
    """400, with the request and the field at fault; nothing of it runs."""
    answer = client.post("/v1/batch", content=said if isinstance(said, bytes) else json.dumps(said))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert code is None or error["code"] == code


def test_a_faulty_file_fails_with_its_lines(client: httpx.Client) -> None:
    """Every fault with its line, in OpenAI's shape, and no request runs."""
    good = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat("Hi.")}
    text = "\n".join([json.dumps(good), "", "{", json.dumps(good), json.dumps(good | {"custom_id": "c", "url": "/x"})])
    form = {"file": ("x.jsonl", text.encode()), "purpose": (None, "batch")}
    file_id = client.post("/v1/files", files=form).raise_for_status().json()["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}

    batch = ended(client, client.post("/v1/batches", json=asked).raise_for_status().json()["id"])

    assert (batch["status"], batch["request_counts"]["total"]) == ("failed", 0)
    told = [(error["line"], error["code"]) for error in batch["errors"]]
    assert told == [(3, "invalid_json_line"), (4, "duplicate_custom_id"), (5, "mismatched_url")]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"file": ("x", b"a")}, "purpose"),
        ({"file": ("x", b"a"), "purpose": (None, "fine-tune")}, "purpose"),
        ({"purpose": (None, "batch")}, "file"),
        ({"file": ("x", b""), "purpose": (None, "batch")}, "file"),
        ({"file": ("x", b"a"), "purpose": (None, "batch"), "note": (None, "n" * 2000)}, "note"),
    ],
)
def test_a_faulty_upload_says_what_is_wrong(client: httpx.Client, form: dict[str, Any], param: str) -> None:
    """400 with the field at fault."""
    answer = client.post("/v1/files", files=form)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.post("/v1/files", json={}).status_code == 400


def test_an_upload_has_few_parts(client: httpx.Client) -> None:
    """A form of thousands of fields is refused as it arrives."""
    fields = {f"field-{number}": (None, "x") for number in range(5000)}

    answer = client.post("/v1/files", files=fields)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


def test_a_file_too_long_is_told_the_length_of_files(client: httpx.Client) -> None:
    """200 MiB, not what other routes take."""
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=30)
    connection.putrequest("POST", "/v1/files")
    connection.putheader("authorization", client.headers["authorization"])
    connection.putheader("content-type", "multipart/form-data; boundary=x")
    connection.putheader("content-length", str(10**9))
    connection.endheaders()
    answer = connection.getresponse()

    assert answer.status == 413 and b"200 MiB" in answer.read()
    connection.close()


def test_a_name_with_nul_is_a_name_of_nothing(client: httpx.Client) -> None:
    """404, as any other id that is not there; in metadata 400."""
    paths = ("/v1/batch/%00", "/v1/batches/a%00", "/v1/files/%00", "/v1/files/%00/content")

    assert [client.get(path).status_code for path in paths] == [404] * 4
    answer = client.post("/v1/batch", json={"requests": [{"model": "m"}], "metadata": {"a": "\x00"}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")


def test_a_flood_of_tiny_requests_is_refused_at_the_door(client: httpx.Client) -> None:
    """Millions of values are not decoded; commas in prose are none."""
    flood = client.post("/v1/batch", content=b'{"requests":[' + b"1," * 2_000_000 + b"1]}")
    prose = client.post("/v1/batch", json={"requests": [{"model": "m", "x": ", " * 2_000_000}]})
    deep = client.post("/v1/batch", content=b'{"requests":[{"model":"m","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}")

    assert [answer.status_code for answer in (flood, prose, deep)] == [413, 202, 400]


def test_a_model_that_answers_503_holds_up_no_other(house: FaultHouse, team_of: Callable[..., httpx.Client]) -> None:
    """Neither other batches of its team, though it came first, nor other teams', nor others in one batch with it."""
    client, neighbour = team_of(), team_of()
    broken = submitted(client, *(f"Question {n}" for n in range(300)), model="broken")
    assert house.upstream is not None
    until(lambda: any("503" in str(seen.raw) for seen in house.upstream.requests))  # type: ignore[union-attr]

    same = submitted(client, *(f"Question {n}" for n in range(60)))
    other = submitted(neighbour, *(f"Question {n}" for n in range(60)))

    for whose, batch_id in ((client, same), (neighbour, other)):
        assert ended(whose, batch_id)["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    left = client.get(f"/v1/batch/{broken}").json()
    assert (left["status"], left["request_counts"]["completed"]) == ("in_progress", 0)
    client.post(f"/v1/batch/{broken}/cancel").raise_for_status()
    bodies = [chat(f"Question {n}", "broken") for n in range(60)] + [chat(f"Question {n}") for n in range(60)]
    mixed = neighbour.post("/v1/batch", json={"requests": bodies}).raise_for_status().json()["batch_id"]
    until(lambda: seen(neighbour, mixed)["request_counts"]["completed"] >= 60, within=60)
    neighbour.post(f"/v1/batch/{mixed}/cancel").raise_for_status()


def test_a_batch_slows_down_for_people(house: FaultHouse, team_of: Callable[..., httpx.Client]) -> None:
    """Where they have come to wait longer for a first token than in the hour before, fewer of its requests run."""
    client = team_of()
    assert house.upstream is not None
    house.upstream.script("first_token=0.4,tokens=3,pace=0.02", model="gpt-4o:tokens=40,pace=0.025")
    batch_id = submitted(client, *(f"Question {n}" for n in range(500)), model="lengthy")
    deadline = time.monotonic() + 60

    def told() -> list[dict[str, Any]]:
        assert time.monotonic() < deadline
        lines = house.worker.log.read_text().splitlines()
        return [json.loads(line) for line in lines if "batch_backpressure" in line]

    until(lambda: seen(client, batch_id)["request_counts"]["completed"])
    with ThreadPoolExecutor(LEAST_CALLS) as people:
        while not told():
            asking = [people.submit(client.post, "/v1/chat/completions", json=ASKED) for _ in range(LEAST_CALLS)]
            assert {each.result().status_code for each in asking} == {200}
    client.post(f"/v1/batch/{batch_id}/cancel").raise_for_status()
    house.upstream.forget()

    first = told()[0]
    assert first["target"].endswith("/lengthy") and first["baseline_p90_ms"] == 50 < 400 <= first["first_token_p90_ms"]
    assert set(first["at_once"]) == {"lengthy"} and first["at_once"]["lengthy"] <= 16


def test_a_worker_asked_twice_to_end_lets_go(house: FaultHouse, team_of: Callable[..., httpx.Client]) -> None:
    """It waits for nothing more; what it ran is put back, and answered by the next one without waiting for a lease."""
    client = team_of()
    assert house.upstream is not None
    house.upstream.script("latency=60", model="gpt-4o:tokens=8,pace=0.02,cached_tokens=2", times=1)
    batch_id = submitted(client, "Take your time.", model="steady")
    mark = b"Take your time."
    until(lambda: any(mark in seen.raw for seen in house.upstream.requests))  # type: ignore[union-attr]

    os.kill(house.worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    os.kill(house.worker.pid, signal.SIGTERM)
    status = house.worker.end()
    house.worker.start()
    until(lambda: seen(client, batch_id)["ended_at"], within=LEASE - 5)
    batch = seen(client, batch_id)

    told = [line for line in house.worker.log.read_text().splitlines() if "drain_over" in line]
    assert status == 0 and '"asked_twice":true' in told[-1].replace(" ", "")
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)


ALL, ALONE = ["one", "poison", "two"], ["poison"]


@pytest.mark.parametrize(
    ("deaths", "forgotten"),
    [
        pytest.param([ALL, ALONE], [1, 2], id="quick"),
        pytest.param([ALL, ALL, ALONE, ALONE, ALONE], [0] * 5, marks=pytest.mark.soak, id="all"),
    ],
)
def test_a_request_that_kills_its_workers_ends_and_takes_no_other_with_it(
    house: FaultHouse, team_of: Callable[..., httpx.Client], deaths: list[list[str]], forgotten: list[int]
) -> None:
    """Five workers die of it, the last three with nothing beside it: it fails, and its neighbours are answered.
    ``forgotten``: deaths after each of these that are told to the house and not died."""
    client, upstream = team_of(), house.upstream
    assert upstream is not None
    upstream.script("latency=0.5,tokens=40", model="gpt-4o:tokens=40,pace=0.025", times=sum(map(len, deaths)) + 2)
    begin = len(upstream.requests)
    batch_id = submitted(client, "one", "poison", "two", model="lengthy")

    def at_work() -> list[str]:
        """What the upstream is asked just now."""
        asked = [seen for seen in upstream.requests[begin:] if seen.answered_at is None and seen.closed_at is None]
        return sorted(json.loads(seen.raw)["messages"][0]["content"] for seen in asked)

    for together, more in zip(deaths, forgotten, strict=True):
        until(lambda together=together: at_work() == together)  # type: ignore[misc]
        house.worker.kill()
        asyncio.run(end_leases(house, more))
        house.worker.start()
    batch = ended(client, batch_id)
    results = lines_of(client.get(f"/v1/batch/{batch_id}/results").raise_for_status().text)

    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["failures"] == {"worker_lost": 1}
    assert [line["error"] and line["error"]["code"] for line in results] == [None, "worker_lost", None]
    costs = [round(float(line["response"]["body"]["usage"]["cost_usd"]) * 10**9) for line in results[::2]]
    assert round(batch["usage"]["cost_usd"] * 10**9) == sum(costs) > 0
    assert len(upstream.requests) - begin == sum(map(len, deaths)) + 2


async def end_leases(house: FaultHouse, losses: int) -> None:
    """Let the leases of the dead be over, and what they ran have been lost so often more."""
    connection = await asyncpg.connect(house.postgres.url)
    late = "UPDATE batch_items SET lease_until = now() - interval '1 s', losses = losses + $1 WHERE status = 'running'"
    try:
        await connection.execute(late, losses)
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def tollgate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The command, for less of the CPU."""
    folder = tmp_path_factory.mktemp("bin")
    with forked_commands(folder):
        yield folder / "tollgate"


def run_batch(
    tollgate: Path, house: FaultHouse, *words: str, key: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `tollgate batch`: on the deployment's machine, or over HTTP with a key."""
    where = ["--config", str(house.config)] if key is None else ["--url", house.gateways[0].url, "--key", key]
    command = [str(tollgate), "batch", *words, *where]
    env = {"PATH": "", "COLUMNS": "200", "FORCE_COLOR": "1", "TERM": "xterm"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


def test_a_wait_that_ends_with_failures_tells_them_and_its_status(
    house: FaultHouse, key: str, tollgate: Path, tmp_path: Path
) -> None:
    """Where requests failed, a completed batch is no success: status 2, counts, cost, and where all failures are."""
    path = tmp_path / "input.jsonl"
    with path.open("w") as lines:
        for number in range(20):
            body = chat("Hi.", temperature=9) if number % 2 else chat("Hi.")
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.write(json.dumps(line) + "\n")

    submit = run_batch(tollgate, house, "submit", str(path), "--team", TEAM, "--wait")
    batch_id = submit.stdout.strip()
    failed = lines_of(run_batch(tollgate, house, "results", batch_id, "--failed").stdout)

    told = submit.stderr.replace("\x1b[?25h", "").splitlines()  # the bar shows the cursor again
    assert submit.returncode == 2, submit.stderr
    assert re.fullmatch(r"completed: 10 of 20 requests answered, 10 failed, 0 not done; 0\.0\d+ USD", told[-1])
    assert told[-2] == f"All that failed: tollgate batch results {batch_id} --failed"
    assert [line.partition(" ")[0] for line in told[-7:-2]] == [f"c{number}:" for number in (1, 3, 5, 7, 9)]
    assert told[-7].startswith("c1: 400 invalid_value: 'temperature' must be from 0 to 2")
    assert [line["custom_id"] for line in failed] == [f"c{number}" for number in range(1, 20, 2)]


@pytest.mark.parametrize("over_http", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_batch_is_submitted_and_watched_from_a_shell(
    house: FaultHouse, key: str, tollgate: Path, tmp_path: Path, over_http: bool
) -> None:
    """`tollgate batch`: submit and wait with a bar, status with counts and cost, results; a fault by its line."""
    shell = partial(run_batch, tollgate, house, key=key if over_http else None)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat("Hi.")}
    path, faulty = tmp_path / "input.jsonl", tmp_path / "faulty.jsonl"
    path.write_text("".join(json.dumps(line | {"custom_id": f"c{n}"}) + "\n" for n in range(30)))
    faulty.write_text(json.dumps(line) + "\n{\n")

    submit = shell("submit", str(path), "--team", TEAM, "--wait")
    batch_id = submit.stdout.strip()
    status = json.loads(shell("status", batch_id, "--format", "json").stdout)
    results = run_batch(EXECUTABLE, house, "results", batch_id, key=key if over_http else None)
    refused = shell("submit", str(faulty), "--team", TEAM, "--wait")

    assert submit.returncode == 0, submit.stderr
    assert "30/30" in submit.stderr
    assert re.search(r"completed: 30 of 30 requests answered, 0 failed, 0 not done; 0\.0\d+ USD\n$", submit.stderr)
    assert status["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
    assert status["usage"]["cost_usd"] > 0 and status["estimated_completion"] == status["ended_at"]
    assert [each["custom_id"] for each in lines_of(results.stdout)] == [f"c{n}" for n in range(30)]
    assert refused.returncode == 1 and "line 2: This line is not valid JSON" in refused.stderr


def test_a_line_tells_what_its_upstream_was_not_told(client: httpx.Client) -> None:
    """A line has no headers: the fields that were left out stand beside its status."""
    requests = [{"custom_id": "odd", "body": chat("Hi?", colour="red")}, {"custom_id": "plain", "body": chat("Hi?")}]
    batch = ended(client, client.post("/v1/batch", json={"requests": requests}).json()["batch_id"])
    odd, plain = lines_of(client.get(f"/v1/batch/{batch['batch_id']}/results").raise_for_status().text)

    assert odd["response"]["dropped"] == ["colour"]
    assert "dropped" not in plain["response"]


@pytest.fixture
def anthropic_client(house: FaultHouse, key: str) -> Iterator[Any]:
    """The team's client in Anthropic's own package."""
    from anthropic import Anthropic

    with Anthropic(base_url=house.gateways[0].url, api_key=key, max_retries=0) as client:
        yield client


def message(text: str, model: str = "instant", **more: Any) -> dict[str, Any]:
    """Return what a message asks for."""
    return {"model": model, "max_tokens": 48, "messages": [{"role": "user", "content": text}], **more}


def test_messages_come_in_batches_of_anthropics_shape(anthropic_client: Any, client: httpx.Client) -> None:
    """Created, watched, listed, read and deleted by its own package; an error has its own shape, too."""
    batches = anthropic_client.messages.batches
    requests: Any = [{"custom_id": f"m{number}", "params": message(f"Question {number}?")} for number in range(3)]
    requests += [{"custom_id": "hot", "params": message("Too hot.", temperature=9)}]
    requests += [{"custom_id": "streamed", "params": message("Live?", stream=True)}]
    made = batches.create(requests=requests)
    until(lambda: batches.retrieve(made.id).processing_status == "ended", within=60)
    batch, results = batches.retrieve(made.id), {one.custom_id: one.result for one in batches.results(made.id)}
    ours = seen(client, made.id)
    page = batches.list(limit=1)
    deleted = batches.delete(made.id)

    assert made.type == "message_batch" and made.request_counts.processing == 5
    counts = {"processing": 0, "succeeded": 3, "errored": 2, "canceled": 0, "expired": 0}
    assert batch.request_counts.to_dict() == counts and batch.ended_at and not batch.cancel_initiated_at
    assert ours["endpoint"] == "/v1/messages" and ours["usage"] == batch.to_dict()["usage"]
    assert ours["failures"] == {"invalid_request_error": 2}
    succeeded = [results[f"m{number}"] for number in range(3)]
    assert all(one.type == "succeeded" and one.message.content[0].text for one in succeeded)
    assert sum(one.message.usage.output_tokens for one in succeeded) == ours["usage"]["output_tokens"]
    assert [results[name].error.error.type for name in ("hot", "streamed")] == ["invalid_request_error"] * 2
    assert "temperature" in results["hot"].error.error.message
    assert page.data[0].id == made.id and (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    assert client.get(f"/v1/batch/{made.id}").status_code == 404


def test_a_batch_of_messages_is_cancelled(anthropic_client: Any) -> None:
    """What never ran says so; what runs is not deleted."""
    from anthropic import BadRequestError

    batches = anthropic_client.beta.messages.batches  # its query says beta=true
    asked: Any = [{"custom_id": f"m{number}", "params": message("Long?", "lengthy")} for number in range(60)]
    made = batches.create(requests=asked, betas=["interleaved-thinking-2025-05-14"])
    with pytest.raises(BadRequestError, match="Cancel it first"):
        batches.delete(made.id)
    with pytest.raises(BadRequestError, match="has not ended"):
        anthropic_client.get(f"/v1/messages/batches/{made.id}/results", cast_to=object)
    cancelled = batches.cancel(made.id)
    until(lambda: batches.retrieve(made.id).processing_status == "ended", within=60)
    counts = batches.retrieve(made.id).request_counts
    kinds = [one.result.type for one in batches.results(made.id)]

    assert cancelled.processing_status in ("canceling", "ended") and cancelled.cancel_initiated_at
    assert kinds.count("canceled") == counts.canceled > 0 and len(kinds) == 60
    assert counts.succeeded == kinds.count("succeeded") and counts.processing == 0


def test_pages_of_message_batches_go_both_ways(anthropic_client: Any, client: httpx.Client) -> None:
    """Those of other endpoints are none of them."""
    batches = anthropic_client.messages.batches
    client.post("/v1/batch", json={"requests": [chat("Another kind.")]}).raise_for_status()
    made = [batches.create(requests=[{"custom_id": "a", "params": message("Hi")}]).id for _ in range(3)]
    newest = batches.list(limit=2)
    older = batches.list(limit=1, after_id=newest.last_id)
    newer = batches.list(limit=2, before_id=made[0])
    pages = [one.id for one in islice(batches.list(limit=1), 3)]

    assert [one.id for one in newest.data] == [made[2], made[1]] == [one.id for one in newer.data] and newest.has_more
    assert older.data[0].id == made[0] and pages == made[::-1]


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([message("Bare.")], "'custom_id' and 'params'"),
        ([{"params": message("Unnamed.")}], "'custom_id' and 'params'"),
        ([{"custom_id": "a", "params": {}}], "names a model"),
        ([{"custom_id": "a", "params": message("Twice.")}] * 2, "used before"),
        ([], "no request"),
    ],
)
def test_a_message_batch_that_is_wrong_is_refused_whole(client: httpx.Client, requests: Any, words: str) -> None:
    """In Anthropic's shape of errors, in its own words for the fields."""
    answer = client.post("/v1/messages/batches", json={"requests": requests})

    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert words in answer.json()["error"]["message"]


def test_a_chats_batch_is_none_of_messages(client: httpx.Client) -> None:
    """The one knows nothing of the other's shape."""
    made = client.post("/v1/batch", json={"requests": [chat("Hi")]}).json()["batch_id"]
    answer = client.get(f"/v1/messages/batches/{made}")

    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
