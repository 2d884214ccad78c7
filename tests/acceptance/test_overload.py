# What clients see when every slot of a model is held: a wait in their team's queue, a smaller model, or an honest 503.

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from billing.core.money import to_nano
from billing.core.prices import Price
from gateway.accounts.schemas import LimitsInput
from gateway.core.settings import ProviderSettings, QueueSettings, Timeouts
from router.catalog.catalog import AutoRoute
from router.catalog.targets import Endpoint
from tests.support.house import NEVER_OPENS, ONCE, House, make_team, model, running_house, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

SLOTS = 2
QUEUE = QueueSettings(per_team=3, wait=2.0)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Say something."}], "stream": True}


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    """The outside world."""
    with ScriptedUpstream(models=("tight", "roomy", "little", "spare")) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def house(upstream: ScriptedUpstream, tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[House]:
    """A gateway with two slots at "tight" and at "spare", and none counted at "roomy" and "little"."""
    open_to_all = ProviderSettings(
        name="open",
        format="openai",
        api_keys=("sk-upstream",),
        endpoints=(Endpoint("local", upstream.url),),
        timeouts=Timeouts(connect=10.0, first_token=5.0, between_tokens=5.0, total=30.0),
        retries=ONCE,
        breaker=NEVER_OPENS,
    )
    folder: Path = tmp_path_factory.mktemp("house")
    dear = Price(input=to_nano(5), output=to_nano(20))
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = replace(
            settings_for(database_url, valkey.url, upstream.url, folder),
            providers={"open": open_to_all, "counted": replace(open_to_all, name="counted", concurrency=SLOTS)},
            models={
                "tight": model("tight", "counted", price=dear),
                "spare": model("spare", "counted"),
                "roomy": model("roomy", "open"),
                "little": model("little", "open"),
            },
            auto={"auto": AutoRoute(small=("little",), large=("tight",), quality=1.0)},  # never trusts a small one
            fallbacks={"spare": ("roomy",)},
            aliases={},
            queue=QUEUE,
        )
        with running_house(settings) as house:
            yield house


@pytest.fixture(autouse=True)
def _quiet(house: House, upstream: ScriptedUpstream) -> Iterator[None]:
    """Begin with free slots, and leave none held."""
    upstream.forget()
    yield
    until(lambda: set(gauges(house, "tollgate_slots_held").values()) == {0.0})
    assert set(gauges(house, "tollgate_queue_depth").values()) == {0.0}
    assert upstream.violations == []


def ask(house: House, key: str | None = None, timeout: float = 30.0, **more: Any) -> httpx.Response:
    with house.client(key) as client:
        return client.post("/v1/chat/completions", json={"model": "tight", **ASK, **more}, timeout=timeout)


def gauges(house: House, name: str) -> dict[str, float]:
    with house.client(house.admin_key) as admin:
        lines = admin.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")}


def waiting(house: House) -> float:
    return sum(value for name, value in gauges(house, "tollgate_queue_depth").items() if "/tight" in name)


@contextmanager
def all_slots_held(house: House, upstream: ScriptedUpstream) -> Iterator[threading.Event]:
    """Hold every slot of "tight" until the event that is given is set, or the block ends."""
    let_go = threading.Event()

    def hold() -> None:
        with (
            house.client() as client,
            client.stream("POST", "/v1/chat/completions", json={"model": "tight", **ASK}) as answer,
        ):
            assert answer.status_code == 200
            let_go.wait(20)

    asked = len(upstream.requests)
    upstream.script("hang,after=1", model="tight", times=SLOTS)
    with ThreadPoolExecutor(SLOTS) as pool:
        holding = [pool.submit(hold) for _ in range(SLOTS)]
        try:
            until(lambda: sum(seen.tokens_sent > 0 for seen in upstream.requests[asked:]) == SLOTS)
            yield let_go
        finally:
            let_go.set()
    for future in holding:
        future.result()


def a_team(house: House, **limits: int) -> str:
    key = asyncio.run(make_team(house.settings, f"team_{time.time_ns()}", LimitsInput(**limits)))
    assert ask(house, key, model="roomy").status_code == 200  # so that the gateway knows it
    return key


def test_a_call_that_must_begin_soon_is_not_kept_waiting(house: House, upstream: ScriptedUpstream) -> None:
    """x-llm-d-slo-ttft-ms: where no place is expected within it, or none became free, the call is refused as overload;
    where one is, it goes on as ever."""
    with all_slots_held(house, upstream), house.client() as client:
        body, refused = {"model": "tight", **ASK}, []
        for soon in ("1", "1e3"):
            refused.append(client.post("/v1/chat/completions", json=body, headers={"x-llm-d-slo-ttft-ms": soon}))
    with house.client() as client:
        free = client.post("/v1/chat/completions", json=body, headers={"x-llm-d-slo-ttft-ms": "5000"})
        wrong = client.post("/v1/chat/completions", json=body, headers={"x-llm-d-slo-ttft-ms": "soon"})

    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(503, "overloaded")] * 2
    assert "within 0.001 s" in refused[0].text and "within 1 s" in refused[1].text
    assert (free.status_code, wrong.status_code) == (200, 400)
    assert wrong.json()["error"]["param"] == "x-llm-d-slo-ttft-ms"


