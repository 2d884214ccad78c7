# `tollgate dev` comes and goes as it promises: whatever ends it, nothing is left running and nothing is lost; whatever
# dies under it is started again.

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.run.processes import free_port, is_running
from tests.support.dev_house import TOLLGATE, DevHouse
from tests.support.forked_commands import forked_commands
from tests.support.waiting import until


@pytest.mark.parametrize("wait", [0.1, 1.0])
def test_interrupted_while_it_starts_it_leaves_nothing(tmp_path: Path, wait: float) -> None:
    """Ctrl-C before it is ready is an ordinary end, and the next start works on what there is."""
    house = DevHouse(tmp_path / "data")
    try:
        process = house.launch()
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        process.wait(30)

        assert house.left_running(within=10) == []
    finally:
        house.clean_up()


def test_a_data_folder_that_cannot_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    """Where a file stands in its way, say."""
    (tmp_path / "data").touch()
    process = DevHouse(tmp_path / "data").launch()
    _, errors = process.communicate(timeout=30)

    assert (process.returncode, errors.count(b"\n")) == (1, 1)
    assert b"--data-dir" in errors


def test_a_taken_port_is_said_and_ends_it(tmp_path: Path) -> None:
    """Nothing is started and nothing is written when the port cannot be had."""
    house = DevHouse(tmp_path / "data")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        process = house.launch(port)
        output, errors = process.communicate(timeout=30)

    assert process.returncode == 1
    assert output == b""
    assert str(port).encode() in errors and b"--port" in errors
    assert not house.data_dir.exists()


EXAMPLE = Path(__file__).parents[2] / "examples" / "teams.sh"
CONFIG = """
admin_keys: [tgadmin-from-the-file]
providers:
  own:
    format: openai
    api_keys: ['${UPSTREAM_KEY:-k: [x]}']
    endpoints: [{region: here, base_url: 'http://127.0.0.1:9/v1'}]
models:
  outside: {provider: own, price: {input: 1, output: 2}, context: 1000, max_output: 500}
aliases: {house: tollgate-demo}
"""


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevHouse]:
    """A house with a config file, ``more.yaml`` beside its data directory, for test after test."""
    folder = tmp_path_factory.mktemp("joined")
    (folder / "more.yaml").write_text(CONFIG)
    house = DevHouse(folder / "data", "--config", str(folder / "more.yaml"))
    try:
        yield house
        assert house.end(signal.SIGTERM) == 0
        assert house.left_running() == []
    finally:
        house.clean_up()


@pytest.fixture
def house(joined: DevHouse) -> DevHouse:
    """That house, running."""
    if not joined.is_running:
        joined.start()
    return joined


def test_a_config_file_joins_the_demo_model(house: DevHouse) -> None:
    """Any section may stand in the file; its models come after the demo model, its admin key replaces ours."""
    facts = house.facts
    teams = httpx.get(f"{facts['url']}/admin/teams", headers={"authorization": "Bearer tgadmin-from-the-file"})

    assert facts["models"][:2] == ["tollgate-demo", "outside"]
    assert {"auto", "house"} <= set(facts["models"])
    assert facts["admin_key"] == "tgadmin-from-the-file"
    assert teams.status_code == 200
    assert house.ask().status_code == 200


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_the_example_sets_its_teams_up_once(house: DevHouse, tmp_path: Path) -> None:
    """examples/teams.sh runs against `tollgate dev`, and again: ten teams, a key for each, and nothing twice."""
    search = f"{tmp_path}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": search, "TOLLGATE_CONFIG": str(house.data_dir / "tollgate.yaml")}
    admin = {"authorization": f"Bearer {house.facts['admin_key']}"}
    with forked_commands(tmp_path):
        runs = [subprocess.run(["sh", EXAMPLE], env=env, capture_output=True, text=True) for _ in range(2)]
    there, keyed = (teams_of(house, what, admin) for what in ("teams", "keys"))

    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert [len(re.findall(r"\ttg-[\w-]{43}\t", run.stdout)) for run in runs] == [10, 0]
    assert len(there) == 10 and sorted(keyed) == sorted(there)


