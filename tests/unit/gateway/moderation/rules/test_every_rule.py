# Every rule against every disguise that the documentation promises to undo, and on every way that a text takes through
# the gateway: no rule is tried with less than the others.

from __future__ import annotations

import base64
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from msgspec import inspect

from gateway.core.errors import ContentPolicyViolation
from gateway.core.settings import Level, Safety
from gateway.dialects.chat import check_chat
from gateway.dialects.completions import check_completion
from gateway.dialects.embeddings import check_embeddings
from gateway.dialects.messages import check_message
from gateway.moderation.classifier.plain import visible
from gateway.moderation.output_watch import SHARED, output_watch_of
from gateway.moderation.redaction import redacted_call
from gateway.moderation.rules.policy import CATEGORIES, REDACTABLE
from gateway.moderation.rules.rules import RULES
from gateway.moderation.texts import texts_of
from protocol.chat import ChatRequest, FinishReason
from protocol.completions import CompletionRequest
from protocol.decoding import decode_with_extra
from protocol.embeddings import EmbeddingRequest
from protocol.errors import BadRequest
from protocol.events import Delta, ToolCallDelta
from protocol.messages import MessagesRequest
from protocol.messages_to_chat import to_chat
from router.catalog.targets import Endpoint, Target
from tests.support.guarding import Guarding
from tests.support.house import model

TARGET = Target(model("small"), Endpoint("here", "http://upstream"))
PHRASE = "project nightingale"
HEX = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
WORD = "q8Zs93jdLs02mNx7QpZt8wB5vK1rT6yU4iO9aSdFgHjK2lM3nC7xV0bE" * 2
LETTERS = "".join(filter(str.isalpha, WORD))

# A find of each rule; "phrase" is the house's own.
FINDS = {
    "aws_key": "AKIAIOSFODNN7EXAMPLE",
    "github_token": "ghp_" + WORD[:36],
    "gitlab_token": "glpat-" + WORD[:20],
    "slack_token": "xoxb-123456789012-" + WORD[:12],
    "slack_webhook": "https://hooks.slack.com/services/T01ABCDEF/B01ABCDEF/" + WORD[:24],
    "stripe_key": "sk_live_" + WORD[:24],
    "anthropic_key": "sk-ant-api03-" + WORD[:40],
    "openai_key": "sk-proj-" + WORD[:40],
    "google_key": "AIza" + WORD[:35],
    "google_token": "ya29." + WORD[:40],
    "huggingface_token": "hf_" + LETTERS[:34],
    "npm_token": "npm_" + WORD[:36],
    "pypi_token": "pypi-AgEIcHlwaS5vcmc" + WORD[:60],
    "sendgrid_key": f"SG.{WORD[:22]}.{WORD[22:65]}",
    "twilio_key": "SK" + HEX[:32],
    "telegram_token": "123456789:AA" + WORD[:33],
    "digitalocean_token": "dop_v1_" + HEX,
    "shopify_token": "shpat_" + HEX[:32],
    "databricks_token": "dapi" + HEX[:32],
    "azure_key": f"AccountKey={WORD[:86]}==",
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + WORD[:43],
    "private_key": "-----BEGIN RSA PRIVATE KEY-----",
    "tollgate_key": "tg-" + WORD[:43],
    "model_service_key": "gsk_" + WORD[:52],
    "service_token": f"glsa_{WORD[:32]}_{HEX[:8]}",
    "bearer_token": "Bearer " + WORD[:40],
    "basic_login": "Basic " + base64.b64encode(b"anna:hunter22secret").decode(),
    "url_password": "postgres://anna:hunter22@db.example.com/x",
    "assigned_secret": f'api_key="{WORD[:32]}"',
    "card": "4111 1111 1111 1111",
    "iban": "DE89370400440532013000",
    "us_ssn": "078-05-1120",
    "email": "anna.bauer@example.com",
    "phone": "+1 415-555-2671",
    "ip_address": "203.0.113.77",
    "phrase": PHRASE,
}
PAGE = "data:application/pdf;base64,JVBERi0xLjQK"
IN_ANSWERS = {name: find for name, find in FINDS.items() if name not in ("email", "phone", "ip_address")}