def test_calls_beyond_the_slots_wait_for_their_turn(house: House, upstream: ScriptedUpstream) -> None:
    """All are answered, never more at once than there are slots; the wait is told, and is not our overhead."""
    upstream.script("tokens=2,pace=0.15", model="tight")
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: ask(house, stream=False), range(5)))
    moments = sorted(
        [(seen.at, 1) for seen in upstream.requests] + [(seen.answered_at or 0.0, -1) for seen in upstream.requests]
    )
    at_once = [sum(step for _, step in moments[: place + 1]) for place in range(len(moments))]
    waited = [answer for answer in answers if "x-tollgate-queue-ms" in answer.headers]
    row = house.record_of(waited[0])

    assert [answer.status_code for answer in answers] == [200] * 5
    assert max(at_once) <= SLOTS
    assert len(waited) == 3
    assert row["queue_ms"] == float(waited[0].headers["x-tollgate-queue-ms"]) > 100
    ours = float(waited[0].headers["x-tollgate-overhead-ms"])
    assert ours + row["queue_ms"] <= row["first_token_ms"] + 0.01


def test_a_full_queue_is_told_at_once(house: House, upstream: ScriptedUpstream) -> None:
    """503 overloaded with retry-after for whoever finds the queue full; the upstream never hears, no row is written."""
    before = gauges(house, "tollgate_shed_total")
    with all_slots_held(house, upstream) as let_go, ThreadPoolExecutor(QUEUE.per_team) as pool:
        waiters = [pool.submit(ask, house) for _ in range(QUEUE.per_team)]
        until(lambda: waiting(house) == QUEUE.per_team)
        began, asked = time.monotonic(), len(upstream.requests)
        refused = ask(house)
        took = time.monotonic() - began
        let_go.set()
        answers = [waiter.result() for waiter in waiters]
    after = gauges(house, "tollgate_shed_total")
    name = 'tollgate_shed_total{model="tight",reason="queue_full",tier="interactive"}'
    with house.client(house.admin_key) as admin:
        row = admin.get(f"/admin/usage-records/{refused.headers['x-request-id']}")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.json()["error"]["message"].startswith("Every target of 'tight' is busy, ")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert took < QUEUE.wait and asked == SLOTS
    assert [answer.status_code for answer in answers] == [200] * QUEUE.per_team
    assert after[name] == before.get(name, 0.0) + 1
    assert row.status_code == 404


def test_a_wait_ends(house: House, upstream: ScriptedUpstream) -> None:
    """Who has waited for `queue.wait` is sent away with 503; nobody was asked for it."""
    with all_slots_held(house, upstream):
        began = time.monotonic()
        refused = ask(house)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert time.monotonic() - began >= QUEUE.wait
    assert int(refused.headers["retry-after"]) >= 1
    assert len(upstream.requests) == SLOTS


