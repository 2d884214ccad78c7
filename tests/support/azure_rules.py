# How Azure OpenAI differs from OpenAI: deployments in the path, a version in the query, a header of its own for keys,
# what its content filter says around every answer, and the tokens of Entra in place of keys.

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

from tests.support.openai_answers import Answer, answer_chat, answer_completion
from tests.support.openai_rules import ALLOWED_HEADERS, Violation
from tests.support.upstream_scripts import Script

DEPLOYMENT = re.compile(r"/openai/deployments/([^/?]+)(/[a-z/]+)\?api-version=\d{4}-\d\d-\d\d(-preview)?")
TOKENS = "/tenant/oauth2/v2.0/token"
CLIENT = {"grant_type": ["client_credentials"], "client_id": ["scripted"], "client_secret": ["sesame + more"]}
SCOPE = "https://cognitiveservices.azure.com/.default"
SAFE = {name: {"filtered": False, "severity": "safe"} for name in ("hate", "self_harm", "sexual", "violence")}
JAILBREAK = {"jailbreak": {"filtered": False, "detected": False}}
PROMPT_RESULTS = [{"prompt_index": 0, "content_filter_results": SAFE | JAILBREAK}]


def plain_path(path: str) -> str | None:
    """Return the path of OpenAI's API that a path of Azure's stands for, ``None`` for one that is none."""
    found = DEPLOYMENT.fullmatch(path)
    return None if found is None else f"/v1{found[2]}"


def check_headers(headers: dict[str, str]) -> None:
    """Raise Violation for a header that is missing, odd, or leaked from a client."""
    if strange := sorted(headers.keys() - ALLOWED_HEADERS - {"api-key", "x-ms-useragent"}):
        raise Violation(f"Headers that no provider should see: {', '.join(strange)}.", code="leaked_header")
    token = headers.get("authorization", "")
    if headers.get("api-key", "").startswith("sk-") == token.startswith("Bearer sk-entra-"):
        raise Violation("Access denied due to invalid subscription key or wrong API endpoint.", code="401", status=401)
    if headers.get("content-type") != "application/json":
        raise Violation("Content-Type must be application/json.", status=415)


def give_token(raw: bytes, number: int) -> dict[str, Any]:
    """Return what Entra answers to a client's credentials. Raises Violation for others'."""
    said = parse_qs(raw.decode(), strict_parsing=True)
    if said != CLIENT | {"scope": [SCOPE]}:
        raise Violation("AADSTS7000215: Invalid client secret provided for app 'scripted'.", status=401)
    return {"token_type": "Bearer", "expires_in": 3599, "ext_expires_in": 3599, "access_token": f"sk-entra-{number}"}


def error_body(script: Script) -> dict[str, object]:
    """Return Azure's error object for a scripted failure."""
    if script.code != "content_filter":
        return {"error": {"code": script.code or str(script.status), "message": script.message}}
    results = SAFE | {"violence": {"filtered": True, "severity": "high"}}
    inner = {"code": "ResponsibleAIPolicyViolation", "content_filter_result": results}
    error = {"message": script.message, "type": None, "param": "prompt", "code": script.code, "status": 400}
    return {"error": error | {"innererror": inner}}


class AzureAnswer(Answer):
    """An answer of OpenAI's as Azure's filter passes it on."""

    def whole(self) -> dict[str, Any]:
        """Return the body, with what the filter found of the prompt and of each choice."""
        body = super().whole()
        choices = [choice | {"content_filter_results": SAFE} for choice in body["choices"]]
        return body | {"choices": choices, "prompt_filter_results": PROMPT_RESULTS}

    def chunks(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the chunks: first of all one of the prompt's filter, without a choice, an id or a time."""
        nothing = {"id": "", "object": "", "created": 0, "model": "", "choices": []}
        yield nothing | {"prompt_filter_results": PROMPT_RESULTS}, False
        for chunk, has_token in super().chunks():
            choices = [choice | {"content_filter_results": SAFE} for choice in chunk["choices"]]
            yield chunk | {"choices": choices}, has_token
            if has_token:  # the asynchronous filter speaks of a stretch of the answer, and says nothing of it
                offsets = {"check_offset": 0, "start_offset": 0, "end_offset": 4}
                filtered = {"index": 0, "finish_reason": None, "content_filter_offsets": offsets}
                yield nothing | {"choices": [filtered | {"content_filter_results": SAFE}]}, False

    def is_finish(self, chunk: dict[str, Any]) -> bool:
        """Tell whether a chunk says why the reply ended."""
        return any(choice["finish_reason"] for choice in chunk["choices"])


def azure_chat(request: dict[str, Any], script: Script, number: int) -> AzureAnswer:
    """Return Azure's answer to a chat."""
    return _azure(answer_chat(request, script, number))


def azure_completion(request: dict[str, Any], script: Script, number: int) -> AzureAnswer:
    """Return Azure's answer to a completion."""
    return _azure(answer_completion(request, script, number))


def _azure(answer: Answer) -> AzureAnswer:
    return AzureAnswer(answer.kind, answer.request, answer.id, answer.spoken, answer.usage)
