# What the scripted upstream answers: a function of the request and its script alone, in OpenAI's shapes to the byte.

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.upstream_scripts import Fault, Script, Told

# Some characters take two to four bytes, so that cutting a stream anywhere cuts them, too.
WORDS = (
    "the",
    "gate",
    "opens",
    "at",
    "dawn",
    "counts",
    "every",
    "traveller",
    "naïve",
    "café",
    "東京",
    "river",
    "🚪",
    "stone",
    "bridge",
    "toll",
    "paid",
)

ERROR_FRAME = {"error": {"message": "The server had an error.", "type": "server_error", "param": None, "code": None}}
CREATED = 1_780_000_000  # unix seconds; the same in every answer
EXPIRES = CREATED + 3_600  # unix seconds, until which an answer by voice is known by its id
SOUND_TOKENS = 5  # of a word said aloud


@dataclass(frozen=True)
class Spoken:
    """One choice: its tokens, or its tool calls, and why it ends."""

    index: int
    tokens: list[str]
    finish: str
    is_refusal: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)
    stopped_by: str | None = None
    thought: str | None = None
    voice: str | None = None  # the id of an answer by voice


@dataclass(frozen=True)
class Answer:
    """All that is needed to write one answer, whole or streamed."""

    kind: str  # "chat" or "text"
    request: dict[str, Any]
    id: str
    spoken: list[Spoken]
    usage: dict[str, Any] | None
    tier: str = "default"
    error_frame = ERROR_FRAME
    done = b"data: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        write = self._chat_choice if self.kind == "chat" else self._text_choice
        body = self._frame("chat.completion" if self.kind == "chat" else "text_completion")
        body["choices"] = [write(spoken) for spoken in self.spoken]
        return body if self.usage is None else {**body, "usage": self.usage}

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the chunks of a stream, and for each whether it carries a token. ``[DONE]`` is not among them."""
        if self.kind == "chat":
            for spoken in self.spoken:
                yield self._chunk(spoken.index, {"role": "assistant", "content": "", "refusal": None}), False
        for spoken in self.spoken:
            for piece in _pieces(spoken.thought or ""):
                yield self._chunk(spoken.index, {"reasoning_content": piece}), False
            for place, delta in enumerate(_deltas(spoken)):
                yield self._chunk(spoken.index, delta, logprobs=self._logprobs(spoken, place)), True
        for spoken in self.spoken:
            yield self._chunk(spoken.index, {}, spoken.finish), False
            if spoken.voice is not None:
                yield self._chunk(spoken.index, {"audio": {"expires_at": EXPIRES}}), False
        if self._asks_usage and self.usage is not None:
            yield {**self._frame(self._chunk_object), "choices": [], "usage": self.usage, **self._obfuscation(0)}, False

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether a chunk says why the reply ended. Asked of chunks without a token alone."""
        return bool(chunk["choices"])

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a chunk's token."""
        for choice in chunk["choices"]:
            if choice.get("delta"):
                choice["delta"] = {"content": words}
            elif "text" in choice:
                choice["text"] = words

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""
        for choice in body["choices"]:
            if self.kind == "chat":
                choice["message"] = {**choice["message"], "content": words}
            else:
                choice["text"] = words

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out why a body's replies ended."""
        for choice in body["choices"]:
            choice["finish_reason"] = None

    def _frame(self, name: str) -> dict[str, Any]:
        frame = {"id": self.id, "object": name, "created": CREATED, "model": self.request["model"]}
        return (
            {**frame, "service_tier": self.tier, "system_fingerprint": "fp_scripted"} if self.kind == "chat" else frame
        )

    @property
    def _options(self) -> dict[str, Any]:
        return self.request.get("stream_options") or {}

    @property
    def _asks_usage(self) -> bool:
        return bool(self._options.get("include_usage"))

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _obfuscation(self, length: int) -> dict[str, str]:
        if self.kind != "chat" or self._options.get("include_obfuscation") is False:
            return {}
        return {"obfuscation": "x7Kq2pLm9RtVwZ"[: 14 - length % 8]}

    def _chunk(
        self, index: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if self.kind == "chat":
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        else:
            text = delta.get("content", "")
            choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._frame(self._chunk_object), "choices": [choice]}
        if self._asks_usage:
            chunk["usage"] = None
        return {**chunk, **self._obfuscation(len(str(delta.get("content", ""))))}

    def _chat_choice(self, spoken: Spoken) -> dict[str, Any]:
        text = "".join(spoken.tokens)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if spoken.is_refusal:
            message |= {"content": None, "refusal": text}
        if spoken.voice is not None:
            data = base64.b64encode(b"".join(map(_sound, spoken.tokens))).decode()
            audio = {"id": spoken.voice, "data": data, "expires_at": EXPIRES, "transcript": text}
            message |= {"content": None, "audio": audio}
        if spoken.calls:
            message |= {"content": None, "tool_calls": spoken.calls}
        if spoken.thought is not None:
            message["reasoning_content"] = spoken.thought
        scores = [self._logprob(token) for token in spoken.tokens] if self.request.get("logprobs") else None
        logprobs = None if scores is None else {"content": scores, "refusal": None}
        return {"index": spoken.index, "message": message, "logprobs": logprobs, "finish_reason": spoken.finish}

    def _text_choice(self, spoken: Spoken) -> dict[str, Any]:
        text = "".join(spoken.tokens)
        logprobs = None if self.request.get("logprobs") is None else _text_logprobs(spoken.tokens)
        return {"text": text, "index": spoken.index, "logprobs": logprobs, "finish_reason": spoken.finish}

    def _logprobs(self, spoken: Spoken, place: int) -> dict[str, Any] | None:
        if spoken.calls or place >= len(spoken.tokens):
            return None
        if self.kind == "text":
            return None if self.request.get("logprobs") is None else _text_logprobs([spoken.tokens[place]])
        return (
            {"content": [self._logprob(spoken.tokens[place])], "refusal": None}
            if self.request.get("logprobs")
            else None
        )

    def _logprob(self, token: str) -> dict[str, Any]:
        def scored(text: str, score: float) -> dict[str, Any]:
            return {"token": text, "logprob": score, "bytes": list(text.encode())}

        rivals = [scored(WORDS[place], -2.0 - place) for place in range(self.request.get("top_logprobs") or 0)]
        return {**scored(token, -0.25), "top_logprobs": rivals}


