# The table "What an upstream may do wrong" of docs/operations/faults.md, played row by row: what it says is asserted,
# for clients of either dialect in front of upstreams of either format, plain and streamed.

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream
from tests.support.upstream_acts import BIG
from tests.support.upstream_scripts import Fault

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "faults.md"
CELLS = re.compile(r"\| (.+) \| `(.+)` \| (.+) \| (.+) \| `(\w+)`, `(\w+)` \| `(.+)` \|")
SAYS = re.compile(r"(?:(?P<status>\d{3}) |part, )`(?P<code>\w+)`|whole")
AT_ANTHROPICS = {
    "upstream_error": "api_error",
    "upstream_timeout": "timeout_error",
    "rate_limit_exceeded": "rate_limit_error",
}
STATUSES = {"429", "429-seconds", "500", "503", "529", "refused-key", "wrong-usage", "no-usage"}
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
ENDS = {"openai": "data: [DONE]\n\n", "anthropic": 'event: message_stop\ndata: {"type":"message_stop"}\n\n'}


class Row(Struct, frozen=True):
    """One fault. ``says`` and ``books`` are of a plain call and of a stream."""

    script: str
    says: tuple[re.Match[str], re.Match[str]]
    books: tuple[str, str]
    shown_by: str


def rows() -> dict[str, Row]:
    """Return the rows of the table by their script."""
    found = {}
    for line in PAGE.read_text().partition("## What an upstream may do wrong")[2].partition("\n## ")[0].splitlines():
        if (cells := CELLS.fullmatch(line)) is not None:
            _, script, plain, stream, *books, shown_by = cells.groups()
            says = SAYS.fullmatch(plain), SAYS.fullmatch(stream)
            assert says[0] and says[1], line
            found[script] = Row(script, (says[0], says[1]), (books[0], books[1]), shown_by)
    return found


ROWS = rows()


def test_every_fault_has_a_row_and_every_row_a_test() -> None:
    """A fault that the scripted upstream can play stands in the table, and its row names the test that plays it."""
    assert set(ROWS) == {str(fault) for fault in Fault} | STATUSES
    assert {row.shown_by for row in ROWS.values()} == {f"test_fault[{script}]" for script in ROWS}


@pytest.fixture(autouse=True)
def _leave_nothing_behind(house: House, upstream: ScriptedUpstream) -> Iterator[None]:
    upstream.forget()
    yield
    assert upstream.violations == []
    upstream.forget()
    house.reset_breakers()


CLIENTS, MODELS = tuple(PATHS), ("small", "claude", "gemini")
ALL_PAIRS = list(product(CLIENTS, MODELS, (False, True)))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_fault(house: House, upstream: ScriptedUpstream, row: Row) -> None:
    """What the row says is what each client sees, whoever answers, and what the books say.

    Each row has an upstream of each format, as each reads a fault by itself; its client, and whether it is streamed,
    go by turns: each pair has every fourth row.
    """
    turn = [*ROWS].index(row.script)
    pairs = [(CLIENTS[(turn // 2 + n) % 2], model, (turn + n) % 2 == 1) for n, model in enumerate(MODELS)]
    play(house, upstream, row, pairs)


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_fault_in_every_pair(house: House, upstream: ScriptedUpstream, row: Row) -> None:
    """The same, plain and streamed."""
    play(house, upstream, row, ALL_PAIRS)


def play(house: House, upstream: ScriptedUpstream, row: Row, pairs: list[tuple[str, str, bool]]) -> None:
    """Have clients of these pairs meet a fault; see what they and the books were told."""
    upstream.script(row.script)
    is_silent = row.script == "late-end" or any(says["code"] == "upstream_timeout" for says in row.says)

    def call(pair: tuple[str, str, bool]) -> httpx.Response:
        answer = ask(house, *pair)
        if row.script.startswith("429"):
            house.reset_breakers()  # each pair meets the limit itself
        return answer

    with ThreadPoolExecutor(12 if is_silent else 1) as pool:
        answers = list(pool.map(call, pairs))
    for answer, (client, _, streams) in zip(answers, pairs, strict=True):
        check_answer(answer, client, row, streams=streams)
        check_books(house.record_of(answer), row, streams=streams)


def ask(house: House, client: str, model: str, streams: bool) -> httpx.Response:
    turns = [{"role": "user", "content": "Say something."}]
    body = {"model": model, "max_tokens": 1000, "messages": turns, "stream": streams}
    with house.client() as http:
        return http.post(PATHS[client], json=body)


def check_answer(answer: httpx.Response, client: str, row: Row, *, streams: bool) -> None:
    says = row.says[streams]
    code = says["code"] and (says["code"] if client == "openai" else AT_ANTHROPICS[says["code"]])
    is_whole = streams and answer.text.endswith(ENDS[client])

    assert "sk-upstream" not in answer.text
    assert answer.status_code == int(says["status"] or 200)
    if says["status"]:
        assert code_of(answer.json(), client) == code
        assert row.script != "429" or answer.headers["retry-after"] == "1"
        assert row.script != "429-seconds" or answer.headers["retry-after"] == "2"
    elif not streams:
        assert "error" not in answer.json()
    elif code:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert not is_whole and code_of(events[-1], client) == code
        assert not any("error" in event or finish_of(event) for event in events[:-1])
        assert len(events) > 2
    else:
        assert is_whole and '"error"' not in answer.text
    assert row.script != "big-chunk" or len(answer.content) > BIG


def check_books(booked: dict[str, Any], row: Row, *, streams: bool) -> None:
    assert booked["status"] == row.books[streams]
    assert (booked["cost_usd"] > 0) == (booked["status"] != "failed")
    if booked["status"] == "interrupted":
        assert booked["output_tokens"] == 2 or row.script == "no-finish"
    elif booked["status"] == "answered":
        assert booked["input_tokens"] > 0 and 0 < booked["output_tokens"] < 1000


def code_of(body: dict[str, Any], client: str) -> str:
    return body["error"]["code"] if client == "openai" else body["error"]["type"]


def finish_of(event: dict[str, Any]) -> bool:
    return event.get("type") == "message_delta" or any(
        choice.get("finish_reason") for choice in event.get("choices", ())
    )
