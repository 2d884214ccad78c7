# Runs the front as a process: the socket, the server, the signals, and an end that leaves nothing behind.

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import uvicorn

from gpu_backend.server.app import create_app
from gpu_backend.server.checkpoint.checkpoint import Checkpoint, load_checkpoint
from gpu_backend.server.client.announcer import Announcer, base_url_of
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.kv_publisher import KvPublisher
from gpu_backend.server.front import Front, build_front
from gpu_backend.server.settings import FrontSettings
from gpu_backend.server.warm_up import warm_up
from gpu_backend.step.block_events import BlockEvent
from gpu_backend.step.config import KvEventsConfig
from protocol.chat import Message
from protocol.errors import BadRequest
from protocol.serving.http_server import HttpProtocol
from protocol.serving.listening import BACKLOG, open_socket, raise_descriptor_limit

log = logging.getLogger("gpu_backend")

UNREAD = 600.0  # seconds that a caller may take nothing: a gateway reads a stream as slowly as its own client
KEEP_ALIVE_SECONDS = 75  # longer than the gateway keeps idle connections, so that the gateway closes first


def serve(settings: FrontSettings) -> int:
    """Serve until a signal comes or the engine fails for good; return the exit status.

    Raises ``OSError`` if the address cannot be had or the checkpoint is missing, ``ValueError`` if it makes no sense.
    """
    checkpoint = load_checkpoint(settings.engine.checkpoint.folder, settings.engine.checkpoint.tokenizer_folder)
    prefixes = shared_prefixes(checkpoint, Path(settings.shared_prompts)) if settings.shared_prompts else ()
    raise_descriptor_limit()
    listening = _listen(settings.host, settings.port)
    exit_status = 0

    def give_up() -> None:
        nonlocal exit_status
        exit_status = 1
        server.should_exit = True

    on_blocks, told = _publish_blocks(settings.engine.kv_events)
    settings = replace(settings, engine=replace(settings.engine, kv_events=told))
    own = replace(settings.engine, prefixes=replace(settings.engine.prefixes, shared_prefixes=prefixes))
    engine = EngineClient(own, settings.max_waiting, on_failed=give_up, on_blocks=on_blocks)
    front = build_front(settings, checkpoint, engine)
    host, port = listening.getsockname()[:2]
    announcer = announcer_of(front, host, port)
    app = create_app(front, announcer)
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        ws="none",
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
    )
    server = Server(config, announcer)

    def stop(signum: int, frame: object) -> None:
        server.should_exit = True

    # For a signal before the server has its own handlers; and it raises once more what it took, when all is done.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    log.info("serving %s on http://%s:%d", settings.served_model_name, f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listening])
    return exit_status


def announcer_of(front: Front, host: str, port: int) -> Announcer | None:
    """Return what announces an engine that listens there, if it is to be announced."""
    if (fleet := front.settings.fleet) is None:
        return None
    return Announcer(fleet, partial(front.announcement, base_url_of(fleet, host, port)), partial(warm_up, front))


class Server(uvicorn.Server):
    """Takes calls until gateways have heard that none should come."""

    def __init__(self, config: uvicorn.Config, announcer: Announcer | None) -> None:
        super().__init__(config)
        self._announcer = announcer

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._announcer is not None:
            await self._announcer.leave()
        await super().shutdown(sockets)


def _publish_blocks(config: KvEventsConfig) -> tuple[Callable[[Sequence[BlockEvent]], None], KvEventsConfig]:
    """Return what tells of blocks, and where it does."""
    if not config.publishes:
        return lambda events: None, config
    publisher = KvPublisher(config)
    log.info("KV events, and in them the tokens of prompts, go to all who connect to %s", publisher.config.endpoint)
    return publisher.publish, publisher.config


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = open_socket(host, port, UNREAD)
    except OSError as exc:
        raise OSError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    listening.set_inheritable(False)
    return listening


LONGEST = 1_000_000  # tokens


def shared_prefixes(checkpoint: Checkpoint, file: Path) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that every conversation with one of the file's system prompts begins with.

    The file is a JSON list of texts. What is common to two conversations under the model's template is shared, so that
    no template's way with system prompts matters. Raises ``OSError`` without the file, ``ValueError`` for any other
    content, or for a model without a chat template.
    """
    texts = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{file} must hold a JSON list of system prompts, each a text")
    if checkpoint.chat is None:
        raise ValueError(f"{file} declares system prompts, but the model has no chat template")
    try:
        return tuple(_beginning(checkpoint, text) for text in texts)
    except BadRequest as exc:
        raise ValueError(f"{file}: {exc}") from exc


def _beginning(checkpoint: Checkpoint, text: str) -> tuple[int, ...]:
    assert checkpoint.chat is not None
    one, other = (
        checkpoint.codec.encode(
            checkpoint.chat.render([Message(role="system", content=text), Message(role="user", content=question)]),
            LONGEST,
            add_special_tokens=False,
        )
        for question in ("Why?", "0")
    )
    return tuple(token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