def answer_chat(request: dict[str, Any], script: Script, number: int) -> Answer:
    """Return the answer to a chat request; ``number`` makes its id unlike the others'."""
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    spoken = [
        replace(_speak(request, index, script, limit), thought=script.thinking)
        for index in range(request.get("n") or 1)
    ]
    if "audio" in (request.get("modalities") or ()):
        spoken = [replace(one, voice=f"audio_{_digest(request, one.index)[:20]}") for one in spoken]
    said = sum(_spent(one) for one in spoken) + script.reasoning_tokens
    sound = sum(SOUND_TOKENS * len(one.tokens) for one in spoken if one.voice is not None)
    usage = usage_of(prompt_tokens(request), said + sound, script, sound)
    asked = request.get("service_tier")
    tier = script.served or (asked if asked in ("flex", "priority") else "default")
    return Answer("chat", request, f"chatcmpl-{_digest(request, 0)[:20]}{number}", spoken, usage, tier)


def answer_completion(request: dict[str, Any], script: Script, number: int) -> Answer:
    """Return the answer to a plain completion: ``n`` choices for each prompt, in order."""
    prompts = prompts_of(request["prompt"])
    each = request.get("n") or 1
    spoken, said = [], 0
    for index in range(len(prompts) * each):
        one = _tokens(request, index, script, request.get("max_tokens", 16), WORDS)
        said += len(one.tokens)
        echoed = [str(prompts[index // each])] if request.get("echo") else []
        spoken.append(Spoken(index, echoed + one.tokens, one.finish))
    usage = usage_of(sum(count_tokens(prompt) for prompt in prompts), said, script)
    return Answer("text", request, f"cmpl-{_digest(request, 0)[:20]}{number}", spoken, usage)


def answer_embedding(request: dict[str, Any], script: Script) -> dict[str, Any]:
    """Return the answer to an embedding request: unit-scaled vectors that depend on the text alone."""
    texts = prompts_of(request["input"])
    width = request.get("dimensions") or 8
    is_base64 = request.get("encoding_format") == "base64"
    data = []
    for index, text in enumerate(texts):
        vector = embedding_of(text, width)
        shown = base64.b64encode(struct.pack(f"<{width}f", *vector)).decode() if is_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": shown})
    count = sum(count_tokens(text) for text in texts)
    body = {"object": "list", "data": data, "model": request["model"]}
    match script.usage:
        case Told.RIGHT:
            return {**body, "usage": {"prompt_tokens": count, "total_tokens": count}}
        case Told.WRONG:
            return {**body, "usage": {"prompt_tokens": -1, "total_tokens": 10**12}}
        case Told.NONE:
            return body


def answer_rerank(request: dict[str, Any], script: Script) -> dict[str, Any]:
    """Return the answer to a query with documents, in Jina's shape: scores are the share of the query's words in each.

    A model whose name begins with ``cohere`` counts search units, as Cohere does, and no tokens.
    """
    words = set(request["query"].lower().split())
    scores = [len(words & set(text.lower().split())) / len(words) for text in request["documents"]]
    ranked = sorted(range(len(scores)), key=lambda place: -scores[place])
    results = [{"index": place, "relevance_score": scores[place]} for place in ranked[: request.get("top_n")]]
    if request["model"].startswith("cohere"):
        units = -(-sum(max(1, -(-count_tokens(text) // 500)) for text in request["documents"]) // 100)
        return {"id": "r", "results": results, "meta": {"billed_units": {"search_units": units}}}
    count = sum(count_tokens(request["query"]) + count_tokens(text) for text in request["documents"])
    told = {Told.RIGHT: {"total_tokens": count}, Told.WRONG: {"total_tokens": -1}, Told.NONE: None}[script.usage]
    return {"model": request["model"], "results": results, "usage": told}


def answer_images(request: dict[str, Any], script: Script) -> dict[str, Any]:
    """Return the answer to a request for pictures: 272 tokens each, or, of a model that begins with ``grok``, addresses
    and no counts."""
    number = request.get("n") or 1
    if request["model"].startswith("grok"):
        return {"created": CREATED, "data": [{"url": f"https://pictures.example/{place}"} for place in range(number)]}
    data = [{"b64_json": base64.b64encode(request["prompt"].encode()).decode()}] * number
    count, said = count_tokens(request["prompt"]), 272 * number
    usage = {"input_tokens": count, "output_tokens": said, "total_tokens": count + said}
    told = {Told.RIGHT: usage, Told.WRONG: {"input_tokens": -1}, Told.NONE: None}[script.usage]
    return {"created": CREATED, "data": data, "size": "1024x1024", "quality": "low", "usage": told}


def answer_edits(request: dict[str, Any], script: Script) -> dict[str, Any]:
    """Return the answer to a form or a body with pictures: 194 tokens of each beside the prompt."""
    answer = answer_images(request | {"n": int(request.get("n", "1"))}, script)
    pictures = request.get("images") or request["image"]
    pictures = pictures if isinstance(pictures, list) else [pictures]
    if script.usage is Told.RIGHT and (usage := answer.get("usage")):
        seen, words = 194 * len(pictures), usage["input_tokens"]
        usage |= {"input_tokens": words + seen, "total_tokens": usage["total_tokens"] + seen}
        usage["input_tokens_details"] = {"text_tokens": words, "image_tokens": seen}
    return answer


def streamed_pictures(request: dict[str, Any], answer: dict[str, Any], script: Script) -> list[bytes]:
    """Return the events that stand for the answer with one picture: what is not whole costs 100 tokens each."""
    kind = "image_edit" if "image" in request or "images" in request else "image_generation"
    told = {"created_at": CREATED, "size": answer["size"], "quality": answer["quality"], "output_format": "png"}
    partial = int(request.get("partial_images") or 0)
    events: list[dict[str, Any]] = [
        {"type": f"{kind}.partial_image", "b64_json": f"AAA{place}", "partial_image_index": place, **told}
        for place in range(partial)
    ]
    if script.fault in (Fault.ERROR_FRAME, Fault.ERROR_FIRST):
        said = {"type": script.type, "code": script.code, "message": script.message, "param": None}
        place = 0 if script.fault is Fault.ERROR_FIRST else partial
        events.insert(place, {"type": "error", "error": said, "sequence_number": place})
    if usage := answer["usage"]:
        usage |= {name: usage[name] + 100 * partial for name in ("output_tokens", "total_tokens")}
    whole = {"type": f"{kind}.completed", "b64_json": answer["data"][0]["b64_json"], **told, "usage": usage}
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in [*events, whole]]


def answer_speech(request: dict[str, Any], script: Script) -> list[bytes]:
    """Return the pieces of a text said aloud: its bytes, a word each, or events that hold them. 20 tokens a word."""
    words = re.findall(rb"\S+\s*", request["input"].encode())
    if request.get("stream_format") != "sse":
        return words
    events: list[dict[str, Any]] = [
        {"type": "speech.audio.delta", "audio": base64.b64encode(word).decode()} for word in words
    ]
    if script.fault is Fault.ERROR_FRAME:
        events.append({"type": "error", "error": {"message": "Hoarse."}})
    count, said = count_tokens(request["input"]), 20 * len(words)
    usage = {"input_tokens": count, "output_tokens": said, "total_tokens": count + said}
    events.append({"type": "speech.audio.done", "usage": usage if script.usage is Told.RIGHT else None})
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]


def answer_written(request: dict[str, Any], script: Script) -> dict[str, Any] | list[bytes]:
    """Return what a recording of 8,000 bytes a second says, or the events of a stream. Whisper counts seconds, other
    models tokens: 10 a second, and 4."""
    seconds, text = (request["file"]["size"] - 44) / 8_000, script.text or "Two coins a gate."
    tokens = {"input_tokens": round(10 * seconds), "output_tokens": 4, "total_tokens": round(10 * seconds) + 4}
    is_whisper = request["model"].startswith("whisper")
    usage = {"type": "duration", "seconds": -(-seconds // 1)} if is_whisper else {"type": "tokens", **tokens}
    counted = {"usage": usage} if script.usage is Told.RIGHT else {}
    if request.get("stream") and not is_whisper:
        events = [{"type": "transcript.text.delta", "delta": word} for word in re.findall(r"\S+\s*", text)]
        events.append({"type": "transcript.text.done", "text": text, **counted})
        return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    if request.get("response_format") != "verbose_json":
        return {"text": text, **counted}
    segment = {"id": 0, "start": 0.0, "end": seconds, "text": f" {text}", "tokens": [], "temperature": 0.0}
    told = {"task": "transcribe", "language": "english", "duration": seconds, "text": text, "segments": [segment]}
    return {**told, **counted}


def embedding_of(text: str | list[int], width: int = 8) -> list[float]:
    """Return the vector of one text; every number is exact in float32."""
    seed = hashlib.shake_256(str(text).encode()).digest(width)
    return [(byte - 128) / 128 for byte in seed]


def prompts_of(prompt: Any) -> list[Any]:
    """Return one prompt or several as a list of prompts, each a string or a list of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def count_tokens(text: str | list[int]) -> int:
    """Return how many tokens a text counts for here: one per four bytes, or what was sent as ids."""
    return len(text) if isinstance(text, list) else -(-len(text.encode()) // 4)


def prompt_tokens(request: dict[str, Any]) -> int:
    """Return what the prompt of a chat counts for: 3, and 4 more than its words for each message, and the tools."""
    total = 3
    for message in request["messages"]:
        content = message.get("content") or ""
        total += 200 if message.get("audio") else 0
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        total += 4 + sum(85 if part["type"] == "image_url" else count_tokens(_text(part)) for part in parts)
        total += sum(count_tokens(json.dumps(call["function"])) for call in message.get("tool_calls") or ())
    return total + sum(count_tokens(json.dumps(tool)) for tool in request.get("tools") or ())


def usage_of(prompt: int, said: int, script: Script, sound: int = 0) -> dict[str, Any] | None:
    """Return the usage object as the script wants it told."""
    if script.usage is Told.NONE:
        return None
    if script.usage is Told.WRONG:
        return {"prompt_tokens": -5, "completion_tokens": 10**9, "total_tokens": 7}
    written = {"cache_write_tokens": script.cache_write_tokens} if script.cache_write_tokens else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {
            "cached_tokens": min(prompt, script.cached_tokens),
            "audio_tokens": min(prompt, script.audio_tokens),
        }
        | written,
        "completion_tokens_details": {
            "reasoning_tokens": script.reasoning_tokens,
            "audio_tokens": sound,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _speak(request: dict[str, Any], index: int, script: Script, limit: int | None) -> Spoken:
    if script.refuses:
        tokens = ["I'm ", "sorry, ", "I can't ", "help ", "with ", "that."]
        return Spoken(index, tokens, "stop", is_refusal=True)
    if calls := _calls(request, index, script):
        return Spoken(index, [], "tool_calls", calls=calls)
    form = (request.get("response_format") or {}).get("type", "text")
    if form != "text" and script.text is None:
        schema = request["response_format"].get("json_schema", {}).get("schema") or {"type": "object"}
        text = json.dumps(_example(schema), ensure_ascii=False)
        return Spoken(index, [text[place : place + 4] for place in range(0, len(text), 4)], "stop")
    return _tokens(request, index, script, limit, WORDS)


def _tokens(request: dict[str, Any], index: int, script: Script, limit: int | None, words: Any) -> Spoken:
    dice = hashlib.shake_256(_digest(request, index).encode()).digest(4096)
    if script.text is not None:
        tokens = [word if place == 0 else f" {word}" for place, word in enumerate(script.text.split(" "))]
    else:
        length = script.tokens if script.tokens is not None else 4 + dice[0] % 21
        tokens = [("" if place == 0 else " ") + words[dice[place % 4096] % len(words)] for place in range(length)]
    tokens, stopped_by = _until_stop(tokens, request.get("stop"))
    if limit is not None and len(tokens) > limit:
        return Spoken(index, tokens[:limit], "length")
    return Spoken(index, tokens, script.finish if stopped_by is None else "stop", stopped_by=stopped_by)


def _until_stop(tokens: list[str], stop: str | list[str] | None) -> tuple[list[str], str | None]:
    stops = [stop] if isinstance(stop, str) else stop or []
    text = "".join(tokens)
    places = [(place, word) for word in stops if (place := text.find(word)) >= 0]
    if not places:
        return tokens, None
    left, stopped_by = min(places)
    kept = []
    for token in tokens:
        if left <= 0:
            break
        kept.append(token[:left])
        left -= len(token)
    return kept, stopped_by


def _calls(request: dict[str, Any], index: int, script: Script) -> list[dict[str, Any]]:
    """Call a tool when the request demands it, or when the last user turn names it: with the arguments that stand
    behind its name, ``name {…}``, where some do.
    """
    tools = [tool["function"] for tool in request.get("tools") or ()]
    said = ""
    choice = request.get("tool_choice") or "auto"
    if not tools or choice == "none":
        return []
    if isinstance(choice, dict):
        chosen = [tool for tool in tools if tool["name"] == choice["function"]["name"]]
    elif choice == "required" or script.calls:
        chosen = tools[:1]
    else:
        turns = [each for each in request["messages"] if each["role"] not in ("system", "developer")]
        last = (turns or request["messages"])[-1]
        said = json.dumps(last.get("content"), ensure_ascii=False) if last["role"] == "user" else ""
        chosen = [tool for tool in tools if tool["name"] in said]
    if request.get("parallel_tool_calls") is False:
        chosen = chosen[:1]
    return [
        {
            "id": f"call_{_digest(request, index)[:16]}{place}",
            "type": "function",
            "function": {"name": tool["name"], "arguments": _said_arguments(tool, said) or _arguments(tool)},
        }
        for place, tool in enumerate(chosen)
    ]


def _said_arguments(tool: dict[str, Any], said: str) -> str:
    """Return the JSON object that stands behind a tool's name in a JSON text, or nothing."""
    _, _, rest = said.partition(f"{tool['name']} {{")
    try:
        return json.dumps(json.JSONDecoder().raw_decode("{" + re.sub(r'\\+"', '"', rest))[0]) if rest else ""
    except ValueError:
        return ""


def _arguments(tool: dict[str, Any]) -> str:
    schema = tool.get("parameters") or {}
    return json.dumps(_example(schema), ensure_ascii=False) if schema.get("properties") else "{}"


def _example(schema: dict[str, Any]) -> Any:
    """Return a value that fits the plainer kinds of JSON schema."""
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            return {name: _example(inner) for name, inner in (schema.get("properties") or {}).items()}
        case "array":
            return [_example(schema.get("items") or {"type": "string"})]
        case "integer":
            return 42
        case "number":
            return 0.5
        case "boolean":
            return True
        case _:
            return "Zürich 🚪"


def _deltas(spoken: Spoken) -> Iterator[dict[str, Any]]:
    for place, call in enumerate(spoken.calls):
        head = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": place, "id": call["id"], "type": "function", "function": head}]}
        arguments = call["function"]["arguments"]
        for start in range(0, len(arguments), 5):
            yield {"tool_calls": [{"index": place, "function": {"arguments": arguments[start : start + 5]}}]}
    for place, token in enumerate(spoken.tokens):
        if spoken.voice is not None:
            yield {"audio": {**({} if place else {"id": spoken.voice}), "transcript": token}}
            yield {"audio": {"data": base64.b64encode(_sound(token)).decode()}}
        else:
            yield {"refusal": token} if spoken.is_refusal else {"content": token}


def _sound(token: str) -> bytes:
    """Return what stands for a word said aloud."""
    return token.encode() * 3


def _pieces(text: str, size: int = 5) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]


def _text_logprobs(tokens: list[str]) -> dict[str, Any]:
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    scores = [-0.25] * len(tokens)
    return {"tokens": tokens, "token_logprobs": scores, "top_logprobs": None, "text_offset": offsets}


def _spent(spoken: Spoken) -> int:
    return len(spoken.tokens) + sum(count_tokens(json.dumps(call["function"])) for call in spoken.calls)


def _text(part: dict[str, Any]) -> str:
    return part.get("text") or part.get("refusal") or ""


def _digest(request: dict[str, Any], index: int) -> str:
    """Tell requests apart by what is asked, however it is to be sent."""
    asked = {name: value for name, value in request.items() if name not in ("stream", "stream_options", "model")}
    return hashlib.sha256(json.dumps([asked, index], sort_keys=True).encode()).hexdigest()
