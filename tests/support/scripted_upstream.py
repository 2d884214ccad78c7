# An upstream that plays OpenAI, Azure OpenAI, Anthropic and Gemini over real HTTP: strictly in what it takes,
# deterministically in what it answers, and with every way of going wrong on demand. It records what it was asked, and
# when clients left.
#
#   with ScriptedUpstream() as upstream:
#       upstream.script("reset,after=3", model="gpt-4o", times=1)
#       ...                                     # send requests to upstream.url with the key "sk-upstream"
#       assert upstream.violations == []
#
# By hand: python -m tests.support.scripted_upstream --port 9000 and ask for "gpt-4o:tokens=16,pace=0.02".

from __future__ import annotations

import argparse
import asyncio
import email.utils
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import unquote

from tests.support import anthropic_answers, anthropic_rules, azure_rules, bedrock_answers, gemini_answers, gemini_rules
from tests.support.openai_answers import (
    CREATED,
    ERROR_FRAME,
    answer_chat,
    answer_completion,
    answer_edits,
    answer_embedding,
    answer_images,
    answer_rerank,
    answer_speech,
    answer_written,
    prompt_tokens,
    streamed_pictures,
)
from tests.support.openai_rules import Violation, check_body, check_headers
from tests.support.response_answers import ResponseAnswer
from tests.support.response_rules import Asked, Counted, check_response
from tests.support.upstream_acts import play_pieces, play_stream, play_whole, send_json, spoil
from tests.support.upstream_batches import BatchDesk
from tests.support.upstream_http import HttpConnection, HttpRequest
from tests.support.upstream_prepared import PreparedAnswers
from tests.support.upstream_scripts import NAMED, Fault, Script, Shape, parse_script

MODELS = (
    "gpt-4o",
    "gpt-4o-mini",
    "gpt-3.5-turbo-instruct",
    "text-embedding-3-small",
)


@dataclass
class Seen:
    """One request as it came, and what became of its answer. Times are ``time.monotonic()`` seconds."""

    number: int
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    at: float
    body: dict[str, Any] | None = None  # decoded, once it passed the rules
    script: Script | None = None
    billed: dict[str, Any] | None = None  # the whole answer, in which it says what it bills
    tokens_sent: int = 0
    answered_at: float | None = None  # the last byte was handed over, or the script's fault was played to its end
    closed_at: float | None = None  # the client left before that

    @property
    def closed_after(self) -> float | None:
        """Seconds from the request's arrival to the client's leaving; ``None`` when it stayed to the end."""
        return None if self.closed_at is None else self.closed_at - self.at

    @property
    def api_key(self) -> str:
        """The key that the request carried."""
        own = next(
            (self.headers[name] for name in ("x-api-key", "api-key", "x-goog-api-key") if name in self.headers), None
        )
        return own or self.headers.get("authorization", "").removeprefix("Bearer ")


@dataclass
class _Order:
    script: Script
    model: str | None
    api_key: str | None
    times: int | None


