# The engine as any OpenAI upstream: the stock client, a real engine, a tiny random model.

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq
from openai import APIError, BadRequestError, NotFoundError, OpenAI
from tokenizers import pre_tokenizers

from gateway.run.processes import free_port
from protocol.serving.http_server import LONGEST_HEAD
from tests.support.engine_server import EngineServer, running_engine_server, start_engine_server
from tests.support.kv_index import KvIndex
from tests.support.raw_client import tell
from tests.support.tiny_lora import TinyAdapter, write_adapter
from tests.support.tiny_model import TinyModel, write_tiny_model
from tests.support.waiting import until

TOLD = {
    "enable_kv_cache_events": True,
    "endpoint": f"tcp://127.0.0.1:{free_port()}",
    "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    "topic": "kv@tiny",
}
QUESTION: list[Any] = [{"role": "user", "content": "What is a toll gate?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(), with_tokenizer=True)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[EngineServer]:
    adapter = write_adapter(model / "adapter", TinyAdapter(), TinyModel())
    flags = ("--lora-modules", f"adapter={adapter}", "--max-loras", "2", "--allow-runtime-lora-updating")
    with running_engine_server(model, "--kv-events-config", json.dumps(TOLD), *flags) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: EngineServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(client: OpenAI, **more: Any) -> Any:
    extra = {"return_token_ids": True, **more.pop("extra_body", {})}
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40, **more}
    return client.chat.completions.create(**asked, extra_body=extra)


def test_a_stream_says_what_a_plain_answer_says(client: OpenAI) -> None:
    """At temperature 0 text, tokens, reason and usage are the same, streamed or not."""
    whole = ask(client)
    *chunks, last = list(ask(client, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks]

    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert [token for choice in choices for token in getattr(choice, "token_ids", None) or []] == whole.choices[
        0
    ].token_ids
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens == len(whole.choices[0].token_ids)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_routers_are_told_what_the_cache_has(client: OpenAI, server: EngineServer) -> None:
    """Over ZeroMQ, as vLLM tells it: numbered batches within a second, and all of them again for who asks. An index
    of them has the prompt; what is no question for batches is passed over."""
    with zmq.Context() as context, context.socket(zmq.SUB) as events, context.socket(zmq.DEALER) as replays:
        events.connect(TOLD["endpoint"])
        events.subscribe("kv@tiny")
        replays.connect(TOLD["replay_endpoint"])
        prompt = asked_until_heard(client, server, events)
        topic, number, payload = events.recv_multipart()
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(TOLD["replay_endpoint"])
            stranger.send(b"hello")
            replays.send_multipart((b"", bytes(8)))
            told = list(batches(replays))
    index = KvIndex()
    for _, batch in told:
        for event in msgspec.msgpack.decode(batch)[1]:
            index.apply(event)

    assert (topic, len(number)) == (b"kv@tiny", 8)
    assert abs(time.time() - msgspec.msgpack.decode(payload)[0]) < 60 and msgspec.msgpack.decode(payload)[2] == 0
    assert [number for number, _ in told] == list(range(len(told)))
    assert msgspec.msgpack.decode(told[0][1])[1] == [{"type": "AllBlocksCleared"}]
    assert (int.from_bytes(number, "big"), payload) in told
    assert tuple(prompt[: len(prompt) // 16 * 16]) in index.prompts()


def asked_until_heard(client: OpenAI, server: EngineServer, events: zmq.Socket[bytes]) -> list[int]:
    """Ask until a subscriber, which misses what came before it was known, hears of it; return the prompt's tokens."""
    for attempt in range(50):
        messages = [{"role": "user", "content": f"What is a toll gate, and who keeps number {attempt}?"}]
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
        if events.poll(1000):
            return httpx.post(server.url + "/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
    raise AssertionError("no event came")


def batches(replays: zmq.Socket[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield what is told again, to the end."""
    while replays.poll(10_000):
        _, number, payload = replays.recv_multipart()
        if number == b"\xff" * 8:
            return
        yield int.from_bytes(number, "big"), payload
    raise AssertionError("the end of what is told again is missing")


def test_usage_tells_where_the_time_went(client: OpenAI) -> None:
    """Device seconds and the three phases come with every answer; a repeated prompt is found in the cache."""
    long = [{"role": "user", "content": "Count the gates of the long road, one by one. " * 4}]
    ask(client, messages=long)
    usage = ask(client, messages=long).usage

    assert usage.gpu_seconds > 0 and usage.prefill_ms > 0 and usage.decode_ms > 0
    assert usage.queue_ms >= 0
    assert usage.prompt_tokens_details.cached_tokens == usage.cached_tokens > 100


def test_a_crowd_gets_the_answers_that_each_would_get_alone(client: OpenAI) -> None:
    """Sixteen at once: no client sees another's tokens."""
    questions = [[{"role": "user", "content": f"Question number {i}"}] for i in range(16)]
    alone = [ask(client, messages=question, max_tokens=12).choices[0].token_ids for question in questions]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda q: ask(client, messages=q, max_tokens=12).choices[0].token_ids, questions))

    assert together == alone


def test_a_seed_makes_all_replies_again(client: OpenAI) -> None:
    """The replies of one request differ from each other and come back with their seed, negative ones too."""
    for seed in (11, -3, 2**63 - 1):
        one, two = (ask(client, temperature=1, n=3, seed=seed, max_tokens=10) for _ in range(2))

        assert [c.token_ids for c in one.choices] == [c.token_ids for c in two.choices]
        assert len({tuple(c.token_ids) for c in one.choices}) == 3
        assert [c.index for c in one.choices] == [0, 1, 2]
        assert one.usage.completion_tokens == sum(len(c.token_ids) for c in one.choices)


def test_without_a_seed_replies_differ(client: OpenAI) -> None:
    """A seed is drawn for each request."""
    assert ask(client, temperature=1).choices[0].token_ids != ask(client, temperature=1).choices[0].token_ids


def test_a_reply_ends_before_its_stop_string(client: OpenAI) -> None:
    """The text is cut, the usage counts the tokens up to the stop string, the reason is stop."""
    text = "".join(c for c in ask(client, max_tokens=200).choices[0].message.content)
    stop = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii() and text.count(text[i]) == 1)
    cut = ask(client, max_tokens=200, stop=[stop])

    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens == len(cut.choices[0].token_ids) < 200


def test_an_echoed_prompt_has_its_scores(client: OpenAI) -> None:
    """As benchmarks of models ask for them: the prompt's tokens before the reply's, the first without a score."""
    prompts = ["gäte", "toll house"]
    asked: Any = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 2, "temperature": 0, "n": 2}
    with_reply = client.completions.create(**asked, max_tokens=3).choices
    alone = client.completions.create(**asked, max_tokens=0)
    nothing = client.completions.create(model="tiny", prompt=prompts, max_tokens=0)
    streamed: list[list[Any]] = [[], [], [], []]
    for chunk in client.completions.create(**asked, max_tokens=3, stream=True, extra_body={"return_token_ids": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            assert choice.logprobs is None or choice.logprobs.tokens or choice.finish_reason, choice

    for index, choice in enumerate(with_reply):
        prompt = prompts[index // 2]
        scores, size = choice.logprobs, len(prompt.encode())
        assert choice.text.startswith(prompt)
        assert [len(scores.tokens), len(scores.token_logprobs), len(scores.text_offset)] == [size + 3] * 3
        assert (scores.token_logprobs[0], scores.top_logprobs[0], scores.text_offset[0]) == (None, None, 0)
        assert all(score <= 0 for score in scores.token_logprobs[1:])
        assert scores.text_offset[size] == len(prompt)
        assert streamed[index][1:] == pytest.approx(scores.token_logprobs[1:], abs=1e-4)  # another batch, other sums
        bare = alone.choices[index]
        assert (bare.text, bare.finish_reason) == (prompt, "length")
        assert bare.logprobs.token_logprobs == pytest.approx(scores.token_logprobs[:size], abs=1e-5)
    assert alone.usage.completion_tokens == 0
    assert [(choice.text, choice.finish_reason) for choice in nothing.choices] == [("", "length")] * 2
    assert with_reply[0].logprobs.tokens[1:3] == ["bytes:\\xc3", "bytes:\\xa4"]


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 99, "minimum": 1}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema_is_followed_streamed_or_not(client: OpenAI, temperature: float) -> None:
    """A model of random weights writes what the schema says; every reply of several, the same text when streamed."""
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    asked: dict[str, Any] = {"response_format": shape, "max_tokens": 300, "temperature": temperature, "seed": 4, "n": 2}
    answer = ask(client, **asked)
    texts = ["", ""]
    for chunk in ask(client, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""

    for choice in answer.choices:
        person = json.loads(choice.message.content)
        assert (sorted(person), choice.finish_reason) == (["age", "name"], "stop")
        assert 1 <= person["age"] <= 99
    assert texts == [choice.message.content for choice in answer.choices]


def test_json_mode_choices_and_expressions(client: OpenAI) -> None:
    """JSON mode gives an object; vLLM's fields, old and new, give one of the choices or a match."""
    some = ask(client, response_format={"type": "json_object"}, max_tokens=20, stop=["}"]).choices[0].message.content
    chosen = ask(client, extra_body={"guided_choice": ["north", "south"]}).choices[0]
    matched = ask(client, extra_body={"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}}).choices[0]

    assert some.lstrip().startswith("{")
    assert (chosen.message.content in ("north", "south"), chosen.finish_reason) == (True, "stop")
    assert re.fullmatch(r"\d{4}-\d\d", matched.message.content)


def test_a_schema_that_cannot_be_followed_is_a_400(client: OpenAI) -> None:
    """Streamed or not, it fails before anything is said, names its field and says why; the engine goes on."""
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            ask(client, response_format=shape, stream=stream)

        assert (caught.value.param, caught.value.code) == ("response_format", "invalid_value")
        assert "nonsense" in caught.value.message
    assert ask(client).choices[0].message.content


def test_a_structured_reply_is_resumed(client: OpenAI) -> None:
    """Cut after any token, the rest follows the rest of the schema."""
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    whole = ask(client, response_format=shape, max_tokens=300).choices[0]
    tokens, text = whole.token_ids, whole.message.content
    for cut in (3, len(tokens) - 1, len(tokens)):
        extra = {"resume_token_ids": tokens[:cut], "resume_text_chars": 2}
        rest = ask(client, response_format=shape, max_tokens=300, extra_body=extra).choices[0]

        assert (rest.message.content, rest.finish_reason) == (text[2:], "stop")


def test_a_stop_token_ends_a_reply_and_ignore_eos_does_not(client: OpenAI) -> None:
    """Our extensions reach the engine."""
    tokens = ask(client).choices[0].token_ids
    stopped = ask(client, extra_body={"stop_token_ids": [tokens[5]]})

    assert stopped.choices[0].token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert stopped.choices[0].finish_reason == "stop"
    assert len(ask(client, extra_body={"ignore_eos": True}).choices[0].token_ids) == 40


def test_a_broken_reply_goes_on_from_its_tokens(client: OpenAI) -> None:
    """What was streamed before the break and what the resumed call says join to the unbroken reply."""
    whole = ask(client, temperature=0.8, seed=5)
    text, tokens = whole.choices[0].message.content, whole.choices[0].token_ids
    rest = ask(
        client, temperature=0.8, seed=5, extra_body={"resume_token_ids": tokens[:17], "resume_text_chars": 9}
    )  # fmt: skip

    assert text[:9] + rest.choices[0].message.content == text
    assert rest.choices[0].token_ids == tokens[17:]
    assert rest.usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_come_in_both_shapes(client: OpenAI) -> None:
    """At temperature 0 the chosen token is the likeliest alternative; both dialects tell the same numbers."""
    chat = ask(client, logprobs=True, top_logprobs=3, max_tokens=8)
    content = chat.choices[0].logprobs.content
    prompt = "<|user|>What is a toll gate?<|end|><|assistant|>"
    plain = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8, logprobs=3)
    legacy = plain.choices[0].logprobs

    assert len(content) == 8
    assert all(score.top_logprobs[0].bytes == score.bytes and len(score.top_logprobs) == 3 for score in content)
    assert all(score.logprob <= 0 and score.logprob == score.top_logprobs[0].logprob for score in content)
    assert legacy is not None and legacy.token_logprobs is not None
    assert legacy.token_logprobs == pytest.approx([score.logprob for score in content])
    assert legacy.text_offset is not None and legacy.text_offset[0] == 0


def test_several_prompts_are_one_completion_request(client: OpenAI) -> None:
    """Texts or token ids, each answered as if it had come alone."""
    texts = ["one road", "two roads"]

    def complete(prompt: Any) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=6)
        assert answer.usage is not None and answer.usage.completion_tokens == 6 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    alone = [complete(text)[0] for text in texts]

    assert complete(texts) == complete([token_ids(text) for text in texts]) == alone


def token_ids(text: str) -> list[int]:
    """Return the tiny tokenizer's ids of an ASCII text: places in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index("Ġ" if character == " " else character) for character in text]


def test_embeddings_have_length_one_and_keep_their_order(client: OpenAI) -> None:
    """The package asks for base64 and gets what floats say."""
    texts = ["a gate", "a road", "a gate"]
    packed = client.embeddings.create(model="tiny", input=texts)
    floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")

    for one, other in zip(packed.data, floats.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
    assert packed.data[0].embedding == pytest.approx(packed.data[2].embedding, abs=1e-5)
    assert packed.data[0].embedding != pytest.approx(packed.data[1].embedding, abs=1e-2)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == sum(map(len, texts))


def test_a_client_that_leaves_frees_its_blocks(client: OpenAI, server: EngineServer) -> None:
    """Streamed or not, in mid-reply or in the queue: soon nothing runs and every block is free."""
    stream = ask(client, stream=True, max_tokens=450, n=8, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    with pytest.raises(httpx.TimeoutException):
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 450, "n": 8, "ignore_eos": True}
        httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.2)

    def is_free() -> bool:
        load = server.load()
        return load["running"] == load["queue_depth"] == 0 and load["free_blocks"] == load["total_blocks"]

    until(is_free)


def test_adapters_are_models_that_come_and_go(client: OpenAI, server: EngineServer, model: Path) -> None:
    """One from the start, and one that is loaded and unloaded again; the same weights say the same."""

    def reply(name: str) -> list[int]:
        said = client.completions.create(
            model=name, prompt=[1, 2, 3], max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
        )
        return said.choices[0].token_ids  # type: ignore[attr-defined]

    def move(verb: str) -> str:
        body = {"lora_name": "twin", "lora_path": str(model / "adapter")}
        return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, timeout=30).raise_for_status().text

    assert move("load") == "Success: LoRA adapter 'twin' added successfully."
    assert reply("twin") == reply("adapter") != reply("tiny")
    listed = {one.id: one.model_dump()["parent"] for one in client.models.list()}
    assert listed == {"tiny": None, "adapter": "tiny", "twin": "tiny"}
    assert move("unload") == "Success: LoRA adapter 'twin' removed successfully."
    with pytest.raises(NotFoundError):
        reply("twin")


def test_errors_are_the_packages_own(client: OpenAI) -> None:
    """Status, code and param arrive in the package's exceptions."""
    with pytest.raises(BadRequestError) as too_long:
        ask(client, messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(BadRequestError) as bad:
        ask(client, temperature=3)
    with pytest.raises(NotFoundError) as unknown:
        ask(client, model="gpt-4o")

    assert too_long.value.code == "context_length_exceeded"
    assert "512" in too_long.value.message and "603" in too_long.value.message
    assert (bad.value.param, unknown.value.code) == ("temperature", "model_not_found")
    assert [m.id for m in client.models.list()] == ["tiny", "adapter"]


@pytest.mark.parametrize("line", [b"x" * 60_000, b"a:\r\n" * 15_000], ids=["bytes", "fields"])
def test_a_head_without_an_end_is_refused(server: EngineServer, line: bytes) -> None:
    """As at a gateway, before a secret is looked at: others would wait for its bytes to be put together."""
    answer = tell(server.url, b"GET /health HTTP/1.1\r\nhost: x\r\nb: ", *[line] * (LONGEST_HEAD // 60_000 + 3))

    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_the_front_stays_small(server: EngineServer, client: OpenAI) -> None:
    """Idle memory counts: the front holds a tokenizer and a web server, no torch."""
    ask(client)

    assert psutil.Process(server.process.pid).memory_info().rss < 120 * 2**20


def test_a_killed_engine_is_replaced_and_goes_on_with_its_replies(client: OpenAI, server: EngineServer) -> None:
    """Streamed or not, sampled, several of one request, running or waiting: to the letter what they would have been."""
    long: dict[str, Any] = {"max_tokens": 450, "temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True}}
    whole, four, short = ask(client, **long), ask(client, n=4, **long), ask(client)
    steps = server.load()["uptime_seconds"]
    stream = iter(ask(client, stream=True, stream_options={"include_usage": True}, **long))
    chunks = [next(stream)]
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(ask, client, n=4, **long)]
        until(lambda: server.load()["running"] >= 2)
        server.engine().send_signal(signal.SIGKILL)
        chunks += stream
        answers = [other.result() for other in others]

    *pieces, last = chunks
    said = [piece.choices[0] for piece in pieces]
    assert "".join(piece.delta.content or "" for piece in said) == whole.choices[0].message.content
    assert [t for piece in said for t in getattr(piece, "token_ids", None) or []] == whole.choices[0].token_ids
    assert said[-1].finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 450)
    for answer in answers:
        assert [choice.token_ids for choice in answer.choices] == [choice.token_ids for choice in four.choices]
        assert answer.usage.completion_tokens == 4 * 450
    assert ask(client).choices[0].token_ids == short.choices[0].token_ids
    assert httpx.get(server.url + "/health").json()["restarts"] == 1
    assert server.load()["uptime_seconds"] > steps


def test_who_goes_on_elsewhere_hears_of_a_death_at_once(client: OpenAI, server: EngineServer) -> None:
    """A gateway with another replica asks that one to go on, instead of waiting here."""
    headers = {"x-fails-over": "1"}
    stream = iter(ask(client, stream=True, max_tokens=450, extra_body={"ignore_eos": True}, extra_headers=headers))
    next(stream)
    server.engine().send_signal(signal.SIGKILL)
    with pytest.raises(APIError, match="died"):
        list(stream)
    server.wait_until_ready()


def test_sigterm_lets_running_replies_end(client: OpenAI, server: EngineServer) -> None:
    """A server told to stop finishes what runs, takes its engine with it, and exits with status 0."""
    engine = server.engine()
    stream = iter(ask(client, stream=True, max_tokens=100, extra_body={"ignore_eos": True}))
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in stream]

    assert reasons[-1] == "length"
    assert server.process.wait(15) == 0
    assert not engine.is_running()


def test_nothing_is_left_of_a_server_that_was_killed(model: Path) -> None:
    """The engine's process ends with its front, however that went."""
    server = start_engine_server(model)
    until(psutil.Process(server.process.pid).children)
    engine = server.engine()
    server.process.kill()
    server.process.wait()

    assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_a_server_ends_with_its_parent_if_asked(model: Path) -> None:
    """TOLLGATE_DIE_WITH_PARENT=1: killing the starter with SIGKILL leaves nothing behind."""
    program = (
        "import sys; from pathlib import Path; from tests.support.engine_server import start_engine_server as start; "
        "s = start(Path(sys.argv[1]), TOLLGATE_DIE_WITH_PARENT='1'); print(s.process.pid, flush=True); s.process.wait()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(model)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},  # noqa: PTH109
    )
    assert starter.stdout is not None
    front = psutil.Process(int(starter.stdout.readline()))
    until(front.children)
    processes = [front, *front.children()]
    starter.kill()
    starter.wait()
    starter.stdout.close()

    until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "MODEL", "--host", "0.0.0.0"], "TOLLGATE_ENGINE_SECRET"),
        pytest.param(["--model", "/nowhere"], "config.json", marks=pytest.mark.soak),
        pytest.param(["--model", "MODEL", "--block-size", "0"], "block_size", marks=pytest.mark.soak),
    ],
)
def test_a_server_that_cannot_start_says_why(model: Path, flags: list[str], words: str) -> None:
    """In one line, with a status that is not 0."""
    flags = [str(model) if flag == "MODEL" else flag for flag in flags]
    environment = {key: value for key, value in os.environ.items() if key != "TOLLGATE_ENGINE_SECRET"}
    ran = subprocess.run(
        [sys.executable, "-m", "gpu_backend", *flags], capture_output=True, text=True, env=environment, timeout=30
    )

    assert ran.returncode != 0
    assert words in ran.stderr and "Traceback" not in ran.stderr
