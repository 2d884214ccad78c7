# POST /v1/moderations, in OpenAI's shapes, by our own classifier. It counts as a request, and costs and keeps nothing.

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Response, post
from msgspec import Struct

from gateway.accounts.guards import team_guard
from gateway.calls.rate_limits import rate_limit_headers
from gateway.dialects.checks import require
from gateway.http.current_edition import edition_of
from gateway.http.exchange import AnyRequest, part_of, read_body
from gateway.moderation.classifier.classifier import FLAGGED
from gateway.moderation.moderator import Moderator
from gateway.moderation.text_reader import EncoderShare
from protocol.chat import ImagePart, TextPart
from protocol.decoding import decode
from protocol.errors import BadRequest

MODEL = "tollgate-moderation"
MOST_TEXTS = 1000
MOST_CHARACTERS = 1_000_000


class ModerationRequest(Struct, frozen=True):
    """One text, several, or one text in parts. Any ``model`` is taken: there is one."""

    input: str | list[str | dict[str, Any]]
    model: str | None = None


@post("/v1/moderations", guards=[team_guard], status_code=200, summary="Moderate texts", takes=ModerationRequest)
async def create_moderation(request: AnyRequest) -> Response[bytes]:
    """Tell which categories each text falls into, by scores from 0 to 1; from 0.5 on a category is flagged."""
    texts, _ = await read_body(request, _read)
    moderator, state = part_of(request, Moderator), request.scope["state"]
    results: list[dict[str, Any]] = []
    admission = edition_of(request).inference.admission
    async with admission.counted(state["request_id"], state["caller"]) as hold:
        share = EncoderShare()
        for text in texts:
            results.append(_result(await moderator.reader.score(text, share)))
            await asyncio.sleep(0)  # others have their turn
    body = {"id": "modr-" + state["request_id"].replace("-", ""), "model": MODEL, "results": results}
    return Response(msgspec.json.encode(body), headers=rate_limit_headers(hold), media_type="application/json")


def _read(body: bytes) -> list[str]:
    texts = _texts(decode(body, ModerationRequest).input)
    require(len(texts) <= MOST_TEXTS, "input", f"'input' may hold at most {MOST_TEXTS} texts.")
    size = sum(map(len, texts))
    require(size <= MOST_CHARACTERS, "input", f"'input' may hold at most {MOST_CHARACTERS} characters.")
    return texts


def _texts(given: str | list[str | dict[str, Any]]) -> list[str]:
    if isinstance(given, str):
        return [given]
    require(bool(given), "input", "'input' must hold at least one text.")
    texts = [one for one in given if isinstance(one, str)]
    if len(texts) == len(given):
        return texts
    require(not texts, "input", "'input' is texts, or parts of one text; not both.")
    try:
        parts = msgspec.convert(given, list[TextPart | ImagePart])
    except msgspec.ValidationError as exc:
        raise BadRequest(f"'input' is no list of parts: {exc}", param="input", code="invalid_value") from exc
    is_text = all(isinstance(part, TextPart) for part in parts)
    require(is_text, "input", "Pictures cannot be moderated here. Send text alone.")
    return ["".join(part.text for part in parts if isinstance(part, TextPart))]


def _result(scores: dict[str, float]) -> dict[str, Any]:
    categories = {name: score >= FLAGGED for name, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": {name: ["text"] for name in scores},
    }
