# The layer around the whole app, alone.

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.core.clock import Clock
from gateway.core.draining import Drain
from gateway.http.middleware import Telemetry


def test_a_call_that_outlasts_the_drain_is_told_so() -> None:
    """Whoever still waits for an answer when the gateway must end gets an error as clients know it, not a bare 500."""
    sent: list[dict[str, Any]] = []

    async def run_for_ever(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scene() -> None:
        scope = {"type": "http", "headers": [], "path": "/v1/chat/completions", "method": "POST"}
        task = asyncio.create_task(Telemetry(run_for_ever, Clock(), Drain())(scope, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(scene())

    assert sent[0]["status"] == 503 and b"retry-after" in dict(sent[0]["headers"])
    assert json.loads(sent[1]["body"])["error"]["code"] == "service_unavailable"
