# An outside checker, asked over HTTP beside the call: OpenAI's moderation API, or a model that answers as Llama Guard
# does, on our own engine or anywhere that chat completions are. One that fails, or is late, lets the call pass or
# blocks it, as the configuration says.

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing

import msgspec
import structlog
from msgspec import Struct

from gateway.core.settings import CheckerSettings
from gateway.moderation.classifier.findings import Finding
from gateway.moderation.rules.policy import Stage
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure
from protocol.serving.deadlines import running_timeout

LONGEST_ANSWER = 64 * 1024  # bytes
VERDICT_TOKENS = 64  # of a Llama Guard: "unsafe", and a line of categories
PIECE, OVERLAP = 10_000, 500  # characters that a Llama Guard judges together, and of those before
CONTEXT = 4_000  # the last characters of the request that it sees beside an answer
FAILED = Finding("checker_failed", "checker")

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9/_.-]")  # these become labels of metrics

log = structlog.get_logger()


class _Result(Struct, frozen=True):
    flagged: bool
    categories: dict[str, bool] = {}


class _Moderation(Struct, frozen=True):
    results: list[_Result]


class _Said(Struct, frozen=True):
    content: str


class _Choice(Struct, frozen=True):
    message: _Said


class _Chat(Struct, frozen=True):
    choices: tuple[_Choice, ...]


class OutsideChecker:
    """Asks the configured checker, if there is one. Its deadline is for all that is asked of one text."""

    def __init__(self, client: UpstreamClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._settings: CheckerSettings | None = None

    def judges(self, stage: Stage) -> bool:
        """Whether there is one that judges requests, or answers."""
        return self._settings is not None and self._settings.judges in (stage, "both")

    def follow(self, settings: CheckerSettings | None) -> None:
        """Ask another checker, or none, from now on."""
        self._settings = settings

    async def check(self, texts: Sequence[str], answer: str | None = None) -> list[Finding]:
        """Return what the checker finds in what was asked, or in an ``answer`` to it. Never raises: its failure is a
        finding, or nothing, as the policy says."""
        settings = self._settings
        if settings is None:
            return []
        try:
            async with running_timeout(settings.deadline):
                found = await self._ask(settings, "\n".join(texts), answer)
        except (TimeoutError, UpstreamFailure, msgspec.DecodeError, UnicodeDecodeError) as exc:
            counter_of(self._metrics.safety_checker, "failed").inc()
            log.warning("safety_checker_failed", error=type(exc).__name__, calls=settings.on_failure)
            return [FAILED] if settings.on_failure == "block" else []
        counter_of(self._metrics.safety_checker, "ok").inc()
        return [Finding(f"checker:{_NOT_A_NAME.sub('_', name)[:40]}", "checker") for name in sorted(found)]

    async def _ask(self, settings: CheckerSettings, asked: str, answer: str | None) -> set[str]:
        """Return the names of what is found. Raises UpstreamFailure, or that the answer cannot be read."""
        named = {} if settings.model is None else {"model": settings.model}
        if settings.format == "moderations":
            said = await self._post(settings, {"input": asked if answer is None else answer, **named})
            return _found_by_moderation(msgspec.json.decode(said, type=_Moderation))
        if answer is None:
            chats = [[{"role": "user", "content": piece}] for piece in _pieces(asked)]
        else:
            before = {"role": "user", "content": asked[-CONTEXT:]}
            chats = [[before, {"role": "assistant", "content": piece}] for piece in _pieces(answer)]
        how = {**named, "max_tokens": VERDICT_TOKENS, "temperature": 0}
        found: set[str] = set()
        for chat in chats:
            said = await self._post(settings, {"messages": chat, **how})
            found |= _found_by_guard(msgspec.json.decode(said, type=_Chat))
        return found

    async def _post(self, settings: CheckerSettings, question: object) -> bytes:
        headers = {"content-type": "application/json"}
        if settings.api_key is not None:
            headers["authorization"] = f"Bearer {settings.api_key}"
        request = UpstreamRequest("POST", settings.url, headers, msgspec.json.encode(question))
        with closing(await self._client.send(request, settings.deadline, settings.deadline)) as response:
            body = await response.read(LONGEST_ANSWER)
        if response.status != 200:
            raise UpstreamFailure(f"The checker answered with status {response.status}.")
        return body


def _pieces(text: str) -> list[str]:
    """Return a text in pieces that overlap: a Llama Guard's context is short, and what it cannot read it does not
    judge."""
    return [text[max(0, start - OVERLAP) : start + PIECE] for start in range(0, len(text) or 1, PIECE)]


def _found_by_moderation(answer: _Moderation) -> set[str]:
    found = {name for result in answer.results for name, is_so in result.categories.items() if is_so}
    return found or ({"flagged"} if any(result.flagged for result in answer.results) else set())


def _found_by_guard(answer: _Chat) -> set[str]:
    """Return the categories of "unsafe" and a line of them ("S1,S10"); of "safe" none. Raises UpstreamFailure for
    anything else."""
    for choice in answer.choices:
        verdict, _, categories = choice.message.content.strip().partition("\n")
        match verdict.strip().lower():
            case "safe":
                return set()
            case "unsafe":
                return {name.strip() for name in categories.split(",") if name.strip()} or {"unsafe"}
    raise UpstreamFailure("The checker's verdict is neither safe nor unsafe.")
