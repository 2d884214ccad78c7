# A replica of our own engine dies in mid-stream, at every byte that matters, and another goes on: the client has the
# text that the first would have written, and the books have one call.

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.calls.estimate import probable_prompt_tokens
from gateway.core.settings import BreakerPolicy, ProviderSettings, Retries, Timeouts
from gpu_backend.step.messages import Command, Event, FinishReason, Generate, NewTokens, Timings
from gpu_backend.step.plan import TokenLogprob
from protocol.chat import ChatRequest, Message
from router.catalog.targets import Endpoint
from tests.support.cut_replica import WAYS, CutReplica
from tests.support.fake_engine import FakeEngine, silent
from tests.support.front import END, TEMPLATE, running_front, token_ids, write_small_files
from tests.support.house import NEVER_OPENS, House, model, running_house, settings_for
from tests.support.response_stream import built_response
from tests.support.servers import database_of_its_own
from tests.support.temporary_stores import temporary_valkey
from tests.support.told import Told, rows_of
from tests.support.waiting import until

SAID = "Zürich 🚪 STOne 中文 \U0001f469\u200d\U0001f680"  # a token a byte, and most characters are several
CALLS = 'Ok.<tool_call>{"name": "pay", "arguments": {"toll": 3}}</tool_call>'
CALLS += '<tool_call>{"name": "pay", "arguments": {}}</tool_call>'
SAYS = {  # by the temperature: what ends in a stop string, what might have become one, and what is not only text
    0.0: token_ids(SAID + "STOP"),
    1.0: [*token_ids(SAID + "STO"), END],
    0.5: [*token_ids(CALLS), END],
}
HERMES = "{% if tools %}<tool_call>{% endif %}" + TEMPLATE
SECONDS = 0.01  # of the device, for each token
ASK = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK, "stop": ["STOP"], "stream_options": {"include_usage": True}},
    "completions": {"prompt": "hi", "stop": ["STOP"], "max_tokens": 80, "echo": True},
    "messages": {"messages": ASK, "stop_sequences": ["STOP"], "max_tokens": 80},
}
PATIENT = Timeouts(connect=10.0, first_token=20.0, between_tokens=20.0, total=60.0)
CLASSIC = ["chat/completions", "completions"]


def speak(command: Command) -> list[tuple[Event, ...]]:
    """Say SAID and its end, one to three tokens at a time, from where another replica stopped."""
    if not isinstance(command, Generate):
        return silent(command)
    tokens = SAYS[command.sampling.temperature]
    begin = len(command.resume_token_ids)
    assert list(command.resume_token_ids) == tokens[:begin]
    cuts = [begin, *(at for at in range(begin + 1, len(tokens)) if at % 4 in (0, 1, 3)), len(tokens)]
    return [
        (_event(command, index, tokens, begin, at, until),)
        for at, until in pairwise(cuts)
        for index in range(command.n)
    ]


def _event(command: Generate, index: int, tokens: list[int], begin: int, at: int, until: int) -> Event:
    spent = (until - begin) * SECONDS
    return NewTokens(
        command.request_id,
        index,
        tuple(tokens[at:until]),
        logprobs=tuple(TokenLogprob(-token / 8) for token in tokens[at:until])
        if command.sampling.logprobs is not None
        else (),
        finish_reason=FinishReason.STOP if until == len(tokens) else None,
        timings=Timings(0.0, 1.0, 1.0, spent),
        gpu_seconds=spent,
    )