def teams_of(house: DevHouse, what: str, admin: dict[str, str]) -> list[str]:
    """Return the teams that there are, or the team of each key, but for the demo's."""
    found = httpx.get(f"{house.facts['url']}/admin/{what}", headers=admin).json()["data"]
    return [team for each in found if (team := each["id" if what == "teams" else "team_id"]) != "team_demo"]


def test_a_second_house_on_the_same_data_says_so_and_ends(house: DevHouse) -> None:
    """The data directory is locked; the first house goes on. What it keeps there is private."""
    second = DevHouse(house.data_dir)
    process = second.launch()
    output, errors = process.communicate(timeout=30)
    secret_files = [*house.data_dir.glob("*.json"), house.data_dir / "tollgate.yaml"]

    assert process.returncode == 1
    assert output == b""
    assert b"in use by another" in errors and b"--data-dir" in errors
    assert house.ask().status_code == 200
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret_files)


@pytest.mark.timeout(240)
def test_a_hangup_reads_the_config_file_again(house: DevHouse) -> None:
    """SIGHUP: gateway and worker follow the --config file, a worker that still starts too; a faulty one is refused."""
    config = house.data_dir.parent / "more.yaml"
    pids = house.pids()
    config.write_text(CONFIG.replace("aliases: {house:", "aliases: {two:"))
    house.process.send_signal(signal.SIGHUP)
    until(lambda: "two" in model_names(house))
    worker_log = house.data_dir / "logs" / "worker.log"
    until(lambda: b"config_reloaded" in worker_log.read_bytes())
    config.write_text("aliases: {three: nobody}\n")
    house.process.send_signal(signal.SIGHUP)
    assert house.process.stderr is not None
    said = b""
    while b"stays as it was" not in said:
        line = house.process.stderr.readline()
        assert line
        said += line

    assert f"{config}:1: aliases.three".encode() in said
    assert {"two", "tollgate-demo"} <= set(model_names(house)) and not {"house", "three"} & set(model_names(house))
    assert house.ask().status_code == 200
    assert house.pids() == pids
    config.write_text(CONFIG)


def model_names(house: DevHouse) -> list[str]:
    answer = httpx.get(f"{house.facts['url']}/v1/models", headers=house.team, timeout=10)
    return [model["id"] for model in answer.json()["data"]]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL])
def test_whatever_ends_it_nothing_runs_on_and_nothing_is_lost(house: DevHouse, number: signal.Signals) -> None:
    """SIGINT and SIGKILL: no process left, and the next start has the same keys and all usage, and migrates nothing."""
    (house.data_dir / "logs" / "migrate.log").unlink(missing_ok=True)
    secrets, team_key = house.data_dir / "secrets.json", house.facts["team_key"]
    made = kept_secrets(secrets)
    assert house.ask().status_code == 200
    pids = [pid for role in house.pids().values() for pid in role]
    groups = {os.getpgid(pid) for pid in pids}
    status = house.end(number)
    # Asked to end, it waits for all of them; killed, the kernel ends them, which takes it a moment.
    deadline = time.monotonic() + (10 if number == signal.SIGKILL else 0)
    while (any(map(is_running, pids)) or any(map(is_group_alive, groups))) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert not any(map(is_running, pids))
    assert not any(map(is_group_alive, groups))
    assert house.left_running() == []
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0)

    assert house.start()["team_key"] == team_key and kept_secrets(secrets) == made
    assert not (house.data_dir / "logs" / "migrate.log").exists()
    until(lambda: house.usage()["requests"] == house.answered)  # what the dead left is carried by the next


