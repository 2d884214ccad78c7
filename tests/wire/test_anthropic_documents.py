# What only Anthropic's API has, on its way through: documents, search results, citations, betas, and what is said at
# a reply's end. The same comes out of a body, of a stream however it is cut, and of a body in place of a stream.

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from billing.core.holds import Settlement
from billing.core.money import to_nano
from billing.core.prices import cost_lines, cost_of, most_cost
from gateway.calls.as_events import events_of
from gateway.core.settings import HostedTools
from gateway.dialects.messages_writer import MessagesWriter
from gateway.inference.reply import Reply
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.bedrock.wire_format import BedrockFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.errors import UpstreamUnable
from protocol.chat import ChatReply
from protocol.events import Delta, Event, ReplyEnd, UsageReport
from protocol.messages import MessagesRequest, WebSearchResultBlock
from protocol.messages_to_chat import to_chat
from protocol.usage import Usage
from router.catalog.targets import Endpoint, Target
from router.prompt_size.bounds import usage_most
from router.prompt_size.prompt_bounds import bound_prompt
from tests.support.anthropic_rules import check_body
from tests.support.message_stream import built_of
from tests.wire.anthropic_traffic import PROMPT, USAGE, end, event
from tests.wire.traffic import CHAT, TARGET, asking, read_stream

ON = {"enabled": True}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once. Twice."}}
BLOCKS = {
    "pdf": PDF | {"title": "A", "context": "B", "citations": ON, "cache_control": {"type": "ephemeral"}},
    "pdf by url": {"type": "document", "source": {"type": "url", "url": "https://a.example/b.pdf"}},
    "text": PLAIN | {"citations": ON},
    "parts": {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "One."}]}},
    "search result": {
        "type": "search_result",
        "source": "https://a.example",
        "title": "A",
        "content": [{"type": "text", "text": "One."}],
        "citations": ON,
    },
}
CITATION = {"type": "char_location", "cited_text": "Once.", "document_index": 0, "start_char_index": 0}


def asked(*blocks: dict[str, Any], **more: Any) -> MessagesRequest:
    turns = [{"role": "user", "content": [*blocks, {"type": "text", "text": "What is it?"}]}]
    return msgspec.convert({"model": "asked", "max_tokens": 99, "messages": turns, **more}, MessagesRequest)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_reaches_claude_as_it_came(block: dict[str, Any]) -> None:
    """To the last field, among the turns and as a tool's result."""
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]}
    native = asked(block)
    native = msgspec.convert(
        msgspec.to_builtins(native) | {"messages": [*msgspec.to_builtins(native.messages), use, result]},
        MessagesRequest,
    )
    built = AnthropicFormat().build_request(asking(to_chat(native), native=native))
    turns = check_body(built.body, built.headers)["messages"]

    assert turns[0]["content"][0] == block and turns[2]["content"][0]["content"] == [block]


@pytest.mark.parametrize(("name", "words"), [("pdf", "cites no"), ("text", "cites no"), ("search result", "'search_r")])
def test_other_models_refuse_it_by_its_name(name: str, words: str) -> None:
    """What is to be cited, and what was found: another target of the route may take it; what would be right is said."""
    native = asked(BLOCKS[name])
    with pytest.raises(UpstreamUnable, match=f"{words}.*Anthropic's models") as caught:
        OpenAIFormat().build_request(asking(to_chat(native), native=native))

    assert (caught.value.param, caught.value.moves_on) == ("messages", True)


def test_what_a_document_may_cost_is_held() -> None:
    """A page is a picture and its text; a text that may be cited is parted into sentences, and its words count."""

    def most(*blocks: dict[str, Any]) -> int:
        return bound_prompt(to_chat(asked(*blocks))).closely().tokens_on(TARGET.model)

    words = " ".join(f"Number {number} is here." for number in range(300))
    long = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words}}
    assert most(PDF) - most() > 600 * 3_000
    assert most(long) - most() > 300
    assert most(long | {"citations": ON}) - most(long) > 300 * 8


