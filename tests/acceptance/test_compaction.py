# Conversations made shorter, by the stock openai package: summed up by a model, sealed for their team, gone on from.

from __future__ import annotations

import asyncio
import base64
import json
from decimal import Decimal
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, OpenAI
from openai.types.responses import CompactedResponse

from gateway.dialects.responses import COMPACT
from protocol.responses_to_chat import SEAL
from tests.support.house import House, make_team
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.talking import talking
from tests.support.upstream_scripts import Script

pytestmark = pytest.mark.usefixtures("strict_upstream")

CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city":"Bern"}'}
TOLD = {"type": "function_call_output", "call_id": "call_1", "output": "Rain."}
ITEMS: Any = [{"role": "user", "content": "I am Ann."}, CALL, TOLD, {"role": "assistant", "content": "It rains, Ann."}]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
SUMMARY = "Ann asked of Bern, where it rains."


def shown(upstream: ScriptedUpstream) -> str:
    """Return the messages that the upstream was sent last."""
    return json.dumps((upstream.requests[-1].body or {})["messages"], ensure_ascii=False)


def told(made: CompactedResponse) -> list[Any]:
    """Return what came back, to be sent again; the package knows no user's message as output, and warns."""
    return [item.to_dict(warnings=False) for item in made.output]


def compacted(openai: OpenAI, upstream: ScriptedUpstream, **more: Any) -> CompactedResponse:
    upstream.script(Script(text=SUMMARY), times=1)
    return openai.responses.compact(**{"model": "small", "input": ITEMS, **more})


@pytest.mark.parametrize("model", ["small", "claude"])
def test_a_conversation_is_summed_up_and_gone_on_from(
    house: House, openai: OpenAI, upstream: ScriptedUpstream, model: str
) -> None:
    """What the user said comes back, the rest as a sealed item, which the next model reads; booked as any call."""
    upstream.script(Script(text=SUMMARY), times=1)
    raw = openai.responses.with_raw_response.compact(model=model, input=ITEMS, extra_body={"tools": [WEATHER]})
    made, row, asked = raw.parse(), house.record_of(raw.http_response), shown(upstream)
    upstream.script(Script(text="Take an umbrella."), times=1)
    answer = openai.responses.create(model=model, input=[*told(made), {"role": "user", "content": "And now?"}])

    assert made.object == "response.compaction" and [item.type for item in made.output] == ["message", "compaction"]
    assert made.output[0].content[0].text == "I am Ann."  # type: ignore[union-attr]
    assert COMPACT in asked and "Rain." in asked and SUMMARY not in raw.text
    assert SUMMARY in shown(upstream) and "Rain." not in shown(upstream) and answer.output_text == "Take an umbrella."
    assert (row["endpoint"], row["status"]) == ("responses.compact", "answered")
    assert Decimal(made.usage.cost_usd) == Decimal(str(row["cost_usd"])) > 0  # type: ignore[attr-defined]
    assert row["held_nanousd"] >= int(Decimal(str(row["cost_usd"])) * 10**9)


def test_stored_turns_are_summed_up_and_summaries_are_stored(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """``previous_response_id`` alone is enough; a stored turn keeps its summary sealed, and is gone on from."""
    upstream.script(Script(text="Hello, Ann."), times=1)
    first = openai.responses.create(model="small", input="I am Ann.")
    made = compacted(openai, upstream, input=None, previous_response_id=first.id)
    asked = shown(upstream)
    second = openai.responses.create(model="small", input=[*told(made), {"role": "user", "content": "Bye."}])
    openai.responses.create(model="small", input="Wait.", previous_response_id=second.id)
    again = shown(upstream)
    listed = openai.responses.input_items.list(second.id).data

    assert "Hello, Ann." in asked and made.output[0].content[0].text == "I am Ann."  # type: ignore[union-attr]
    assert SUMMARY in again and "Wait." in again
    assert [item.type for item in listed] == ["message", "compaction", "message"]
    conversation = openai.conversations.create(items=told(made)[1:])  # type: ignore[list-item]
    openai.responses.create(model="small", input="Hm.", conversation=conversation.id)
    assert SUMMARY in shown(upstream)


def test_a_summary_is_read_over_a_websocket(house: House, openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """And kept for the connection as it came."""
    made = compacted(openai, upstream)
    with talking(house.url, house.team_key) as talk:
        talk.send(input=told(made), store=False)
        before = talk.hear_all()[-1]["response"]["id"]
        talk.send(input="Hm.", store=False, previous_response_id=before)
        assert talk.hear_all()[-1]["type"] == "response.completed"

    assert SUMMARY in shown(upstream)


def test_only_its_team_reads_a_summary_and_only_as_it_was_made(
    house: House, openai: OpenAI, upstream: ScriptedUpstream
) -> None:
    """Another team's, an altered and a made up one are refused by name before an upstream hears of them."""
    item = told(compacted(openai, upstream))[1]
    sealed = base64.b64decode(str(item["encrypted_content"]).removeprefix(SEAL))
    altered = SEAL + base64.b64encode(sealed[:-1] + bytes([sealed[-1] ^ 1])).decode()
    other = asyncio.run(make_team(house.settings, "reads-no-summary"))
    seen = len(upstream.requests)
    with OpenAI(base_url=house.url + "/v1", api_key=other, max_retries=0) as stranger:
        for client, content in (
            (stranger, item["encrypted_content"]),
            (openai, altered),
            (openai, "gAAA"),
            (openai, "ü"),
        ):
            with pytest.raises(BadRequestError) as refused:
                client.responses.create(model="small", input=[{"type": "compaction", "encrypted_content": content}])  # type: ignore[typeddict-item]
            assert refused.value.param == "input[0].encrypted_content" and "for your team" in refused.value.message
    with pytest.raises(BadRequestError, match="Missing"):
        openai.responses.create(model="small", input=[{"type": "compaction"}])  # type: ignore[list-item]

    assert len(upstream.requests) == seen


def test_what_cannot_be_summed_up_is_refused(openai: OpenAI, upstream: ScriptedUpstream) -> None:
    """Nothing to sum up is a 400, an answer without a summary a 502; one that was cut short says so."""
    with pytest.raises(BadRequestError, match="nothing to compact"):
        openai.responses.compact(model="small")
    upstream.script(Script(text=" "), times=1)
    with pytest.raises(InternalServerError, match="without a summary"):
        openai.responses.compact(model="small", input="Hm.")
    upstream.script(Script(text=SUMMARY, finish="length"), times=1)
    cut: Any = openai.responses.compact(model="small", input="Hm.")

    assert cut.incomplete_details == {"reason": "max_output_tokens"}
