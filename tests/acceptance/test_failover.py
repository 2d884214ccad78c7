# What clients see while upstreams fail, behind two regions and two keys: another region's answer, another key's, or an
# honest refusal. The first test is the table of docs/operations/faults.md, a row a fault.

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis

from gateway.core.settings import BreakerPolicy, ProviderSettings, Retries, Timeouts
from router.catalog.targets import Endpoint
from tests.support.house import House, make_team, model, running_house, serving, settings_for
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.waiting import until

POLICY = BreakerPolicy(window=30.0, min_requests=4, failure_ratio=0.5, open_for=60.0, probes=1)
BRISK = replace(POLICY, open_for=0.5)
TIMEOUTS = Timeouts(connect=10.0, first_token=0.4, between_tokens=2.0, total=5.0)
ASK: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Say something."}]}


@pytest.fixture(scope="module")
def regions() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    """One provider's two regions."""
    with (
        ScriptedUpstream(models=("small", "spare", "brisk")) as us,
        ScriptedUpstream(models=("small", "spare", "brisk")) as eu,
    ):
        yield us, eu


@pytest.fixture(scope="module")
def front(
    regions: tuple[ScriptedUpstream, ScriptedUpstream], tmp_path_factory: pytest.TempPathFactory, postgres_url: str
) -> Iterator[House]:
    """A gateway in front of both regions; "spare" is at the second alone, breakers of "brisk" are open for a moment."""
    us, eu = regions
    both = ProviderSettings(
        name="upstream",
        format="openai",
        api_keys=("sk-upstream", "sk-other"),
        endpoints=(Endpoint("us", us.url), Endpoint("eu", eu.url)),
        timeouts=TIMEOUTS,
        retries=Retries(attempts=2, budget=0.1),
        breaker=POLICY,
    )
    alone = replace(both, name="alone", endpoints=(Endpoint("eu", eu.url),), api_keys=("sk-upstream",))
    brisk = replace(both, name="brisk", breaker=BRISK)
    folder: Path = tmp_path_factory.mktemp("front")
    with database_of_its_own(postgres_url) as database_url, temporary_valkey() as valkey:
        settings = settings_for(database_url, valkey.url, us.url, folder)
        models = {"small": model("small"), "spare": model("spare", "alone"), "brisk": model("brisk", "brisk")}
        models |= {name: model(name, "alone", upstream_model="spare") for name in ("odd", "echo")}
        settings = replace(
            settings, providers={"upstream": both, "alone": alone, "brisk": brisk}, models=models, auto={}, aliases={}
        )
        with running_house(settings) as house:
            yield house


