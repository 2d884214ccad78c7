# Streams whose clients or upstreams are slow: each slows down itself and nobody else, is never taken for dead, and
# holds its place no longer than it may.

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from msgspec.structs import replace
from openai import OpenAI

from gateway.core.settings import QueueSettings, Timeouts
from tests.support.house import House, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.upstream_scripts import Script
from tests.support.waiting import until

ASK: dict[str, Any] = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "Say something."}]}
SILENCE = 0.1  # seconds until a stream of this house says a comment
UNREAD = 6.0  # seconds that a client of this house may leave everything unread


@pytest.fixture(scope="module")
def slow_house(
    upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str
) -> Iterator[House]:
    """A house that is quick to say comments and to give clients up, and patient with upstreams."""
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("slow"))
        patient = Timeouts(connect=10.0, first_token=1.0, between_tokens=1.0, total=30.0)
        providers = {name: replace(one, timeouts=patient) for name, one in settings.providers.items()}
        providers["narrow"] = replace(providers["upstream"], name="narrow", concurrency=1)
        settings = replace(
            settings,
            providers=providers,
            models=settings.models | {"narrow": model("narrow", "narrow", upstream_model="large")},
            queue=QueueSettings(wait=6 * SILENCE),
            keep_alive=SILENCE,
        )
        with running_house(settings, unread=UNREAD) as house:
            yield house


@pytest.fixture(autouse=True)
def _forget(upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    upstream.forget()


def lines_of(answer: httpx.Response) -> list[str]:
    return [line for line in answer.text.splitlines() if line]


def test_comments_keep_a_silent_stream_alive(slow_house: House, upstream: ScriptedUpstream) -> None:
    """While nothing comes, a comment does; packages do not see it."""
    upstream.script("tokens=3,pace=0.5")
    with slow_house.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK)
    with OpenAI(base_url=slow_house.url + "/v1", api_key=slow_house.team_key, max_retries=0) as package:
        chunks = list(package.chat.completions.create(**ASK))

    lines = lines_of(answer)
    first, last = (lines.index(line) for line in (lines[0], "data: [DONE]"))
    assert lines[first].startswith("data: ") and last == len(lines) - 1
    assert lines.count(": keep-alive") >= 2
    assert all(line == ": keep-alive" or line.startswith("data: ") for line in lines)
    assert answer.headers["x-model-used"] == "small"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_comments_come_before_a_late_first_token_too(slow_house: House, upstream: ScriptedUpstream) -> None:
    """They are later, because the status goes out with them."""
    upstream.script("tokens=3,first_token=0.7")
    with slow_house.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK)

    lines = lines_of(answer)
    assert (answer.status_code, lines[0], lines[-1]) == (200, ": keep-alive", "data: [DONE]")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert json.loads(lines[-2].removeprefix("data: "))["model_used"] == "small"


def test_what_fails_after_a_comment_says_so_in_the_stream(slow_house: House, upstream: ScriptedUpstream) -> None:
    """It is too late for a status: an error chunk, no [DONE], nothing to pay."""
    upstream.script("hang-before-headers")
    with slow_house.client() as client:
        answer = client.post("/v1/chat/completions", json=ASK)
        row = slow_house.record_of(answer)

    lines = lines_of(answer)
    assert answer.status_code == 200 and set(lines[:-1]) == {": keep-alive"}
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "upstream_timeout"
    assert (row["status"], row["cost_usd"]) == ("failed", 0)


def test_what_is_refused_in_a_stream_is_counted_too(slow_house: House, upstream: ScriptedUpstream) -> None:
    """As the same refusal by status would be: a stream that had to say a comment first said 200."""
    upstream.script("tokens=100,pace=0.2", model="large")
    ask = {**ASK, "model": "narrow"}
    before = refused(slow_house)
    with slow_house.client() as first, first.stream("POST", "/v1/chat/completions", json=ask) as open_one:
        with slow_house.client() as client:
            answer = client.post("/v1/chat/completions", json=ask)
        after = refused(slow_house)
        assert open_one.status_code == 200

    lines = lines_of(answer)
    assert answer.status_code == 200 and lines[0] == ": keep-alive"
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "overloaded"
    assert after == before + 1


def test_a_slow_reader_slows_its_own_upstream_and_no_other(slow_house: House, upstream: ScriptedUpstream) -> None:
    """What it does not read waits upstream, not here; the time it takes is not its upstream's silence."""
    long = {**ASK, "model": "large"}
    upstream.script(Script(text=" ".join(["w" * 40_000] * 1_000)), model="large")
    upstream.script("tokens=20,pace=0.01", model="small")
    small_window = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)])
    with (
        slow_house.client(transport=small_window) as client,
        client.stream("POST", "/v1/chat/completions", json=long) as slow,
    ):
        until(lambda: upstream.requests and upstream.requests[0].tokens_sent > 0)
        with ThreadPoolExecutor(4) as pool:
            others = list(pool.map(lambda _: stream_of(slow_house), range(4)))
        time.sleep(1.2)  # longer than an upstream may be silent
        sent = upstream.requests[0].tokens_sent
        rest = b"".join(slow.iter_raw())

    assert all("data: [DONE]" in other for other in others)
    assert rest.endswith(b"data: [DONE]\n\n")
    assert 0 < sent < upstream.requests[0].tokens_sent == 1_000


def test_a_client_that_never_reads_loses_its_place(slow_house: House, upstream: ScriptedUpstream) -> None:
    """Its upstream is closed and its call is booked: by the kernel's word that nothing was taken for so long."""
    upstream.script("big-chunk,tokens=10,after=1,pace=0.01")
    place = urlsplit(slow_house.url)
    body = json.dumps({**ASK, "user": "never reads"}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {slow_house.team_key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(head.encode() + body)
        until(lambda: upstream.requests and upstream.requests[0].tokens_sent >= 1)
        began = time.monotonic()
        until(lambda: in_flight(slow_house) == 0)

    assert time.monotonic() - began >= 0.5  # it was waited for


def refused(house: House) -> float:
    """Return how often the house has refused a call because all was busy."""
    with house.client(house.admin_key) as admin:
        lines = admin.get("/metrics").text.splitlines()
    wanted = f'tollgate_refused_total{{code="overloaded",limit="",team="{house.team_id}"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(wanted))


def stream_of(house: House) -> str:
    with house.client() as client:
        return client.post("/v1/chat/completions", json=ASK).text


def in_flight(house: House) -> float:
    """Return how many calls run, by the metric."""
    with house.client(house.admin_key) as admin:
        for line in admin.get("/metrics").text.splitlines():
            if line.startswith("tollgate_calls_in_flight"):
                return float(line.rpartition(" ")[2])
    raise AssertionError("no such metric")
