# `tollgate fleet up`: what it says where it cannot begin.

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.placing.command import command, fleet_of

pytestmark = pytest.mark.usefixtures("signals")

SECRET = "b4f1c6d09e7a2385" * 2
FILE = """
database_url: postgresql://a:b@db/tollgate
redis_url: redis://cache:6379/0
admin_keys: [tgadmin-canary-of-the-admins]
key_pepper: "a pepper of the tests, long enough"
providers:
  own: {format: openai, self_hosted: true}
models:
  llama: {provider: own, price: {input: 0.40, output: 0.80}}
fleet: {secrets: [SECRET], pools: {own: POOL}}
"""


def up(folder: Path, pool: str, *more: str) -> Result:
    """Run the command with a pool of that kind."""
    file = folder / "tollgate.yaml"
    file.write_text(FILE.replace("SECRET", SECRET).replace("POOL", pool))
    return CliRunner().invoke(command, ["up", "--config", str(file), *more])


def test_a_file_without_an_engine_starts_nothing(tmp_path: Path) -> None:
    """It says what is missing; a faulty one, all that is wrong with it."""
    without = up(tmp_path, "{scaling: {max: 2}}")
    faulty = up(tmp_path, "{engine: {model: m}}")

    assert (without.exit_code, faulty.exit_code) == (1, 1)
    assert "no pool has an engine: fleet: {pools: {NAME: {scaling: …" in without.stderr
    assert "fleet.pools.own: engine without scaling: how many replicas?" in faulty.stderr


def test_without_ray_it_says_how_to_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all else goes without it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    told = up(tmp_path, "{scaling: {max: 2}, engine: {model: m}}", "--placer", "ray")

    assert (told.exit_code, told.stderr) == (1, "Ray is not installed: pip install 'tollgate[ray]'\n")
    assert "scale" in CliRunner().invoke(command, ["--help"]).stdout


def test_a_fleet_is_told_by_its_redis() -> None:
    """Another database is another fleet; another way to write the same one, or another password, is not."""
    one = [
        *("redis://cache", "redis://:pass@cache:6379/0", "rediss://cache:6379?db=0"),
        *(
            "redis://cache/1",
            "redis://cache?db=2",
            "redis://other",
            "unix:///run/redis.sock",
            "unix:///run/redis.sock?db=1",
        ),
        *("redis+sentinel://b,a/one", "redis+sentinel://a:26379,b/one/0", "redis+sentinel://a,b/two"),
        *("redis+cluster://a,b", "redis+cluster://a,b/0"),
    ]
    found = [fleet_of(url) for url in one]

    assert [found.index(each) for each in found] == [0, 0, 0, 3, 4, 5, 6, 7, 8, 8, 10, 11, 11]