class ScriptedUpstream:
    """One upstream on a loopback port, in a thread and event loop of its own.

    A request is answered by the first of: a script ordered with ``script()``, one behind a colon in the model's name,
    one behind a colon in the API key, the ``default``. ``fast`` answers from prepared bytes, unchecked and unrecorded.
    More requests at once than ``capacity`` get 429.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        default: Script | None = None,
        models: tuple[str, ...] = MODELS,
        fast: bool = False,
        capacity: int | None = None,
    ) -> None:
        self.default = default or Script()
        self.models = models
        self.requests: list[Seen] = []
        self.violations: list[str] = []
        self._port = port
        self._orders: list[_Order] = []
        self._prepared = PreparedAnswers(self.default) if fast else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._is_ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._connections: set[HttpConnection] = set()
        self.batches = BatchDesk(self._answer_line, time.time)
        self.may_answer = threading.Event()  # cleared by a test, it holds back answers that have not begun
        self.may_answer.set()
        self._capacity = capacity
        self._running = 0

    @property
    def url(self) -> str:
        """The base URL as a provider's setting has it."""
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        """The base URL of a provider that speaks Anthropic's dialect."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The port it listens on; known once started."""
        return self._port

    def script(
        self, script: Script | str, *, model: str | None = None, api_key: str | None = None, times: int | None = None
    ) -> None:
        """Answer requests that match by ``script``, a ``times`` number of them or all from now on. Later orders win."""
        order = _Order(parse_script(script) if isinstance(script, str) else script, model, api_key, times)
        self._orders.insert(0, order)

    def forget(self) -> None:
        """Drop the records, the violations and every ordered script."""
        self.requests, self.violations, self._orders = [], [], []
        self.may_answer.set()
        self.batches = BatchDesk(self._answer_line, time.time)

    def start(self) -> Self:
        """Listen; return once requests can come."""
        self._thread = threading.Thread(target=self._run_thread, name="scripted-upstream", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._fault is not None:
            raise self._fault
        return self

    def stop(self) -> None:
        """Close every connection and end the thread."""
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def serve(self) -> None:
        """Serve in the running event loop until cancelled or stopped."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await self._loop.create_server(
            lambda: HttpConnection(self._answer, self._connections), "127.0.0.1", self._port, backlog=2048
        )
        self._port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        try:
            await self._stop.wait()
        finally:
            server.close()
            for connection in list(self._connections):
                connection.drop()
            await asyncio.sleep(0)

    def _run_thread(self) -> None:
        try:
            asyncio.run(self.serve())
        except BaseException as exc:
            self._fault = exc
        finally:
            self._is_ready.set()

    async def _answer(self, request: HttpRequest, connection: HttpConnection) -> None:
        if self._prepared is not None and request.method == "POST":
            await self._prepared.answer(request, connection)
            return
        seen = Seen(len(self.requests), request.method, request.path, request.headers, request.body, time.monotonic())
        self.requests.append(seen)
        self._running += 1
        try:
            await self._answer_seen(seen, connection)
            seen.answered_at = time.monotonic()
        except asyncio.CancelledError:
            seen.closed_at = time.monotonic()
            raise
        finally:
            self._running -= 1

    async def _answer_seen(self, seen: Seen, connection: HttpConnection) -> None:
        path, dialect = _dialect_of(seen.path)
        if seen.path == "/v1/models" and "anthropic-version" in seen.headers:
            dialect = ANTHROPIC
        headers = dialect.headers(seen.number)
        try:
            if path == azure_rules.TOKENS:
                send_json(connection, 200, {}, azure_rules.give_token(seen.raw, seen.number))
                return
            if self.batches.takes(seen.path):
                self._serve_batches(seen, connection, headers)
                return
            dialect.check_headers(seen.headers, seen.method == "POST")
            if seen.method == "GET":
                send_json(connection, 200, headers, self._models_page(seen.path))
                return
            if path not in dialect.answers or seen.method != "POST":
                raise Violation(f"Invalid URL ({seen.method} {seen.path})", status=404)
            seen.body = dialect.check_body(path, seen.raw, seen.headers)
            model = MODEL_IN[dialect](seen.path) if dialect in MODEL_IN else seen.body["model"]
            self._know(model)
        except Violation as exc:
            self.violations.append(f"{seen.method} {seen.path}: {exc.message}")
            send_json(connection, exc.status, headers, dialect.refusal(exc))
            return
        seen.script = script = self._script_for(model, seen.api_key)
        if self._capacity is not None and self._running > self._capacity:
            seen.script = script = NAMED["429-seconds"]
        if script.left is not None:
            headers |= limit_headers(script.left, is_anthropic=dialect is ANTHROPIC)
        await asyncio.sleep(script.latency)
        while not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        if script.fault is Fault.HANG_BEFORE_HEADERS:
            await asyncio.Event().wait()
        elif script.fault is Fault.RESET_BEFORE_HEADERS:
            connection.reset()
        elif script.unknown is not None and script.unknown in seen.body:
            status, body = refusal_of(script.unknown, seen.body, script.says_so)
            send_json(connection, status, headers, body)
        elif script.status != 200:
            waits = {} if dialect is GEMINI else retry_headers(script)  # which says it in the error
            send_json(connection, script.status, {**headers, **waits}, dialect.error(script))
        elif path == GEMINI_VECTORS:
            send_json(connection, 200, headers, gemini_answers.answer_embeds(seen.body))
        elif path in COUNTS:
            send_json(connection, 200, headers, COUNTS[path](seen.body))
        elif path == SPEECH:
            await play_pieces(connection, headers, answer_speech(seen.body, script), script)
        elif path in WRITTEN:
            said = answer_written(seen.body, script)
            play = play_pieces if isinstance(said, list) else play_whole
            await play(connection, headers, said, script)  # type: ignore[operator]
        elif path in WORDLESS:
            is_error = script.fault in (Fault.ERROR_FRAME, Fault.ERROR_FIRST)
            answer = WORDLESS[path](seen.body, script)
            if seen.body.get("stream") and "size" in answer:  # a grok has no streams
                await play_pieces(connection, headers, streamed_pictures(seen.body, answer, script), script)
            else:
                await play_whole(connection, headers, ERROR_FRAME if is_error else answer, script)
        else:
            answer = dialect.answers[path](seen.body, script, seen.number)
            seen.billed = answer.whole()
            await self._speak(
                seen, answer, script, headers, connection, streams=path in (GEMINI_STREAM, CONVERSE_STREAM)
            )

    async def _speak(
        self,
        seen: Seen,
        answer: Any,
        script: Script,
        headers: Mapping[str, str],
        connection: HttpConnection,
        *,
        streams: bool,
    ) -> None:
        assert seen.body is not None

        def count_token() -> None:
            seen.tokens_sent += 1

        if (streams or seen.body.get("stream")) and script.fault is not Fault.NO_STREAM:
            await play_stream(connection, headers, answer, script, count_token)
        else:
            tokens = max((len(spoken.tokens) for spoken in answer.spoken), default=0)
            await asyncio.sleep(script.first_token + script.pace * tokens)
            await play_whole(connection, headers, spoil(answer, script), script)

    def _serve_batches(self, seen: Seen, connection: HttpConnection, headers: Mapping[str, str]) -> None:
        try:
            status, body = self.batches.serve(seen.method, seen.path, seen.headers, seen.raw)
        except ConnectionResetError as exc:
            connection.start(200, headers, 2 * len(exc.args[0]) + 2)
            connection.write(exc.args[0])
            connection.drop()
            return
        connection.start(status, {"content-type": "application/json", **headers}, len(body))
        connection.write(body)

    def _answer_line(self, path: str, raw: bytes, dialect: str) -> tuple[int, dict[str, Any]]:
        """Return how a line of a batch is answered: as the same plain call would be."""
        if dialect == "gemini":
            body, model = gemini_rules.check_body(raw, "gemini-3-flash"), path.partition(":")[2]
            answer: Callable[..., Any] = GEMINI.answers[GEMINI_WHOLE]
        else:
            found = ANTHROPIC if dialect == "anthropic" else OPENAI
            path = path if path.startswith("/v1/") else f"/v1{path}"
            body = found.check_body(path, raw, {})
            model, answer = body["model"], found.answers[path]
        if body.get("stream"):
            raise Violation("Lines of a batch are not streamed.")
        self._know(model)
        script = self._script_for(model, "")
        if path in WORDLESS:
            return script.status, answer(body, script)
        return script.status, spoil(answer(body, script, len(self.requests)), script)

    def _know(self, model: str) -> None:
        if model.partition(":")[0] not in self.models:
            message = f"The model `{model}` does not exist or you do not have access to it."
            raise Violation(message, code="model_not_found", status=404)

    def _models_page(self, path: str) -> dict[str, object]:
        known = {
            name: {"id": name, "object": "model", "created": CREATED, "owned_by": "openai"} for name in self.models
        }
        if path in ("/v1/models", "/v1beta/models"):
            return {"object": "list", "data": list(known.values())}
        name = path.removeprefix("/v1/models/")
        if name == path:
            raise Violation(f"Invalid URL (GET {path})", status=404)
        if name not in known:
            raise Violation(f"The model '{name}' does not exist", "model", "model_not_found", 404)
        return known[name]

    def _script_for(self, model: str, api_key: str) -> Script:
        for order in self._orders:
            matches = order.model in (None, model) and order.api_key in (None, api_key)
            if matches and order.times != 0:
                if order.times is not None:
                    order.times -= 1
                return order.script
        for name in (model, api_key):
            if ":" in name:
                return parse_script(name.partition(":")[2])
        return self.default


def house_headers(number: int) -> dict[str, str]:
    """Return the headers that every answer of OpenAI's carries."""
    return {
        "x-request-id": f"req_scripted{number:08}",
        "openai-processing-ms": "7",
        "openai-version": "2020-10-01",
        "openai-organization": "scripted",
        "x-ratelimit-limit-requests": "10000",
        "x-ratelimit-remaining-requests": "9999",
        "x-ratelimit-reset-requests": "6ms",
        "x-ratelimit-limit-tokens": "2000000",
        "x-ratelimit-remaining-tokens": "1999000",
        "x-ratelimit-reset-tokens": "1m0.5s",
        "set-cookie": "__cf_bm=scripted; path=/; HttpOnly",  # a client that sends it back is at fault
    }


def anthropic_headers(number: int) -> dict[str, str]:
    """Return the headers that every answer of Anthropic's carries."""
    return {
        "request-id": f"req_scripted{number:08}",
        "anthropic-ratelimit-requests-limit": "4000",
        "anthropic-ratelimit-requests-remaining": "3999",
        "anthropic-ratelimit-requests-reset": "2026-04-05T14:00:00Z",
        "set-cookie": "_cfuvid=scripted; path=/; HttpOnly",
    }


def limit_headers(left: str, *, is_anthropic: bool) -> dict[str, str]:
    """Return what is said to be left of the requests: "3/60/30" are 3 of 60, all of them again in 30 seconds."""
    remaining, limit, seconds = left.split("/")
    if not is_anthropic:
        said = {"remaining": remaining, "limit": limit, "reset": f"{seconds}s"}
        return {f"x-ratelimit-{name}-requests": value for name, value in said.items()}
    moment = datetime.fromtimestamp(time.time() + float(seconds), UTC)
    said = {"remaining": remaining, "limit": limit, "reset": moment.isoformat()}
    return {f"anthropic-ratelimit-requests-{name}": value for name, value in said.items()}


def retry_headers(script: Script) -> dict[str, str]:
    """Return how long to wait, in the ways that the script wants it said."""
    headers = {}
    if script.retry_after is not None:
        value = script.retry_after
        if value.startswith("date:"):
            value = email.utils.formatdate(time.time() + float(value.removeprefix("date:")), usegmt=True)
        headers["retry-after"] = value
    if script.retry_after_ms is not None:
        headers["retry-after-ms"] = script.retry_after_ms
    return headers


def refusal_of(field: str, asked: Mapping[str, Any], shape: Shape) -> tuple[int, dict[str, object]]:
    """Return the status and body that refuse a field as unknown."""
    if shape is Shape.PYDANTIC:
        fault = {"type": "extra_forbidden", "loc": ["body", field], "msg": "Extra inputs are not permitted"}
        return 422, {"detail": [{**fault, "input": asked[field]}]}
    if shape is Shape.WORDS:
        words = f"Unrecognized request argument supplied: {field} (asked by {asked.get('user')})"
        return 400, Violation(words).body()
    return 400, Violation(f"Unknown parameter: '{field}'.", field, "unknown_parameter").body()


def error_body(script: Script) -> dict[str, object]:
    """Return OpenAI's error object for a scripted failure."""
    return {"error": {"message": script.message, "type": script.type, "param": None, "code": script.code}}


@dataclass(frozen=True, eq=False)
class Dialect:
    """What tells the APIs apart: their rules, how they put an error, and what they answer where."""

    headers: Callable[[int], dict[str, str]]
    check_headers: Callable[[dict[str, str], bool], None]
    check_body: Callable[[str, bytes, dict[str, str]], dict[str, Any]]
    refusal: Callable[[Violation], dict[str, object]]
    error: Callable[[Script], dict[str, object]]
    answers: Mapping[str, Callable[..., Any]]


MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
MESSAGE_ANSWERS = {MESSAGES: anthropic_answers.answer_message, COUNT: anthropic_answers.answer_message}
ANSWERS: dict[str, Callable[..., Any]] = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
}
WORDLESS = {
    "/v1/embeddings": answer_embedding,
    "/v1/rerank": answer_rerank,
    "/v1/images/generations": answer_images,
    "/v1/images/edits": answer_edits,
}
SPEECH = "/v1/audio/speech"
WRITTEN = ("/v1/audio/transcriptions", "/v1/audio/translations")
RESPONSES = "/v1/responses"
TOKENIZE, INPUT_TOKENS = "/tokenize", f"{RESPONSES}/input_tokens"  # an engine's, and OpenAI's, which count prompts


