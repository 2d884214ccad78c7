# Tools of MCP servers, called through the gateway: who sees which, what reaches the server and what comes back, what a
# call costs, and what a server can do wrong. The official SDK goes the same way in tests/peers/test_mcp.py.

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from billing.journal.adoption import calls_in
from gateway.accounts.schemas import LimitsInput
from tests.support.audits import lasting_differences
from tests.support.house import MCP_CREDENTIAL, House, make_team
from tests.support.leaving import ask_and_leave
from tests.support.scripted_mcp import Act, Heard, ScriptedMcp, Stage, well
from tests.support.waiting import until

VERSION = "2026-07-28"
META = {"_meta": {"io.modelcontextprotocol/protocolVersion": VERSION, "io.modelcontextprotocol/clientCapabilities": {}}}


@pytest.fixture(autouse=True)
def _good(mcp: ScriptedMcp) -> None:
    mcp.forget()


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    with house.client() as client:
        yield client


def body_of(method: str, ident: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": ident, "method": method, "params": {**params, **META}}


def ask(
    client: httpx.Client, method: str, server: str = "tickets", headers: Any = None, **params: Any
) -> httpx.Response:
    """Send one request of the stateless revision, its headers as they must be."""
    said = {"mcp-protocol-version": VERSION, "mcp-method": method} | (headers or {})
    if "name" in params:
        said = {"mcp-name": params["name"]} | said
    return client.post(f"/mcp/{server}", json=body_of(method, **params), headers=said)


def in_session(client: httpx.Client, method: str, headers: Any = None, **params: Any) -> httpx.Response:
    """Send one request of the revision before it."""
    body = {"jsonrpc": "2.0", "id": "a", "method": method, "params": params}
    return client.post("/mcp/tickets", json=body, headers={"mcp-protocol-version": "2025-11-25"} | (headers or {}))


def key_of(house: House, **bounds: Any) -> str:
    with house.client(house.admin_key) as admin:
        made = admin.post(f"/admin/teams/{house.team_id}/keys", json=bounds)
        if made.status_code == 404:
            made = admin.post("/admin/keys", json={"team_id": house.team_id, **bounds})
        return str(made.raise_for_status().json()["key"])


def test_a_call_of_a_tool_is_passed_on_and_booked_at_its_price(
    house: House, client: httpx.Client, mcp: ScriptedMcp
) -> None:
    """The server gets its own credential and nothing of the client's; the client gets the result and nothing of the
    server's headers; the ledger gets a row, which the audit finds right."""
    mirrored = {"mcp-param-region": "eu", "x-mine": "1", "cookie": "a=b", "mcp-session-id": "x"}
    answer = ask(client, "tools/call", headers=mirrored, name="close", arguments={"id": 2**80})
    row, (heard,) = house.record_of(answer), mcp.heard

    assert answer.json()["result"]["content"] == [{"type": "text", "text": "done"}] and answer.json()["id"] == 1
    assert heard.body == body_of("tools/call", name="close", arguments={"id": 2**80})
    assert heard.headers["authorization"] == f"Bearer {MCP_CREDENTIAL}"
    assert (heard.headers["mcp-name"], heard.headers["mcp-param-region"]) == ("close", "eu")
    assert not {"x-mine", "cookie", "mcp-session-id", "x-request-id"} & heard.headers.keys()
    assert house.team_key not in str(heard.headers) and "mcp-session-id" not in answer.headers
    assert (row["endpoint"], row["status"], row["model_used"]) == ("mcp", "answered", "mcp/tickets/close")
    assert (row["cost_usd"], row["held_nanousd"], row["provider"]) == (0.01, 10_000_000, "mcp/tickets")
    told = client.get(f"/v1/calls/{answer.headers['x-request-id']}").json()
    assert told["price"]["lines"] == [{"kind": "request", "count": 1, "usd": 0.01, "cost_usd": 0.01}]
    assert lasting_differences(house.settings.database_url) == []


def test_a_caller_sees_the_tools_that_it_may_call(house: House, client: httpx.Client, mcp: ScriptedMcp) -> None:
    """By the server's `tools.allow`, and by what the key's `allowed_endpoints` leave; what is told is private."""

    def tools(key: str) -> list[str]:
        with house.client(key) as caller:
            result = ask(caller, "tools/list").raise_for_status().json()["result"]
            assert result["cacheScope"] == "private"
            return [tool["name"] for tool in result["tools"]]

    assert tools(house.team_key) == ["find", "close"]
    assert tools(key_of(house, allowed_endpoints=["mcp/tickets"])) == ["find", "close"]
    finder = key_of(house, allowed_endpoints=["chat.completions", "mcp/tickets/find"])
    assert tools(finder) == ["find"]
    mcp.heard.clear()
    with house.client(finder) as caller:
        refused = ask(caller, "tools/call", name="close", arguments={})
        unknown = ask(caller, "tools/list", server="frail")
        nowhere = ask(caller, "tools/list", server="nowhere")

    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, -32602) and error["message"].endswith("It may call: find.")
    assert (unknown.status_code, unknown.json()["error"]) == (404, nowhere.json()["error"] | unknown.json()["error"])
    assert unknown.json()["error"]["message"] == nowhere.json()["error"]["message"]
    assert mcp.heard == []


