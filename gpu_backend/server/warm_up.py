# Prompts that an engine answers to itself, before gateways hear that it takes calls: what a model does for the first
# time takes longer, and one that cannot answer at all should never be asked by a client.

from __future__ import annotations

import asyncio
import logging

import msgspec

from gpu_backend.server.client.engine_client import EngineState
from gpu_backend.server.client.errors import EngineFailed
from gpu_backend.server.front import Front
from gpu_backend.server.requests.prompts import encode_chat, encode_prompts, render_chat
from gpu_backend.step.messages import FinishReason, Generate, NewTokens
from gpu_backend.step.sampling_params import SamplingParams
from protocol.chat import Message

log = logging.getLogger("gpu_backend")

LOOK_EVERY = 0.05  # seconds until the model is loaded
LONGEST_REPLY = 32  # tokens


def read_warm_up(text: str) -> tuple[str, ...]:
    """Return the prompts that JSON says. Raises ``ValueError`` for what is no list of texts."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.MsgspecError as exc:
        raise ValueError(f"warm_up: {text[:100]} is no JSON list of prompts: {exc}") from exc


async def warm_up(front: Front) -> None:
    """Wait for the model, and answer each prompt of the settings.

    Raises ``EngineFailed``, ``Overloaded`` or ``BadRequest`` if one has no answer.
    """
    await _loaded(front)
    for number, prompt in enumerate(front.settings.warm_up):
        await _answer(front, f"warm-up-{number}", await _tokens(front, prompt))
    if front.settings.warm_up:
        log.info("answered %d prompts to warm up", len(front.settings.warm_up))


async def _loaded(front: Front) -> None:
    while True:
        if front.engine.state is not EngineState.STARTING:
            return
        await asyncio.sleep(LOOK_EVERY)


async def _tokens(front: Front, prompt: str) -> tuple[int, ...]:
    checkpoint, longest = front.checkpoint, front.max_model_len
    if checkpoint.chat is not None:
        return await encode_chat(checkpoint, render_chat(checkpoint, [Message(role="user", content=prompt)]), longest)
    (tokens,) = await encode_prompts(checkpoint, prompt, longest, room_for_reply=1, param="prompt")
    return tokens


async def _answer(front: Front, request_id: str, tokens: tuple[int, ...]) -> None:
    """Let the engine answer, past the metrics: no client asked."""
    most = min(LONGEST_REPLY, front.max_model_len - len(tokens))
    stops = frozenset(front.checkpoint.eos_token_ids)
    sampling = SamplingParams(max_tokens=most, temperature=0.0, stop_token_ids=stops)
    call = front.engine.call([Generate(request_id, tokens, sampling)])
    try:
        while not call.is_finished:
            for event in await call.events():
                if isinstance(event, NewTokens) and event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise EngineFailed(f"The engine could not finish a reply: {event.error}.")
    finally:
        call.close()
