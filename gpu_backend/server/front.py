# What a route needs to answer: built once when the app starts, passed to every handler.

from __future__ import annotations

import secrets
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litestar import Request, Response
from litestar.connection import ASGIConnection
from msgspec import Struct

from gpu_backend.server.checkpoint.checkpoint import Checkpoint
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.errors import ModelNotFound
from gpu_backend.server.generation import Generation, Job
from gpu_backend.server.metrics import Metrics
from gpu_backend.server.requests.counting import Counts
from gpu_backend.server.requests.pictures import can_decode
from gpu_backend.server.settings import FrontSettings
from gpu_backend.server.wire import encode
from gpu_backend.step.adapter import Adapter
from protocol.errors import Overloaded
from protocol.serving.announcements import STARTING, Announcement, KvEventsAt


@dataclass(frozen=True, slots=True)
class Front:
    """One engine's HTTP side. Ids, seeds and the time are drawn from the last fields."""

    settings: FrontSettings
    checkpoint: Checkpoint
    engine: EngineClient
    metrics: Metrics
    instance_id: str  # another one after every start: counters begin anew
    node_id: str  # the machine
    model_number: int = 0  # the engine's, while it has this model
    counts: Counts = field(default_factory=Counts)
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63)
    now: Callable[[], float] = time.time  # unix seconds

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and reply may have together. Raises ``Overloaded`` while the engine is not ready."""
        self.refuse_if_gone()
        assert self.engine.ready is not None
        return self.engine.ready.max_model_len

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Text, and image where the model, what is installed and the operator let pictures be read."""
        sees = self.checkpoint.sight is not None and can_decode() and self.settings.engine.pictures.max_images > 0
        return ("text", "image") if sees else ("text",)

    @property
    def abilities(self) -> tuple[str, ...]:
        """What this engine can do beside answering chats, by the names that gateways have for it."""
        tools = ("tools",) if self.checkpoint.tool_chat is not None else ()
        return (*tools, "vision") if "image" in self.input_modalities else tools

    def announcement(self, base_url: str, number: int, now: float, state: str | None = None) -> Announcement:
        """Return what gateways are told of this engine. ``state``: in place of the engine's own."""
        ready, told, fleet = self.engine.ready, self.settings.engine.kv_events, self.settings.fleet
        assert fleet is not None
        return Announcement(
            pool=fleet.pool,
            instance_id=self.instance_id,
            base_url=base_url,
            model=self.settings.served_model_name,
            version=self.settings.version,
            state=state or (STARTING if self.is_past else self.engine.state.value),
            number=number,
            sent_at=now,
            block_size=ready.block_size if ready else None,
            max_model_len=ready.max_model_len if ready else None,
            kv_events=KvEventsAt(told.endpoint, told.replay_endpoint) if told.publishes else None,
            adapters=tuple(self.engine.adapters.by_name),
            answered=self.metrics.answered,
            failed=self.metrics.failed,
        )

    def check_model(self, name: str) -> Adapter | None:
        """Return the adapter of that name; None for the model served here, alone or with its version.

        Raises ``ModelNotFound`` for a name that is neither.
        """
        adapter = self.engine.adapters.by_name.get(name)
        if adapter is None and name not in self.settings.names:
            raise ModelNotFound(
                f"The model '{name[:100]}' is not served here, but '{self.settings.names[-1]}' is.",
                param="model",
            )
        return adapter

    @property
    def is_past(self) -> bool:
        """Whether the engine has taken another model."""
        return self.model_number != self.engine.model_number

    def refuse_if_gone(self) -> None:
        """Raise ``Overloaded`` unless the engine takes requests, and has this model still: what was read for it means
        nothing to another."""
        self.engine.refuse_if_closed()
        if self.is_past:
            raise Overloaded("This engine has taken another model meanwhile. Send the request to another replica.")

    def generate(self, job: Job, request_id: str) -> Generation:
        """Start a job. Raises ``Overloaded`` or ``BadRequest``; the caller closes what is returned."""
        self.refuse_if_gone()
        return Generation(job, request_id, self.engine, self.checkpoint, self.metrics)


def build_front(settings: FrontSettings, checkpoint: Checkpoint, engine: EngineClient) -> Front:
    """Put a front together; the engine is opened and closed by the app."""

    gpus, max_loras = settings.engine.device.num_ranks, settings.engine.lora.num_slots
    metrics = Metrics(settings.served_model_name, engine, gpus, max_loras)
    instance_id = f"{settings.instance_id}-{secrets.token_hex(4)}"
    return Front(settings, checkpoint, engine, metrics, instance_id, socket.gethostname(), engine.model_number)


def front_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Front:
    """Return the front that serves ``connection``."""
    return connection.app.state.front


def request_id_of(request: Request[Any, Any, Any]) -> str:
    """Return the caller's own x-request-id where it is usable, else a new one; the same each time it is asked."""
    state = request.scope["state"]
    if "request_id" not in state:
        given = request.headers.get("x-request-id", "")
        state["request_id"] = (
            given if given.isascii() and given.isprintable() and 0 < len(given) <= 128 else uuid.uuid4().hex
        )
    return state["request_id"]


def json_answer(body: Struct | dict[str, Any] | list[dict[str, Any]], status: int = 200) -> Response[bytes]:
    """Return a body as the answer to a request."""
    return Response(encode(body), status_code=status, media_type="application/json")