def test_a_caller_lists_its_servers_with_their_tools_and_prices(house: House, client: httpx.Client) -> None:
    """As far as team and key may call them; an admin sees all, and which team has which."""

    def servers(key: str) -> dict[str, Any]:
        with house.client(key) as caller:
            return {one["id"]: one for one in caller.get("/v1/mcp-servers").raise_for_status().json()["data"]}

    of_team, of_admin = servers(house.team_key), servers(house.admin_key)
    of_finder = servers(key_of(house, allowed_endpoints=["mcp/tickets/find"]))

    assert of_team["tickets"]["tools"] == [
        {"name": "close", "model": "mcp/tickets/close", "price_usd": 0.01},
        {"name": "find", "model": "mcp/tickets/find", "price_usd": 0.001},
    ]
    assert (of_team["tickets"]["state"], of_team["tickets"]["other_tools_usd"]) == ("closed", None)
    assert {name: [tool["name"] for tool in one["tools"]] for name, one in of_finder.items()} == {"tickets": ["find"]}
    assert of_admin.keys() > of_finder.keys() and "teams" in of_admin["tickets"] and "teams" not in of_team["tickets"]
    assert MCP_CREDENTIAL not in str(of_admin)


def test_a_refused_call_of_a_tool_is_listed_with_the_tool(house: House, client: httpx.Client) -> None:
    """By the ledger's name for it: a tool that the file does not name is one of the others."""
    answer = ask(client, "tools/call", name="purge", arguments={})
    request_id = answer.headers["x-request-id"]
    until(lambda: client.get(f"/v1/calls/{request_id}").status_code == 200)
    told = client.get(f"/v1/calls/{request_id}").json()

    assert answer.status_code == 403
    assert (told["code"], told["model_asked"]) == ("tool_not_allowed", "mcp/tickets/*")


def test_names_of_tools_are_checked_where_a_key_is_made(house: House) -> None:
    """As those of endpoints are."""
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        key_of(house, allowed_endpoints=["mcp tickets"])


def test_a_server_is_discovered_with_its_tools_alone(client: httpx.Client) -> None:
    """Versions are those that both speak; resources, prompts and lists that change are not carried."""
    result = ask(client, "server/discover").json()["result"]

    assert (result["supportedVersions"], result["capabilities"]) == (["2026-07-28"], {"tools": {}})
    assert (result["cacheScope"], result["ttlMs"]) == ("private", 5)


def test_what_a_tool_tells_before_its_answer_streams(house: House, client: httpx.Client, mcp: ScriptedMcp) -> None:
    """The first of it is with the client while the tool runs; the answer ends the stream, booked before."""
    progress = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}}

    def act(stage: Stage, heard: Heard) -> None:
        stage.stream(": hello\n\n", "id: 1\ndata:\n\n", progress, ends=False)
        mcp.may_go_on.wait(5)
        stage.stream({"jsonrpc": "2.0", "id": 1, "result": {"content": []}}, "data: never read\n\n")

    mcp.act = act
    headers = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "find"}
    with client.stream(
        "POST", "/mcp/tickets", json=body_of("tools/call", name="find", arguments={}), headers=headers
    ) as answer:
        lines = answer.iter_lines()
        first = [next(lines), next(lines)]
        mcp.may_go_on.set()
        rest = [line for line in lines if line.startswith("data: ")]

    assert first == ["event: message", "data: " + json.dumps(progress)]
    assert [json.loads(line[6:])["result"] for line in rest] == [{"content": []}]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert house.record_of(answer)["cost_usd"] == 0.001