@dataclass(frozen=True)
class Scene:
    """A house with models behind a replica that dies, and after it: nobody, or one that drains, is full, or is well.
    Only "hasty" soon takes silence for a death."""

    house: House
    dying: CutReplica

    def ask(self, path: str, model: str = "llama", **more: Any) -> Told:
        """Ask by a dialect; streamed unless said otherwise."""
        body = {"model": model, "stream": True, **ASKS[path], **more}
        with self.house.client() as client:
            answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return Told(answer.headers["x-request-id"], answer.text.splitlines())

    def count(self, path: str, **asked: Any) -> int:
        """Return how many tokens a prompt has."""
        with self.house.client() as client:
            return int(client.post(f"/v1/{path}", json={"model": "llama", **asked}).json()["input_tokens"])

    def rows(self, *told: Told) -> list[Any]:
        """Return the ledger's rows of calls, in their order."""
        return rows_of(self.house.settings, [one.request_id for one in told])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, postgres_url: str) -> Iterator[Scene]:
    """The house and its replicas, each an engine's own front with a script for its engine."""
    folder: Path = tmp_path_factory.mktemp("continued")
    checkpoint = write_small_files(folder / "tiny", HERMES)
    with contextlib.ExitStack() as stack:
        well, tired = (
            stack.enter_context(running_front(checkpoint, FakeEngine(speak, max_model_len=512))) for _ in range(2)
        )
        httpx.post(tired + "/drain").raise_for_status()
        crowded = stack.enter_context(running_front(checkpoint, FakeEngine(speak, max_model_len=512), max_waiting=0))
        dying = stack.enter_context(CutReplica(well))
        places = {
            "llama": (dying.url, well),
            "lone": (dying.url,),
            "tired": (dying.url, tired),
            "third": (dying.url, tired, well),
            "fourth": (dying.url, crowded, well),
            "brisk": (dying.url, well),
            "hasty": (dying.url, well),
        }
        providers = {
            name: ProviderSettings(
                name=name,
                format="openai",
                self_hosted=True,
                endpoints=tuple(Endpoint(f"r{at}", url + "/v1") for at, url in enumerate(urls)),
                retries=Retries(budget=1.0),
                timeouts=replace(PATIENT, between_tokens=0.4) if name == "hasty" else PATIENT,
                breaker=BreakerPolicy(min_requests=3, open_for=60.0) if name == "brisk" else NEVER_OPENS,
            )
            for name, urls in places.items()
        }
        models = {name: model(name, name, upstream_model="tiny", gpu_hour_nanousd=3_600_000_000) for name in places}
        stores = tmp_path_factory.mktemp("stores")
        database_url = stack.enter_context(database_of_its_own(postgres_url))
        valkey = stack.enter_context(temporary_valkey())
        settings = settings_for(
            database_url, valkey.url, "", stores, providers=providers, models=models, auto={}, aliases={}
        )
        yield Scene(stack.enter_context(running_house(settings)), dying)


@pytest.fixture(autouse=True)
def _well(scene: Scene) -> Iterator[None]:
    """Begin with a replica that does not die, and breakers that have seen nothing."""
    scene.dying.cut, scene.dying.how = None, "reset"
    scene.house.reset_breakers()
    yield


