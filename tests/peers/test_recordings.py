# Answers that Google, OpenAI, Azure, Anthropic, Groq, Mistral, DeepSeek, OpenRouter and others really gave, as other
# makers' tests recorded them (`git clone https://github.com/pydantic/pydantic-ai` and
# `https://github.com/traceloop/openllmetry` into PEERS): each is read by its format to the last word and count.

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from gateway.dialects.responses import ENDPOINT
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.unsayable import Unsayable
from protocol.chat import ChatReply
from protocol.errors import ServiceError
from protocol.responses import HOSTED, ResponsesRequest
from protocol.usage import Usage
from tests.support.recordings import ASKED, ENDS, WIRES, Recorded, read_recorded, recorded_in
from tests.support.response_stream import events_in
from tests.unit.gateway.dialects.test_responses_writer import REPLY
from tests.wire.traffic import TARGET, asking, read_stream

PEERS = Path(os.environ.get("PEERS", "."))
FOLDERS = [folder for name in ("pydantic-ai", "openllmetry") if (folder := PEERS / name).exists()]
# What providers really answered and is no answer: a call that the model got wrong, a prompt that a filter blocked, an
# error inside of a stream, a page that is none of the format, a response that still runs, a stream that never says why
# it ended.
OURS = ("model", "store", "include", "max_output_tokens", "previous_response_id", "background", "conversation")
BEGUN = ("response.created", "response.queued", "response.in_progress")
NO_ANSWERS = {"malformed", "filtered", "error_frame", "cut"}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not FOLDERS, reason="SKIPPED: clone pydantic/pydantic-ai, traceloop/openllmetry into PEERS"),
]


@cache
def recorded(name: str) -> tuple[Recorded, ...]:
    """Return every recorded answer in a format."""
    files = [file for folder in FOLDERS for file in sorted(folder.rglob("cassettes/**/*.yaml"))]
    return tuple(each for file in files for each in recorded_in(file, name))


@pytest.mark.parametrize("name", ENDS)
def test_every_recorded_answer_is_read(name: str) -> None:
    """Whole or streamed, an answer is a reply; its count is told. A stream means the same in single bytes."""
    outcomes = Counter[str]()
    for one in recorded(name):
        if one.status >= 400:
            continue
        try:
            said, usage = read_recorded(name, one)
        except UpstreamFailure as exc:
            assert exc.outcome in NO_ANSWERS, one
            outcomes[exc.outcome] += 1
            continue
        outcomes["read"] += 1
        if name == "gemini":
            _check_gemini(one, said, usage)
        elif name == "responses":
            _check_response(one, said, usage)

    assert outcomes["read"] > 300, outcomes
    assert sum(outcomes.values()) - outcomes["read"] <= 10, outcomes


@pytest.mark.parametrize("name", ENDS)
def test_every_recorded_failure_is_told_honestly(name: str) -> None:
    """The caller's fault is the caller's 400; a model that is not there is the gateway's."""
    for one in recorded(name):
        if one.status >= 400:
            failure = WIRES[name].read_error(one.status, {}, one.body)

            assert failure.outcome == {404: "not_found", 429: "rate_limited"}.get(one.status, "refused"), one


def test_every_recorded_request_for_a_response_goes_as_it_came() -> None:
    """But for what is this gateway's (`store`, ids), and what is told or refused by name, as tools are that an
    operator has to allow: no field of it is lost."""
    outcomes, lost = Counter[str](), Counter[str]()
    for body in _requests_for_responses():
        try:
            asked = ENDPOINT.read(json.dumps(body).encode())
        except ServiceError:
            outcomes["refused"] += 1
            continue
        if asked.goes_on or asked.shown is None:
            continue
        target = replace(TARGET, model=replace(TARGET.model, price=replace(TARGET.model.price, web_search=1)))
        asking_of = asking(asked.request, response=asked.shown, target=target, streams=bool(body.get("stream")))
        try:
            built = WIRES["responses"].build_request(asking_of)
        except Unsayable:
            assert {tool["type"] for tool in body["tools"]} & HOSTED.keys(), body
            outcomes["not allowed"] += 1
            continue
        sent = json.loads(built.body) | {name: body.get(name) for name in (*OURS, *asked.extra)}
        outcomes["sent"] += 1
        lost.update(set(_lost(body, sent, "")) - ({"input"} if built.dropped else set()))

    assert outcomes["sent"] > 200 and outcomes["refused"] < 50, outcomes
    assert not lost


def _requests_for_responses() -> Iterator[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for file in (file for folder in FOLDERS for file in sorted(folder.rglob("cassettes/**/*.yaml"))):
        text = file.read_text()
        for one in (yaml.load(text, loader) or {}).get("interactions", ()) if "/responses" in text else ():
            asked = one.get("request") or {}
            if str(asked.get("uri", "")).endswith("/responses") and asked.get("parsed_body"):
                yield asked["parsed_body"]


def _lost(theirs: Any, ours: Any, path: str) -> Iterator[str]:
    """Yield where something was said that was not passed on."""
    match theirs, ours:
        case dict(), dict():
            for name, value in theirs.items():
                if value not in (None, [], {}, False) and not (name == "id" and path.startswith("input")):
                    yield from _lost(value, ours.get(name), f"{path}.{name}".removeprefix("."))
        case list(), list() if len(theirs) == len(ours):
            for one, other in zip(theirs, ours, strict=True):
                yield from _lost(one, other, f"{path}[]")
        case _ if theirs != ours:
            yield path


def _check_response(one: Recorded, said: ChatReply, usage: Usage | None) -> None:
    """Its items are told as they came, but for their ids, and so are their counts; a stream's events are as many."""
    writer = ResponsesWriter(ResponsesRequest(model="m", input="Hi"), "0-" + "1" * 31, 1)
    if one.is_stream:
        theirs = [json.loads(line[5:]) for line in one.body.decode().splitlines() if line.startswith("data: {")]
        told, _ = read_stream(WIRES["responses"].open_events(ASKED), [one.body])
        events = events_in((writer.pieces(REPLY, told)).decode())
        kinds = [[each["type"] for each in some if each["type"] not in BEGUN] for some in (events, theirs)]
        assert kinds[0] == kinds[1], one.file
        response, recorded_response = events[-1]["response"], theirs[-1]["response"]
    else:
        response = json.loads(writer.whole(REPLY, said, usage or Usage()))
        recorded_response = json.loads(one.body)
    items = [[item | {"id": ""} for item in some["output"]] for some in (response, recorded_response)]
    assert items[0] == items[1], one.file
    if usage is not None:
        assert usage.total_tokens == recorded_response["usage"]["total_tokens"], one.file


def _check_gemini(one: Recorded, said: ChatReply, usage: Usage | None) -> None:
    """Its words are those of its parts, its tokens add up to what Google says they do."""
    lines = one.body.decode().splitlines() if one.is_stream else []
    answers: list[Any] = [json.loads(line[5:]) for line in lines if line.startswith("data:")] or [json.loads(one.body)]
    parts = [part for each in answers for part in _parts(each)]
    words = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    message = said.choices[0].message
    told = answers[-1].get("usageMetadata") or {}

    assert (message.content or "") == words, one.file
    assert len(message.tool_calls or ()) == sum("functionCall" in part for part in parts), one.file
    assert usage is not None and usage.total_tokens == told["totalTokenCount"], one.file


def _parts(answer: Any) -> list[Any]:
    candidates = answer.get("candidates") or [{}]
    return (candidates[0].get("content") or {}).get("parts") or []
