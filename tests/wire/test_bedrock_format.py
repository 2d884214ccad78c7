# What Bedrock's Converse is asked, and how its requests are signed. What it answers is in the conformance suite.

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from gateway.core.settings import AwsAccount
from gateway.upstreams.bedrock.events import Broken, EventStreamDecoder
from gateway.upstreams.bedrock.signing import region_of
from gateway.upstreams.bedrock.wire_format import BedrockFormat
from gateway.upstreams.tokens import Tokens
from gateway.upstreams.wire.errors import UpstreamUnable
from protocol.chat import ChatRequest
from protocol.decoding import decode
from protocol.embeddings import EmbeddingRequest
from protocol.messages import MessagesRequest
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Endpoint, Target
from tests.wire.bedrock_traffic import END_OF_TEXT
from tests.wire.traffic import CHAT, TARGET, asking

CLAUDE = "us.anthropic.claude-sonnet-4-5-20250929-v1:0"
LLAMA = "meta.llama3-3-70b-instruct-v1:0"
PNG = "iVBORw0KGgo="
PDF = {"type": "base64", "media_type": "application/pdf", "data": PNG}
SECRET = json.dumps({"access_key": "AKIDEXAMPLE", "secret_key": "wJalrXUtnFEMI", "token": "session"})
RUNTIME = "https://bedrock-runtime.eu-central-1.amazonaws.com"


def target(model: str = CLAUDE, base_url: str = RUNTIME) -> Target:
    return Target(replace(TARGET.model, upstream_model=model), Endpoint("somewhere", base_url))


def built(request: ChatRequest, model: str = CLAUDE, **more: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    made = BedrockFormat().build_request(asking(request, **{"target": target(model), **more}))
    return json.loads(made.body), made.dropped


def chat(**more: Any) -> ChatRequest:
    asked = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **more}
    return decode(json.dumps(asked).encode(), ChatRequest)


def native(model: str = CLAUDE, **more: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}], **more}
    message = decode(json.dumps(asked).encode(), MessagesRequest)
    return built(to_chat(message), model, native=message)


def test_a_chat_in_converses_words() -> None:
    """System, turns, sampling, stops, tools and their results, each where Converse has it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Seen."},
    ]
    tool = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
    sampling = {"max_tokens": 7, "temperature": 0.5, "stop": ["END"]}
    body, dropped = built(chat(messages=turns, tools=[tool], tool_choice="required", seed=1, **sampling))

    assert body["system"] == [{"text": "Be brief."}]
    assert body["messages"] == [
        {"role": "user", "content": [{"text": "Hello"}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "call_1", "name": "look", "input": {"at": 1}}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "call_1", "content": [{"text": "Seen."}]}}]},
    ]
    assert body["inferenceConfig"] == {"maxTokens": 7, "temperature": 0.5, "stopSequences": ["END"]}
    spec = {"name": "look", "description": "Looks.", "inputSchema": {"json": {"type": "object"}}}
    assert body["toolConfig"] == {"tools": [{"toolSpec": spec}], "toolChoice": {"any": {}}}
    assert dropped == ("seed",) and body.keys() <= {"system", "messages", "inferenceConfig", "toolConfig"}


def test_pictures_documents_thinking_and_marks_of_messages() -> None:
    """Blocks of Anthropic's dialect, in Converse's words; the model's own fields go along as such."""
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "document", "title": "A/B: notes", "source": PDF, "context": "Of May."},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Words."}},
        {"type": "text", "text": "Compare.", "cache_control": {"type": "ephemeral"}},
    ]  # fmt: skip
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "EqQBCkgIBRABGAIiQ" + "A" * 60}
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Alike."}]},
        {"role": "user", "content": "Sure?"},
    ]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body, _ = native(messages=turns, thinking=thinking, max_tokens=4000, metadata={"user_id": "u"})
    first, second, _ = (turn["content"] for turn in body["messages"])

    assert first[0] == {"image": {"format": "png", "source": {"bytes": PNG}}}
    pdf = {"format": "pdf", "source": {"bytes": PNG}, "name": "A B notes", "context": "Of May."}
    assert first[1] == {"document": pdf}
    assert first[2] == {"document": {"format": "txt", "source": {"text": "Words."}, "name": "document"}}
    assert first[3:] == [{"text": "Compare."}, {"cachePoint": {"type": "default"}}]
    assert second[0]["reasoningContent"]["reasoningText"] == {"text": "Hm.", "signature": thought["signature"]}
    assert body["additionalModelRequestFields"] == {"thinking": thinking}
    assert "metadata" not in body


