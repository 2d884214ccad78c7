# Several replies of a provider that gives one at a time: one call, one hold, one row, and as many requests upstream.

from __future__ import annotations

import asyncio
import uuid
from decimal import Decimal
from typing import Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, BadRequestError, OpenAI

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("strict_upstream")

ASKED: Any = {"model": "claude", "messages": [{"role": "user", "content": "Say something."}], "n": 3, "max_tokens": 50}


def test_replies_come_as_choices_and_are_paid_as_they_are_billed(
    openai: OpenAI, house: House, upstream: ScriptedUpstream
) -> None:
    """Each request has the whole prompt; usage, cost, hold and row are the sum of all, in one call."""
    raw = openai.chat.completions.with_raw_response.create(**ASKED)
    reply, row = raw.parse(), house.record_of(raw.http_response)
    alone = openai.chat.completions.create(**ASKED | {"n": 1}).usage
    usage = reply.usage
    assert usage is not None and alone is not None

    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert all(choice.message.content and choice.finish_reason == "stop" for choice in reply.choices)
    assert len(upstream.requests) == 4 and all("n" not in (one.body or {}) for one in upstream.requests)
    assert usage.prompt_tokens == 3 * alone.prompt_tokens and usage.completion_tokens == 3 * alone.completion_tokens
    cost = Decimal(usage.prompt_tokens + 2 * usage.completion_tokens) / 1_000_000
    assert Decimal(usage.cost_usd) == Decimal(str(row["cost_usd"])) == cost  # type: ignore[attr-defined]
    assert row["units"] == {"extra_requests": 2} and row["held_tokens"] > 3 * 50 + usage.prompt_tokens
    assert row["held_nanousd"] >= cost * 10**9 and len(row["attempts"]) == 1


@pytest.mark.parametrize("key", [False, True])
def test_streams_come_between_each_other_by_their_index(
    openai: OpenAI, house: House, upstream: ScriptedUpstream, key: bool
) -> None:
    """Each is whole, and the usage of all comes at the end; answered again, it is the same."""
    upstream.script("tokens=8,pace=0.01")
    headers = {"idempotency-key": str(uuid.uuid4())} if key else {}
    told = []
    for _ in range(1 + key):
        stream = openai.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, extra_headers=headers, **ASKED
        )
        with stream:
            told.append(list(stream))
    chunks = told[0]
    spoken = [chunk.choices[0] for chunk in chunks if chunk.choices]
    texts = ["".join(one.delta.content or "" for one in spoken if one.index == index) for index in range(3)]
    order = [one.index for one in spoken if one.delta.content]
    row = house.record_of(stream.response)

    assert len(upstream.requests) == 3 and told[-1] == chunks
    assert len(set(texts)) == 1 and texts[0] and order != sorted(order)
    assert sorted(one.index for one in spoken if one.finish_reason == "stop") == [0, 1, 2]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == row["output_tokens"] == 24


@pytest.mark.parametrize("stream", [False, True])
def test_one_that_fails_before_all_have_begun_fails_the_call(
    openai: OpenAI, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """Nothing was sent, so the team owes nothing, and what ran beside it is let go."""
    upstream.script("first_token=30")
    upstream.script("500", times=1)
    with pytest.raises(APIStatusError) as caught:
        openai.chat.completions.create(stream=stream, **ASKED)
    row = house.record_of(caught.value.response)

    assert caught.value.status_code == 502 and (row["status"], float(row["cost_usd"])) == ("failed", 0)
    until(lambda: all(one.closed_at or one.answered_at for one in upstream.requests))
    assert all(one.closed_after is None or one.closed_after < 10 for one in upstream.requests)


def test_one_that_breaks_later_breaks_the_stream(openai: OpenAI, house: House, upstream: ScriptedUpstream) -> None:
    """An honest error ends it; what came of all of them is owed."""
    upstream.script("tokens=200,pace=0.02")
    upstream.script("reset,after=3,pace=0.02", times=1)
    seen: set[int] = set()
    with openai.chat.completions.create(stream=True, **ASKED) as stream:
        with pytest.raises(APIError):
            for chunk in stream:
                seen |= {choice.index for choice in chunk.choices if choice.delta.content}
        row = house.record_of(stream.response)

    assert seen == {0, 1, 2} and row["status"] == "interrupted" and row["units"] == {"extra_requests": 2}
    assert row["output_tokens"] >= 3 * 2 and float(row["cost_usd"]) > 0
    until(lambda: sum(one.closed_at is not None for one in upstream.requests) == 2)


@pytest.mark.parametrize("script", ["tokens=200,pace=0.02", "first_token=1.2"])
def test_who_leaves_lets_go_of_all(house: House, upstream: ScriptedUpstream, script: str) -> None:
    """In mid-stream, and before anything came: then the prompts are owed that the upstream has."""
    upstream.script(script)

    async def leave() -> str:
        async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key=house.team_key, max_retries=0) as client:
            begun = asyncio.ensure_future(client.chat.completions.create(stream=True, **ASKED))
            await asyncio.wait([begun], timeout=0.4)
            if not begun.done():
                begun.cancel()
                return ""
            stream = begun.result()
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await stream.close()
            return str(stream.response.headers["x-request-id"])

    request_id = asyncio.run(leave())
    until(lambda: len(upstream.requests) == 3 and all(one.closed_at is not None for one in upstream.requests))
    if request_id:
        with house.client(house.admin_key) as admin:
            path = f"/admin/usage-records/{request_id}"
            until(lambda: admin.get(path).status_code == 200)
            row = admin.get(path).json()
        assert (row["status"], row["units"]) == ("interrupted", {"extra_requests": 2})
        assert row["input_tokens"] % 3 == 0


def test_more_than_are_asked_for_at_once_are_refused_by_name(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """And the refusal says how many there may be."""
    with pytest.raises(BadRequestError, match="16 at once") as caught:
        openai.chat.completions.create(**ASKED | {"n": 17})

    assert caught.value.param == "n" and upstream.requests == []
