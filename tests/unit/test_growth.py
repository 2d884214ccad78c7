# Whatever callers and upstreams send takes time in proportion to its length. What reads it is found by looking through
# the packages (tests/support/transforms.py), so that nothing new goes unmeasured.

from __future__ import annotations

import asyncio
import re
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import pytest
from multipart import PushMultipartParser

from billing.core.holds import Settlement
from billing.core.money import NanoDollars
from billing.core.prices import Price
from gateway.batch.intake import Intake, read_lines
from gateway.calls.accumulate import Collector
from gateway.calls.as_events import events_of
from gateway.calls.estimate import charged_prompt_tokens, filled_in, probable_usage
from gateway.core.settings import Safety
from gateway.dialects import chat, messages, responses
from gateway.dialects.chat import ChatWriter
from gateway.dialects.completions import CompletionWriter
from gateway.dialects.media import SpeechWriter, TranscriptionWriter
from gateway.dialects.messages_writer import MessagesWriter
from gateway.dialects.parts.recordings import seconds_of
from gateway.dialects.responses_writer import ResponsesWriter
from gateway.moderation.output_redaction import OutputRedaction
from gateway.moderation.output_watch import OutputWatch
from gateway.moderation.redaction import Redactor
from gateway.moderation.rules.policy import REDACTABLE
from gateway.moderation.rules.rules import RULES, end_of_open, holds_phrase, places_by_rules
from gateway.moderation.text_reader import OVERLAP
from gateway.shadow import judging
from gateway.upstreams.anthropic import request as anthropic_request
from gateway.upstreams.anthropic.events import AnthropicEvents
from gateway.upstreams.gemini.events import GeminiEvents
from gateway.upstreams.gemini.request import content_body
from gateway.upstreams.gemini.wire_format import embedding_body
from gateway.upstreams.openai.events import OpenAIEvents
from gateway.upstreams.openai.media_events import PictureEvents, TranscriptionEvents
from gateway.upstreams.openai.speech import SpeechEvents
from gateway.upstreams.registry import FORMATS
from gateway.upstreams.responses.replies import ResponsesEvents
from gateway.upstreams.wire.errors import UpstreamFailure
from gateway.upstreams.wire.short_ids import names_given, short_id
from gateway.upstreams.wire.unsayable import without_items
from gpu_backend.server.checkpoint import harmony
from gpu_backend.server.checkpoint.chat_template import ChatTemplate
from gpu_backend.server.checkpoint.harmony import HarmonyReader
from gpu_backend.server.checkpoint.tokens import StopStrings
from gpu_backend.server.checkpoint.tool_call_text import CallText
from gpu_backend.server.checkpoint.tool_calls import ToolCallReader, ToolStyle
from gpu_backend.server.requests import checks, structured
from gpu_backend.server.requests.bodies import NO_EXTENSIONS
from protocol.chat import MOST_MESSAGES, ChatReply, ChatRequest
from protocol.completions import CompletionRequest
from protocol.decoding import MAX_VALUES, decode_with_unread, has_more_values
from protocol.embeddings import EmbeddingRequest, RerankRequest
from protocol.errors import ServiceError
from protocol.events import Delta
from protocol.media.audio import SpeechRequest, TranscriptionRequest, plain_seconds
from protocol.media.images import ImageRequest
from protocol.messages import MessagesRequest
from protocol.messages_to_chat import to_chat
from protocol.responses import ResponsesRequest, item_id
from protocol.serving.announcements import read_signed
from protocol.serving.prompt_marks import marks_of, tokens_of_marks
from protocol.sse import EventReader
from protocol.usage import Usage
from router import eligibility, sticky
from router.catalog.routing_options import RoutingOptions
from router.catalog.targets import Capability, ModelSpec
from router.complexity import text_stats
from router.prompt_size import bounds
from router.prompt_size.prompt_bounds import bound_prompt
from router.prompt_size.token_counts import tokens_most
from tests.support import hostile_requests as shapes
from tests.support.chat_templates import FAMILIES
from tests.support.growth import LAST, Work, growth_of
from tests.support.guarding import Guarding
from tests.support.hostile_texts import near_matches, repeated, texts
from tests.support.transforms import functions, patterns, readers, request_types

T = TypeVar("T")

