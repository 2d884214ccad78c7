# What only Anthropic's API has, sent with its package through a gateway: documents and what answers cite of them,
# context management and betas, why a model refused. Models of other makers refuse it by name.

from __future__ import annotations

import base64
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.anthropic_answers import CITED, CONTAINER, FETCHED, FOUND_TOKENS, RAN, SEARCHED, STOP_DETAILS
from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

if TYPE_CHECKING:  # seconds, which only the process that runs these tests should spend
    from anthropic import Anthropic

PAGES = 3
PDF = base64.b64encode(b"%PDF-1.7\n" + b"<< /Type /Page >>\n" * PAGES + b"%%EOF").decode()
DOCUMENT: Any = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
    "title": "Tolls",
    "citations": {"enabled": True},
}
ASK: Any = [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "What does it say?"}]}]
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(house: House, upstream: ScriptedUpstream) -> Iterator[Anthropic]:
    """The team's client; it does not retry, so that a test sees every answer."""
    from anthropic import Anthropic

    upstream.forget()
    with Anthropic(base_url=house.url, api_key=house.team_key, max_retries=0) as client:
        yield client
    assert upstream.violations == []
    upstream.forget()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cites_a_pdf(client: Anthropic, house: House, upstream: ScriptedUpstream, stream: bool) -> None:
    """The document reaches the model as it came, pages are held up to the context, and what it says is cited."""
    asked: Any = {"model": "claude", "max_tokens": 100, "messages": ASK}
    if stream:
        with client.messages.stream(**asked) as events:
            message, answer = events.get_final_message(), events.response
    else:
        raw = client.messages.with_raw_response.create(**asked)
        message, answer = raw.parse(), raw.http_response
    plain, cited = message.content

    assert (upstream.requests[-1].body or {})["messages"] == ASK
    assert plain.type == cited.type == "text" and not plain.citations
    assert cited.text == CITED and cited.citations is not None
    assert [one.to_dict()["document_title"] for one in cited.citations] == ["Tolls"]
    assert house.record_of(answer)["held_tokens"] == house.settings.models["claude"].context + 100


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (DOCUMENT, "cites no documents"),
        (
            {"type": "search_result", "source": "a", "title": "b", "content": [{"type": "text", "text": "c"}]},
            "'search_result'",
        ),
    ],
)
def test_other_models_refuse_it_by_its_name(client: Anthropic, block: Any, words: str) -> None:
    """The refusal says what would be right."""
    from anthropic import BadRequestError

    with pytest.raises(BadRequestError, match=f"{words}.*ask one of Anthropic's models"):
        client.messages.create(model="small", max_tokens=9, messages=[{"role": "user", "content": [block]}])


@pytest.mark.parametrize("url", ["http://169.254.169.254/a.pdf", "https://localhost/a.pdf", "file:///etc/passwd"])
def test_a_pdf_of_the_house_is_shown_to_no_upstream(client: Anthropic, upstream: ScriptedUpstream, url: str) -> None:
    """A PDF may lie where images may."""
    from anthropic import BadRequestError

    block: Any = {"type": "document", "source": {"type": "url", "url": url}}
    with pytest.raises(BadRequestError, match="public https URL"):
        client.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": [block]}])

    assert upstream.requests == []


