# Beside any body, a gateway and an engine answer others: asked by a process of its own, which also tells how much
# longer work takes here because of others, so that a busy machine is not taken for what a body does.

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from _pytest.mark import ParameterSet

from tests.support.engine_server import running_engine_server
from tests.support.fault_house import running_fault_house
from tests.support.pulse import Pulse, pulse_of
from tests.support.tiny_model import TinyModel, write_tiny_model

MIB = 1 << 20
WITHIN = 1.0  # seconds
BUSY = 5.0  # times as long as alone: a machine on which a body may take longer than its answer is waited for
IN_PAIRS = ("an unclosed string", "nested arrays", "many messages", "words", "a picture")  # two at once
MORE = """\
  wide: {provider: upstream, upstream_model: 'gpt-4o:tokens=1', context: 100000000, max_output: 64,
         price: {input: 1, output: 1}, abilities: [chat, tools, json, vision, completions, embeddings]}
  claude: {provider: anthropic, upstream_model: 'gpt-4o:tokens=1', context: 100000000, max_output: 64,
           price: {input: 1, output: 1}, abilities: [chat, tools, json, vision]}
safety: {input: block, output: block}
"""
USER = {"role": "user", "content": "a"}


def chat(model: str, messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": model, "max_tokens": 1, "messages": messages, **more}).encode()


def keyed(model: str) -> bytes:
    """Return a body with many keys, one of them written in a way of its own: each key is looked at then."""
    return chat(model, [USER], x={f"k{n}": 1 for n in range(390_000)}).replace(b'"k0"', rb'"\u006b0"')


def calling(arguments: str, count: int = 1) -> list[Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": arguments}} for n in range(count)
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "a"} for n in range(count)]
    return [USER, {"role": "assistant", "tool_calls": calls}, *results, USER]


