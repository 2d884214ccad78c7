# What one address or team may do to a gateway: open connections, guess keys, and send long bodies.

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from ipaddress import ip_network

import httpx
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gateway.core.keys import new_key
from gateway.http.exchange import LARGEST_BODY
from gateway.overload.body_memory import OF_A_TEAM
from protocol.serving.off_loop import HEAVY
from tests.support.house import House, make_team, serving
from tests.support.raw_client import connect, read_all
from tests.support.waiting import until

HERE = ip_network("127.0.0.0/8")
MOST = 4


@pytest.fixture(scope="module")
def strict(house: House) -> Iterator[House]:
    """A gateway that lets each client, loopback too, have so many connections."""
    settings = replace(house.settings, connections_per_address=MOST, data_dir=house.settings.data_dir / "strict")
    with serving(settings, exempt=()) as url:
        yield dataclasses.replace(house, url=url)


def test_an_address_may_have_so_many_connections(strict: House) -> None:
    """One more is closed at once and counted; when one has gone, there is room for another."""
    held = [connect(strict.url) for _ in range(MOST)]
    with connect(strict.url) as more:
        assert read_all(more) == b""
    held.pop().close()
    until(lambda: httpx.get(strict.url + "/health/live", headers={"connection": "close"}).status_code == 200)
    held.pop().close()
    with strict.client(strict.admin_key) as admin:
        shown = admin.get("/metrics").text

    assert "tollgate_connections_refused_total 0.0" not in shown
    assert "tollgate_connections_refused_total" in shown
    for connection in held:
        connection.close()


@pytest.mark.parametrize("trusted", [(), (HERE,)], ids=["loopback", "a trusted proxy"])
def test_proxies_and_this_machine_may_have_any_number(house: House, trusted: tuple[object, ...]) -> None:
    """Connections of many clients come from there."""
    data_dir = house.settings.data_dir / f"trusting-{len(trusted)}"
    settings = replace(house.settings, connections_per_address=2, trusted_proxies=trusted, data_dir=data_dir)
    with serving(settings, **({"exempt": ()} if trusted else {})) as url:  # type: ignore[arg-type]
        held = [connect(url) for _ in range(10)]
        answers = []
        for connection in held:
            connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            answers.append(connection.recv(1000)[:12])
        for connection in held:
            connection.close()

    assert answers == [b"HTTP/1.1 200"] * 10


def test_a_made_up_forwarded_address_evades_no_throttle(house: House) -> None:
    """Unless a proxy is trusted to name it, which then is the one that counts."""
    data_dir = house.settings.data_dir / "behind"
    behind = replace(house.settings, trusted_proxies=(HERE,), data_dir=data_dir)
    alone = replace(house.settings, data_dir=house.settings.data_dir / "alone")
    with serving(alone) as direct, serving(behind) as proxied:
        found = [{guess(url, n) for n in range(60)} for url in (direct, proxied)]

    assert found == [{401, 429}, {401}]


def test_the_log_names_the_client_that_a_trusted_proxy_tells_of(house: House) -> None:
    """Who sends wrong keys is the client, not the proxy that all of them come through."""
    settings = replace(house.settings, trusted_proxies=(HERE,), data_dir=house.settings.data_dir / "told")
    with serving(settings) as url, capture_logs() as logs:
        guess(url, 7)
    [line] = [line for line in logs if line["event"] == "call_refused"]

    assert line["address"] == "203.0.113.7"


def guess(url: str, n: int) -> int:
    headers = {"authorization": f"Bearer {new_key()}", "x-forwarded-for": f"203.0.113.{n}"}
    return httpx.get(f"{url}/v1/models", headers=headers).status_code


def test_bodies_that_do_not_come_take_no_memory_of_other_teams(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are waited for at a time; beyond them a long body of the team is a 429. A short one is read, and a long one
    of another team, too."""

    monkeypatch.setattr("gateway.overload.body_memory.WAIT", 0.2)
    other = asyncio.run(make_team(house.settings, "team_of_long_bodies"))
    long = {"model": "small", "messages": [{"role": "user", "content": "hi" + " " * HEAVY}], "max_tokens": 4}
    short = long | {"messages": [{"role": "user", "content": "hi"}]}
    data_dir = house.settings.data_dir / "bodies"
    with serving(replace(house.settings, data_dir=data_dir)) as url:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.team_key}\r\n"
        held = [connect(url) for _ in range(OF_A_TEAM // LARGEST_BODY)]
        for connection in held:
            connection.sendall(f"{head}content-length: {LARGEST_BODY}\r\n\r\n{{".encode())
        answers = [ask(url, *what) for what in ((house.team_key, long), (house.team_key, short), (other, long))]
        for connection in held:
            connection.close()
        until(lambda: ask(url, house.team_key, long).status_code == 200)

    assert [answer.status_code for answer in answers] == [429, 200, 200]
    assert answers[0].headers["retry-after"] == "1" and "128 MiB" in answers[0].json()["error"]["message"]


def test_a_body_in_chunks_takes_no_more_room_than_it_needs(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it will be nobody says, and most are short: however many are on their way, the next is read. A long one
    is read to its end."""
    monkeypatch.setattr("gateway.overload.body_memory.WAIT", 0.2)
    long = {"model": "small", "messages": [{"role": "user", "content": "hi" + " " * 3 * HEAVY}], "max_tokens": 4}
    short = long | {"messages": [{"role": "user", "content": "hi"}]}
    with serving(replace(house.settings, data_dir=house.settings.data_dir / "chunks")) as url:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {house.team_key}\r\n"
        held = [connect(url) for _ in range(OF_A_TEAM // LARGEST_BODY)]
        for connection in held:
            connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n1\r\n{{\r\n".encode())
        answers = [ask_in_chunks(url, house.team_key, body) for body in (short, long)]
        for connection in held:
            connection.close()

    assert [answer.status_code for answer in answers] == [200, 200]


def ask_in_chunks(url: str, key: str, body: dict[str, object]) -> httpx.Response:
    said = json.dumps(body).encode()
    pieces = (said[start : start + 50_000] for start in range(0, len(said), 50_000))
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return httpx.post(f"{url}/v1/chat/completions", content=pieces, headers=headers, timeout=20)


def ask(url: str, key: str, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)
