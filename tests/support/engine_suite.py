# What suites of other engines' HTTP APIs run against: a gateway before our engine with a tiny random model that answers
# to all of their models' names; and how such a suite is run, by pytest beside ours.

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

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
RANDOM = "a random model answers nothing of use, calls no tool unasked, and may end a JSON text late"


def write_suite_model(folder: Path) -> Path:
    """Write the model into ``folder``, and return that."""
    shape = TinyModel(max_position=CONTEXT, extra={"eos_token_id": ENDS})
    write_tiny_model(folder, shape, with_tokenizer=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def suite_house(folder: Path, models: Iterable[str], postgres_url: str, home: Path) -> Iterator[House]:
    """Run a gateway that has ``models``, each of them ours."""
    with (
        database_of_its_own(postgres_url) as database_url,
        temporary_valkey() as valkey,
        running_engine_server(folder) as engine,
    ):
        settings = settings_for(database_url, valkey.url, engine.url, home)
        given = settings.providers["upstream"]
        patient = replace(given.timeouts, first_token=30.0, between_tokens=30.0, total=60.0)
        here = (Endpoint("here", engine.url + "/v1"),)
        own = replace(given, name="own", self_hosted=True, endpoints=here, timeouts=patient)
        known = {name: model(name, "own", upstream_model="tiny", context=CONTEXT) for name in models}
        with running_house(replace(settings, providers={"own": own}, models=known, auto={}, aliases={})) as house:
            yield house


def outcomes_of(
    house: House, folder: Path, home: Path, env: Mapping[str, str], *more: str
) -> dict[str, tuple[str, str]]:
    """Run the tests in ``home``, a conftest.py among them; return what became of each, and why."""
    known = {"PATH": os.environ["PATH"], "HOME": str(home), "TOLLGATE_URL": house.url, "TOLLGATE_KEY": house.team_key}
    report, plain = home / "report.xml", ("-o", "anyio_mode=auto", "-W", "ignore", "--tb=line", "--timeout=90")
    command = [sys.executable, "-m", "pytest", *plain, f"--junitxml={report}", "-p", "no:cacheprovider", *more, "tests"]
    env = {**known, "TOLLGATE_MODEL": str(folder), **env}
    subprocess.run(command, cwd=home, env=env, timeout=1500, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found = [(one.tag, one.get("message", "")) for one in case if one.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.test_')[2]}::{case.get('name')}"
        outcomes[name] = found[0] if found else ("passed", "")
    return outcomes


def unexplained(outcomes: Mapping[str, tuple[str, str]], expected: Mapping[str, str]) -> dict[str, str]:
    """Return which tests failed and why, but for those that are ``expected`` to."""
    failed = {name: why for name, (what, why) in outcomes.items() if what in ("failure", "error")}
    return {name: why for name, why in failed.items() if name.partition("[")[0] not in expected}