def test_betas_pass_by_a_list() -> None:
    """What changes a price, or reaches what is not the caller's, is left out and told; what is needed is added."""
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}]}
    betas = ["interleaved-thinking-2025-05-14", "fast-mode-2026-02-01", "files-api-2025-04-14"]
    native = asked(context_management=edits, anthropic_beta=betas)
    built = AnthropicFormat().build_request(asking(to_chat(native), native=native))
    body = check_body(built.body, built.headers)
    elsewhere = OpenAIFormat().build_request(asking(to_chat(native), native=native))

    assert built.headers["anthropic-beta"] == "context-management-2025-06-27,interleaved-thinking-2025-05-14"
    assert built.dropped == ("anthropic-beta.fast-mode-2026-02-01", "anthropic-beta.files-api-2025-04-14")
    assert body["context_management"] == edits and "anthropic_beta" not in body
    assert elsewhere.dropped == ("context_management",)


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
texts = st.builds(
    lambda text, citations: {"type": "text", "text": text} | ({"citations": citations} if citations else {}),
    words,
    st.lists(words.map(lambda cited: CITATION | {"cited_text": cited}), max_size=2),
)
thoughts = words.map(lambda thought: {"type": "thinking", "thinking": thought, "signature": "EqQB"})
hidden = words.map(lambda data: {"type": "redacted_thinking", "data": data})
calls = words.map(lambda text: {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": text}})
searches = words.map(
    lambda text: {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"a": text}}
)
PAGE = {
    "type": "web_search_result",
    "url": "https://a.example",
    "title": "A",
    "encrypted_content": "EqQB",
    "page_age": None,
}
FAILED = {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}
found = st.sampled_from([[PAGE], [PAGE, PAGE], [], FAILED]).map(
    lambda content: {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": content}
)
ENDS = st.fixed_dictionaries(
    {"stop_reason": st.sampled_from(["end_turn", "refusal", "model_context_window_exceeded", "pause_turn"])},
    optional={"stop_details": st.just({"type": "refusal", "category": "bio", "explanation": None})},
)
BESIDE = {"cache_creation": {"ephemeral_5m_input_tokens": 100}, "service_tier": "priority", "inference_geo": "eu"}
EDITS = {"applied_edits": [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 1}]}


def streamed(content: list[dict[str, Any]], ends: dict[str, Any], searches: int = 0) -> bytes:
    """Return the events of a message, its citations before their text."""
    message = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    out = [event("message_start", message=message | {"usage": {**PROMPT, **BESIDE, "output_tokens": 1}})]
    for index, block in enumerate(content):
        head, deltas = dict(block), []
        match block["type"]:
            case "text":
                head = {"type": "text", "text": ""}
                deltas = [{"type": "citations_delta", "citation": each} for each in block.get("citations", ())]
                deltas += [{"type": "text_delta", "text": sign} for sign in block["text"]]
            case "thinking":
                head |= {"thinking": "", "signature": ""}
                deltas = [{"type": f"{name}_delta", name: block[name]} for name in ("thinking", "signature")]
            case "tool_use" | "server_tool_use":
                head |= {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        out.append(event("content_block_start", index=index, content_block=head))
        out += [event("content_block_delta", index=index, delta=delta) for delta in deltas]
        out.append(event("content_block_stop", index=index))
    usage = {"output_tokens": 90, "server_tool_use": {"web_search_requests": searches}}
    delta = {"stop_sequence": None, **ends}
    out.append(event("message_delta", delta=delta, usage=usage, context_management=EDITS))
    return b"".join([*out, event("message_stop")])


REPLY = cast(
    Reply,
    SimpleNamespace(
        call=SimpleNamespace(request_id="0-1"),
        target=TARGET,
        record=SimpleNamespace(cost_nanousd=1),
        meter=SimpleNamespace(so_far=lambda: Settlement(Usage(), 0)),
    ),
)


def written(events: list[Event]) -> dict[str, Any]:
    """Return the message that a client builds; its usage comes last, as a reply tells it."""
    writer = MessagesWriter(asked(), "0-1", 1)
    last: list[Event] = [UsageReport(Usage(3, 0, 5)), ReplyEnd()]
    told = [*(one for one in events if isinstance(one, Delta)), *last]
    return built_of(b"".join(writer.pieces(REPLY, [one]) for one in told).decode())


@given(st.lists(texts | thoughts | hidden | calls | searches | found, min_size=1, max_size=6), ENDS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_message_comes_through_to_the_last_field(
    content: list[dict[str, Any]], ends: dict[str, Any], data: st.DataObject
) -> None:
    """Its blocks in their order with what they rest on, why it ended, and what is beside the counts of its usage."""
    stream = streamed(content, ends)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=9).map(sorted))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    events, outcome = read_stream(AnthropicFormat().open_events(CHAT), pieces)
    frame = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    beside = BESIDE | {"server_tool_use": {"web_search_requests": 0}}
    body = frame | ends | {"content": content, "usage": {**USAGE, **beside}, "context_management": EDITS}
    whole, usage = AnthropicFormat().read_reply(CHAT, json.dumps(body).encode())
    assert usage is not None
    plain = json.loads(MessagesWriter(asked(), "0-1", 1).whole(REPLY, whole, usage))

    assert outcome is None
    for message in (written(events), written(events_of(whole, usage)), plain):
        assert message["content"] == content
        assert {name: message[name] for name in ends} == ends and message["context_management"] == EDITS
        assert {name: message["usage"][name] for name in beside} | {"service_tier": "priority"} == beside


def test_nonsense_beside_an_answer_does_not_lose_it() -> None:
    """Fields that no price rests on may be anything; they are left out."""
    odd = {"stop_details": "x", "container": [], "context_management": 7}
    content = [{"type": "text", "text": "Yes.", "citations": "none"}]
    usage = {**USAGE, "cache_creation": 5, "service_tier": {}}
    body = {"content": content, "stop_reason": "end_turn", "usage": usage, **odd}
    whole, counted = AnthropicFormat().read_reply(CHAT, json.dumps(body).encode())
    stream = streamed(content, {"stop_reason": "end_turn", "stop_details": "x"}).replace(b'"eu"', b"{}")
    events, outcome = read_stream(AnthropicFormat().open_events(CHAT), [stream + end()])

    assert outcome is None and counted is not None
    assert json.loads(MessagesWriter(asked(), "0-1", 1).whole(REPLY, whole, counted))["stop_reason"] == "end_turn"
    assert [block["text"] for block in written(events)["content"]] == ["Yes."]


def test_an_hour_in_the_cache_needs_a_price() -> None:
    """Where what it costs to write is known it passes; another model drops the mark, as any, and tells."""
    native = asked(cache_control={"type": "ephemeral", "ttl": "1h"})
    price = replace(TARGET.model.price, cache_write_1h=TARGET.model.price.output)
    priced = Target(replace(TARGET.model, price=price), TARGET.endpoint)
    built = AnthropicFormat().build_request(asking(to_chat(native), native=native, target=priced))
    elsewhere = OpenAIFormat().build_request(asking(to_chat(native), native=native))
    with pytest.raises(UpstreamUnable) as caught:
        AnthropicFormat().build_request(asking(to_chat(native), native=native))

    assert check_body(built.body, built.headers)["cache_control"] == {"type": "ephemeral", "ttl": "1h"}
    assert (caught.value.param, caught.value.moves_on) == ("cache_control", True)
    assert elsewhere.dropped == ("cache_control",)


SEARCH = {"type": "web_search_20250305", "name": "web_search"}


def test_a_search_needs_a_price_and_a_bound() -> None:
    """Where its price is known it passes with what it found before; nowhere else, and each model says so."""
    tool = SEARCH | {"allowed_domains": ["a.example"], "user_location": {"type": "approximate", "city": "Bern"}}
    native = asked(tools=[tool])
    called = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [PAGE]}
    turns = [*msgspec.to_builtins(native.messages), {"role": "assistant", "content": [called, result]}]
    turns.append({"role": "user", "content": "And?"})
    native = msgspec.convert(msgspec.to_builtins(native) | {"messages": turns}, MessagesRequest)
    price = replace(TARGET.model.price, web_search=to_nano("0.01"))
    priced = Target(replace(TARGET.model, price=price), TARGET.endpoint)
    built = AnthropicFormat().build_request(asking(to_chat(native), native=native, target=priced))
    body = check_body(built.body, built.headers)

    assert body["tools"] == [tool | {"max_uses": 10}] and body["messages"][1]["content"] == [called, result]
    for format_, target in ((AnthropicFormat(), TARGET), (OpenAIFormat(), priced), (BedrockFormat(), priced)):
        with pytest.raises(UpstreamUnable) as caught:
            format_.build_request(asking(to_chat(native), native=native, target=target))
        assert (caught.value.param, caught.value.moves_on) == ("tools", True)


