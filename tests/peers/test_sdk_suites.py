# The tests that OpenAI's and Anthropic's packages for Python have of their API resources (their source archives, of the
# versions that are installed, unpacked into PEERS): every answer of ours is what their types say, to the last field.

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from tests.support.house import House, anthropic_provider, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey

PEERS = Path(os.environ.get("PEERS", ".")).absolute()
STAND_IN = Path(__file__).parents[1] / "support" / "sdk_suite.py"
MODELS = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "model", "text-embedding-3-small", "omni-moderation-2024-09-26")
FILES = {
    "openai": ["chat", "conversations", "responses"]
    + [f"test_{name}.py" for name in ("batches", "completions", "conversations", "embeddings", "files")]
    + [f"test_{name}.py" for name in ("models", "moderations", "responses")],
    "anthropic": ["messages", "test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py"],
}
# What a failure says, and why it may: the packages' own tests meet a mock that takes anything.
EXPECTED = {
    r"Unknown request URL|Not allowed to": "no such endpoint: stored chats, a model's end, a response's input counted",
    r"'purpose' is batch": "files are for batches",
    r"Only a response in the background|'starting_after' needs|cannot be cancelled": "what came whole is here already",
    r"'after'|after one batch or before|has not ended|'claude-1.3'": "a page, an end, a model that is none",
    r"'(billing_policy|inference_geo|compaction|thread|container)' is|'best_of' must|by voice takes": "refused by name",
    r"'stream_options' needs|'tools\[0\]' cannot|'additionalProperties' must": "not what the real APIs take either",
    r"CompactedResponse|Did not match any variants": "compacted, a user's words stay, as OpenAI's; its type has none",
    r"CreateEmbeddingResponse": "strict, the package refuses the base64 that it asks for itself",
}

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    """A gateway that has the models which the tests name."""
    claude = "claude-opus-5-5"
    with (
        ScriptedUpstream(models=(*MODELS, claude)) as upstream,
        database_of_its_own(postgres_url) as database_url,
        temporary_valkey() as valkey,
    ):
        settings = settings_for(database_url, valkey.url, upstream.url, tmp_path_factory.mktemp("house"))
        providers = settings.providers | {"anthropic": anthropic_provider(upstream.url.removesuffix("/v1"))}
        models = {name: model(name) for name in MODELS} | {claude: model(claude, "anthropic")}
        with running_house(replace(settings, providers=providers, models=models, auto={}, aliases={})) as house:
            yield house


@pytest.mark.parametrize(("sdk", "least"), [("openai", 150), ("anthropic", 90)])
def test_its_tests_of_resources_pass(house: House, tmp_path: Path, sdk: str, least: int) -> None:
    """But for what the reasons above explain."""
    source = PEERS / f"{sdk}-{version(sdk)}" / "tests"
    if not source.exists():
        pytest.skip(f"SKIPPED: no {source}; unpack the source archive of {sdk} {version(sdk)} into PEERS")
    shutil.copytree(source / "api_resources", tmp_path / "tests" / "api_resources")
    for name in ("__init__.py", "utils.py", "sample_file.txt"):
        shutil.copy(source / name, tmp_path / "tests" / name)
    shutil.copy(STAND_IN, tmp_path / "tests" / "conftest.py")
    env = {"PATH": os.environ["PATH"], "TOLLGATE_URL": house.url, "TOLLGATE_KEY": house.team_key, "TOLLGATE_SDK": sdk}
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-k", "not Async", "--timeout=60", f"--junitxml={report}"]
    files = [f"tests/api_resources/{name}" for name in FILES[sdk]]
    subprocess.run([*command, *files], cwd=tmp_path, env=env, timeout=1500, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {
        f"{case.get('classname')}::{case.get('name')}": one.get("message", "") + (one.text or "")
        for case in cases
        for one in case
        if one.tag in ("failure", "error")
    }
    explained = re.compile("|".join(EXPECTED))

    assert {name: why[-300:] for name, why in failed.items() if explained.search(why) is None} == {}
    assert sum(not len(case) for case in cases) >= least