def test_a_breaker_that_opens_while_a_call_waits_refuses_it(house: House, upstream: ScriptedUpstream) -> None:
    """What no upstream was asked for leaves no row, holds nothing, and is listed as refused, with its code."""
    key = a_team(house, concurrent_requests=1)
    upstream.forget()
    with (
        house.client(house.admin_key) as admin,
        all_slots_held(house, upstream) as let_go,
        ThreadPoolExecutor(1) as pool,
    ):
        waiter = pool.submit(ask, house, key)
        until(lambda: waiting(house) == 1)
        breakers = {each["model"]: each["id"] for each in admin.get("/admin/breakers").json()["breakers"]}
        admin.post(f"/admin/breakers/{breakers['tight']}/open").raise_for_status()
        let_go.set()
        refused = waiter.result()
        admin.post(f"/admin/breakers/{breakers['tight']}/reset").raise_for_status()
        request_id = refused.headers["x-request-id"]
        until(lambda: admin.get(f"/admin/calls/{request_id}").status_code == 200)
        call = admin.get(f"/admin/calls/{request_id}").json()
        row = admin.get(f"/admin/usage-records/{request_id}")

    assert (refused.status_code, len(upstream.requests), row.status_code) == (503, SLOTS, 404)
    assert refused.json()["error"]["message"].startswith("No model can be asked now. 'tight': its breaker is open")
    assert (call["status"], call["code"]) == ("refused", "overloaded")
    assert ask(house, key, model="roomy").status_code == 200


def test_one_teams_full_queue_is_not_anothers(house: House, upstream: ScriptedUpstream) -> None:
    """Another team's call waits in its own queue, and is the first to get a slot."""
    quiet = a_team(house)
    upstream.forget()
    order: list[str] = []

    def note(name: str, key: str | None) -> int:
        answer = ask(house, key, stream=False)
        order.append(name)
        return answer.status_code

    with all_slots_held(house, upstream) as let_go, ThreadPoolExecutor(QUEUE.per_team + 1) as pool:
        upstream.script("tokens=1,first_token=0.2", model="tight")
        flood = [pool.submit(note, "flood", None) for _ in range(QUEUE.per_team)]
        until(lambda: waiting(house) == QUEUE.per_team)
        late = pool.submit(note, "quiet", quiet)
        until(lambda: waiting(house) == QUEUE.per_team + 1)
        let_go.set()
        statuses = [future.result() for future in [*flood, late]]

    assert statuses == [200] * 4
    assert "quiet" in order[:SLOTS]


def test_a_client_that_leaves_gives_its_place_up(house: House, upstream: ScriptedUpstream) -> None:
    """Its place is free at once, and its turn never comes."""
    with all_slots_held(house, upstream):
        with pytest.raises(httpx.ReadTimeout):
            ask(house, timeout=0.3)
        until(lambda: waiting(house) == 0)

    assert len(upstream.requests) == SLOTS


def test_who_waits_holds_nothing(house: House, upstream: ScriptedUpstream) -> None:
    """A team that may run one call at a time runs another while one waits; the limit counts what runs."""
    key = a_team(house, concurrent_requests=1)
    with all_slots_held(house, upstream) as let_go, ThreadPoolExecutor(1) as pool:
        waiter: Future[httpx.Response] = pool.submit(ask, house, key)
        until(lambda: waiting(house) == 1)
        meanwhile = ask(house, key, model="roomy")
        let_go.set()
        answer = waiter.result()

    assert (meanwhile.status_code, answer.status_code) == (200, 200)


def test_a_refused_hold_gives_its_slot_back(house: House, upstream: ScriptedUpstream) -> None:
    """A call that its team's limits refuse holds no slot afterwards: see the fixture."""
    key = a_team(house, requests_per_minute=1)

    assert [ask(house, key).status_code for _ in range(4)] == [429] * 4