def _counted(answer: ResponseAnswer) -> dict[str, int]:
    return {"input_tokens": answer.whole()["usage"]["input_tokens"]}


COUNTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    COUNT: lambda asked: {"input_tokens": anthropic_answers.count_prompt(asked)},
    TOKENIZE: lambda asked: {"count": prompt_tokens(asked), "tokens": [0] * prompt_tokens(asked)},
    INPUT_TOKENS: lambda asked: {"object": "response.input_tokens", **_counted(ResponseAnswer(asked, Script(), 0))},
}
ANSWERS |= dict.fromkeys((TOKENIZE, INPUT_TOKENS), answer_chat)
ANSWERS[RESPONSES] = ResponseAnswer
ANSWERS |= WORDLESS | {SPEECH: answer_speech} | dict.fromkeys(WRITTEN, answer_written)
OPENAI = Dialect(
    headers=house_headers,
    check_headers=check_headers,
    check_body=lambda path, raw, headers: (
        json.loads(raw)
        if path == TOKENIZE
        else check_response(raw, Counted if path == INPUT_TOKENS else Asked)
        if path.startswith(RESPONSES)
        else check_body(path, raw, headers.get("content-type", ""))
    ),
    refusal=Violation.body,
    error=error_body,
    answers=ANSWERS,
)
AZURE = Dialect(
    headers=lambda number: {"apim-request-id": f"scripted-{number}", "x-ms-region": "Nowhere"},
    check_headers=lambda headers, _: azure_rules.check_headers(headers),
    check_body=lambda path, raw, _: check_body(path, raw),
    refusal=Violation.body,
    error=azure_rules.error_body,
    answers=ANSWERS | {"/v1/chat/completions": azure_rules.azure_chat, "/v1/completions": azure_rules.azure_completion},
)
GEMINI_WHOLE, GEMINI_STREAM = ":generateContent", ":streamGenerateContent?alt=sse"
GEMINI_VECTORS = ":batchEmbedContents"
GEMINI = Dialect(
    headers=lambda _: {"server": "scripted", "vary": "Origin"},
    check_headers=lambda headers, _: gemini_rules.check_headers(headers),
    check_body=lambda path, raw, _: (
        gemini_rules.check_embeds(raw) if path == GEMINI_VECTORS else gemini_rules.check_body(raw, "gemini-3-flash")
    ),
    refusal=lambda exc: gemini_answers.error_body(exc.status, exc.message, exc.code),
    error=lambda script: gemini_answers.error_body(script.status, script.message, script.code, script.retry_after),
    answers=dict.fromkeys(
        (GEMINI_WHOLE, GEMINI_STREAM, GEMINI_VECTORS),
        lambda body, script, number: gemini_answers.answer_content("gemini", body, script, number),
    ),
)
ANTHROPIC = Dialect(
    headers=anthropic_headers,
    check_headers=lambda headers, _: anthropic_rules.check_headers(headers),
    check_body=lambda path, raw, headers: anthropic_rules.check_body(raw, headers, is_count=path == COUNT),
    refusal=lambda exc: anthropic_answers.error_body(exc.status, exc.message, exc.code),
    error=lambda script: anthropic_answers.error_body(script.status, script.message, script.code),
    answers=MESSAGE_ANSWERS,
)


