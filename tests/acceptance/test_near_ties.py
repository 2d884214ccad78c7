"""Models of one price: calls go where a first token has lately come sooner."""

from __future__ import annotations

from pathlib import Path

from router.catalog.catalog import AutoRoute
from tests.support.house import model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream

HELLO = [{"role": "user", "content": "hello"}]


def test_among_equal_prices_the_sooner_answers(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """Once each has streamed, whichever conversation asks; and ``/v1/route`` says what is forecast."""
    twins = {name: model(name, upstream_model=name) for name in ("brisk", "tardy")}
    route = {"auto": AutoRoute(small=tuple(twins), large=())}
    with ScriptedUpstream(models=tuple(twins)) as upstream:
        upstream.script("tokens=3,first_token=0.4", model="tardy")
        settings = settings_for(
            database_url, redis_url, upstream.url, tmp_path / "data", models=twins, auto=route, aliases={}
        )
        with running_house(settings) as house, house.client() as client:
            for name in twins:
                client.post("/v1/chat/completions", json={"model": name, "messages": HELLO, "stream": True}).read()
            asked = [
                client.post("/v1/chat/completions", json={"model": "auto", "messages": HELLO, "user": str(user)})
                for user in range(12)
            ]
            told = client.post("/v1/route", json={"model": "auto", "messages": HELLO}).json()

    assert {answer.headers["x-model-used"] for answer in asked} == {"brisk"}
    brisk, tardy = told["targets"]
    assert [brisk["model"], tardy["model"]] == ["brisk", "tardy"]
    assert brisk["first_token_ms"] < 400 <= tardy["first_token_ms"]