def test_a_file_of_the_account_is_no_callers(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """The upstream's files belong to the gateway's account, and so to every team."""
    from anthropic import BadRequestError

    block: Any = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
    with pytest.raises(BadRequestError, match="base64, text, content, url"):
        client.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": [block]}])

    assert upstream.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_is_edited_under_its_beta(client: Anthropic, upstream: ScriptedUpstream, stream: bool) -> None:
    """What was edited is told; a beta that is not on the list is left out, and the answer says so."""
    edits: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    betas = ["interleaved-thinking-2025-05-14", "fast-mode-2026-02-01"]
    asked: Any = {"model": "claude", "max_tokens": 9, "messages": HI, "context_management": edits, "betas": betas}
    if stream:
        with client.beta.messages.stream(**asked) as events:
            message, headers = events.get_final_message(), events.response.headers
    else:
        raw = client.beta.messages.with_raw_response.create(**asked)
        message, headers = raw.parse(), raw.headers

    assert message.context_management is not None
    assert [one.type for one in message.context_management.applied_edits] == ["clear_tool_uses_20250919"]
    assert headers["x-tollgate-dropped"] == "anthropic-beta.fast-mode-2026-02-01"
    named = "context-management-2025-06-27,interleaved-thinking-2025-05-14"
    assert upstream.requests[-1].headers["anthropic-beta"] == named


def test_compaction_is_refused_with_what_would_do(client: Anthropic) -> None:
    """It is billed beside what a reply's usage counts."""
    from anthropic import BadRequestError

    edits: Any = {"edits": [{"type": "compact_20260112"}]}
    with pytest.raises(BadRequestError, match="clear_tool_uses_20250919 or clear_thinking_20251015"):
        client.beta.messages.create(model="claude", max_tokens=9, messages=HI, context_management=edits)


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_model_refused_and_what_it_used_is_told(
    client: Anthropic, upstream: ScriptedUpstream, stream: bool
) -> None:
    """To the last field."""
    upstream.script("tokens=2,finish=content_filter,cache_write_tokens=2")
    asked: Any = {"model": "claude", "max_tokens": 9, "messages": HI}
    if stream:
        with client.messages.stream(**asked) as events:
            told = [event.to_dict() for event in events if event.type == "message_delta"][-1]
            stop, usage = told["delta"], told["usage"]
    else:
        stop = usage = client.messages.create(**asked).to_dict()
        usage = usage["usage"]

    assert (stop["stop_reason"], stop["stop_details"]) == ("refusal", STOP_DETAILS)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 2, "ephemeral_1h_input_tokens": 0}
    assert usage["service_tier"] == "standard" and usage["cache_creation_input_tokens"] == 2