LATIN = "AaBcCdeEHiIjJKkMNoOpPqsSTuvwxXyYZ0123456789-/:.="
ALIKE = (
    "\u0410\u0430\u0412\u0441\u0421\u0501\u0435\u0415\u041d\u0456\u0406\u0458\u0408\u041a\u043a\u041c\u039d\u043e"
    "\u041e\u0440\u0420\u051b\u0455\u0405\u0422\u03c5\u0475\u051d\u0445\u0425\u0443\u03a5\u0396\u0660\u0661\u0662"
    "\u0663\u0664\u0665\u0666\u0667\u0668\u0669\u2011\u2215\u2236\u2024\ua78a"
)


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def bold(sign: str) -> str:
    """Return a sign as a mathematical bold one."""
    for first, zero in (("A", 0x1D400), ("a", 0x1D41A), ("0", 0x1D7CE)):
        if sign.isalnum() and 0 <= (place := ord(sign) - ord(first)) < 26:
            return chr(zero + place)
    return sign


DISGUISES: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "look-alikes": lambda text: text.translate(str.maketrans(LATIN, ALIKE)),
    "fullwidth": lambda text: "".join(chr(0xFEE0 + ord(sign)) if sign > " " else sign for sign in text),
    "mathematical": lambda text: "".join(map(bold, text)),
    "zero-width": "\u200b".join,
    "soft hyphens": "\u00ad".join,
    "accents": "\u0301".join,
    "tags": lambda text: "".join(chr(0xE0000 + ord(sign)) for sign in " " + text),
    "control": "\x01".join,
    "base64": lambda text: coded("the key is " + text),
    "base64 alone": coded,
    "base64 twice": lambda text: coded(coded("it is " + text)),
    "url-safe base64": lambda text: base64.urlsafe_b64encode(f"\u00fe\u00ff {text} ok".encode()).decode().rstrip("="),
    "base64 in literals": lambda text: '" +\n  "'.join(cut(coded("the key is " + text), 20)),
    "base32": lambda text: base64.b32encode(text.encode()).decode(),
    "hexadecimal": lambda text: text.encode().hex(),
    "hexadecimal in pairs": lambda text: text.encode().hex(" "),
    "hexadecimal with colons": lambda text: text.encode().hex(":"),
    "a list of hexadecimal": lambda text: " ".join(f"0x{ord(sign):02x}" for sign in text),
    "code points": lambda text: " ".join(f"U+{ord(sign):04X}" for sign in text),
    "decimal": lambda text: str(list(text.encode())),
    "binary": lambda text: " ".join(f"{ord(sign):08b}" for sign in text),
    "octal": lambda text: " ".join(f"{ord(sign):03o}" for sign in text),
    "percent": lambda text: "".join(f"%{ord(sign):02x}" for sign in text),
    "percent here and there": lambda text: "".join(
        sign if place % 3 else f"%{ord(sign):02x}" for place, sign in enumerate(text)
    ),
    "JSON escapes": lambda text: "".join(f"\\u{ord(sign):04x}" for sign in text),
    "string escapes": lambda text: "".join(f"\\x{ord(sign):02x}" for sign in text),
    "octal escapes": lambda text: "".join(f"\\{ord(sign):03o}" for sign in text),
    "HTML": lambda text: "".join(f"&#{ord(sign)};" for sign in text),
    "hexadecimal HTML": lambda text: "".join(f"&#x{ord(sign):x};" for sign in text),
    "quoted-printable": lambda text: "".join(f"={ord(sign):02X}" for sign in text),
}


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def sentence(find: str, disguise: str = "none") -> str:
    return f"Please keep this: {DISGUISES[disguise](find)} and go on."


@pytest.fixture
async def guarding() -> AsyncIterator[Guarding]:
    """A house that blocks all that rules find, addresses and a phrase of its own too."""
    levels: dict[str, Level] = {**dict.fromkeys(CATEGORIES, "off"), "contacts": "block"}
    guarding = Guarding(Safety(input="block", output="block", levels=levels, deny=(PHRASE,)))
    yield guarding
    await guarding.close()


def test_every_rule_is_tried() -> None:
    """A new rule needs a find here."""
    assert {rule.name for rule in RULES} | {"phrase"} == set(FINDS)


