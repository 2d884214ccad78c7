# What the scripted upstream answers in Gemini's format: the same words as in OpenAI's, in Gemini's shapes.

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

from tests.support.gemini_rules import sign
from tests.support.openai_answers import Spoken, answer_chat, count_tokens, embedding_of
from tests.support.upstream_scripts import Script, Told

STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
STATUSES |= {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
FINISHES = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP", "content_filter": "SAFETY"}
BLOCKED = "prompt"  # the finish of a script whose prompt is blocked


class GeminiAnswer:
    """All that is needed to write one answer, whole or streamed."""

    error_frame: ClassVar = {"error": {"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}}
    done = b""  # a stream has no marker of its end

    def __init__(self, spoken: Spoken, usage: dict[str, Any] | None, ident: str) -> None:
        self.spoken = [spoken]
        self._usage = usage
        self._id = ident

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        if self.spoken[0].finish == BLOCKED:
            return self._blocked()
        words = "".join(self.spoken[0].tokens)
        parts = [*self._thoughts(), *([{"text": words}] if words else []), *self._calls()]
        return self._frame(parts, FINISHES[self.spoken[0].finish], self._usage)

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the pieces of a stream, and for each whether it carries a token."""
        spoken = self.spoken[0]
        if spoken.finish == BLOCKED:
            yield self._blocked(), False
            return
        prompt = None if self._usage is None else {"promptTokenCount": self._usage["promptTokenCount"]}
        yield self._frame([{"text": ""}], None, prompt), False
        for thought in self._thoughts():
            yield self._frame([thought], None, prompt), False
        for number, token in enumerate(spoken.tokens, 1):
            usage = None if self._usage is None else self._usage | {"candidatesTokenCount": number}
            yield self._frame([{"text": token}], None, usage), True
        for call in self._calls():
            yield self._frame([call], None, prompt), True
        yield self._frame([{"text": ""}], FINISHES[spoken.finish], self._usage), False

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return a piece as a server-sent event, its lines ended as Google's are."""
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\r\n\r\n"

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether a piece says why the reply ended."""
        return any("finishReason" in candidate for candidate in chunk.get("candidates", ()))

    def swell(self, chunk: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a piece's token."""
        chunk["candidates"][0]["content"]["parts"] = [{"text": words}]

    def swell_whole(self, body: dict[str, Any], words: str) -> None:
        """Put ``words`` in the place of a body's."""
        self.swell(body, words)

    def take_finish(self, body: dict[str, Any]) -> None:
        """Leave out why a body's reply ended."""
        del body["candidates"][0]["finishReason"]

    def _frame(self, parts: list[Any], finish: str | None, usage: dict[str, Any] | None) -> dict[str, Any]:
        candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
        candidate |= {"finishReason": finish} if finish else {}
        told = {} if usage is None else {"usageMetadata": usage}
        return {"candidates": [candidate], **told, "modelVersion": "scripted", "responseId": self._id}

    def _blocked(self) -> dict[str, Any]:
        ratings = [{"category": "HARM_CATEGORY_HATE_SPEECH", "probability": "HIGH", "blocked": True}]
        feedback = {"blockReason": "PROHIBITED_CONTENT", "safetyRatings": ratings}
        return {"promptFeedback": feedback, "usageMetadata": {"promptTokenCount": 7, "totalTokenCount": 7}}

    def _thoughts(self) -> list[dict[str, Any]]:
        thought = self.spoken[0].thought
        return [] if thought is None else [{"text": thought, "thought": True}]

    def _calls(self) -> list[dict[str, Any]]:
        calls = [
            {"functionCall": {"name": call["function"]["name"], "args": json.loads(call["function"]["arguments"])}}
            for call in self.spoken[0].calls
        ]
        if calls:
            calls[0]["thoughtSignature"] = sign(self.spoken[0].calls[0]["function"]["name"])
        return calls


def answer_content(model: str, request: dict[str, Any], script: Script, number: int) -> GeminiAnswer:
    """Return the answer to POST …:generateContent: what the chat of the same words would be answered."""
    chat = answer_chat(_as_chat(model, request), script, number)
    usage = None
    if chat.usage is not None:
        said = chat.usage["completion_tokens"]
        usage = {
            "promptTokenCount": chat.usage["prompt_tokens"],
            "candidatesTokenCount": said - (script.reasoning_tokens if script.usage is Told.RIGHT else 0),
            "totalTokenCount": chat.usage["total_tokens"],
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": chat.usage["prompt_tokens"]}],
        }
        if script.usage is Told.RIGHT:
            usage |= {"thoughtsTokenCount": script.reasoning_tokens} if script.reasoning_tokens else {}
            if heard := min(chat.usage["prompt_tokens"], script.audio_tokens):
                words = {"modality": "TEXT", "tokenCount": chat.usage["prompt_tokens"] - heard}
                usage["promptTokensDetails"] = [words, {"modality": "AUDIO", "tokenCount": heard}]
            usage |= {"cachedContentTokenCount": script.cached_tokens} if script.cached_tokens else {}
    return GeminiAnswer(chat.spoken[0], usage, f"r-{chat.id[9:]}")


def answer_embeds(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to POST …:batchEmbedContents: the vectors that OpenAI's embedding of the same texts has."""
    texts = [one["content"]["parts"][0]["text"] for one in request["requests"]]
    width = request["requests"][0].get("outputDimensionality", 8)
    count = sum(map(count_tokens, texts))
    return {
        "embeddings": [{"values": embedding_of(text, width)} for text in texts],
        "usageMetadata": {"promptTokenCount": count},
    }


def error_body(status: int, message: str, code: str | None, retry_after: str | None = None) -> dict[str, Any]:
    """Return Google's error object."""
    details: list[dict[str, Any]] = []
    if code is not None:
        details.append(
            {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": code, "domain": "googleapis.com"}
        )
    if retry_after is not None:
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{retry_after}s"})
    error = {"code": status, "message": message, "status": STATUSES.get(status, "UNKNOWN"), "details": details}
    return {"error": error}


def _as_chat(model: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return about the chat that a request stands for, as far as answers and counts depend on it."""
    messages = []
    if system := request.get("systemInstruction"):
        messages.append({"role": "system", "content": "".join(part["text"] for part in system["parts"])})
    for content in request["contents"]:
        words = [{"type": "text", "text": part.get("text") or _shown(part)} for part in content["parts"]]
        role = "user" if content["role"] == "user" else "assistant"
        messages.append({"role": role, "content": words})
    config = request.get("generationConfig", {})
    chat: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": config.get("maxOutputTokens")}
    chat |= {"stop": config.get("stopSequences")}
    if config.get("responseMimeType") == "application/json":
        schema = config.get("responseJsonSchema") or {"type": "object"}
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    if tools := request.get("tools"):
        declared = [one for each in tools for one in each["functionDeclarations"]]
        chat["tools"] = [
            {"function": {"name": one["name"], "parameters": one.get("parametersJsonSchema", {})}} for one in declared
        ]
        calling = request.get("toolConfig", {}).get("functionCallingConfig", {"mode": "AUTO"})
        chat["tool_choice"] = {"AUTO": "auto", "NONE": "none", "ANY": "required"}[calling["mode"]]
        if named := calling.get("allowedFunctionNames"):
            chat["tool_choice"] = {"function": {"name": named[0]}}
    return chat


def _shown(part: dict[str, Any]) -> str:
    """Return a part in words; of a result what it says alone, since a name of a function is a wish to call it."""
    return json.dumps(part["functionResponse"]["response"] if "functionResponse" in part else part)
