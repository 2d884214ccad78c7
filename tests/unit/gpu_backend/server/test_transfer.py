# The front over HTTP: kv_transfer_params as vLLM's proxies for prefill and decode send them.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_backend.step.config import engine_config
from gpu_backend.step.messages import Command, Event, Generate, NewTokens
from gpu_backend.step.transfer import HeldBlocks, RemoteBlocks
from tests.support.fake_engine import FakeEngine, speaking
from tests.support.front import CHAT, running_front, token_ids

WHERE = RemoteBlocks("engine-1", "lease-1", "10.0.0.7", 14579, cached_tokens=16)
PREFILL = {  # the words of vLLM's proxies (examples/online_serving/disaggregated_serving)
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"model": "tiny", "prompt": "hi"}),
]


def holding(command: Command) -> list[tuple[Event, ...]]:
    """Answer one token, and hold the prompt's blocks if that is asked for."""
    answers = speaking(token_ids("H"))(command)
    if not (isinstance(command, Generate) and command.holds_blocks):
        return answers
    ((event,),) = answers
    assert isinstance(event, NewTokens)
    return [(replace(event, held=HeldBlocks(WHERE, (3, 4))),)]


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_what_a_prefill_answers_goes_into_the_decode_as_it_is(
    path: str, body: dict[str, Any], engine: FakeEngine, http: httpx.Client
) -> None:
    """The engine that goes on is told where the blocks are; one whose answer is not asked for these says nothing."""
    engine.script = holding
    first = http.post(path, json={**body, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL}).json()
    told = first["kv_transfer_params"]
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-1",
        "remote_request_id": "lease-1",
        "remote_block_ids": [3, 4],
        "remote_host": "10.0.0.7",
        "remote_port": 14579,
        "remote_cached_tokens": 16,
        "tp_size": 1,
    }

    second = http.post(path, json={**body, "kv_transfer_params": told}).json()

    prefill, decode = (command for command in engine.process.commands if isinstance(command, Generate))
    assert (prefill.holds_blocks, prefill.remote) == (True, None)
    assert (decode.holds_blocks, decode.remote) == (False, WHERE)
    assert "kv_transfer_params" not in second


def test_an_engine_of_one_role_refuses_the_others_work(folder: Path) -> None:
    """One that computes prompts makes no replies, one that makes replies holds no blocks; either says which it is."""
    answers: dict[tuple[str, str], int] = {}
    for role in ("prefill", "decode"):
        address = {"kv_transfer_address": "127.0.0.1:0", "role": role}
        with running_front(folder, FakeEngine(speaking(token_ids("H"))), **address) as url:
            for path, body in (("chat/completions", CHAT), ("completions", {"model": "tiny", "prompt": "hi"})):
                for kind, params in (("prefill", PREFILL), ("reply", None)):
                    asked = httpx.post(f"{url}/v1/{path}", json={**body, "kv_transfer_params": params})
                    answers[role, f"{kind} {path}"] = asked.status_code
                    if asked.status_code != 200:
                        assert asked.json()["error"]["param"] == "kv_transfer_params"

    assert {told for told, status in answers.items() if status == 200} == {
        (role, f"{kind} {path}")
        for role, kind in (("prefill", "prefill"), ("decode", "reply"))
        for path in ("chat/completions", "completions")
    }


def test_a_role_needs_an_address_for_blocks() -> None:
    """Without one no blocks are exchanged, and either role would do nothing."""
    with pytest.raises(ValueError, match="role is prefill; it is both, without kv_transfer_address"):
        engine_config("m", role="prefill")
    with pytest.raises(ValueError, match="role is draft; it is one of both, prefill, decode"):
        engine_config("m", role="draft", kv_transfer_address="127.0.0.1:0")


def test_an_engine_that_holds_nothing_says_so(engine: FakeEngine, http: httpx.Client) -> None:
    """Null goes into the decode as well: all of the prompt is computed there."""
    engine.script = speaking(token_ids("H"))
    told = http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "kv_transfer_params": PREFILL}).json()
    assert told["kv_transfer_params"] is None

    http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "kv_transfer_params": None})

    assert [c.remote for c in engine.process.commands if isinstance(c, Generate)] == [None, None]


@pytest.mark.parametrize(
    "foreign",
    [
        {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.9", "remote_port": 5600},
        {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": None, "remote_port": None},
        {"tp_size": 2, "remote_request_id": "r", "something": {"new": 1}},
    ],
)
def test_what_another_kind_of_engine_says_is_no_error(
    foreign: dict[str, Any], engine: FakeEngine, http: httpx.Client
) -> None:
    """Blocks that cannot be read are computed."""
    answer = http.post(
        "/v1/chat/completions", json={**CHAT, "kv_transfer_params": {"do_remote_prefill": True, **foreign}}
    )

    assert answer.status_code == 200
    assert [c.remote for c in engine.process.commands if isinstance(c, Generate)] == [None]
