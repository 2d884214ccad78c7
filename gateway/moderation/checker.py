# An external checker, asked over HTTP beside the call: it takes {"input": text} and answers as OpenAI's
# moderation API does. One that fails, or is late, lets the call pass or blocks it, as the configuration says.

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import structlog
from msgspec import Struct

from billing.core.deadlines import running_timeout
from gateway.core.settings import CheckerSettings
from gateway.moderation.classifier.findings import Finding
from gateway.telemetry.meters import counter_of
from gateway.telemetry.metrics import Metrics
from gateway.upstreams.client import UpstreamClient
from gateway.upstreams.wire.base import UpstreamRequest
from gateway.upstreams.wire.errors import UpstreamFailure

LONGEST_ANSWER = 64 * 1024  # bytes
FAILED = Finding("checker_failed", "checker")

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9/_.-]")  # these become labels of metrics

log = structlog.get_logger()


class _Result(Struct, frozen=True):
    flagged: bool
    categories: dict[str, bool] = {}


class _Answer(Struct, frozen=True):
    results: list[_Result]


class OutsideChecker:
    """Asks the configured checker, if there is one."""

    def __init__(self, client: UpstreamClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._settings: CheckerSettings | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return self._settings is not None

    def follow(self, settings: CheckerSettings | None) -> None:
        """Ask another checker, or none, from now on."""
        self._settings = settings

    async def check(self, texts: Sequence[str]) -> list[Finding]:
        """Return what the checker finds. Never raises: its failure is a finding, or nothing, as the policy says."""
        settings = self._settings
        if settings is None:
            return []
        try:
            async with running_timeout(settings.deadline):
                answer = await self._ask(settings, "\n".join(texts))
        except (TimeoutError, UpstreamFailure, msgspec.DecodeError, UnicodeDecodeError) as exc:
            counter_of(self._metrics.safety_checker, "failed").inc()
            log.warning("safety_checker_failed", error=type(exc).__name__, calls=settings.on_failure)
            return [FAILED] if settings.on_failure == "block" else []
        counter_of(self._metrics.safety_checker, "ok").inc()
        found = {name for result in answer.results for name, is_so in result.categories.items() if is_so}
        if not found and any(result.flagged for result in answer.results):
            found = {"flagged"}
        return [Finding(f"checker:{_NOT_A_NAME.sub('_', name)[:40]}", "checker") for name in sorted(found)]

    async def _ask(self, settings: CheckerSettings, text: str) -> _Answer:
        headers = {"content-type": "application/json"}
        if settings.api_key is not None:
            headers["authorization"] = f"Bearer {settings.api_key}"
        request = UpstreamRequest("POST", settings.url, headers, msgspec.json.encode({"input": text}))
        response = await self._client.send(request, settings.deadline, settings.deadline)
        try:
            body = await response.read(LONGEST_ANSWER)
        finally:
            response.close()
        if response.status != 200:
            raise UpstreamFailure(f"The checker answered with status {response.status}.")
        return msgspec.json.decode(body, type=_Answer)