def test_what_a_search_may_cost_is_held() -> None:
    """The model reads its prompt anew after each, with all that was found."""
    model = replace(TARGET.model, context=200_000, price=replace(TARGET.model.price, web_search=to_nano("0.01")))
    plain, two = (usage_most(to_chat(asked(tools=tools)), model) for tools in (None, [SEARCH | {"max_uses": 2}]))
    unsaid = usage_most(to_chat(asked(tools=[SEARCH])), model)
    both, all_ten = (
        usage_most(to_chat(asked(tools=[SEARCH | {"max_uses": most}, FETCH])), model).input_tokens for most in (2, 10)
    )

    assert both >= 5 * (plain.input_tokens + plain.output_tokens) + 20_000 * (1 + 2 + 3 + 4)
    assert unsaid.input_tokens <= all_ten <= 11 * 200_000  # then the turn is paused
    assert two.web_searches == 2 and unsaid.web_searches == 10
    assert two.input_tokens >= 3 * plain.input_tokens + 2 * plain.output_tokens + 20_000 + 40_000
    assert two.input_tokens < unsaid.input_tokens <= 11 * 200_000
    assert cost_of(two, model.price) <= most_cost(two, model.price)
    lines = cost_lines(two, model.price)
    assert [(line.count, line.cost) for line in lines if line.kind == "web_search"] == [(2, to_nano("0.02"))]
    assert sum(line.cost for line in lines) == cost_of(two, model.price)