def kept_secrets(path: Path) -> dict[str, Any]:
    """Return what a stack keeps from start to start; its port is this start's."""
    return {name: value for name, value in json.loads(path.read_bytes()).items() if name != "port"}


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "roles",
    [("gateway", "redis", "postgres"), pytest.param(("worker", "engine"), marks=pytest.mark.soak)],
    ids=" ".join,
)
def test_a_child_that_dies_is_started_again(house: DevHouse, roles: tuple[str, ...]) -> None:
    """Each of the five killed in turn: it is back, pids.json knows it, and requests are answered."""
    for role in roles:
        old = house.pids()[role]
        os.kill(old[0], signal.SIGKILL)
        new = until(lambda role=role, old=old: other_pids(house, role, old))

        assert all(map(is_running, new))
        assert not any(map(is_running, old))
        until(lambda: answers(house))


def test_the_engine_answers_the_house_and_no_web_page(house: DevHouse) -> None:
    """A browser on this machine can reach it, so any page could have it drain: it demands the house's secret, and knows
    a page that has a name of its own lead here."""
    page = {"origin": "https://evil.example", "content-type": "text/plain"}
    rebound = {"origin": "http://evil.example:8100", "host": "evil.example:8100"}
    with httpx.Client(base_url=house.facts["engine_url"]) as engine:
        statuses = [engine.post("/drain", headers=headers).status_code for headers in ({}, page, rebound)]
        statuses.append(engine.post("/drain", headers=page | house.engine).status_code)
        state = engine.get("/load", headers=house.engine).json()["status"]

    assert statuses == [401, 403, 403, 403]
    assert state == "active"


@pytest.mark.timeout(120)
def test_an_engine_that_was_drained_is_started_again(house: DevHouse) -> None:
    """Nothing else would ever take its place: the house answers again by itself."""
    old = house.pids()["engine"]
    httpx.post(f"{house.facts['engine_url']}/drain", headers=house.engine).raise_for_status()

    assert house.ask(timeout=10.0).status_code == 503
    until(lambda: other_pids(house, "engine", old))
    until(lambda: answers(house))


def other_pids(house: DevHouse, role: str, old: list[int]) -> list[int]:
    new = house.pids()[role]
    return new if len(new) == len(old) and not set(new) & set(old) else []


def answers(house: DevHouse) -> bool:
    try:
        return house.ask(timeout=10.0).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_faulty_config_file_is_refused_with_its_lines(tmp_path: Path) -> None:
    """Every fault of the user's own file, with its line there; nothing is left running."""
    config = tmp_path / "more.yaml"
    config.write_text("models:\n  outside: {provider: nobody, context: 1000}\nquues: {per_team: 1}\n")
    house = DevHouse(tmp_path / "data", "--config", str(config))
    try:
        process = house.launch()
        output, errors = process.communicate(timeout=60)

        assert process.returncode == 1
        assert output == b""
        assert b"more.yaml:2: models.outside" in errors
        assert b"more.yaml:3: quues" in errors
        assert house.left_running() == []
    finally:
        house.clean_up()


def can_run_tollgate(user: str) -> bool:
    """Return whether ``user`` may enter the interpreter's, the environment's and the checkout's folders."""
    command = [str(TOLLGATE), "--help"]
    try:
        return subprocess.run(command, user=user, extra_groups=(), cwd="/", capture_output=True).returncode == 0
    except PermissionError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="SKIPPED: the other tests of this file run as a plain user already")
def test_a_plain_user_needs_nothing_of_root(tmp_path: Path) -> None:
    """In a folder of their own, a user without rights starts it, is answered, and ends it."""
    if not can_run_tollgate("nobody"):
        pytest.skip("SKIPPED: the interpreter or the checkout is closed to other users than root")
    with tempfile.TemporaryDirectory() as folder:
        shutil.chown(folder, "nobody")
        house = DevHouse(Path(folder) / "data", user="nobody")
        try:
            house.start()
            answer = house.ask()
            owners = {Path(f"/proc/{pid}").stat().st_uid for pids in house.pids().values() for pid in pids}
            status = house.end(signal.SIGTERM)

            assert answer.status_code == 200
            assert owners == {house.data_dir.stat().st_uid} and owners != {0}
            assert status == 0
            assert house.left_running() == []
        finally:
            house.clean_up()