@pytest.fixture
def us(regions: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    """The region that is preferred."""
    return regions[0]


@pytest.fixture
def eu(regions: tuple[ScriptedUpstream, ScriptedUpstream]) -> ScriptedUpstream:
    """The other one."""
    return regions[1]


@pytest.fixture(autouse=True)
def _quiet(front: House, regions: tuple[ScriptedUpstream, ScriptedUpstream]) -> Iterator[None]:
    """Begin with upstreams that answer and breakers that have seen nothing."""
    for region in regions:
        region.forget()
    front.reset_breakers()
    yield
    assert [violation for region in regions for violation in region.violations] == []


def ask(house: House, key: str | None = None, **more: Any) -> httpx.Response:
    with house.client(key) as client:
        return client.post("/v1/chat/completions", json={**ASK, **more})


def found_of(house: House, answer: httpx.Response) -> tuple[dict[str, Any], int]:
    """Return a call as it is listed, and the status of the question for its row."""
    request_id = answer.headers["x-request-id"]
    with house.client(house.admin_key) as admin:
        until(lambda: admin.get(f"/admin/calls/{request_id}").status_code == 200)
        call = admin.get(f"/admin/calls/{request_id}").json()
        return call, admin.get(f"/admin/usage-records/{request_id}").status_code


def breaker_of(house: House, region: str, model: str = "small", provider: str = "upstream") -> dict[str, Any]:
    with house.client(house.admin_key) as admin:
        for breaker in admin.get("/admin/breakers").json()["breakers"]:
            if (breaker["region"], breaker["model"], breaker["provider"]) == (region, model, provider):
                return breaker
    raise AssertionError(f"no breaker of {model} at {region}")


# script, its outcome's name, does it count against the endpoint, what a client sees when there is nowhere else to go,
# after how many attempts at the one endpoint
FAULTS = [
    ("hang-before-headers", "timeout", True, (504, "upstream_timeout"), 1),
    ("reset-before-headers", "reset", True, (502, "upstream_error"), 2),
    ("500", "status_500", True, (502, "upstream_error"), 2),
    ("502", "status_502", True, (502, "upstream_error"), 2),
    ("503", "status_503", True, (502, "upstream_error"), 2),
    ("529", "status_529", True, (502, "upstream_error"), 2),
    ("not-json", "cut", True, (502, "upstream_error"), 2),
    ("error-first", "error_frame", True, (502, "upstream_error"), 2),
    ("cut,after=0", "cut", True, (502, "upstream_error"), 2),
    ("role-only", "timeout", True, (504, "upstream_timeout"), 1),
    ("pings-only", "timeout", True, (504, "upstream_timeout"), 1),
    ("full", "full", False, (503, "overloaded"), 1),
    ("429", "rate_limited", False, (429, "rate_limit_exceeded"), 1),
    ("429-seconds", "rate_limited", False, (429, "rate_limit_exceeded"), 1),
    ("429-too-large", "too_large", False, (429, "rate_limit_exceeded"), 1),
    ("insufficient-quota", "spend_cap", False, (429, "rate_limit_exceeded"), 1),
    ("refused-key", "refused_key", False, (502, "upstream_error"), 1),
    ("403", "refused_key", False, (502, "upstream_error"), 1),
    ("404", "not_found", False, (502, "upstream_error"), 1),
]


@pytest.mark.parametrize(("script", "outcome", "counts", "alone", "tries"), FAULTS, ids=[row[0] for row in FAULTS])
def test_each_fault_before_the_first_token(
    front: House,
    us: ScriptedUpstream,
    eu: ScriptedUpstream,
    script: str,
    outcome: str,
    counts: bool,
    alone: tuple[int, str],
    tries: int,
) -> None:
    """With another region its answer comes; with none an honest status; the breaker counts what is the endpoint's."""
    us.script(script)
    answer = ask(front, stream=True)
    row = front.record_of(answer)
    counted = breaker_of(front, "us")["failures"]
    eu.script(script)
    refused = ask(front, stream=True, model="spare")
    attempts = front.record_of(refused)["attempts"]

    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    assert {attempt["outcome"] for attempt in row["attempts"][:-1]} == {outcome}
    assert [attempt["outcome"] for attempt in row["attempts"]][-1] == "ok"
    assert "/eu/" in row["attempts"][-1]["target"] and row["provider_endpoint"].startswith("eu ")
    assert (counted > 0) == counts
    assert (refused.status_code, refused.json()["error"]["code"]) == alone
    assert [attempt["outcome"] for attempt in attempts] == [outcome] * tries
    assert refused.status_code not in (429, 503) or int(refused.headers["retry-after"]) >= 1


def test_a_model_that_its_upstream_does_not_know_is_named_and_breaks_nothing(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream
) -> None:
    """The caller hears which model of the catalogue it is; neither its breaker nor another model's counts a failure."""
    eu.script("404")
    answers = [ask(front, model="odd") for _ in range(8)]
    eu.forget()
    after = ask(front, model="spare")

    assert {answer.status_code for answer in answers} == {502}
    error = answers[0].json()["error"]
    assert error["code"] == "upstream_error"
    assert error["message"] == "No model answered. 'odd': the upstream knows no such model, or no such path."
    assert after.status_code == 200
    for name in ("odd", "spare"):
        breaker = breaker_of(front, "eu", name, "alone")
        assert (breaker["state"], breaker["failures"]) == ("closed", 0)


@pytest.mark.parametrize("script", ["400", "413"])
def test_the_requests_own_fault_is_told_and_goes_nowhere_else(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream, script: str
) -> None:
    """No other endpoint would take it either; the breaker counts an answer."""
    us.script(script)
    answer = ask(front)

    assert answer.status_code == int(script)
    assert (len(us.requests), len(eu.requests)) == (1, 0)
    assert (breaker_of(front, "us")["requests"], breaker_of(front, "us")["failures"]) == (1, 0)


def test_a_dead_region_is_left_alone(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """Every call is answered while a region dies, and soon nobody asks it."""
    us.script("reset-before-headers")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(front), range(12)))
    opened = breaker_of(front, "us")
    asked = len(us.requests)
    later = ask(front)

    assert {answer.status_code for answer in answers} == {200}
    assert opened["state"] == "open" and opened["retry_at"] and "failed" in opened["reason"]
    assert asked < 12 and len(us.requests) == asked
    assert [attempt["outcome"] for attempt in front.record_of(later)["attempts"]] == ["ok"]


