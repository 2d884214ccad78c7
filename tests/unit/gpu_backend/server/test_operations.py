# The front over HTTP: health, load, drain, models and metrics; and what it costs to have it.

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gpu_backend.server.client.engine_client import EngineState
from gpu_backend.server.metrics import Metrics
from gpu_backend.step.messages import LoadReport, Sleep, SleepAnswer, WakeUp
from tests.support.fake_engine import READY, FakeEngine, speaking
from tests.support.front import CHAT, running_front

LOAD_FIELDS = ["instance_id", "model_id", "status", "queue_depth", "running", "free_blocks", "total_blocks"]
LOAD_FIELDS += ["kv_utilization", "tokens_per_second", "requests_per_second", "prefix_hit_rate"]
LOAD_FIELDS += [
    "gpu_node_id",
    "gpus",
    "uptime_seconds",
    "busy_seconds",
    "request_seconds",
    "max_running",
    "input_modalities",
    "kv_transfer",
    "roofline_share",
    "fairness",
    "step_cost",
]


def seen(**told: Any) -> Any:
    """Return what metrics read of an active engine."""
    return SimpleNamespace(
        **{"state": EngineState.ACTIVE, "load": None, "ready": None, "restarts": 0}
        | {"uptime_seconds": 0.0, "busy_seconds": 0.0}
        | told
    )


def test_health_and_load_speak_of_the_engines_state(folder: Path) -> None:
    """Starting is a 503 that says so; a draining engine is healthy and takes nothing."""
    engine = FakeEngine(is_ready=False)
    with running_front(folder, engine) as url, httpx.Client(base_url=url) as http:
        starting = http.get("/health")
        refused = http.post("/v1/chat/completions", json=CHAT)
        counters = {"service_gap_interactive": 12.5, "service_bound_interactive": 80.0}
        engine.process.say(LoadReport(1, 2, 3, 8, 0.5, 6.0, 7.0, 0.25, roofline_share=0.4, counters=counters))
        engine.process.say(READY)
        while http.get("/health").status_code != 200:
            pass
        load = http.get("/load").json()
        drained = http.post("/drain")
        draining = http.post("/v1/chat/completions", json=CHAT)

        assert (starting.status_code, starting.json()["status"]) == (503, "starting")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert list(load) == LOAD_FIELDS
        assert load["roofline_share"] == 0.4
        assert load["fairness"] == {"interactive": {"gap": 12.5, "bound": 80}, "batch": {"gap": 0, "bound": 0}}
        assert (load["instance_id"][:8], load["status"], load["kv_utilization"]) == ("front-1-", "active", 0.5)
        assert drained.json()["status"] == http.get("/load").json()["status"] == "draining"
        assert (draining.status_code, draining.json()["error"]["code"]) == (503, "overloaded")
        assert http.get("/health").status_code == 200


def test_an_engine_sleeps_and_is_woken_over_http(folder: Path) -> None:
    """As vLLM has it. Asleep it is healthy, takes nothing and says why; what there is not here is refused by name."""
    engine = FakeEngine()
    answer = speaking([5, 6])
    engine.script = lambda c: [(SleepAnswer(c.number),)] if isinstance(c, Sleep | WakeUp) else answer(c)
    with running_front(folder, engine) as url, httpx.Client(base_url=url) as http:
        refused = [http.post("/sleep?level=2"), http.post("/sleep?mode=abort"), http.post("/wake_up?tags=weights")]
        awake = http.get("/is_sleeping").json()
        slept = http.post("/sleep?level=1")
        chat, health, metrics = http.post("/v1/chat/completions", json=CHAT), http.get("/health"), http.get("/metrics")
        asleep = http.get("/is_sleeping").json()
        woken = http.post("/wake_up?tags=weights&tags=kv_cache")
        answered = http.post("/v1/chat/completions", json=CHAT)

        assert [(each.status_code, each.json()["error"]["param"]) for each in refused] == [
            (400, "level"),
            (400, "mode"),
            (400, "tags"),
        ]
        assert (awake, asleep) == ({"is_sleeping": False}, {"is_sleeping": True})
        assert (slept.json()["status"], woken.json()["status"]) == ("sleeping", "active")
        assert (chat.status_code, chat.json()["error"]["code"]) == (503, "overloaded")
        assert "POST /wake_up" in chat.json()["error"]["message"]
        assert (health.status_code, health.json()["status"]) == (200, "sleeping")
        assert 'vllm:engine_sleep_state{model_name="tiny",sleep_state="weights_offloaded"} 1.0' in metrics.text
        assert 'tollgate_engine_up{model_name="tiny"} 1.0' in metrics.text
        assert answered.status_code == 200