def test_searches_of_a_reply_are_counted() -> None:
    """Whole or streamed, as its usage says; of a stream that is left, those that were seen."""
    call = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}}
    pages = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [PAGE]}
    body = {"content": [call, pages], "stop_reason": "pause_turn"}
    body |= {"usage": {**USAGE, "server_tool_use": {"web_search_requests": 3}}}
    _, usage = AnthropicFormat().read_reply(CHAT, json.dumps(body).encode())
    stream = streamed([call, pages], {"stop_reason": "end_turn"}, 3)
    events, _ = read_stream(AnthropicFormat().open_events(CHAT), [stream])
    counts = [event.usage.web_searches for event in events if isinstance(event, UsageReport)]
    blocks = [event.server_block for event in events if isinstance(event, Delta) and event.server_block]

    assert usage is not None and usage.web_searches == 3 and counts[-1] == 3
    assert [isinstance(block, WebSearchResultBlock) and block.has_found for block in blocks] == [False, True]


def test_code_whose_result_is_still_to_come_is_counted() -> None:
    """A turn that is paused, or in which code calls the caller's own tool, tells of its container alone."""
    call = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "bash_code_execution", "input": {"command": "ls"}}
    ends = {"stop_reason": "pause_turn", "container": {"id": "container_011", "expires_at": "2026-12-28T12:00:00Z"}}
    _, usage = AnthropicFormat().read_reply(CHAT, json.dumps({"content": [call], "usage": USAGE, **ends}).encode())
    events, _ = read_stream(AnthropicFormat().open_events(CHAT), [streamed([call], ends)])
    counts = [event.usage.containers for event in events if isinstance(event, UsageReport)]

    assert usage is not None and usage.containers == 1 == counts[-1]