CONVERSE, CONVERSE_STREAM = "converse", "converse-stream"
BEDROCK = Dialect(
    headers=lambda number: {"x-amzn-requestid": f"scripted-{number}"},
    check_headers=lambda headers, _: bedrock_answers.check_headers(headers),
    check_body=lambda path, raw, _: bedrock_answers.check_body(raw),
    refusal=lambda exc: bedrock_answers.error_body(exc.message),
    error=lambda script: bedrock_answers.error_body(script.message),
    answers=dict.fromkeys((CONVERSE, CONVERSE_STREAM), bedrock_answers.answer_converse),
)


def _dialect_of(path: str) -> tuple[str, Dialect]:
    """Return the API that a request asks, and the path as its plain form has it."""
    if (plain := azure_rules.plain_path(path)) is not None:
        return plain, AZURE
    if (found := gemini_rules.PATH.fullmatch(path)) is not None:
        return f":{found[2]}{found[3] or ''}", GEMINI
    if path == "/v1beta/models":
        return path, GEMINI
    if (called := bedrock_answers.PATH.fullmatch(path)) is not None:
        return called[2], BEDROCK
    return path, ANTHROPIC if path.startswith(MESSAGES) else OPENAI


def gemini_model(path: str) -> str:
    """Return the model that a path of Gemini's names."""
    found = gemini_rules.PATH.fullmatch(path)
    assert found is not None
    return unquote(found[1])


