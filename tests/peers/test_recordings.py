# Answers that Google, OpenAI, Azure, Anthropic, Groq, Mistral, DeepSeek, OpenRouter and others really gave, as other
# makers' tests recorded them (`git clone https://github.com/pydantic/pydantic-ai` and
# `https://github.com/traceloop/openllmetry` into PEERS): each is read by its format to the last word and count.

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from gateway.calls.accumulate import Collector
from gateway.upstreams.registry import FORMATS
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.chat import ChatReply, ChatRequest
from protocol.events import Delta, UsageReport
from protocol.usage import Usage
from tests.wire.traffic import read_stream

PEERS = Path(os.environ.get("PEERS", "."))
FOLDERS = [folder for name in ("pydantic-ai", "openllmetry") if (folder := PEERS / name).exists()]
ASKED = ChatRequest(model="m", messages=())
ENDS = {"openai": "/chat/completions", "anthropic": "/v1/messages", "gemini": "enerateContent"}
# What providers really answered and is no answer: a call that the model got wrong, a prompt that a filter blocked, an
# error inside of a stream, a page that is none of the format, a stream that never says why it ended.
GZIP = b"\x1f\x8b"
NO_ANSWERS = {"malformed", "filtered", "error_frame", "cut"}

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not FOLDERS, reason="SKIPPED: clone pydantic/pydantic-ai, traceloop/openllmetry into PEERS"),
]


class Recorded(Struct, frozen=True):
    """One answer, and where it stands."""

    file: str
    host: str
    status: int
    body: bytes

    @property
    def is_stream(self) -> bool:
        """Whether it came as events."""
        return self.body.lstrip()[:5] in (b"data:", b"event", b": OPE", b": kee")


@cache
def recorded(name: str) -> tuple[Recorded, ...]:
    """Return every recorded answer in a format."""
    files = [file for folder in FOLDERS for file in sorted(folder.rglob("cassettes/**/*.yaml"))]
    return tuple(each for file in files for each in _in(file, name))


def _in(file: Path, name: str) -> Iterator[Recorded]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for one in (yaml.load(file.read_text(), loader) or {}).get("interactions", ()):
        asked, answer = one.get("request") or {}, one.get("response") or {}
        url = str(asked.get("uri", ""))
        if not url.partition("?")[0].endswith(ENDS[name]) or "status" not in answer:
            continue
        body = answer.get("body") or {}
        said = body.get("string") or ""
        data = json.dumps(answer["parsed_body"]) if "parsed_body" in answer else said
        packed = data if isinstance(data, bytes) else data.encode()
        plain = gzip.decompress(packed) if packed.startswith(GZIP) else packed
        yield Recorded(file.name, url.split("/")[2], answer["status"]["code"], plain)


@pytest.mark.parametrize("name", ENDS)
def test_every_recorded_answer_is_read(name: str) -> None:
    """Whole or streamed, an answer is a reply; its count is told. A stream means the same in single bytes."""
    outcomes = Counter[str]()
    for one in recorded(name):
        if one.status >= 400:
            continue
        try:
            said, usage = _read(name, one)
        except UpstreamFailure as exc:
            assert exc.outcome in NO_ANSWERS, one
            outcomes[exc.outcome] += 1
            continue
        outcomes["read"] += 1
        if name == "gemini":
            _check_gemini(one, said, usage)

    assert outcomes["read"] > 300, outcomes
    assert sum(outcomes.values()) - outcomes["read"] <= 10, outcomes


@pytest.mark.parametrize("name", ENDS)
def test_every_recorded_failure_is_told_honestly(name: str) -> None:
    """The caller's fault is the caller's 400; a model that is not there is the gateway's."""
    for one in recorded(name):
        if one.status >= 400:
            failure = FORMATS[name].read_error(one.status, {}, one.body)

            assert failure.outcome == {404: "not_found", 429: "rate_limited"}.get(one.status, "refused"), one


def _read(name: str, one: Recorded) -> tuple[ChatReply, Usage | None]:
    wire = FORMATS[name]
    if not one.is_stream:
        reply, usage = wire.read_reply(ASKED, one.body)
        assert isinstance(reply, ChatReply)
        return reply, usage
    events, outcome = read_stream(wire.open_events(ASKED), [one.body])
    pieces = [one.body[place : place + 1] for place in range(len(one.body))]
    assert read_stream(wire.open_events(ASKED), pieces) == (events, outcome), one.file
    if outcome is not None:
        raise UpstreamFailure("…", outcome=outcome)
    collector = Collector(ASKED)
    for event in events:
        if isinstance(event, Delta):
            collector.add(event)
    reply = collector.reply()
    assert isinstance(reply, ChatReply)
    return reply, next((event.usage for event in reversed(events) if isinstance(event, UsageReport)), None)


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
