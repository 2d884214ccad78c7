# PDFs as parts, asked of a gateway in one dialect and read by an upstream of another format: told, held and booked.

from __future__ import annotations

import base64
from decimal import Decimal
from typing import Any

import pytest

from router.prompt_size.pictures import PAGE_TEXT_TOKENS
from tests.support.house import House
from tests.support.scripted_upstream import ScriptedUpstream

PDF = base64.b64encode(b"%PDF-1.7\n<< /Type /Page >>\n%%EOF").decode()
URL = f"data:application/pdf;base64,{PDF}"
IN_CHAT: Any = {"type": "file", "file": {"filename": "toll.pdf", "file_data": URL}}
SOURCE: Any = {"type": "base64", "media_type": "application/pdf", "data": PDF}
IN_MESSAGE: Any = {"type": "document", "source": SOURCE}
WORDS = {"type": "text", "text": "What does it say?"}


@pytest.mark.parametrize(
    ("path", "model", "part", "told"),
    [
        ("/v1/chat/completions", "claude", IN_CHAT, IN_MESSAGE | {"title": "toll.pdf"}),
        ("/v1/chat/completions", "small", IN_CHAT, IN_CHAT),
        ("/v1/messages", "gemini", IN_MESSAGE, {"inlineData": {"mimeType": "application/pdf", "data": PDF}}),
    ],
)
def test_a_pdf_is_told_held_and_booked(
    house: House, upstream: ScriptedUpstream, path: str, model: str, part: Any, told: Any
) -> None:
    """Its page is held as a picture and a text, up to the model's context; what the upstream counts is charged."""
    upstream.forget()
    with house.client() as client:
        asked = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": [part, WORDS]}]}
        answer = client.post(path, json=asked)
    assert answer.status_code == 200, answer.text
    sent, row = upstream.requests[-1].body or {}, house.record_of(answer)
    turn = sent["contents"][0]["parts"] if model == "gemini" else sent["messages"][0]["content"]

    assert turn[0] == told and upstream.violations == []
    assert PAGE_TEXT_TOKENS < row["held_tokens"] - 100 <= house.settings.models[model].context
    cost = Decimal(row["input_tokens"] + 2 * row["output_tokens"]) / 1_000_000
    assert Decimal(str(row["cost_usd"])) == cost > 0
    assert row["held_nanousd"] >= 1_000 * (row["held_tokens"] - 100)


def test_a_file_that_is_kept_elsewhere_is_refused_by_name(house: House, upstream: ScriptedUpstream) -> None:
    """Before an upstream hears of it, with what would be right."""
    upstream.forget()
    with house.client() as client:
        part = {"type": "file", "file": {"file_id": "file-1"}}
        asked = {"model": "small", "messages": [{"role": "user", "content": [part, WORDS]}]}
        answer = client.post("/v1/chat/completions", json=asked)
    error = answer.json()["error"]

    assert (answer.status_code, error["param"]) == (400, "messages[0].content[0].file.file_id")
    assert "in 'file_data'" in error["message"] and upstream.requests == []