def cuts_of(stream: bytes) -> list[int]:
    """Return where to cut a stream: before each event, the end mark too, and in the middle of it."""
    cuts, at = list[int](), 0
    for event in stream.split(b"\n\n")[:-1]:
        cuts += [at, at + len(event) // 2]
        at += len(event) + 2
    return cuts


@pytest.mark.parametrize(("path", "temperature"), [*((path, 0) for path in ASKS), ("chat/completions", 1)])
def test_a_reply_goes_on_from_wherever_it_broke(scene: Scene, path: str, temperature: int) -> None:
    """At every event's end and in its middle, in every way: the same text, one row, one price, one device time."""
    whole = scene.ask(path, temperature=temperature)
    ways, told, every = cycle(WAYS), [whole], cuts_of(scene.dying.heard)
    cuts = every if temperature == 0 and path == "chat/completions" else every[::7]
    for cut in cuts:
        scene.dying.cut, scene.dying.how = cut, next(ways)
        told.append(scene.ask(path, temperature=temperature))
    first, *rows = scene.rows(*told)

    assert whole.text == ("hi" if path == "completions" else "") + SAID + "STO" * temperature
    for one, row, cut in zip(told[1:], rows, cuts, strict=True):
        assert (one.text, one.reasons, one.is_whole, one.error) == (whole.text, whole.reasons, True, None)
        assert row.status == "answered"
        assert (row.input_tokens, row.output_tokens) == (first.input_tokens, len(token_ids(SAID)) + 4)
        assert (row.cost_nanousd, row.gpu_cost_nanousd) == (first.cost_nanousd, first.gpu_cost_nanousd)
        if cut < every[-2]:  # else only the end mark was missing: nobody need be asked for that
            assert [attempt["target"].split("/")[1] for attempt in row.attempts] == ["r0", "r1"]
            assert row.attempts[0]["outcome"] in ("reset", "cut", "error_frame", "malformed")
            assert row.attempts[1]["outcome"] == "ok" and row.provider_endpoint.startswith("r1 ")


def test_a_response_goes_on_from_wherever_it_broke(scene: Scene) -> None:
    """Its events are numbered on, its items end once, and the books have one call."""
    with scene.house.client() as client:

        def ask() -> httpx.Response:
            body = {"model": "llama", "input": "hi", "temperature": 1, "max_output_tokens": 80, "stream": True}
            return client.post("/v1/responses", json=body)

        whole = built_response(ask().text)
        told = []
        for cut in cuts_of(scene.dying.heard)[:-2:5]:
            scene.dying.cut = cut
            told.append(ask())
    rows = rows_of(scene.house.settings, [one.headers["x-request-id"] for one in told])

    assert whole["output"][0]["content"][0]["text"] == SAID + "STO"
    for one, row in zip(told, rows, strict=True):
        response = built_response(one.text)
        assert response["output"][0]["content"] == whole["output"][0]["content"]
        assert (response["status"], response["usage"]) == (whole["status"], whole["usage"])
        assert (row.status, len(row.attempts)) == ("answered", 2)


def test_tool_calls_go_on_too(scene: Scene) -> None:
    """Wherever it broke, the client has each call once, whole, under one id, and the text around it."""

    def calls(told: Told) -> list[tuple[str, str]]:
        pieces = [
            call
            for event in told.events
            for choice in event["choices"]
            for call in choice["delta"].get("tool_calls", ())
        ]
        heads = [call for call in pieces if "id" in call]
        assert len({call["id"] for call in heads}) == len(heads) == 2
        arguments = ["".join(call["function"]["arguments"] for call in pieces if call["index"] == at) for at in (0, 1)]
        return [(head["function"]["name"], said) for head, said in zip(heads, arguments, strict=True)]

    asked = {"temperature": 0.5, "tools": [{"type": "function", "function": {"name": "pay"}}]}
    whole = scene.ask("chat/completions", **asked)
    for cut in cuts_of(scene.dying.heard)[:-2:5]:
        scene.dying.cut = cut
        told = scene.ask("chat/completions", **asked)

        assert (told.text, told.reasons, told.is_whole) == ("Ok.", ["tool_calls"], True)
        assert calls(told) == calls(whole) == [("pay", '{"toll": 3}'), ("pay", "{}")]


@pytest.mark.parametrize("path", ["messages", *CLASSIC])
def test_a_stream_tells_the_true_prompt_from_its_first_event(scene: Scene, path: str) -> None:
    """The engine counts it before its first token: message_start, and each chunk where that was asked for, is exact."""
    options = {} if path == "messages" else {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    told = scene.ask(path, **options)
    said = told.events
    first, last = (said[0]["message"], said[-2]) if path == "messages" else (said[0], said[-1])
    (row,) = scene.rows(told)
    if path == "messages":
        counted = [scene.count("messages/count_tokens", **ASKS[path]), scene.count("responses/input_tokens", input=ASK)]
        assert counted == [row.input_tokens] * 2
        far_too_long = "hi" * 1_000_000  # the engine's calls would wait for its count
        chat = ChatRequest(model="llama", messages=(Message(role="user", content=far_too_long),))
        about = probable_prompt_tokens(chat)
        assert scene.count("responses/input_tokens", input=far_too_long) == about

    assert first["usage"].get("input_tokens") == last["usage"].get("input_tokens")
    assert first["usage"].get("prompt_tokens") == last["usage"].get("prompt_tokens")
    assert row.input_tokens in (last["usage"].get("input_tokens"), last["usage"].get("prompt_tokens"))
    if path in CLASSIC:
        made = [each["usage"]["completion_tokens"] for each in said]
        assert made == sorted(made) and 0 < made[0] <= made[-1] == row.output_tokens
        assert said[-2]["usage"]["cost_usd"] == last["usage"]["cost_usd"]


def test_log_probabilities_go_on_too(scene: Scene) -> None:
    """Each token's comes once, also of those whose text was kept back when the first replica died."""

    def scores(told: Told) -> list[float]:
        return [score["logprob"] for logprobs in told.logprobs for score in logprobs["content"]]

    whole = scene.ask("chat/completions", logprobs=True)
    cuts = cuts_of(scene.dying.heard)[:-2:3]
    for cut in cuts:
        scene.dying.cut = cut
        told = scene.ask("chat/completions", logprobs=True)

        assert (told.text, scores(told)) == (whole.text, scores(whole))
    assert len(cuts) > 20 and len(scores(whole)) == len(token_ids(SAID + "STO"))


def test_a_plain_answer_and_a_stored_one_are_continued(scene: Scene) -> None:
    """Who did not ask for a stream sees nothing at all of it; who asks again gets what was paid."""
    asked = {"model": "llama", "stop": ["STOP"], "messages": ASK}
    scene.dying.cut = 1500
    with scene.house.client() as client:
        headers = {"idempotency-key": "once"}
        plain, again = (client.post("/v1/chat/completions", json=asked, headers=headers) for _ in range(2))
    [row] = rows_of(scene.house.settings, [plain.headers["x-request-id"]])

    assert plain.json()["choices"][0]["message"]["content"] == SAID + "STO"
    assert again.content == plain.content and again.headers["idempotent-replayed"] == "true"
    assert [attempt["outcome"] for attempt in row.attempts] == ["reset", "ok"]


def test_a_replica_that_falls_silent_is_left(scene: Scene) -> None:
    """Nothing for `timeouts.between_tokens` is a death, too."""
    scene.dying.cut, scene.dying.how = 1500, "hang"
    told = scene.ask("chat/completions", "hasty")
    [row] = scene.rows(told)

    assert (told.text, told.is_whole) == (SAID + "STO", True)
    assert [attempt["outcome"] for attempt in row.attempts] == ["timeout", "ok"]


def test_a_replica_that_drains_is_passed_by(scene: Scene) -> None:
    """It says that it takes nothing, so the next one goes on with the reply."""
    ask = {"model": "third", "messages": [{"role": "user", "content": "hi"}]}
    with scene.house.client() as client:
        until(lambda: not all(one["is_available"] for one in client.post("/v1/route", json=ask).json()["targets"]))
    scene.dying.cut = 1500
    told = scene.ask("chat/completions", "third")
    [row] = scene.rows(told)

    assert (told.text, told.is_whole) == (SAID + "STO", True)
    assert [attempt["outcome"] for attempt in row.attempts] == ["reset", "ok"]
    assert row.provider_endpoint.startswith("r2 ")


def test_a_replica_that_is_full_is_passed_by(scene: Scene) -> None:
    """It says so only when it is asked to go on with the reply; the next one does."""
    scene.dying.cut = 1500
    told = scene.ask("chat/completions", "fourth")
    [row] = scene.rows(told)

    assert (told.text, told.is_whole) == (SAID + "STO", True)
    assert [attempt["outcome"] for attempt in row.attempts] == ["reset", "full", "ok"]


@pytest.mark.parametrize(("model", "n"), [("lone", 1), ("tired", 1), ("llama", 2)])
@pytest.mark.parametrize("path", CLASSIC)
def test_what_no_replica_can_continue_ends_in_an_error_chunk(scene: Scene, path: str, model: str, n: int) -> None:
    """No other replica, none that takes it, or several replies in one: what came, an error, no [DONE], one row."""
    scene.dying.cut = 1500
    told = scene.ask(path, model, n=n)
    [row] = scene.rows(told)

    assert not told.is_whole and told.error is not None and told.error["code"] == "upstream_error"
    assert told.reasons == [] and len(told.text) > 2
    assert (row.status, row.provider_endpoint.split()[0]) == ("interrupted", "r0")
    assert [attempt["outcome"] for attempt in row.attempts] == ["reset", "full"][: 1 + (model == "tired")]
    assert 0 < row.output_tokens < n * len(token_ids(SAID))
    assert row.gpu_cost_nanousd == row.output_tokens * 1_000_000 * SECONDS


def test_a_reply_whose_end_came_needs_no_continuation(scene: Scene) -> None:
    """Its finish reason is here, only its count is not: whole, and counted by its tokens."""
    whole = scene.ask("chat/completions", "lone")
    scene.dying.cut = scene.dying.heard.index(b'"finish_reason":"stop"') + 60
    scene.dying.cut = scene.dying.heard.index(b"\n\n", scene.dying.cut) + 2
    told = scene.ask("chat/completions", "lone")
    rows = scene.rows(whole, told)

    assert (told.text, told.reasons, told.is_whole) == (whole.text, whole.reasons, True)
    assert rows[1].status == "answered" and rows[1].output_tokens == rows[0].output_tokens


def test_streams_that_break_open_the_breaker(scene: Scene) -> None:
    """A replica that begins every reply and ends none is asked no more; its breaker says why."""
    scene.dying.cut = 1500
    told = [scene.ask("chat/completions", "brisk") for _ in range(4)]
    rows = scene.rows(*told)
    with scene.house.client(scene.house.admin_key) as admin:
        breakers = admin.get("/admin/breakers").json()["breakers"]
        metrics = admin.get("/metrics").text
    states = {breaker["region"]: breaker["state"] for breaker in breakers if breaker["model"] == "brisk"}

    assert {one.text for one in told} == {SAID + "STO"}
    assert [len(row.attempts) for row in rows] == [2, 2, 2, 1]
    assert states == {"r0": "open", "r1": "closed"}
    assert 'tollgate_continuations_total{model="brisk",outcome="continued"} 3.0' in metrics