@pytest.mark.parametrize("kind", ["web_search_20260209", "web_fetch_20260209", "code_execution_20250522"])
def test_a_tool_that_the_upstream_runs_has_no_price(client: Anthropic, upstream: ScriptedUpstream, kind: str) -> None:
    """So it is refused by name, and the refusal says why."""
    from anthropic import BadRequestError

    tool: Any = {"type": kind, "name": kind.rpartition("_")[0]}
    with pytest.raises(BadRequestError, match=f"'{kind}' is run by the upstream.*no price"):
        client.messages.create(model="claude", max_tokens=9, messages=HI, tools=[tool])

    assert upstream.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_of_the_web_is_shown_counted_and_paid(
    client: Anthropic, house: House, upstream: ScriptedUpstream, stream: bool
) -> None:
    """By Anthropic's own client: what was asked and found comes before the words, and goes back in the next turn."""
    tool: Any = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    turns: Any = HI
    for _ in range(2):
        asked: Any = {"model": "claude", "max_tokens": 9, "tools": [tool], "messages": turns}
        if stream:
            with client.messages.stream(**asked) as events:
                message, answer = events.get_final_message(), events.response
        else:
            raw = client.messages.with_raw_response.create(**asked)
            message, answer = raw.parse(), raw.http_response
        content = [block.to_dict() for block in message.content]
        turns = [*turns, {"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]
    sent, row, usage = upstream.requests[-1].body or {}, house.record_of(answer), message.usage

    assert sent["tools"] == [tool] and sent["messages"][1]["content"][:2] == content[:2] == SEARCHED
    assert content[2]["type"] == "text" and len(content) == 3
    assert usage.server_tool_use is not None and usage.server_tool_use.web_search_requests == 1
    cost = Decimal(usage.input_tokens + 2 * usage.output_tokens) / 1_000_000 + Decimal("0.01")
    assert Decimal(str(row["cost_usd"])) == cost and usage.input_tokens > FOUND_TOKENS
    assert row["held_nanousd"] >= 2 * 10_000_000 + 3 * 1_000 * usage.input_tokens / 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "said", "dollars"), [("web_fetch_20250910", FETCHED, "0"), ("code_execution_20250825", RAN, "0.03")]
)
def test_pages_and_code_are_shown_counted_and_paid(
    client: Anthropic, house: House, upstream: ScriptedUpstream, stream: bool, kind: str, said: Any, dollars: str
) -> None:
    """By Anthropic's own client, and back in the next turn as they came, with ids of files that code wrote. A page
    costs its tokens; code what a container costs, once in a request, however much of it runs."""
    tool: Any = {"type": kind, "name": kind.rpartition("_")[0]}
    asked: Any = {"model": "claude", "max_tokens": 9, "tools": [tool], "messages": HI}
    if stream:
        with client.messages.stream(**asked) as events:
            message, answer = events.get_final_message(), events.response
    else:
        raw = client.messages.with_raw_response.create(**asked)
        message, answer = raw.parse(), raw.http_response
    content = [block.to_dict() for block in message.content]
    turns = [*HI, {"role": "assistant", "content": content}, {"role": "user", "content": "And now?"}]
    client.messages.create(**asked | {"messages": turns})
    sent, row, usage = upstream.requests[-1].body or {}, house.record_of(answer), message.usage

    assert sent["tools"] == [tool | ({"max_uses": 10} if "fetch" in kind else {})] and upstream.violations == []
    assert content[:2] == said == sent["messages"][1]["content"][:2] and content[2]["type"] == "text"
    cost = Decimal(usage.input_tokens + 2 * usage.output_tokens) / 1_000_000 + Decimal(dollars)
    assert Decimal(str(row["cost_usd"])) == cost and row["held_nanousd"] >= int(10 * Decimal(dollars) * 10**9)
    assert row["units"] == ({"containers": 1} if Decimal(dollars) else None)
    assert stream or Decimal(dollars) == 0 or answer.json()["container"] == CONTAINER


def test_memory_is_the_callers_to_keep(client: Anthropic, upstream: ScriptedUpstream) -> None:
    """A tool that the model was trained on and the caller runs."""
    tool: Any = {"type": "memory_20250818", "name": "memory"}
    client.beta.messages.create(model="claude", max_tokens=9, messages=HI, tools=[tool])

    assert (upstream.requests[-1].body or {})["tools"] == [tool]


@pytest.mark.parametrize(("ttl", "dollars"), [("1h", 2), ("5m", 1)])
def test_an_hour_in_the_cache_costs_what_an_hour_costs(
    client: Anthropic, house: House, upstream: ScriptedUpstream, ttl: Any, dollars: int
) -> None:
    """Held, charged and booked by its own rate, under a price that the row names."""
    upstream.script("tokens=2,cache_write_tokens=7")
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": ttl}}]
    raw = client.messages.with_raw_response.create(model="claude", max_tokens=9, messages=HI, system=system)
    usage, row = raw.parse().usage, house.record_of(raw.http_response)

    assert (upstream.requests[-1].body or {})["system"] == system
    cost = Decimal(usage.input_tokens + 7 * dollars + 2 * usage.output_tokens) / 1_000_000
    assert Decimal(str(usage.to_dict()["cost_usd"])) == Decimal(str(row["cost_usd"])) == cost
    assert row["held_nanousd"] >= (row["held_tokens"] - 9) * dollars * 1_000


def test_an_hour_and_five_minutes_are_not_told_apart(client: Anthropic) -> None:
    """So one request says one of them."""
    from anthropic import BadRequestError

    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    with pytest.raises(BadRequestError, match="Say one 'ttl'"):
        client.messages.create(
            model="claude", max_tokens=9, messages=HI, system=system, cache_control={"type": "ephemeral"}
        )