def test_a_region_that_is_well_again_is_found(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """A probe closes the breaker, and calls go back to the region that is preferred."""
    us.script("500")
    while breaker_of(front, "us", "brisk", "brisk")["state"] == "closed":
        assert ask(front, model="brisk").status_code == 200
    us.forget()

    def is_closed() -> bool:
        assert ask(front, model="brisk").status_code == 200
        return breaker_of(front, "us", "brisk", "brisk")["state"] == "closed"

    until(is_closed)
    eu.forget()

    assert ask(front, model="brisk").status_code == 200
    assert eu.requests == []


def test_a_probe_that_fails_costs_its_caller_nothing(front: House, us: ScriptedUpstream) -> None:
    """A region that is still down is asked by one call at a time, and that call is answered elsewhere."""
    us.script("500")
    while breaker_of(front, "us", "brisk", "brisk")["state"] == "closed":
        assert ask(front, model="brisk").status_code == 200
    asked, began = len(us.requests), time.monotonic()
    while len(us.requests) < asked + 2:
        assert ask(front, model="brisk").status_code == 200 and time.monotonic() < began + 20
        time.sleep(0.01)
    took = time.monotonic() - began

    assert took >= BRISK.open_for  # two probes are an open_for apart
    assert breaker_of(front, "us", "brisk", "brisk")["state"] != "closed"


def test_a_call_whose_probes_are_all_elsewhere_is_refused(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream
) -> None:
    """That is found out after its hold: no upstream has heard of it, so it has no row, and is listed with why."""
    us.script("500")
    eu.script("500")
    while ask(front, model="brisk").status_code != 503:
        pass
    time.sleep(BRISK.open_for)
    with Redis.from_url(front.settings.redis_url) as redis:
        for region in ("us", "eu"):
            probes = f"tollgate:{{breakers}}:p:{breaker_of(front, region, 'brisk', 'brisk')['id']}"
            redis.zadd(probes, {"of another gateway": time.time() + 60})
    asked = len(us.requests) + len(eu.requests)
    refused = ask(front, model="brisk")
    told, row = found_of(front, refused)

    assert refused.status_code == 503 and "all probes are out" in refused.json()["error"]["message"]
    assert (told["status"], told["code"], told["message"], row) == (
        *("refused", "overloaded"),
        *(refused.json()["error"]["message"], 404),
    )
    assert len(us.requests) + len(eu.requests) == asked


def test_one_teams_giant_prompts_do_not_close_an_endpoint(front: House, us: ScriptedUpstream) -> None:
    """A team whose prompts are too much for a region finds its answers in the other; small prompts still go there."""
    us.script("500")
    giant = [{"role": "user", "content": "so many words " * 1000}]
    for _ in range(8):
        assert ask(front, messages=giant).status_code == 200
    one_team = breaker_of(front, "us")
    other = asyncio.run(make_team(front.settings, f"team_{time.time_ns()}"))
    for _ in range(8):
        assert ask(front, other, messages=giant).status_code == 200

    assert (one_team["state"], one_team["failures"]) == ("closed", 8)
    assert breaker_of(front, "us")["state"] == "open"


def test_a_rate_limited_key_rests_and_the_other_answers(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream
) -> None:
    """429 of one key: the region's other key answers, and goes on alone until the limit's time is over."""
    us.script("429,retry_after=30", api_key="sk-upstream")
    answers = [ask(front) for _ in range(6)]
    aside = breaker_of(front, "us")["keys_set_aside"]

    assert {answer.status_code for answer in answers} == {200}
    assert sum(request.api_key == "sk-upstream" for request in us.requests) == 1
    assert eu.requests == []
    assert [one["reason"] for one in aside] == ["rate_limited"]


def test_a_key_that_is_known_to_be_empty_is_not_asked(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """Its answer said that nothing is left: the other key answers, and no call is spent on a 429."""
    us.script("tokens=4,left=0/1/60", api_key="sk-upstream")
    us.script("tokens=4,left=50/60/10", api_key="sk-other")
    answers = [ask(front) for _ in range(6)]
    aside = breaker_of(front, "us")["keys_set_aside"]

    assert {answer.status_code for answer in answers} == {200}
    assert sum(request.api_key == "sk-upstream" for request in us.requests) == 1
    assert (eu.requests, [one["reason"] for one in aside][:1]) == ([], ["rate_limited"])


def test_when_all_are_limited_the_limit_passes(front: House, eu: ScriptedUpstream) -> None:
    """No target left: 429 with what is left of retry-after, a minute at the most, as a refusal, and nobody asks the
    upstream again."""
    eu.script("429,retry_after=7200")
    first, second = ask(front, model="spare"), ask(front, model="spare")
    told, row = found_of(front, second)

    assert (first.status_code, second.status_code) == (429, 429)
    assert first.headers["retry-after"] == "60" and 55 <= int(second.headers["retry-after"]) <= 60
    assert (told["status"], told["code"], row) == ("refused", "rate_limit_exceeded", 404)
    assert told["message"] == second.json()["error"]["message"]
    assert len(eu.requests) == 1


def test_a_refused_key_is_in_cooldown_and_told(front: House, us: ScriptedUpstream) -> None:
    """The next key is used; the metric says so; nobody hears 401."""
    us.script("refused-key", api_key="sk-other")
    answers = [ask(front) for _ in range(6)]
    with front.client(front.admin_key) as admin:
        metrics = admin.get("/metrics").text

    assert {answer.status_code for answer in answers} == {200}
    assert sum(request.api_key == "sk-other" for request in us.requests) <= 1
    assert 'tollgate_keys_set_aside{provider="upstream",reason="refused_key"} 1.0' in metrics


def test_a_content_filter_of_the_upstreams_takes_no_key_away(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream
) -> None:
    """Some say it as of a key that is refused: it is the caller's 400, told at once, and costs nothing."""
    us.script("403,code=permission_denied,message=Content violates usage guidelines.", times=2)
    answers = [ask(front, stream=stream) for stream in (False, True)]
    row = front.record_of(answers[0])
    passed = ask(front)
    breaker = breaker_of(front, "us")

    told = [(answer.status_code, answer.json()["error"]["code"]) for answer in answers]
    assert told == [(400, "content_policy_violation")] * 2
    assert (row["status"], row["cost_usd"], row["attempts"][0]["outcome"]) == ("failed", 0, "filtered")
    assert (passed.status_code, len(us.requests), len(eu.requests)) == (200, 3, 0)
    assert (breaker["failures"], breaker["keys_set_aside"]) == (0, [])


def test_when_everything_is_open_calls_are_shed(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """503 overloaded with retry-after, without asking, in any dialect; it passes when an endpoint is back."""
    us.script("500")
    eu.script("500")
    statuses = [ask(front).status_code for _ in range(10)]
    asked = len(us.requests) + len(eu.requests)
    shed = ask(front)

    assert statuses[0] == 502 and statuses[-1] == 503
    assert (shed.status_code, shed.json()["error"]["code"]) == (503, "overloaded")
    assert int(shed.headers["retry-after"]) >= 1
    assert len(us.requests) + len(eu.requests) == asked


def test_no_storm_when_everything_fails(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """Upstreams that are down are asked less than before, not more."""
    us.script("503")
    eu.script("503")
    with ThreadPoolExecutor(8) as pool:
        statuses = set(pool.map(lambda _: ask(front).status_code, range(80)))

    assert statuses <= {502, 503}
    assert len(us.requests) + len(eu.requests) <= 60


def test_all_attempts_end_at_the_calls_deadline(front: House, us: ScriptedUpstream, eu: ScriptedUpstream) -> None:
    """Two silent regions are two first-token deadlines, and never more than `timeouts.total`."""
    us.script("hang-before-headers")
    eu.script("hang-before-headers")
    began = time.monotonic()
    answer = ask(front, stream=True)

    assert answer.status_code == 504
    assert 0.8 <= time.monotonic() - began < 10.0
    assert (len(us.requests), len(eu.requests)) == (1, 1)


def test_a_client_that_leaves_counts_for_nothing(front: House, us: ScriptedUpstream) -> None:
    """Cancels are not the endpoint's failures."""
    us.script("tokens=3,first_token=30")
    for _ in range(5):
        with front.client() as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json={**ASK, "stream": True}, timeout=0.1)
    until(lambda: all(request.closed_at for request in us.requests))
    us.forget()

    assert breaker_of(front, "us")["failures"] == 0
    assert ask(front).status_code == 200


def test_a_field_that_an_upstream_does_not_know_is_left_out(front: House, eu: ScriptedUpstream) -> None:
    """The first call finds out at the cost of another attempt, the next ones ask right away; no call is refused."""
    for field, shape in (("max_tokens", "openai"), ("max_completion_tokens", "pydantic")):
        eu.forget()
        eu.script(f"unknown={field},says_so={shape}")
        answers = [ask(front, model="odd", stream=True, max_tokens=50) for _ in range(3)]
        bodies = [request.body or {} for request in eu.requests]
        rows = [front.record_of(answer) for answer in answers]

        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
        assert [field in body for body in bodies] == [True, False, False, False]
        assert all(body.get("max_tokens") or body.get("max_completion_tokens") for body in bodies)
        assert [[each["outcome"] for each in row["attempts"]] for row in rows] == [["refused", "ok"], ["ok"], ["ok"]]
        assert all(0 < row["output_tokens"] <= 50 for row in rows)


def test_a_stream_that_is_not_counted_teaches_nothing(front: House, eu: ScriptedUpstream) -> None:
    """Without `stream_options` this upstream tells no usage: each call asks for it before it does without."""
    eu.script("unknown=stream_options")
    answers = [ask(front, model="odd", stream=True, max_tokens=50) for _ in range(2)]

    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
    assert ["stream_options" in (request.body or {}) for request in eu.requests] == [True, False, True, False]


def test_a_name_under_which_a_limit_is_not_kept_teaches_nothing(front: House, eu: ScriptedUpstream) -> None:
    """An upstream that refuses one name of the output limit and ignores the other is asked by the usual name again."""
    eu.script("unknown=max_tokens,reasoning_tokens=80")
    answers = [ask(front, model="echo", max_tokens=50) for _ in range(2)]

    assert [answer.json()["usage"]["completion_tokens"] > 50 for answer in answers] == [True, True]
    assert ["max_tokens" in (request.body or {}) for request in eu.requests] == [True, False, True, False]


@pytest.mark.parametrize("shape", ["pydantic", "words"])
def test_what_a_caller_writes_changes_no_other_call(front: House, eu: ScriptedUpstream, shape: str) -> None:
    """An upstream that repeats the caller in its refusal, and ignores the newer name, keeps every caller's limit."""
    asked = {"model": "echo", "max_tokens": 7}
    eu.script(f"unknown=user,says_so={shape}")
    for words in ("max_tokens stream_options", "max_tokens", "stream_options unsupported"):
        refused = ask(front, **asked, stream=True, user=words)
        assert refused.status_code == 400
    eu.forget()
    answer = ask(front, **asked, stream=True)

    (body,) = [request.body or {} for request in eu.requests]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert (body["max_tokens"], body["stream_options"]) == (7, {"include_usage": True})
    assert "max_completion_tokens" not in body


def test_a_parameter_that_a_model_lacks_is_not_asked_of_its_other_region(
    front: House, us: ScriptedUpstream, eu: ScriptedUpstream
) -> None:
    """The same model would say the same; the client hears it in the upstream's words, and nobody counts a failure."""
    for region in (us, eu):
        region.script("status=400,type=invalid_request_error,code=unsupported_parameter,message=No effort here.")
    answer = ask(front, reasoning_effort="low")

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert answer.json()["error"]["message"] == "No effort here."
    assert (len(us.requests), len(eu.requests)) == (1, 0)
    assert breaker_of(front, "us")["failures"] == 0


def test_an_admin_opens_and_resets_a_breaker_at_every_gateway(
    front: House, us: ScriptedUpstream, tmp_path: Path
) -> None:
    """Forced open holds until reset, at a second gateway too; both acts are in the audit log."""
    with serving(replace(front.settings, data_dir=tmp_path)) as second, front.client(front.admin_key) as admin:
        us_id = breaker_of(front, "us")["id"]
        opened = admin.post(f"/admin/breakers/{us_id}/open").json()
        until(lambda: breaker_of(replace_url(front, second), "us")["state"] == "open")
        us.forget()
        answers = [ask(front), ask(replace_url(front, second))]
        asked = len(us.requests)
        reset = admin.post(f"/admin/breakers/{us_id}/reset").json()
        acts = admin.get("/admin/audit-log").json()["data"][:2]
        unknown = admin.post("/admin/breakers/nothing/open")

    assert (opened["state"], opened["forced"], opened["retry_at"]) == ("open", True, None)
    assert [answer.status_code for answer in answers] == [200, 200] and asked == 0
    assert (reset["state"], reset["forced"]) == ("closed", False)
    assert [(act["action"], act["subject"]) for act in acts] == [("breaker.reset", us_id), ("breaker.opened", us_id)]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "breaker_not_found")


def test_metrics_tell_of_breakers_and_retries(front: House, us: ScriptedUpstream) -> None:
    """State, transitions and retries, by target and provider."""
    us.script("500")
    for _ in range(6):
        ask(front)
    with front.client(front.admin_key) as admin:
        lines = admin.get("/metrics").text.splitlines()

    target = f'endpoint="us {us.url}",model="small",provider="upstream"'
    assert f"tollgate_breaker_state{{{target}}} 2.0" in lines
    assert any(line.startswith(f'tollgate_breaker_transitions_total{{{target},state="open"}}') for line in lines)
    assert any(line.startswith('tollgate_retries_total{provider="upstream"}') for line in lines)


def replace_url(house: House, url: str) -> House:
    return House(url, house.team_id, house.team_key, house.admin_key, house.settings)
