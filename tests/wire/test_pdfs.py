# A PDF as a part of a chat, a message or a response, in the words of each format's upstreams; where it is not read, or
# lies elsewhere, another target of the route may be asked.

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.dialects.chat import check_chat
from gateway.upstreams.anthropic.wire_format import AnthropicFormat
from gateway.upstreams.bedrock.wire_format import BedrockFormat
from gateway.upstreams.gemini.wire_format import GeminiFormat
from gateway.upstreams.openai.wire_format import OpenAIFormat
from gateway.upstreams.wire.base import Asking, Provider
from gateway.upstreams.wire.errors import UpstreamUnable
from gateway.upstreams.wire.quirks import usual_quirks
from protocol import messages_to_chat, responses_to_chat
from protocol.chat import ChatRequest
from protocol.errors import BadRequest
from protocol.messages import MessagesRequest
from protocol.responses import ResponsesRequest
from tests.support import anthropic_rules, gemini_rules, openai_rules
from tests.wire.traffic import asking

DATA = "JVBERi0="
URL = f"data:application/pdf;base64,{DATA}"
FORMATS: dict[str, Provider] = {
    "openai": OpenAIFormat(),
    "anthropic": AnthropicFormat(),
    "gemini": GeminiFormat(),
    "bedrock": BedrockFormat(),
}
# What each upstream is told of a PDF with a name.
TOLD: dict[str, dict[str, Any]] = {
    "openai": {"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}},
    "anthropic": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": DATA},
        "title": "a.pdf",
    },
    "gemini": {"inlineData": {"mimeType": "application/pdf", "data": DATA}},
    "bedrock": {"document": {"format": "pdf", "source": {"bytes": DATA}, "name": "a pdf"}},
}


def chat(*parts: dict[str, Any], role: str = "user") -> Asking:
    body = {"model": "m", "messages": [{"role": role, "content": [*parts, {"type": "text", "text": "Hi"}]}]}
    return asking(msgspec.convert(body, ChatRequest))


def message(source: dict[str, Any], **more: Any) -> Asking:
    block = {"type": "document", "source": source, "title": "a.pdf", **more}
    content = [block, {"type": "text", "text": "Hi"}]
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    native = msgspec.convert(body, MessagesRequest)
    return asking(messages_to_chat.to_chat(native), native=native)


def response(**file: str) -> Asking:
    parts = [{"type": "input_file", "filename": "a.pdf", **file}, {"type": "input_text", "text": "Hi"}]
    body = {"model": "m", "input": [{"role": "user", "content": parts}]}
    return asking(responses_to_chat.to_chat(msgspec.convert(body, ResponsesRequest)))


ASKED = {
    "chat": chat({"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}}),
    "messages": message({"type": "base64", "media_type": "application/pdf", "data": DATA}),
    "responses": response(file_data=URL),
}


def parts_told(name: str, asked: Asking) -> list[dict[str, Any]]:
    """Return the parts of the turn that an upstream is told, judged by the tests' own rules where there are some."""
    built = FORMATS[name].build_request(asked)
    body = json.loads(built.body)
    match name:
        case "openai":
            openai_rules.check_body("/v1/chat/completions", built.body)
        case "anthropic":
            anthropic_rules.check_body(built.body, built.headers)
        case "gemini":
            gemini_rules.check_body(built.body, asked.target.model.upstream_model)
    turn = body["contents"][0]["parts"] if name == "gemini" else body["messages"][0]["content"]
    return list(turn)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dialect", ASKED)
def test_a_pdf_reaches_an_upstream_in_its_own_words(dialect: str, name: str) -> None:
    """From every dialect to every format, beside the words of its turn."""
    parts = parts_told(name, ASKED[dialect])

    assert TOLD[name] in parts and len(parts) in (2, 3)  # a title is told in words, too, where there is no place for it


def test_a_pdf_without_a_name_gets_one_where_it_needs_one() -> None:
    """OpenAI refuses files that have none; Claude is told no title."""
    unnamed = chat({"type": "file", "file": {"file_data": URL}})
    first, title = parts_told("openai", unnamed)[0], parts_told("anthropic", unnamed)[0].get("title")

    assert (first["file"], title) == ({"file_data": URL, "filename": "document.pdf"}, None)


def test_two_pdfs_of_one_name_are_told_apart_where_they_must_be() -> None:
    """Converse refuses them."""
    unnamed = {"type": "file", "file": {"file_data": URL}}
    names = [part["document"]["name"] for part in parts_told("bedrock", chat(unnamed, unnamed))[:2]]

    assert names == ["document", "document (2)"]


@pytest.mark.parametrize("name", ["openai", "gemini"])
def test_a_text_as_a_document_is_told_as_words(name: str) -> None:
    """With its title; what is to be cited is refused, for none but Claude cites."""
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    texts = [part["text"] for part in parts_told(name, message(source))]

    assert texts == ["a.pdf\n", "Once.", "Hi"]
    with pytest.raises(UpstreamUnable, match="cites no documents") as caught:
        FORMATS[name].build_request(message(source, citations={"enabled": True}))
    assert (caught.value.param, caught.value.moves_on) == ("messages", True)


@pytest.mark.parametrize("asked", [message({"type": "url", "url": "https://a/b"}), response(file_url="https://a/b")])
def test_a_pdf_that_lies_elsewhere_goes_to_claude_and_newer_geminis_alone(asked: Asking) -> None:
    """The others fetch none; each says so, and another target may (test_gemini_format.py)."""
    assert parts_told("anthropic", asked)[0]["source"] == {"type": "url", "url": "https://a/b"}
    for name in ("openai", "gemini", "bedrock"):
        with pytest.raises(UpstreamUnable, match="in base64") as caught:
            FORMATS[name].build_request(asked)
        assert caught.value.moves_on


def test_a_service_that_reads_no_pdfs_is_not_asked() -> None:
    """By its host, or because it is an engine: another target of the route may read it."""
    asked = ASKED["chat"]
    quirks = usual_quirks("https://api.groq.com/openai/v1")
    for other in (msgspec.structs.replace(asked, quirks=quirks), msgspec.structs.replace(asked, self_hosted=True)):
        with pytest.raises(UpstreamUnable, match="reads no PDFs") as caught:
            OpenAIFormat().build_request(other)
        assert (caught.value.param, caught.value.moves_on) == ("messages", True)
    assert usual_quirks("https://api.openai.com/v1").pdfs


@pytest.mark.parametrize(
    ("file", "role", "param"),
    [
        ({"file_id": "file-1"}, "user", "file.file_id"),
        ({"file_data": "https://a.example/b.pdf"}, "user", "file.file_data"),
        ({"file_data": "data:text/csv;base64,AAAA"}, "user", "file.file_data"),
        ({}, "user", "file.file_data"),
        ({"file_data": URL, "filename": "a" * 256}, "user", "file.filename"),
        ({"file_data": URL}, "system", "type"),
    ],
)
def test_another_file_of_a_chat_is_refused_by_its_field(file: dict[str, str], role: str, param: str) -> None:
    """None is kept, and none fetched; what another kind comes to in tokens is not known."""
    request = chat({"type": "file", "file": file}, role=role).request
    assert isinstance(request, ChatRequest)
    with pytest.raises(BadRequest) as caught:
        check_chat(request)

    assert caught.value.param == f"messages[0].content[0].{param}"
