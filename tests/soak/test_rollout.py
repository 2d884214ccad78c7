# `tollgate fleet up` with engines of the demo model under a load of streams: another version, a killed controller, a
# killed engine, a version that is no good. No stream is lost.

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.core.settings import Fleet, Pool, ProviderSettings, Scaling, Timeouts
from gateway.dev.stack import CHECKPOINT
from gateway.placing.local import LocalPlacer
from tests.support.dev_house import TOLLGATE
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.waiting import until

pytestmark = pytest.mark.soak

SECRET, ENGINE_SECRET = "b4f1c6d09e7a2385" * 2, "0c9d7e6f5a4b3c2d" * 2
WITHIN = 180.0  # seconds for what takes a few on a quiet machine
FILE = """
database_url: postgresql://a:b@db/tollgate
redis_url: REDIS
data_dir: FOLDER
admin_keys: [tgadmin-canary-of-the-admins]
key_pepper: "a pepper of the tests, long enough"
providers:
  own: {format: openai, self_hosted: true, api_keys: [ENGINE_SECRET]}
models:
  demo: {provider: own, price: {input: 1, output: 1}}
fleet:
  secrets: [FLEET_SECRET]
  pools:
    own:
      scaling: {min: 2, max: 2}
      engine:
        {model: CHECKPOINT, gpus: 0, version: VERSION, arguments: [--served-model-name, demo, --device, cpu, MORE]}
      rollout: {canary: 3s, stand: 3s, healthy_within: 2m, drain: 1m}
"""


class Scene:
    """A gateway, the file of a controller, and what both do."""

    def __init__(self, house: House, redis_url: str, folder: Path) -> None:
        self.house, self.redis_url, self.folder = house, redis_url, folder
        self.log = folder / "controller.log"
        self.answered, self.lost = 0, list[str]()

    def write(self, version: str, more: str = "--num-threads, 1") -> None:
        """Write what the controller reads."""
        said = {"REDIS": self.redis_url, "FOLDER": str(self.folder / "data"), "CHECKPOINT": str(CHECKPOINT)}
        said |= {
            "ENGINE_SECRET": ENGINE_SECRET,
            "FLEET_SECRET": SECRET,
            "VERSION": version,
            "MORE": f'--step-cost, "off", {more}',
        }
        text = re.sub("|".join(said), lambda found: said[found[0]], FILE)
        (self.folder / "tollgate.yaml").write_text(text)

    def control(self) -> subprocess.Popen[bytes]:
        """Start a controller."""
        command = [str(TOLLGATE), "fleet", "up", "--config", str(self.folder / "tollgate.yaml")]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def asked(self) -> set[str]:
        """Return the replicas that are asked, by their names."""
        with self.house.client(self.house.admin_key) as admin:
            shown = admin.get("/admin/instances").json()["instances"]
        return {one["instance_id"].rpartition("-")[0] for one in shown if one["takes_calls"]}

    def settled(self, *, but: set[str]) -> set[str]:
        """Wait until two replicas are asked, none of these, and no other process is there."""

        def look() -> set[str]:
            found = self.asked()
            return found if len(found) == 2 and not found & but and set(self.placed().names()) == found else set()

        return until(look, within=WITHIN)

    def placed(self) -> LocalPlacer:
        """Return what runs on this machine."""
        return LocalPlacer(self.folder / "data" / "fleet")

    def told(self, words: str) -> int:
        """Return how often the controllers said so."""
        return self.log.read_text().count(words)

    @contextlib.contextmanager
    def loaded(self, callers: int) -> Iterator[None]:
        """Have so many callers stream one reply after the other."""
        over = threading.Event()
        threads = [threading.Thread(target=self._stream, args=(over, number)) for number in range(callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(60)

    def _stream(self, over: threading.Event, number: int) -> None:
        with self.house.client() as client:
            while not over.is_set():
                body = {"model": "demo", "max_tokens": 60, "stream": True, "ignore_eos": True}
                body["messages"] = [{"role": "user", "content": f"Tell me {number} of {time.monotonic()}"}]
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
                    finishes = [each for one in events[:-1] for each in json.loads(one).get("choices", ())]
                    is_whole = answer.status_code == 200 and events[-1:] == ["[DONE]"]
                    is_whole = is_whole and any(each.get("finish_reason") for each in finishes)
                except Exception as exc:
                    self.lost.append(repr(exc))
                    continue
                if is_whole:
                    self.answered += 1
                else:
                    self.lost.append(f"{answer.status_code}: {events[-2:]}")


@pytest.fixture
def scene(databases: Any, redis_url: str, tmp_path: Path) -> Iterator[Scene]:
    """A gateway whose one provider is a pool; no process is left behind."""
    own = ProviderSettings(
        name="own",
        format="openai",
        api_keys=(ENGINE_SECRET,),
        self_hosted=True,
        endpoints=(),
        timeouts=Timeouts(connect=2.0, first_token=60.0, between_tokens=60.0, total=120.0),
        breaker=NEVER_OPENS,
    )
    more: dict[str, Any] = {
        "providers": {"own": own},
        "models": {"demo": model("demo", "own")},
        "auto": {},
        "aliases": {},
    }
    more["fleet"] = Fleet(secrets=(SECRET,), pools={"own": Pool(scaling=Scaling(min=2, max=2))})
    with databases.lend() as url, running_house(settings_for(url, redis_url, "", tmp_path / "house", **more)) as house:
        scene = Scene(house, redis_url, tmp_path)
        yield scene
        placer = scene.placed()
        for name in placer.names():
            placer.kill(name)


def test_no_stream_is_lost(scene: Scene) -> None:
    """While replicas are replaced, controllers and engines killed, and a version rolled back that cannot answer."""
    scene.write("a")
    controller = scene.control()
    first = scene.settled(but=set())
    until(lambda: scene.told("rollout_finished"), within=WITHIN)
    figures = {}
    try:
        with scene.loaded(4):
            began = time.monotonic()
            scene.write("b")
            controller.send_signal(signal.SIGHUP)
            second = scene.settled(but=first)
            figures["rolled out, s"] = time.monotonic() - began
            figures["streams meanwhile"] = scene.answered

            controller.kill()
            controller.wait()
            answered = scene.answered
            until(lambda: scene.answered > answered + 4, within=WITHIN)
            controller = scene.control()
            until(lambda: scene.told("fleet_controller_acts") == 2, within=WITHIN)
            adopted = scene.settled(but=set())

            began = time.monotonic()
            victim = min(second)
            scene.placed().kill(victim)
            third = scene.settled(but={victim})
            figures["replaced, s"] = time.monotonic() - began

            began = time.monotonic()
            scene.write("c", "--max-model-len, 16")  # too short for a prompt of its warm-up
            controller.send_signal(signal.SIGHUP)
            until(lambda: scene.told("rollout_rolled_back"), within=WITHIN)
            figures["rolled back, s"] = time.monotonic() - began
            fourth = scene.settled(but=set())
        controller.send_signal(signal.SIGTERM)
        status = controller.wait(60)
    finally:
        controller.kill()
    figures["streams in all"] = scene.answered
    print(figures, scene.log.read_text())

    assert scene.lost == []
    assert adopted == second and third - second and fourth == third
    assert (status, set(scene.placed().names())) == (0, set())