@pytest.mark.parametrize("disguise", DISGUISES)
async def test_no_rule_is_deceived_by_a_disguise(guarding: Guarding, disguise: str) -> None:
    """Each rule finds its own behind each of the promised ones."""
    missed = [
        name
        for name, find in FINDS.items()
        if name not in {one.name for one in guarding.moderator.reader.rule_findings(visible(sentence(find, disguise)))}
    ]

    assert missed == []


def ways(text: str) -> Iterator[tuple[str, type, dict[str, Any]]]:
    """Yield every way in which a text can leave: its name, and the body of a request that takes it."""
    half, hello = len(text) // 2, {"role": "user", "content": "Hello."}
    parts = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
    arguments = json.dumps({"what": text})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": parts}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"what": text}}
    for name, more in {
        "user": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": parts}]},
        "file": {"messages": [hello | {"content": [{"type": "file", "file": {"filename": text, "file_data": PAGE}}]}]},
        "system": {"messages": [{"role": "system", "content": text}, hello]},
        "assistant": {"messages": [hello, {"role": "assistant", "content": text}, hello]},
        "arguments": {"messages": [hello, {"role": "assistant", "tool_calls": [call]}]},
        "tool": {"messages": [hello], "tools": [tool]},
        "metadata": {"messages": [hello], "metadata": {"for": text[:512]}},
        "unknown": {"messages": [hello], "never_heard_of": {"deep": [text]}},
    }.items():
        yield f"chat: {name}", ChatRequest, more
    yield "completion", CompletionRequest, {"prompt": text}
    yield "completions", CompletionRequest, {"prompt": ["Once", text]}
    yield "embedding", EmbeddingRequest, {"input": ["Once", text]}
    for name, more in {
        "user": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": parts}]},
        "system": {"messages": [hello], "system": [{"type": "text", "text": text}]},
        "use": {"messages": [hello, {"role": "assistant", "content": [use]}]},
        "result": {
            "messages": [hello, {"role": "assistant", "content": [use | {"input": {}}]}, hello | {"content": [result]}]
        },
        "tool": {
            "messages": [hello],
            "tools": [{"name": "f", "description": text, "input_schema": {"type": "object"}}],
        },
    }.items():
        yield f"messages: {name}", MessagesRequest, {"max_tokens": 9, **more}


WAYS = [name for name, _, _ in ways("text")]


@pytest.mark.parametrize("way", WAYS)
async def test_no_rule_is_passed_by_on_any_way_out(guarding: Guarding, way: str) -> None:
    """In every dialect, plain and behind a few disguises, cut in two where the dialect has parts."""
    missed = []
    for name, find in FINDS.items():
        for disguise in ("none", "look-alikes", "zero-width", "base64", "percent", "hexadecimal"):
            kind, body = next((kind, body) for one, kind, body in ways(sentence(find, disguise)) if one == way)
            asked, extra = decode_with_extra(json.dumps({"model": "small", **body}).encode(), kind)
            native = asked if isinstance(asked, MessagesRequest) else None
            request = to_chat(asked) if isinstance(asked, MessagesRequest) else asked
            found = await guarding.moderator.reader.find_by_form(request, extra, native)
            if name not in {one.name for one in found}:
                missed.append((name, disguise))

    assert missed == []


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way not in ("chat: metadata", "chat: parts", "messages: parts")]
)
async def test_what_is_redacted_leaves_no_rule_anything_to_find(guarding: Guarding, way: str) -> None:
    """In every dialect, and behind look-alikes; what was asked around it stays."""
    left, lost, disguises = [], [], ("none", "fullwidth", "zero-width") if way == "chat: user" else ("none",)
    for name, find in FINDS.items():
        for disguise in disguises if name not in ("phrase", "private_key") else ():
            kind, body = next((kind, body) for one, kind, body in ways(sentence(find, disguise)) if one == way)
            asked, extra = decode_with_extra(json.dumps({"model": "small", **body}).encode(), kind)
            native = asked if isinstance(asked, MessagesRequest) else None
            request = to_chat(asked) if isinstance(asked, MessagesRequest) else asked
            call, found = redacted_call(guarding.call(request, native=native, extra=extra), frozenset(REDACTABLE))
            if not found or await guarding.moderator.reader.find_by_form(call.request, call.extra, call.native):
                left.append((name, disguise))
            said = "\n".join(texts_of(call.request, call.extra, call.native))
            if "Please keep this: " not in said or " and go on." not in said:
                lost.append((name, disguise))

    assert (left, lost) == ([], [])


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (ChatRequest, check_chat),
        (CompletionRequest, check_completion),
        (EmbeddingRequest, check_embeddings),
        (MessagesRequest, check_message),
    ],
)
async def test_no_field_of_a_request_is_passed_by(guarding: Guarding, kind: type, check: Callable[[Any], None]) -> None:
    """A secret in every string that a request can have, and in every name there, is found, or the request refused."""
    missed, tried = [], 0
    for path, body in planted(inspect.type_info(kind)):
        try:
            asked, extra = decode_with_extra(json.dumps(body).encode(), kind)
            check(asked)
            native = asked if isinstance(asked, MessagesRequest) else None
            request = to_chat(asked) if native is not None else asked
        except BadRequest:
            continue
        tried += 1
        if "aws_key" not in {one.name for one in await guarding.moderator.reader.find_by_form(request, extra, native)}:
            missed.append(path)

    assert missed == [] and tried >= 3