def test_small_wishes_reach_claude_and_are_told_elsewhere() -> None:
    """Fields of tools, a budget of a task, and what an earlier answer cited."""
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": "b"}], "defer_loading": True}
    tool |= {"eager_input_streaming": True, "allowed_callers": ["direct"]}
    budget = {"type": "tokens", "total": 50_000}
    native = asked(tools=[tool], output_config={"task_budget": budget})
    earlier = [{"type": "text", "text": "So.", "citations": [CITATION]}]
    turns = [*msgspec.to_builtins(native.messages), {"role": "assistant", "content": earlier}]
    turns.append({"role": "user", "content": "And?"})
    native = msgspec.convert(msgspec.to_builtins(native) | {"messages": turns}, MessagesRequest)
    built = AnthropicFormat().build_request(asking(to_chat(native), native=native))
    body = check_body(built.body, built.headers)
    elsewhere = OpenAIFormat().build_request(asking(to_chat(native), native=native))
    names = ["tools.eager_input_streaming", "tools.defer_loading", "tools.allowed_callers"]

    assert body["tools"] == [tool] and body["output_config"] == {"task_budget": budget}
    assert body["messages"][1]["content"] == earlier
    assert elsewhere.dropped == ("output_config.task_budget", *names, "citations")
    assert json.loads(elsewhere.body)["tools"][0]["function"]["parameters"]["examples"] == [{"a": "b"}]


FETCH = {"type": "web_fetch_20250910", "name": "web_fetch", "max_uses": 2}
CODE = {"type": "code_execution_20250825", "name": "code_execution"}
RUNS_CODE = replace(TARGET, model=replace(TARGET.model, price=replace(TARGET.model.price, code_interpreter=1)))


def test_code_runs_where_that_is_allowed_and_priced_and_pages_are_fetched_at_anthropic_alone() -> None:
    """Each refusal names what would be right, and leaves the call to another target."""
    code, page = asked(tools=[CODE]), asked(tools=[FETCH])
    vertex = replace(RUNS_CODE, endpoint=Endpoint("eu", "https://x.googleapis.com/v1/publishers/anthropic"))
    allowed = asking(to_chat(code), native=code, target=RUNS_CODE)
    allowed = replace(allowed, hosted=HostedTools(code_interpreter=True))
    fine = AnthropicFormat().build_request(allowed)
    refused = (
        (AnthropicFormat(), replace(allowed, hosted=HostedTools()), "operator may allow"),
        (AnthropicFormat(), replace(allowed, target=TARGET), "is not known"),
        (AnthropicFormat(), replace(allowed, target=vertex), "Vertex AI"),
        (AnthropicFormat(), asking(to_chat(page), native=page, target=vertex), "Vertex AI"),
        (BedrockFormat(), asking(to_chat(page), native=page), "no page"),
        (OpenAIFormat(), asking(to_chat(page), native=page), "web_fetch_20250910"),
    )

    assert check_body(fine.body, fine.headers)["tools"] == [CODE]
    for format_, told, words in refused:
        with pytest.raises(UpstreamUnable, match=words) as caught:
            format_.build_request(told)
        assert (caught.value.param, caught.value.moves_on) == ("tools", True)


def test_what_a_page_may_hold_is_held() -> None:
    """As much as the request lets it, or as a search adds."""
    model = replace(TARGET.model, context=1_000_000)
    short, unsaid, long = (
        usage_most(to_chat(asked(tools=[FETCH | more])), model).input_tokens
        for more in ({"max_content_tokens": 1_000}, {}, {"max_content_tokens": 50_000})
    )

    assert unsaid - short == pytest.approx(3 * 19_000, abs=9) and long - unsaid == pytest.approx(3 * 30_000, abs=9)


def test_code_of_a_reply_is_one_container_however_it_ends() -> None:
    """Whole or streamed, also where its upstream counts nothing; a call of it that failed had one, too."""
    call = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "text_editor_code_execution", "input": {}}
    kind = "text_editor_code_execution_tool_result"
    result = {
        "type": kind,
        "tool_use_id": "srvtoolu_1",
        "content": {"type": f"{kind}_error", "error_code": "unavailable"},
    }
    body = {"content": [call, result, call, result], "stop_reason": "pause_turn"}
    (whole, usage), (_, uncounted) = (
        AnthropicFormat().read_reply(CHAT, json.dumps(body | more).encode()) for more in ({"usage": USAGE}, {})
    )
    events, _ = read_stream(
        AnthropicFormat().open_events(CHAT), [streamed([call, result], {"stop_reason": "end_turn"}, 0)]
    )
    counts = [event.usage.containers for event in events if isinstance(event, UsageReport)]

    assert isinstance(whole, ChatReply) and whole.used == Usage(containers=1) and uncounted is None
    assert usage is not None and usage.containers == 1 and counts[-1] == 1