def test_a_session_is_its_keys_own(house: House, client: httpx.Client, mcp: ScriptedMcp) -> None:
    """Revision 2025-11-25: the client's capabilities do not reach the server, for what it could ask is not carried; the
    session's id comes under a seal, which another key cannot use."""
    asked = {"protocolVersion": "2025-11-25", "capabilities": {"sampling": {}}, "clientInfo": {"name": "a"}}
    begun = in_session(client, "initialize", **asked)
    session = {"mcp-session-id": begun.headers["mcp-session-id"]}
    note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    noted = client.post("/mcp/tickets", json=note, headers={"mcp-protocol-version": "2025-11-25"} | session)
    dropped = client.post("/mcp/tickets", json={**note, "method": "notifications/cancelled"}, headers=session)
    listed = in_session(client, "tools/list", session)
    called = in_session(client, "tools/call", session, name="find", arguments={})
    refused = in_session(client, "tools/call", session, name="purge", arguments={})
    unspoken = in_session(client, "prompts/list", session)
    said = {"mcp-protocol-version": "2025-11-25"} | session
    with house.client(key_of(house)) as other:
        stolen = in_session(other, "tools/list", session)
        spared = other.delete("/mcp/tickets", headers=said)
    ended = client.delete("/mcp/tickets", headers=said)

    assert begun.json()["result"]["capabilities"] == {"tools": {}} and session["mcp-session-id"].endswith("session-1")
    assert mcp.heard[0].body["params"] == {**asked, "capabilities": {}}
    assert (noted.status_code, noted.content, dropped.status_code) == (202, b"", 400)  # without a version
    assert [heard.headers.get("mcp-session-id") for heard in mcp.heard] == [None, *["session-1"] * 4]
    assert (spared.status_code, ended.status_code, ended.content) == (404, 204, b"")
    assert len(listed.json()["result"]["tools"]) == 2 and called.json()["result"]["content"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (200, -32602)
    assert (unspoken.status_code, unspoken.json()["error"]["code"]) == (200, -32601)
    assert (stolen.status_code, stolen.json()["error"]["data"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("change", "body", "status", "code"),
    [
        ({"mcp-protocol-version": ""}, {}, 400, -32022),
        ({"mcp-protocol-version": "1900-01-01"}, {}, 400, -32022),
        ({"mcp-method": "tools/list"}, {}, 400, -32020),
        ({"mcp-name": "close"}, {}, 400, -32020),
        ({"mcp-name": "=?base64?Zmlu?="}, {}, 400, -32020),
        ({"mcp-param-a": "\x80"}, {}, 400, -32020),
        ({}, {"params": {"name": "find"}}, 400, -32020),
        ({}, {"params": {"name": 7, **META}}, 400, -32602),
        ({}, {"id": None}, 400, -32600),
        ({}, {"jsonrpc": "1.0"}, 400, -32600),
        ({"mcp-method": "resources/read"}, {"method": "resources/read"}, 404, -32601),
        ({"mcp-method": "initialize"}, {"method": "initialize"}, 404, -32601),
        ({"origin": "https://evil.example"}, {}, 403, -32000),
    ],
)
def test_what_breaks_a_rule_is_told_and_not_sent(
    client: httpx.Client, mcp: ScriptedMcp, change: Any, body: Any, status: int, code: int
) -> None:
    """Headers that say other than the body, other versions, methods that are not carried, pages of other origins."""
    headers = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "find"} | change
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = client.post("/mcp/tickets", json=body_of("tools/call", name="find") | body, headers=raw)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert mcp.heard == []


def test_what_is_no_message_is_told_so(client: httpx.Client, mcp: ScriptedMcp) -> None:
    """No JSON, lists of messages, answers; and no method but POST."""
    for content, code in ((b"{", -32700), (b"[]", -32600), (b'{"jsonrpc": "2.0", "id": 1, "result": {}}', -32600)):
        answer = client.post("/mcp/tickets", content=content, headers={"mcp-protocol-version": VERSION})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert answer.json()["id"] is None
    assert client.post("/mcp/tickets", content=b" " * 5_000_000).status_code == 413
    assert [client.request(method, "/mcp/tickets").status_code for method in ("GET", "DELETE")] == [405, 400]
    assert mcp.heard == []


def say(status: int, body: Any, kind: str = "application/json", **headers: str) -> Act:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda stage, heard: stage.say(status, content, kind, **headers)


def endless(stage: Stage, heard: Heard) -> None:
    for _ in range(100):
        stage.stream(": still here\n\n", ends=False)
        time.sleep(0.02)


RESULT = {"jsonrpc": "2.0", "id": 1, "result": {"content": []}}
HOSTILE: dict[str, tuple[Act, int, str]] = {
    "huge": (say(200, RESULT | {"result": {"text": "x" * 70_000}}), 502, "too long"),
    "huge event": (lambda stage, _: stage.stream("data: " + "x" * 70_000), 502, "too long"),
    "huge stream": (lambda stage, _: stage.stream(*[": " + "x" * 900 + "\n"] * 80), 502, "too long"),
    "endless": (endless, 504, "took too long"),
    "silent": (lambda stage, _: time.sleep(0.6), 504, "did not answer in time"),
    "cut": (lambda stage, _: stage.stream(": hello\n\n"), 502, "without an answer"),
    "another type": (say(200, b"<html>", "text/html"), 502, "'text/html'"),
    "no json": (say(200, b"{"), 502, "no message of JSON-RPC"),
    "deep": (say(200, b'{"jsonrpc":"2.0","id":1,"result":' + b'{"a":' * 9000 + b"}" * 9000 + b"}"), 502, "no message"),
    "a list": (say(200, [RESULT]), 502, "no message of JSON-RPC"),
    "another id": (say(200, RESULT | {"id": "1"}), 502, "another request"),
    "both": (say(200, RESULT | {"error": {"code": 1, "message": "a"}}), 502, "neither a result nor an error"),
    "a question": (
        lambda stage, _: stage.stream({"jsonrpc": "2.0", "id": 9, "method": "roots/list"}),
        502,
        "asks its client",
    ),
    "a redirect": (say(307, b"", location="http://127.0.0.1:9/"), 502, "redirects (307)"),
    "accepted": (say(202, b""), 502, "a request with 202"),
    "refuses us": (say(401, b"", www_authenticate="Bearer secret"), 502, "own credential (401)"),
    "busy": (say(429, b"", retry_after="7"), 429, "rate limit"),
    "broken": (say(500, b"Traceback"), 502, "failed (500)"),
    "gone": (say(410, b"no"), 400, "takes no such request (410)"),
    "echoes": (say(200, RESULT | {"result": {"saw": f"Bearer {MCP_CREDENTIAL}"}}), 502, "own credential"),
    "echoes in a refusal": (
        say(400, {"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": MCP_CREDENTIAL}}),
        400,
        "takes no such request",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_a_server_that_does_wrong_is_told_of_and_costs_nothing(
    house: House, client: httpx.Client, mcp: ScriptedMcp, fault: str
) -> None:
    """A JSON-RPC error with the request's id, in words; never the server's own; the row says how it failed."""
    mcp.act, status, words = HOSTILE[fault]
    server = "hasty" if fault in ("endless", "silent") else "tickets"
    answer = ask(client, "tools/call", server, name="find", arguments={})
    told, row = answer.json(), house.record_of(answer)

    assert (answer.status_code, told["id"]) == (status, 1) and words in told["error"]["message"]
    assert told["error"]["code"] in (-32000, -32600) and "www-authenticate" not in answer.headers
    assert MCP_CREDENTIAL not in answer.text and "Traceback" not in answer.text
    assert (row["status"], row["cost_usd"]) == ("failed", 0)


def test_an_error_of_the_server_is_passed_on_and_costs_nothing(
    house: House, client: httpx.Client, mcp: ScriptedMcp
) -> None:
    """In its own words, as an answer of 200 or with a status; to a request in a session with 200."""
    error = {"code": -32602, "message": "no such ticket", "data": {"id": 4}}
    mcp.act = say(200, {"jsonrpc": "2.0", "id": 1, "error": error})
    answer = ask(client, "tools/call", name="find", arguments={})
    mcp.act = say(400, {"jsonrpc": "2.0", "id": "server-error", "error": error})
    other = ask(client, "tools/call", name="find", arguments={})

    assert (answer.status_code, other.status_code) == (200, 400)
    assert answer.json() == other.json() == {"jsonrpc": "2.0", "id": 1, "error": error}
    assert house.record_of(other)["cost_usd"] == 0


def test_a_stream_that_breaks_ends_with_an_error(house: House, client: httpx.Client, mcp: ScriptedMcp) -> None:
    """The status is out; the error comes as the answer."""
    mcp.act = lambda stage, _: stage.stream({"jsonrpc": "2.0", "method": "notifications/message"}, "data: {\n\n")
    answer = ask(client, "tools/call", name="find", arguments={})
    last = json.loads(answer.text.split("data: ")[-1])

    assert answer.status_code == 200 and (last["id"], last["error"]["code"]) == (1, -32000)
    assert house.record_of(answer)["status"] == "failed"


def test_a_client_that_leaves_owes_the_call_that_its_server_has(house: House, mcp: ScriptedMcp) -> None:
    """The tool may have run. The server's connection is closed with the client's."""
    mcp.act = lambda stage, _: mcp.may_go_on.wait(5)
    headers = {"mcp-protocol-version": VERSION, "mcp-method": "tools/call", "mcp-name": "close"}
    ask_and_leave(house, "/mcp/tickets", body_of("tools/call", name="close"), lambda: mcp.heard, **headers)
    with house.client() as client:

        def rows() -> list[dict[str, Any]]:
            return [one for one in client.get("/v1/calls").json()["data"] if one["status"] == "interrupted"]

        found = until(rows)

    assert (found[0]["model_used"], found[0]["cost_usd"]) == ("mcp/tickets/close", 0.01)


def test_a_process_that_dies_leaves_a_call_that_costs_nothing(house: House, mcp: ScriptedMcp) -> None:
    """Before the server has answered, the journal has a row of no cost for who adopts it; after, one at its price."""

    def in_journals(request_id: str = "") -> list[tuple[str, int]]:
        calls = [call for path in (house.settings.data_dir / "journal").rglob("*.journal") for call in calls_in(path)]
        return [
            (call.request_id, call.status.value, call.cost_nanousd)
            for call in calls
            if call.endpoint == "mcp" and call.request_id not in before and request_id in call.request_id
        ]

    before: set[str] = set()
    before = {one[0] for one in in_journals()}

    def act(stage: Stage, heard: Heard) -> None:
        died.extend(in_journals())
        well(stage, heard)

    died: list[Any] = []
    mcp.act = act
    with house.client() as client:
        answer = ask(client, "tools/call", name="close")
    ident = answer.headers["x-request-id"]

    assert died == [(ident, "failed", 0)]
    assert in_journals(ident) in ([(ident, "answered", 10_000_000)], [])  # until it is in the ledger
    assert house.record_of(answer)["cost_usd"] == 0.01


def test_limits_of_the_team_hold(house: House, mcp: ScriptedMcp) -> None:
    """Its budget is held for the call's price and its rate counts every message; what is refused is not sent."""
    limits = LimitsInput(usd_per_day=Decimal("0.0105"), requests_per_minute=3)
    key = asyncio.run(make_team(house.settings, "thrifty_with_tools", limits))
    with house.client(key) as client:
        paid = ask(client, "tools/call", name="close")
        broke = ask(client, "tools/call", name="close")
        ask(client, "tools/list").raise_for_status()
        cheap = ask(client, "server/discover")
        often = ask(client, "tools/list")

    assert (paid.status_code, broke.status_code, often.status_code) == (200, 429, 429)
    assert broke.json()["error"]["data"]["code"] == "insufficient_quota"
    assert often.json()["error"]["data"]["code"] == "rate_limit_exceeded" and "retry-after" in often.headers
    assert cheap.headers["x-ratelimit-limit-requests"] == "3" and len(mcp.heard) == 3


def test_a_server_that_fails_again_and_again_is_left_alone(client: httpx.Client, mcp: ScriptedMcp) -> None:
    """Its breaker opens; another server's does not."""
    mcp.act = say(500, b"")
    for _ in range(2):
        ask(client, "tools/list", server="frail")
    mcp.forget()
    away = ask(client, "tools/call", server="frail", name="find")

    assert (away.status_code, mcp.heard) == (503, []) and "its breaker is open" in away.json()["error"]["message"]
    assert int(away.headers["retry-after"]) > 0 and away.json()["error"]["data"]["code"] == "overloaded"
    assert ask(client, "tools/list").status_code == 200


def test_a_team_whose_calls_fail_closes_a_server_to_no_other(
    house: House, client: httpx.Client, mcp: ScriptedMcp
) -> None:
    """What a tool makes of one team's arguments says little of its server; that a second team fails does."""
    mcp.act = say(500, b"")
    for _ in range(4):
        assert ask(client, "tools/call", server="fragile", name="find").status_code == 502
    with house.client(asyncio.run(make_team(house.settings, "other_caller"))) as other:
        asked = [ask(other, "tools/call", server="fragile", name="find").status_code for _ in range(2)]

    assert asked == [502, 503]