def test_what_anthropics_api_alone_knows_is_refused_or_told() -> None:
    """A document that is to be cited would be answered without; what changes no meaning is left out, and named."""
    cited = {"type": "document", "source": PDF, "citations": {"enabled": True}}
    said = {"type": "text", "text": "Alike.", "citations": [{"type": "char_location", "cited_text": "A"}]}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [said]}]
    tool = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}
    _, dropped = native(messages=[*turns, {"role": "user", "content": "Sure?"}], tools=[tool])

    assert dropped == ("tools.defer_loading", "citations")
    with pytest.raises(UpstreamUnable, match="cites no documents"):
        native(messages=[{"role": "user", "content": [cited, {"type": "text", "text": "Hi"}]}])


def test_another_makers_model_is_told_nothing_of_claudes() -> None:
    """No effort, and no marks for a cache that it has not; of both its caller is told, where it said them."""
    long = "Long instructions. " * 1000
    messages = [{"role": "system", "content": long}, {"role": "user", "content": "Hello"}]
    marked = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    llama, dropped = built(chat(messages=messages, reasoning_effort="high"), LLAMA)
    said = [built(chat(messages=[{"role": "user", "content": [marked]}]), each)[1] for each in (LLAMA, CLAUDE)]
    said.append(native(LLAMA, messages=[{"role": "user", "content": [marked]}])[1])
    last = [native(each, cache_control=marked["cache_control"]) for each in (LLAMA, CLAUDE)]
    claude, _ = built(chat(messages=messages))

    assert "additionalModelRequestFields" not in llama and dropped == ("reasoning_effort",)
    assert said == [("cache_control",), (), ("cache_control",)]
    assert [said for _, said in last] == [("cache_control",), ()]
    assert not any("additionalModelRequestFields" in body for body, _ in last)
    assert [body["messages"][0]["content"][1:] for body, _ in last] == [[], [{"cachePoint": {"type": "default"}}]]
    assert "cachePoint" not in json.dumps(llama) and "cachePoint" in json.dumps(claude)


@pytest.mark.parametrize(
    ("asked", "model", "param"),
    [
        ({"n": 2}, CLAUDE, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://h/a.png"}}]}]},
         CLAUDE, "messages.content.image"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "parallel_tool_calls": False}, LLAMA, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, LLAMA, "tools"),
    ],
)  # fmt: skip
def test_what_it_cannot_say_is_another_targets(asked: dict[str, Any], model: str, param: str) -> None:
    """By name, and before it is asked."""
    with pytest.raises(UpstreamUnable) as caught:
        built(chat(**asked), model)

    assert (caught.value.param, caught.value.moves_on) == (param, True)


def test_vectors_are_another_targets() -> None:
    """Converse has no embeddings."""
    with pytest.raises(UpstreamUnable):
        BedrockFormat().build_request(asking(EmbeddingRequest(model="m", input="a")))


def test_a_model_of_several_calls_at_once_may_be_held_to_one() -> None:
    """Claude has a word for it, beside Converse's own."""
    body, _ = built(chat(tools=[{"type": "function", "function": {"name": "f"}}], parallel_tool_calls=False))

    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert body["additionalModelRequestFields"] == {"tool_choice": choice} and "toolChoice" not in body["toolConfig"]