def tool(parameters: Any, name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(inner: Any, depth: int) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def bodies(model: str, claude: str) -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Return what is sent where, by a name; ``claude`` is a model whose requests are translated."""
    path, picture = "/v1/chat/completions", "data:image/png;base64,iVBORw0KGgo" + "A" * (30 * MIB)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 16_000}
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}
    return {
        "an unclosed string": (path, lambda: b'"' + b'\\"' * 200_000 + b"," * 400_001),
        "escapes and commas": (path, lambda: b'["' + b'\\"' * 15_000_000 + b'"' + b"," * 400_001),
        "nested arrays": (path, lambda: b'{"a":[' + b",".join([b"[" * 100 + b"]" * 100] * 150_000) + b"]}"),
        "brackets": (path, lambda: b"[" * (32 * MIB)),
        "keys": (path, lambda: keyed(model)),
        "objects": (path, lambda: chat(model, [USER], x=[{"k": 1}] * 195_000)),
        "too many messages": (path, lambda: chat(model, [USER] * 100_000)),
        "many messages": (path, lambda: chat(model, [USER] * 16_000)),
        "many messages, translated": (path, lambda: chat(claude, [USER] * 16_000)),
        "messages in turns": (path, lambda: chat(claude, [USER, {"role": "assistant", "content": "b"}] * 8_000)),
        "many parts": (path, lambda: chat(claude, [parts] * 4)),
        "many calls": (path, lambda: chat(claude, calling("{}", 8_000))),
        "arguments of arrays": (path, lambda: chat(claude, calling('{"a":[' + "[]," * 8_000_000 + "1]}"))),
        "long arguments": (path, lambda: chat(claude, calling('{"a":"' + "a" * (28 * MIB) + '"}'))),
        "many tools": (path, lambda: chat(model, [USER], tools=[tool({}, f"f{n}") for n in range(4_000)])),
        "a deep tool": (path, lambda: chat(model, [USER], tools=[tool({"x": nested([1] * 380_000, 120)})])),
        "a wide tool": (path, lambda: chat(claude, [USER], tools=[tool({f"k{n}": {"a": 1} for n in range(90_000)})])),
        "a long text": (path, lambda: chat(model, [{"role": "user", "content": "a" * (31 * MIB)}])),
        "a text without blanks": (path, lambda: chat(model, [{"role": "user", "content": "aB1+" * 40_000}])),
        "words": (path, lambda: chat(model, [{"role": "user", "content": "a " * (15 * MIB)}])),
        "a picture": (path, lambda: chat(model, [seen])),
        "a picture, translated": (path, lambda: chat(claude, [seen])),
        "token ids": ("/v1/completions", lambda: json.dumps({"model": model, "prompt": [1] * 390_000}).encode()),
        "texts to embed": ("/v1/embeddings", lambda: json.dumps({"model": model, "input": ["a b"] * 2_048}).encode()),
    }  # fmt: skip


def _gateways_own() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """What only a gateway takes."""
    turns = [USER, {"role": "assistant", "content": "b"}] * 8_000
    text = {"type": "text", "text": "a"}
    uses = [{"type": "tool_use", "id": f"i{n}", "name": "f", "input": {}} for n in range(8_000)]
    results = [{"type": "tool_result", "tool_use_id": f"i{n}", "content": [text]} for n in range(8_000)]
    used = [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    line = {"body": {"model": "wide", "messages": [USER]}}
    return {
        "turns of Anthropic's": ("/v1/messages", lambda: chat("claude", [*turns, USER])),
        "turns of Anthropic's, translated": ("/v1/messages", lambda: chat("wide", [*turns, USER])),
        "blocks of Anthropic's": ("/v1/messages", lambda: chat("wide", [{"role": "user", "content": [text] * 16_000}])),
        "results of Anthropic's": ("/v1/messages", lambda: chat("wide", used)),
        "turns to count": ("/v1/messages/count_tokens", lambda: chat("claude", [*turns, USER])),
        "a route to explain": ("/v1/route", lambda: chat("claude", turns)),
        "texts to moderate": ("/v1/moderations", lambda: json.dumps({"input": ["aB1+" * 100] * 900}).encode()),
        "a batch of many": ("/v1/batch", lambda: json.dumps({"requests": [line] * 50_001}).encode()),
        "a batch of arrays": ("/v1/batch", lambda: b'{"requests":[' + b",".join([b"[[[[]]]]"] * 900_000) + b"]}"),
    }


GATEWAYS = bodies("wide", "claude") | _gateways_own()
ENGINES = bodies("tiny", "tiny")
# Both read bodies by the same decoder: in a commit an engine gets those that its own checks, templates and tokens take
# long with, a gateway one of each kind that another part of it takes long with; all in a soak.
AT_ONCE = (
    *("an unclosed string", "nested arrays", "many messages", "messages in turns", "many calls", "many tools"),
    *("a deep tool", "words", "a text without blanks", "token ids"),
)
AT_ONCE_AT_GATEWAY = (
    *("an unclosed string", "nested arrays", "keys", "many messages, translated", "many calls", "many tools"),
    *("arguments of arrays", "a deep tool", "words", "a text without blanks", "a picture", "token ids"),
    *("texts to embed", "results of Anthropic's", "turns to count", "a route to explain", "texts to moderate"),
    *("a batch of many", "a batch of arrays"),
)


def sampled(names: Iterable[str], at_once: tuple[str, ...]) -> list[ParameterSet]:
    """Return the names for a test, those that are not tried at once marked ``soak``."""
    assert {*at_once} <= {*names}
    return [pytest.param(name, marks=[pytest.mark.soak] * (name not in at_once)) for name in names]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A gateway's address and a team's key."""
    with running_fault_house(tmp_path_factory.mktemp("house"), MORE, gateways=1, workers=0) as house:
        (key,) = house.make_team("hostile", {}, [{}]).values()
        yield house.gateways[0].url, key
        assert house.upstream is not None
        house.upstream.violations.clear()  # of such bodies it refuses some, rightly


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine's address."""
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"), TinyModel(), with_tokenizer=True)
    with running_engine_server(model) as server:
        yield server.url


@pytest.fixture(scope="module")
def pulse_at_gateway(gateway: tuple[str, str]) -> Iterator[Pulse]:
    with pulse_of(f"{gateway[0]}/health/live") as pulse:
        yield pulse


@pytest.fixture(scope="module")
def pulse_at_engine(engine: str) -> Iterator[Pulse]:
    with pulse_of(f"{engine}/health") as pulse:
        yield pulse


@pytest.mark.parametrize("name", sampled(GATEWAYS, AT_ONCE_AT_GATEWAY))
def test_beside_any_body_a_gateway_answers_others(name: str, gateway: tuple[str, str], pulse_at_gateway: Pulse) -> None:
    """Within a second, be the body answered or refused; and no body makes it fail."""
    path, body = GATEWAYS[name]
    headers = {"authorization": f"Bearer {gateway[1]}", "anthropic-version": "2023-06-01"}
    if name == "a picture":
        headers["idempotency-key"] = "a"
    statuses, waited, slowness = beside(pulse_at_gateway, gateway[0] + path, headers, body(), copies(name))

    late = {504} if slowness > BUSY else set[int]()  # the house gives an answer ten seconds
    assert statuses <= {200, 202, 400, 413} | late
    assert waited < WITHIN * slowness


@pytest.mark.parametrize("name", sampled(ENGINES, AT_ONCE))
def test_beside_any_body_an_engine_answers_others(name: str, engine: str, pulse_at_engine: Pulse) -> None:
    """The same bodies, at the engine's front."""
    path, body = ENGINES[name]
    statuses, waited, slowness = beside(pulse_at_engine, engine + path, {}, body(), copies(name))

    assert statuses <= {200, 400, 413, 503}  # for the second that is more than it takes at once
    assert waited < WITHIN * slowness


def copies(name: str) -> int:
    """Return how many of a body are sent at once."""
    return 2 if name in IN_PAIRS else 1


def beside(pulse: Pulse, url: str, headers: dict[str, str], body: bytes, times: int) -> tuple[set[int], float, float]:
    """Send copies of a body at once; return the statuses, the longest wait beside it, and how slow the machine was."""
    assert len(body) <= 32 * MIB
    pulse.begin()
    with ThreadPoolExecutor(times) as pool, httpx.Client(timeout=120) as client:
        sent = [pool.submit(client.post, url, headers=headers, content=body) for _ in range(times)]
        statuses = {one.result().status_code for one in sent}
    waited, slowness = pulse.worst()
    return statuses, waited, slowness
