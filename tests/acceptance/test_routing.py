# `"model": "auto"`: what decides, where the decision shows, and what /v1/route says of a call without making it.

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from router.sticky import MARGIN
from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

EASY = "What is the capital of France?"


@pytest.fixture
def client(house: House) -> Iterator[httpx.Client]:
    with house.client() as client:
        yield client


def ask(client: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    said = {"model": "auto", "messages": [{"role": "user", "content": EASY}]} | body
    return client.post("/v1/chat/completions", json=said, headers=headers).raise_for_status()


def explain(client: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    said = {"model": "auto", "messages": [{"role": "user", "content": EASY}]} | body
    answer: dict[str, Any] = client.post("/v1/route", json=said, headers=headers).raise_for_status().json()
    return answer


def scores_seen(house: House) -> float:
    with house.client(house.admin_key) as admin:
        lines = admin.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tollgate_route_score_count"))


@pytest.mark.parametrize(("quality", "model", "reason"), [("0", "small", "auto_small"), ("1", "large", "auto_large")])
def test_a_decision_shows_everywhere(house: House, client: httpx.Client, quality: str, model: str, reason: str) -> None:
    """The quality asked moves the choice; model, reason and score stand in headers, ledger and metrics."""
    before = scores_seen(house)
    answer = ask(client, {}, {"x-quality": quality})
    row = house.record_of(answer)

    assert answer.json()["model_used"] == answer.headers["x-model-used"] == row["model_used"] == model
    assert answer.headers["x-route-reason"] == row["route_reason"] == reason
    assert 0 < row["complexity"] < 1
    assert float(answer.headers["x-route-score"]) == pytest.approx(row["complexity"], abs=5e-5)
    assert scores_seen(house) == before + 1


@pytest.mark.parametrize("more", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_the_highest_cost_leaves_dear_models_out(house: House, client: httpx.Client, more: dict[str, Any]) -> None:
    """A call that may not cost what the large model could take goes to the small one, whatever the quality."""
    body, headers = {"max_tokens": 100}, {"x-quality": "1", "x-max-cost-usd": "0.001"}
    answer, told = ask(client, body | more, headers), explain(client, body, headers)
    row = house.record_of(answer)

    assert answer.headers["x-model-used"] == row["model_used"] == "small"
    assert 0 < float(row["cost_usd"]) <= 0.001
    assert (told["model_used"], told["reason"], told["small_suffices"]) == ("small", "auto_small", None)
    assert [left["model"] for left in told["left_out"]] == ["large"]
    assert "above x-max-cost-usd" in told["left_out"][0]["reasons"][0]
    call = client.get(f"/v1/calls/{answer.headers['x-request-id']}").raise_for_status().json()
    assert call["left_out"] == [{"model": "large", "codes": ["max_cost_usd"]}]


def test_the_highest_cost_is_kept_to_the_billionth(client: httpx.Client) -> None:
    """What a call could cost on the large model is enough for it, a billionth less is not; the field is the same."""
    large, small = explain(client, {"max_tokens": 100}, {"x-quality": "1"})["targets"]
    enough = Decimal(large["most_cost_usd"])

    def chosen(most: Decimal) -> str:
        said = {"x-quality": "1", "x-max-cost-usd": f"{most:f}"}
        return str(ask(client, {"max_tokens": 100}, said).headers["x-model-used"])

    assert chosen(enough) == "large"
    assert chosen(enough - Decimal("1e-9")) == chosen(Decimal(small["most_cost_usd"])) == "small"
    assert explain(client, {"max_tokens": 100, "quality": 1.0, "max_cost_usd": float(enough)})["model_used"] == "large"


@pytest.mark.parametrize("name", ["auto", "large"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": EASY}], "max_tokens": 10}),
        ("chat/completions", {"messages": [{"role": "user", "content": EASY}], "max_tokens": 10, "stream": True}),
        ("completions", {"prompt": EASY, "max_tokens": 10}),
        ("embeddings", {"input": EASY}),
        ("messages", {"messages": [{"role": "user", "content": EASY}], "max_tokens": 10}),
        ("route", {"messages": [{"role": "user", "content": EASY}], "max_tokens": 10}),
    ],
)
def test_where_no_model_is_cheap_enough_the_call_is_refused(
    house: House, client: httpx.Client, upstream: ScriptedUpstream, name: str, path: str, body: dict[str, Any]
) -> None:
    """The refusal says how much would do and what else would help; nobody was asked, and no row is written."""
    asked = len(upstream.requests)
    answer = client.post(f"/v1/{path}", json=body | {"model": name}, headers={"x-max-cost-usd": "0.000000001"})
    error = answer.json()["error"]
    with house.client(house.admin_key) as admin:
        row = admin.get(f"/admin/usage-records/{answer.headers['x-request-id']}")

    assert (answer.status_code, row.status_code, len(upstream.requests)) == (400, 404, asked)
    assert path == "messages" or (error["code"], error["param"]) == ("max_cost_exceeded", "x-max-cost-usd")
    enough = re.search(
        rf"may cost up to \$(0\.\d+) on '{name}', more than x-max-cost-usd \(\$0\.000000001\)", error["message"]
    )
    assert enough is not None, error["message"]
    assert ("shorten the input" if path == "embeddings" else "lower max_tokens") in error["message"]
    within = client.post(f"/v1/{path}", json=body | {"model": name}, headers={"x-max-cost-usd": enough[1]})
    assert within.status_code == 200, within.text


def test_an_explanation_says_what_the_call_then_does(client: httpx.Client) -> None:
    """Targets stand in the order in which they are tried, with what they would cost at most."""
    told = explain(client, {"max_tokens": 100}, {"x-quality": "1"})
    answer = ask(client, {"max_tokens": 100}, {"x-quality": "1"})

    assert told["object"] == "route"
    assert told["reason"] == answer.headers["x-route-reason"] == "auto_large"
    assert f"{told['small_suffices']:.4f}" == answer.headers["x-route-score"]
    assert (told["quality"], told["turns_back"], told["left_out"]) == (1.0, 0, [])
    assert [(target["model"], target["is_available"]) for target in told["targets"]] == [
        ("large", True),
        ("small", True),
    ]
    large, small = told["targets"]
    assert float(large["most_cost_usd"]) > float(large["expected_cost_usd"]) > float(small["expected_cost_usd"]) > 0
    assert "is below the quality asked, 1" in told["explanation"]


def test_an_explanation_says_who_answers_in_the_place_of_others(house: House, client: httpx.Client) -> None:
    """Judged hard, with the large model's breaker open: the small one answers, and the explanation says why it."""
    client.post("/v1/chat/completions", json={"model": "large", "messages": [{"role": "user", "content": EASY}]})
    with house.client(house.admin_key) as admin:
        breakers = admin.get("/admin/breakers").json()["breakers"]
        [breaker] = [each for each in breakers if each["model"] == "large"]
        admin.post(f"/admin/breakers/{breaker['id']}/open").raise_for_status()
        try:
            told, answer = explain(client, {}, {"x-quality": "1"}), ask(client, {}, {"x-quality": "1"})
        finally:
            house.reset_breakers()

    assert told["model_used"] == answer.headers["x-model-used"] == "small"
    assert told["reason"] == answer.headers["x-route-reason"] == "auto_large"
    assert told["explanation"].endswith("No large model can be asked now, so 'small' comes first.")


def test_embeddings_are_explained_as_they_are_routed(client: httpx.Client) -> None:
    """By the first model that embeds, whatever they say: nothing is judged."""
    body = {"model": "auto", "input": "Once"}
    told = client.post("/v1/route", json=body).raise_for_status().json()
    answer = client.post("/v1/embeddings", json=body).raise_for_status()

    assert told["model_used"] == answer.headers["x-model-used"] == "small"
    assert (told["small_suffices"], told["reason"]) == (None, answer.headers["x-route-reason"])
    assert "the first model of the route that embeds" in told["explanation"]


def test_a_long_thread_that_wavers_keeps_its_model(client: httpx.Client) -> None:
    """Twelve turns whose scores lie on either side of the quality asked, none of them clearly: all go where the first
    one went, and each as explained."""
    words = "What is the capital of {}, and which river flows through it on its long way down to the sea?"
    scores = {
        place: explain(client, {"messages": [{"role": "user", "content": words.format(place)}]})["small_suffices"]
        for place in ("France", "the United Kingdom")
    }
    low, high = sorted(scores, key=scores.__getitem__)
    quality = {"x-quality": str(sum(scores.values()) / 2)}
    turns: list[dict[str, str]] = []
    seen = []
    for turn in range(12):
        turns.append({"role": "user", "content": words.format(high if turn % 2 else low)})
        told, answer = explain(client, {"messages": turns}, quality), ask(client, {"messages": turns}, quality)
        assert told["model_used"] == answer.headers["x-model-used"] and told["turns_back"] == turn
        seen.append(answer.headers["x-model-used"])
        turns.append({"role": "assistant", "content": "So it is."})

    assert seen == ["large"] * 12


def test_an_explanation_costs_nothing(house: House, client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """No upstream is asked, nothing is held and no row is written."""
    asked = len(upstream.requests)
    answer = client.post("/v1/route", json={"model": "auto", "messages": [{"role": "user", "content": EASY}]})
    with house.client(house.admin_key) as admin:
        row = admin.get(f"/admin/usage-records/{answer.headers['x-request-id']}")

    assert (answer.status_code, row.status_code, len(upstream.requests)) == (200, 404, asked)
    assert not any(name.startswith("x-ratelimit") for name in answer.headers)


@pytest.mark.parametrize(
    ("body", "reason", "model"),
    [
        ({"model": "small", "prompt": "Once"}, "named", "small"),
        ({"model": "old-name", "input": "Once"}, "alias", "large"),
        ({"model": "small", "messages": [{"role": "user", "content": "Hi"}]}, "named", "small"),
    ],
)
def test_named_models_are_explained_too(client: httpx.Client, body: dict[str, Any], reason: str, model: str) -> None:
    """Completions, embeddings and chat are told apart by their own fields."""
    told = client.post("/v1/route", json=body).raise_for_status().json()

    assert (told["reason"], told["model_used"], told["small_suffices"]) == (reason, model, None)


@pytest.mark.parametrize(
    ("allowed", "listed"),
    [
        (["auto"], ["auto"]),
        (["small"], ["auto", "small"]),
        (["large"], ["auto", "large", "old-name"]),
        (["old-name"], ["old-name"]),
        ([], []),
    ],
)
def test_a_team_is_shown_what_it_may_ask_for(house: House, allowed: list[str], listed: list[str]) -> None:
    """Routes too, by their own name or by a model of theirs; with one kind of model there is nothing to judge."""
    team = "allowed_" + "_".join(allowed)
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": team, "allowed_models": allowed}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": team}).json()["key"]
    with house.client(key) as client:
        shown = sorted(model["id"] for model in client.get("/v1/models").json()["data"])
        explained = {
            name: client.post("/v1/route", json={"model": name, "messages": [{"role": "user", "content": EASY}]})
            for name in ("auto", "small", "large", "old-name")
        }

    assert shown == listed == sorted(name for name, answer in explained.items() if answer.status_code == 200)
    assert all(answer.status_code == 403 for name, answer in explained.items() if name not in listed)
    if "auto" in listed:
        assert (explained["auto"].json()["small_suffices"] is None) == (allowed != ["auto"])


def test_a_team_of_a_route_alone_hears_why_a_model_is_left_out(house: House) -> None:
    """Its list names no model, so all of the route's are its own: said is what they lack, not whose they are."""
    with house.client(house.admin_key) as admin:
        admin.post("/admin/teams", json={"id": "team_of_auto", "allowed_models": ["auto"]}).raise_for_status()
        key = admin.post("/admin/keys", json={"team_id": "team_of_auto"}).json()["key"]
    with house.client(key) as client:
        [left] = explain(client, {"max_tokens": 100}, {"x-max-cost-usd": "0.001"})["left_out"]

    assert left["model"] == "large" and "above x-max-cost-usd" in left["reasons"][0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quality": "best"}, "a number from 0 to 1"),
        ({"quality": 1.5}, "a number from 0 to 1"),
        ({"quality": True}, "a number from 0 to 1"),
        ({"max_cost_usd": -1}, "a number 0 or more"),
        ({"max_cost_usd": "$1"}, "a number 0 or more"),
        ({"quality": 0.5, "x-quality": 0.6}, "disagree"),
    ],
)
def test_a_routing_option_that_cannot_be_read_is_refused_with_what_would_be_right(
    client: httpx.Client, said: dict[str, Any], words: str
) -> None:
    """In the body as in headers; null says nothing."""
    body = {"model": "auto", "messages": [{"role": "user", "content": EASY}]}
    headers = {f"x-{name.removeprefix('x-').replace('_', '-')}": str(value) for name, value in said.items()}
    answers = [client.post("/v1/chat/completions", json=body | said)]
    if "x-quality" not in said:
        answers.append(client.post("/v1/route", json=body, headers=headers))

    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(said))), error
        assert words in error["message"]
    assert ask(client, dict.fromkeys(said)).status_code == 200