MODEL_IN: Mapping[Dialect, Callable[[str], str]] = {GEMINI: gemini_model, BEDROCK: bedrock_answers.model_in}


def main() -> None:
    """Serve until interrupted; print the URL when ready."""
    parser = argparse.ArgumentParser(description="An upstream that plays OpenAI.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", default="", help="the default script, such as tokens=16,pace=0.02")
    parser.add_argument("--capacity", type=int, help="requests at once, beyond which it answers 429")
    parser.add_argument("--fast", action="store_true", help="prepared answers to calls: no checks, no records")
    parser.add_argument("--model", action="append", default=[], help="a further name in the list of models")
    options = parser.parse_args()
    default = parse_script(options.script) if options.script else None
    models = (*MODELS, *options.model)
    upstream = ScriptedUpstream(
        options.port, default=default, models=models, fast=options.fast, capacity=options.capacity
    )
    try:
        import uvloop

        run = uvloop.run
    except ImportError:
        run = asyncio.run

    async def serve() -> None:
        serving = asyncio.create_task(upstream.serve())
        while upstream.port == 0 or upstream._stop is None:
            await asyncio.sleep(0.01)
        print(json.dumps({"url": upstream.url, "api_key": "sk-upstream"}), flush=True)
        await serving

    try:
        run(serve())
    except KeyboardInterrupt:
        print("\n".join(upstream.violations))


if __name__ == "__main__":
    main()
