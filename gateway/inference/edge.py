# The pipeline as the HTTP routes see it: gateway/http/inference_port.py says what they ask.

from __future__ import annotations

from typing import Any

from gateway.calls.call import Call
from gateway.idempotency.replay_buffer import Send
from gateway.inference.answer import answer
from gateway.inference.idempotency import Run, WriteError, answer_once
from gateway.inference.reply import KeepEnding, Reply
from gateway.inference.services import Services
from protocol.serving.leaving import Client


class InferenceEdge:
    """Answers calls in one edition of the configuration."""

    def __init__(self, services: Services) -> None:
        self.clock = services.clock
        self.keep_alive = services.settings.keep_alive
        self.is_traced = services.tracer is not None
        self.in_flight = services.metrics.in_flight
        self.recalibrations = services.recalibrations
        self.note_refusal = services.refusals.note
        self._services = services

    async def answer(self, call: Call, client: Client, keep_ending: KeepEnding | None) -> Reply:
        """Return the open reply to ``call``. ``keep_ending`` is called with its end before its account closes."""
        reply = await answer(self._services, call, client)
        reply.keep_ending = keep_ending
        return reply

    async def answer_once(self, call: Call, run: Run, write_error: WriteError, scope: Any, send: Send) -> None:
        """Answer a call that has an Idempotency-Key: run it, or replay what was stored."""
        await answer_once(self._services, call, run, write_error, scope, send)