def test_counters_are_of_one_start(folder: Path) -> None:
    """A server that was started again is another instance; its counters begin anew and only grow."""
    looks = []
    for _ in range(2):
        engine = FakeEngine(speaking([5, 6]))
        with running_front(folder, engine) as url, httpx.Client(base_url=url) as http:
            first = http.get("/load").json()
            engine.process.say(LoadReport(0, 0, 8, 8, 0.0, 0.0, 0.0, 0.0, gpu_busy_seconds=3.5))
            http.post("/v1/chat/completions", json=CHAT)
            while http.get("/load").json()["busy_seconds"] == 0:
                pass
            looks.append((first, http.get("/load").json(), http.get("/metrics").text))
    (first, last, metrics), (other, *_) = looks

    assert last["instance_id"] == first["instance_id"] != other["instance_id"]
    assert (first["gpus"], first["busy_seconds"], first["request_seconds"]) == (1, 0.0, 0.0)
    assert (last["busy_seconds"], last["request_seconds"]) == (3.5, 0.25)
    assert last["uptime_seconds"] > first["uptime_seconds"] > 0
    assert 'tollgate_engine_gpu_busy_seconds_total{model_name="tiny"} 3.5' in metrics
    assert 'tollgate_engine_request_gpu_seconds_total{model_name="tiny",tenant=""} 0.25' in metrics
    assert 'tollgate_engine_uptime_seconds_total{model_name="tiny"}' in metrics


def test_the_model_list_shows_the_one_model(http: httpx.Client) -> None:
    """Another name is a 404 in OpenAI's shape."""
    listed = http.get("/v1/models").json()

    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert http.get("/v1/models/org/other").json()["error"]["code"] == "model_not_found"


def test_metrics_count_what_was_answered(engine: FakeEngine, http: httpx.Client) -> None:
    """Under vLLM's names where they mean the same."""

    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))

    before = value("vllm:generation_tokens_total"), value("vllm:request_success_total")
    http.post("/v1/chat/completions", json={**CHAT, "n": 2})

    assert value("vllm:generation_tokens_total") == before[0] + 12
    assert value("vllm:request_success_total") == before[1] + 2
    assert value("tollgate_engine_up") == 1


def test_metrics_know_tenants(engine: FakeEngine, http: httpx.Client) -> None:
    """What each used, waited and got; embeddings too."""
    for tenant in ("a", "b", "b"):
        http.post("/v1/chat/completions", json=CHAT, headers={"x-tenant": tenant})
    http.post("/v1/embeddings", json={"model": "tiny", "input": "hi"}, headers={"x-tenant": "a"})
    text = http.get("/metrics").text

    def value(name: str, tenant: str, more: str = "") -> str:
        series = f'{name}{{{more}model_name="tiny",tenant="{tenant}"}} '
        return next(line for line in text.splitlines() if line.startswith(series)).removeprefix(series)

    for name, a, b in (
        ("vllm:generation_tokens_total", "6.0", "12.0"),
        ("vllm:request_queue_time_seconds_count", "2.0", "2.0"),
        ("vllm:request_prefill_time_seconds_sum", "0.004", "0.004"),
        ("vllm:request_decode_time_seconds_sum", "0.003", "0.006"),
        ("vllm:request_time_per_output_token_seconds_count", "1.0", "2.0"),
        ("vllm:request_inference_time_seconds_count", "1.0", "2.0"),
        ("vllm:inter_token_latency_seconds_count", "5.0", "10.0"),
        ("vllm:request_generation_tokens_sum", "6.0", "12.0"),
        ("vllm:request_prompt_tokens_count", "2.0", "2.0"),
        ("tollgate_engine_request_gpu_seconds_total", "0.5", "0.5"),
    ):
        assert (value(name, "a"), value(name, "b")) == (a, b), name
    assert value("vllm:request_success_total", "b", 'finished_reason="stop",') == "2.0"


def test_many_tenants_share_their_last_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Prometheus keeps is bounded, and nothing is left out of its sums."""
    monkeypatch.setattr("gpu_backend.server.metrics.MOST_TENANTS", 3)
    metrics = Metrics("tiny", seen())
    for number in range(5):
        metrics.count_given_up(2, f"t{number}")
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("vllm:request_success_total{")]

    assert {line.split('tenant="')[1].split('"')[0]: float(line.split()[-1]) for line in lines} == {
        "t0": 2.0,
        "t1": 2.0,
        "(others)": 6.0,
    }


def test_seconds_are_those_of_all_devices() -> None:
    """Four that compute together for a second are busy for four."""
    text = Metrics("tiny", seen(uptime_seconds=10.0, busy_seconds=2.5), gpus=4).text().decode()

    assert 'tollgate_engine_gpu_busy_seconds_total{model_name="tiny"} 10.0' in text
    assert 'tollgate_engine_gpu_idle_seconds_total{model_name="tiny"} 30.0' in text


def test_drafts_are_shown_under_vllms_names() -> None:
    """Where the engine speculates; where it does not, there is nothing to show."""
    counters = {"drafts": 3.0, "draft_tokens": 9.0, "accepted_tokens": 5.0}
    counters |= {f"accepted_tokens_at_{place}": 3.0 - place for place in range(3)}
    quiet = LoadReport(0, 0, 8, 8, 0.0, 0.0, 0.0, 0.0)

    def text(load: LoadReport) -> str:
        return Metrics("tiny", seen(load=load)).text().decode()

    speculating = text(replace(quiet, counters=counters))
    assert 'vllm:spec_decode_num_drafts_total{model_name="tiny"} 3.0' in speculating
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"} 9.0' in speculating
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"} 5.0' in speculating
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 2.0' in speculating
    assert "spec_decode" not in text(quiet)


def test_the_front_never_imports_torch(folder: Path) -> None:
    """The weights live in another process; what listens stays small and starts at once."""
    program = (
        "import sys, gpu_backend.__main__; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"
