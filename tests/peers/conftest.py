# What suites of other engines' HTTP APIs run against: a gateway before our engine with a tiny random model that answers
# to all of their models' names.

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.catalog.targets import Endpoint
from tests.support.engine_server import running_engine_server
from tests.support.house import House, model, running_house, settings_for
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.tiny_model import CHAT_TEMPLATE, TinyModel, write_tiny_model

TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>{% endfor %}" + CHAT_TEMPLATE
ENDS = [184, 185, 186, 187]  # bytes that are in no text: a reply has some 65 tokens
CONTEXT = 16_384


@pytest.fixture(scope="module")
def suite_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    folder = tmp_path_factory.mktemp("model")
    shape = TinyModel(max_position=CONTEXT, extra={"eos_token_id": ENDS})
    write_tiny_model(folder, shape, with_tokenizer=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def suite_house(
    request: pytest.FixtureRequest, suite_model: Path, tmp_path_factory: pytest.TempPathFactory, postgres_url: str
) -> Iterator[House]:
    """A gateway that has the ``MODELS`` of a suite, each of them ours."""
    with (
        database_of_its_own(postgres_url) as database_url,
        temporary_valkey() as valkey,
        running_engine_server(suite_model) as engine,
    ):
        settings = settings_for(database_url, valkey.url, engine.url, tmp_path_factory.mktemp("house"))
        given = settings.providers["upstream"]
        patient = replace(given.timeouts, first_token=30.0, between_tokens=30.0, total=60.0)
        here = (Endpoint("here", engine.url + "/v1"),)
        own = replace(given, name="own", self_hosted=True, endpoints=here, timeouts=patient)
        known = {name: model(name, "own", upstream_model="tiny", context=CONTEXT) for name in request.module.MODELS}
        with running_house(replace(settings, providers={"own": own}, models=known, auto={}, aliases={})) as house:
            yield house
