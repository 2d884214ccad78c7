# Adapters of our own engine behind a gateway: each is a model with a price and teams of its own. The engine is its
# front, with a script for its process.

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from billing.core.money import to_nano
from billing.core.prices import Price
from gateway.core.settings import ProviderSettings
from gpu_backend.step.adapter import Adapter
from gpu_backend.step.messages import Generate
from router.catalog.targets import Endpoint
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import running_front, write_small_files
from tests.support.house import model, running_house, settings_for

SQL = Adapter(1, "sql", "/adapters/sql")


def test_an_adapter_is_a_model_with_its_price_and_its_teams(database_url: str, redis_url: str, tmp_path: Path) -> None:
    """A call goes to the engine with the adapter, costs what the adapter's model does, and only whose team may."""
    engine = FakeEngine(speaking([70, 71, 72]), max_model_len=512)
    with running_front(write_small_files(tmp_path / "tiny"), engine, lora_modules=(SQL,)) as url:
        own = ProviderSettings(
            name="own", format="openai", self_hosted=True, endpoints=(Endpoint("here", url + "/v1"),)
        )
        dearer = Price(input=to_nano(10), output=to_nano(20))
        models = {"tiny": model("tiny", "own"), "queries": model("queries", "own", upstream_model="sql", price=dearer)}
        more = {"providers": {"own": own}, "models": models, "auto": {}, "aliases": {}}
        with running_house(settings_for(database_url, redis_url, "", tmp_path / "data", **more)) as house:

            def ask(name: str, key: str | None = None) -> httpx.Response:
                body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
                with house.client(key) as client:
                    return client.post("/v1/chat/completions", json=body)

            with house.client(house.admin_key) as admin:
                made = admin.post("/admin/teams", json={"id": "plain", "name": "Plain", "allowed_models": ["tiny"]})
                key = admin.post("/admin/keys", json={"team_id": made.raise_for_status().json()["id"]}).json()["key"]
            by_adapter, alone = ask("queries"), ask("tiny")
            refused, allowed = ask("queries", key), ask("tiny", key)
            costs = [house.record_of(answer)["cost_usd"] for answer in (by_adapter, alone)]
    asked = [command.adapter for command in engine.process.commands if isinstance(command, Generate)]

    assert by_adapter.status_code == alone.status_code == allowed.status_code == 200, by_adapter.text
    assert by_adapter.json()["model"] == "queries"
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed"), refused.text
    assert asked == [SQL, None, None]
    assert costs[0] == pytest.approx(10 * costs[1]) and costs[1] > 0
