# POST /v1/embeddings.

from __future__ import annotations

import time
from array import array
from base64 import b64encode
from sys import byteorder
from typing import Any

from litestar import Request, post
from litestar.types import ASGIApp
from msgspec import Struct

from gpu_backend.server.answers import send_json
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.front import Front, front_of, request_id_of
from gpu_backend.server.requests.bodies import Sender, read_body, read_sender
from gpu_backend.server.requests.prompts import encode_prompts, split_prompts
from gpu_backend.server.wire import UsageBody, encode
from gpu_backend.step.messages import Embed, Embedding
from protocol.embeddings import EmbeddingRequest
from protocol.errors import UnsupportedParameter, invalid_param
from protocol.serving.leaving import ended_when_client_leaves
from protocol.serving.off_loop import off_loop


@post("/v1/embeddings", status_code=200)
async def create_embeddings(request: Request[Any, Any, Any]) -> ASGIApp:
    """Turn texts into vectors of length one, in the order of the input."""
    front = front_of(request)
    max_model_len = front.max_model_len
    raw = await request.body()
    body, _ = await off_loop(len(raw), lambda: read_body(raw, EmbeddingRequest))
    adapter = front.check_model(body.model)
    if not all(split_prompts(body.input)):
        raise invalid_param("input", "'input' holds an empty text, which has no meaning to embed.")
    if body.dimensions not in (None, front.checkpoint.hidden_size):
        raise UnsupportedParameter(
            f"This model's vectors have {front.checkpoint.hidden_size} dimensions and cannot be shortened.",
            param="dimensions",
        )
    prompts = await encode_prompts(front.checkpoint, body.input, max_model_len, room_for_reply=0, param="input")
    sender = read_sender(request.headers)
    request_id = front.new_id()
    commands = [
        Embed(f"{request_id}-{i}", prompt, sender.tenant, sender.tier, sender.priority, sender.weight, adapter)
        for i, prompt in enumerate(prompts)
    ]
    return EmbeddingResponse(front, commands, body, sender, request_id_of(request))


class EmbeddingResponse(Struct, eq=False):
    """Waits for all vectors of a request, and gives them up if the client leaves."""

    _front: Front
    _commands: list[Embed]
    _body: EmbeddingRequest
    _sender: Sender
    _request_id: str

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Embed, and answer."""
        started = time.monotonic()
        with ended_when_client_leaves(scope, receive):
            self._front.refuse_if_gone()
            call = self._front.engine.call(self._commands, fails_over=self._sender.fails_over)
            try:
                found: dict[str, Embedding] = {}
                while not call.is_finished:
                    for event in await call.events():
                        assert isinstance(event, Embedding)
                        if event.error is not None:
                            raise EngineFailed(f"The engine could not embed this input: {event.error}.")
                        found[event.request_id] = event
            finally:
                call.close()
            embeddings = [found[command.request_id] for command in self._commands]
            usage = UsageBody.of_embeddings(
                sum(len(command.prompt_token_ids) for command in self._commands),
                [embedding.timings for embedding in embeddings if embedding.timings is not None],
            )
            latency, tenant = time.monotonic() - started, self._sender.tenant
            self._front.metrics.count_embeddings(usage, len(embeddings), latency=latency, tenant=tenant)
            await send_json(send, self._encode(embeddings, usage), self._request_id)

    def _encode(self, embeddings: list[Embedding], usage: UsageBody) -> bytes:
        in_base64 = self._body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": to_base64(e.vector) if in_base64 else e.vector}
            for i, e in enumerate(embeddings)
        ]
        return encode({"object": "list", "data": data, "model": self._body.model, "usage": usage})


def to_base64(vector: tuple[float, ...]) -> str:
    """Return a vector as base64 of little-endian float32."""
    floats = array("f", vector)
    if byteorder == "big":
        floats.byteswap()
    return b64encode(floats.tobytes()).decode()


handlers = [create_embeddings]