def test_a_message_in_anthropics_dialect_is_explained(client: httpx.Client) -> None:
    """Told by the header that its clients send; it goes where the explanation says."""
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": EASY}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Paris"}]},
    ]
    body = {"model": "auto", "max_tokens": 9, "system": "Be kind.", "messages": turns}
    for quality, model in (("0", "small"), ("1", "large")):
        headers = {"anthropic-version": "2023-06-01", "x-quality": quality}
        told = client.post("/v1/route", json=body, headers=headers).raise_for_status().json()
        answer = client.post("/v1/messages", json=body, headers=headers).raise_for_status()

        assert told["model_used"] == answer.headers["x-model-used"] == model
        assert f"{told['small_suffices']:.4f}" == answer.headers["x-route-score"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "nobody", "prompt": "Once"}, 404, "model_not_found"),
        ({"model": "auto"}, 400, "invalid_value"),
        ({"model": "auto", "prompt": "Once", "input": "twice"}, 400, "invalid_value"),
        ({"model": "auto", "messages": []}, 400, "invalid_value"),
        ({"model": "auto", "prompt": "Once", "max_cost_usd": 0}, 400, "max_cost_exceeded"),
    ],
)
def test_what_a_call_would_be_refused_is_refused(
    client: httpx.Client, body: dict[str, Any], status: int, code: str
) -> None:
    """An explanation of a call that cannot be made is the refusal that it would meet."""
    answer = client.post("/v1/route", json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_thread_stays_where_it_is_when_the_score_hardly_moves(client: httpx.Client) -> None:
    """The same turn goes on with what the thread had, where alone it would have changed the model by a hair."""
    words = "What is the capital of {}, and which river flows through it on its long way down to the sea?"
    turns = [{"role": "user", "content": words.format("France")}, {"role": "assistant", "content": "Paris; the Seine."}]
    last = {"role": "user", "content": words.format("the United Kingdom")}
    first, alone = explain(client, {"messages": turns[:1]}), explain(client, {"messages": [last]})
    low, high = sorted((first["small_suffices"], alone["small_suffices"]))
    assert low < high
    between = {"x-quality": str((low + high) / 2)}  # one of the two turns reaches it, and the other does not

    thread = explain(client, {"messages": [*turns, last]}, between)

    assert high - low < 2 * MARGIN
    assert explain(client, {"messages": [last]}, between)["reason"] != thread["reason"]
    assert thread["reason"] == explain(client, {"messages": turns[:1]}, between)["reason"]
    assert thread["turns_back"] == 1
