# Runs the front as a process: the socket, the server, the signals, and an end that leaves nothing behind.

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn

from gpu_backend.server.app import create_app
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.client.engine_client import EngineClient
from gpu_backend.server.client.kv_publisher import KvPublisher
from gpu_backend.server.front import build_front
from gpu_backend.server.settings import FrontSettings
from gpu_backend.server.shared_prompts import shared_prefixes
from gpu_backend.step.block_events import BlockEvent
from gpu_backend.step.config import KvEventsConfig
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

    own = replace(settings.engine, prefixes=replace(settings.engine.prefixes, shared_prefixes=prefixes))
    on_blocks = _publish_blocks(own.kv_events)
    engine = EngineClient(own, settings.max_waiting, on_failed=give_up, on_blocks=on_blocks)
    app = create_app(build_front(settings, checkpoint, engine))
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
    server = uvicorn.Server(config)

    def stop(signum: int, frame: object) -> None:
        server.should_exit = True

    # For a signal before the server has its own handlers; and it raises once more what it took, when all is done.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    host, port = listening.getsockname()[:2]
    log.info("serving %s on http://%s:%d", settings.served_model_name, f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listening])
    return exit_status


def _publish_blocks(config: KvEventsConfig) -> Callable[[Sequence[BlockEvent]], None]:
    if not config.publishes:
        return lambda events: None
    publisher = KvPublisher(config)
    log.info("KV events, and in them the tokens of prompts, go to all who connect to %s", config.endpoint)
    return publisher.publish


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = open_socket(host, port, UNREAD)
    except OSError as exc:
        raise OSError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    listening.set_inheritable(False)
    return listening