@pytest.mark.parametrize("streams", [False, True])
def test_the_model_is_in_the_path(streams: bool) -> None:
    """Also one that is named by its ARN, whose colons and slashes are not the path's."""
    arn = "arn:aws:bedrock:eu-central-1:1:application-inference-profile/abc"
    made = BedrockFormat().build_request(asking(target=target(arn), streams=streams))

    encoded = "arn%3Aaws%3Abedrock%3Aeu-central-1%3A1%3Aapplication-inference-profile%2Fabc"
    assert made.url == f"{RUNTIME}/model/{encoded}/{'converse-stream' if streams else 'converse'}"
    assert made.headers["authorization"] == "Bearer sk-house"


def test_a_request_is_signed_as_amazon_says() -> None:
    """Signature Version 4, reckoned here a second time."""
    pytest.importorskip("botocore", reason="an extra: tollgate[bedrock]")
    made = BedrockFormat().build_request(asking(target=target(), api_key=None, token=SECRET))
    headers = made.headers
    scheme, credential, names, signature = headers["authorization"].replace(",", "").split(" ")
    at, signed_names = headers["x-amz-date"], names.removeprefix("SignedHeaders=").split(";")
    scope = f"{at[:8]}/eu-central-1/bedrock/aws4_request"
    parts = urlsplit(made.url)
    known = headers | {"host": parts.netloc}
    listed = "".join(f"{name}:{known[name]}\n" for name in signed_names)
    path = parts.path.replace("%", "%25")
    payload = hashlib.sha256(made.body).hexdigest()
    canonical = "\n".join(("POST", path, "", listed, ";".join(signed_names), payload))
    text = "\n".join(("AWS4-HMAC-SHA256", at, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = b"AWS4wJalrXUtnFEMI"
    for word in (at[:8], "eu-central-1", "bedrock", "aws4_request"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()

    assert (scheme, credential) == ("AWS4-HMAC-SHA256", f"Credential=AKIDEXAMPLE/{scope}")
    assert {"host", "x-amz-date", "x-amz-security-token"} <= {*signed_names}
    assert signature == f"Signature={hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}"
    assert headers["x-amz-security-token"] == "session" and "wJalr" not in str(headers)


async def test_credentials_come_from_where_amazons_tools_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """From the environment, or the profile that the file names; asked once in a while, not for each call."""
    pytest.importorskip("botocore", reason="an extra: tollgate[bedrock]")
    file = tmp_path / "credentials"
    file.write_text("[batch]\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    tokens, nothing = Tokens(), None
    first = await tokens.of(AwsAccount(), nothing, 0.0)  # type: ignore[arg-type]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDLATER")
    again = await tokens.of(AwsAccount(), nothing, 30.0)  # type: ignore[arg-type]
    later = await tokens.of(AwsAccount(), nothing, 100.0)  # type: ignore[arg-type]
    profile = await tokens.of(AwsAccount("batch"), nothing, 0.0)  # type: ignore[arg-type]

    said = [json.loads(one)["access_key"] for one in (first, again, later, profile)]
    assert said == ["AKIDENVIRONMENT", "AKIDENVIRONMENT", "AKIDLATER", "AKIDPROFILE"]


def test_the_region_is_the_hosts_or_as_the_file_says() -> None:
    """A private endpoint has another name."""
    assert region_of(RUNTIME, "x") == "eu-central-1"
    assert region_of("https://bedrock-runtime-fips.us-east-1.amazonaws.com", "x") == "us-east-1"
    assert region_of("https://vpce-1.example", "eu-west-1") == "eu-west-1"


def test_a_length_that_no_message_has_is_refused_at_once() -> None:
    """Nothing is gathered for it."""
    decoder = EventStreamDecoder()
    with pytest.raises(Broken):
        list(decoder.feed(b"\xff" * 12))
    assert [one.headers[":event-type"] for one in EventStreamDecoder().feed(END_OF_TEXT)] == ["messageStop", "metadata"]


def test_signing_needs_no_botocore_for_keys() -> None:
    """A key of Bedrock's own is a bearer token."""
    made = BedrockFormat().build_request(asking(CHAT, target=target(), api_key="bedrock-api-key"))

    assert made.headers["authorization"] == "Bearer bedrock-api-key" and "x-amz-date" not in made.headers
