# The engine's HTTP front on a real port inside the test, in front of a scripted engine process and a tiny tokenizer.

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_backend.server.app import create_app
from gpu_backend.server.checkpoint.checkpoint import load_checkpoint
from gpu_backend.server.client.announcer import FleetSettings
from gpu_backend.server.client.engine_client import EngineClient, EngineState
from gpu_backend.server.front import build_front
from gpu_backend.server.serving import Server, announcer_of
from gpu_backend.server.settings import FrontSettings
from gpu_backend.step.config import engine_config
from protocol.serving.http_server import HttpProtocol
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until

ALPHABET = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
END = 256  # the token that ends a reply; the others are bytes, in the order of the byte-level alphabet
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
# Of a model that reads pictures: tokens of 8 × 8 pixels, at most 64 pixels a side.
SEEING_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text if part.type == 'text' else '[IMG]' }}{% endfor %}{% endif %}"
    "{% endfor %}<assistant>"
)
IMAGE, LINE, IMAGE_END = 257, 258, 259
SMALL = {"vocab_size": 260, "hidden_size": 2, "eos_token_id": END}
VISION = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": IMAGE,
    "text_config": SMALL
    | {"model_type": "mistral", "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    | {"intermediate_size": 2, "head_dim": 2},
    "vision_config": {"model_type": "pixtral", "patch_size": 4, "image_size": 64},
}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def token_ids(text: str) -> list[int]:
    """Return the tokens of ``text``: one for each byte."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [ALPHABET[character] for part, _ in split for character in part]


def write_small_files(folder: Path, chat_template: str | None = TEMPLATE, config: Any = None) -> Path:
    """Write what the front reads of a checkpoint, without weights: one token per byte, and those of pictures."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(ALPHABET), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<|end|>"] if chat_template != SEEING_TEMPLATE else ["<|end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(SMALL | (config or {})))
    return folder


@contextlib.contextmanager
def running_front(
    folder: Path,
    engine: FakeEngine,
    api_key: str | None = None,
    max_waiting: int = 64,
    port: int = 0,
    fleet: FleetSettings | None = None,
    warm_up: tuple[str, ...] = (),
    instance_id: str = "front-1",
    allow_model_loading: bool = False,
    **engine_settings: Any,
) -> Iterator[str]:
    """Serve the model "tiny" with ``engine`` behind it and give the URL; the engine is ready, if it is to be.

    ``fleet``: where it announces itself, once it has answered ``warm_up``. ``engine_settings``: of ``EngineConfig``."""
    settings = FrontSettings(
        engine=engine_config(model=str(folder), **engine_settings),
        served_model_name="tiny",
        instance_id=instance_id,
        api_key=api_key,
        fleet=fleet,
        warm_up=warm_up,
        allow_model_loading=allow_model_loading,
    )
    client = EngineClient(settings.engine, max_waiting, start_process=engine.start)
    front = build_front(settings, load_checkpoint(folder), client)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        announcer = announcer_of(front, *listening.getsockname()[:2])
        app = create_app(front, announcer)
        server = Server(
            uvicorn.Config(app, http=HttpProtocol, log_config=None, access_log=False, timeout_graceful_shutdown=1),
            announcer,
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        assert server.started, "the front did not start"
        until(lambda: not engine.is_ready or client.state is not EngineState.STARTING)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
