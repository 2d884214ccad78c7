"""A commercial model at two endpoints: replicas of one region share its calls, another region takes over for it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.core.settings import ProviderSettings
from gateway.inference import counting
from router.catalog.targets import Endpoint
from tests.support.house import House, model, running_house, settings_for
from tests.support.openai_answers import prompt_tokens
from tests.support.scripted_upstream import ScriptedUpstream

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [*HELLO, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Who are you?"}]
GIANT = [{"role": "user", "content": "so many words " * 1000}]

Serve = Callable[[Endpoint, Endpoint], Any]


@pytest.fixture
def serve(database_url: str, redis_url: str, tmp_path: Path) -> Serve:
    """Run a gateway whose models are at two endpoints; "short" falls back to "wide"."""

    @contextmanager
    def run(*endpoints: Endpoint) -> Iterator[House]:
        upstream = ProviderSettings(name="upstream", format="openai", api_keys=("sk-upstream",), endpoints=endpoints)
        settings = settings_for(database_url, redis_url, endpoints[0].base_url, tmp_path / "data")
        models = {"small": model("small"), "wide": model("wide", context=100_000)}
        settings = replace(
            settings,
            providers={"upstream": upstream},
            models=models,
            fallbacks={"small": ("wide",)},
            auto={},
            aliases={},
        )
        with running_house(settings) as house:
            yield house

    return run


@pytest.fixture
def upstreams() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    """Two of them, well."""
    with ScriptedUpstream(models=("small", "wide")) as one, ScriptedUpstream(models=("small", "wide")) as other:
        yield one, other


def ask(client: httpx.Client, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "small", "messages": messages, "max_tokens": 5, **more})


def test_replicas_of_a_region_share_the_calls(
    serve: Serve, upstreams: tuple[ScriptedUpstream, ScriptedUpstream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that all say the same; but all later turns of a conversation go to one of them. Where one has too
    many prompts to count, the other counts, in what time is left; then it is estimated."""
    one, other = upstreams
    with serve(Endpoint("us", one.url), Endpoint("us", other.url)) as house, house.client() as client:
        assert {ask(client, HELLO).status_code for _ in range(55)} == {200}
        shared = len(one.requests), len(other.requests)
        for user in range(8):
            before = len(one.requests)
            assert {ask(client, TURNS, user=str(user)).status_code for _ in range(3)} == {200}
            assert len(one.requests) - before in (0, 3)
        one.script("full")
        count = partial(client.post, "/v1/messages/count_tokens", json={"model": "small", "messages": HELLO})
        counted = count().json()
        monkeypatch.setattr(counting, "PATIENCE", 0.4)
        one.script("full,latency=0.3")
        other.script("latency=0.3")
        late = count().json()

    assert counted == {"input_tokens": prompt_tokens({"messages": HELLO})} != late
    assert [each.requests[-1].path for each in upstreams] == ["/tokenize"] * 2
    assert sum(shared) == 55 and min(shared) > 10  # 27 each; one in a million is as far off
    assert len(one.requests) > shared[0] and len(other.requests) > shared[1]


def test_a_region_that_is_preferred_has_the_calls(
    serve: Serve, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """Another region is there for when it fails: from the next call on, and for none of them in vain."""
    us, eu = upstreams
    with serve(Endpoint("us", us.url), Endpoint("eu", eu.url)) as house, house.client() as client:
        statuses = Counter(ask(client, HELLO).status_code for _ in range(10))
        us.script("429")
        statuses += Counter(ask(client, HELLO).status_code for _ in range(10))

    assert statuses == {200: 20}
    assert (len(us.requests) <= 12, len(eu.requests)) == (True, 10)


def test_a_region_that_cannot_be_reached_is_left_whatever_is_asked(
    serve: Serve, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """No prompt is to blame for that: one team's long ones close the region, and use up no budget of retries."""
    _, eu = upstreams
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nothing listens
        dead = Endpoint("us", f"http://127.0.0.1:{closed.getsockname()[1]}/v1")
        with serve(dead, Endpoint("eu", eu.url)) as house, house.client() as client:
            statuses = Counter(ask(client, GIANT).status_code for _ in range(155))
            with house.client(house.admin_key) as admin:
                breakers = admin.get("/admin/breakers").json()["breakers"]

    assert statuses == {200: 155}
    assert [one["state"] for one in breakers if one["region"] == "us" and one["model"] == "small"] == ["open"]


def test_a_prompt_that_its_upstream_finds_too_long_goes_to_a_longer_context(
    serve: Serve, upstreams: tuple[ScriptedUpstream, ScriptedUpstream]
) -> None:
    """What only the model's own tokenizer can tell is no 400 while a fallback has room: one more attempt, no other
    endpoint of the same model."""
    one, other = upstreams
    for upstream in upstreams:
        upstream.script("status=400,type=invalid_request_error,code=context_length_exceeded", model="small")
    with serve(Endpoint("us", one.url), Endpoint("eu", other.url)) as house, house.client() as client:
        answer = ask(client, GIANT)
        known = ask(client, [{"role": "user", "content": "word " * 9_000}])
        row = house.record_of(answer)

    assert (answer.status_code, answer.json()["model_used"]) == (200, "wide")
    assert [attempt["outcome"] for attempt in row["attempts"]] == ["refused", "ok"]
    assert (known.status_code, known.headers["x-model-used"], known.headers["x-route-reason"]) == (
        200,
        "wide",
        "fallback",
    )
    assert len(one.requests) + len(other.requests) == 3