def test_a_smaller_model_answers_first_where_the_team_allows_it(house: House, upstream: ScriptedUpstream) -> None:
    """A hard question goes to the small model at once while the large one is full; without leave it waits."""
    strict = a_team(house)
    with house.client(house.admin_key) as admin:
        team = admin.get("/v1/usage", headers={"authorization": f"Bearer {strict}"}).json()["team_id"]
        admin.patch(f"/admin/teams/{team}", json={"allow_smaller": False}).raise_for_status()
    until(lambda: ask(house, strict, model="roomy").status_code == 200)
    time.sleep(1.1)  # every gateway hears of the change within a second
    with all_slots_held(house, upstream) as let_go, ThreadPoolExecutor(1) as pool:
        smaller = ask(house, model="auto")
        waiter = pool.submit(ask, house, strict, model="auto")
        until(lambda: waiting(house) == 1)
        let_go.set()
        waited = waiter.result()

    assert (smaller.status_code, smaller.headers["x-model-used"]) == (200, "little")
    assert "x-tollgate-queue-ms" not in smaller.headers
    assert (waited.status_code, waited.headers["x-model-used"]) == (200, "tight")
    assert float(waited.headers["x-tollgate-queue-ms"]) > 0


def test_a_fallback_answers_before_anybody_waits(house: House, upstream: ScriptedUpstream) -> None:
    """A model's fallback steps in when all its slots are held, and the reason says so."""
    upstream.script("tokens=1,first_token=0.5", model="spare")
    with ThreadPoolExecutor(SLOTS + 1) as pool:
        answers = list(pool.map(lambda _: ask(house, model="spare", stream=False), range(SLOTS + 1)))

    used = sorted((answer.headers["x-model-used"], answer.headers["x-route-reason"]) for answer in answers)
    assert used == [("roomy", "fallback"), ("spare", "named"), ("spare", "named")]


@pytest.mark.parametrize(
    "script", ["500", "429", "400", "reset-before-headers", "reset,after=2", "cut,after=2", "malformed,after=1"]
)
def test_however_a_call_ends_its_slot_is_free(house: House, upstream: ScriptedUpstream, script: str) -> None:
    """More broken calls than there are slots, one after the other, then a good one."""
    upstream.script(script, model="tight", times=SLOTS + 1)
    for _ in range(SLOTS + 1):
        ask(house)
        house.reset_breakers()

    assert ask(house).status_code == 200


def test_a_rate_limit_that_ends_soon_is_waited_for(house: House, upstream: ScriptedUpstream) -> None:
    """The call that met it is told; those that come after it wait, and go one after the other when it is over."""
    upstream.script("429,retry_after=1", model="roomy", times=1)
    first = ask(house, model="roomy")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: ask(house, model="roomy"), range(2)))
    later = ask(house, model="roomy")

    assert (first.status_code, first.headers["retry-after"]) == (429, "1")
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all(float(answer.headers["x-tollgate-queue-ms"]) > 500 for answer in answers)
    assert later.status_code == 200 and "x-tollgate-queue-ms" not in later.headers
    assert len(upstream.requests) == 4


def test_a_rate_limit_that_ends_late_is_told(house: House, upstream: ScriptedUpstream) -> None:
    """Beyond `queue.wait` nobody waits for it: 429 with what is left, and the upstream is not asked."""
    upstream.script("429,retry_after=30", model="roomy", times=1)
    refused = [ask(house, model="roomy") for _ in range(2)]
    house.reset_breakers()

    assert [answer.status_code for answer in refused] == [429, 429]
    assert int(refused[1].headers["retry-after"]) > 25
    assert len(upstream.requests) == 1


def test_who_waits_at_a_target_that_is_limited_waits_on(house: House, upstream: ScriptedUpstream) -> None:
    """A slot that becomes free while the target rests goes to nobody until it takes calls again."""
    with all_slots_held(house, upstream) as let_go, ThreadPoolExecutor(2) as pool:
        upstream.script("429,retry_after=1,latency=0.3", model="tight", times=1)
        waiters = [pool.submit(ask, house) for _ in range(2)]
        until(lambda: waiting(house) == 2)
        let_go.set()
        answers = [waiter.result() for waiter in waiters]

    assert sorted(answer.status_code for answer in answers) == [200, 429]