def smallest(shape: inspect.Type, role: str = "user") -> Any:
    """Return the smallest value of a type."""
    match shape:
        case inspect.UnionType(types=types):
            return None if any(isinstance(one, inspect.NoneType) for one in types) else smallest(types[0], role)
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            value = {one.encode_name: smallest(one.type, role) for one in fields if one.required}
            return value | ({} if tag_field is None else {tag_field: tag})
        case inspect.LiteralType(values=values):
            return role if role in values else values[0]
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [smallest(item, role)]
        case inspect.DictType():
            return {}
        case inspect.StrType():
            return "x"
    return 1


def planted(shape: inspect.Type) -> Iterator[tuple[str, Any]]:
    """Yield values of a type with a secret in one of its strings each, and where that stands."""
    match shape:
        case inspect.UnionType(types=types):
            for one in types:
                yield from planted(one)
        case inspect.StructType(fields=fields):
            for role in ("user", "assistant", "tool"):
                for field in fields:
                    for path, value in planted(field.type):
                        yield f".{field.encode_name}{path}", {**smallest(shape, role), field.encode_name: value}
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            for path, value in planted(item):
                yield f"[]{path}", [value]
        case inspect.DictType(value_type=item):
            for path, value in planted(item):
                yield f"{{}}{path}", {"a": value}
            yield "{}", {FINDS["aws_key"]: smallest(item)}
        case inspect.StrType() | inspect.AnyType() | inspect.RawType():
            yield "", FINDS["aws_key"]


PIECES: dict[str, Callable[[str], Delta]] = {
    "words": lambda said: Delta(text=said),
    "thinking": lambda said: Delta(reasoning=said),
    "refusal": lambda said: Delta(refusal=said),
    "arguments": lambda said: Delta(tool_calls=(ToolCallDelta(0, said),)),
    "the second choice": lambda said: Delta(1, said),
}


@pytest.mark.parametrize("piece", PIECES)
async def test_no_rule_is_passed_by_in_an_answer(guarding: Guarding, piece: str) -> None:
    """Cut at random places, after a long beginning: each is found before the first sign of it is out."""
    dice = random.Random(piece)
    for name, find in IN_ANSWERS.items():
        for disguise in ("none", "look-alikes", "zero-width", "base64"):
            written = DISGUISES[disguise](find)
            if len(written) > SHARED and disguise != "zero-width":  # longer than what two windows share
                continue
            before = "".join(dice.choices("aeiou ", k=dice.randrange(500))) + " "
            hook, out = output_watch_of(guarding.moderator, guarding.call(), TARGET), ""
            with pytest.raises(ContentPolicyViolation, match=name):
                for said in pieces_of(f"{before}{written} and so on.", dice):
                    out += "".join(map(said_by, hook.delta(PIECES[piece](said))))
                hook.delta(Delta(PIECES[piece]("").index, finish_reason=FinishReason.STOP))
            assert before.startswith(out), (name, disguise)


def pieces_of(text: str, dice: random.Random) -> Iterator[str]:
    """Cut a text into pieces of up to nine characters."""
    start = 0
    while start < len(text):
        end = start + dice.randint(1, 9)
        yield text[start:end]
        start = end


def said_by(delta: Delta) -> str:
    return delta.text + delta.reasoning + delta.refusal + "".join(call.arguments for call in delta.tool_calls)