REFUSALS = (ServiceError, UpstreamFailure, ValueError, msgspec.MsgspecError, RecursionError)
MODEL = ModelSpec(
    name="m",
    provider="p",
    upstream_model="m",
    price=Price(input=NanoDollars(1), output=NanoDollars(1)),
    context=10**9,
    max_output=4096,
    capabilities=frozenset(Capability),
)
REPLY: Any = SimpleNamespace(
    call=SimpleNamespace(request_id="0-1"),
    target=SimpleNamespace(model=SimpleNamespace(name="m")),
    record=SimpleNamespace(cost_nanousd=1, total_ms=1.0),
    meter=SimpleNamespace(so_far=lambda: Settlement(Usage(), 0)),
)
ASKED = MessagesRequest(model="m", max_tokens=1, messages=())
RESPONSE = ResponsesRequest(model="m", input="Hi")
RAISING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
# What needs more than the text, the body or the request itself, with what is given beside it.
ARRANGED: dict[str, Callable[[Any], object]] = {
    "protocol.decoding.has_more_values": lambda body: has_more_values(body, len(body) // 4),
    "protocol.media.audio.plain_seconds": lambda file: [plain_seconds(file, "wav"), plain_seconds(file, "mp3")],
    "protocol.serving.announcements.read_signed": lambda value: read_signed(value, ("one", "other")),
    "protocol.responses.item_id": lambda text: item_id("item", "0", 0, text),
    "protocol.serving.prompt_marks.marks_of": lambda body: marks_of(body, "team"),
    "protocol.serving.prompt_marks.tokens_of_marks": lambda text: tokens_of_marks(text, 100),
    "router.prompt_size.bounds.output_tokens_most": lambda request: bounds.output_tokens_most(request, MODEL),
    "router.prompt_size.bounds.output_limit": lambda request: bounds.output_limit(request, MODEL),
    "router.prompt_size.bounds.usage_most": lambda request: bounds.usage_most(request, MODEL),
    "router.prompt_size.bounds.input_tokens_most": lambda request: bounds.input_tokens_most(request, MODEL),
    "router.prompt_size.bounds.cost_most": lambda request: bounds.cost_most(request, MODEL),
    "router.eligibility.needs_of": lambda request: eligibility.needs_of(request, RoutingOptions(), [MODEL]),
    "router.prompt_size.token_counts.tokens_most": lambda text: tokens_most(text, None),
    "router.complexity.text_stats.stats_of": lambda data: text_stats.stats_of(
        data, data.lower(), text_stats.words_of(data.lower())
    ),
    "router.sticky.judge": lambda request: sticky.judge(request, 0.5, lambda asked: 0.5),
    "router.sticky.as_asked": lambda request: sticky.as_asked(request, 1),
    "gateway.calls.estimate.probable_usage": lambda request: probable_usage(request, ChatReply(choices=()), 9),
    "gateway.calls.estimate.charged_prompt_tokens": lambda request: charged_prompt_tokens(
        request, MODEL, bound_prompt(request).closely()
    ),
    "gateway.calls.estimate.filled_in": lambda request: filled_in(
        request, MODEL, bound_prompt(request).closely(), None
    ),
    "gateway.dialects.chat.as_asked": lambda asked: chat.as_asked(asked, {}),
    "gateway.dialects.messages.as_chat": lambda asked: messages.as_chat(asked, {}),
    "gateway.dialects.responses.as_chat": lambda asked: responses.as_chat(asked, {}),
    "gateway.calls.as_events.events_of": lambda reply: events_of(reply, None),
    "gateway.upstreams.anthropic.request.message_body": lambda request: anthropic_request.message_body(
        request, "m", 1, streams=True
    ),
    "gateway.upstreams.anthropic.request.native_body": lambda asked: anthropic_request.native_body(
        asked, to_chat(asked), "m", streams=True
    ),
    "gateway.upstreams.gemini.request.content_body": lambda request: content_body(request, "gemini-3-flash", 1),
    "gateway.upstreams.gemini.wire_format.embedding_body": lambda request: embedding_body(request, "m"),
    "gateway.upstreams.wire.unsayable.without_items": lambda request: without_items(request, RESPONSE),
    "gateway.upstreams.wire.short_ids.short_id": lambda text: short_id(text, 64),
    "gateway.upstreams.wire.short_ids.names_given": lambda request: names_given(request, str.lower),
    "gateway.moderation.rules.rules.end_of_open": lambda text: [
        end_of_open(name, text, is_over=False) for name in ("private_key", "aws_key")
    ],
    "gateway.moderation.rules.rules.holds_phrase": lambda text: holds_phrase(text, ["aaaaaaab", "gur gur"]),
    "gateway.moderation.rules.rules.places_by_rules": lambda text: places_by_rules(
        text, frozenset(rule.group for rule in RULES)
    ),
    "gateway.shadow.judging.are_same": lambda text: judging.are_same(text, f"{text}a"),
    "gateway.shadow.judging.verdict_of": lambda text: judging.verdict_of(text, small_first=True),
    "gpu_backend.server.requests.checks.check_chat": lambda request: checks.check_chat(request, NO_EXTENSIONS),
    "gpu_backend.server.requests.checks.check_completion": lambda request: checks.check_completion(
        request, NO_EXTENSIONS
    ),
    "gpu_backend.server.requests.checks.check_tokens": lambda request: checks.check_tokens(
        request, NO_EXTENSIONS, 1000
    ),
    "gpu_backend.server.requests.structured.grammar_of": lambda request: structured.grammar_of(request, NO_EXTENSIONS),
}
# What is measured by a test of its own, or reads nothing long.
ELSEWHERE = {
    "protocol.decoding.decode": "test_decoding",
    "protocol.decoding.decode_with_extra": "test_decoding",
    "protocol.decoding.decode_with_unread": "test_decoding",
    "gateway.http.routes.batch.decode_requests": "measured as decode_batch",
    "gpu_backend.server.requests.bodies.read_body": "test_decoding",
    "gateway.upstreams.openai.replies.read_whole": "test_a_format",
    "gateway.upstreams.openai.request.told_format": "reads one word of a request",
    "gateway.upstreams.gemini.replies.read_content": "test_a_format",
    "gateway.upstreams.bedrock.signing.region_of": "reads what the configuration says",
    "gateway.upstreams.bedrock.signing.find_credentials": "reads the name of a profile, which the configuration says",
    "gateway.upstreams.bedrock.signing.signed": "signs what was built, by botocore: a hash of it",
    "gateway.upstreams.gemini.wire_format.read_embeddings": "test_a_format",
    "gateway.shadow.judging.judge_request": "shows so many characters of each",
    "gateway.shadow.judging.longest_judge_request": "shows so many characters of each",
    "gpu_backend.server.requests.tools.read_tools": "takes 128 tools, whose grammar is bounded",
    "gpu_backend.server.requests.bodies.sampling_of": "reads numbers",
    "router.prompt_size.bounds.limit_within": "reads numbers, once the prompt is measured",
    "router.prompt_size.bounds.with_output_limit": "puts a number in",
    "router.prompt_size.bounds.worthwhile_limit": "reads numbers",
    "router.prompt_size.bounds.requests_made": "reads numbers",
    "router.learning.unpacked": "reads what a worker packed, 17 kB",
    "router.choose.choose_route": "measures by needs_of",
    "router.choose.permitted_name": "reads a name",
    "router.prompt_size.pictures.picture_tokens_most": "reads a name of the catalogue",
    "router.prompt_size.token_counts.counter_of": "reads what an operator says",
    "router.sampling.route_with_large": "reads a name of the catalogue",
    "protocol.errors.invalid_value": "writes a refusal",
    "protocol.errors.invalid_param": "writes a refusal",
    "protocol.errors.missing_param": "writes a refusal",
    "protocol.errors.not_supported": "writes a refusal",
    "gateway.http.exchange.read_whole": "reads twenty digits",
    "gateway.batch.results.error_of": "writes an error",
    "gateway.upstreams.openai.parts.made_up_id": "reads 200 characters",
    "gateway.moderation.rules.genuine.is_assigned": "reads what its rule found, which is short",
    "gateway.moderation.rules.genuine.is_bearer": "reads what its rule found, which is short",
    "gateway.dialects.table.errors_for": "reads the beginning of a path",
    "gateway.outbox.signing.signed_headers": "signs what the house writes",
}


EVERY = 2  # which of the shapes a work is given; in a soak all


def some(given: Mapping[str, T], name: str) -> dict[str, T]:
    """Return every second shape for the work of this name; each shape is had by about every second work."""
    turn = sum(name.encode()) % max(1, min(EVERY, len(given)))
    return {shape: of for place, (shape, of) in enumerate(given.items()) if place % EVERY == turn}


def check(name: str, work_on: Callable[[int], Work], last: int = LAST) -> list[str]:
    """Return the name, with what was measured, where work is not linear."""
    found = growth_of(work_on, last)
    if found.is_linear:
        return []
    return [f"{name}: {found.apart:.4f} s for four times {found.size}, {found.whole:.4f} s for as much at once"]


def done(function: Callable[[Any], object], given: Any) -> Work:
    """Return the work of a function, to the last of what it yields; what it refuses is read, too."""

    def work() -> None:
        try:
            said = function(given)
            if isinstance(said, Iterator):
                deque(said, maxlen=0)
        except REFUSALS:
            pass

    return work


def shapes_of(kind: type) -> Mapping[str, Callable[[int], Any]]:
    """Return what a function is given that takes this, of any size."""
    if kind is str:
        return {name: partial(repeated, unit) for name, unit in texts().items()}
    if kind is bytes:
        return shapes.upstream_bodies() | {name: partial(_encoded, unit) for name, unit in texts().items()}
    of_requests: dict[type, Mapping[str, Callable[[int], Any]]] = {
        ChatRequest: shapes.chats(),
        CompletionRequest: shapes.completions(),
        EmbeddingRequest: shapes.embeddings(),
        RerankRequest: shapes.reranks(),
        ImageRequest: shapes.images(),
        SpeechRequest: shapes.speech(),
        TranscriptionRequest: shapes.transcriptions(),
        MessagesRequest: shapes.messages(),
        ResponsesRequest: shapes.items(),
        ChatReply: shapes.replies(),
    }
    return of_requests.get(kind, {})


def _encoded(unit: str, size: int) -> bytes:
    return repeated(unit, size).encode()


FUNCTIONS = functions()
MEASURED = {name: ARRANGED.get(name, function) for name, (function, _, _) in FUNCTIONS.items() if name not in ELSEWHERE}


def test_everything_that_reads_what_others_send_is_measured() -> None:
    """A function that needs more than what was sent says what else, or which test measures it."""
    needing_more = {name for name, (_, _, is_ready) in FUNCTIONS.items() if not is_ready}
    unknown = needing_more - ARRANGED.keys() - ELSEWHERE.keys()
    gone = (ARRANGED.keys() | ELSEWHERE.keys()) - FUNCTIONS.keys()

    assert not unknown, f"add to ARRANGED or ELSEWHERE: {sorted(unknown)}"
    assert not gone, f"no longer there: {sorted(gone)}"
    assert len(MEASURED) > 80


@pytest.mark.parametrize("name", MEASURED)
def test_a_function_takes_time_in_proportion_to_what_it_reads(name: str) -> None:
    """Texts of one sign, without blanks, of near matches; conversations of many messages, parts, calls and tools."""
    wrong: list[str] = []
    for kind in FUNCTIONS[name][1]:
        last = LAST if kind in (str, bytes) else MOST_MESSAGES
        for shape in some(_known_shapes(kind), name):
            wrong += check(
                shape, lambda size, kind=kind, shape=shape: done(MEASURED[name], _given(kind, shape, size)), last
            )

    assert not wrong


_known_shapes = cache(shapes_of)


@cache
def _given(kind: type, shape: str, size: int) -> Any:
    """Return what functions are given, made once for all of them: no request changes."""
    return _known_shapes(kind)[shape](size)


@cache
def _patterns() -> dict[str, tuple[re.Pattern[Any], frozenset[str]]]:
    rules = {f"RULES[{n}] {rule.name}": (rule.pattern, frozenset({"finditer"})) for n, rule in enumerate(RULES)}
    return patterns() | rules


@pytest.mark.parametrize("name", _patterns())
def test_a_pattern_takes_time_in_proportion_to_the_text(name: str) -> None:
    """Near matches of itself, again and again, in every way in which it is used: nothing is read twice."""
    pattern, ways = _patterns()[name]
    nearly = near_matches(pattern)
    wrong: list[str] = []
    for unit in (*nearly, *(f"{near} " for near in nearly), *'a0 "\\-.<'):
        for way in sorted(ways):
            wrong += check(f"{way} in {unit!r}", lambda size, unit=unit, way=way: _matching(pattern, way, unit, size))

    assert not wrong


def _matching(pattern: re.Pattern[Any], way: str, unit: str, size: int) -> Work:
    text: Any = repeated(unit, size)
    if isinstance(pattern.pattern, bytes):
        text = text.encode("latin-1", "replace")
    if way == "sub":
        return partial(pattern.sub, text[:0], text)
    return done(getattr(pattern, way), text)


def test_what_a_rule_finds_is_shorter_than_what_two_slices_share() -> None:
    """Else what stands across the end of a slice would be found in neither."""
    longest = {rule.name: _longest(rule.pattern) for rule in RULES}

    assert {name: size for name, size in longest.items() if size > OVERLAP} == {}


def _longest(pattern: re.Pattern[str]) -> int:
    from re import _parser  # type: ignore[attr-defined]

    return int(_parser.parse(pattern.pattern, pattern.flags).getwidth()[1])


@pytest.mark.parametrize("kind", sorted(request_types(), key=str), ids=lambda kind: kind.__name__)
def test_decoding_takes_time_in_proportion_to_the_body(kind: type) -> None:
    """Every type that a route reads, from sound bodies and from broken ones."""
    wrong: list[str] = []
    for shape, of in some(shapes.bodies(), kind.__name__).items():
        wrong += check(shape, lambda size, of=of: done(lambda body: decode_with_unread(body, kind), of(size)))

    assert not wrong


def test_counting_values_takes_no_more_memory_than_the_body() -> None:
    """Nothing is kept of the strings that are passed over."""
    body = b'["' + b'\\"' * 60_000 + b'"' + b",[" * MAX_VALUES
    tracemalloc.start()
    try:
        assert has_more_values(body, MAX_VALUES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2 * len(body)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_any_answer_in_proportion_to_its_length(name: str) -> None:
    """Whole replies and errors, of whatever an upstream may send."""
    wire = FORMATS[name]
    chat, completion = ChatRequest(model="m", messages=()), CompletionRequest(model="m", prompt="a")
    embedding = shapes.embeddings()["one long text"](1)
    rerank, image = shapes.reranks()["documents"](1), shapes.images()["one long prompt"](1)
    wrong: list[str] = []
    for shape, of in shapes.upstream_bodies().items():
        for read in [partial(wire.read_reply, request) for request in (chat, completion, embedding, rerank, image)]:
            wrong += check(shape, lambda size, of=of, read=read: done(read, of(size)))
        wrong += check(f"error: {shape}", lambda size, of=of: done(partial(wire.read_error, 400, {}), of(size)))

    assert not wrong


def _fed(reader: Any, pieces: Iterable[Any]) -> None:
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.finish()
    except (*REFUSALS, AttributeError):
        pass


def _pieces(given: Any, length: int) -> list[Any]:
    return [given[start : start + length] for start in range(0, len(given), length)]


def _read_call(text: str) -> CallText:
    call = CallText(["f"])
    for character in '{"name": "f", "arguments": ' + text:
        if call.is_done or call.is_bad:
            break
        call.feed(character)
    return call


async def _take_lines(body: bytes) -> int:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in _pieces(body, 1000):
            yield piece

    intake = Intake("/v1/chat/completions")
    async for line in read_lines(chunks(), intake):
        intake.line(line)
    return intake.count


def _parse_form(body: bytes) -> None:
    with PushMultipartParser("b", max_segment_count=16) as parser:
        for piece in _pieces(body, 1000):
            deque(parser.parse(piece), maxlen=0)


CALLED = f"{harmony.CALL}{harmony.DIGITS[6] * 2}{harmony.ARGUMENTS}"  # f
CALL = '<tool_call>{"name": "f", "arguments": {"a": "'


def _writer(make: Callable[[], Any]) -> Callable[[list[Any]], object]:
    def write(events: list[Any]) -> None:
        writer = make()
        for event in events:
            writer.pieces(REPLY, [event])

    return write


def _collected(events: list[Any]) -> object:
    collector = Collector(ChatRequest(model="m", messages=()))
    for event in events[:-2]:
        collector.add(event)
    return collector.reply()


# Readers by the place of their class: the kind of what they are given, and what is done with it.
READERS: dict[str, tuple[str, list[Callable[[Any], object]]]] = {
    "protocol.sse.EventReader": (
        "stream",
        [lambda said: _fed(EventReader(), _pieces(said, 7)), lambda said: _fed(EventReader(), [said])],
    ),
    "gateway.upstreams.openai.events.OpenAIEvents": (
        "stream",
        [lambda said: _fed(OpenAIEvents(), _pieces(said, 99)), lambda said: _fed(OpenAIEvents(), [said])],
    ),
    "gateway.upstreams.anthropic.events.AnthropicEvents": (
        "stream",
        [lambda said: _fed(AnthropicEvents(), _pieces(said, 99)), lambda said: _fed(AnthropicEvents(), [said])],
    ),
    "gateway.upstreams.gemini.events.GeminiEvents": (
        "stream",
        [lambda said: _fed(GeminiEvents(), _pieces(said, 99)), lambda said: _fed(GeminiEvents(), [said])],
    ),
    "gateway.upstreams.responses.replies.ResponsesEvents": (
        "stream",
        [lambda said: _fed(ResponsesEvents(), _pieces(said, 99)), lambda said: _fed(ResponsesEvents(), [said])],
    ),
    "gpu_backend.server.checkpoint.tokens.StopStrings": (
        "text",
        [
            lambda text: _fed(StopStrings(["ab"]), [text]),
            lambda text: _fed(StopStrings([f"{text}\0"]), _pieces(text, 4)),  # it may begin at every character
            lambda text: _fed(StopStrings([f"{text}\0"]), [text, "\1"]),  # and has not, but for its last one
        ],
    ),
    "gpu_backend.server.checkpoint.tool_call_text.CallText": (
        "text",
        [_read_call, lambda text: _read_call(f'{{"a": "{text}')],
    ),
    "gpu_backend.server.checkpoint.tool_calls.ToolCallReader": (
        "text",
        [
            lambda text: _fed(ToolCallReader(ToolStyle.HERMES, ["f"], str), _pieces(text, 4)),
            lambda text: _fed(ToolCallReader(ToolStyle.LLAMA, ["f"], str), [text]),
            lambda text: _fed(ToolCallReader(ToolStyle.HERMES, ["f"], str), [CALL + text]),
        ],
    ),
    "gpu_backend.server.checkpoint.harmony.HarmonyReader": (
        "text",
        [
            lambda text: _fed(HarmonyReader(["f"], str), _pieces(text, 4)),
            lambda text: _fed(HarmonyReader(["f"], str), [text.replace("a", f"{harmony.THOUGHTS}a{harmony.ANSWER}b")]),
            lambda text: _fed(HarmonyReader(["f"], str), [CALLED + text]),
        ],
    ),
    "gateway.batch.intake.Intake": ("bytes", [lambda body: asyncio.run(_take_lines(body))]),
    "gateway.dialects.messages_writer.MessagesWriter": (
        "events",
        [_writer(lambda: MessagesWriter(ASKED, "0-1", 0))],
    ),
    "gateway.dialects.responses_writer.ResponsesWriter": (
        "events",
        [_writer(lambda: ResponsesWriter(ResponsesRequest(model="m", input="a"), "0-1", 0))],
    ),
    "gateway.dialects.media.SpeechWriter": (
        "events",
        [_writer(lambda: SpeechWriter(SpeechRequest(model="m", input="a", voice="b", stream_format="sse"), "0-1", 0))],
    ),
    "gateway.dialects.media.TranscriptionWriter": (
        "events",
        [_writer(lambda: TranscriptionWriter(shapes.transcriptions()["one long prompt"](1), "0-1", 0))],
    ),
    "gateway.upstreams.openai.media_events.PictureEvents": (
        "stream",
        [lambda said: _fed(PictureEvents(), _pieces(said, 99)), lambda said: _fed(PictureEvents(), [said])],
    ),
    "gateway.upstreams.openai.media_events.TranscriptionEvents": (
        "stream",
        [lambda said: _fed(TranscriptionEvents(), _pieces(said, 99)), lambda said: _fed(TranscriptionEvents(), [said])],
    ),
    "gateway.upstreams.openai.speech.SpeechEvents": (
        "stream",
        [lambda said: _fed(SpeechEvents(), _pieces(said, 99)), lambda said: _fed(SpeechEvents(), [b"data: " + said])],
    ),
    "gateway.dialects.chat.ChatWriter": (
        "events",
        [_writer(lambda: ChatWriter(ChatRequest(model="m", messages=()), "0-1", 0))],
    ),
    "gateway.dialects.completions.CompletionWriter": (
        "events",
        [_writer(lambda: CompletionWriter(CompletionRequest(model="m", prompt="a"), "0-1", 0))],
    ),
}
MORE_READERS: dict[str, tuple[str, list[Callable[[Any], object]]]] = {
    "multipart.PushMultipartParser": ("form", [_parse_form]),
    "gateway.calls.accumulate.Collector": ("events", [_collected]),
    "gateway.dialects.parts.recordings.seconds_of": ("bytes", [seconds_of]),
}
BESIDE = {
    "gpu_backend.server.checkpoint.tokens.Detokenizer": "keeps one unfinished character",
    "gpu_backend.server.checkpoint.harmony.HarmonyDetokenizer": "keeps a header's tokens until it ends, each once",
    "gpu_backend.server.generation.Generation": "passes on what Reply writes",
    "gateway.inference.reply.Reply": "passes on what writers write",
    "gateway.calls.parallel_replies.ParallelReplies": "passes on what the readers of its replies read",
    "gateway.http.reply_response.RecordingWriter": "keeps what a writer wrote",
    "gateway.calls.hooks.ReplyHook": "does nothing",
    "gateway.moderation.output_guard.OutputGuard": "joins what it has judged in one go, some thousand characters",
    "gateway.moderation.output_watch.OutputWatch": "test_the_content_policy",
    "gateway.moderation.output_redaction.OutputRedaction": "test_the_content_policy",
    "gateway.dialects.embeddings.EmbeddingWriter": "has no stream",
    "gateway.dialects.embeddings.RerankWriter": "has no stream",
    "gateway.dialects.endpoint.WholeWriter": "has no stream",
    "gateway.dialects.media.ImageWriter": "has no stream",
    "gateway.dialects.responses_writer.CompactionWriter": "has no stream",
    "gateway.upstreams.openai.batches.OpenAIBatches": "reads a line by itself",
    "gateway.upstreams.anthropic.batches.AnthropicBatches": "reads a line by itself",
    "gateway.upstreams.gemini.batches.GeminiBatches": "reads a document at once",
    "gateway.upstreams.bedrock.events.BedrockEvents": "has AnthropicEvents read what EventStreamDecoder hands it",
    "gateway.upstreams.bedrock.events.EventStreamDecoder": "goes through each message once, when it is whole",
    "gateway.upstreams.provider_batches.ProviderBatches": "goes through each piece for its lines once",
    "gateway.upstreams.client.Unpacker": "unpacks all of a piece before it takes the next",
    "gateway.shadow.sampler.Watch": "drops what is longer than it keeps",
    "gateway.cache.cached_answers._Keeper": "drops what is longer than it keeps",
    "gateway.moderation.tied_ids.TiedIds": "changes one delta by itself; of a response one whole one, at its end",
}


def test_every_reader_and_writer_is_measured() -> None:
    """What takes a reply in piece by piece, or writes it so, is known here, or why it need not be."""
    found = readers().keys()

    assert found - READERS.keys() - BESIDE.keys() == set()
    assert (READERS.keys() | BESIDE.keys()) - found == set()


@pytest.mark.parametrize("name", [*READERS, *MORE_READERS])
def test_a_reader_takes_time_in_proportion_to_all_that_came(name: str) -> None:
    """However it is cut: what waits for its end is not gone through with each piece."""
    kind, ways = {**READERS, **MORE_READERS}[name]
    wrong: list[str] = []
    for shape, of in some(_streams_for(kind), name).items():
        for way in ways:
            wrong += check(shape, lambda size, of=of, way=way: done(way, of(size)), MOST_MESSAGES)

    assert not wrong


def _streams_for(kind: str) -> Mapping[str, Callable[[int], Any]]:
    match kind:
        case "events":
            return shapes.streams()
        case "stream":
            return {**shapes.upstream_streams(), **shapes.bodies()}
        case "form":
            return {name: partial(_stats, unit) for name, unit in texts().items()} | {
                "dashes": lambda size: _stats("\r\n--", size),
                "parts": lambda size: b"--b\r\n\r\na\r\n" * (size // 10),
                "a long head": lambda size: b"--b\r\n" + b"a: b\r\n" * (size // 6),
            }
    return shapes_of(str if kind == "text" else bytes)


def _stats(unit: str, size: int) -> bytes:
    head = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + repeated(unit, size).encode() + b"\r\n--b--\r\n"


@pytest.mark.parametrize("source", [*FAMILIES.values(), RAISING], ids=[*FAMILIES, "one that raises"])
def test_a_template_takes_time_in_proportion_to_the_conversation(source: str) -> None:
    """Rendered, refused, or refused and rendered again with one call a turn."""
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    wrong: list[str] = []
    for shape, of in some(shapes.chats(), source).items():
        wrong += check(
            shape,
            lambda size, of=of: done(lambda asked: template.render(asked.messages, asked.tools or ()), of(size)),
            MOST_MESSAGES,
        )

    assert not wrong


def test_the_content_policy_takes_time_in_proportion_to_what_is_said() -> None:
    """Rules and classifiers, on requests and on answers, whole and streamed; nothing is remembered from before."""
    loop = asyncio.new_event_loop()
    guarding = loop.run_until_complete(_guarding())

    def work(way: Callable[[Guarding, Any], Coroutine[Any, Any, None]], given: Any) -> Work:
        def run() -> None:
            guarding.moderator.reader.forget()
            loop.run_until_complete(way(guarding, given))

        return run

    wrong: list[str] = []
    try:
        for shape, of in some(shapes.chats(), "rules").items():
            wrong += check(f"rules: {shape}", lambda size, of=of: work(_by_rules, of(size)), MOST_SAID)
        for shape, unit in texts().items():
            for way in (_judged, _watched, _streamed):
                name = f"{way.__name__}: {shape}"
                wrong += check(name, lambda size, way=way, unit=unit: work(way, repeated(unit, size)), MOST_SAID)
        for shape, unit in some(texts(), "redacted").items():
            wrong += check(
                f"redacted: {shape}", lambda size, unit=unit: work(_redacted, repeated(unit, size)), MOST_SAID
            )
    finally:
        loop.run_until_complete(guarding.close())
        loop.close()

    assert not wrong


MOST_SAID = 16_000  # characters: several slices


async def _guarding() -> Guarding:
    return Guarding(Safety(input="flag", output="block"))


async def _by_rules(guarding: Guarding, asked: ChatRequest) -> None:
    await guarding.moderator.reader.find_by_form(asked)


async def _judged(guarding: Guarding, text: str) -> None:
    await guarding.moderator.reader.judge([text])
    await guarding.moderator.reader.judge_told([text])


async def _watched(guarding: Guarding, text: str) -> None:
    with suppress(ServiceError):
        await _watch_of(guarding).whole(ChatReply(choices=(shapes.choice(0, content=text),)))


async def _streamed(guarding: Guarding, text: str) -> None:
    watch = _watch_of(guarding)
    with suppress(ServiceError):
        for piece in _pieces(text, 4):
            watch.delta(Delta(text=piece))


async def _redacted(guarding: Guarding, text: str) -> None:
    redaction = OutputRedaction(guarding.moderator, guarding.call(), Redactor(frozenset(REDACTABLE), None))
    for piece in _pieces(text, 4):
        redaction.delta(Delta(text=piece))
    redaction.rest()


def _watch_of(guarding: Guarding) -> OutputWatch:
    call = guarding.call()
    policy = guarding.moderator.policy_for(call)
    assert policy is not None
    return OutputWatch(guarding.moderator, call, policy)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_of_it_is_linear_in_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, each work with all shapes of what it is given."""
    monkeypatch.setitem(globals(), "EVERY", 1)
    for name in MEASURED:
        test_a_function_takes_time_in_proportion_to_what_it_reads(name)
    for kind in request_types():
        test_decoding_takes_time_in_proportion_to_the_body(kind)
    for name in (*READERS, *MORE_READERS):
        test_a_reader_takes_time_in_proportion_to_all_that_came(name)
    for source in (*FAMILIES.values(), RAISING):
        test_a_template_takes_time_in_proportion_to_the_conversation(source)
    test_the_content_policy_takes_time_in_proportion_to_what_is_said()
